"""Scales: none swapped, zero, or underflown; shapes and values at the edge."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelopt_lite import Recipe, dry_run, quantize_and_export
from modelopt_lite.errors import NonFiniteError, ShapeError
from modelopt_lite.verify.audit import audit

Make = Callable[..., Path]
FORMATS = ("fp8", "nvfp4", "w4a16_nvfp4", "fp8_per_channel_per_token")
LARGEST = {"fp8": 448.0, "nvfp4": 2688.0}
DOWN = "model.layers.0.mlp.down_proj"


def errors(folder: Path, source: Path) -> set[str]:
    found = audit(folder, source=source, deep=True, compare_bytes=False)
    return {f.rule for f in found if f.severity == "error"}


@pytest.mark.parametrize(
    ("kind", "recipe", "suffix"),
    [
        ("qwen3_moe", "fp8", "weight_scale"),
        ("llama", "nvfp4", "weight_scale_2"),
        ("llama", "w4a16_nvfp4", "weight_scale_2"),
        ("gpt_oss", "nvfp4", "weight_scale_2"),
        ("llama", "fp8_per_channel_per_token", "weight_scale"),
        ("llama", "nvfp4", "weight_scale"),
    ],
)
def test_c31_swapped_scales_are_found(
    checkpoint: Make, cases: Any, kind: str, recipe: str, suffix: str
) -> None:
    """With fixtures whose scales are all near one, a swapped or forgotten scale passes."""
    out = cases.run(checkpoint(kind), recipe)
    assert not out.problems()
    scales = {
        f"{n}{joint}{suffix}": s
        for n, s in out.scales(suffix).items()
        for joint in ("." if f"{n}.{suffix}" in out.tensors else "_",)
    }
    mutant = cases.tmp_path / "mutant"
    shutil.copytree(out.folder, mutant)

    def check(changes: dict[str, Tensor]) -> None:
        save_file({**out.tensors, **changes}, mutant / "model.safetensors", {"format": "pt"})
        assert errors(mutant, out.source), sorted(changes)

    pairs = [
        (a, b)
        for a, b in itertools.combinations(sorted(scales), 2)
        if scales[a].shape == scales[b].shape
        and not torch.equal(scales[a].float(), scales[b].float())
    ]
    assert len(pairs) > 10
    for a, b in pairs[:: max(1, len(pairs) // 12)]:
        check({a: scales[b], b: scales[a]})
    for name in sorted(scales)[:3]:
        check({name: torch.ones_like(scales[name].float()).to(scales[name].dtype)})


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_c31_input_scales_are_what_plain_hooks_see(
    checkpoint: Make, cases: Any, recipe: str
) -> None:
    """A wrong input scale is invisible in the weights; forward hooks are an independent witness."""
    source = checkpoint("llama")
    out = cases.run(source, recipe)
    seen: dict[str, float] = {}
    model = cases.load(source)

    def hook(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = max(seen.get(name, 0.0), float(args[0].abs().max()))

        return see

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for batch in cases.batches:
            model(batch)
    scales = out.scales("input_scale")
    assert len(scales) == 14
    assert len({float(s) for s in scales.values()}) >= 7
    for name, scale in scales.items():
        assert float(scale) == pytest.approx(seen[name] / LARGEST[recipe], rel=1e-6)


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("part", ["all", "block", "rows", "negative zero"])
def test_c48_zeros_stay_zeros(checkpoint: Make, cases: Any, recipe: str, part: str) -> None:
    """A matrix, row or block of zeros had the scale 0, and 0 / 0 was written."""
    source = checkpoint("llama")
    where: Any = {"block": (2, slice(16, 32)), "rows": slice(3, 7)}.get(part, ...)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.weight"][where] = -0.0 if part == "negative zero" else 0.0

    cases.edit(source, change)
    out = cases.run(source, recipe)
    value = out.value(DOWN)
    assert bool(torch.isfinite(value).all())
    assert bool((value[where] == 0).all())
    assert all(bool((s.float() > 0).all()) for s in out.scales("weight_scale").values())
    assert all(bool((s > 0).all()) for s in out.scales("weight_scale_2").values())
    assert not out.report.beyond_bound
    assert not out.problems()


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_c48_an_expert_of_zeros(checkpoint: Make, cases: Any, kind: str, recipe: str) -> None:
    """The same for one expert of a layer."""
    source = checkpoint(kind)

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".experts.3." in name:
                tensor.zero_()
            elif ".experts." in name and tensor.ndim == 3:
                tensor[3] = 0

    cases.edit(source, change)
    out = cases.run(source, recipe)
    assert all(bool(torch.isfinite(t.float()).all()) for t in out.tensors.values())
    assert not out.problems()


def test_c48_inputs_of_zeros(checkpoint: Make, cases: Any) -> None:
    """What multiplies zeros only has an input of zeros; its scale must not be zero."""
    source = checkpoint("llama")
    cases.edit(source, lambda t: t["model.layers.0.mlp.up_proj.weight"].zero_())
    for recipe in ("fp8", "nvfp4"):
        out = cases.run(source, recipe)
        scale = out.tensors[f"{DOWN}.input_scale"]
        assert float(scale) > 0
        assert not out.problems()


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16_nvfp4"])
@pytest.mark.parametrize("factor", [1e-6, 1e-30, 2.0**-19])
def test_c49_tiny_blocks_keep_a_scale(
    checkpoint: Make, cases: Any, recipe: str, factor: float
) -> None:
    """A block far below the matrix's maximum had its scale rounded to zero."""
    source = checkpoint("llama")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.weight"][2, 16:32] *= factor
        tensors[f"{DOWN}.weight"][5] *= factor

    cases.edit(source, change)
    out = cases.run(source, recipe)
    scale = out.tensors[f"{DOWN}.weight_scale"].float()
    assert float(scale.min()) >= 2.0**-9
    assert not out.report.beyond_bound
    assert not out.problems()


@pytest.mark.parametrize("recipe", FORMATS)
def test_c49_very_small_and_very_large_weights(checkpoint: Make, cases: Any, recipe: str) -> None:
    """Magnitudes near the ends of bfloat16 neither overflow nor vanish."""
    source = checkpoint("llama")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.o_proj.weight"] *= 2.0**-120
        tensors["model.layers.1.mlp.down_proj.weight"] *= 2.0**100

    cases.edit(source, change)
    out = cases.run(source, recipe, calib_data=cases.batches[:1])
    assert not out.report.beyond_bound
    assert not out.problems()
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"):
        original = out.original[f"{name}.weight"].double()
        error = (out.value(name).double() - original).norm() / original.norm()
        assert float(error) < (0.15 if "nvfp4" in recipe else 0.05)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("recipe", FORMATS)
def test_c50_no_nan_gets_through(checkpoint: Make, cases: Any, recipe: str, value: float) -> None:
    """NaN and infinity were turned into numbers, or written as they were."""
    source = checkpoint("llama")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.weight"][1, 1] = value

    cases.edit(source, change)
    with pytest.raises(NonFiniteError, match=rf"{DOWN}\.weight.*1 value"):
        cases.run(source, recipe)
    assert not [p for p in cases.tmp_path.iterdir() if p != source]


@pytest.mark.parametrize(
    ("recipe", "kind", "size", "fits"),
    [
        ("nvfp4", "llama", {"intermediate_size": 40}, False),
        ("w4a16_nvfp4", "llama", {"intermediate_size": 40}, False),
        ("nvfp4_experts_only", "qwen3_moe", {"moe_intermediate_size": 24}, False),
        ("nvfp4", "gpt_oss", {"intermediate_size": 24}, False),
        ("fp8", "llama", {"intermediate_size": 40}, True),
        ("fp8_per_channel_per_token", "gpt_oss", {"intermediate_size": 24}, True),
        ("nvfp4", "llama", {"intermediate_size": 48}, True),
    ],
)
def test_c52_shapes_are_checked_first(
    checkpoint: Make,
    cases: Any,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    kind: str,
    size: dict[str, int],
    fits: bool,
) -> None:
    """The block size was checked when calibration was over."""
    source = checkpoint(kind, **size)
    if fits:
        assert not cases.run(source, recipe).problems()
        return

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something ran before the shapes were checked")

    monkeypatch.setattr(nn.Module, "__call__", forbidden)
    monkeypatch.setattr("modelopt_lite.checkpoint.reader.Checkpoint.read", forbidden)
    with pytest.raises(ShapeError, match="not a multiple of 16"):
        cases.run(source, recipe)


@pytest.mark.parametrize("recipe", FORMATS)
def test_c53_gate_with_one_output(checkpoint: Make, cases: Any, recipe: str) -> None:
    """One output row became a tensor of zero columns in packed layouts."""
    out = cases.run(checkpoint("qwen2_moe"), recipe)
    gate = "model.layers.0.mlp.shared_expert_gate"
    assert out.tensors[f"{gate}.weight"].shape == (1, 32)
    assert torch.equal(out.tensors[f"{gate}.weight"], out.original[f"{gate}.weight"])
    assert gate in out.excluded
    assert "model.layers.0.mlp.shared_expert.gate_proj" in out.packed
    assert all(t.numel() for t in out.tensors.values())
    assert not out.problems()


def test_groups_that_engines_join_share_what_they_must(checkpoint: Make, cases: Any) -> None:
    """Joined layers with global scales of their own are re-quantized or refused on loading."""
    for kind in ("llama", "qwen3_moe", "deepseek_v3"):
        out = cases.run(checkpoint(kind))
        for suffix in ("weight_scale_2", "input_scale"):
            scales = out.scales(suffix)
            for name, scale in scales.items():
                for one, other in (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("gate_", "up_")):
                    sibling = name.replace(one, other)
                    if sibling in scales:
                        assert torch.equal(scale, scales[sibling]), (name, suffix)


def test_group_with_one_member_left_out(checkpoint: Make, cases: Any) -> None:
    """Engines cannot hold a joined layer of which one part is packed and another is not."""
    recipe = Recipe(name="mine", weights="nvfp4", exclude=("*.layers.0.*.k_proj",))
    out = cases.run(checkpoint("llama"), recipe)
    for role in "qkv":
        assert f"model.layers.0.self_attn.{role}_proj" in out.excluded
    assert "model.layers.0.self_attn.o_proj" in out.packed
    assert "model.layers.1.self_attn.q_proj" in out.packed
    assert not out.problems()


def test_float16_and_float32_sources(checkpoint: Make, cases: Any) -> None:
    """Other dtypes than bfloat16: what is not quantized keeps its own."""
    for dtype in (torch.float16, torch.float32):
        source = checkpoint("llama")
        name = str(dtype).removeprefix("torch.")
        cases.edit(source, lambda t, d=dtype: t.update({n: v.to(d) for n, v in t.items()}))
        cases.config(source, lambda c, n=name: c.update({"dtype": n, "torch_dtype": n}))
        for recipe in FORMATS:
            out = cases.run(source, recipe)
            assert out.tensors["model.norm.weight"].dtype == dtype
            assert not out.problems()


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_the_export_is_read_as_a_source_again(checkpoint: Make, cases: Any, recipe: str) -> None:
    """An export is a source like any other: decoded, not taken for numbers, and said to be."""
    once = cases.run(checkpoint("llama"), recipe, kv_cache="fp8")
    twice = cases.run(once.folder, "nvfp4")
    planned = dry_run(once.folder, recipe="nvfp4")["notes"]
    for notes in (twice.report.notes, planned):
        [note] = [note for note in notes if "quantized already" in note]
        assert f"(modelopt {recipe.upper()}): 14 tensors decoded to bfloat16" in note
        assert "18 scales of inputs and KV cache left behind" in note
        assert "original checkpoint" in note
    name = "model.layers.1.self_attn.o_proj"
    original = once.original[f"{name}.weight"].float()
    assert float((twice.value(name) - original).norm() / original.norm()) < 0.15
    assert not any("quantized already" in note for note in once.report.notes)
    assert twice.quantization["quant_algo"] == "NVFP4"
    assert not [n for n, t in twice.tensors.items() if n.endswith(".weight_scale") and not t.ndim]
    assert not twice.problems()


def test_report_speaks_of_the_written_scales(checkpoint: Make, cases: Any) -> None:
    """The report's evidence and the file's scales must be the same numbers."""
    source, out = checkpoint("llama"), cases.tmp_path / "out"
    report = quantize_and_export(
        source, export_dir=out, recipe="fp8", calib_data=cases.batches, progress=False
    )
    written = load_file(out / "model.safetensors")
    amax = report.input_amax["model.layers.0.mlp.down_proj"]
    assert float(written[f"{DOWN}.input_scale"]) == pytest.approx(amax / 448, rel=1e-6)
    assert all(0 < error < 0.1 for error in report.relative_errors.values())
    assert report.export_bytes == sum(t.nbytes for t in written.values())
