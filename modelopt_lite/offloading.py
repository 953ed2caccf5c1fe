"""What an `OffloadConfig`, or the `OffloadPlan` of `auto_config`, means for a run.

A run brings each unit in once, computes, quantizes and lets it go. Of a configuration count which
parameters come and go, and how many bytes of weights may be in memory; the other fields tell how
passes that repeat are timed and overlapped, and a run repeats none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from modelopt_lite.errors import RecipeError
from modelopt_lite.job import Job, split_layers
from modelopt_lite.offload.auto import OffloadPlan
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.selection import Selection, select

OffloadChoice = Literal["auto", "none"] | OffloadConfig | OffloadPlan

# Fields that a run goes by; shm_enabled is refused.
_COUNT = {"enabled", "include_patterns", "exclude_patterns", "max_gpu_mem_fraction", "gpu_device"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloading:
    """How a run moves weights.

    Attributes:
        stream: Units come and go; else the whole model is in memory.
        share: The most weights in memory, as a part of the device's;
        weights: or in bytes. None: no limit.
        notes: What of a configuration does not count here.
    """

    stream: bool = True
    share: float | None = None
    weights: int | None = None
    notes: tuple[str, ...] = ()


def check_offload(offload: OffloadChoice) -> None:
    """Refuse what is no choice, and what a run cannot do.

    Raises:
        RecipeError: It names the value, or the field.
    """
    if isinstance(offload, str) and offload in ("auto", "none"):
        return
    if not isinstance(offload, OffloadConfig | OffloadPlan):
        raise RecipeError(
            f'offload must be "auto", "none", an OffloadConfig or an OffloadPlan, got {offload!r}'
        )
    if _config(offload).shm_enabled:
        raise RecipeError(
            "offload: shm_enabled=True shares weights between processes that keep them, and a run "
            "keeps none; set it to False"
        )


def apply_offload(job: Job, offload: OffloadChoice) -> Offloading:
    """Have a job follow a choice: set which units stay once read, and how experts come in.

    A unit of the run (a layer, a norm, an embedding, the head, a part of experts) stays where the
    patterns select none of its parameters; the bytes of the export are the same.

    Args:
        job: Its ``resident`` is set, and its plans are split where experts come in apart.
        offload: As `quantize_and_export` takes it.

    Raises:
        RecipeError: Patterns that match nothing; a device that is not the job's.
    """
    if isinstance(offload, str):
        return Offloading(stream=offload != "none")
    config = _config(offload)
    if not config.enabled:
        return Offloading(stream=False, notes=("offload: enabled=False holds the whole model",))
    _check_device(job, config)
    notes = _ignored(config)
    share, weights = config.max_gpu_mem_fraction, None
    if isinstance(offload, OffloadPlan):  # the fraction was made of its budget
        share, weights = None, offload.budget
    if job.plan.by_tensor:
        notes.append(
            "offload: this recipe needs no calibration, and goes tensor by tensor whatever the "
            "patterns are"
        )
        return Offloading(notes=tuple(notes))
    selection = select(job.model, config.include_patterns, config.exclude_patterns)
    errors = [note.message for note in selection.warnings if note.level == "ERROR"]
    if errors:
        raise RecipeError(f"offload: {'; '.join(errors)}")
    notes += [f"offload: {note.message}" for note in selection.warnings]
    size = _experts_at_a_time(offload, selection)
    if size and job.runs_twice:
        notes.append("offload: experts come in together, for a second run with rounded inputs")
        size = None
    for plan in job.plans.values() if size else ():
        split_layers(plan, job.model, int(size or 1))
    algorithm = job.algorithm()
    if algorithm is not None and algorithm.sequential:
        notes.append("offload: layers are put back quantized, so none stays as it was read")
    else:
        job.resident = _staying(job, selection)
    return Offloading(share=share, weights=weights, notes=tuple(notes))


def _config(offload: OffloadConfig | OffloadPlan) -> OffloadConfig:
    return offload.config if isinstance(offload, OffloadPlan) else offload


def _check_device(job: Job, config: OffloadConfig) -> None:
    index = job.device.index
    if job.device.type != "cpu" and index is not None and index != config.gpu_device:
        raise RecipeError(
            f"offload: gpu_device is {config.gpu_device}, and device is {str(job.device)!r}; give "
            "the same number twice"
        )


def _ignored(config: OffloadConfig) -> list[str]:
    """Name the fields that were set and do not count."""
    fields = OffloadConfig.model_fields
    names = [
        name
        for name, info in fields.items()
        if name not in _COUNT
        and getattr(config, name) != info.get_default(call_default_factory=True)
    ]
    if not names:
        return []
    return [f"offload: not for a run, which reads each unit once: {', '.join(names)}"]


def _experts_at_a_time(offload: OffloadConfig | OffloadPlan, selection: Selection) -> int | None:
    """How many experts come in together, where they are units of their own."""
    if isinstance(offload, OffloadPlan):
        return max((len(group.experts) for group in offload.expert_groups), default=None)
    for path in selection.units:
        container, _, last = path.rpartition(".")
        if last.isdecimal() and container.endswith("experts"):
            return 1
    return None


def _staying(job: Job, selection: Selection) -> frozenset[str]:
    resolve = job.plan.names.resolve
    moved = {resolve(name) for names in selection.offloaded.values() for name in names}
    return frozenset(
        unit.name
        for unit in job.plan.units
        if unit.name and moved.isdisjoint(resolve(entry) for entry in unit.entries)
    )
