"""``numerics="modelopt"`` gives the bytes that Model Optimizer 0.47 wrote."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelopt_lite.formats import base
from modelopt_lite.formats.linear import FORMATS, measure_error

ROOT = Path(__file__).parents[1] / "data" / "golden"


@cache
def source(case: str) -> dict[str, Tensor]:
    """The tensors that a case was made from."""
    name = json.loads((ROOT / case / "case.json").read_text())["input"]
    return _load(ROOT / "inputs" / name)


@cache
def export(case: str) -> dict[str, Tensor]:
    """The tensors of a case's export."""
    return _load(ROOT / case / "export")


def modules(case: str) -> list[str]:
    """Names of quantized matrices whose source has the same name, without ``.weight``."""
    return [
        name.removesuffix(".weight_scale")
        for name in sorted(export(case))
        if name.endswith(".weight_scale") and name.removesuffix("_scale") in source(case)
    ]


def fused_group(module: str) -> tuple[str, ...]:
    """The last names of the modules that share a scale with this one."""
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        if module.rpartition(".")[2] in group:
            return group
    return (module.rpartition(".")[2],)


def _load(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(path))
    return tensors


CASES = {
    "llama-fp8": "fp8",
    "llama-fp8_pc_pt": "fp8_per_channel_per_token",
    "llama-fp8_pb_wo": "fp8_2d_blockwise_weight_only",
    "llama-int8_wo": "int8_weight_only",
    "llama-mxfp4": "mxfp4",
    "llama-w4a8_mxfp4_fp8": "w4a8_mxfp4_fp8_dynamic",
    "llama-w4a8_mxfp4_fp8_max": "w4a8_mxfp4_fp8",
    "gpt_oss-mxfp4": "mxfp4",
    "llama-int4_wo": "int4_weight_only",
    "llama-nvfp4": "nvfp4",
    "llama-w4a16_nvfp4": "w4a16_nvfp4",
    "llama_f32-nvfp4": "nvfp4",
    "gpt_oss-fp8": "fp8",
    "phi3-fp8": "fp8",
}


def same_bytes(got: Tensor, expected: Tensor) -> bool:
    return (
        got.dtype == expected.dtype
        and got.shape == expected.shape
        and got.contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(expected.contiguous().view(-1).view(torch.uint8))
    )


def group_amax(case: str, module: str) -> Tensor:
    parent = module.rpartition(".")[0]
    weights = [source(case)[f"{parent}.{n}.weight"] for n in fused_group(module)]
    return torch.stack([base.amax(w) for w in weights]).max()


@pytest.mark.parametrize("case", CASES)
def test_weights(case: str) -> None:
    fmt = FORMATS[CASES[case]]
    names = modules(case)
    assert len(names) >= 6
    for module in names:
        w = source(case)[f"{module}.weight"]
        # The peer's dense FP8 gives each matrix its own scale.
        shared = fmt.shares_amax(tuple(w.shape), "modelopt") and fmt.name != "fp8"
        amax = group_amax(case, module) if shared else None
        tensors = fmt.quantize(w, amax, numerics="modelopt")
        for suffix, tensor in tensors.items():
            assert same_bytes(tensor, export(case)[f"{module}.{suffix}"]), (module, suffix)
        assert measure_error(fmt, w, tensors, numerics="modelopt").worst <= 1


def test_stacked_experts() -> None:
    case = "gpt_oss-fp8"
    names = [n for n in export(case) if n.endswith(("gate_up_proj", "down_proj"))]
    assert names
    for name in names:
        w = source(case)[name]
        tensors = FORMATS["fp8"].quantize(w, None, numerics="modelopt", input_major=True)
        assert same_bytes(tensors["weight"], export(case)[name])
        assert same_bytes(tensors["weight_scale"], export(case)[f"{name}_weight_scale"])


@pytest.mark.parametrize("case", ["qwen3_moe-nvfp4", "glm4_moe-nvfp4"])
def test_experts_share_gate_and_up(case: str) -> None:
    gates = [n for n in modules(case) if ".experts." in n and n.endswith("gate_proj")]
    assert gates
    for gate in gates:
        amax = group_amax(case, gate)
        for module in (gate, gate.replace("gate_proj", "up_proj")):
            tensors = FORMATS["nvfp4"].quantize(
                source(case)[f"{module}.weight"], amax, numerics="modelopt"
            )
            for suffix, tensor in tensors.items():
                assert same_bytes(tensor, export(case)[f"{module}.{suffix}"]), (module, suffix)


def test_exact_is_no_worse() -> None:
    """The one difference on ordinary weights: no rounding of the quotient to bfloat16."""
    fmt = FORMATS["fp8"]
    for module in modules("llama-fp8"):
        w = source("llama-fp8")[f"{module}.weight"]
        errors = {
            n: measure_error(fmt, w, fmt.quantize(w, None, numerics=n), numerics=n).relative
            for n in ("exact", "modelopt")
        }
        assert errors["exact"] < errors["modelopt"]
