"""MXFP4 becomes NVFP4 without a loss, as far as the exponents of a matrix reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelopt_lite.checkpoint.dequant import DequantizedSource, open_source
from modelopt_lite.formats import e2m1, mxfp4, nvfp4

Make = Callable[..., Path]
BIAS = 127


def made_up(shape: tuple[int, ...], exponents: range, seed: int) -> tuple[Tensor, Tensor]:
    """Random codes [..., R, G, 16], zeros of both signs among them, and scales [..., R, G]."""
    generator = torch.Generator().manual_seed(seed)
    *lead, columns = shape
    blocks = torch.randint(0, 256, (*lead, columns // 32, 16), generator=generator).byte()
    low, high = exponents.start + BIAS, exponents.stop + BIAS
    scales = torch.randint(low, high, (*lead, columns // 32), generator=generator).byte()
    return blocks, scales


def gpt_oss(checkpoint: Make, cases: Any, exponents: range) -> tuple[Path, dict[str, Any]]:
    """A small gpt-oss in MXFP4, and its packed experts by name."""
    source = checkpoint("gpt_oss", hidden_size=64, intermediate_size=64)
    packed: dict[str, Any] = {}

    def encode(tensors: dict[str, Tensor]) -> None:
        for seed, name in enumerate(sorted(n for n, t in tensors.items() if t.ndim == 3)):
            experts, columns, rows = tensors.pop(name).shape
            packed[name] = made_up((experts, rows, columns), exponents, seed)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed[name]

    cases.edit(source, encode)
    cases.config(source, lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))
    assert len(packed) == 4
    return source, packed


def nibbles(packed: Tensor) -> Tensor:
    return e2m1.unpack(packed.contiguous())


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16_nvfp4"])
def test_c65_codes_are_kept(recipe: str, checkpoint: Make, cases: Any) -> None:
    """Eighteen powers of two side by side, which is all that E4M3 has."""
    source, packed = gpt_oss(checkpoint, cases, range(-16, 2))
    out = cases.run(source, recipe)
    for name, (blocks, scales) in packed.items():
        codes = nibbles(blocks.flatten(-2))
        assert torch.equal(nibbles(out.tensors[name].mT), codes), name
        decoded = mxfp4.dequantize_groups(blocks, scales, torch.float32, input_major=True)
        assert torch.equal(out.value(name), decoded), name
        assert float(out.tensors[f"{name}_weight_scale_2"]) == 2.0 ** (1 - 8)
        kept = out.tensors[f"{name}_weight_scale"].mT.float()
        wanted = torch.exp2(scales.float() - BIAS - 1 + 8).repeat_interleave(2, -1)
        some = (codes & 7 != 0).view(*wanted.shape, 16).any(-1)
        assert torch.equal(kept[some], wanted[some])
    assert not out.problems()


def test_what_lies_too_low_is_rounded_within_the_bound(checkpoint: Make, cases: Any) -> None:
    source, packed = gpt_oss(checkpoint, cases, range(-30, 2))
    out = cases.run(source, "w4a16_nvfp4")
    lost = 0
    for name, (blocks, scales) in packed.items():
        decoded = mxfp4.dequantize_groups(blocks, scales, torch.float32)
        error = (out.value(name).mT - decoded).abs()
        near = (scales.int() - BIAS >= 1 - 17).repeat_interleave(32, -1)
        assert not error[near].any()
        bound = nvfp4.error_bound(decoded, torch.tensor(2.0**-7))
        assert bool((error <= bound).all())
        lost += int((error > 0).sum())
        codes = nibbles(out.tensors[name].mT)
        assert torch.equal(codes[near], nibbles(blocks.flatten(-2))[near])
    assert lost
    assert not out.problems()


def test_zeros_have_no_say(checkpoint: Make, cases: Any) -> None:
    """A block of zeros under a large power of two does not push others out of reach."""
    source, packed = gpt_oss(checkpoint, cases, range(-12, -2))

    def edit(tensors: dict[str, Tensor]) -> None:
        for name, (blocks, scales) in packed.items():
            blocks[0, 0, 0], scales[0, 0, 0] = 0, 100 + BIAS
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales

    cases.edit(source, edit)
    out = cases.run(source, "w4a16_nvfp4")
    for name, (blocks, scales) in packed.items():
        decoded = mxfp4.dequantize_groups(blocks, scales, torch.float32, input_major=True)
        assert torch.equal(out.value(name), decoded), name


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_an_mxfp4_export_becomes_nvfp4_and_says_the_same(
    kind: str, dialect: str, checkpoint: Make, cases: Any
) -> None:
    """Linears and experts one by one; what an engine fuses has one global scale."""
    first = cases.run(checkpoint(kind), "mxfp4", dialect=dialect)
    again = cases.run(first.folder, "w4a16_nvfp4", dialect=dialect)
    with open_source(first.folder) as one, open_source(again.folder) as other:
        assert isinstance(one, DequantizedSource)
        assert isinstance(other, DequantizedSource)
        assert one.encoded.keys() == other.encoded.keys()
        assert len(one.encoded) > 7
        for name in one.encoded:
            assert torch.equal(one.read(name), other.read(name)), name
    assert not again.problems()


def test_the_peers_numerics_round_anew(checkpoint: Make, cases: Any) -> None:
    source, packed = gpt_oss(checkpoint, cases, range(-6, 2))
    out = cases.run(source, "nvfp4", numerics="modelopt")
    for name in packed:
        log = torch.log2(out.tensors[f"{name}_weight_scale_2"])
        assert float(log) != round(float(log))
