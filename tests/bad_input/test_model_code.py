"""Models whose own code fails, or does not do what calibration needs of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from modelopt_lite import Recipe, perplexity, quantize_and_export
from modelopt_lite.build import quiet_transformers
from modelopt_lite.errors import CalibrationError, CheckpointError, ForwardError, RecipeError

MakeCheckpoint = Callable[..., Path]
Refuse = Callable[..., str]
SMALL = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4}


def write(folder: Path, kind: str, **fields: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields)
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("offload", ["auto", "none"])
def test_model_code_that_raises_is_named(
    checkpoint: MakeCheckpoint, refuse: Refuse, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    source, calls = checkpoint("llama"), []

    def broken(self: Any, x: Tensor) -> Tensor:
        calls.append(x.shape)
        if len(calls) > 5:  # the second batch in the second layer, of lockstep
            raise ZeroDivisionError("two\nlines")
        return x

    monkeypatch.setattr(LlamaMLP, "forward", broken)
    message = refuse(
        ForwardError,
        source,
        "module 'model.layers.",
        ".mlp' (LlamaMLP)",
        f"{__file__}:",
        "ZeroDivisionError: two lines",
        offload=offload,
        recipe=Recipe(name="attention", weights="fp8", include=("*.self_attn",)),
        while_running=True,
    )
    assert "\n" not in message


@pytest.mark.parametrize("error", [ImportError("needs a package"), AssertionError("no")])
def test_a_constructor_that_raises(
    checkpoint: MakeCheckpoint,
    refuse: Refuse,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise error

    source = checkpoint("llama")
    monkeypatch.setattr(LlamaMLP, "__init__", broken)
    refuse(CheckpointError, source, "cannot build a model", str(error))


def test_what_it_raised_is_the_cause_also_in_eval(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, torch.zeros(3, 3, dtype=x.dtype))

    source = checkpoint("llama")
    monkeypatch.setattr(LlamaMLP, "forward", broken)
    with pytest.raises(ForwardError, match=r"model\.layers\.0\.mlp") as caught:
        perplexity(source, text=[torch.full((1, 8), 3)], progress=False)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("falcon", {**SMALL, "num_hidden_layers": 1}, "self_attention' (FalconAttention)"),
        ("bloom", {"vocab_size": 64, "hidden_size": 64, "n_layer": 1, "n_head": 4}, "Bloom"),
        ("gptj", {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 8}, "J"),
        (
            "minimax",
            {
                **SMALL,
                "intermediate_size": 64,
                "head_dim": 16,
                "num_hidden_layers": 2,
                "num_local_experts": 2,
                "layer_types": ["full_attention", "linear_attention"],
            },
            "MiniMaxLightningAttention",
        ),
    ],
)
def test_attention_that_cannot_be_seen_has_no_cache_scales(
    tmp_path: Path, refuse: Refuse, kind: str, fields: dict[str, Any], says: str
) -> None:
    source = write(tmp_path / "source", kind, **fields)
    refuse(RecipeError, source, says, "leave kv_cache out", recipe="fp8", kv_cache="fp8")


def test_what_calibration_cannot_reach_is_named_with_the_pattern_that_excludes_it(
    tmp_path: Path, refuse: Refuse, token_batches: list[Tensor]
) -> None:
    fields = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    fields |= {"d_model": 64, "vocab_size": 64}
    source = write(tmp_path / "source", "bart", **fields)
    message = refuse(
        CalibrationError,
        source,
        "'model.decoder.layers.0.encoder_attn.k_proj'",
        'exclude: ["*.encoder_attn"]',
        recipe="fp8",
        while_running=True,
    )
    assert "4 matrices of unit 'model.decoder.layers.0'" in message
    recipe = Recipe(name="fp8", weights="fp8", exclude=("*.encoder_attn",))
    report = quantize_and_export(
        source, export_dir=tmp_path / "out", recipe=recipe, calib_data=token_batches, progress=False
    )
    assert len(report.quantized) == 12
