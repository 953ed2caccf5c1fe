"""Stacks of experts that the peer exports otherwise: ours lose less. See docs/numerics.md.

What the peer writes is made here from its rule, as `nox -s parity` met it in exports of gpt_oss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_lite.formats import fp8
from modelopt_lite.formats.linear import FORMATS


def stack(row_factors: Tensor, column_factors: Tensor) -> Tensor:
    """Return bfloat16 [E, in, out] = [2, 256, 512], whose parts have other magnitudes."""
    w = torch.randn(2, 256, 512, generator=torch.Generator().manual_seed(0))
    return (w * row_factors.view(-1, 1) * column_factors).bfloat16()


def loss(value: Tensor, w: Tensor) -> float:
    """Return the norm of the difference in the norm of the original, column by column."""
    apart = (value.float() - w.float()).norm(dim=1) / w.float().norm(dim=1)
    return float(apart.mean())


def ours(name: str, w: Tensor) -> Tensor:
    fmt = FORMATS[name]
    tensors = fmt.quantize(w, None, numerics="modelopt", input_major=True)
    turned = fmt.turns(True, "modelopt")
    return fmt.dequantize(tensors, torch.float32, turned=turned)


def test_channels_of_experts_have_scales() -> None:
    """The peer writes one scale an expert, in a format of one scale a channel."""
    w = stack(torch.ones(256), 2.0 ** -torch.linspace(0, 20, 512))
    scale = fp8.scale_from_amax(w.float().abs().amax((1, 2))).view(-1, 1, 1)
    peers = (w.float() / scale).to(torch.float8_e4m3fn).float() * scale
    assert loss(ours("fp8_per_channel_per_token", w), w) < 0.5 * loss(peers, w)


def test_blocks_of_experts_keep_their_scales() -> None:
    """The peer finds scales [E, out / 128, in / 128], and takes them in that order as [in, out]."""
    w = stack(2.0 ** torch.tensor([0.0, 3.0]).repeat_interleave(128), torch.ones(512))
    blocks = w.float().abs().view(2, 2, 128, 4, 128).amax((2, 4))
    taken = fp8.scale_from_amax(blocks.mT.contiguous().view(2, 2, 4))
    scale = taken.repeat_interleave(128, 1).repeat_interleave(128, 2)
    peers = (w.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert loss(ours("fp8_2d_blockwise_weight_only", w), w) < 0.2 * loss(peers, w)


def test_inputs_of_experts_are_scaled_as_they_run() -> None:
    """The peer calibrates nothing, and writes the scale of an amax of 0.5 for every expert."""
    x = 4 * torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    peers = fp8.fake_quantize(x, torch.tensor(0.5 / 448))
    got = FORMATS["w4a8_mxfp4_fp8_dynamic"].fake_quantize_input(x, None)
    assert loss(got[None], x[None]) < 0.1 * loss(peers[None], x[None])
