"""What both dialects and every schedule must agree on, and what may not be left behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_lite import export_hf, quantize
from modelopt_lite.calibrate.observe import InputWatch
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.errors import NonFiniteError, ShapeError
from modelopt_lite.recipes import Override, Recipe
from modelopt_lite.verify.matchers import sglang_excluded, tensorrt_excluded, vllm_excluded

Make = Callable[..., Path]
WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}


def test_c04_c09_cold_fused_experts_of_awq_keep_the_format(checkpoint: Make, cases: Any) -> None:
    """Two tokens reach two of eight experts; all are packed, and the cold ones are named."""
    data = [torch.tensor([[5, 9]])]
    out = cases.run(checkpoint("qwen3_moe", **WIDE), "int4_awq", calib_data=data)
    experts = {n for n, t in out.tensors.items() if ".experts." in n and n.endswith(".weight")}
    assert len(experts) == 2 * 8 * 3
    assert {out.tensors[n].dtype for n in experts} == {torch.uint8}
    assert len(out.report.cold_experts) >= 2 * 6
    assert out.problems() == []


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_c12_no_scale_is_left_out_on_reading(recipe: str, checkpoint: Make, cases: Any) -> None:
    """Without its global scale, an expert comes back off by a constant."""
    out = cases.run(checkpoint("qwen3_moe"), recipe, dialect="compressed-tensors")
    decoded = open_source(out.folder)
    names = [n for n in out.original if ".experts." in n]
    assert len(names) == 48
    for name in names:
        ratio = decoded.read(name).float().norm() / out.original[name].float().norm()
        assert ratio == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_c15_watching_changes_no_number(kind: str, checkpoint: Make, cases: Any) -> None:
    model = cases.load(checkpoint(kind))
    ids = cases.batches[0]
    seen: list[Any] = []
    watch = InputWatch(lambda site, x, batched: seen.append(site))
    watch.watch({n: p for n, p in model.named_parameters() if p.ndim > 1})
    with torch.inference_mode():
        plain = model(input_ids=ids, use_cache=False).logits
        with watch:
            watched = model(input_ids=ids, use_cache=False).logits
    assert seen
    assert torch.equal(plain, watched)


def test_c20_entries_hold_under_the_names_of_engines(checkpoint: Make, cases: Any) -> None:
    """Engines of composite models call ``model.X`` ``language_model.model.X``."""
    out = cases.run(checkpoint("qwen3_moe"), "nvfp4")
    renamed = [f"language_model.{entry}" for entry in out.excluded]
    modules = {n.removesuffix(".weight") for n in out.original if n.endswith(".weight")}
    for entry in out.excluded:
        assert entry in modules | {"lm_head"}
    for name in modules:
        for there, entries in ((name, list(out.excluded)), (f"language_model.{name}", renamed)):
            excluded = name in out.excluded
            assert tensorrt_excluded(there, entries) == excluded
            if ".experts." not in name and not name.endswith(("gate_proj", "up_proj")):
                assert bool(sglang_excluded(there, entries)) == excluded
                assert bool(vllm_excluded(there, entries)) == excluded


def test_c23_mixtures_list_what_is_quantized_and_the_rest_is_not(
    checkpoint: Make, cases: Any
) -> None:
    recipe = Recipe(
        name="mixed",
        weights="nvfp4",
        overrides=(
            Override(modules=("*.self_attn",), weights="fp8"),
            Override(modules=("model.layers.1.mlp.experts",), weights="none"),
        ),
    )
    out = cases.run(checkpoint("qwen3_moe"), recipe)
    listed = set(out.quantization["quantized_layers"])
    matrices = {n.removesuffix(".weight") for n, t in out.original.items() if t.ndim == 2}
    assert listed == out.packed
    assert not listed & set(out.report.excluded)
    assert matrices - listed <= set(out.report.excluded) | {"model.embed_tokens"}


SUFFIXES = {
    ("fp8", "modelopt"): "weight weight_scale input_scale",
    ("fp8", "compressed-tensors"): "weight weight_scale input_scale",
    ("nvfp4", "modelopt"): "weight weight_scale weight_scale_2 input_scale",
    ("nvfp4", "compressed-tensors"): (
        "weight_packed weight_scale weight_global_scale input_global_scale"
    ),
    ("w4a16_nvfp4", "modelopt"): "weight weight_scale weight_scale_2",
    ("mxfp8", "modelopt"): "weight weight_scale",
    ("mxfp8", "compressed-tensors"): "weight weight_scale",
    ("int8_weight_only", "compressed-tensors"): "weight_packed weight_scale weight_shape",
}


@pytest.mark.parametrize(("recipe", "dialect"), SUFFIXES)
def test_c27_suffixes_of_each_dialect(
    recipe: str, dialect: str, checkpoint: Make, cases: Any
) -> None:
    out = cases.run(checkpoint("llama"), recipe, dialect=dialect)
    stem = "model.layers.0.mlp.down_proj."
    found = {n.removeprefix(stem) for n in out.tensors if n.startswith(stem)}
    assert found == set(SUFFIXES[recipe, dialect].split())


def test_c28_the_dialects_hold_reciprocals_and_the_same_codes(checkpoint: Make, cases: Any) -> None:
    source = checkpoint("llama")
    ours = cases.run(source, "nvfp4").tensors
    theirs = cases.run(source, "nvfp4", dialect="compressed-tensors").tensors
    modules = [n.removesuffix(".weight_scale_2") for n in ours if n.endswith(".weight_scale_2")]
    assert len(modules) == 14
    for module in modules:
        assert torch.equal(ours[f"{module}.weight"], theirs[f"{module}.weight_packed"])
        blocks = (t[f"{module}.weight_scale"].view(torch.uint8) for t in (ours, theirs))
        assert torch.equal(*blocks)
        for scale, reciprocal in (
            ("weight_scale_2", "weight_global_scale"),
            ("input_scale", "input_global_scale"),
        ):
            product = ours[f"{module}.{scale}"].double() * theirs[f"{module}.{reciprocal}"].double()
            assert float(product) == pytest.approx(1, abs=2**-23)


@pytest.mark.parametrize("offload", ["auto", "none"])
def test_c40_c41_nothing_of_calibration_is_left_and_cache_scales_are_real(
    offload: str, checkpoint: Make, cases: Any
) -> None:
    out = cases.run(checkpoint("llama"), "fp8", kv_cache="fp8", offload=offload)
    assert not [n for n in out.tensors if re.search(r"_amax|_quantizer|\.linear\.", n)]
    scales = out.scales("k_scale")
    assert len(scales) == 2
    assert all(scale.device.type == "cpu" and scale > 0 for scale in scales.values())


def test_c43_a_model_that_is_refused_is_unchanged(checkpoint: Make, cases: Any) -> None:
    """K of down_proj is no multiple of 16, which the export of a model in memory finds out."""
    source = checkpoint("llama", intermediate_size=40)
    model = cases.load(source)
    before = {n: p.clone() for n, p in model.named_parameters()}
    modules = [type(m) for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    quantize(model, "nvfp4", forward_loop=lambda m: [m(b) for b in cases.batches])
    with pytest.raises(ShapeError):
        export_hf(model, cases.tmp_path / "out", source=source)
    assert not (cases.tmp_path / "out").exists()
    assert [type(m) for m in model.modules()] == modules
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_c51_activations_that_overflow_are_named(checkpoint: Make, cases: Any) -> None:
    source = checkpoint("llama")

    def overflow(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})
        for role in ("gate", "up"):
            tensors[f"model.layers.0.mlp.{role}_proj.weight"].fill_(6e4)

    cases.edit(source, overflow)
    cases.config(source, lambda c: c.update(dtype="float16", torch_dtype="float16"))
    with pytest.raises(NonFiniteError, match=r"layers\.0|layers\.1"):
        cases.run(source, "fp8")
