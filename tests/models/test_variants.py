"""Specs told by what differs from another, and stacked experts outside of the container."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelopt_lite import models
from modelopt_lite.models import (
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    MoESpec,
    PTQSpec,
    get_spec,
    get_specs,
)
from modelopt_lite.models.variants import variant

BASE = ModelSpec(
    model_type="base",
    min_transformers_version="4.57",
    moe_spec=MoESpec(block_names=("Block",), expert_linear_names=("up", "down")),
    ptq_spec=PTQSpec(layer_names=("Layer",), router_names=("gate",)),
)

# Specs of more than 60 lines, and why they cannot be shorter.
LONG = {
    "deepseek_v4": "each name in two spellings, few of them another type's; own hyper-connections",
    "nemotron_h": "layers of four kinds, which no other type has, read one norm",
}
FILES = sorted(Path(models.__file__).parent.glob("*/specs.py"))


def test_specs_have_at_most_60_lines() -> None:
    """What a spec shares with another type, `variant` takes from there."""
    assert len(FILES) > 100
    counts = {file.parent.name: len(file.read_text("utf-8").splitlines()) for file in FILES}
    assert {name: count for name, count in counts.items() if count > 60}.keys() == LONG.keys()


def test_a_mapping_changes_fields_and_keeps_the_others() -> None:
    made = variant(BASE, "made", moe_spec={"block_names": ("Other",)})
    assert made.model_type == "made"
    assert made.moe_spec == MoESpec(block_names=("Other",), expert_linear_names=("up", "down"))
    assert made.ptq_spec is BASE.ptq_spec
    assert BASE.moe_spec is not None
    assert BASE.moe_spec.block_names == ("Block",)


def test_anything_else_takes_the_place_of_a_section() -> None:
    export = ExportSpec(grouped_expert_export=True)
    made = variant(BASE, "made", moe_spec=None, export_spec=export)
    assert made.moe_spec is None
    assert made.export_spec is export


def test_a_section_that_is_not_there_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="'base' has no export_spec to change"):
        variant(BASE, "made", export_spec={"grouped_expert_export": True})
    with pytest.raises(TypeError, match="nonsense"):
        variant(BASE, "made", moe_spec={"nonsense": ()})


@pytest.mark.parametrize(
    ("stacked_parent", "parent", "container"),
    [
        (None, "layers.0.mlp.experts", "layers.0.mlp.experts"),
        (None, "experts", "experts"),
        (None, "layers.0.mlp", None),
        (None, "layers.0.mlp.myexperts", None),
        ("", "layers.0.mlp", "layers.0.mlp.experts"),
        ("all", "layers.0.mlp.all", "layers.0.mlp.experts"),
        ("all", "layers.0.mlp.experts", None),
    ],
)
def test_where_single_experts_of_a_stack_are_named(
    stacked_parent: str | None, parent: str, container: str | None
) -> None:
    storage = ExpertStorageSpec(stacked_names=("up",), stacked_parent=stacked_parent)
    assert storage.container_above(parent) == container


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek", "minimax_text_01", "hunyuan"])
def test_code_that_was_not_seen_is_not_trusted_with_names(name: str) -> None:
    """No class is named, so that structure decides, and no norm, so that nothing is folded."""
    spec = get_spec(name)
    assert spec is not None
    assert spec.moe_spec is not None
    assert spec.ptq_spec is not None
    assert spec.modeling_source == "remote_code"
    assert spec.moe_spec.block_names == spec.ptq_spec.layer_names == ()
    assert spec.ptq_spec.norm_feeds == ()


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("layers.1.mlp.experts.3.up", 3),
        ("layers.1.mlp.experts.expert_12.up", 12),  # gptsan-japanese, switch_transformers
        ("layers.1.mlp.experts.shared_1.up", None),
        ("layers.1.mlp.experts.expert_.up", None),
        ("layers.1.mlp.up", None),
    ],
)
def test_single_experts_are_known_by_their_number(name: str, expert: int | None) -> None:
    container = None if expert is None else "layers.1.mlp.experts"
    assert ExpertStorageSpec(linear_names=("up", "down")).expert_of(name) == (expert, container)


def test_types_that_are_not_known_by_code_say_what_is_unread() -> None:
    """Each stands in the page that says so."""
    page = (Path(__file__).parents[2] / "docs" / "remote_code.md").read_text(encoding="utf-8")
    remote = {s.model_type for s in get_specs() if s.modeling_source == "remote_code"}
    assert set(re.findall(r"^\| `([^`]+)`", page, flags=re.MULTILINE)) == remote
