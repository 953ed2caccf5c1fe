"""How often a run reads what it cannot keep: experts that come in a few at a time, in a search.

Passes run through each part of a layer's experts once, and without a search it is written then. A
search chooses for a whole layer: it reads the experts, which left memory, again from the source,
matrix by matrix, as often as it looks at them.
"""

from __future__ import annotations

from modelopt_lite.calibrate.algorithms import make_algorithm
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.job import Job

_QUANTIZED = 2  # the scales of a matrix, which it may share, come before its codes


def expert_reads(job: Job) -> tuple[int, int]:
    """Return how often an expert's tensor is read, at most, and the bytes beyond the first time.

    Experts that saw no token may be read less often. (1, 0) where each is read once.
    """
    algorithm = make_algorithm(job.plan.recipe.algorithm, job.plan.numerics)
    parts = {unit.name for unit in job.plan.units if unit.parent is not None}
    if algorithm is None or not parts or job.degrees is not None:
        return 1, 0
    apart = not job.plan.recipe.algorithm.smooths  # else no format is left out of a search
    # Passes run through the quantized layer: parts come in again, and get what was chosen.
    passes = 1 + algorithm.sequential
    parents = {unit.name: unit.parent or unit.name for unit in job.plan.units}
    seen: set[tuple[str, str]] = set()
    times: dict[str, int] = {}
    for m in job.plan.matrices:
        if m.unit in parts:
            fmt = FORMATS[m.format]
            chosen = 0 if apart and algorithm.problem(fmt) else algorithm.reads(fmt)
            exports = _QUANTIZED * len(job.plans)
            times[m.source] = passes + algorithm.sequential + chosen + exports
            first = (parents[m.unit], m.reads) not in seen
            if first and not apart:  # tells the dtype of all that share a scale
                times[m.source] += 1
        seen.add((parents[m.unit], m.reads))
    store = job.store()
    for unit in job.plan.units:
        if unit.parent is not None:
            for name in store.sources_of(unit):
                times.setdefault(name, passes + 1)  # copied when all layers are done
    again = sum(
        (count - 1) * info.nbytes
        for name, count in times.items()
        for info in job.source.stored(name)
    )
    return max(times.values(), default=1), again
