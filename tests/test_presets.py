"""Every preset and cache format, end to end: exported, audited, read again, near the original."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelopt_lite import perplexity, quantize_and_export
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.cache import CACHE_FORMATS
from modelopt_lite.recipes import preset_names
from modelopt_lite.verify.audit import audit

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


@pytest.mark.parametrize("cache", sorted(CACHE_FORMATS))
def test_cache(cache: str, tmp_path: Path) -> None:
    source, out = INPUTS / "llama", tmp_path / "out"
    ids = list(load_file(source / "calib_ids.safetensors").values())
    quantize_and_export(
        source,
        export_dir=out,
        recipe="w4a16_nvfp4",
        kv_cache=cache,
        calib_data=ids,
        device="cpu",
        progress=False,
    )
    kind = CACHE_FORMATS[cache]
    written = load_file(out / "model.safetensors")
    assert sum(name.endswith(("k_scale", "v_scale")) for name in written) == 4 * kind.scaled
    biases = {name: t for name, t in written.items() if name.endswith(("k_bias", "v_bias"))}
    assert len(biases) == 4 * kind.affine
    assert all(t.shape == (1, 2, 1, 32) and t.dtype == torch.bfloat16 for t in biases.values())
    section = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    flat = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["kv_cache_quant_algo"] == kind.algo
    eight = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert flat["kv_cache_scheme"] == (eight if kind.algo == "FP8" else kind.algo)
    assert not [f for f in audit(out, source=source, deep=True) if f.severity == "error"]


def test_a_cast_needs_no_data(tmp_path: Path) -> None:
    report = quantize_and_export(
        INPUTS / "llama",
        export_dir=tmp_path / "out",
        recipe="w4a16_nvfp4",
        kv_cache="fp8_cast",
        device="cpu",
        progress=False,
    )
    assert "calibration" not in report.details


def test_latent_attention_has_no_affine_cache(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no projection 'k_proj' of whole heads"):
        quantize_and_export(
            INPUTS / "deepseek_v3",
            export_dir=tmp_path / "out",
            recipe="fp8",
            kv_cache="fp8_affine",
            device="cpu",
            progress=False,
        )
