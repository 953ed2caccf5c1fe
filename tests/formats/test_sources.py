"""Formats that are only read: DeepSeek's block FP8 and gpt-oss's MXFP4."""

from __future__ import annotations

import pytest
import torch

from modelopt_lite.errors import ShapeError
from modelopt_lite.formats import fp8, fp8_block, mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_e4m3_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = codes.float()
    got = fp8.decode(codes)
    assert got.isnan().equal(expected.isnan())
    assert got.nan_to_num().view(torch.int32).equal(expected.nan_to_num().view(torch.int32))
    assert (
        fp8.decode(codes.view(16, 16).t())
        .nan_to_num()
        .equal(expected.view(16, 16).t().nan_to_num())
    )


def test_block_fp8_crops_the_edge() -> None:
    """C63: 200 x 300 has 2 x 3 blocks."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(200, 300, generator=generator)
    scale = torch.empty(2, 3)
    codes = torch.empty(200, 300, dtype=torch.float8_e4m3fn)
    for i in range(2):
        for j in range(3):
            block = w[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            scale[i, j] = block.abs().max() / 448
            codes[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] = (block / scale[i, j]).to(
                codes.dtype
            )
    expected = torch.tensor(
        [
            [codes[r, c].item() * scale[r // 128, c // 128].item() for c in range(300)]
            for r in range(200)
        ]
    )
    got = fp8_block.dequantize(codes, scale)
    assert got.equal(expected)
    assert float((got - w).norm() / w.norm()) < 0.03
    assert fp8_block.dequantize(codes, scale, dtype=torch.bfloat16).equal(expected.bfloat16())
    with pytest.raises(ShapeError, match=r"\[2, 3\], got \[3, 2\]"):
        fp8_block.dequantize(codes, scale.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 5, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 250, (2, 5, 3), dtype=torch.uint8, generator=generator)
    expected = torch.empty(2, 5, 96, dtype=torch.float64)
    for e in range(2):
        for r in range(5):
            for k in range(96):
                byte = int(blocks[e, r, k // 32, k % 32 // 2])
                code = byte >> 4 if k % 2 else byte & 15
                size = E2M1[code & 7] * 2.0 ** (int(scales[e, r, k // 32]) - 127)
                expected[e, r, k] = -size if code & 8 else size
    rows = mxfp4.dequantize_groups(blocks, scales, dtype)
    assert rows.dtype == dtype
    assert rows.double().equal(expected)
    turned = mxfp4.dequantize_groups(blocks, scales, dtype, input_major=True)
    assert turned.is_contiguous()
    assert turned.equal(rows.transpose(1, 2))
    assert mxfp4.dequantize_groups(blocks[0], scales[0], dtype).equal(rows[0])


def test_mxfp4_as_transformers() -> None:
    from transformers.integrations import mxfp4 as upstream

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 8, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (2, 8, 2), dtype=torch.uint8, generator=generator)
    expected = upstream.convert_moe_packed_tensors(blocks.clone(), scales.clone())
    assert mxfp4.dequantize_groups(blocks, scales, torch.bfloat16, input_major=True).equal(expected)


def test_mxfp4_bad_input() -> None:
    blocks, scales = torch.zeros(1, 2, 1, 16, dtype=torch.uint8), torch.zeros(1, 2, 1).byte()
    scales[0, 1, 0] = 255
    value = mxfp4.dequantize_groups(blocks, scales)
    assert value[0, 1].isnan().all()
    assert not value[0, 0].isnan().any()
    with pytest.raises(ShapeError, match="not belong together"):
        mxfp4.dequantize_groups(blocks, scales[:, :1])
