"""Patterns and units: recorded vectors, containers, sharing, and a check against the call graph."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from modelopt_lite.errors import OffloadConfigError
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.patterns import parse_pattern, parse_patterns, split_patterns
from modelopt_lite.offload.places import has_forward
from modelopt_lite.offload.selection import Selection, select, select_raw

VECTORS = json.loads(
    (Path(__file__).parents[1] / "data" / "offload" / "pattern_vectors.json").read_text()
)
CONTAINERS = {cls.__name__: cls for cls in (nn.ModuleList, nn.ModuleDict, nn.Sequential)}
TIES = {
    "Tied": ("embed.weight", "lm_head.weight"),
    "TiedAcross": ("layers.0.mlp.up.weight", "layers.1.mlp.up.weight"),
}


def make_class(full_name: str, short: str) -> type[nn.Module]:
    """A callable module class with the given full name."""
    body = {
        "__module__": full_name.removesuffix(short).rstrip("."),
        "__qualname__": short,
        "forward": lambda self: None,
    }
    return type(short, (nn.Module,), body)


def build(name: str) -> nn.Module:
    """Build a model from its table of (path, class, parameters, buffers)."""
    modules: dict[str, nn.Module] = {}
    for path, full_name, parameters, buffers in VECTORS["models"][name]:
        short = full_name.rpartition(".")[2]
        module = CONTAINERS[short]() if short in CONTAINERS else make_class(full_name, short)()
        for leaf in parameters:
            module.register_parameter(leaf, nn.Parameter(torch.zeros(1)))
        for leaf in buffers:
            module.register_buffer(leaf, torch.zeros(1))
        modules[path] = module
        if path:
            above, _, leaf = path.rpartition(".")
            modules[above].add_module(leaf, module)
    if name == "SharedModule":
        modules["layers"].add_module("1", modules["layers.0"])
    if name in TIES:
        kept, replaced = (path.rpartition(".") for path in TIES[name])
        modules[replaced[0]]._parameters[replaced[2]] = modules[kept[0]]._parameters[kept[2]]
    return modules[""]


def parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("vector", VECTORS["paths"], ids=lambda v: v[0])
def test_path(vector: tuple[str, str, str, str, bool]) -> None:
    _, mode, pattern, path, expected = vector
    found = parse_pattern(pattern).matches_name(path, star_spans=mode == "exclude")
    assert found == expected


@pytest.mark.parametrize("vector", VECTORS["classes"], ids=lambda v: v[0])
def test_class(vector: tuple[str, str, str, str, bool]) -> None:
    _, pattern, full_name, short, expected = vector
    parsed = parse_pattern(pattern)
    assert parsed.matches_class(make_class(full_name, short)) == expected
    assert not parsed.matches_name(full_name, star_spans=True)


@pytest.mark.parametrize("vector", VECTORS["configs"], ids=lambda v: v[0])
def test_entries(vector: tuple[str, str, Any, list[str] | None]) -> None:
    _, field, entries, expected = vector
    if expected is not None:
        assert getattr(OffloadConfig(**{field: entries}), field) == expected
        return
    with pytest.raises(OffloadConfigError, match=field) as caught:
        OffloadConfig(**{field: entries})
    entry = entries[0] if isinstance(entries, list) else entries
    assert repr(entry.strip() if isinstance(entry, str) and ":" in entry else entry) in str(
        caught.value
    )


@pytest.mark.parametrize("vector", VECTORS["splits"], ids=lambda v: v[0])
def test_split(vector: tuple[str, list[str], list[str], list[str]]) -> None:
    _, entries, names, classes = vector
    assert split_patterns(parse_patterns(entries)) == (tuple(names), tuple(classes))


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: c["id"])
def test_model(case: dict[str, Any]) -> None:
    model = build(case["model"])
    found = select_raw(model, case["include"], case["exclude"])
    expected = {
        unit: [name for name in names if not name.endswith("(inner field)")]
        for unit, names in case["offloaded"].items()
    }
    assert list(found.units) == case["units"]
    assert all(model.get_submodule(path) is module for path, module in found.units.items())
    assert {u: sorted(names) for u, names in found.offloaded.items() if names} == {
        unit: names for unit, names in expected.items() if names
    }
    assert list(found.owned_by_several_units) == case.get("several", [])
    assert list(found.owned_and_resident) == case.get("both", [])
    assert list(found.buffers) == [name for name, _ in model.named_buffers()]
    owned = {name for names in found.offloaded.values() for name in names}
    assert set(found.resident) == (parameter_names(model) - owned) | set(case.get("both", []))
    if not case.get("seed"):
        notes = [[n.level, n.code, list(n.about)] for n in found.warnings]
        assert notes == case.get("warnings", [])
    assert set(found.buffers) == set(case.get("buffers", []))


@pytest.mark.parametrize("case", VECTORS["dict_cases"], ids=lambda c: c["id"])
def test_dict(case: dict[str, Any]) -> None:
    model = {key: torch.zeros(1) for key in case["keys"]}
    if case.get("error"):
        with pytest.raises(OffloadConfigError, match="dict of tensors"):
            select(model, case["include"], case["exclude"])
        return
    for choose in (select, select_raw):
        found = choose(model, case["include"], case["exclude"])
        assert sorted(found.offloaded[""]) == case["offloaded"]
        assert sorted(found.resident) == case["resident"]
        assert [list(note.about) for note in found.warnings] == (
            [case["ignored"]] if case["ignored"] else []
        )


def test_all_vectors_are_there() -> None:
    kinds = ("paths", "classes", "configs", "splits", "cases", "dict_cases")
    assert sum(len(VECTORS[kind]) for kind in kinds) == 347


def check_partition(model: nn.Module, found: Selection) -> None:
    """Every parameter once; each unit callable, and the only way to what is offloaded in it."""
    placed = [*found.resident, *(n for names in found.offloaded.values() for n in names)]
    assert sorted(placed) == sorted(parameter_names(model))
    assert list(found.offloaded) == list(found.units)
    assert all(has_forward(module) for module in found.units.values())
    for unit, names in found.offloaded.items():
        for module in reachable(model, without=found.units[unit]):
            held = {id(p) for p in module._parameters.values()}
            assert not held & {id(model.get_parameter(name)) for name in names}, unit


def reachable(model: nn.Module, *, without: nn.Module) -> Iterator[nn.Module]:
    """Modules that are reached on a way that does not lead through one of them."""
    seen, stack = {id(without)}, [model]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            stack.extend(m for m in module._modules.values() if m is not None)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: c["id"])
def test_every_parameter_has_one_place(case: dict[str, Any]) -> None:
    model = build(case["model"])
    check_partition(model, select(model, case["include"], case["exclude"]))


SPECS = st.recursive(
    st.integers(0, 2),
    lambda inner: st.tuples(
        st.sampled_from(("list", "block")), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=10,
)
PATHS = st.lists(st.sampled_from(["*", "0", "1", "w0", "w?"]), min_size=1, max_size=4).map(".".join)
ENTRIES = st.lists(PATHS | st.sampled_from(["class:Block", "class:ModuleList"]), max_size=3)


class Block(nn.Module):
    """A callable module with children 0, 1, … and parameters w0, w1, …"""

    def forward(self) -> None:
        pass


@given(SPECS, st.data(), ENTRIES, ENTRIES)
@settings(max_examples=300, deadline=None)
def test_random_models(
    spec: Any, data: st.DataObject, include: list[str], exclude: list[str]
) -> None:
    """With modules and parameters shared at random, `select` stays a partition."""
    modules: list[nn.Module] = []
    parameters: list[nn.Parameter] = []

    def make(spec: Any) -> nn.Module:
        if modules and data.draw(st.integers(0, 5)) == 0:
            return data.draw(st.sampled_from(modules))
        if isinstance(spec, int):
            module: nn.Module = Block()
            for at in range(spec):
                share = parameters and data.draw(st.integers(0, 4)) == 0
                value = data.draw(st.sampled_from(parameters)) if share else None
                parameters.append(nn.Parameter(torch.zeros(1)) if value is None else value)
                module.register_parameter(f"w{at}", parameters[-1])
        else:
            module = nn.ModuleList() if spec[0] == "list" else Block()
            for at, child in enumerate(spec[1]):
                module.add_module(str(at), make(child))
        modules.append(module)
        return module

    model = Block()
    model.add_module("0", make(spec))
    found = select(model, include, exclude)
    check_partition(model, found)
    excluded = select_raw(model, ["*"], exclude)
    assert not {n for ns in found.offloaded.values() for n in ns} & (
        parameter_names(model) - excluded.allowed
    )


def decoder() -> nn.Module:
    return build("Decoder")


def test_a_container_is_streamed_through_its_children() -> None:
    found = select(decoder(), ["*"])
    assert list(found.units) == ["embed", "layers.0", "layers.1", "norm", "lm_head"]
    assert found.resident == ()
    assert found.warnings == ()
    assert list(select(build("Deep"), ["*"]).units) == ["stage.0.0", "stage.1.0"]


def test_an_exclude_reaches_the_children_of_a_container() -> None:
    found = select(decoder(), ["*"], ["layers.1", "class:LayerNorm"])
    assert list(found.units) == ["embed", "layers.0", "lm_head"]
    assert all(
        not n.startswith("layers.1") and "norm" not in n for n in found.offloaded["layers.0"]
    )
    found = select(decoder(), ["layers"], ["layers.*"])
    assert not found.units
    assert [n.code for n in found.warnings] == ["all_excluded", "nothing_included"]


def test_what_a_container_without_callables_holds_stays() -> None:
    model = nn.Module()
    model.weights = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
    model.fc = nn.Linear(2, 2)
    found = select(model, ["*"])
    assert list(found.units) == ["fc"]
    assert found.resident == ("weights.0", "weights.1")
    assert [n.about for n in found.warnings] == [("weights",)]


def test_sharing_is_decided_once() -> None:
    found = select(build("Tied"), ["*"])
    assert found.resident == ("embed.weight",)
    assert found.shared == {"embed.weight": ("embed", "lm_head")}
    assert [n.code for n in found.warnings] == ["shared"]
    outside = select(build("Tied"), ["embed", "layers.*"])
    assert "embed.weight" in outside.resident
    assert outside.shared == {"embed.weight": ("embed", "")}
    excluded = select(build("Tied"), ["*"], ["lm_head"])
    assert excluded.resident == ("embed.weight",)


def test_a_module_under_two_paths_is_one_unit() -> None:
    found = select(build("SharedModule"), ["layers.*"])
    assert list(found.units) == ["layers.0"]
    assert len(found.offloaded["layers.0"]) == 10
    excluded = select(build("SharedModule"), ["layers.*"], ["layers.1"])
    assert excluded.offloaded == {"layers.0": ()}


def test_a_module_in_two_containers_is_one_unit() -> None:
    model = nn.Module()
    block = Block()
    block.w = nn.Parameter(torch.zeros(1))
    model.a, model.b = nn.ModuleList([block]), nn.ModuleList([block])
    for found in (select(model, ["*"]), select(model, ["class:Block"])):
        assert found.offloaded == {"a.0": ("a.0.w",)}
    assert list(select_raw(model, ["class:Block"]).units) == ["a.0"]


def test_a_module_that_contains_itself_ends() -> None:
    model = decoder()
    model.add_module("again", model)
    model.get_submodule("layers.0").add_module("up", model)
    check_partition(model, select(model, ["layers.*"]))


def test_without_includes_everything_is_left_to_manual_blocks() -> None:
    found = select(decoder(), [], ["layers.0"])
    assert not found.units
    assert len(found.resident) == 24
    assert found.allowed == {n for n in found.resident if not n.startswith("layers.0")}


def test_parameters_of_a_seed_example() -> None:
    found = select(decoder(), ["embed", "layers.*", "lm_head"], ["lm_head", "*.norm"])
    assert list(found.units) == ["embed", "layers.0", "layers.1"]
    assert {"lm_head.weight", "layers.0.norm.weight", "norm.weight"} < set(found.resident)


def test_units_are_called() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.named = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.named["a"](x)
            return out

    model, called = Stack(), []
    found = select(model, ["*"])
    for path, unit in found.units.items():
        unit.register_forward_hook(lambda *_, path=path: called.append(path))
    model(torch.zeros(1, 2))
    assert called == list(found.units) == ["blocks.0", "blocks.1", "blocks.2", "named.a"]


@pytest.mark.parametrize(
    ("entry", "form"),
    [("clas:Foo", "'class:Foo'"), ("Name:a.b", "'name:a.b'"), ("layers:0", "'name:layers:0'")],
)
def test_the_nearest_form_is_named(entry: str, form: str) -> None:
    with pytest.raises(OffloadConfigError, match=form):
        parse_pattern(entry)


def test_sets_and_tuples_are_lists() -> None:
    assert [p.text for p in parse_patterns({"b", "a"})] == ["a", "b"]
    assert [p.text for p in parse_patterns(("b", "a"))] == ["b", "a"]
