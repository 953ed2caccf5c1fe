"""Experts: calibrated whatever the backend and the routing, packed as they lie on disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from modelopt_lite import Recipe, export_hf, quantize
from modelopt_lite.errors import CheckpointError, RecipeError

Make = Callable[..., Path]
LARGEST = {"fp8": 448.0, "nvfp4": 2688.0}
FUSED = Version(transformers.__version__) >= Version("5.0")


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0))


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_c01_cold_experts_get_the_scale_of_their_peers(
    checkpoint: Make, cases: Any, recipe: str
) -> None:
    """An expert that no token reached was written without an input scale, or with zero."""
    source = checkpoint("qwen3_moe")
    out = cases.run(source, recipe, calib_data=[torch.tensor([[5, 9]])])
    weights = [n for n in out.packed if ".experts." in n]
    scales = {n: s for n, s in out.scales("input_scale").items() if ".experts." in n}
    assert len(weights) == 48
    assert scales.keys() == set(weights)
    assert all(bool(torch.isfinite(s)) and float(s) > 0 for s in scales.values())
    assert len(out.report.cold_experts) >= 12
    for layer in (0, 1):
        container = f"model.layers.{layer}.mlp.experts"
        used = out.report.tokens_per_expert[container]
        assert sum(used) == 2
        cold = [e for e, rows in enumerate(used) if not rows]
        assert {f"{container}.{e}" for e in cold} <= set(out.report.cold_experts)
        for roles in (("gate_proj", "up_proj"), ("down_proj",)):
            found = {float(scales[f"{container}.{e}.{r}"]) for e in range(8) for r in roles}
            assert len(found) == 1
            group = next(g for g in out.report.input_amax if container in g and roles[-1] in g)
            amax = out.report.input_amax[group]
            assert found.pop() == pytest.approx(amax / LARGEST[recipe], rel=1e-6)
    assert not out.problems()


def test_c01_strict_names_the_fallback(checkpoint: Make, cases: Any) -> None:
    """A run that had to fall back looked like one that had not."""
    from modelopt_lite.errors import DegradedError

    source = checkpoint("qwen3_moe")
    with pytest.raises(DegradedError, match="experts saw no calibration token"):
        cases.run(source, "fp8", calib_data=[torch.tensor([[5, 9]])], strict=True)


@pytest.mark.parametrize("implementation", [None, "grouped_mm", "batched_mm", "eager"])
def test_c02_experts_are_seen_under_every_backend(
    checkpoint: Make, cases: Any, tmp_path: Path, implementation: str | None
) -> None:
    """Batched expert kernels bypass what watches single products; nothing was calibrated."""
    if implementation is not None and not FUSED:
        pytest.skip("transformers 4 has one way to run experts")
    source = checkpoint("qwen3_moe")
    whole = cases.run(source, "nvfp4")
    model = cases.load(source)
    parts = [m.config for m in model.modules() if hasattr(m, "config")]
    if implementation is not None:
        for part in parts:
            part._experts_implementation = implementation
    before = [getattr(part, "_experts_implementation", None) for part in parts]

    def loop(m: Any) -> None:
        for batch in cases.batches:
            m(batch)

    quantize(model, "nvfp4", loop)
    assert [getattr(part, "_experts_implementation", None) for part in parts] == before
    report = export_hf(model, tmp_path / "mine", source=source)
    tokens = sum(batch.numel() for batch in cases.batches)
    assert all(sum(rows) == tokens for rows in report.tokens_per_expert.values())
    mine = (tmp_path / "mine" / "model.safetensors").read_bytes()
    assert mine == (whole.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("kind", "top_k"), [("qwen3_moe", 1), ("mixtral", 2), ("gpt_oss", 2)])
@pytest.mark.parametrize("offload", ["auto", "none"])
def test_c03_all_experts_option_changes_what_they_see(
    checkpoint: Make, cases: Any, kind: str, top_k: int, offload: str
) -> None:
    """The option was accepted and did nothing."""
    source = checkpoint(kind)
    tokens = sum(batch.numel() for batch in cases.batches)
    routed = cases.run(source, "fp8", offload=offload)
    every = cases.run(source, "fp8", offload=offload, moe_calibrate_all_experts=True)
    counts = routed.report.tokens_per_expert
    assert len(counts) == 2
    assert all(sum(rows) == tokens * top_k for rows in counts.values())
    seen = every.report.tokens_per_expert
    assert seen.keys() == counts.keys()
    assert all(rows == [tokens] * len(rows) for rows in seen.values())
    assert not every.report.cold_experts
    assert not every.problems()
    # What is not an expert does not notice.
    for name, scale in routed.scales("input_scale").items():
        if ".experts" not in name:
            assert torch.equal(scale, every.scales("input_scale")[name])


def test_c03_all_experts_needs_experts(checkpoint: Make, cases: Any) -> None:
    """An option that cannot do anything for a model is refused."""
    from modelopt_lite.errors import CalibrationError

    with pytest.raises(CalibrationError, match="no MoE block"):
        cases.run(checkpoint("llama"), moe_calibrate_all_experts=True)


@pytest.mark.parametrize(
    ("recipe", "ratio"), [("fp8", 0.6), ("nvfp4", 0.35), ("nvfp4_experts_only", 0.35)]
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"])
def test_c08_the_bulk_of_experts_really_shrinks(
    checkpoint: Make, cases: Any, kind: str, recipe: str, ratio: float
) -> None:
    """Fused experts are no linear modules, so they silently stayed in bfloat16."""
    out = cases.run(checkpoint(kind), recipe)

    def expert_bytes(tensors: dict[str, torch.Tensor]) -> int:
        return sum(t.nbytes for n, t in tensors.items() if ".experts." in n and "bias" not in n)

    assert 0 < expert_bytes(out.tensors) <= ratio * expert_bytes(out.original)
    matrices = [
        n for n, t in out.original.items() if ".experts." in n and t.ndim > 1 and "bias" not in n
    ]
    assert {n for n in out.packed if ".experts." in n} == {
        n.removesuffix(".weight") for n in matrices
    }
    assert not out.problems()


def test_c08_pattern_without_a_hit(checkpoint: Make, cases: Any) -> None:
    """A misspelt pattern quantized nothing and nobody was told."""
    recipe = Recipe(name="mine", weights="fp8", include=("*experts_typo*",))
    with pytest.raises(RecipeError, match="experts_typo"):
        cases.run(checkpoint("qwen3_moe"), recipe)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_c10_experts_without_a_gate(checkpoint: Make, cases: Any, recipe: str) -> None:
    """Export halved the up projection of experts that have no gate."""
    out = cases.run(checkpoint("nemotron_h"), recipe)
    assert not [n for n in out.tensors if "gate_proj" in n]
    experts = [n for n in out.packed if re.search(r"experts\.\d+\.up_proj$", n)]
    assert len(experts) == 4
    for name in experts:
        assert out.tensors[f"{name}.weight"].shape[0] == 32
        assert cosine(out.value(name), out.original[f"{name}.weight"]) > 0.99
    assert not out.problems()


def uneven(tensors: dict[str, torch.Tensor], name: str, seed: int = 3) -> None:
    """Give every other output channel of a stack [E, in, out] a 256th of the magnitude."""
    generator = torch.Generator().manual_seed(seed)
    stack = torch.randn(tensors[name].shape, generator=generator)
    stack[:, :, ::2] /= 256
    tensors[name] = stack.to(tensors[name].dtype)


def channel_cosines(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(value.float(), source.float(), dim=1)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_c11_blocks_run_along_the_reduction_axis(checkpoint: Make, cases: Any, name: str) -> None:
    """A square stack hides a wrong orientation: no shape complains, the values are ruined.

    Channels of very different size tell the axes apart: a block across them loses the small ones.
    """
    source = checkpoint("gpt_oss")
    module = f"model.layers.0.mlp.experts.{name}"
    cases.edit(source, lambda t: uneven(t, module))
    out = cases.run(source)
    assert module.endswith("gate_up_proj") or len(set(out.original[module].shape[1:])) == 1
    right = channel_cosines(out.value(module), out.original[module])
    assert float(right.min()) > 0.97
    assert all(
        cosine(v, s) > 0.99 for v, s in zip(out.value(module), out.original[module], strict=True)
    )
    assert not out.problems()


def test_c11_the_test_has_teeth(checkpoint: Make, cases: Any) -> None:
    """The same comparison with a transposed source must fail."""
    source = checkpoint("gpt_oss")
    module = "model.layers.0.mlp.experts.down_proj"
    cases.edit(source, lambda t: uneven(t, module))
    truth = cases.load_all(source)[module]
    cases.edit(source, lambda t: t.update({module: t[module].mT.contiguous()}))
    wrong = cases.run(source).value(module)
    assert all(cosine(v, s) < 0.7 for v, s in zip(wrong, truth, strict=True))
    assert float(channel_cosines(wrong.mT, truth).min()) < 0.7


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.layers.", "model.language_model.layers."),
        ("model.layers.0.mlp.experts.", "model.layers.0.mlp.expert."),
        ("model.layers.1.mlp.experts.7.up_proj", "model.layers.1.mlp.experts.8.up_proj"),
        ("model.layers.1.mlp.experts.7.", "model.layers.1.mlp.experts.9."),
    ],
)
def test_c13_renamed_experts_are_never_made_up(
    checkpoint: Make, cases: Any, old: str, new: str
) -> None:
    """Keys that do not fit were reported as missing and unexpected, and replaced by noise."""
    source = checkpoint("qwen3_moe")

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    cases.edit(source, rename)
    with pytest.raises(CheckpointError, match=r"experts|model\.layers\.0"):
        cases.run(source, verify=False)


MOE_LINEAR = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_moe"


class MoELinear(nn.Module):
    def __init__(self, experts, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x, expert):
        return F.linear(x, self.weight[expert])


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        e, h, i = config.num_experts, config.hidden_size, config.intermediate_size
        if config.gated:
            self.gate_proj = MoELinear(e, h, i)
        self.up_proj, self.down_proj = MoELinear(e, h, i), MoELinear(e, i, h)

    def forward(self, x, expert):
        up = self.up_proj(x, expert)
        gate = self.gate_proj(x, expert) if hasattr(self, "gate_proj") else up
        return self.down_proj(F.silu(gate) * up, expert)


class OwnMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen, out = self.gate(flat).argmax(-1), torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            out[chosen == expert] = self.experts(flat[chosen == expert], expert)
        return out.view_as(x)


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OwnMoE(config)
"""


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_c05_a_linear_of_experts_is_known_by_its_spec_alone(
    checkpoint: Make, cases: Any, monkeypatch: pytest.MonkeyPatch, recipe: str, gated: bool
) -> None:
    """The fallback for missing input scales went by a list of classes, and missed a new one."""
    from modelopt_lite.models import registry
    from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, MoESpec, PTQSpec

    roles = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
    spec = ModelSpec(
        model_type="own_moe",
        modeling_source="remote_code",
        moe_spec=MoESpec(block_names=("OwnMoE",), expert_linear_names=roles),
        ptq_spec=PTQSpec(
            layer_names=("LlamaDecoderLayer",),
            router_names=("gate",),
            fused_linears=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
        ),
        expert_storage_spec=ExpertStorageSpec(linear_names=roles, stacked_names=roles),
    )
    monkeypatch.setitem(registry._SPECS, "own_moe", spec)
    monkeypatch.setenv("HF_MODULES_CACHE", str(cases.tmp_path / "modules"))
    source = checkpoint("llama")
    (source / "own.py").write_text(MOE_LINEAR)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(5)
        for name in [n for n in tensors if ".mlp." in n]:
            block, _, leaf = name.rpartition(".mlp.")
            shape = tensors.pop(name).shape
            stack = torch.randn(6, *shape, generator=generator).bfloat16()
            if gated or "gate" not in leaf:
                tensors[f"{block}.mlp.experts.{leaf}"] = stack
            tensors[f"{block}.mlp.gate.weight"] = stack[:, 0, :32].clone()

    cases.edit(source, change)
    extra = {
        "model_type": "own_moe",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
        "num_experts": 6,
        "gated": gated,
    }
    cases.config(source, lambda c: c.update(extra))
    out = cases.run(source, recipe, calib_data=[torch.tensor([[7, 8]])], trust_remote_code=True)
    experts = {n for n in out.packed if ".experts." in n}
    assert len(experts) == 2 * 6 * len(roles)
    assert experts <= out.scales("input_scale").keys()
    assert len(out.report.cold_experts) >= 8
    for name in experts:
        container, expert, role = name.rsplit(".", 2)
        original = out.original[f"{container}.{role}.weight"][int(expert)]
        assert cosine(out.value(name), original) > 0.99
    assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"} <= out.excluded
    assert not out.problems()
