"""The audit finds each kind of damage by its own rule, and nothing in exports that are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damage import (
    EXPERT,
    FP8,
    GOLDEN,
    KV,
    MOE,
    NVFP4,
    Q,
    Tensors,
    copied,
    drop,
    edit,
    errors,
    put,
    set_tensor,
    source_of,
    with_byte,
    with_nan,
)

from modelopt_lite import quantize_and_export
from modelopt_lite.verify.audit import audit

CLEAN = sorted(path.parent.name for path in GOLDEN.glob("*/export"))

NOT_IN_VLLM = ("int8", "int4", "mxfp4", "w4a8", "kv_", "nvfp4_svdquant")
# Its excluded modules have the peer's own placeholder in their names.
FAULTY = {"nemotron_h-fp8": {"exclude-entry", "unpacked-not-excluded"}}


@pytest.mark.parametrize("case", CLEAN)
def test_the_peers_exports_are_clean(case: str) -> None:
    findings = audit(GOLDEN / case / "export", source=source_of(case), deep=True)
    # Its configs do not tell that values were clipped, or chosen for what products lose.
    if "awq_clip" in case or "local_hessian" in case:
        findings = [f for f in findings if f.rule != "weight-error"]
    if "@tf457" in case:  # transformers 4 rewrote generation_config.json as it saved the model
        findings = [f for f in findings if "generation_config.json" not in f.message]
    errors_of = {f.rule for f in findings if f.severity == "error"}
    assert errors_of == FAULTY.get(case, set())
    findings = [f for f in findings if f.rule not in errors_of]
    # Dense FP8 siblings keep scales of their own there, and a router's bias is stored wider.
    allowed = {"source-dtype"} | ({"group-scale"} if "-fp8" in case else set())
    allowed |= (
        {"quant-algo", "engine-refuses"}
        if case.partition("-")[2].startswith(NOT_IN_VLLM)
        else set()
    )
    # Weights hold the scales of their inputs, and norms what was folded into them.
    allowed |= {"weight-error", "source-bytes", "engine-refuses"} if "awq" in case else set()
    allowed |= {"weight-error"} if "gptq" in case else set()  # rounded for what products lose
    allowed |= {"weight-error"} if "svdquant" in case else set()  # without the low-rank factors
    assert {f.rule for f in findings} <= allowed


ONE = torch.ones(())
AFFINE = "llama-fp8+kv_nvfp4_affine"
TENSOR_DAMAGES: list[tuple[str, Callable[[Path], None], set[str]]] = [
    # 3: values
    (NVFP4, set_tensor("model.norm.weight", with_nan), {"value-finite"}),
    (FP8, set_tensor(f"{Q}.weight", with_byte(5, 0xFF)), {"weight-nan"}),
    (NVFP4, set_tensor(f"{Q}.weight_scale", with_byte(9, 0x7F)), {"scale-value"}),
    (NVFP4, set_tensor(f"{Q}.weight_scale", with_byte(0, 0)), {"scale-value"}),
    (NVFP4, set_tensor(f"{Q}.weight_scale", with_byte(1, 0xB8)), {"scale-value"}),
    (
        MOE,
        set_tensor(f"{EXPERT.replace('up', 'down')}.input_scale", torch.zeros_like),
        {"scale-value"},
    ),
    (FP8, set_tensor(f"{Q}.input_scale", lambda t: -t), {"scale-value"}),
    (KV, set_tensor("model.layers.1.self_attn.k_proj.k_scale", torch.zeros_like), {"scale-value"}),
    # 4: what belongs to a weight
    (MOE, drop(f"{EXPERT}.input_scale"), {"scale-missing"}),
    (NVFP4, drop(f"{Q}.weight_scale_2"), {"scale-missing"}),
    (FP8, drop(f"{Q}.weight_scale"), {"scale-missing"}),
    ("gpt_oss-fp8", drop("model.layers.0.mlp.experts.down_proj_input_scale"), {"scale-missing"}),
    (NVFP4, drop(f"{Q}.weight"), {"scale-orphan"}),
    (NVFP4, put("lm_head.input_scale", ONE), {"scale-on-unpacked"}),
    (FP8, put(f"{Q}.weight_scale_2", ONE), {"scale-unexpected"}),
    ("llama-w4a16_nvfp4", put(f"{Q}.input_scale", ONE), {"scale-unexpected"}),
    (NVFP4, put(f"{Q}.pre_quant_scale", torch.ones(128)), {"scale-unexpected"}),
    (NVFP4, set_tensor(f"{Q}.weight_scale", lambda t: t[:, :4].contiguous()), {"scale-shape"}),
    ("llama-fp8_pc_pt", set_tensor(f"{Q}.weight_scale", lambda t: t[:1]), {"scale-shape"}),
    (NVFP4, set_tensor(f"{Q}.weight_scale", lambda t: t.float()), {"scale-dtype"}),
    (FP8, set_tensor(f"{Q}.weight_scale", lambda t: t.bfloat16()), {"scale-dtype"}),
    (
        NVFP4,
        set_tensor("lm_head.weight", lambda t: t.view(torch.uint8)),
        {"excluded-but-packed", "scale-missing"},
    ),
    (
        FP8,
        set_tensor(f"{Q}.weight", lambda t: t.view(torch.uint8)),
        {"weight-dtype", "group-format"},
    ),
    (
        "llama-w4a16_nvfp4",
        set_tensor(f"{Q}.weight", lambda t: t[:, :4].contiguous()),
        {"weight-shape"},
    ),
    # 5 and 6: packed or not, together or not
    (NVFP4, set_tensor(f"{Q}.weight_scale_2", lambda t: t * 2), {"group-scale"}),
    (NVFP4, set_tensor("model.layers.1.mlp.up_proj.input_scale", lambda t: t / 2), {"group-scale"}),
    (MOE, set_tensor(f"{EXPERT}.weight_scale_2", lambda t: t * 1.5), {"group-scale"}),
    (
        MOE,
        drop(*(f"{EXPERT}.{s}" for s in ("weight", "weight_scale", "weight_scale_2"))),
        {"expert-missing", "scale-orphan"},
    ),
    (KV, drop("model.layers.0.self_attn.v_proj.v_scale"), {"kv-pair"}),
    (
        KV,
        drop(*(f"model.layers.0.self_attn.{x}_proj.{x}_scale" for x in "kv")),
        {"kv-missing"},
    ),
    (
        AFFINE,
        drop(*(f"model.layers.{i}.self_attn.{x}_proj.{x}_bias" for i in (0, 1) for x in "kv")),
        {"kv-config"},
    ),
    (
        NVFP4,
        put("model.layers.0.self_attn.k_proj.k_scale", ONE),
        {"kv-pair", "kv-missing", "kv-config"},
    ),
    (
        KV,
        set_tensor("model.layers.0.self_attn.v_proj.v_scale", lambda t: t.repeat(2)),
        {"kv-scale-shape"},
    ),
]


@pytest.mark.parametrize(("case", "damage", "rules"), TENSOR_DAMAGES)
def test_damaged_tensors(
    case: str, damage: Callable[[Path], None], rules: set[str], tmp_path: Path
) -> None:
    folder = copied(case, tmp_path)
    damage(folder)
    assert errors(folder) == rules


def test_one_unpacked_sibling_is_a_group_of_two_formats(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)

    def unpack(tensors: Tensors) -> None:
        for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{Q}.{suffix}"]
        tensors[f"{Q}.weight"] = torch.ones(128, 128, dtype=torch.bfloat16)

    edit(folder, unpack)
    assert errors(folder) == {"group-format"}


def test_experts_of_a_tower_may_be_others(tmp_path: Path) -> None:
    folder = copied("qwen3_moe-fp8", tmp_path)
    name = "vision_encoder.blocks.0.mlp.experts.1.fc1.weight"
    put(name, torch.zeros(4, 4, dtype=torch.bfloat16))(folder)
    assert "expert-missing" not in errors(folder)


def test_one_unpacked_expert_is_named(tmp_path: Path) -> None:
    folder = copied(MOE, tmp_path)

    def unpack(tensors: Tensors) -> None:
        for role in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.0.mlp.experts.3.{role}"
            for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
                del tensors[f"{name}.{suffix}"]
            tensors[f"{name}.weight"] = torch.ones(128, 128, dtype=torch.bfloat16)

    edit(folder, unpack)
    findings = audit(folder)
    assert {f.rule for f in findings} == {"expert-format"}
    assert "experts.3.gate_proj" in findings[0].message


def test_fp8_siblings_with_other_scales_are_a_warning() -> None:
    findings = audit(GOLDEN / FP8 / "export")
    assert {(f.rule, f.severity) for f in findings} == {("group-scale", "warning")}


def test_e8m0_scales_may_be_zero_but_not_nan(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    codes = torch.zeros(128, 8, dtype=torch.uint8)
    edit(folder, lambda t: t.update({f"{Q}.weight_scale": codes}))
    assert "scale-value" not in errors(folder)
    edit(folder, lambda t: t.update({f"{Q}.weight_scale": codes + 255}))
    assert "scale-value" in errors(folder)


def test_a_cache_without_scales_or_with_biases_is_a_warning(tmp_path: Path) -> None:
    """The cast formats mean the first; the peer calls an affine FP8 cache FP8."""
    folder = copied(KV, tmp_path)
    names = [f"model.layers.{i}.self_attn.{x}_proj.{x}_scale" for i in (0, 1) for x in "kv"]
    drop(*names)(folder)
    put("model.layers.0.self_attn.k_proj.k_bias", torch.zeros(1, 2, 1, 32).bfloat16())(folder)
    found = [f for f in audit(folder, source=source_of(KV)) if f.rule == "kv-config"]
    assert [f.severity for f in found] == ["warning", "warning"]


def test_weights_that_hold_scales_of_inputs_are_compared_with_a_warning(
    checkpoint: Callable[..., Path], token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    """The configs of an export whose scales are all folded do not tell; its report does."""
    source, out = checkpoint("qwen3_moe"), tmp_path / "out"
    quantize_and_export(
        source, export_dir=out, recipe="nvfp4_awq_lite", calib_data=token_batches, progress=False
    )
    found = audit(out, source=source, deep=True)
    assert [f.message for f in found if f.severity == "error"] == []
