"""Which tensors on disk make up which parameter of the model, in the installed transformers.

Since release 5, transformers holds many checkpoints' tensors under other names and in other shapes
than the disk does: the experts of a layer, one tensor each on disk, are one fused parameter in
memory. Its own conversion rules tell how; an older release, or remote code, has none, and names are
then equal. Every rule that only stacks and concatenates is turned into regions of the parameter, so
that a tensor can be read from the disk straight to its place.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from modelopt_lite.checkpoint.ties import tied_entries
from modelopt_lite.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn

Region = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor on disk and the region of the parameter that it fills; ``()`` is all of it."""

    source: str
    region: Region


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors on disk that become one or more entries of the model together.

    Exactly one of ``pieces`` and ``convert`` is set: with pieces, each source is a region of the
    single target; otherwise ``convert`` maps the sources' values to the targets' values. Where it
    only swaps the last two axes of a single stack, ``turned`` says so.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    pieces: tuple[Piece, ...] = ()
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    turned: bool = False


@dataclass(frozen=True, slots=True)
class NameMap:
    """The whole correspondence between a checkpoint and a model.

    Attributes:
        groups: Every group, in the order of the first source.
        by_target: The group that fills an entry of the model.
        by_source: The group that a tensor on disk belongs to.
        places: Tensor on disk -> the entry and the region of it that it fills; see `place`.
        aliases: Entry of the model -> the entry it is tied to, for entries without a tensor.
        unmapped: Tensors on disk that the model does not take, in order.
    """

    groups: tuple[TensorGroup, ...]
    by_target: dict[str, TensorGroup]
    by_source: dict[str, TensorGroup]
    places: dict[str, tuple[str, Region]]
    aliases: dict[str, str] = field(default_factory=dict)
    unmapped: tuple[str, ...] = ()

    def resolve(self, entry: str) -> str:
        """Return the entry whose group holds this entry's values: itself, or what it is tied to."""
        return self.aliases.get(entry, entry)

    def place(self, source: str) -> tuple[str, Region] | None:
        """Return (entry, region) that a tensor on disk fills, or None where it fills none alone."""
        return self.places.get(source)


def natural_key(name: str) -> str:
    """Sort key under which ``layers.2`` comes before ``layers.10``.

    One string: a tuple of parts would take ten times the memory of the name.
    """
    parts = [f"\2{len(p):04}{p}" if p.isdecimal() else p for p in name.split(".")]
    return "\1".join(parts)


def map_names(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> NameMap:
    """Match a checkpoint's tensors with a model's parameters and persistent buffers.

    Args:
        model: The model, usually on the meta device.
        shapes: Name -> shape of each tensor on disk.

    Raises:
        CheckpointError: The model needs an entry that no tensor gives, or a shape disagrees.
    """
    entries = {name: tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items()}
    collected = _collect(model, entries, sorted(shapes, key=natural_key))
    groups = [_group(model, target, found, shapes, entries) for target, found in collected.items()]
    by_target: dict[str, TensorGroup] = {}
    for group in groups:
        for target in group.targets:
            by_target[target] = group
    by_source = {source: group for group in groups for source in group.sources}
    places: dict[str, tuple[str, Region]] = {}
    for group in groups:
        regions = {piece.source: piece.region for piece in group.pieces}
        places.update({s: (group.targets[0], regions.get(s, ())) for s in group.sources})
    aliases = tied_entries(model, entries, by_target)
    _check_missing(model, entries, by_target, aliases)
    return NameMap(
        groups=tuple(groups),
        by_target=by_target,
        by_source=by_source,
        places=places,
        aliases=aliases,
        unmapped=tuple(name for name in shapes if name not in by_source),
    )


@dataclass(slots=True)
class _Found:
    """The tensors of one target, under the rule that takes them there (None: as they are)."""

    rule: Any
    by_pattern: dict[str, list[str]] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for names in self.by_pattern.values() for name in names)


def _collect(
    model: nn.Module, entries: Mapping[str, tuple[int, ...]], names: Iterable[str]
) -> dict[str, _Found]:
    """Gather, for each target, the sources in natural order under the pattern that matched them."""
    renamings, converters = _rules(model)
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    collected: dict[str, _Found] = {}
    for name in names:
        target, rule, pattern = _rename(name, renamings, converters)
        target = _with_prefix(target, prefix, entries)
        if target not in entries and (plain := _with_prefix(name, prefix, entries)) in entries:
            target, rule, pattern = plain, None, None
        if target not in entries:
            continue
        found = collected.setdefault(target, _Found(rule))
        if found.rule is not rule or (rule is None and found.by_pattern):
            first = next(iter(found.sources))
            raise CheckpointError(
                f"two tensors both claim the parameter {target!r}: {first!r} and {name!r}; "
                "remove one of them from the checkpoint"
            )
        found.by_pattern.setdefault(pattern or name, []).append(name)
    return collected


def _rules(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return transformers' renamings and converters for this model, in order; empty before 5.0."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        mapping = getattr(model, "_checkpoint_conversion_mapping", None) or {}
        return [_RegexRenaming(old, new) for old, new in mapping.items()], []
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return [rule for rule in rules if not isinstance(rule, WeightConverter)], converters


class _RegexRenaming:
    """A renaming of transformers 4.x, with the method that 5.x renamings have."""

    def __init__(self, pattern: str, replacement: str) -> None:
        self._pattern = re.compile(pattern)
        self._replacement = replacement

    def rename_source_key(self, key: str) -> tuple[str, str | None]:
        return self._pattern.sub(self._replacement, key, count=1), None


def _rename(
    name: str, renamings: list[Any], converters: list[Any]
) -> tuple[str, Any | None, str | None]:
    """Apply every renaming, then the first converter that matches, as transformers' loader does."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed, converter, pattern
    return name, None, None


def _with_prefix(name: str, prefix: str, entries: Mapping[str, tuple[int, ...]]) -> str:
    """Add or drop the base model's prefix where only that makes the name an entry."""
    if not prefix or name in entries:
        return name
    if name.startswith(f"{prefix}.") and name.removeprefix(f"{prefix}.") in entries:
        return name.removeprefix(f"{prefix}.")
    return f"{prefix}.{name}" if f"{prefix}.{name}" in entries else name


def _group(
    model: nn.Module,
    target: str,
    found: _Found,
    shapes: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, tuple[int, ...]],
) -> TensorGroup:
    if found.rule is None:
        (source,) = found.sources
        _check_shape(source, shapes[source], target, entries[target])
        return TensorGroup((source,), (target,), pieces=(Piece(source, ()),))
    pieces = _regions(target, found, shapes, entries[target])
    if pieces is not None:
        return TensorGroup(found.sources, (target,), pieces=tuple(pieces))
    group = _converted_group(model, target, found, entries)
    return replace(group, turned=_is_turned(found, shapes, entries[target]))


def _is_turned(
    found: _Found, shapes: Mapping[str, tuple[int, ...]], target_shape: tuple[int, ...]
) -> bool:
    """Whether the rule does nothing but swap the last two axes of one stack."""
    if len(found.sources) != 1 or len(target_shape) != 3:
        return False
    axes = [
        {op.dim0 % 3, op.dim1 % 3} if type(op).__name__ == "Transpose" else None
        for op in found.rule.operations
    ]
    count, rows, columns = target_shape
    return axes == [{1, 2}] and shapes[found.sources[0]] == (count, columns, rows)


def _lies_right(
    found: _Found, shapes: Mapping[str, tuple[int, ...]], target_shape: tuple[int, ...]
) -> bool:
    """Whether the rule would turn a tensor that lay the other way round, and it does not."""
    kinds = [(type(op).__name__, getattr(op, "check_dims", False)) for op in found.rule.operations]
    return kinds == [("Transpose", True)] and [shapes[s] for s in found.sources] == [target_shape]


def _regions(
    target: str,
    found: _Found,
    shapes: Mapping[str, tuple[int, ...]],
    target_shape: tuple[int, ...],
) -> list[Piece] | None:
    """Turn stacking and concatenation into regions; None for any other operation."""
    kinds = [(type(op).__name__, getattr(op, "dim", None)) for op in found.rule.operations]
    if _lies_right(found, shapes, target_shape):
        return [Piece(found.sources[0], ())]
    stacks = kinds[:1] == [("MergeModulelist", 0)]
    rest = kinds[1:] if stacks else kinds
    if len(found.rule.target_patterns) != 1 or not (
        (stacks and not rest) or (len(rest) == 1 and rest[0][0] == "Concatenate")
    ):
        return None
    axis = int(rest[0][1] or 0) if rest else None
    ordered = [p for p in found.rule.source_patterns if p in found.by_pattern]
    pieces, end = [], 0
    for pattern in ordered:
        if stacks:
            _check_numbers(found.by_pattern[pattern])
        for position, source in enumerate(found.by_pattern[pattern]):
            shape = (1, *shapes[source]) if stacks else shapes[source]
            head = (position,) if stacks else ()
            if axis is None:
                pieces.append(Piece(source, head))
                continue
            start, width = end, shape[axis]
            if not stacks or position == len(found.by_pattern[pattern]) - 1:
                end += width
            pieces.append(Piece(source, _region(head, axis, start, start + width)))
    _check_coverage(target, found, pieces, shapes, target_shape)
    return pieces


@cache  # the same in every layer
def _region(head: tuple[int, ...], axis: int, start: int, stop: int) -> Region:
    return (*head, *[slice(None)] * (axis - len(head)), slice(start, stop))


def _check_numbers(names: list[str]) -> None:
    """Demand 0, 1, 2, ... where names differ: only their order says where each one goes."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    numbers = next((column for column in columns if len(set(column)) > 1), ("0",))
    if list(numbers) != [str(number) for number in range(len(numbers))]:
        raise CheckpointError(
            f"the tensors {names[0]!r} to {names[-1]!r} are not numbered from 0 without a gap "
            f"({', '.join(numbers[:20])}); the checkpoint is incomplete: download it again"
        )


def _check_coverage(
    target: str,
    found: _Found,
    pieces: list[Piece],
    shapes: Mapping[str, tuple[int, ...]],
    target_shape: tuple[int, ...],
) -> None:
    import torch

    whole = torch.empty(target_shape, device="meta")
    for piece in pieces:
        try:
            region = tuple(whole[piece.region].shape)
        except IndexError:
            region = ()
        _check_shape(piece.source, shapes[piece.source], target, region, part=True)
    have = sum(math.prod(shapes[piece.source]) for piece in pieces)
    if have != math.prod(target_shape):
        counts = {pattern: len(names) for pattern, names in found.by_pattern.items()}
        raise CheckpointError(
            f"the tensors for {target!r} {list(target_shape)} hold {have} values, "
            f"{math.prod(target_shape)} are needed; found per pattern: {counts}; "
            "the checkpoint is incomplete: download it again"
        )


def _converted_group(
    model: nn.Module, target: str, found: _Found, entries: Mapping[str, tuple[int, ...]]
) -> TensorGroup:
    """A group for any other conversion rule, run by transformers' own code."""
    rule, by_pattern = found.rule, found.by_pattern

    def convert(values: dict[str, Tensor]) -> dict[str, Tensor]:
        run = copy.deepcopy(rule)
        for pattern, names in by_pattern.items():
            for name in names:
                run.add_tensor(target, name, pattern, values[name])
        made = run.convert(target, model=model, config=getattr(model, "config", None))
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    targets: tuple[str, ...] = (target,)
    if len(rule.target_patterns) > 1:
        first = rule.target_patterns[0]
        targets = tuple(target.replace(first, other, 1) for other in rule.target_patterns)
        targets = tuple(name for name in targets if name in entries)
    return TensorGroup(found.sources, targets, convert=convert)


def _check_missing(
    model: nn.Module,
    entries: Mapping[str, tuple[int, ...]],
    filled: Mapping[str, TensorGroup],
    aliases: Mapping[str, str],
) -> None:
    ignore = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = [
        name
        for name in entries
        if name not in filled
        and name not in aliases
        and not any(re.search(pattern, name) for pattern in ignore)
    ]
    if missing:
        shown = ", ".join(repr(name) for name in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(
            f"no tensor of the checkpoint gives {shown}{more}, which {type(model).__name__} needs; "
            "the checkpoint is incomplete or of another architecture: compare its tensor names "
            "with config.json, or download it again"
        )


def _check_shape(
    source: str,
    shape: tuple[int, ...],
    target: str,
    wanted: tuple[int, ...],
    *,
    part: bool = False,
) -> None:
    if tuple(shape) != tuple(wanted):
        where = "its part of " if part else ""
        raise CheckpointError(
            f"tensor {source!r} has shape {list(shape)}, but {where}{target!r} is {list(wanted)}; "
            "config.json and the weights do not belong together"
        )
