"""Which modules of a model become units, and where each parameter belongs.

`select_raw` reads the patterns: every module that an include matches and that lies in no other
such module is a unit, unless an exclude matches it. `select` makes of that what can be run:

- a unit that is never called, because its class has no ``forward`` (ModuleList, ModuleDict), gives
  way to the outermost modules below it that have one;
- every parameter belongs to exactly one unit, or is resident: one that is reached in two units, or
  in a unit and outside of it, is resident, and so is one that is excluded under any of its names.

The path of a parameter is the first of its names, in document order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor, nn

from modelopt_lite.errors import OffloadConfigError
from modelopt_lite.offload.patterns import Pattern, match_name, parse_patterns, selects
from modelopt_lite.offload.places import (
    Holding,
    callable_below,
    has_forward,
    holdings,
    matches_module,
    paths_above,
    walk,
)

NoteCode = Literal[
    "include_unmatched",
    "exclude_unmatched",
    "all_excluded",
    "nothing_included",
    "class_on_dict",
    "container",
    "shared",
]


class SelectionNote(NamedTuple):
    """Something that the user should know. ``about`` holds the patterns or paths concerned."""

    level: Literal["WARNING", "ERROR"]
    code: NoteCode
    about: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Units, and the places of all parameters.

    Attributes:
        units: Path -> module, in document order. None for a dict, which has no modules.
        offloaded: Path of a unit -> paths of its parameters that may leave the device. A unit
            without any is a gap. Those of a dict stand under the path ``""``.
        resident: Paths of the parameters that stay on the device.
        buffers: Paths of the buffers; they stay, too.
        allowed: What the patterns let leave the device, in a unit or not: manual blocks draw on it.
        shared: Path of a parameter that is reached in several units, or in one and outside of it
            -> those units, ``""`` for outside.
        warnings: What the user should know.
    """

    units: Mapping[str, nn.Module]
    offloaded: Mapping[str, tuple[str, ...]]
    resident: tuple[str, ...]
    buffers: tuple[str, ...]
    allowed: frozenset[str]
    shared: Mapping[str, tuple[str, ...]]
    warnings: tuple[SelectionNote, ...]

    @property
    def owned_by_several_units(self) -> tuple[str, ...]:
        """Parameters that are offloaded in more than one unit; `select` leaves none."""
        seen: dict[str, int] = {}
        for path in (path for paths in self.offloaded.values() for path in paths):
            seen[path] = seen.get(path, 0) + 1
        return tuple(path for path, count in seen.items() if count > 1)

    @property
    def owned_and_resident(self) -> tuple[str, ...]:
        """Parameters that are both offloaded and resident; `select` leaves none."""
        owned = {path for paths in self.offloaded.values() for path in paths}
        return tuple(path for path in self.resident if path in owned)


def select(
    model: nn.Module | Mapping[str, Tensor], include: Sequence[str], exclude: Sequence[str] = ()
) -> Selection:
    """Choose units and resident parameters.

    Args:
        model: A model, or a dict of named tensors. Only its structure is read, nothing changed;
            it may be on the meta device.
        include: Patterns of what may leave the device. An empty list makes no units.
        exclude: Patterns of what stays.

    Raises:
        OffloadConfigError: A malformed pattern, or nothing but class patterns for a dict.
    """
    reader = _read(model, include, exclude)
    return reader if isinstance(reader, Selection) else reader.resolve()


def select_raw(
    model: nn.Module | Mapping[str, Tensor], include: Sequence[str], exclude: Sequence[str] = ()
) -> Selection:
    """Return what the patterns say and no more: `select` before containers and sharing.

    A parameter may be in several units, or in one and resident; one that is in none is resident.
    """
    reader = _read(model, include, exclude)
    return reader if isinstance(reader, Selection) else reader.raw()


def _read(
    model: nn.Module | Mapping[str, Tensor], include: Sequence[str], exclude: Sequence[str]
) -> _Reader | Selection:
    includes = parse_patterns(include, field="include_patterns")
    excludes = parse_patterns(exclude, field="exclude_patterns")
    if isinstance(model, nn.Module):
        return _Reader(model, includes, excludes)
    return _select_from_names(list(model), includes, excludes)


class _Reader:
    """Reads the patterns over one model."""

    def __init__(
        self, model: nn.Module, include: tuple[Pattern, ...], exclude: tuple[Pattern, ...]
    ) -> None:
        self.include, self.exclude = include, exclude
        self.places = list(walk(model, include, exclude))
        self.holdings = [h for p in self.places for h in holdings(p, include, exclude)]
        self.name: dict[int, str] = {}
        for h in self.holdings:
            self.name.setdefault(id(h.parameter), h.path)
        self.modules = [p.path for p in self.places if p.first and p.path]
        self.buffers = tuple(name for name, _ in model.named_buffers())

    def raw(self) -> Selection:
        """Make the selection that the patterns say."""
        outermost = self._outermost()
        units = {path: m for path, m in outermost.items() if not self._excludes(path, m)}
        offloaded = self._offloadable_by_unit(units)
        owned = {name for names in offloaded.values() for name in names}
        stays = {h.path for h in self.holdings if not self._is_offloadable(h)}
        return Selection(
            units=units,
            offloaded=offloaded,
            resident=tuple(n for n in self.name.values() if n in stays or n not in owned),
            buffers=self.buffers,
            allowed=self._allowed(),
            shared=self._shared(units),
            warnings=(*self._unmatched(), *self._emptiness(len(outermost), units)),
        )

    def resolve(self) -> Selection:
        """Make the selection that can be run."""
        raw = self.raw()
        units = self._expand(raw.units)
        owners = self._owners(units)
        offloaded: dict[str, list[str]] = {path: [] for path in units}
        for key, name in self.name.items():
            if len(owners[key]) == 1 and owners[key][0] and name in raw.allowed:
                offloaded[owners[key][0]].append(name)
        owned = {name for names in offloaded.values() for name in names}
        shared = self._shared(units)
        notes = [
            *raw.warnings,
            *(_container_note(path, m) for path, m in raw.units.items() if _is_inert(path, m)),
            *(_shared_note(n, paths) for n, paths in shared.items() if n in raw.allowed),
        ]
        if raw.units:
            notes += self._emptiness(len(raw.units), units)
        return replace(
            raw,
            units=units,
            offloaded={path: tuple(names) for path, names in offloaded.items()},
            resident=tuple(name for name in self.name.values() if name not in owned),
            shared=shared,
            warnings=tuple(notes),
        )

    def _is_offloadable(self, h: Holding) -> bool:
        return (h.included or not self.include) and not h.excluded

    def _excludes(self, path: str, module: nn.Module) -> bool:
        return matches_module(self.exclude, path, module, spans=True)

    def _allowed(self) -> frozenset[str]:
        """Included under one of its names, and excluded under none."""
        included = {id(h.parameter) for h in self.holdings if h.included or not self.include}
        excluded = {id(h.parameter) for h in self.holdings if h.excluded}
        return frozenset(self.name[key] for key in included - excluded)

    def _outermost(self) -> dict[str, nn.Module]:
        """Modules that an include selects and that lie in no other such module."""
        named = {path for p in self.include if p.kind == "name" for path in self._named(p.body)}
        kept: dict[str, nn.Module] = {}
        for p in self.places:
            if not p.first or not p.path or any(above in kept for above in paths_above(p.path)):
                continue
            if p.path in named or any(i.matches_class(type(p.module)) for i in self.include):
                kept[p.path] = p.module
        return kept

    def _named(self, body: str) -> list[str]:
        """Paths of the modules that a name pattern selects.

        A pattern of parameters selects the modules that match its longest beginning. A lone star
        is no such beginning, as it would take in every module at the top: those that hold a
        matching parameter are selected instead.
        """
        if matching := self._matching(body):
            return matching
        holders = [
            h.place.path for h in self.holdings if match_name(body, h.path, star_spans=False)
        ]
        beginning = body.rpartition(".")[0]
        if holders and beginning != "*" and (matching := self._matching(beginning)):
            return matching
        return holders

    def _matching(self, body: str) -> list[str]:
        return [path for path in self.modules if match_name(body, path, star_spans=False)]

    def _offloadable_by_unit(self, units: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
        """Parameters of each unit that the patterns let go, judged by their first name in it."""
        found: dict[str, dict[int, Holding]] = {path: {} for path in units}
        for h in self.holdings:
            for path in (*paths_above(h.place.path), h.place.path):
                if path in found:
                    found[path].setdefault(id(h.parameter), h)
        return {
            path: tuple(self.name[k] for k, h in inside.items() if self._is_offloadable(h))
            for path, inside in found.items()
        }

    def _owners(self, units: Mapping[str, nn.Module]) -> dict[int, tuple[str, ...]]:
        """Units in which each parameter is reached, ``""`` standing for outside of all.

        A unit counts under every path to its module: called through any of them, it is the same.
        """
        path_of = {id(module): path for path, module in units.items()}
        at = {p.path: path_of.get(id(p.module), "") for p in self.places}
        owners: dict[int, dict[str, None]] = {}
        for h in self.holdings:
            chain = (at[path] for path in (*paths_above(h.place.path), h.place.path))
            owner = next((unit for unit in chain if unit), "")
            owners.setdefault(id(h.parameter), {})[owner] = None
        return {key: tuple(found) for key, found in owners.items()}

    def _shared(self, units: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
        owners = self._owners(units)
        return {self.name[key]: found for key, found in owners.items() if len(found) > 1}

    def _expand(self, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Put the callable modules below it in place of each unit that is never called."""
        found: dict[int, str] = {}
        for path, module in units.items():
            inner = [(path, module)] if has_forward(module) else callable_below(path, module)
            for inner_path, inner_module in inner:
                if not self._excludes(inner_path, inner_module):
                    found.setdefault(id(inner_module), inner_path)
        return {p.path: p.module for p in self.places if found.get(id(p.module)) == p.path}

    def _unmatched(self) -> list[SelectionNote]:
        """Warn of patterns that match no module and no parameter."""

        def matches(pattern: Pattern, *, spans: bool) -> bool:
            return any(
                p.path and matches_module((pattern,), p.path, p.module, spans=spans)
                for p in self.places
            ) or any(pattern.matches_name(h.path, star_spans=spans) for h in self.holdings)

        notes = []
        for p in dict.fromkeys(self.include):
            if not matches(p, spans=False):
                notes.append(_unmatched_note("include", p, "a lone * stands for one part"))
        for p in dict.fromkeys(self.exclude):
            if not matches(p, spans=True):
                notes.append(_unmatched_note("exclude", p, "a lone * stands for one part or more"))
        return notes

    def _emptiness(self, before: int, units: Mapping[str, nn.Module]) -> list[SelectionNote]:
        """Say so where includes were given and no unit is left."""
        if units or not self.include:
            return []
        notes = []
        excludes, includes = (tuple(p.text for p in ps) for ps in (self.exclude, self.include))
        if before and excludes:
            message = f"exclude_patterns {list(excludes)} leave none of the {before} units"
            notes.append(SelectionNote("ERROR", "all_excluded", excludes, message))
        message = (
            f"include_patterns {list(includes)} make no unit, so nothing is offloaded; the "
            f"model's modules begin with {self.modules[:4]}"
        )
        return [*notes, SelectionNote("ERROR", "nothing_included", includes, message)]


def _is_inert(path: str, module: nn.Module) -> bool:
    return not has_forward(module) and not any(True for _ in callable_below(path, module))


def _unmatched_note(kind: Literal["include", "exclude"], p: Pattern, hint: str) -> SelectionNote:
    message = f"the {kind} pattern {p.text!r} matches no module and no parameter ({hint})"
    code: NoteCode = "include_unmatched" if kind == "include" else "exclude_unmatched"
    return SelectionNote("WARNING", code, (p.text,), message)


def _container_note(path: str, module: nn.Module) -> SelectionNote:
    message = (
        f"{path!r} ({type(module).__name__}) cannot be called, and nothing in it can: what it "
        "holds is read by modules outside, and stays on the device"
    )
    return SelectionNote("WARNING", "container", (path,), message)


def _shared_note(name: str, units: Sequence[str]) -> SelectionNote:
    places = ", ".join(repr(unit) if unit else "no unit" for unit in units)
    message = f"{name!r} is used in several places ({places}), so it stays on the device"
    return SelectionNote("WARNING", "shared", (name, *filter(None, units)), message)


def _select_from_names(
    names: Sequence[str], include: Sequence[Pattern], exclude: Sequence[Pattern]
) -> Selection:
    """Select from a dict. Its keys lie in no modules, so an include's star spans parts, too."""
    include_names = [p.body for p in include if p.kind == "name"]
    if include and not include_names:
        texts = [p.text for p in include]
        raise OffloadConfigError(
            f"include_patterns {texts} name only classes, and the model is a dict of tensors, "
            "which has no modules; use name patterns, for example 'layers.*.weight'"
        )
    notes = _class_notes(include, exclude)
    exclude_names = [p.body for p in exclude if p.kind == "name"]

    def covers(bodies: Sequence[str], name: str) -> bool:
        return any(selects(body, name) for body in bodies)

    offloaded = tuple(
        name
        for name in names
        if (covers(include_names, name) or not include) and not covers(exclude_names, name)
    )
    kept = frozenset(offloaded)
    return Selection(
        units={},
        offloaded={"": offloaded},
        resident=tuple(name for name in names if name not in kept),
        buffers=(),
        allowed=kept,
        shared={},
        warnings=notes,
    )


def _class_notes(
    include: Sequence[Pattern], exclude: Sequence[Pattern]
) -> tuple[SelectionNote, ...]:
    ignored = tuple(p.text for p in (*include, *exclude) if p.kind == "class")
    if not ignored:
        return ()
    message = f"{list(ignored)} are ignored: the model is a dict of tensors, which has no classes"
    return (SelectionNote("WARNING", "class_on_dict", ignored, message),)
