"""`evaluate` rounds keys and values as the cache that an export states keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modelopt_lite import Recipe, perplexity, quantize_and_export
from modelopt_lite.build import eager_experts
from modelopt_lite.calibrate.products import fast_products
from modelopt_lite.doctor.instance import instances
from modelopt_lite.errors import CheckpointError, RecipeError
from modelopt_lite.fidelity import compare_predictions
from modelopt_lite.formats.cache import CACHE_FORMATS, stated_cache

MakeCheckpoint = Callable[..., Path]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIZES = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def to_fp8(x: Tensor, scale: float) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def to_nvfp4(x: Tensor, scale: float) -> Tensor:
    """Blocks of 16, whose scales are E4M3 numbers under one of the whole."""
    x_N16 = x.float().reshape(-1, 16)
    step = (x_N16.abs().amax(-1, keepdim=True) / (6 * scale)).clamp(max=448)
    step = step.to(torch.float8_e4m3fn).float() * scale
    ratio = torch.where(step > 0, x_N16.abs() / step, 0.0)
    odd = (torch.arange(8) % 2 == 1) * 1e-7  # ties go to the even code
    nearest = ((ratio[..., None] - E2M1).abs() + odd).argmin(-1)
    return (E2M1[nearest] * step).copysign(x_N16).view(x.shape)


def reference(
    cache: str, tensors: dict[str, Tensor], module: str, letter: str, x: Tensor
) -> Tensor:
    """What a cache gives back, by the definition of its format."""
    stem = f"{module}.{letter}_proj.{letter}_"
    amax = float(tensors[f"{stem}scale"]) * 448 if f"{stem}scale" in tensors else None
    bias = tensors[f"{stem}bias"].float() if cache.endswith("affine") else torch.zeros(())
    if cache.startswith("nvfp4"):
        rounded = to_nvfp4(x.float() - bias, 1.0 if amax is None else amax / 448)
    else:
        rounded = to_fp8(x.float() - bias, 1.0 if amax is None else amax / 448)
    return (rounded + bias).to(x.dtype)


def nll_of_whole(
    source: Path, batches: Iterable[Tensor], rounded: Callable[[str, str, Tensor], Tensor]
) -> float:
    """Mean loss of transformers' model whose attention gets other keys and values."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    paths = {module: path for path, module in model.named_modules()}
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *a: Any, **k: Any) -> Any:
        path = paths[module]
        return plain(module, query, rounded(path, "k", key), rounded(path, "v", value), *a, **k)

    ALL_ATTENTION_FUNCTIONS["rounded"] = attention
    model.config._attn_implementation = "rounded"
    total, count = 0.0, 0
    try:
        for ids in batches:
            with torch.no_grad(), eager_experts(model), fast_products(torch.device("cpu")):
                logits = model(input_ids=ids, use_cache=False).logits.float()
            flat = logits[:, :-1].flatten(0, 1)
            loss = functional.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none")
            total, count = total + float(loss.double().sum()), count + len(loss)
    finally:
        del ALL_ATTENTION_FUNCTIONS._local_mapping["rounded"]
    return total / count


def exported(source: Path, out: Path, cache: str, batches: list[Tensor], **options: Any) -> Path:
    recipe = Recipe(name="kv", weights="none", kv_cache=cache)
    quantize_and_export(
        source, export_dir=out, recipe=recipe, calib_data=batches, progress=False, **options
    )
    return out


def same_as_the_whole(
    out: Path, source: Path, batches: list[Tensor], rounded: Callable[[str, str, Tensor], Tensor]
) -> float:
    """Hold what `evaluate` finds of an export against the source's model, and return it."""
    wanted = nll_of_whole(source, batches, rounded)
    assert perplexity(out, text=batches).nll == pytest.approx(wanted, rel=1e-9)
    return wanted


@pytest.mark.parametrize(
    ("cache", "kind"),
    [*((cache, "llama") for cache in sorted(CACHE_FORMATS)), ("fp8", "qwen3_moe")],
)
def test_against_the_whole_model(
    cache: str,
    kind: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
) -> None:
    token_batches = token_batches[1:3]
    source = checkpoint(kind, **SIZES)
    out = exported(source, tmp_path / "out", cache, token_batches)
    tensors = load_file(out / "model.safetensors")
    assert ("model.layers.0.self_attn.k_proj.k_scale" in tensors) == ("cast" not in cache)

    def rounded(path: str, letter: str, x: Tensor) -> Tensor:
        return reference(cache, tensors, path, letter, x)

    wanted = same_as_the_whole(out, source, token_batches, rounded)
    plain = nll_of_whole(source, token_batches, lambda path, letter, x: x)
    assert perplexity(out, text=token_batches, activations=False).nll == pytest.approx(plain)
    assert wanted != plain
    # Keys and values larger than those that calibration saw, which is where formats part most.
    tensors |= {name: t / 9 for name, t in tensors.items() if name.endswith(("k_scale", "v_scale"))}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    past = same_as_the_whole(out, source, token_batches, rounded)
    assert (past == wanted) == ("cast" in cache)


@pytest.mark.parametrize(
    "name",
    ["{0}_scale", "attn.{0}_scale", "{0}_proj.output_scale", "kv_scale", "{0}_proj.{0}_scale"],
)
def test_names_that_other_writers_use(
    name: str, checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    token_batches, source = token_batches[2:], checkpoint("llama", **SIZES)
    out = exported(source, tmp_path / "out", "fp8", token_batches)
    tensors = load_file(out / "model.safetensors")
    for scale in [n for n in tensors if n.endswith("_scale")]:
        letter = scale[-len("k_scale")]
        tensors.pop(scale)
        prefix = scale.removesuffix(f"{letter}_proj.{letter}_scale")
        tensors[f"{prefix}{name.format(letter)}"] = torch.tensor(1 / 64)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    def rounded(path: str, letter: str, x: Tensor) -> Tensor:
        return to_fp8(x, 1 / 64).bfloat16()

    same_as_the_whole(out, source, token_batches, rounded)


def test_scales_of_heads_and_scales_that_stand_for_none(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    token_batches, source = token_batches[2:], checkpoint("llama", **SIZES)
    out = exported(source, tmp_path / "out", "fp8", token_batches)
    tensors = load_file(out / "model.safetensors")
    heads = torch.tensor([1 / 64, 1 / 1024])
    for name in [n for n in tensors if n.endswith("_scale")]:
        of_heads = name.endswith("k_scale")
        tensors[name] = heads.clone().view(2, 1, 1) if of_heads else torch.tensor(-1.0)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    def rounded(path: str, letter: str, x: Tensor) -> Tensor:
        if letter == "v":
            return to_fp8(x, 1.0).bfloat16()
        parts = [to_fp8(part, float(s)) for part, s in zip(x.unbind(1), heads, strict=True)]
        return torch.stack(parts, 1).bfloat16()

    same_as_the_whole(out, source, token_batches, rounded)
    config = out / "config.json"
    config.write_text(config.read_text().replace('"num_bits": 8', '"num_bits": 4'))
    assert perplexity(out, text=token_batches).nll == perplexity(source, text=token_batches).nll


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.13"), reason="has no zaya")
def test_projections_that_lie_deeper_than_the_layer(tmp_path: Path) -> None:
    """The scales of zaya stand beside its attention layers, whose projections lie in a part."""
    instances("zaya")[0].model.bfloat16().save_pretrained(tmp_path / "zaya")
    batches = [torch.arange(3, 35).view(2, 16)]
    out = exported(tmp_path / "zaya", tmp_path / "out", "fp8", batches)
    assert perplexity(out, text=batches).nll != perplexity(tmp_path / "zaya", text=batches).nll


def test_heads_that_nvfp4_cannot_keep(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    narrow = checkpoint("llama", **{**SIZES, "head_dim": 8})
    with pytest.raises(RecipeError, match="head_dim=8 is not a multiple of 16; use kv_cache fp8"):
        exported(narrow, tmp_path / "refused", "nvfp4", token_batches)
    out = exported(narrow, tmp_path / "out", "fp8", token_batches)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = "NVFP4"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"head_dim=8 .*activations=False"):
        perplexity(out, text=token_batches)
    plain = perplexity(narrow, text=token_batches).nll
    assert perplexity(out, text=token_batches, activations=False).nll == plain


def test_the_other_dialect(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    """It names scales after the layer, in the model's dtype; the cache is all that is quantized."""
    token_batches, source = token_batches[2:], checkpoint("llama", **SIZES)
    dialect = "compressed-tensors"
    out = exported(source, tmp_path / "out", "fp8", token_batches, dialect=dialect)
    assert (
        json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"] == {}
    )
    stored = load_file(out / "model.safetensors")
    tensors = {
        f"{name.removesuffix(f'{letter}_scale')}{letter}_proj.{letter}_scale": scale
        for name, scale in stored.items()
        for letter in "kv"
        if name.endswith(f".{letter}_scale")
    }
    assert {(scale.dtype, scale.shape) for scale in tensors.values()} == {(torch.bfloat16, (1,))}
    assert len(tensors) == 4

    def rounded(path: str, letter: str, x: Tensor) -> Tensor:
        return reference("fp8", tensors, path, letter, x)

    same_as_the_whole(out, source, token_batches, rounded)


def test_a_comparison_of_two_exports(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    """Both sides run by turns, and the one that was begun first ends first."""
    token_batches, source = token_batches[2:], checkpoint("llama", **SIZES)
    out = exported(source, tmp_path / "out", "nvfp4", token_batches)
    other = exported(source, tmp_path / "other", "fp8", token_batches)
    alone = {path: perplexity(path, text=token_batches).nll for path in (source, out, other)}
    assert len(set(alone.values())) == 3
    for one in (source, other):
        found = compare_predictions(out, one, text=token_batches)
        assert found.kl > 0
        assert math.log(found.export_perplexity) == pytest.approx(alone[out], rel=1e-6)
        assert math.log(found.source_perplexity) == pytest.approx(alone[one], rel=1e-6)


@pytest.mark.parametrize(
    ("section", "algo"),
    [
        ({}, None),
        ({"kv_cache_scheme": None}, None),
        ({"kv_cache_quant_algo": "nvfp4"}, "NVFP4"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}, "FP8"),
        ({"kv_cache_scheme": "NVFP4_AFFINE"}, "NVFP4_AFFINE"),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": "FP8"}, "FP8"),
        (
            {"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": True}},
            "{'type': 'float', 'num_bits': 8, 'dynamic': True}",
        ),
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "{'type': 'int', 'num_bits': 8}"),
    ],
)
def test_stated(section: dict[str, Any], algo: str | None) -> None:
    assert stated_cache(section) == algo
