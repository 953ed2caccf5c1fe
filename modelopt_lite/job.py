"""A prepared run: the source, its model without weights, and the plan; checked, nothing written."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelopt_lite.build import build_meta_model
from modelopt_lite.calibrate.algorithm import Algorithm
from modelopt_lite.calibrate.algorithms import make_algorithm
from modelopt_lite.calibrate.products import fast_products
from modelopt_lite.checkpoint.dequant import Source, model_dtype, open_source
from modelopt_lite.checkpoint.shards import ExportLayout, plan_layout
from modelopt_lite.checkpoint.sidecars import sidecar_files
from modelopt_lite.device import move_buffers, pick_device
from modelopt_lite.dialects.base import Dialect
from modelopt_lite.dialects.known import make_dialect
from modelopt_lite.dialects.modelopt import ModelOpt
from modelopt_lite.errors import CheckpointError, RecipeError
from modelopt_lite.export.translate import translate
from modelopt_lite.formats.base import Numerics
from modelopt_lite.models import get_spec
from modelopt_lite.naming import UnclearNamesError, structure_from_names
from modelopt_lite.offload.expert_parts import joined, split_experts, split_stacks
from modelopt_lite.offload.store import WeightStore
from modelopt_lite.offload.units import Unit
from modelopt_lite.parallel.degrees import Degrees
from modelopt_lite.parallel.spec import adapter
from modelopt_lite.plan import Plan, make_plan
from modelopt_lite.process import collector_paused
from modelopt_lite.recipes import Recipe
from modelopt_lite.sanity import check_counts
from modelopt_lite.structure import Structure, TensorShape, structure_of
from modelopt_lite.tensor_units import UNIT_BYTES, needs_data, stream_tensors


@dataclass(slots=True)
class Job:
    """What a run works on.

    ``resident`` are units that stay in memory once they were read.
    ``model`` is None where the plan was made without one; ``also`` has the plans of further
    dialects, written in the same run. ``degrees`` says how experts are sharded over ranks, of which
    this process is ``rank``; None for one process. A part has at most ``share`` experts then.
    ``all_experts``: every expert sees every token while the model is calibrated.
    """

    folder: Path
    source: Source
    model: Any
    model_type: str
    plan: Plan
    device: torch.device
    also: tuple[Plan, ...] = ()
    degrees: Degrees | None = None
    rank: int = 0
    share: int = 0
    resident: frozenset[str] = frozenset()
    all_experts: bool = False

    @property
    def own_units(self) -> list[Unit]:
        """The plan's units but for the experts of other ranks; without data they are dealt out."""
        if self.plan.by_tensor and self.degrees is not None:
            return self.plan.units[self.rank :: self.degrees.world_size]
        return [unit for unit in self.plan.units if self.owns(unit)]

    def owns(self, unit: Unit) -> bool:
        """Whether this rank brings a unit in: it is no part of the experts of another rank."""
        if self.degrees is None or unit.parent is None or unit.experts is None:
            return True
        own = self.degrees.experts_of(self.rank, unit.count)
        return unit.experts.start in own

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of each dialect, by its folder below the export's; "" for a single one."""
        plans = (self.plan, *self.also)
        return {plan.dialect.name if self.also else "": plan for plan in plans}

    @property
    def vocab_size(self) -> int:
        """How many token ids the model's embedding knows."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def runs_twice(self) -> bool:
        """Whether all batches run a second time, with rounded inputs; see `Algorithm`."""
        algorithm = self.algorithm()
        return algorithm is not None and algorithm.rounded

    def algorithm(self) -> Algorithm | None:
        """Return what chooses scales by the recipe; None where largest magnitudes do."""
        return make_algorithm(self.plan.recipe.algorithm, self.plan.numerics)

    @collector_paused()
    def layout(self, max_shard_size: int) -> ExportLayout:
        """Return where every byte of the export's weights will lie."""
        return ExportLayout(
            {
                folder: plan_layout(
                    ((o.name, o.dtype, o.shape) for o in plan.outputs), max_shard_size
                )
                for folder, plan in self.plans.items()
            }
        )

    def products(self) -> AbstractContextManager[Any]:
        """Return a context for the model's forward pass, in which products take the least time.

        With ``numerics="modelopt"`` they stay the model's own, bit for bit.
        """
        if self.plan.numerics == "modelopt":
            return nullcontext()
        return fast_products(self.device)

    def store(self) -> WeightStore:
        """Return what brings the model's weights in."""
        keeps = keep_dtype_rule(self.model, self.plan)
        return WeightStore(
            self.model,
            self.plan.names,
            self.source.read,
            keep_dtype=keeps,
            dtype_on_disk=lambda name: self.source.tensors[name].dtype,
            device=self.device,
            read_rows=self.source.read_rows,
        )

    def unit_bytes(self, layers: int = 2) -> tuple[int, int]:
        """Return the bytes of weights in memory at the least, and with so many layers at a time."""
        if self.plan.by_tensor:
            largest = max(self.unit_sizes())
            return largest, 2 * largest
        store = self.store()
        sizes = {u: store.bytes_of(u) for u in self.own_units if not self.stays(u)}
        whole = sum(store.bytes_of(unit) for unit in self.own_units if self.stays(unit))
        layer = max((size for unit, size in sizes.items() if unit.is_layer), default=0)
        largest = max(sizes.values(), default=0)
        return whole + largest, whole + max(layers * layer, largest)

    def stays(self, unit: Unit) -> bool:
        """Whether a unit stays in memory once it was read; what belongs to no unit does."""
        return not unit.name or unit.name in self.resident

    def unit_sizes(self) -> list[int]:
        """Return the bytes of each unit: of tensors on disk, decoded, or of the model's entries."""
        sizes = {name: info.nbytes for name, info in self.source.tensors.items()}
        if not self.plan.by_tensor:
            sizes = {n: t.nbytes for n, t in self.model.state_dict(keep_vars=True).items()}
        return [sum(sizes[entry] for entry in unit.entries) for unit in self.plan.units]

    def split_experts(self, room: int) -> int | None:
        """Have experts come in a few at a time where a layer takes more than ``room`` bytes.

        Returns:
            How many: as many as leave room to read as many ahead, or one, where that is too much
            still; None where no layer is too large, or none has experts that can come in so.
            A second run with rounded inputs has to know what enters all of them, and one through
            the quantized layer whether all tokens have been through them.
        """
        algorithm = self.algorithm()
        sequential = algorithm is not None and algorithm.sequential
        if self.runs_twice or (self.all_experts and sequential):
            return None
        store = self.store()
        sizes = []
        for layer in joined(self.plan.units):
            if not layer.is_layer or store.bytes_of(layer) <= room:
                continue
            rest, *parts = layer_parts(layer, self.plan, self.model, 1, stacks=self.share > 0)
            if parts:
                one = max(map(store.bytes_of, parts))
                left = room - store.bytes_of(rest)
                if self.share and self.share * one <= left:
                    continue
                sizes.append(left // (2 * one))
        if not sizes:
            return None
        size = max(1, min(sizes))
        if self.share:  # a part is one rank's
            size = max(d for d in range(1, min(size, self.share) + 1) if self.share % d == 0)
        for plan in self.plans.values():
            split_layers(plan, self.model, size, stacks=self.share > 0)
        return size

    def sidecar_bytes(self) -> int:
        """Return the size of the files that are copied."""
        return sum((self.folder / path).stat().st_size for path in sidecar_files(self.folder))


def layer_parts(
    unit: Unit, plan: Plan, model: nn.Module, size: int, *, stacks: bool = False
) -> list[Unit]:
    """Split a layer into its experts, ``size`` at a time, and the rest of it, which comes first.

    Experts that are rows of one tensor on disk are split only where ``stacks`` is given: such parts
    can be brought in, and where they stay one tensor, that is made of the whole.
    """
    if not unit.is_layer:
        return [unit]
    stacked = {m.entry for m in plan.matrices if m.stacked and not m.region}
    if stacked.isdisjoint(unit.entries):
        parts = split_experts(unit, model, plan.names, size)
        # Matrices of a tensor on disk that has all experts are cut from its rows.
        stacked = {m.entry for m in plan.matrices if m.region and m.expert is not None}
        if parts != [unit] or not stacks:
            return parts
    return split_stacks(unit, model, plan.names, stacked, size) if stacks else [unit]


def split_layers(plan: Plan, model: nn.Module, size: int, *, stacks: bool = False) -> None:
    """Have the experts of every layer come in ``size`` at a time, where that can be."""
    units: list[Unit] = []
    part_of: dict[tuple[str, int | None], str] = {}
    for unit in joined(plan.units):
        parts = layer_parts(unit, plan, model, size, stacks=stacks)
        units += parts
        for part in parts[1:]:
            for entry in part.entries:
                for expert in (part.experts or ()) if part.is_stacked else (None,):
                    part_of[entry, expert] = part.name
    plan.units = units
    plan.matrices = [
        replace(m, unit=part_of.get((m.entry, m.expert), m.unit)) for m in plan.matrices
    ]


@collector_paused()
def prepare(
    folder: Path,
    recipe: Recipe,
    *,
    model_type: str | None,
    numerics: Numerics,
    on_bad_shape: str,
    trust_remote_code: bool,
    device: str | torch.device | None,
    dialects: Sequence[str] = (ModelOpt.name,),
    sharded: bool = False,
) -> Job:
    """Read the source's headers, build its model without weights where it is needed, and plan.

    With ``sharded`` the model is built as its `EPSpec` has it for sharded experts.

    Raises:
        ModelOptLiteError: Anything that can be known before a weight is read.
    """
    if on_bad_shape not in ("error", "skip"):
        raise RecipeError(f'on_bad_shape must be "error" or "skip", got {on_bad_shape!r}')
    if numerics not in ("exact", "modelopt"):
        raise RecipeError(f'numerics must be "exact" or "modelopt", got {numerics!r}')
    source = open_source(folder)
    model_type = check_config(source, model_type, folder)
    structure, notes = None, []
    tensors = tensor_shapes(source)
    if not needs_data(recipe) and recipe.selects_by_class:
        notes.append("planned by the model: the recipe selects by class, which names do not tell")
    elif not needs_data(recipe):
        try:
            structure = read_names(source, model_type, trust_remote_code=trust_remote_code)
        except UnclearNamesError as error:
            notes.append(f"planned by the model in the installed transformers: {error}")
    if structure is None:
        spec = get_spec(model_type)
        adapt = adapter(spec, folder, trust_remote_code=trust_remote_code) if sharded else None
        model = build_meta_model(
            folder, source.config, trust_remote_code=trust_remote_code, adapt=adapt
        )
        structure = structure_of(model, tensors, spec)
    plan = make_plan(
        structure,
        tensors,
        recipe,
        model_type=model_type,
        numerics=numerics,
        on_bad_shape=on_bad_shape,
    )
    plan.notes += [*source.notes, *notes]
    place = pick_device(device)
    if not plan.needs_calibration:
        stream_tensors(plan, source.tensors, UNIT_BYTES)
    elif structure.model is not None:
        move_buffers(structure.model, place)
    plan, *also = in_dialects(plan, dialects, source.config)
    return Job(folder, source, structure.model, model_type, plan, place, tuple(also))


def in_dialects(plan: Plan, dialects: Sequence[str], config: Mapping[str, Any]) -> list[Plan]:
    """Return what a plan becomes in each dialect, for a model of a config.

    Raises:
        RecipeError: A dialect cannot keep what is planned; the rule is named.
    """
    return [translate(plan, dialect) for dialect in make_dialects(dialects, config)]


def make_dialects(names: Sequence[str], config: Mapping[str, Any]) -> list[Dialect]:
    """Return dialects by their names, for a model of a config."""
    dtype = model_dtype(config)
    return [make_dialect(name, dtype) for name in names]


def read_names(source: Source, model_type: str, *, trust_remote_code: bool) -> Structure:
    """Return the structure of a source's model, understood from the names of its tensors.

    Raises:
        UnclearNamesError: The model has to be asked.
        CheckpointError: config.json states a dtype of no model.
    """
    model_dtype(source.config)
    if trust_remote_code and source.config.get("auto_map"):
        raise UnclearNamesError("the checkpoint brings code, which is trusted")
    return structure_from_names(tensor_shapes(source), get_spec(model_type), source.config)


def tensor_shapes(source: Source) -> dict[str, TensorShape]:
    """Return shape and dtype of every tensor of a source; those that are alike share one object."""
    alike: dict[TensorShape, TensorShape] = {}
    shapes = {}
    for name, info in source.tensors.items():
        shape = TensorShape(info.shape, info.dtype)
        shapes[name] = alike.setdefault(shape, shape)
    return shapes


def check_config(source: Source, given: str | None, folder: Path) -> str:
    """Return the model type that a source's config names, before anything is built from it.

    Raises:
        CheckpointError: It names none, or another than the given one, or counts more layers,
            experts or heads than the weights can hold.
    """
    check_counts(source.config, [info.shape for info in source.tensors.values()], folder)
    found = source.config.get("model_type")
    if not isinstance(found, str) or not found:
        raise CheckpointError(
            f"{folder / 'config.json'} has no model_type; add the architecture's model_type, for "
            'example "llama"'
        )
    if given is not None and given != found:
        raise CheckpointError(
            f"model_type {given!r} was given, but {folder / 'config.json'} says {found!r}; give "
            "none, or the right checkpoint"
        )
    return found


def keep_dtype_rule(model: Any, plan: Plan) -> Callable[[str], bool]:
    """Return whether an entry keeps the disk's dtype inside of the model.

    The model's spec and transformers' own list of modules to keep in float32 say so.
    """
    ptq = plan.spec.ptq_spec if plan.spec else None
    leaves = set(ptq.keep_dtype_names if ptq else ())
    leaves.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    leaves.update(getattr(model, "_keep_in_fp32_modules", None) or ())

    def keeps(entry: str) -> bool:
        return any(part in leaves for part in entry.split("."))

    return keeps


def versions(job: Job) -> dict[str, str]:
    """Return what the bytes of an export depend on besides its inputs."""
    from modelopt_lite import __version__

    found = {
        "modelopt_lite": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if job.model is not None:
        found["transformers"] = importlib.metadata.version("transformers")
    if job.plan.needs_calibration:  # products round differently on another number of threads
        found["threads"] = str(torch.get_num_threads())
    return found
