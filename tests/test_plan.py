"""The plan: groups, names, shapes and the account of every tensor, before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_lite import quantize_and_export
from modelopt_lite.checkpoint.names import natural_key
from modelopt_lite.errors import CheckpointError, RecipeError, ShapeError
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.job import prepare
from modelopt_lite.plan import Plan
from modelopt_lite.recipes import Recipe, load_recipe

MakeCheckpoint = Callable[..., Path]
V5 = Version(transformers.__version__) >= Version("5")
KINDS = (
    *("llama", "llama_tied", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma3_text"),
    *("phi3", "qwen2_moe", "glm4_moe", "nemotron_h"),
)


def plan_of(folder: Path, recipe: str | Recipe = "fp8", **options: Any) -> Plan:
    fields = {"model_type": None, "numerics": "exact", "on_bad_shape": "error", **options}
    kv_cache = fields.pop("kv_cache", None)
    loaded = load_recipe(recipe, kv_cache=kv_cache)
    return prepare(folder, loaded, trust_remote_code=False, device="cpu", **fields).plan


# --- the account


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", sorted(set(FORMATS) & {"fp8", "nvfp4", "w4a16_nvfp4"}))
def test_every_source_tensor_is_accounted_for(
    kind: str, recipe: str, checkpoint: MakeCheckpoint
) -> None:
    folder = checkpoint(kind)
    disk = load_file(folder / "model.safetensors")
    plan = plan_of(folder, recipe)
    quantized = {m.source for m in plan.matrices}
    copied = {c.source for c in plan.copies}
    assert quantized | copied == set(disk)
    assert not quantized & copied
    for copy in plan.copies:
        assert copy.output.name == copy.source
        assert copy.output.shape == tuple(disk[copy.source].shape)
        assert copy.output.dtype == disk[copy.source].dtype
    assert sum(_numel(m.shape) for m in plan.matrices) == sum(disk[n].numel() for n in quantized)
    names = [output.name for output in plan.outputs]
    assert len(names) == len(set(names))
    assert names == sorted(names, key=natural_key)
    wanted = {c.output.name for c in plan.copies}
    wanted |= {output.name for m in plan.matrices for output in m.outputs.values()}
    assert set(names) == wanted
    units = {unit.name: unit for unit in plan.units}
    assert plan.by_tensor == (recipe == "w4a16_nvfp4")
    for m in plan.matrices:
        assert (m.source if plan.by_tensor else m.entry) in units[m.unit].entries


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_what_stays_is_named(kind: str, checkpoint: MakeCheckpoint) -> None:
    plan = plan_of(checkpoint(kind))
    assert "lm_head" in plan.unquantized
    assert "model.embed_tokens" in plan.unquantized
    router = {"qwen3_moe": "mlp.gate", "gpt_oss": "mlp.router"}.get(kind)
    assert router is None or f"model.layers.0.{router}" in plan.unquantized
    assert not set(plan.unquantized) & {m.name for m in plan.matrices}
    assert not any("norm" in name for name in plan.unquantized)


def test_a_tied_head_is_named_though_no_tensor_is_its_own(checkpoint: MakeCheckpoint) -> None:
    plan = plan_of(checkpoint("llama_tied"))
    assert "lm_head" in plan.unquantized
    assert not any(output.name.startswith("lm_head") for output in plan.outputs)


# --- groups


def groups(plan: Plan, attribute: str) -> list[set[str]]:
    found: dict[Any, set[str]] = {}
    for m in plan.matrices:
        found.setdefault(getattr(m, attribute), set()).add(m.name)
    return list(found.values())


LAYER = "model.layers.0"
QKV = {f"{LAYER}.self_attn.{name}_proj" for name in "qkv"}


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_what_engines_fuse_shares_scales(recipe: str, checkpoint: MakeCheckpoint) -> None:
    plan = plan_of(checkpoint("llama"), recipe)
    for attribute in ("weight_group", "input_group"):
        made = groups(plan, attribute)
        assert QKV in made
        assert {f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"} in made
        assert {f"{LAYER}.mlp.down_proj"} in made
        assert {f"{LAYER}.self_attn.o_proj"} in made


def test_the_peer_leaves_dense_siblings_their_own_fp8_scales(checkpoint: MakeCheckpoint) -> None:
    plan = plan_of(checkpoint("llama"), "fp8", numerics="modelopt")
    assert QKV in groups(plan, "input_group")
    assert {f"{LAYER}.self_attn.q_proj"} in groups(plan, "weight_group")
    plan = plan_of(checkpoint("qwen3_moe"), "fp8", numerics="modelopt")
    pair = {f"{LAYER}.mlp.experts.3.{name}_proj" for name in ("gate", "up")}
    assert pair in groups(plan, "weight_group")


def test_experts_of_a_layer_share_the_scale_of_what_they_read(checkpoint: MakeCheckpoint) -> None:
    plan = plan_of(checkpoint("qwen3_moe"), "nvfp4")
    first = f"{LAYER}.mlp.experts"
    expected = {f"{first}.{e}.{name}_proj" for e in range(8) for name in ("gate", "up")}
    assert expected in groups(plan, "input_group")
    assert {f"{first}.{e}.down_proj" for e in range(8)} in groups(plan, "input_group")
    assert {f"{first}.5.gate_proj", f"{first}.5.up_proj"} in groups(plan, "weight_group")


def test_latent_attention(checkpoint: MakeCheckpoint) -> None:
    plan = plan_of(checkpoint("deepseek_v3"))
    pair = {f"{LAYER}.self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa")}
    assert pair in groups(plan, "weight_group")


def test_formats_without_static_inputs_have_no_input_groups(checkpoint: MakeCheckpoint) -> None:
    plan = plan_of(checkpoint("llama"), "w4a16_nvfp4")
    assert {m.input_group for m in plan.matrices} == {None}
    assert not plan.needs_calibration
    assert plan_of(checkpoint("llama"), "fp8").needs_calibration
    assert plan_of(checkpoint("llama"), "w4a16_nvfp4", kv_cache="fp8").needs_calibration


def test_a_group_is_left_out_whole(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama")
    recipe = Recipe(name="mine", weights="nvfp4", exclude=("*.layers.0.self_attn.k_proj",))
    plan = plan_of(folder, recipe)
    reason = f"engines fuse it with {LAYER}.self_attn.k_proj, which is left out"
    assert plan.excluded[f"{LAYER}.self_attn.q_proj"] == reason
    assert plan.excluded[f"{LAYER}.self_attn.v_proj"] == reason
    assert "excluded by the pattern" in plan.excluded[f"{LAYER}.self_attn.k_proj"]
    names = {m.name for m in plan.matrices}
    assert f"{LAYER}.self_attn.o_proj" in names
    assert "model.layers.1.self_attn.q_proj" in names


def test_experts_of_a_layer_are_left_out_together(checkpoint: MakeCheckpoint) -> None:
    recipe = Recipe(name="mine", weights="fp8", exclude=("*.layers.0.mlp.experts.3.down_proj",))
    plan = plan_of(checkpoint("qwen3_moe"), recipe)
    assert not any(m.name.startswith(f"{LAYER}.mlp") for m in plan.matrices)
    assert any(m.name.startswith("model.layers.1.mlp.experts") for m in plan.matrices)
    assert sum("engines fuse it" in reason for reason in plan.excluded.values()) == 8 * 3 - 1


# --- shapes


def test_shapes_that_the_format_cannot_hold(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama", intermediate_size=40)
    with pytest.raises(ShapeError, match=r"2 matrices do not .*down_proj \[32, 40\] in nvfp4"):
        plan_of(folder, "nvfp4")
    plan = plan_of(folder, "nvfp4", on_bad_shape="skip")
    assert plan.excluded[f"{LAYER}.mlp.down_proj"].startswith("shape: ")
    assert f"{LAYER}.mlp.gate_proj" in {m.name for m in plan.matrices}
    assert plan_of(folder, "fp8").excluded.keys() == {"lm_head"}


def test_bad_options(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama")
    with pytest.raises(RecipeError, match=r"on_bad_shape .* 'maybe'"):
        plan_of(folder, on_bad_shape="maybe")
    with pytest.raises(RecipeError, match=r"numerics .* 'loose'"):
        plan_of(folder, numerics="loose")
    with pytest.raises(CheckpointError, match=r"'mistral' was given, .* says 'llama'"):
        plan_of(folder, model_type="mistral")
    with pytest.raises(RecipeError, match="format 'fp9'"):
        plan_of(folder, Recipe(name="mine", weights="fp9"))


# --- the key and value cache


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "gpt_oss", "gemma3_text", "phi3"])
def test_cache_scales(kind: str, checkpoint: MakeCheckpoint) -> None:
    plan = plan_of(checkpoint(kind), kv_cache="fp8")
    key, value = ("qkv_proj", "qkv_proj") if kind == "phi3" else ("k_proj", "v_proj")
    names = [(s.key.name, s.value.name) for s in plan.kv_cache]
    assert names == [
        (f"{prefix}.{key}.k_scale", f"{prefix}.{value}.v_scale")
        for prefix in ("model.layers.0.self_attn", "model.layers.1.self_attn")
    ]
    assert [s.module for s in plan.kv_cache] == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert all(s.key.dtype == torch.float32 and s.key.shape == () for s in plan.kv_cache)
    assert {name for pair in names for name in pair} <= {output.name for output in plan.outputs}


def test_cache_scales_of_the_attention_layers_alone(checkpoint: MakeCheckpoint) -> None:
    plan = plan_of(checkpoint("nemotron_h"), kv_cache="fp8")
    assert [s.key.name for s in plan.kv_cache] == ["backbone.layers.2.mixer.k_proj.k_scale"]


# --- experts stored as one tensor


def stack_experts(folder: Path) -> None:
    """Store a qwen3_moe checkpoint's experts as [E, 2I, H] and [E, H, I], gate first."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts: dict[str, list[Tensor]] = {
            name: [tensors.pop(f"{prefix}.{e}.{name}_proj.weight") for e in range(8)]
            for name in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{prefix}.down_proj"] = torch.stack(parts["down"])
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_stacked_and_single_experts_give_the_same_bytes(
    recipe: str, checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    if not V5:
        pytest.skip("transformers 4 has no fused experts for qwen3_moe")
    folder = checkpoint("qwen3_moe")
    options: dict[str, Any] = {"recipe": recipe, "calib_data": token_batches, "progress": False}
    quantize_and_export(folder, export_dir=tmp_path / "single", **options)
    stack_experts(folder)
    plan = plan_of(folder, recipe)
    assert sum(".experts." in m.name for m in plan.matrices) == 2 * 8 * 3
    assert not any("gate_up_proj" in output.name for output in plan.outputs)
    quantize_and_export(folder, export_dir=tmp_path / "stacked", **options)
    one, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("single", "stacked")
    )
    assert one == other


def test_stacked_experts_left_out_get_the_names_of_single_ones(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    if not V5:
        pytest.skip("transformers 4 has no fused experts for qwen3_moe")
    folder = checkpoint("qwen3_moe")
    before = load_file(folder / "model.safetensors")
    stack_experts(folder)
    recipe = Recipe(name="mine", weights="fp8", exclude=("*.layers.0.mlp.experts.3.down_proj",))
    plan = plan_of(folder, recipe)
    quantize_and_export(
        folder, export_dir=tmp_path / "out", recipe=recipe, calib_data=token_batches, progress=False
    )
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == {output.name for output in plan.outputs}
    stack = made[f"{LAYER}.mlp.experts.down_proj"]  # nothing is taken from it: copied as it is
    assert torch.equal(stack[3], before[f"{LAYER}.mlp.experts.3.down_proj.weight"])


def test_stacked_experts_that_the_installed_release_does_not_read(
    checkpoint: MakeCheckpoint,
) -> None:
    if V5:
        pytest.skip("transformers 5 reads them")
    folder = checkpoint("qwen3_moe")
    stack_experts(folder)
    with pytest.raises(CheckpointError, match="no tensor of the checkpoint gives"):
        plan_of(folder)


# --- without a spec


def test_a_model_without_a_spec_is_noted(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    known = plan_of(folder)
    assert known.fallbacks == []
    monkeypatch.setattr("modelopt_lite.plan.get_spec", lambda model_type: None)
    plan = plan_of(folder)
    assert plan.fallbacks[0].startswith("no spec for model_type 'llama'")
    assert {m.name for m in plan.matrices} == {m.name for m in known.matrices}
    assert [unit.name for unit in plan.units] == [unit.name for unit in known.units]


@pytest.mark.parametrize("weights", ["fp8", "nvfp4"])
def test_mamba_presets(weights: str, checkpoint: MakeCheckpoint) -> None:
    """Experts always, Mamba's projections in the aggressive one, attention in neither."""
    folder = checkpoint("nemotron_h")
    roles = {}
    for kind in ("aggressive", "conservative"):
        plan = plan_of(folder, f"mamba_moe_{weights}_{kind}")
        assert {m.format for m in plan.matrices} == {weights}
        roles[kind] = {m.name.rpartition(".")[2] for m in plan.matrices}
    assert roles["conservative"] == {"up_proj", "down_proj"}
    assert roles["aggressive"] == {"up_proj", "down_proj", "in_proj", "out_proj"}


def test_formats_that_no_engine_loads_are_noted(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama")
    assert any("load the format 'mxfp4'" in note for note in plan_of(folder, "mxfp4").notes)
    assert not plan_of(folder, "mxfp8").notes


@pytest.mark.parametrize(
    ("kind", "recipe", "noted"),
    [
        ("deepseek_v3", "nvfp4_awq_lite", True),
        ("deepseek_v3", "int8_smoothquant", True),
        ("deepseek_v3", "nvfp4_awq_clip", False),  # clips; shares no scale
        ("deepseek_v3", "nvfp4", False),
        ("qwen3_moe", "nvfp4_awq_lite", False),  # validated, says its spec
        ("llama", "nvfp4_awq_lite", False),
    ],
)
def test_experts_that_share_a_scale_without_validation_are_noted(
    kind: str, recipe: str, noted: bool, checkpoint: MakeCheckpoint
) -> None:
    notes = plan_of(checkpoint(kind), recipe).notes
    expected = "no spec says that such a grouping was validated"
    assert any(expected in note for note in notes) == noted


def test_stacks_are_checked_along_the_axis_of_their_blocks(checkpoint: MakeCheckpoint) -> None:
    """The peer's blocks of stacked experts run along their output channels."""
    folder = checkpoint("gpt_oss", intermediate_size=48)
    with pytest.raises(ShapeError, match=r"down_proj .* K=48 is not a multiple of 32"):
        plan_of(folder, "mxfp8")
    with pytest.raises(ShapeError, match=r"gate_up_proj .* K=100 is not") as caught:
        plan_of(checkpoint("gpt_oss", intermediate_size=50), "mxfp8", numerics="modelopt")
    assert "down_proj" not in str(caught.value)
