"""Models without a spec: quantized by structure alone, with a right audit, or refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_lite import quantize_and_export
from modelopt_lite.build import build_meta_model, quiet_transformers
from modelopt_lite.checkpoint.reader import read_json
from modelopt_lite.errors import OutputError, RecipeError, SpecError
from modelopt_lite.job import prepare
from modelopt_lite.models import registry
from modelopt_lite.recipes import load_recipe
from modelopt_lite.verify.audit import audit

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
TOWER: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,  # more than the text model has
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
BATCHES = [torch.arange(3, 51).view(2, 24)]


def build(folder: Path, auto: str, config: str, **arguments: Any) -> Path:
    """Write a checkpoint with seeded weights."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    torch.manual_seed(0)
    with quiet_transformers():
        made = getattr(transformers, config)(**arguments)
        model = getattr(transformers, auto).from_config(made).to(torch.bfloat16)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no type had a spec, whichever have one by now."""
    monkeypatch.setattr(registry, "_SPECS", {})
    monkeypatch.setattr(registry, "_OWN", {})


def export(source: Path, recipe: str, **options: Any) -> Any:
    """Quantize, and audit against the source."""
    out = source.parent / f"{source.name}-{recipe}"
    report = quantize_and_export(
        source, export_dir=out, recipe=recipe, calib_data=BATCHES, progress=False, **options
    )
    assert audit(out, source=source, deep=True) == []
    return report


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_dense_model_shares_scales_as_engines_join_layers(tmp_path: Path, recipe: str) -> None:
    source = build(tmp_path / "olmo2", "AutoModelForCausalLM", "Olmo2Config", **TEXT)
    report = export(source, recipe)
    assert len(report.quantized) == 14
    assert "no spec" in report.fallbacks[0]


def test_a_router_below_the_block_is_left(tmp_path: Path) -> None:
    source = build(
        tmp_path / "hunyuan",
        "AutoModelForCausalLM",
        "HunYuanMoEV1Config",
        **TEXT,
        head_dim=8,
        num_experts=4,
        moe_topk=2,
    )
    report = export(source, "nvfp4")
    assert report.excluded["model.layers.0.mlp.gate.wg"] == "router"


def test_a_composite_model_is_quantized_in_its_text_model(tmp_path: Path) -> None:
    """The tower has more layers than the text: units and scales must be the text model's."""
    source = build(
        tmp_path / "llava",
        "AutoModelForImageTextToText",
        "LlavaConfig",
        text_config={**TEXT, "model_type": "llama"},
        vision_config=TOWER,
        image_token_index=63,
    )
    job = prepare(
        source,
        load_recipe("nvfp4", kv_cache="fp8"),
        model_type=None,
        numerics="exact",
        on_bad_shape="error",
        trust_remote_code=False,
        device="cpu",
    )
    layers = [unit.name for unit in job.plan.units if unit.is_layer]
    assert len(layers) == 2
    assert all("language_model" in name for name in layers)
    assert len(job.plan.kv_cache) == 2
    report = export(source, "nvfp4")
    assert len(report.quantized) == 14
    assert "outside of the text model" in report.excluded.values()


@pytest.mark.parametrize(
    ("auto", "config", "arguments", "said"),
    [
        ("AutoModelForCausalLM", "GraniteMoeConfig", {**TEXT, **EXPERTS}, "stacked experts"),
        (
            "AutoModelForSeq2SeqLM",
            "T5Config",
            {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1},
            "encoder-decoder",
        ),
    ],
    ids=["experts", "encoder"],
)
def test_what_cannot_be_known_is_refused(
    tmp_path: Path, auto: str, config: str, arguments: dict[str, Any], said: str
) -> None:
    source = build(tmp_path / "source", auto, config, **arguments)
    with pytest.raises(SpecError, match=said):
        export(source, "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_nothing_left_to_quantize_is_an_error(tmp_path: Path) -> None:
    narrow = {**TEXT, "hidden_size": 40, "intermediate_size": 72, "head_dim": 10}
    source = build(tmp_path / "llama", "AutoModelForCausalLM", "LlamaConfig", **narrow)
    with pytest.raises(RecipeError, match="leaves nothing to quantize"):
        export(source, "nvfp4", on_bad_shape="skip")


def test_buffers_are_those_of_a_loaded_model(tmp_path: Path) -> None:
    """GPT-J computes its angles in the default dtype, which is narrow inside of the constructor."""
    transformers = pytest.importorskip("transformers")
    source = build(
        tmp_path / "gptj",
        "AutoModelForCausalLM",
        "GPTJConfig",
        vocab_size=64,
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=64,
        rotary_dim=4,
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    built = build_meta_model(source, read_json(source / "config.json"), trust_remote_code=False)
    kept = set(loaded.state_dict())
    computed = {n: b for n, b in loaded.named_buffers() if n not in kept}
    if not computed:
        pytest.skip(f"transformers {transformers.__version__} stores the angles")
    for name, buffer in computed.items():
        assert torch.equal(built.get_buffer(name), buffer), name


@pytest.mark.parametrize("damage", ["short", "gone", "sidecar"])
def test_a_finished_export_that_was_damaged_is_not_returned(tmp_path: Path, damage: str) -> None:
    source = build(tmp_path / "llama", "AutoModelForCausalLM", "LlamaConfig", **TEXT)
    out = Path(export(source, "fp8").export_dir)
    weights = out / "model.safetensors"
    if damage == "short":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif damage == "gone":
        weights.unlink()
    else:
        (source / "generation_config.json").write_text("{}")
    with pytest.raises(OutputError, match="was changed since"):
        export(source, "fp8")
    assert export(source, "fp8", overwrite=True).quantized
