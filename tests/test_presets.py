"""Every preset and cache format, end to end: exported, audited, read again, near the original."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelopt_lite import perplexity, quantize_and_export
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.cache import CACHE_FORMATS
from modelopt_lite.recipes import Override, Recipe, preset_names
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


MIXED = Recipe(
    name="mixed",
    weights="nvfp4",
    kv_cache="fp8",
    overrides=(
        Override(modules=("*.self_attn",), weights="fp8"),
        Override(modules=("*.o_proj",), weights="none"),
        Override(modules=("*.layers.1.mlp",), weights="mxfp4"),
    ),
)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """An export of llama in three formats."""
    source = INPUTS / "llama"
    quantize_and_export(
        source,
        export_dir=tmp_path / "out",
        recipe=MIXED,
        calib_data=source / "calib_ids.safetensors",
        device="cpu",
        progress=False,
    )
    return tmp_path / "out"


def test_mixed_precision(mixed: Path) -> None:
    section = json.loads((mixed / "hf_quant_config.json").read_text())["quantization"]
    flat = json.loads((mixed / "config.json").read_text())["quantization_config"]
    listed = section["quantized_layers"]
    assert section["quant_algo"] == flat["quant_algo"] == "MIXED_PRECISION"
    assert flat["quantized_layers"] == listed
    assert "exclude_modules" not in section
    first, second = "model.layers.0", "model.layers.1"
    assert listed[f"{first}.self_attn.q_proj"] == {"quant_algo": "FP8"}
    assert listed[f"{first}.mlp.up_proj"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert listed[f"{second}.mlp.up_proj"] == {"quant_algo": "mxfp4", "group_size": 32}
    assert not any(name.endswith("o_proj") for name in listed)
    assert len(listed) == 12
    targets = [name for group in flat["config_groups"].values() for name in group["targets"]]
    assert sorted(targets) == sorted(listed)
    assert [group["weights"]["num_bits"] for group in flat["config_groups"].values()] == [4, 8, 4]
    findings = audit(mixed, source=INPUTS / "llama", deep=True)
    assert findings == []
    ids = load_file(INPUTS / "llama" / "calib_ids.safetensors")["input_ids.0"]
    before, after = (perplexity(f, text=ids, device="cpu") for f in (INPUTS / "llama", mixed))
    assert after.nll == pytest.approx(before.nll, rel=0.05)


def change_list(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    for name, key in (
        ("config.json", "quantization_config"),
        ("hf_quant_config.json", "quantization"),
    ):
        content = json.loads((folder / name).read_text())
        change(content[key]["quantized_layers"])
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (lambda layers: layers.pop("model.layers.0.mlp.down_proj"), {"mixed-layers"}),
        (
            lambda layers: layers.update(
                {"model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"}}
            ),
            {"mixed-layers"},
        ),
        (
            lambda layers: layers.update({"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}}),
            {"weight-dtype", "source-shape"},
        ),
    ],
)
def test_damaged_lists_are_found(
    mixed: Path, change: Callable[[dict[str, Any]], Any], rules: set[str]
) -> None:
    change_list(mixed, change)
    found = audit(mixed, source=INPUTS / "llama")
    assert {finding.rule for finding in found if finding.severity == "error"} == rules


def test_formats_of_joined_layers_must_agree(tmp_path: Path) -> None:
    recipe = Recipe(
        name="split",
        weights="w4a16_nvfp4",
        overrides=(Override(modules=("*.k_proj",), weights="fp8"),),
    )
    with pytest.raises(RecipeError, match=r"'fp8' and .*q_proj' 'w4a16_nvfp4', and engines join"):
        quantize_and_export(
            INPUTS / "llama", export_dir=tmp_path, recipe=recipe, device="cpu", progress=False
        )


def test_mixed_experts(tmp_path: Path) -> None:
    source = INPUTS / "gpt_oss"
    recipe = Recipe(
        name="mixed",
        weights="fp8",
        overrides=(Override(modules=("*.experts",), weights="mxfp4"),),
    )
    report = quantize_and_export(
        source,
        export_dir=tmp_path / "out",
        recipe=recipe,
        calib_data=source / "calib_ids.safetensors",
        device="cpu",
        progress=False,
    )
    assert set(report.quantized.values()) == {"fp8", "mxfp4"}
    # SGLang takes a mixture without NVFP4 for another one, and is named.
    assert {f.rule for f in audit(tmp_path / "out", source=source, deep=True)} == {"mixed-method"}
    ids = load_file(source / "calib_ids.safetensors")["input_ids.0"]
    before, after = (perplexity(f, text=ids, device="cpu") for f in (source, tmp_path / "out"))
    assert after.nll == pytest.approx(before.nll, rel=0.05)
