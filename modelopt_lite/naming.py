"""Understand a checkpoint from the names and shapes of its tensors, without its model.

A recipe whose scales follow from the weights alone needs no model to run. What the model would tell
is in the spec (`NamingSpec`). Nothing is guessed: one tensor that the spec does not account for, or
a layer that lacks what its peers have, and the model is asked after all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modelopt_lite.checkpoint.names import NameMap, Piece, TensorGroup
from modelopt_lite.models.specs import (
    ModelSpec,
    NamingSpec,
    PTQSpec,
    ptq_facts,
    storage_facts,
)
from modelopt_lite.offload.patterns import match_part
from modelopt_lite.offload.units import Unit
from modelopt_lite.structure import Structure, TensorShape, is_weight
from modelopt_lite.words import counted


class UnclearNamesError(Exception):
    """Names alone do not tell; the message says why."""


class UnlikeLayersError(UnclearNamesError):
    """Layers differ in a way that could be damage; only the model tells that it is meant."""


def structure_from_names(
    tensors: Mapping[str, TensorShape], spec: ModelSpec | None, config: Mapping[str, Any]
) -> Structure:
    """Return the structure that `structure_of` would find in the model.

    Args:
        tensors: What the source holds.
        spec: That of the model type.
        config: The contents of ``config.json``.

    Raises:
        UnclearNamesError: The model has to be asked.
    """
    if spec is None or spec.naming_spec is None:
        raise UnclearNamesError("the model has no spec that says what its tensors are called")
    if spec.modeling_source != "transformers":
        raise UnclearNamesError("the model's code comes with the checkpoint")
    if not config.get("architectures"):
        raise UnclearNamesError("config.json names no architecture")
    return _Reading(tensors, spec, spec.naming_spec, config).structure()


@dataclass(slots=True)
class _Layer:
    """A decoder layer: the shapes of its tensors, by their names inside of it."""

    path: str
    shapes: dict[str, tuple[int, ...]]


class _Reading:
    """One look at the names of one checkpoint."""

    def __init__(
        self,
        tensors: Mapping[str, TensorShape],
        spec: ModelSpec,
        naming: NamingSpec,
        config: Mapping[str, Any],
    ) -> None:
        self._tensors = tensors
        self._spec = spec
        self._naming = naming
        self._config = config
        self._layers: dict[int, _Layer] = {}
        self._units: dict[str, list[str]] = {}
        self._linear: set[str] = set()
        self._count = self._layer_count()

    def structure(self) -> Structure:
        """Sort every tensor, and check that none is missing where its peers show it."""
        for source, info in self._tensors.items():
            self._sort(source, info)
        _check_alike(self._layers, self._count)
        self._check_experts()
        self._check_embedding()
        heads, tied = self._heads()
        layers = {layer.path for layer in self._layers.values()}
        return Structure(
            names=self._names(tied),
            linear=frozenset(self._linear),
            heads=heads,
            tied_heads=tied,
            units=tuple(Unit(n, tuple(e), n in layers) for n, e in self._units.items()),
        )

    def _sort(self, source: str, info: TensorShape) -> None:
        """Note what a tensor is."""
        place = self._place_in_layers(source)
        name = source.removesuffix(".weight")
        if place is None:
            if info.is_matrix and not self._is_known(name):
                raise UnclearNamesError(f"{source!r} is nothing that the model's spec names")
            if name in self._naming.head_names and is_weight(source, info):
                self._linear.add(source)
            self._units.setdefault(source.rpartition(".")[0], []).append(source)
            return
        path, index, inside = place
        if index >= self._count:  # extra prediction layers: the model does not have them
            return
        layer = self._layers.setdefault(index, _Layer(path, {}))
        if layer.path != path:
            raise UnclearNamesError(f"{layer.path!r} and {path!r} are both layer {index}")
        layer.shapes[inside] = info.shape
        self._units.setdefault(path, []).append(source)
        role = name.rpartition(".")[2]
        if is_weight(source, info) and role in self._naming.layer_linear_names:
            self._linear.add(source)
        elif info.is_matrix and not self._is_known(name) and not self._is_of_experts(name):
            raise UnclearNamesError(f"{source!r} is nothing that the model's spec names")

    def _place_in_layers(self, source: str) -> tuple[str, int, str] | None:
        """Split ``model.layers.3.mlp.up_proj.weight`` into a layer's path, its number, and rest."""
        for layers in self._naming.layer_lists:
            if source.startswith(f"{layers}."):
                number, _, inside = source.removeprefix(f"{layers}.").partition(".")
                if number.isdecimal():
                    return f"{layers}.{number}", int(number), inside
        return None

    def _is_known(self, name: str) -> bool:
        """Whether a matrix that is no linear layer's is one that the spec names."""
        ptq: PTQSpec = ptq_facts(self._spec)
        return (
            name in self._naming.embedding_names
            or name in self._naming.head_names
            or any(f".{router}." in f".{name}." for router in ptq.router_names)
            or any(match_part(pattern, name) for pattern in ptq.skip_modules)
        )

    def _is_of_experts(self, name: str) -> bool:
        """Whether a tensor holds experts of a layer, stacked, or the biases of such."""
        storage = storage_facts(self._spec)
        parent, _, leaf = name.rpartition(".")
        inside = storage.container_above(parent) is not None
        return inside and leaf.removesuffix("_bias") in storage.stacked_names

    def _check_experts(self) -> None:
        """Demand as many experts, numbered from 0, as the router beside them has outputs."""
        ptq, storage = ptq_facts(self._spec), storage_facts(self._spec)
        for layer in self._layers.values():
            numbers: dict[str, set[int]] = {}
            for inside, shape in layer.shapes.items():
                expert, container = storage.expert_of(inside.removesuffix(".weight"))
                if expert is not None and container is not None:
                    numbers.setdefault(container, set()).add(expert)
                elif len(shape) == 3 and self._is_of_experts(inside.removesuffix(".weight")):
                    parent = inside.removesuffix(".weight").rpartition(".")[0]
                    container = storage.container_above(parent) or parent
                    numbers.setdefault(container, set()).update(range(shape[0]))
            for container, found in numbers.items():
                block = container.removesuffix(storage.container)
                routers = tuple(f"{block}{name}." for name in ptq.router_names)
                shapes = [s for inside, s in layer.shapes.items() if inside.startswith(routers)]
                if found not in [set(range(shape[0])) for shape in shapes if shape]:
                    raise UnlikeLayersError(
                        f"{layer.path}.{container} has {counted(len(found), 'expert')}, and its "
                        "router another number of outputs"
                    )

    def _check_embedding(self) -> None:
        """Demand one embedding, of the shape that the config gives where it gives one."""
        names = [f"{name}.weight" for name in self._naming.embedding_names]
        found = [self._tensors[name].shape for name in names if name in self._tensors]
        wanted = (self._stated("vocab_size"), self._stated("hidden_size"))
        if len(found) != 1 or any(
            size not in (None, have) for size, have in zip(wanted, found[0], strict=True)
        ):
            raise UnclearNamesError(
                f"config.json asks for an embedding {list(wanted)}, and there is {found}"
            )

    def _heads(self) -> tuple[frozenset[str], frozenset[str]]:
        """Modules that are the output head, and those that have no tensor of their own."""
        names = self._naming.head_names
        if found := {name for name in names if f"{name}.weight" in self._tensors}:
            return frozenset(found), frozenset()
        if not self._is_tied():
            raise UnclearNamesError("there is no output head, and config.json ties it to nothing")
        return frozenset(names[:1]), frozenset(names[:1])

    def _is_tied(self) -> bool:
        stated = [part.get("tie_word_embeddings") for part in self._sections()]
        return self._naming.is_tied if set(stated) == {None} else True in stated

    def _sections(self) -> Iterator[Mapping[str, Any]]:
        """Yield the config, and that of the text model where it is composite."""
        yield self._config
        if isinstance(text := self._config.get("text_config"), dict):
            yield text

    def _layer_count(self) -> int:
        for key in self._naming.layer_count_keys:
            value = self._stated(key)
            if isinstance(value, int | list):
                return value if isinstance(value, int) else len(value)
        raise UnclearNamesError(f"config.json gives no {self._naming.layer_count_keys[0]}")

    def _stated(self, key: str) -> Any:
        """The innermost value of a key of the config."""
        return [None, *(part[key] for part in self._sections() if key in part)][-1]

    def _names(self, tied: frozenset[str]) -> NameMap:
        owned = [source for entries in self._units.values() for source in entries]
        groups = {s: TensorGroup((s,), (s,), pieces=(Piece(s, ()),)) for s in owned}
        (embedding,) = (n for n in self._naming.embedding_names if f"{n}.weight" in groups)
        return NameMap(
            groups=tuple(groups.values()),
            by_target=groups,
            by_source=groups,
            places={source: (source, ()) for source in owned},
            aliases={f"{head}.weight": f"{embedding}.weight" for head in tied},
            unmapped=tuple(source for source in self._tensors if source not in groups),
        )


def _check_alike(layers: Mapping[int, _Layer], count: int) -> None:
    """Demand that every layer is there, and lacks nothing that tells it from another.

    Raises:
        UnclearNamesError: A layer has some of another's tensors and no others, or of another shape.
    """
    if missing := [index for index in range(count) if index not in layers]:
        raise UnclearNamesError(f"layer {missing[0]} of {count} has no tensors")
    kinds: dict[frozenset[str], _Layer] = {}
    for layer in layers.values():
        first = kinds.setdefault(frozenset(layer.shapes), layer)
        if first.shapes != layer.shapes:
            raise UnlikeLayersError(f"{first.path!r} and {layer.path!r} differ in shapes")
    for one, layer in kinds.items():
        for other, larger in kinds.items():
            if one < other:
                lost = min(other - one)
                raise UnlikeLayersError(f"{layer.path!r} lacks {lost!r}, which {larger.path!r} has")
