"""Exports with scales of input channels, and with factors, are read as what engines compute.

The reference multiplies as an engine does, ``Q(x * s) @ W.T + ((x * s) @ a.T) @ b.T``, tensor by
tensor from what is on disk, inside of transformers' model or of experts written out here. Models
are float32, so that only the order of sums and of scaling differs: the mean loss of a token may
differ by BOUND.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from modelopt_lite import perplexity, quantize_and_export
from modelopt_lite.build import build_meta_model
from modelopt_lite.calibrate.observe import InputWatch
from modelopt_lite.calibrate.rounding import InputRounding
from modelopt_lite.checkpoint.dequant import DequantizedSource, open_source
from modelopt_lite.checkpoint.names import map_names
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats.linear import FORMATS, LinearFormat
from modelopt_lite.recipes import load_recipe

BOUND = 2e-6  # nats a token
BIG = {
    "head_dim": 32,
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128),
}
RECIPES = ("int4_awq", "w4a8_awq", "int8_smoothquant", "nvfp4_awq_lite", "nvfp4_svdquant")
MakeCheckpoint = Callable[..., Path]


class Matrix:
    """A matrix of an export: what stands for it on disk, by suffix."""

    def __init__(self, tensors: dict[str, Tensor], name: str, fmt: LinearFormat) -> None:
        self.parts = {k.removeprefix(f"{name}."): t for k, t in tensors.items() if is_of(k, name)}
        self.fmt = fmt
        self.w = fmt.dequantize(self.parts, torch.float32)

    def __call__(self, x: Tensor, bias: Tensor | None = None, rounds: bool = True) -> Tensor:
        x = x * self.parts.get("pre_quant_scale", torch.ones(())).float()
        rounded = self.fmt.fake_quantize_input(x, self.parts.get("input_scale")) if rounds else x
        y = functional.linear(rounded, self.w, bias)
        for prefix in ("", "weight_quantizer._"):
            if (a := self.parts.get(f"{prefix}svdquant_lora_a")) is not None:
                y = y + x @ a.float().T @ self.parts[f"{prefix}svdquant_lora_b"].float().T
        return y


def is_of(key: str, name: str) -> bool:
    return key.startswith(f"{name}.") and not key.endswith(".bias")


def widened(source: Path) -> Path:
    """Make a checkpoint one in float32."""
    tensors = {name: t.float() for name, t in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = source / "config.json"
    config.write_text(config.read_text().replace('"bfloat16"', '"float32"'))
    return source


def reference_loss(source: Path, out: Path, recipe: str, ids: Tensor, rounds: bool) -> float:
    """The mean loss of a token in transformers' model with the products of an engine."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="sdpa"
    )
    tensors, fmt = load_file(out / "model.safetensors"), FORMATS[load_recipe(recipe).weights]
    quantized = {name.removesuffix(".weight_scale") for name in tensors if "weight_scale" in name}
    plain = {name: t for name, t in tensors.items() if name in model.state_dict()}
    plain = {n: t for n, t in plain.items() if n.removesuffix(".weight") not in quantized}
    model.load_state_dict(plain, strict=False)
    for name, module in model.named_modules():
        if name in quantized:
            replace_forward(module, Matrix(tensors, name, fmt), rounds)
        elif name.endswith(".experts"):
            replace_experts(module, name, tensors, fmt, rounds)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[:, :-1]
    return float(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


def replace_forward(module: nn.Module, matrix: Matrix, rounds: bool) -> None:
    module.forward = lambda x: matrix(x, module.bias, rounds)  # type: ignore[arg-type]


def replace_experts(
    module: nn.Module, name: str, tensors: dict[str, Tensor], fmt: LinearFormat, rounds: bool
) -> None:
    experts = [
        [
            Matrix(tensors, f"{name}.{e}.{role}", fmt)
            for role in ("gate_proj", "up_proj", "down_proj")
        ]
        for e in range(count(tensors, name))
    ]

    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(experts):
            rows, slot = (index == e).nonzero(as_tuple=True)
            hidden = functional.silu(gate(x[rows], None, rounds)) * up(x[rows], None, rounds)
            out.index_add_(0, rows, down(hidden, None, rounds) * weights[rows, slot, None])
        return out

    module.forward = forward


def count(tensors: dict[str, Tensor], name: str) -> int:
    stems = {key.removeprefix(f"{name}.").partition(".")[0] for key in tensors if name in key}
    return len(stems)


@pytest.fixture
def export(checkpoint: MakeCheckpoint, tmp_path: Path) -> Callable[..., tuple[Path, Path, Tensor]]:
    """Return a function (kind, recipe) -> source, export, ids of two sequences."""
    ids = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(5))

    def make(kind: str, recipe: str, **options: Any) -> tuple[Path, Path, Tensor]:
        source = widened(checkpoint(kind, **BIG))
        out = tmp_path / f"{kind}-{recipe}"
        quantize_and_export(
            source, export_dir=out, recipe=recipe, calib_data=[ids], progress=False, **options
        )
        return source, out, ids

    return make


def kept(out: Path) -> Iterator[str]:
    yield from (n for n in load_file(out / "model.safetensors") if n.endswith("pre_quant_scale"))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_is_the_engines(
    kind: str, recipe: str, export: Callable[..., tuple[Path, Path, Tensor]]
) -> None:
    source, out, ids = export(kind, recipe)
    assert any(kept(out))
    for rounds in (True, False):
        found = perplexity(out, text=ids, activations=rounds, device="cpu").nll
        assert abs(found - reference_loss(source, out, recipe, ids, rounds)) <= BOUND
    original = perplexity(source, text=ids, device="cpu").nll
    assert abs(found - original) > 10 * BOUND  # so the bound tells the two apart


@pytest.mark.parametrize("numerics", ["exact", "modelopt"])
@pytest.mark.parametrize("recipe", ["int4_awq", "nvfp4_svdquant"])
def test_stacks_of_experts(
    recipe: str, numerics: str, export: Callable[..., tuple[Path, Path, Tensor]]
) -> None:
    """Read as values [E, in, out], and multiplied as an engine does, batched or one by one."""
    _, out, _ = export("gpt_oss", recipe, numerics=numerics)
    tensors, fmt = load_file(out / "model.safetensors"), FORMATS[load_recipe(recipe).weights]
    source = open_source(out)
    assert isinstance(source, DequantizedSource)
    model = build_meta_model(out, source.config, trust_remote_code=False)
    names = map_names(model, {name: info.shape for name, info in source.tensors.items()})
    rounding = InputRounding(source, names, torch.device("cpu"))
    stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))]
    assert len(stacks) == 4
    for name in stacks:
        value = source.read(name)
        matrices = [Matrix(parts_of_expert(tensors, name, e), "w", fmt) for e in range(len(value))]
        x = torch.randn(len(value), 5, value.shape[1], generator=torch.Generator().manual_seed(1))
        wanted = torch.stack([m(x_e) for m, x_e in zip(matrices, x, strict=True)])
        plain = torch.stack([m(x_e, None, False) for m, x_e in zip(matrices, x, strict=True)])
        torch.testing.assert_close(x @ value, plain, rtol=1e-5, atol=1e-5)
        weight = nn.Parameter(value, requires_grad=False)
        watch = InputWatch(rounding.visit, rounding.amend)
        watch.watch({name: weight})
        with watch:
            batched = torch.bmm(x, weight)
            single = torch.stack([x_e @ weight[e] for e, x_e in enumerate(x)])
        torch.testing.assert_close(batched, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(single, wanted, rtol=1e-5, atol=1e-5)


def parts_of_expert(tensors: dict[str, Tensor], name: str, expert: int) -> dict[str, Tensor]:
    """The tensors of a matrix [out, in] of a stack [E, in, out], as if it stood alone."""
    parts = {"w.weight": tensors[name][expert].mT.contiguous()}
    for key, tensor in tensors.items():
        suffix = key.removeprefix(f"{name}_")
        if suffix == key or "bias" in key:
            continue
        own = tensor[expert] if tensor.ndim == 3 else tensor
        parts[f"w.{suffix}"] = own.mT.contiguous() if suffix == "weight_scale" else own
    return parts


def test_an_export_is_a_source(export: Callable[..., tuple[Path, Path, Tensor]]) -> None:
    """What was smoothed is quantized again without the scale, near the values that it stood for."""
    _, out, ids = export("qwen3_moe", "int4_awq")
    again = out.with_name("again")
    report = quantize_and_export(out, export_dir=again, recipe="fp8_pc_pt", progress=False)
    assert not report.beyond_bound
    one, other = open_source(out), open_source(again)
    assert one.tensors.keys() == other.tensors.keys()
    for name, info in one.tensors.items():
        if len(info.shape) > 1:
            value = one.read(name)
            error = (other.read(name) - value).abs().amax(-1)
            assert bool((error <= value.abs().amax(-1) / 16).all()), name
    assert not any(kept(again))
    assert perplexity(again, text=ids, device="cpu").nll < 6


@pytest.mark.parametrize("suffix", ["pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b"])
def test_what_does_not_fit_is_an_error(
    suffix: str, export: Callable[..., tuple[Path, Path, Tensor]]
) -> None:
    _, out, _ = export("llama", "nvfp4_svdquant")
    tensors = load_file(out / "model.safetensors")
    name = next(n for n in tensors if n.endswith(suffix))
    tensors[name] = tensors[name][..., 1:].contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{suffix}' torch.float32 .* does not fit"):
        open_source(out)
    if suffix != "pre_quant_scale":
        del tensors[name]
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"lacks '.*{suffix}'; restore the factor"):
            open_source(out)
