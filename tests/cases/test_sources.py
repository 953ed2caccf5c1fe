"""Sources that are quantized already: decoded, never taken for numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelopt_lite.checkpoint.dequant import open_source

Make = Callable[..., Path]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8 = torch.float8_e4m3fn


def to_block_fp8(w: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes and inverse scales, one a block; plain loops, the edge blocks are smaller."""
    rows, columns = (-(-size // per) for size, per in zip(w.shape, block, strict=True))
    codes, scales = torch.empty(w.shape, dtype=FP8), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scales[i, j] = w[part].abs().max().float() / 448
            codes[part] = (w[part].float() / scales[i, j]).to(FP8)
    return codes, scales


def from_block_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    value = torch.empty(codes.shape)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            value[i, j] = codes[i, j].float() * scales[i // block[0], j // block[1]]
    return value


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "w4a16_nvfp4", "nvfp4_experts_only"])
@pytest.mark.parametrize("block", [(128, 128), (24, 20), (16, 16)])
def test_c63_block_fp8(checkpoint: Make, cases: Any, recipe: str, block: tuple[int, int]) -> None:
    """Codes without their scales are thousands of times too large, and load without an error."""
    source = checkpoint("deepseek_v3")
    original = cases.load_all(source)
    decoded: dict[str, Tensor] = {}

    def encode(tensors: dict[str, Tensor]) -> None:
        for name, w in original.items():
            if w.ndim == 2 and "_proj" in name:
                codes, scales = to_block_fp8(w, block)
                tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
                decoded[name] = from_block_fp8(codes, scales, block).bfloat16()

    cases.edit(source, encode)
    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    cases.config(source, lambda c: c.update(quantization_config=section))
    with open_source(source) as opened:
        assert not [name for name in opened.tensors if "scale_inv" in name]
        for name, value in decoded.items():
            assert torch.equal(opened.read(name), value), name
            relative = (value.float() - original[name].float()).norm() / original[name].norm()
            assert float(relative) < 0.04
    out = cases.run(source, recipe)
    assert not [name for name in out.tensors if "scale_inv" in name]
    assert "weight_block_size" not in out.config["quantization_config"]
    for name in out.packed:
        value = out.value(name)
        error = (value - decoded[f"{name}.weight"].float()).norm() / value.norm()
        assert float(error) < (0.04 if recipe == "fp8" else 0.13), name
    for name in set(decoded) - {f"{n}.weight" for n in out.packed}:
        assert torch.equal(out.tensors[name], decoded[name])  # left out, and decoded all the same
    assert not out.problems()


def to_mxfp4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [E, R, K / 32, 16] and scales [E, R, K / 32] of [E, R, K], and what they stand for."""
    experts, rows, columns = w.shape
    grid = w.float().view(experts, rows, columns // 32, 32)
    exponent = grid.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2
    scaled = grid / torch.exp2(exponent).unsqueeze(-1)
    levels = torch.tensor(E2M1)
    code = (scaled.abs().unsqueeze(-1) - levels).abs().argmin(-1)
    value = levels[code] * scaled.sign() * torch.exp2(exponent).unsqueeze(-1)
    nibble = (code | ((scaled < 0).long() << 3)).to(torch.uint8)
    blocks = nibble[..., 0::2] | (nibble[..., 1::2] << 4)
    return blocks, (exponent + 127).to(torch.uint8), value.reshape(w.shape)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
@pytest.mark.parametrize("offload", ["auto", "none"])
def test_c64_mxfp4_of_gpt_oss(checkpoint: Make, cases: Any, recipe: str, offload: str) -> None:
    """Published checkpoints hold packed experts; there was no handler for them on a CPU."""
    source = checkpoint("gpt_oss", hidden_size=64, intermediate_size=32)
    decoded: dict[str, Tensor] = {}

    def encode(tensors: dict[str, Tensor]) -> None:
        for name in [n for n, t in tensors.items() if t.ndim == 3]:
            blocks, scales, value = to_mxfp4(tensors.pop(name).mT)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            decoded[name] = value.mT.bfloat16()

    cases.edit(source, encode)
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    cases.config(source, lambda c: c.update(quantization_config=section))
    assert len(decoded) == 4
    with open_source(source) as opened:
        for name, value in decoded.items():
            assert torch.equal(opened.read(name), value)
    out = cases.run(source, recipe, offload=offload)
    assert not [n for n in out.tensors if n.endswith(("_blocks", "_scales"))]
    assert out.quantization["quant_algo"] == recipe.upper()
    assert "modules_to_not_convert" not in out.config["quantization_config"]
    for name, value in decoded.items():
        error = (out.value(name) - value.float()).norm() / value.float().norm()
        assert float(error) < (0.04 if recipe == "fp8" else 0.13)
    assert not out.problems()


def test_fp8_source_with_a_scale_a_tensor(checkpoint: Make, cases: Any) -> None:
    """The third common kind, with static input scales that must not be carried over."""
    source = checkpoint("qwen3_moe")
    original = cases.load_all(source)

    def encode(tensors: dict[str, Tensor]) -> None:
        for name, w in original.items():
            if w.ndim == 2 and "_proj" in name:
                scale = w.abs().max().float() / 448
                tensors[name] = (w.float() / scale).to(FP8)
                stem = name.removesuffix(".weight")
                tensors[f"{stem}.weight_scale"] = scale
                tensors[f"{stem}.input_scale"] = torch.tensor(123.0)

    cases.edit(source, encode)
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    cases.config(source, lambda c: c.update(quantization_config=section))
    out = cases.run(source, "nvfp4")
    assert not [s for s in out.scales("input_scale").values() if float(s) == 123.0]
    for name in out.packed:
        value = original[f"{name}.weight"].float()
        assert float((out.value(name) - value).norm() / value.norm()) < 0.15
    assert not out.problems()
