"""What names and the spec tell is what the model tells; where they do not tell, it is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from modelopt_lite.build import build_meta_model, quiet_transformers
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.checkpoint.dequant import Source, open_source
from modelopt_lite.errors import CheckpointError, RecipeError
from modelopt_lite.job import Job, prepare, read_names, tensor_shapes
from modelopt_lite.models import get_spec, get_specs
from modelopt_lite.naming import UnclearNamesError
from modelopt_lite.plan import Matrix, Plan, make_plan
from modelopt_lite.recipes import Override, Recipe, load_recipe, preset_names
from modelopt_lite.structure import Structure, structure_of
from modelopt_lite.tensor_units import needs_data

MakeCheckpoint = Callable[..., Path]
CONFIGS = json.loads((Path(__file__).parent / "models" / "tiny.json").read_text())
TINY = [
    pytest.param(spec, fields, id=f"{spec.model_type}-{index}")
    for spec in get_specs()
    for index, fields in enumerate(CONFIGS.get(spec.model_type, ()))
]
DATA_FREE = [name for name in preset_names() if not needs_data(load_recipe(name))]
V5 = Version(transformers.__version__) >= Version("5")


@contextmanager
def opened(folder: Path) -> Iterator[Source]:
    with closing(open_source(folder)) as source:
        yield source


def by_model(folder: Path, source: Source) -> Structure:
    model = build_meta_model(folder, source.config, trust_remote_code=False)
    spec = get_spec(source.config["model_type"])
    return structure_of(model, tensor_shapes(source), spec)


def without_places(plan: Plan) -> list[Matrix]:
    """The matrices but for where the model has them, which no scale of these recipes asks for."""
    nowhere = Site("")
    return [replace(m, entry="", expert=None, unit="", seen_at=nowhere) for m in plan.matrices]


def compare(source: Source, one: Structure, other: Structure, recipe: str | Recipe) -> int:
    """Plan with both structures; return how many matrices both quantize."""
    plans: list[Plan] = []
    errors: list[str] = []
    model_type, recipe = source.config["model_type"], load_recipe(recipe)
    for structure in (one, other):
        try:
            shapes = tensor_shapes(source)
            plans.append(
                make_plan(structure, shapes, recipe, model_type=model_type, on_bad_shape="skip")
            )
        except RecipeError as error:
            errors.append(str(error))
    if errors:
        assert errors[0] == errors[1]
        return 0
    a, b = plans
    assert without_places(a) == without_places(b)
    assert a.excluded == b.excluded
    assert a.copies == b.copies
    assert a.outputs == b.outputs
    assert a.unquantized == b.unquantized
    assert not a.needs_calibration
    return len(a.matrices)


@pytest.mark.parametrize(("spec", "fields"), TINY)
def test_plans_are_those_made_with_the_model(
    spec: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    if Version(transformers.__version__) < Version(spec.min_transformers_version or "0"):
        pytest.skip(f"{spec.model_type} needs transformers {spec.min_transformers_version}")
    with quiet_transformers():
        config = transformers.AutoConfig.for_model(spec.model_type, **fields)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        with opened(tmp_path) as source:
            names = read_names(source, spec.model_type, trust_remote_code=False)
            model = by_model(tmp_path, source)
            assert names.model is None
            counts = [compare(source, names, model, recipe) for recipe in DATA_FREE]
            mine = Recipe(
                name="mine",
                weights="int8_weight_only",
                kv_cache="fp8_cast",
                exclude=("*.layers.1",),
                overrides=(Override(modules=("*.down_proj", "*.o_proj"), weights="mxfp8"),),
            )
            counts.append(compare(source, names, model, mine))
    assert sum(count > 0 for count in counts) > len(counts) / 2


# --- layers that the model does not have


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return folder


def configured(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in fields.items():
        if value is ...:
            config.pop(key)
        else:
            config[key] = value
    path.write_text(json.dumps(config))
    return folder


def test_extra_prediction_layers(checkpoint: MakeCheckpoint) -> None:
    def add(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".layers.1." in n]:
            tensors[name.replace(".layers.1.", ".layers.2.")] = tensors[name].clone()
        tensors["model.layers.2.eh_proj.weight"] = torch.ones(32, 64)
        tensors["model.layers.2.shared_head.head.weight"] = torch.ones(64, 32)

    folder = rewrite(checkpoint("deepseek_v3"), add)
    with opened(folder) as source:
        names = read_names(source, "deepseek_v3", trust_remote_code=False)
        assert compare(source, names, by_model(folder, source), "int8_weight_only") > 0


def stack(tensors: dict[str, Any]) -> None:
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            role: [tensors.pop(f"{prefix}.{e}.{role}_proj.weight") for e in range(8)]
            for role in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{prefix}.down_proj"] = torch.stack(parts["down"])


@pytest.mark.skipif(not V5, reason="transformers 4 does not read them")
def test_stacked_experts(checkpoint: MakeCheckpoint) -> None:
    folder = rewrite(checkpoint("qwen3_moe"), stack)
    with opened(folder) as source:
        names = read_names(source, "qwen3_moe", trust_remote_code=False)
        assert compare(source, names, by_model(folder, source), "w4a16_nvfp4") > 8 * 3


def test_tied_heads(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama_tied")
    with opened(folder) as source:
        names = read_names(source, "llama", trust_remote_code=False)
        assert names.tied_heads == {"lm_head"}
        assert compare(source, names, by_model(folder, source), "mxfp8") > 0


# --- where names do not tell


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=torch.bfloat16)})


EXPERT = "model.layers.1.mlp.experts"
Change = Callable[[dict[str, Any]], None]
STRAY: list[tuple[Change, str]] = [
    (put("score.weight", 2, 32), "'score.weight' is nothing"),
    (put("model.layers.0.mlp.lora.weight", 2, 32), "mlp.lora.weight' is nothing"),
]
DAMAGED: list[tuple[str, Change, str]] = [
    ("llama", drop("model.layers.1.mlp.up_proj.weight"), "'model.layers.1' lacks 'mlp.up_proj"),
    ("llama", put("model.layers.1.mlp.up_proj.weight", 60, 32), "differ in shapes"),
    ("llama", put("model.embed_tokens.weight", 60, 32), r"an embedding \[64, 32\]"),
    ("llama", drop("model.embed_tokens.weight"), r"and there is \[\]"),
    ("llama", drop("lm_head.weight"), "there is no output head"),
    ("qwen3_moe", drop(f"{EXPERT}.7.up_proj.weight"), "lacks 'mlp.experts.7.up_proj"),
    ("qwen3_moe", put("model.layers.0.mlp.gate.weight", 9, 32), "differ in shapes"),
]


def unclear(folder: Path, kind: str, message: str) -> Job:
    """Prepare a run whose names do not tell, for the reason in the message."""
    with opened(folder) as source, pytest.raises(UnclearNamesError, match=message):
        read_names(source, kind, trust_remote_code=False)
    return prepare(
        folder,
        load_recipe("int8_weight_only"),
        model_type=None,
        numerics="exact",
        on_bad_shape="error",
        trust_remote_code=False,
        device="cpu",
    )


@pytest.mark.parametrize(("kind", "change", "message"), DAMAGED)
def test_the_model_says_what_is_damaged(
    kind: str, change: Change, message: str, checkpoint: MakeCheckpoint
) -> None:
    folder = rewrite(checkpoint(kind), change)
    with pytest.raises(CheckpointError, match=r"checkpoint gives|has shape|is incomplete"):
        unclear(folder, kind, message)


@pytest.mark.parametrize(("change", "message"), STRAY)
def test_the_model_knows_what_is_none_of_its_own(
    change: Change, message: str, checkpoint: MakeCheckpoint
) -> None:
    job = unclear(rewrite(checkpoint("llama"), change), "llama", message)
    assert any(re.search(f"^planned by the model .*{message}", note) for note in job.plan.notes)
    assert job.model is not None
    assert job.plan.by_tensor
    job.source.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ...}, "names no architecture"),
        ({"num_hidden_layers": ...}, "gives no num_hidden_layers"),
        ({"num_hidden_layers": 3}, "layer 2 of 3 has no tensors"),
        ({"hidden_size": 48}, "asks for an embedding"),
    ],
)
def test_configs_that_do_not_tell(
    fields: dict[str, Any], message: str, checkpoint: MakeCheckpoint
) -> None:
    folder = configured(checkpoint("llama"), **fields)
    with opened(folder) as source, pytest.raises(UnclearNamesError, match=message):
        read_names(source, "llama", trust_remote_code=False)


def test_code_that_is_trusted_may_call_things_otherwise(checkpoint: MakeCheckpoint) -> None:
    folder = configured(checkpoint("llama"), auto_map={"AutoModelForCausalLM": "m.Model"})
    with opened(folder) as source:
        assert read_names(source, "llama", trust_remote_code=False)
        with pytest.raises(UnclearNamesError, match="brings code"):
            read_names(source, "llama", trust_remote_code=True)


def test_a_type_without_a_spec(checkpoint: MakeCheckpoint) -> None:
    with opened(checkpoint("llama")) as source:
        with pytest.raises(UnclearNamesError, match="no spec that says"):
            read_names(source, "unheard_of", trust_remote_code=False)
