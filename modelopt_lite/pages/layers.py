"""Sort what is told of modules by layer and by kind, from their names alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

REST = "outside of layers"
_DIGITS = 9


class Place(NamedTuple):
    """Where a module or tensor is: a stack of layers, the number in it, and what it is there.

    ``stack`` is empty, and ``number`` -1, for what is in no layer.
    """

    stack: str
    number: int
    kind: str

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return f"{self.stack}.{self.number}" if self.stack else REST


def place_of(name: str) -> Place:
    """Return where a module is; the first number in its name is that of its layer.

    Numbers behind it, as of experts, are left out of the kind.
    """
    parts = name.split(".")
    at = next((n for n, part in enumerate(parts) if n and _is_number(part)), None)
    if at is None:
        return Place("", -1, name)
    kind = ".".join(part for part in parts[at + 1 :] if not _is_number(part))
    return Place(".".join(parts[:at]), int(parts[at]), kind)


def _is_number(part: str) -> bool:
    """Whether a part of a name counts layers or experts; int() refuses thousands of digits."""
    return len(part) <= _DIGITS and part.isdecimal()


def by_kind(values: Mapping[str, float], most: int) -> dict[str, dict[tuple[str, int], float]]:
    """Return for each kind its layers' largest values, in the order in which kinds appear.

    Args:
        values: Module -> value.
        most: Kinds that are kept; those of the fewest modules are put together as ``other``.
    """
    places = {name: place_of(name) for name in values}
    counts = Counter(place.kind for place in places.values())
    kept = {kind for kind, _ in counts.most_common(most if len(counts) <= most else most - 1)}
    found: dict[str, dict[tuple[str, int], float]] = {}
    for name, value in values.items():
        place = places[name]
        table = found.setdefault(place.kind if place.kind in kept else "other", {})
        key = place.stack, place.number
        table[key] = max(value, table.get(key, value))
    return found


def by_reason(excluded: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return for each reason the modules, those that differ in numbers alone as one, counted.

    Reasons come by name: which module comes first is up to the release of transformers.
    """
    found: dict[str, Counter[str]] = {}
    for name, reason in excluded.items():
        shape = ".".join("*" if _is_number(part) else part for part in name.split("."))
        found.setdefault(reason, Counter())[shape] += 1
    return {reason: dict(names) for reason, names in sorted(found.items())}


def layer_bytes(
    before: Iterable[tuple[str, int]], after: Iterable[tuple[str, int]]
) -> dict[str, list[int]]:
    """Return for each layer the bytes of its tensors in the source and in the export.

    Args:
        before: Names and bytes of the source's tensors.
        after: Those of the export's.
    """
    sizes: dict[str, list[int]] = {}
    for column, tensors in enumerate((before, after)):
        for name, size in tensors:
            sizes.setdefault(place_of(name).layer, [0, 0])[column] += size
    rest = {name: both for name, both in sizes.items() if name == REST}
    layers = {name: both for name, both in sizes.items() if name != REST}
    return dict(sorted(layers.items(), key=lambda item: _order(item[0]))) | rest


def _order(layer: str) -> tuple[str, int]:
    stack, _, number = layer.rpartition(".")
    return stack, int(number)
