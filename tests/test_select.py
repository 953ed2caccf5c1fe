"""Which matrices are candidates, and the reasons why others are left out."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn

from modelopt_lite import quantize_and_export
from modelopt_lite.apply import apply_recipe
from modelopt_lite.build import build_meta_model, quiet_transformers
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.doctor.instance import small_model
from modelopt_lite.doctor.shrink import Sizes
from modelopt_lite.errors import RecipeError, SpecError
from modelopt_lite.models import ExpertStorageSpec, ModelSpec, PTQSpec, get_spec, get_specs
from modelopt_lite.recipes import Override, Recipe, load_recipe
from modelopt_lite.select import Candidate, find_candidates
from modelopt_lite.structure import TensorShape, structure_of
from modelopt_lite.verify.compare import compare_with_source

installed = Version(transformers.__version__)
CONFIGS = json.loads((Path(__file__).parent / "models" / "tiny.json").read_text())
SPECS = {spec.model_type: spec for spec in get_specs() if spec.model_type in CONFIGS}
QUANTIZED = re.compile(r"\.layers\.\d+\.\S+(_proj|_proj_with_mqa|\.w[123])(\.weight)?")


@functools.cache
def found_in(model_type: str) -> list[tuple[dict[str, TensorShape], list[Candidate]]]:
    """Tensors on disk and candidates of each tiny model of a type."""
    found = []
    for fields in CONFIGS[model_type]:
        with tempfile.TemporaryDirectory() as name, quiet_transformers():
            config = transformers.AutoConfig.for_model(model_type, **fields)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(name)
            source = open_source(Path(name))
            model = build_meta_model(Path(name), source.config, trust_remote_code=False)
            source.close()
        tensors = {n: TensorShape(info.shape, info.dtype) for n, info in source.tensors.items()}
        spec = get_spec(model_type)
        candidates = find_candidates(structure_of(model, tensors, spec), tensors, spec)
        found.append((tensors, candidates))
    return found


@pytest.fixture(params=SPECS)
def found(request: pytest.FixtureRequest) -> list[tuple[dict[str, TensorShape], list[Candidate]]]:
    needed = SPECS[request.param].min_transformers_version or "0"
    if installed < Version(needed):
        pytest.skip(f"{request.param} needs transformers {needed}, {installed} is installed")
    return found_in(request.param)


Found = list[tuple[dict[str, TensorShape], list[Candidate]]]


def test_every_projection_and_nothing_else(found: Found) -> None:
    for tensors, candidates in found:
        expected = {n for n in tensors if QUANTIZED.search(n) and not re.search("vision|bias", n)}
        assert {c.source for c in candidates if c.skip is None} == expected
        assert len({c.name for c in candidates}) == len(candidates)


def test_reasons(found: Found) -> None:
    for _, candidates in found:
        for c in candidates:
            if c.name == "lm_head":
                assert c.skip == "output head"
            elif c.name.endswith((".gate", ".router", "shared_expert_gate")):
                assert c.skip == "router"
            elif "vision_tower" in c.name:
                assert c.skip == "left out by the model's spec (*vision_tower*)"
            else:
                assert c.skip is None
                assert c.role == c.name.rpartition(".")[2]


def test_experts_know_their_number(found: Found) -> None:
    for tensors, candidates in found:
        for c in candidates:
            match = re.fullmatch(r"(.*\.experts)\.(\d+)\.\w+", c.name)
            if match:
                assert (c.experts, c.expert) == (match[1], int(match[2]))
            elif c.stacked:
                assert c.experts == c.name.rpartition(".")[0]
                assert c.expert is None
                assert c.shape == tensors[c.source].shape
                assert c.input_major
            else:
                assert c.experts is None
            if not c.stacked:
                assert c.shape == tensors[c.source].shape


# --- by structure, without a spec


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 3)
        self.single = nn.Linear(4, 1)
        self.dense = nn.Linear(4, 5)
        self.conv = nn.Conv1d(2, 2, 3)
        self.table = nn.Embedding(7, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        self.head = nn.Linear(4, 7, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def candidates_of(
    model: nn.Module, spec: ModelSpec | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Candidate]:
    tensors = {
        name: TensorShape(tuple(t.shape), dtype)
        for name, t in model.state_dict(keep_vars=True).items()
    }
    structure = structure_of(model, tensors, spec)
    return {c.name: c for c in find_candidates(structure, tensors, spec)}


def test_an_unknown_model_is_judged_by_its_structure() -> None:
    made = candidates_of(Model())
    assert {name.removeprefix("layers.0."): c.skip for name, c in made.items()} == {
        "score": "router",  # as many outputs as there are experts beside it
        "single": "one output only",
        "dense": None,
        **{f"experts.{index}.up": None for index in range(3)},
        "head": "output head",
    }


def test_whole_numbers_are_no_candidates() -> None:
    assert not candidates_of(Model(), dtype=torch.int8)


class Stacked(nn.Module):
    def __init__(self, name: str = "experts", rows: int = 8, *, turned: bool = False) -> None:
        super().__init__()
        inner = nn.Module()
        stacks = torch.zeros(2, rows, 4), torch.zeros(2, 4, rows // 2)
        inner.gate_up, inner.down = (nn.Parameter(s.mT if turned else s) for s in stacks)
        self.add_module(name, inner)
        self.gate = nn.Linear(4, 2, bias=False)


def test_stacked_experts_of_an_unknown_model_are_refused() -> None:
    with pytest.raises(SpecError, match=r"'experts\.gate_up' \[2, 8, 4\] .* reduction axis"):
        candidates_of(Stacked())
    assert candidates_of(Stacked("other")).keys() == {"gate"}  # not called experts: left alone


def stacked_spec(**fields: Any) -> ModelSpec:
    storage = {
        "linear_names": ("gate", "up", "down"),
        "stacked_names": ("gate_up", "down"),
        **fields,
    }
    return ModelSpec(model_type="x", expert_storage_spec=ExpertStorageSpec(**storage))


def test_a_stack_is_cut_into_the_matrices_that_engines_name() -> None:
    made = candidates_of(Stacked(), stacked_spec())
    whole = slice(None)
    assert {name: (c.source, c.region, c.shape) for name, c in made.items()} == {
        "experts.0.gate": ("experts.gate_up", (0, slice(0, 4)), (4, 4)),
        "experts.0.up": ("experts.gate_up", (0, slice(4, 8)), (4, 4)),
        "experts.1.gate": ("experts.gate_up", (1, slice(0, 4)), (4, 4)),
        "experts.1.up": ("experts.gate_up", (1, slice(4, 8)), (4, 4)),
        "experts.0.down": ("experts.down", (0, slice(0, 4)), (4, 4)),
        "experts.1.down": ("experts.down", (1, slice(0, 4)), (4, 4)),
        "gate": ("gate.weight", (), (2, 4)),
    }
    assert made["gate"].skip == "router"
    made = candidates_of(Stacked(), stacked_spec(interleaved_gate_up=True))
    assert made["experts.1.gate"].region == (1, slice(0, None, 2))
    assert made["experts.1.up"].region == (1, slice(1, None, 2))
    made = candidates_of(Stacked(turned=True), stacked_spec(input_major=True))
    assert made["experts.1.up"].region == (1, whole, slice(4, 8))
    assert made["experts.1.up"].shape == (4, 4)
    assert all(c.input_major == (name != "gate") for name, c in made.items())


def test_a_stack_that_is_a_weight_goes_by_the_name_of_its_module() -> None:
    """Scales lie beside ``moe.up.weight`` as beside any weight, and not as beside ``moe.up``."""
    model = nn.Module()
    model.moe = nn.Module()
    for name, shape in {
        "gate_proj": (2, 8, 4),
        "up_proj": (2, 8, 4),
        "down_proj": (2, 4, 8),
    }.items():
        inner = nn.Module()
        inner.weight = nn.Parameter(torch.zeros(shape))
        model.moe.add_module(name, inner)
    names = ("gate_proj", "up_proj", "down_proj")
    fields = {"linear_names": names, "stacked_names": names, "export_stacked": True}
    made = candidates_of(model, stacked_spec(container="moe", **fields))
    assert {name: (c.source, c.stacked, c.role) for name, c in made.items()} == {
        f"moe.{name}": (f"moe.{name}.weight", True, name) for name in names
    }


def test_one_stacked_expert_is_not_one_output() -> None:
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.gate_up = nn.Parameter(torch.zeros(1, 8, 4))
    made = candidates_of(model, stacked_spec(export_stacked=True))
    assert made["experts.gate_up"].skip is None


def test_facts_of_the_spec() -> None:
    spec = ModelSpec(
        model_type="x", ptq_spec=PTQSpec(router_names=("dense",), skip_modules=("layers.?.exp*",))
    )
    made = candidates_of(Model(), spec)
    assert made["layers.0.dense"].skip == "router"
    assert made["layers.0.experts.1.up"].skip == "left out by the model's spec (layers.?.exp*)"


# --- recipes


def recipe(**fields: Any) -> Recipe:
    return Recipe(**{"name": "mine", "weights": "fp8", **fields})


CANDIDATES = [
    Candidate("layers.0.attn.q", "layers.0.attn.q.weight", (), (2, 2), role="q"),
    Candidate("layers.0.mlp.up", "layers.0.mlp.up.weight", (), (2, 2), role="up"),
    Candidate("layers.1.mlp.up", "layers.1.mlp.up.weight", (), (2, 2), role="up"),
    Candidate("head", "head.weight", (), (2, 2), skip="output head"),
]


@pytest.mark.parametrize(
    ("fields", "skips"),
    [
        ({}, [None, None, None, "output head"]),
        (
            {"include": ("*.mlp",)},
            ["not in the recipe mine", None, None, "output head"],
        ),
        (
            {"exclude": ("layers.1", "head")},
            [None, None, "excluded by the pattern 'layers.1'", "output head"],
        ),
        (
            {"include": ("layers.0",), "exclude": ("*.attn",)},
            [
                "excluded by the pattern '*.attn'",
                None,
                "not in the recipe mine",
                "output head",
            ],
        ),
    ],
)
def test_include_and_exclude(fields: dict[str, Any], skips: list[str | None]) -> None:
    chosen = apply_recipe(CANDIDATES, recipe(**fields))
    assert [c.skip for c in chosen] == skips
    assert [c.name for c in chosen] == [c.name for c in CANDIDATES]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"include": ("mlp",)}, r"include pattern 'mlp' .* 'layers\.0\.attn\.q', and a lone \*"),
        ({"exclude": ("*.mlp", "nothing.*")}, r"exclude pattern 'nothing\.\*'"),
        ({"include": ("*.mlp", "head")}, r"'head' .* only what is never .* head \(output head\)"),
        ({"exclude": ("layers",)}, r"quantizes nothing of this model \(4 matrices"),
    ],
)
def test_patterns_that_do_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        apply_recipe(CANDIDATES, recipe(**fields))


def test_a_preset_may_name_modules_of_other_architectures() -> None:
    chosen = apply_recipe(CANDIDATES, recipe(name="nvfp4_mlp_only", include=("*.mlp", "*.moe")))
    assert [c.skip is None for c in chosen] == [False, True, True, False]


def formats(**fields: Any) -> list[str]:
    return [c.format for c in apply_recipe(CANDIDATES, recipe(**fields))]


def test_overrides_go_in_order() -> None:
    """A later one wins, also over what is not included; exclude wins over all."""
    first = Override(modules=("layers.0",), weights="nvfp4")
    second = Override(modules=("*.mlp",), weights="mxfp8")
    none = Override(modules=("*.mlp",), weights="none")
    assert formats(overrides=(first,)) == ["nvfp4", "nvfp4", "fp8", ""]
    assert formats(overrides=(first, second)) == ["nvfp4", "mxfp8", "mxfp8", ""]
    assert formats(overrides=(second, first)) == ["nvfp4", "nvfp4", "mxfp8", ""]
    assert formats(overrides=(first, none)) == ["nvfp4", "", "", ""]
    assert formats(overrides=(first,), include=("layers.1",)) == ["nvfp4", "nvfp4", "fp8", ""]
    assert formats(overrides=(first,), exclude=("*.attn",)) == ["", "nvfp4", "fp8", ""]
    with pytest.raises(RecipeError, match="override pattern 'nothing'"):
        formats(overrides=(Override(modules=("nothing",), weights="fp8"),))
    skipped = apply_recipe(CANDIDATES, recipe(overrides=(none,)))
    assert skipped[1].skip == "left out by an override of the recipe mine"


def test_only_the_cache_may_be_quantized() -> None:
    assert all(c.skip for c in apply_recipe(CANDIDATES, recipe(weights="none")))


def test_a_model_without_matrices() -> None:
    with pytest.raises(RecipeError, match="the model has no linear layers"):
        apply_recipe([], recipe())
    with pytest.raises(RecipeError, match=r"looks like '\(none\)'"):
        apply_recipe([], recipe(include=("a",)))


def test_stacks_of_either_orientation_give_the_same_export(tmp_path: Path) -> None:
    """Published Qwen3-VL-MoE has [E, H, 2I] and [E, I, H]; release 5 writes them turned."""
    made = small_model("qwen3_vl_moe", Sizes(16, fill=True)).model.to(torch.bfloat16)
    made.save_pretrained(tmp_path / "one")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    stacks = [name for name, tensor in tensors.items() if tensor.ndim == 3 and "expert" in name]
    assert len(stacks) == 4
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    turned = {n: t.mT.contiguous() if n in stacks else t for n, t in tensors.items()}
    save_file(turned, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    recipe = replace(load_recipe("int4_weight_only"), group_size=(32,))
    for name in ("one", "other"):
        out = tmp_path / f"{name} exported"
        quantize_and_export(
            tmp_path / name, export_dir=out, recipe=recipe, on_bad_shape="skip", progress=False
        )
        compared = compare_with_source(out, tmp_path / name)
        assert any(".experts.0.gate_proj" in module for module in compared)
    one, other = (
        load_file(tmp_path / f"{name} exported" / "model.safetensors") for name in ("one", "other")
    )
    assert one.keys() == other.keys()
    assert any(".experts.0.gate_proj.weight" in name for name in one)
    same = {n: t.dtype == other[n].dtype and torch.equal(t, other[n]) for n, t in one.items()}
    assert all(same.values())


@pytest.mark.parametrize(
    ("first", "last", "input_major"),
    [
        ((4, 96, 64), (4, 64, 48), False),
        ((4, 64, 96), (4, 48, 64), True),
        ((4, 96, 48), (4, 48, 48), False),  # I is H
        ((4, 48, 96), (4, 48, 48), True),
        ((4, 96, 64), (4, 60, 48), None),  # neither: as the spec says
    ],
)
def test_the_orientation_of_stacks_is_that_of_their_shapes(
    first: tuple[int, ...], last: tuple[int, ...], input_major: bool | None
) -> None:
    for stated in (False, True):
        storage = ExpertStorageSpec(
            linear_names=("gate_proj", "up_proj", "down_proj"),
            stacked_names=("gate_up_proj", "down_proj"),
            input_major=stated,
        )
        expected = stated if input_major is None else input_major
        assert storage.oriented(first, last).input_major == expected
