"""The output head, and what the config files say against what the files hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from modelopt_lite import Recipe
from modelopt_lite.errors import RecipeError

Make = Callable[..., Path]
KINDS = (
    "llama",
    "llama_tied",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "gemma3_text",
    "phi3",
    "qwen2_moe",
    "glm4_moe",
    "nemotron_h",
)
RECIPES = (
    "fp8",
    "nvfp4",
    "w4a16_nvfp4",
    "fp8_per_channel_per_token",
    "nvfp4_mlp_only",
    "nvfp4_experts_only",
)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "w4a16_nvfp4"])
def test_c16_c18_head_and_tie_flag_agree(
    checkpoint: Make, cases: Any, recipe: str, tied: bool
) -> None:
    """The flag said tied while head tensors were written, or the other way round.

    Engines also refuse a tied head that is quantized, so no default recipe touches it.
    """
    out = cases.run(checkpoint("llama_tied" if tied else "llama"), recipe)
    head = [name for name in out.tensors if "lm_head" in name]
    assert out.config["tie_word_embeddings"] is tied
    assert head == ([] if tied else ["lm_head.weight"])
    assert "lm_head" in out.excluded
    if not tied:
        assert torch.equal(out.tensors["lm_head.weight"], out.original["lm_head.weight"])
    assert not out.problems()


def test_c16_tied_source_that_stores_the_head_as_well(checkpoint: Make, cases: Any) -> None:
    """Some tied checkpoints hold the head's copy on disk; it must not be lost in silence."""
    source = checkpoint("llama_tied")
    cases.edit(
        source,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    out = cases.run(source)
    assert not out.problems()
    assert "lm_head" in out.excluded
    assert not [name for name in out.tensors if "lm_head" in name and "scale" in name]


@pytest.mark.parametrize("include", [("lm_head",), ("*.mlp", "lm_head")])
def test_c17_asking_for_the_head(checkpoint: Make, cases: Any, include: tuple[str, ...]) -> None:
    """The list said that the head is not quantized, and the file held its scales.

    A head is never quantized here, and a recipe that asks for it is refused.
    """
    recipe = Recipe(name="mine", weights="fp8", include=include)
    with pytest.raises(RecipeError, match="output head"):
        cases.run(checkpoint("llama"), recipe)


@pytest.mark.parametrize("kind", KINDS)
def test_c18_no_default_recipe_writes_head_scales(checkpoint: Make, cases: Any, kind: str) -> None:
    """See above, for every architecture at hand."""
    out = cases.run(checkpoint(kind), "fp8")
    assert not [n for n in out.tensors if "head" in n and "scale" in n]
    assert not out.problems()


ROUTERS = {
    "qwen3_moe": ("mlp.gate", (0, 1)),
    "mixtral": ("block_sparse_moe.gate", (0, 1)),
    "deepseek_v3": ("mlp.gate", (1,)),
    "glm4_moe": ("mlp.gate", (1,)),
    "gpt_oss": ("mlp.router", (0, 1)),
    "qwen2_moe": ("mlp.gate", (0,)),
}


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "nvfp4_experts_only"])
@pytest.mark.parametrize("kind", ROUTERS)
def test_c19_routers_are_listed(checkpoint: Make, cases: Any, kind: str, recipe: str) -> None:
    """A router that is no linear module was left in bfloat16 and not listed.

    Engines then expect packed codes for it and stop on the shape.
    """
    out = cases.run(checkpoint(kind), recipe)
    name, layers = ROUTERS[kind]
    for layer in layers:
        router = f"model.layers.{layer}.{name}"
        assert router in out.excluded
        assert torch.equal(out.tensors[f"{router}.weight"], out.original[f"{router}.weight"])
    assert not out.problems()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_c21_c22_entries_are_whole_literal_names(
    checkpoint: Make, cases: Any, kind: str, recipe: str
) -> None:
    """Entries with stray dots or globs matched nothing, or too much, depending on the reader."""
    source = checkpoint(kind)
    if recipe == "nvfp4_experts_only" and kind in ("llama", "llama_tied", "gemma3_text", "phi3"):
        with pytest.raises(RecipeError):
            cases.run(source, recipe)
        return
    out = cases.run(source, recipe)
    modules = {name.rpartition(".")[0] for name in out.tensors} | {"lm_head"}
    stacks = {name.rpartition(".")[0] for name, t in out.tensors.items() if t.ndim == 3}
    for entry in out.excluded:
        assert re.fullmatch(r"[\w.]+[^.]", entry), entry
        assert entry in modules | stacks, entry
    assert not out.packed & out.excluded
    # Every matrix that a reader may take for a linear layer's is in exactly one of the two lists.
    matrices = {
        name.removesuffix(".weight")
        for name, t in out.tensors.items()
        if name.endswith(".weight") and t.ndim > 1
    }
    assert matrices - out.packed <= out.excluded
    assert set(out.report.quantized) == out.packed
    assert not out.problems()


def test_c24_a_name_is_not_the_beginning_of_another(checkpoint: Make, cases: Any) -> None:
    """Leaving out ``mlp.gate`` took ``mlp.gate_proj`` along."""
    recipe = Recipe(name="mine", weights="fp8", exclude=("*.mlp.gate", "*.layers.1"))
    source = checkpoint("glm4_moe", num_hidden_layers=11, first_k_dense_replace=10)
    out = cases.run(source, recipe)
    assert "model.layers.0.mlp.gate_proj" in out.packed
    assert "model.layers.10.self_attn.q_proj" in out.packed
    assert "model.layers.10.mlp.gate" in out.excluded
    assert not [name for name in out.packed if name.startswith("model.layers.1.")]
    assert not out.problems()


@pytest.mark.parametrize("value", [None, [], "absent"])
def test_c25_config_without_architectures(checkpoint: Make, cases: Any, value: Any) -> None:
    """Fine-tunes often lack ``architectures``; export crashed on it."""
    source = checkpoint("qwen3_moe")

    def change(config: dict[str, Any]) -> None:
        config.pop("architectures")
        if value != "absent":
            config["architectures"] = value

    cases.config(source, change)
    out = cases.run(source)
    assert out.config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert not out.problems()


def test_c26_layer_types_are_as_many_as_layers(checkpoint: Make, cases: Any) -> None:
    """An entry for an extra prediction layer makes strict readers reject the config."""
    source = checkpoint("gpt_oss")
    cases.config(source, lambda c: c["layer_types"].append("full_attention"))
    out = cases.run(source)
    assert out.config["layer_types"] == ["sliding_attention", "full_attention"]
    loaded = transformers.AutoConfig.from_pretrained(out.folder)
    assert len(loaded.layer_types) == loaded.num_hidden_layers == 2
    assert not out.problems()


@pytest.mark.parametrize("kind", KINDS)
def test_config_differs_only_in_what_quantization_changes(
    checkpoint: Make, cases: Any, kind: str
) -> None:
    """Saving a config through a library renames and adds keys that other releases misread."""
    out = cases.run(checkpoint(kind))
    before = cases.read_json(out.source / "config.json")
    after = out.config
    assert after.pop("quantization_config")
    assert after == before
    assert list(after) == list(before)
