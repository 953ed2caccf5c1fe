"""How often a run reads what it cannot keep: experts that come in a few at a time.

Passes run through each part of a layer's experts once, and without a search it is written then.
Where every expert sees every token, all tokens run through all parts, and then those that the
router sends there. A search chooses for a whole layer: it reads the experts, which left memory,
again from the source, matrix by matrix, as often as it looks at them.
"""

from __future__ import annotations

from modelopt_lite.calibrate.algorithm import Algorithm
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.job import Job

_QUANTIZED = 2  # the scales of a matrix, which it may share, come before its codes


def expert_reads(job: Job) -> tuple[int, int]:
    """Return how often an expert's tensor is read, at most, and the bytes beyond the first time.

    Experts that saw no token may be read less often. (1, 0) where each is read once.
    """
    parts = [unit for unit in job.plan.units if unit.parent is not None]
    if not parts or job.degrees is not None:
        return 1, 0
    algorithm = job.algorithm()
    # Passes run through the quantized layer: parts come in again, and get what was chosen.
    sequential = algorithm is not None and algorithm.sequential
    passes = 1 + (sequential or job.all_experts)
    times: dict[str, int] = {}
    if algorithm is not None:
        times = {name: passes + n for name, n in _searched(job, algorithm).items()}
    store = job.store()
    for unit in parts:
        for name in store.sources_of(unit):
            # Beside a search, what is not quantized is copied when all layers are done.
            times.setdefault(name, passes + (algorithm is not None))
    again = sum(
        (count - 1) * info.nbytes
        for name, count in times.items()
        for info in job.source.stored(name)
    )
    return max(times.values(), default=1), again


def _searched(job: Job, algorithm: Algorithm) -> dict[str, int]:
    """Return how often a search reads tensors of experts in parts, passes not counted."""
    apart = not job.plan.recipe.algorithm.smooths  # else no format is left out of a search
    parents = {unit.name: unit.parent or unit.name for unit in job.plan.units}
    seen: set[tuple[str, str]] = set()
    times: dict[str, int] = {}
    for m in job.plan.matrices:
        if parents[m.unit] != m.unit:
            fmt = FORMATS[m.format]
            chosen = 0 if apart and algorithm.problem(fmt) else algorithm.reads(fmt)
            times[m.source] = algorithm.sequential + chosen + _QUANTIZED * len(job.plans)
            first = (parents[m.unit], m.reads) not in seen
            if first and not apart:  # tells the dtype of all that share a scale
                times[m.source] += 1
        seen.add((parents[m.unit], m.reads))
    return times
