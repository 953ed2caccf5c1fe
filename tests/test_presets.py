"""Every preset, end to end: exported, audited, read again, near the original."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from modelopt_lite import perplexity, quantize_and_export
from modelopt_lite.recipes import preset_names

INPUTS = Path(__file__).parent / "data" / "golden" / "inputs"
# Stacks of experts whose reduction axis comes first.
STACKED = [
    "fp8",
    "fp8_2d_blockwise_weight_only",
    "int8",
    "int4_weight_only",
    "nvfp4",
    "w4a8_nvfp4_fp8",
    "mxfp4",
    "mxfp8",
]


@pytest.mark.parametrize(
    ("preset", "model"),
    [*((name, "llama") for name in preset_names()), *((name, "gpt_oss") for name in STACKED)],
)
def test_preset(preset: str, model: str, tmp_path: Path) -> None:
    source, out = INPUTS / model, tmp_path / "out"
    ids = list(load_file(source / "calib_ids.safetensors").values())
    if preset == "nvfp4_experts_only" and model == "llama":
        pytest.skip("has no experts")
    report = quantize_and_export(
        source, export_dir=out, recipe=preset, calib_data=ids, device="cpu", progress=False
    )
    assert not report.beyond_bound
    assert report.quantized
    assert all(0 < error < 0.2 for error in report.relative_errors.values())
    before, after = (perplexity(f, text=ids[0], device="cpu") for f in (source, out))
    assert after.quantized
    assert after.nll == pytest.approx(before.nll, rel=0.05)
