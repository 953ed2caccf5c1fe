"""Checkpoints of compressed-tensors that other programs wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelopt_lite.checkpoint.dequant import DequantizedSource, open_source
from modelopt_lite.errors import CheckpointError, UnsupportedSourceError

MakeCheckpoint = Callable[..., Path]


def config(weights: dict[str, Any], inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    section = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}
    return {"model_type": "llama", "torch_dtype": "float32", "quantization_config": section}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def codes_of(bits: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    low = 1 << (bits - 1)
    return torch.randint(-low, low, shape, generator=generator, dtype=torch.int32)


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack along the last axis, code by code."""
    count = 32 // bits
    columns = -(-codes.shape[1] // count)
    packed = torch.zeros(codes.shape[0], columns, dtype=torch.int64)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            unsigned = int(codes[row, column]) + (1 << (bits - 1))
            packed[row, column // count] |= unsigned << (bits * (column % count))
    return packed.to(torch.int32)


def opened(folder: Path) -> DequantizedSource:
    source = open_source(folder)
    assert isinstance(source, DequantizedSource)
    return source


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_integers_in_words(
    bits: int, groups: int, asymmetric: bool, make_checkpoint: MakeCheckpoint
) -> None:
    codes, scale = codes_of(bits, 8, 24), random(8, groups).abs()
    zero = codes_of(bits, groups, 8).mT if asymmetric else torch.zeros(8, groups)
    tensors = {
        "q.weight_packed": words(codes, bits),
        "q.weight_scale": scale,
        "q.weight_shape": torch.tensor([8, 24]),
    }
    if asymmetric:  # eight or four rows to a word
        tensors["q.weight_zero_point"] = words(zero.mT, bits).mT.contiguous()
    strategy = {"strategy": "group", "group_size": 8} if groups > 1 else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": not asymmetric, **strategy}
    source = opened(make_checkpoint(tensors, config=config(weights, format="pack-quantized")))
    wide = [t.repeat_interleave(24 // groups, 1) for t in (zero, scale)]
    assert torch.equal(source.read("q.weight"), (codes - wide[0]).float() * wide[1])
    assert set(source.tensors) == {"q.weight"}
    assert set(source.consumed["q.weight"]) == set(tensors)
    served = source.encoded["q.weight"].served  # zero points are not ours, nor is INT8 in groups
    assert (served is not None) == (not asymmetric and (bits == 8) == (groups == 1))


@pytest.mark.parametrize("scale", [random(8, 1).abs(), torch.tensor([0.5])], ids=["row", "one"])
def test_integers_in_bytes(scale: Tensor, make_checkpoint: MakeCheckpoint) -> None:
    codes = codes_of(8, 8, 6)
    tensors = {"q.weight": codes.to(torch.int8), "q.weight_scale": scale}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    source = opened(make_checkpoint(tensors, config=config(weights, inputs)))
    assert torch.equal(source.read("q.weight"), codes.float() * scale)


def test_nvfp4_divides_by_its_global_scale(make_checkpoint: MakeCheckpoint) -> None:
    packed = torch.arange(64, dtype=torch.uint8).view(4, 16)
    scale = (random(4, 2).abs() * 50).to(torch.float8_e4m3fn)
    tensors = {
        "q.weight_packed": packed,
        "q.weight_scale": scale,
        "q.weight_global_scale": torch.tensor([3.0]),
        "q.input_global_scale": torch.tensor([4.0]),
    }
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    inputs = {**weights, "dynamic": "local"}
    source = opened(make_checkpoint(tensors, config=config(weights, inputs)))
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    values = e2m1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    expected = values * (scale.float() / 3).repeat_interleave(16, 1)
    assert torch.equal(source.read("q.weight"), expected)
    assert source.input_scales == {"q": 0.25}
    served = source.encoded["q.weight"].served
    assert served is not None
    assert served.name == "nvfp4"


INT4 = {"num_bits": 4, "type": "int", "strategy": "channel"}
WORDS = {
    "q.weight_packed": words(codes_of(4, 8, 8), 4),
    "q.weight_scale": random(8, 1).abs(),
    "q.weight_shape": torch.tensor([8, 8]),
}


@pytest.mark.parametrize(
    ("change", "weights", "message"),
    [
        ({}, {**INT4, "num_bits": 3}, "'num_bits': 3"),
        ({"q.weight_g_idx": torch.arange(8)}, INT4, "g_idx"),
    ],
)
def test_what_is_not_read(
    change: dict[str, Tensor],
    weights: dict[str, Any],
    message: str,
    make_checkpoint: MakeCheckpoint,
) -> None:
    folder = make_checkpoint({**WORDS, **change}, config=config(weights))
    with pytest.raises(UnsupportedSourceError, match=message):
        open_source(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q.weight_scale": random(3, 1)}, "do not belong to a matrix"),
        ({"q.weight_shape": torch.tensor([8, 24])}, "do not belong to a matrix"),
        ({"q.weight_shape": None}, "lacks 'q.weight_shape'"),
        (
            {"q.weight_packed": torch.zeros(8, 4, dtype=torch.uint8), "q.weight_shape": None}
            | {"q.weight_scale": torch.ones(8, 1).to(torch.float8_e4m3fn)},
            "lacks 'q.weight_global_scale'",
        ),
    ],
)
def test_damage(
    change: dict[str, Tensor | None], message: str, make_checkpoint: MakeCheckpoint
) -> None:
    tensors = {name: t for name, t in {**WORDS, **change}.items() if t is not None}
    folder = make_checkpoint(tensors, config=config(INT4))
    with pytest.raises(CheckpointError, match=message):
        open_source(folder)


def test_codes_that_no_group_describes(make_checkpoint: MakeCheckpoint) -> None:
    settings = config(INT4)
    settings["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:k$"]
    with pytest.raises(CheckpointError, match=r"'q\.weight_packed' holds codes, and no group"):
        open_source(make_checkpoint(WORDS, config=settings))
