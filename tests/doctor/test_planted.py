"""A planted error is found: the field, and what to write instead, are named."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import transformers
from packaging.version import Version

from modelopt_lite.doctor.check import check_spec, examine
from modelopt_lite.doctor.instance import Instance, instances
from modelopt_lite.models import EPSpec, ModelSpec, get_spec

installed = Version(transformers.__version__)
needs_stacks = pytest.mark.skipif(installed < Version("5"), reason="a release that stacks experts")


@functools.cache
def built(model_type: str) -> list[Instance]:
    return instances(model_type)


def spec_of(model_type: str) -> ModelSpec:
    spec = get_spec(model_type)
    assert spec is not None
    if installed < Version(spec.min_transformers_version or "0"):
        pytest.skip(f"transformers {installed} has no {model_type}")
    return spec


def planted(spec: ModelSpec, section: str, **fields: Any) -> ModelSpec:
    """A copy of a spec with other fields in one of its sections."""
    return replace(spec, **{section: replace(getattr(spec, section), **fields)})


TYPES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "gemma3", "mixtral", "qwen2_moe")


@pytest.mark.parametrize("model_type", TYPES)
def test_the_registered_specs_are_right(model_type: str) -> None:
    assert examine(spec_of(model_type), built(model_type)).findings == []


def feeds(spec: ModelSpec, norm: str, readers: tuple[str, ...]) -> tuple[Any, ...]:
    assert spec.ptq_spec is not None
    return tuple((n, readers if n == norm else r) for n, r in spec.ptq_spec.norm_feeds)


PLANTED: list[tuple[str, str, dict[str, Any], str, str]] = [
    # type, section, fields, the field that is named, what the remedy must say
    ("qwen3_moe", "moe_spec", {"block_names": ("Qwen3MoeSparseBlock",)}, "", "SparseMoeBlock"),
    ("qwen3_moe", "moe_spec", {"block_names": ("Qwen3MoeMLP",)}, "", "Qwen3MoeSparseMoeBlock"),
    ("qwen3_moe", "moe_spec", {"fused_expert_names": True}, "moe_spec.expert_linear_names", "gate"),
    (
        "qwen3_moe",
        "moe_spec",
        {"expert_linear_names": ("w1", "w2", "w3"), "gate_up_pair": ("w1", "w3")},
        "moe_spec.expert_linear_names",
        "agree",
    ),
    ("qwen3_moe", "ptq_spec", {"router_names": ("router",)}, "", "'gate'"),
    ("qwen3_moe", "ptq_spec", {"layer_names": ("Qwen3DecoderLayer",)}, "", "Qwen3MoeDecoderLayer"),
    ("qwen3_moe", "ptq_spec", {"layer_names": ("Qwen3MoeAttention",)}, "", "Qwen3MoeDecoderLayer"),
    ("qwen3_moe", "ptq_spec", {"fused_linears": (("gate_proj", "up_proj"),)}, "", "'q_proj'"),
    ("qwen3_moe", "ptq_spec", {"key_value_names": ("key", "value")}, "", "children"),
    ("qwen2_moe", "ptq_spec", {"router_names": ("gate",)}, "", "'shared_expert_gate'"),
    (
        "qwen2_moe",
        "expert_storage_spec",
        {"shared_expert_names": ()},
        "",
        "'shared_expert'",
    ),
    (
        "qwen2_moe",
        "expert_storage_spec",
        {"shared_expert_names": ("shared_experts",)},
        "",
        "'shared_expert'",
    ),
    ("qwen3_moe", "expert_storage_spec", {"container": "mlps"}, "expert_storage_spec", "container"),
    ("qwen3_moe", "ptq_spec", {"router_names": ("gate", "experts")}, "", "take 'experts' out"),
    ("qwen3_moe", "ptq_spec", {"layer_names": ()}, "", "Qwen3MoeDecoderLayer"),
    ("nemotron_h", "ptq_spec", {"router_names": ()}, "", "'gate'"),
    ("gpt_oss", "ptq_spec", {"router_names": ("gate",)}, "", "'router'"),
    (
        "qwen3_moe",
        "expert_storage_spec",
        {"linear_names": ("up_proj", "gate_proj", "down_proj")},
        "",
        "gate, up, down",
    ),
    (
        "deepseek_v3",
        "ptq_spec",
        {"fused_linears": (("q_proj", "k_proj", "o_proj"), ("gate_proj", "up_proj"))},
        "",
        "'q_a_proj'",
    ),
    (
        "qwen3_moe",
        "ptq_spec",
        {"fused_linears": (("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj"))},
        "",
        "reads another input",
    ),
    (
        "qwen3_moe",
        "ptq_spec",
        {"norm_feeds": (("input_layernorm", ("self_attn.q_proj", "self_attn.o_proj")),)},
        "",
        "'self_attn.k_proj'",
    ),
    ("gemma3", "ptq_spec", {"skip_modules": ("*multi_modal_projector*",)}, "", "vision_tower"),
    ("gemma3", "export_spec", {"weight_plus_one_norm_names": ()}, "", "'Gemma3RMSNorm'"),
    ("qwen3_moe", "export_spec", {"weight_plus_one_norm_names": ("Qwen3MoeRMSNorm",)}, "", "take"),
    (
        "qwen3_moe",
        "export_spec",
        {"pqs_fuse_rules": ((("Qwen3MoeAttention",), "k_proj", "o_proj"),)},
        "export_spec.pqs_fuse_rules k_proj <- o_proj",
        "remove",
    ),
    (
        "qwen3_moe",
        "export_spec",
        {"pqs_fuse_rules": ((("Qwen3Attn",), "v_proj", "o_proj"),)},
        "export_spec.pqs_fuse_rules v_proj <- o_proj",
        "correct",
    ),
    ("qwen3_moe", "naming_spec", {"layer_lists": ("layers",)}, "naming_spec", "layer_lists"),
    ("qwen3_moe", "naming_spec", {"layer_linear_names": ("q_proj",)}, "", "'k_proj'"),
    ("gemma3", "naming_spec", {"head_names": ("head",)}, "naming_spec.head_names", "correct"),
]


@pytest.mark.parametrize(
    ("model_type", "section", "fields", "field", "remedy"),
    PLANTED,
    ids=[f"{t}-{next(iter(f))}-{n}" for n, (t, _, f, _, _) in enumerate(PLANTED)],
)
def test_a_planted_error_is_named_with_its_remedy(
    model_type: str, section: str, fields: dict[str, Any], field: str, remedy: str
) -> None:
    spec = planted(spec_of(model_type), section, **fields)
    found = examine(spec, built(model_type)).findings
    wanted = field or f"{section}.{next(iter(fields))}"
    assert any(f.field == wanted and remedy in f.remedy for f in found), found


@needs_stacks
@pytest.mark.parametrize(
    ("model_type", "section", "fields", "field", "remedy"),
    [
        (
            "gpt_oss",
            "expert_storage_spec",
            {"stacked_names": ("down_proj", "gate_up_proj")},
            "expert_storage_spec.stacked_names",
            "('gate_up_proj', 'down_proj')",
        ),
        (
            "gpt_oss",
            "expert_storage_spec",
            {"stacked_names": ("w13", "w2")},
            "expert_storage_spec.stacked_names",
            "'gate_up_proj'",
        ),
        (
            "gpt_oss",
            "moe_spec",
            {"expert_linear_names": ("w13", "w2")},
            "moe_spec.expert_linear_names",
            "'gate_up_proj'",
        ),
        (
            "qwen3_vl_moe",
            "ep_spec",
            {"plan_config_attr": None},
            "ep_spec.plan_config_attr",
            "'text_config'",
        ),
        (
            "qwen3_vl_moe",
            "ep_spec",
            {"plan_config_attr": "vision"},
            "ep_spec.plan_config_attr",
            "text_config",
        ),
        (
            "qwen3_moe",
            "ep_spec",
            {"requires_transformers": "99.0"},
            "ep_spec.requires_transformers",
            "first release",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_an_error_that_only_stacks_show_is_named(
    model_type: str, section: str, fields: dict[str, Any], field: str, remedy: str
) -> None:
    if section == "ep_spec" and installed < Version("5.7"):
        pytest.skip("a release whose configs have these plans")
    test_a_planted_error_is_named_with_its_remedy(model_type, section, fields, field, remedy)


@needs_stacks
@pytest.mark.parametrize("fields", [{"input_major": False}, {"interleaved_gate_up": False}])
def test_another_layout_of_stacks_is_found_by_the_forward_pass(fields: dict[str, Any]) -> None:
    """gpt-oss is input-major and interleaved: each flag is wrong on its own."""
    [(name, value)] = fields.items()
    spec = planted(spec_of("gpt_oss"), "expert_storage_spec", **fields)
    found = examine(spec, built("gpt_oss")).findings
    assert [(f.field, f.remedy) for f in found] == [
        (f"expert_storage_spec.{name}", f"write {name}={not value}")
    ]


def test_rows_that_alternate_on_disk_alone_are_told_by_the_forward_pass() -> None:
    """transformers puts Inkling's gate before up as it loads; on disk they alternate."""
    spec = planted(spec_of("inkling_mm_model"), "expert_storage_spec", interleaved_gate_up=False)
    found = examine(spec, built("inkling_mm_model")).findings
    assert [(f.field, f.remedy) for f in found] == [
        ("expert_storage_spec.interleaved_gate_up", "write interleaved_gate_up=True")
    ]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_gate_and_up_swapped_are_told_by_the_forward_pass(model_type: str) -> None:
    spec = spec_of(model_type)
    storage, moe = spec.expert_storage_spec, spec.moe_spec
    assert storage is not None
    assert moe is not None
    assert moe.gate_up_pair is not None
    gate, up, down = storage.linear_names
    spec = planted(spec, "expert_storage_spec", linear_names=(up, gate, down))
    spec = planted(spec, "moe_spec", gate_up_pair=(up, gate))
    found = {f.field: f.remedy for f in examine(spec, built(model_type)).findings}
    assert f"gate_up_pair={(gate, up)}" in found["moe_spec.gate_up_pair"]


def test_an_incomplete_norm_feed_is_found() -> None:
    spec = spec_of("qwen3_moe")
    norm_feeds = feeds(spec, "input_layernorm", ("self_attn.q_proj", "self_attn.k_proj"))
    found = examine(planted(spec, "ptq_spec", norm_feeds=norm_feeds), built("qwen3_moe")).findings
    assert {f.field for f in found} == {"ptq_spec.norm_feeds"}
    by_address, by_folding = found
    assert "self_attn.v_proj" in by_address.remedy
    assert "something else reads it" in by_folding.found


def test_a_norm_that_the_residual_reads_too_is_found_by_folding() -> None:
    """MiniMax adds what a norm put out, not what it read: its readers alone are not enough."""
    spec = spec_of("minimax")
    assert spec.ptq_spec is not None
    more = ("post_attention_layernorm", ("block_sparse_moe.experts", "block_sparse_moe.gate"))
    if installed >= Version("5"):
        more = (more[0], ("mlp.experts", "mlp.gate"))
    found = examine(
        planted(spec, "ptq_spec", norm_feeds=(*spec.ptq_spec.norm_feeds, more)), built("minimax")
    ).findings
    assert [f.field for f in found] == ["ptq_spec.norm_feeds"]
    assert "something else reads it" in found[0].found


@pytest.mark.parametrize("glob", ["layers.*.mlp.expert.gate_up_proj", "model.layers.*.mlp.experts"])
def test_a_dead_glob_of_a_plan_is_found(glob: str) -> None:
    spec = replace(spec_of("mixtral"), ep_spec=EPSpec(base_model_ep_plan={glob: "grouped_gemm"}))
    found = examine(spec, built("mixtral")).findings
    assert [f.field for f in found] == ["ep_spec.base_model_ep_plan"]
    assert glob in found[0].found
    assert "layers.*.mlp.experts" in found[0].remedy or "block_sparse_moe" in found[0].remedy


def test_experts_that_a_model_lacks_are_found() -> None:
    spec = spec_of("qwen3_moe")
    changes: dict[str, Any] = {
        "moe_spec": spec.moe_spec,
        "expert_storage_spec": spec.expert_storage_spec,
    }
    found = {
        f.field: f for f in examine(replace(spec_of("llama"), **changes), built("llama")).findings
    }
    assert "remove moe_spec" in found["moe_spec"].remedy


def test_a_spec_without_its_experts_is_found() -> None:
    spec = replace(spec_of("qwen3_moe"), moe_spec=None, expert_storage_spec=None, ep_spec=None)
    found = {f.field: f.remedy for f in examine(spec, built("qwen3_moe")).findings}
    assert "Qwen3MoeSparseMoeBlock" in found["moe_spec"]


def test_what_cannot_be_held_to_a_model_is_told_apart() -> None:
    spec = spec_of("qwen3_moe")
    later = replace(spec, model_type="made_up", min_transformers_version="99.0")
    assert check_spec(later).status == "absent"
    assert check_spec(replace(spec, model_type="made_up")).status == "wrong"
    remote = replace(spec, modeling_source="remote_code", min_transformers_version=None)
    assert check_spec(remote).status == "not_checkable"
    too_late = check_spec(replace(spec, min_transformers_version="99.0"))
    assert [f.field for f in too_late.findings] == ["min_transformers_version"]
    gone = check_spec(replace(spec, model_type="made_up", removed_in_transformers="4.57"))
    assert (gone.status, gone.why) == ("absent", "transformers 4.57 removed it")
    still_there = replace(spec, model_type="made_up", removed_in_transformers="99.0")
    assert check_spec(still_there).status == "wrong"
