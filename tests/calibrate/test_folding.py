"""Scales of input channels, folded or kept, leave what the model computes as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_lite import Recipe, quantize_and_export
from modelopt_lite.export.quantize import matrix_value, quantize_matrices
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.plan import Matrix
from modelopt_lite.recipes.algorithms import METHODS, AlgorithmChoice

MakeCheckpoint = Callable[..., Path]
KINDS = (
    "llama",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "gemma3_text",
    "nemotron_h",
    "qwen2_moe",
)


def widened(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint in float32."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    wide = {name: t.float() for name, t in tensors.items()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"bfloat16"', '"float32"'))
    return folder


def smoothed(
    source: Path,
    out: Path,
    batches: Sequence[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> dict[str, Tensor]:
    """The tensors of an export as they would be if nothing was rounded, by their names on disk."""
    tensors: dict[str, Tensor] = load_file(source / "model.safetensors")

    def spy(matrices: list[Matrix], sources: Any, *args: Any, **kwargs: Any) -> Any:
        for m in matrices:
            treated = kwargs["treated"]
            value = treated.weight(m, matrix_value(m, sources))
            scale = treated.extras(m).get("pre_quant_scale")
            if scale is not None:
                turned = m.input_major and value.ndim == 3
                value = value * (scale.view(-1, 1) if turned else scale)
            whole = tensors[m.source]
            part = whole[m.region] if m.region else whole
            part.copy_(value.mT if m.input_major and value.ndim == 2 else value)
        return quantize_matrices(matrices, sources, *args, **kwargs)

    monkeypatch.setattr("modelopt_lite.export.exporter.quantize_matrices", spy)
    quantize_and_export(source, export_dir=out, calib_data=batches, progress=False, **options)
    written: dict[str, Tensor] = load_file(out / "model.safetensors")
    matrices = {name for name in written if f"{name}_scale" in written}
    same = written.keys() & tensors.keys() - matrices
    return tensors | {name: written[name] for name in same if written[name].is_floating_point()}


def logits(folder: Path, batch: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        out: Tensor = model(batch, use_cache=False).logits
    return out


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*((kind, "nvfp4_awq_lite") for kind in KINDS), ("qwen3_moe", "int8_smoothquant")],
)
def test_logits_stay(
    kind: str,
    recipe: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = widened(checkpoint(kind), tmp_path / "wide")
    before = load_file(source / "model.safetensors")
    after = smoothed(source, tmp_path / "out", token_batches, monkeypatch, recipe=recipe)
    changed = {name for name, t in after.items() if not torch.equal(t, before[name])}
    assert any("norm" in name for name in changed)
    folder = tmp_path / "after"
    shutil.copytree(source, folder)
    save_file(after, folder / "model.safetensors", metadata={"format": "pt"})
    expected, found = logits(source, token_batches[0]), logits(folder, token_batches[0])
    assert (expected - found).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    ("weights", "kind"), [("int4_weight_only", "llama"), ("nvfp4", "llama"), ("nvfp4", "qwen3_moe")]
)
def test_clipping_is_chosen_for_rows_as_they_are_written(
    weights: str,
    kind: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of v and up take up the scale of what follows, and their scales clip by 0.5 to 1."""
    ratios: dict[str, Tensor] = {}

    def spy(matrices: list[Matrix], sources: Any, *args: Any, **kwargs: Any) -> Any:
        treated, amax = kwargs["treated"], {}
        for m in matrices:
            value = treated.weight(m, matrix_value(m, sources))
            chosen = treated.scale_amax(m)
            if chosen is not None:
                ratios[m.name] = chosen / FORMATS[m.format].codec.scale_amax(value)
            else:
                amax[m] = float(value.float().abs().max())
        for m in amax:
            whole = max(a for other, a in amax.items() if other.weight_group == m.weight_group)
            ratios[m.name] = treated.amax(m) / whole
        return quantize_matrices(matrices, sources, *args, **kwargs)

    monkeypatch.setattr("modelopt_lite.export.exporter.quantize_matrices", spy)
    recipe = Recipe(
        name="clipped",
        weights=weights,
        algorithm=AlgorithmChoice(method="awq_full", options=METHODS["awq_full"]),
    )
    source = checkpoint(kind, **dict.fromkeys(("hidden_size", "intermediate_size"), 256))
    report = quantize_and_export(
        source, export_dir=tmp_path / "out", calib_data=token_batches, recipe=recipe, progress=False
    )
    assert not report.beyond_bound
    assert any(name.endswith("up_proj") for name in ratios)
    for name, ratio in ratios.items():
        # Searched in the dtype of the weights, written from unrounded products.
        assert float(ratio.min()) >= 0.5 * (1 - 2**-7), name
        assert float(ratio.max()) <= 1 + 2**-7, name
