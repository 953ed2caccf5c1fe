"""The registry's rules, on fakes: no torch."""

from __future__ import annotations

import dataclasses
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from modelopt_lite.models import (
    EPSpec,
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
    SpecSection,
    get_spec,
    get_specs,
    hf_model_type,
    is_moe,
    list_all_possible,
    match_class_names,
    match_moe_block,
    match_moe_model,
    register,
    registry,
)
from modelopt_lite.models.specs import _spec_sections


def make(name: str, base: type = object, **attributes: Any) -> Any:
    """Make an instance of a new class called ``name``."""
    module = type(name, (base,), {})()
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from an empty registry, restored afterwards."""
    monkeypatch.setattr(registry, "_SPECS", {})
    monkeypatch.setattr(registry, "_PLACES", {})
    monkeypatch.setattr(registry, "_OWN", {})


def moe(model_type: str, block: str, **facts: Any) -> ModelSpec:
    return register(
        ModelSpec(model_type=model_type, moe_spec=MoESpec(block_names=(block,), **facts))
    )


# --- registering and looking up


@pytest.mark.usefixtures("empty")
def test_register_returns_the_spec_and_keeps_order() -> None:
    b = register(ModelSpec(model_type="b"))
    a = register(ModelSpec(model_type="a"))
    assert get_spec("b") is b
    assert get_spec("a") is a
    assert get_spec("c") is None
    assert get_specs() == [b, a]


@pytest.mark.usefixtures("empty")
def test_twice_is_an_error_naming_both_places() -> None:
    register(ModelSpec(model_type="x"))
    first = sys._getframe().f_lineno - 1
    with pytest.raises(ValueError, match="'x' is registered twice") as caught:
        register(ModelSpec(model_type="x"))
    assert f"{__file__}:{first}" in str(caught.value)
    assert f"{__file__}:{first + 3}" in str(caught.value)


def test_changing_the_returned_list_leaves_the_registry_alone() -> None:
    count = len(get_specs())
    get_specs().clear()
    assert len(get_specs()) == count > 0


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (SimpleNamespace(config=SimpleNamespace(model_type="llama")), "llama"),
        (SimpleNamespace(model_type="llama"), "llama"),
        (SimpleNamespace(config=SimpleNamespace()), None),
        (SimpleNamespace(model_type=""), None),
        (SimpleNamespace(model_type=3), None),
        (None, None),
    ],
)
def test_hf_model_type(model: object, expected: str | None) -> None:
    assert hf_model_type(model) == expected


def test_get_spec_does_not_search() -> None:
    """A thousand look-ups of an absent type cost next to nothing."""
    start = time.perf_counter()
    for _ in range(1000):
        get_spec("absent")
    assert time.perf_counter() - start < 0.1


# --- matching


def test_match_class_names_takes_whole_names_of_the_mro_case_aside() -> None:
    base = type("FooMoE", (), {})
    assert match_class_names(base(), ("foomoe",))
    assert match_class_names(make("QuantFoo", base), ("Other", "FooMoE"))
    assert not match_class_names(base(), ("FooMo", "FooMoEBlock", "oMoE"))
    assert not match_class_names(base(), ())


@pytest.mark.usefixtures("empty")
def test_model_type_is_a_strict_filter() -> None:
    a, b = moe("a", "ABlock"), moe("b", "BBlock")
    register(ModelSpec(model_type="dense"))
    block = make("ABlock")
    assert match_moe_block(block, "a") is a.moe_spec
    assert match_moe_model(block, "a") is a
    assert match_moe_model(make("BBlock")) is b
    for other in ("b", "dense", "unregistered"):
        assert match_moe_block(block, other) is None
        assert match_moe_model(block, other) is None


@pytest.mark.usefixtures("empty")
def test_is_moe_asks_the_models_own_spec_first() -> None:
    moe("a", "OddlyCalled")
    assert is_moe(make("OddlyCalled"), "a")
    assert is_moe(make("OddlyCalled"))
    assert not is_moe(make("OddlyCalled"), "unregistered")
    # A spec that names its blocks outranks what names and structure suggest.
    assert not is_moe(make("FooSparseMoeBlock"), "a")
    assert not is_moe(make("Foo", gate=object(), experts=[1]), "a")
    # One that names none leaves it to them.
    register(ModelSpec(model_type="naming", moe_spec=MoESpec(expert_linear_names=("w1",))))
    register(ModelSpec(model_type="dense"))
    for model_type in ("naming", "dense", "unregistered", None):
        assert is_moe(make("FooSparseMoeBlock"), model_type)


@pytest.mark.parametrize(
    "name",
    ["FooSparseMoeBlock", "FooMoE", "FooMoeMoE", "FooTextMoELayer", "QuantFooMoE"],
)
def test_is_moe_by_name(name: str) -> None:
    assert is_moe(make(name), "unregistered")
    assert is_moe(make("Generated", type(make(name))), "unregistered")


@pytest.mark.parametrize(
    "name",
    [
        "FooMLP",
        "FooNaiveMoe",
        "FooMoeExperts",
        "FooMoeAttention",
        "FooMoeDecoderLayer",
        "JetMoeBlock",
    ],
)
def test_is_not_moe_by_name(name: str) -> None:
    assert not is_moe(make(name), "unregistered")


def test_is_moe_by_structure() -> None:
    fused = SimpleNamespace(parameters=list)
    assert is_moe(make("Foo", gate=object(), experts=[1, 2]), "unregistered")
    assert is_moe(make("Foo", router=object(), experts=fused), "unregistered")
    assert not is_moe(make("Foo", router=object(), experts=8), "unregistered")  # a count
    assert not is_moe(make("Foo", experts=fused), "unregistered")
    assert not is_moe(make("Foo", gate=object()), "unregistered")
    assert not is_moe(make("Foo", gate=None, experts=fused), "unregistered")


# --- list_all_possible


@pytest.mark.usefixtures("empty")
def test_list_all_possible_deduplicates_in_order() -> None:
    moe("a", "A", expert_linear_names=("w1", "w2", "w3"), gate_up_pair=("w1", "w3"))
    moe("b", "B", expert_linear_names=("up", "w2"))
    register(ModelSpec(model_type="dense"))
    moe("c", "A", gate_up_pair=("w1", "w3"))
    rule = (("Attention",), "v_proj", "o_proj")
    register(ModelSpec(model_type="d", export_spec=ExportSpec(pqs_fuse_rules=(rule,))))
    assert list_all_possible("block_names") == ("A", "B")
    assert list_all_possible("expert_linear_names") == ("w1", "w2", "w3", "up")
    assert list_all_possible("gate_up_pairs") == (("w1", "w3"),)
    assert list_all_possible("pqs_fuse_rules") == (rule,)
    assert list_all_possible("layer_names") == ()


@pytest.mark.parametrize(
    "attr",
    [
        "model_type",
        "fused_expert_names",
        "modeling_source",
        "base_model_ep_plan",
        "container",
        "moe_spec",
        "matches",
        "_PLACES",
        "nonsense",
    ],
)
def test_list_all_possible_refuses_what_is_no_tuple(attr: str) -> None:
    with pytest.raises(ValueError, match=attr) as caught:
        list_all_possible(attr)
    assert "block_names" in str(caught.value)
    assert "gate_up_pairs" in str(caught.value)


def test_attribute_names_are_unique_across_sections() -> None:
    names = [f.name for section in _spec_sections().values() for f in dataclasses.fields(section)]
    names += [f.name for f in dataclasses.fields(ModelSpec)]
    assert len(names) == len(set(names))


# --- the records


def test_sections_are_found_from_annotations() -> None:
    assert _spec_sections() == {
        "moe_spec": MoESpec,
        "export_spec": ExportSpec,
        "ep_spec": EPSpec,
        "ptq_spec": PTQSpec,
        "expert_storage_spec": ExpertStorageSpec,
        "naming_spec": NamingSpec,
    }


@pytest.mark.parametrize(
    "cls",
    [SpecSection, MoESpec, ExportSpec, EPSpec, PTQSpec, ExpertStorageSpec, NamingSpec, ModelSpec],
)
def test_records_are_frozen_slotted_and_keyword_only(cls: type) -> None:
    record = cls(model_type="x") if cls is ModelSpec else cls()
    assert not hasattr(record, "__dict__")
    assert all(field.kw_only for field in dataclasses.fields(cls))
    with pytest.raises(TypeError):
        cls("positional")
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, None)


def test_a_string_for_a_tuple_is_refused() -> None:
    with pytest.raises(TypeError, match="block_names must be a tuple, got 'Name'"):
        MoESpec(block_names="Name")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="skip_modules"):
        PTQSpec(skip_modules=["mtp.*"])  # type: ignore[arg-type]


def test_a_pair_outside_the_expert_names_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['w3'\] is not"):
        MoESpec(expert_linear_names=("w1", "w2"), gate_up_pair=("w1", "w3"))


def test_an_empty_model_type_is_refused() -> None:
    with pytest.raises(ValueError, match="model_type is ''"):
        ModelSpec(model_type="")


def test_gate_up_pairs() -> None:
    assert MoESpec().gate_up_pairs == ()
    assert MoESpec(gate_up_pair=("w1", "w3")).gate_up_pairs == (("w1", "w3"),)


@pytest.mark.parametrize("fused", [False, True])
def test_expert_linear_names_for_declines_the_other_layout(fused: bool) -> None:
    names = ("gate_up_proj", "down_proj")
    spec = MoESpec(expert_linear_names=names, fused_expert_names=fused)
    anything = object()
    assert spec.expert_linear_names_for(anything) == names
    assert spec.expert_linear_names_for(anything, fused=fused) == names
    assert spec.expert_linear_names_for(anything, fused=not fused) is None
    assert MoESpec().expert_linear_names_for(anything) is None
