"""What reaches the model, and what of the source must reach the export untouched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import modelopt_lite
from modelopt_lite import Recipe
from modelopt_lite.build import build_meta_model, quiet_transformers
from modelopt_lite.errors import CheckpointError
from modelopt_lite.job import prepare
from modelopt_lite.recipes import load_recipe

Make = Callable[..., Path]


def job_of(source: Path, recipe: str = "nvfp4") -> Any:
    return prepare(
        source,
        load_recipe(recipe),
        model_type=None,
        numerics="exact",
        on_bad_shape="error",
        trust_remote_code=False,
        device="cpu",
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_c46_padding_never_reaches_a_scale(
    checkpoint: Make,
    cases: Any,
    with_tokenizer: Callable[[Path], Path],
    recipe: str,
    side: str,
) -> None:
    """Texts of different lengths were padded, and the pad token's huge values were measured."""
    source = with_tokenizer(checkpoint("llama", vocab_size=320))
    path = source / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "padding_side": side}))
    plain = cases.run(source, recipe, calib_data=["short", "a much longer text", "tiny"])
    cases.edit(source, lambda t: t["model.embed_tokens.weight"][257].fill_(1e4))
    loud = cases.run(source, recipe, calib_data=["short", "a much longer text", "tiny"])
    assert loud.report.input_amax == plain.report.input_amax
    spoken = cases.run(source, recipe, calib_data=[torch.tensor([[257, 5]])])
    assert spoken.report.input_amax != plain.report.input_amax


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_c46_lengths_and_sizes_are_obeyed(
    checkpoint: Make,
    cases: Any,
    with_tokenizer: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
) -> None:
    """The wanted length was dropped, and a default took its place."""
    source = with_tokenizer(checkpoint("llama", vocab_size=320))
    seen: list[tuple[int, ...]] = []
    forward = transformers.LlamaForCausalLM.forward

    def spy(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        seen.append(tuple(input_ids.shape))
        assert kwargs.get("attention_mask") is None
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", spy)
    out = cases.run(source, calib_data=None, calib_size=7, calib_seq_len=24, batch_size=batch_size)
    assert {length for _, length in seen} == {24}
    assert sum(rows for rows, _ in seen) == 7
    assert max(rows for rows, _ in seen) == min(batch_size, 7)
    assert out.report.details["calibration"]["tokens"] == 7 * 24


THETA_KEYS: list[dict[str, Any]] = [
    {"rope_theta": 500000.0},
    {"rope_theta": 500000.0, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
]


@pytest.mark.parametrize("keys", THETA_KEYS, ids=str)
def test_c54_theta_survives(checkpoint: Make, cases: Any, keys: dict[str, Any]) -> None:
    """Saved by one release, theta stood where another does not look, which then took its default.

    The export keeps the spelling of the source, and calibration uses its theta on every release.
    """
    source = checkpoint("llama")

    def change(config: dict[str, Any]) -> None:
        for key in ("rope_theta", "rope_parameters", "rope_scaling"):
            config.pop(key, None)
        config.update(keys)

    cases.config(source, change)
    wanted = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    out = cases.run(source)
    assert {k: v for k, v in out.config.items() if k.startswith("rope")} == keys
    config = cases.read_json(source / "config.json")
    model = build_meta_model(source, config, trust_remote_code=False)
    assert torch.allclose(model.model.rotary_emb.inv_freq, wanted)


def test_c54_settings_of_every_layer_kind(checkpoint: Make, cases: Any) -> None:
    """Where an older release cannot read the newer spelling at all, it must say so."""
    source = checkpoint("gemma3_text")
    kinds = {"full_attention": 1e6, "sliding_attention": 1e4}
    rope = {kind: {"rope_type": "default", "rope_theta": t} for kind, t in kinds.items()}

    def change(config: dict[str, Any]) -> None:
        for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
            config.pop(key, None)
        config["rope_parameters"] = rope

    cases.config(source, change)
    if transformers.__version__.startswith("4."):
        with pytest.raises(CheckpointError, match="install transformers 5"):
            cases.run(source)
    else:
        assert cases.run(source).config["rope_parameters"] == rope


def test_c55_router_bias_keeps_float32(checkpoint: Make, cases: Any) -> None:
    """Cast to bfloat16, 256 distinct biases between 6.8 and 7.1 became a handful of values.

    Both in the export and while calibrating, where it decides which expert sees a token.
    """
    source = checkpoint("deepseek_v3", n_routed_experts=16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.linspace(6.817, 7.063, 16, dtype=torch.float32)[torch.randperm(16)]
    assert len(set(bias.bfloat16().tolist())) < 10
    cases.edit(source, lambda t: t.update({name: bias.clone()}))
    for recipe in ("fp8", "nvfp4"):
        out = cases.run(source, recipe)
        assert out.tensors[name].dtype == torch.float32
        assert torch.equal(out.tensors[name], bias)
        assert not out.problems()
    job = job_of(source)
    unit = next(u for u in job.plan.units if u.name == "model.layers.1")
    store = job.store()
    store.attach(store.load(unit))
    held = dict(job.model.named_buffers()) | dict(job.model.named_parameters())
    assert torch.equal(held[name], bias)
    assert held["model.layers.1.self_attn.o_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_c56_buffers_that_no_file_holds_are_right(checkpoint: Make, cases: Any, kind: str) -> None:
    """Rotary frequencies are in no file; built without memory, they were whatever lay there."""
    source = checkpoint(kind)
    config = cases.read_json(source / "config.json")
    lean = build_meta_model(source, config, trust_remote_code=False)
    whole = cases.load(source)
    buffers = dict(whole.named_buffers())
    names = [n for n, b in lean.named_buffers() if "inv_freq" in n]
    assert names
    for name in names:
        assert torch.equal(lean.get_buffer(name).float(), buffers[name].float()), name
    if kind == "llama":
        expected = torch.tensor([1, 0.1, 0.01, 0.001])
        assert torch.allclose(lean.model.rotary_emb.inv_freq, expected)


@pytest.fixture
def gemma3(tmp_path: Path) -> Path:
    """A text model behind a vision tower whose widths no block size divides."""
    text = {
        "vocab_size": 72,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_use_head": False,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1
    )
    torch.manual_seed(0)
    with quiet_transformers():
        model = transformers.Gemma3ForConditionalGeneration._from_config(config)
        model.to(torch.bfloat16).save_pretrained(tmp_path / "gemma3")
    return tmp_path / "gemma3"


TOWERS = re.compile(r"vision_tower|multi_modal_projector|visual")


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "nvfp4_mlp_only"])
@pytest.mark.parametrize("sharded", [False, True])
def test_c58_towers_stay_whole(cases: Any, gemma3: Path, recipe: str, sharded: bool) -> None:
    """A wide pattern hit the vision tower, or the tower was lost with its prefix."""
    if sharded:
        cases.shards(gemma3)
    out = cases.run(gemma3, recipe)
    towers = [name for name in out.original if TOWERS.search(name)]
    assert towers
    assert all(torch.equal(out.tensors[name], out.original[name]) for name in towers)
    assert not [name for name in out.packed if TOWERS.search(name)]
    layers = 14 if recipe != "nvfp4_mlp_only" else 6
    assert len(out.packed) == layers
    linears = {n for n in towers if n.endswith(("proj.weight", "fc1.weight", "fc2.weight"))}
    assert linears
    assert {n.removesuffix(".weight") for n in linears} <= out.excluded
    assert not out.problems()


@pytest.mark.parametrize("sharded", [False, True])
def test_c59_a_lost_tower_tensor_is_found(cases: Any, gemma3: Path, sharded: bool) -> None:
    """A check that skipped exports of one file saw nothing."""
    from safetensors.torch import load_file, save_file

    out = cases.run(gemma3, max_shard_size="20KB" if sharded else "10GB")
    name = next(name for name in out.original if "vision_tower" in name and ".weight" in name)
    for path in out.folder.glob("*.safetensors"):
        tensors = load_file(path)
        if tensors.pop(name, None) is not None:
            save_file(tensors, path, {"format": "pt"})
    assert any(name in problem for problem in out.problems())


def with_extras(cases: Any, source: Path, names: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    extras = {n: torch.randn(s, generator=generator).bfloat16() for n, s in names.items()}
    extras["foo.counts"] = torch.arange(5)
    extras["foo.scalar"] = torch.tensor(3.5, dtype=torch.float64)
    cases.edit(source, lambda t: t.update(extras))
    return extras


EXTRAS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": {
        "mtp.fc.weight": (32, 64),
        "mtp.norm.weight": (32,),
        "mtp.layers.0.self_attn.q_proj.weight": (32, 32),
        "mtp.layers.0.mlp.up_proj.weight": (32, 32),
        "mtp.layers.0.mlp.gate.weight": (4, 32),
        "mtp.shared_head.head.weight": (64, 32),
        "foo.extra": (3, 5),
    },
    "deepseek_v3": {
        "model.layers.2.eh_proj.weight": (32, 64),
        "model.layers.2.enorm.weight": (32,),
        "model.layers.2.self_attn.q_a_proj.weight": (16, 32),
        **{
            f"model.layers.2.mlp.experts.{e}.{role}_proj.weight": (32, 32)
            for e in range(4)
            for role in ("gate", "up", "down")
        },
        "model.layers.2.mlp.gate.weight": (4, 32),
        "model.layers.2.shared_head.head.weight": (64, 32),
        "foo.extra": (3, 5),
    },
}


@pytest.mark.parametrize("kind", list(EXTRAS))
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "w4a16_nvfp4"])
@pytest.mark.parametrize("sharded", [False, True])
def test_c60_c61_tensors_that_the_model_does_not_take(
    checkpoint: Make, cases: Any, kind: str, recipe: str, sharded: bool
) -> None:
    """Loading and saving drops what a model class does not know; extra prediction layers are that.

    They are carried over bit for bit, and listed, or engines build the draft model quantized.
    """
    source = checkpoint(kind)
    extras = with_extras(cases, source, EXTRAS[kind])
    if sharded:
        cases.shards(source)
    out = cases.run(source, recipe)
    for name, value in extras.items():
        assert torch.equal(out.tensors[name], value), name
        assert out.tensors[name].dtype == value.dtype
    matrices = {n.removesuffix(".weight") for n in extras if n.endswith("weight")}
    matrices = {n for n in matrices if extras[f"{n}.weight"].ndim == 2}
    assert matrices <= out.excluded
    assert set(out.tensors) >= {n for n in out.original if n not in out.packed}
    assert not out.problems()


def test_c62_no_hidden_trust() -> None:
    """The flag was hard-coded somewhere, or not passed on."""
    package = Path(modelopt_lite.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"trust_remote_code\s*=\s*True", text):
            line = text[text.rfind("\n", 0, match.start()) + 1 : text.find("\n", match.end())]
            assert line.lstrip().startswith(('"', 'f"')), f"{path}: {line}"


def test_recipe_of_ones_own_from_a_file(checkpoint: Make, cases: Any) -> None:
    """A recipe file and the same recipe as an object give the same bytes."""
    source, path = checkpoint("llama"), cases.tmp_path / "mine.yaml"
    path.write_text("weights: fp8\nkv_cache: fp8\nexclude: ['*.layers.0', '*.o_proj']\n")
    one = cases.run(source, path)
    recipe = Recipe(name="mine", weights="fp8", kv_cache="fp8", exclude=("*.layers.0", "*.o_proj"))
    other = cases.run(source, recipe)
    assert len(one.packed) == 6
    assert one.quantization["kv_cache_quant_algo"] == "FP8"
    for name in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()
