"""Exports in the compressed-tensors dialect: files, config, audit, resuming, both from one run."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import drop, edit_json, errors, put, set_tensor
from safetensors.torch import load_file

from modelopt_lite import dry_run, export_hf, perplexity, quantize, quantize_and_export
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.dialects.schemes import arguments
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes import Override, Recipe
from modelopt_lite.report import CARD_FILE, OF_THE_RUN, REPORT_FILE
from modelopt_lite.verify.audit import audit

MakeCheckpoint = Callable[..., Path]
INPUTS = Path(__file__).parents[1] / "data" / "golden" / "inputs"
LLAMA = INPUTS / "llama"
Q = "model.layers.0.self_attn.q_proj"
IDS = [torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(0))]
MIXED = Recipe(
    name="mixed",
    weights="nvfp4",
    overrides=(
        Override(modules=("*.self_attn",), weights="fp8"),
        Override(modules=("*.down_proj",), weights="int4_weight_only"),
    ),
)

# Suffix -> (dtype, shape) of a matrix [128, 128], and the name of the compressor.
BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
F8 = torch.float8_e4m3fn
RULES: dict[str, tuple[str, dict[str, tuple[torch.dtype, list[int]]]]] = {
    "fp8": (
        "float-quantized",
        {"weight": (F8, [128, 128]), "weight_scale": (BF16, [1]), "input_scale": (BF16, [1])},
    ),
    "fp8_per_channel_per_token": (
        "float-quantized",
        {"weight": (F8, [128, 128]), "weight_scale": (BF16, [128, 1])},
    ),
    "fp8_2d_blockwise_weight_only": (
        "float-quantized",
        {"weight": (F8, [128, 128]), "weight_scale": (BF16, [1, 1])},
    ),
    "int8": (
        "int-quantized",
        {
            "weight": (torch.int8, [128, 128]),
            "weight_scale": (BF16, [128, 1]),
            "input_scale": (BF16, [1]),
        },
    ),
    "int8_per_channel_per_token": (
        "int-quantized",
        {"weight": (torch.int8, [128, 128]), "weight_scale": (BF16, [128, 1])},
    ),
    "int8_weight_only": (
        "pack-quantized",
        {
            "weight_packed": (torch.int32, [128, 32]),
            "weight_scale": (BF16, [128, 1]),
            "weight_shape": (torch.int64, [2]),
        },
    ),
    "int4_weight_only": (
        "pack-quantized",
        {
            "weight_packed": (torch.int32, [128, 16]),
            "weight_scale": (BF16, [128, 1]),
            "weight_shape": (torch.int64, [2]),
        },
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "weight_packed": (U8, [128, 64]),
            "weight_scale": (F8, [128, 8]),
            "weight_global_scale": (F32, [1]),
            "input_global_scale": (F32, [1]),
        },
    ),
    "w4a16_nvfp4": (
        "nvfp4-pack-quantized",
        {
            "weight_packed": (U8, [128, 64]),
            "weight_scale": (F8, [128, 8]),
            "weight_global_scale": (F32, [1]),
        },
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"weight_packed": (U8, [128, 64]), "weight_scale": (U8, [128, 4])},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"weight": (F8, [128, 128]), "weight_scale": (U8, [128, 4])},
    ),
    "w4a8_mxfp4_fp8": (
        "mxfp4-pack-quantized",
        {
            "weight_packed": (U8, [128, 64]),
            "weight_scale": (U8, [128, 4]),
            "input_scale": (BF16, [1]),
        },
    ),
}


def run(source: Path, out: Path, recipe: str | Recipe, **options: Any) -> Path:
    options = {"dialect": "compressed-tensors", "calib_data": IDS, "progress": False, **options}
    quantize_and_export(source, export_dir=out, recipe=recipe, **options)
    return out


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function (recipe) that exports the llama once, in the compressed dialect."""
    folder = tmp_path_factory.mktemp("exports")

    def export(recipe: str) -> Path:
        out = folder / recipe
        return out if out.exists() else run(LLAMA, out, recipe)

    return export


def section_of(folder: Path) -> dict[str, Any]:
    section: dict[str, Any] = json.loads((folder / "config.json").read_text())[
        "quantization_config"
    ]
    return section


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in OF_THE_RUN
    }


@pytest.mark.parametrize("recipe", sorted(RULES))
def test_names_dtypes_shapes_and_config(recipe: str, exported: Callable[[str], Path]) -> None:
    folder = exported(recipe)
    kind, wanted = RULES[recipe]
    tensors = load_file(folder / "model.safetensors")
    found = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{Q}.")}
    assert {k: (t.dtype, list(t.shape)) for k, t in found.items()} == wanted
    assert not (folder / "hf_quant_config.json").exists()

    section = section_of(folder)
    [group] = section["config_groups"].values()
    fmt = {f.name: f for f in FORMATS.values()}[
        json.loads((folder / REPORT_FILE).read_text())["quantized"][Q]
    ]
    assert group == {
        "targets": ["Linear"],
        **arguments(fmt),
        "output_activations": None,
        "format": kind,
    }
    assert section["format"] == kind
    assert section["quant_method"] == "compressed-tensors"
    assert section["quantization_status"] == "compressed"
    assert section["kv_cache_scheme"] is None
    assert section["ignore"] == ["lm_head", "model.embed_tokens"]
    assert audit(folder, source=LLAMA, deep=True) == []


def test_mixed_precision_and_a_cache(tmp_path: Path) -> None:
    folder = run(LLAMA, tmp_path / "export", MIXED, kv_cache="fp8")
    section = section_of(folder)
    assert section["format"] == "mixed-precision"
    assert section["ignore"] == []
    groups = {group["format"]: group["targets"] for group in section["config_groups"].values()}
    assert sorted(groups) == ["float-quantized", "nvfp4-pack-quantized", "pack-quantized"]
    assert Q in groups["float-quantized"]
    assert all(name.endswith("down_proj") for name in groups["pack-quantized"])
    assert section["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }
    tensors = load_file(folder / "model.safetensors")
    scales = [name for name in tensors if name.endswith(("k_scale", "v_scale"))]
    assert len(scales) == 4
    assert all(tensors[n].shape == (1,) and tensors[n].dtype == BF16 for n in scales)
    assert all(name.rpartition(".")[0].endswith("self_attn") for name in scales)
    assert audit(folder, source=LLAMA, deep=True) == []


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "llama_tied"])
def test_models_of_all_kinds(kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint(kind)
    ids = [ids % 64 for ids in IDS]
    folder = run(source, tmp_path / "export", "nvfp4", calib_data=ids)
    assert audit(folder, source=source, deep=True) == []
    found = perplexity(folder, text=ids[0])
    assert found.quantized
    modelopt = run(source, tmp_path / "other", "nvfp4", calib_data=ids, dialect="modelopt")
    # One over a reciprocal is not always the number itself.
    assert found.nll == pytest.approx(perplexity(modelopt, text=ids[0]).nll, rel=1e-3)


@pytest.mark.parametrize("recipe", ["fp8", "int8", "w4a16_nvfp4", "int4_weight_only"])
def test_inputs_are_rounded_as_the_config_says(
    recipe: str, exported: Callable[[str], Path]
) -> None:
    folder = exported(recipe)
    served = perplexity(folder, text=IDS[0])
    weights_only = perplexity(folder, text=IDS[0], activations=False)
    assert (served.nll == weights_only.nll) == (recipe in {"w4a16_nvfp4", "int4_weight_only"})
    assert served.nll == pytest.approx(perplexity(LLAMA, text=IDS[0]).nll, rel=0.05)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_both_of_one_run_are_those_of_two(recipe: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_cache": "fp8", "max_shard_size": "100KB"}
    both = run(LLAMA, tmp_path / "both", recipe, dialect="both", **options)
    assert {path.name for path in both.iterdir()} == {
        "modelopt",
        "compressed-tensors",
        *OF_THE_RUN,
    }
    for dialect in ("modelopt", "compressed-tensors"):
        alone = run(LLAMA, tmp_path / dialect, recipe, dialect=dialect, **options)
        assert hashes(both / dialect) == hashes(alone)
    resident = run(LLAMA, tmp_path / "resident", recipe, dialect="both", offload="none", **options)
    assert hashes(resident) == hashes(both)
    again = quantize_and_export(
        LLAMA,
        export_dir=both,
        recipe=recipe,
        calib_data=IDS,
        progress=False,
        dialect=("modelopt", "compressed-tensors"),
        **options,
    )
    assert again.reused


def test_both_read_every_tensor_once(tmp_path: Path) -> None:
    alone = quantize_and_export(
        LLAMA, export_dir=tmp_path / "a", recipe="mxfp8", progress=False, dialect="modelopt"
    )
    both = quantize_and_export(
        LLAMA, export_dir=tmp_path / "b", recipe="mxfp8", progress=False, dialect="both"
    )
    assert both.bytes_read == alone.bytes_read
    assert both.export_bytes > 1.9 * alone.export_bytes


def test_both_go_on_behind_what_is_finished(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("qwen3_moe")
    options: dict[str, Any] = {"dialect": "both", "calib_data": [ids % 64 for ids in IDS]}
    whole = run(source, tmp_path / "whole", "nvfp4", **options)

    def interrupt(phase: str, done: int, total: int) -> None:
        if ".layers.1" in phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="run the same again"):
        run(source, tmp_path / "b", "nvfp4", progress=interrupt, **options)
    assert hashes(run(source, tmp_path / "b", "nvfp4", **options)) == hashes(whole)


def test_in_memory(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.bfloat16)
    quantize(model, "nvfp4", lambda m: [m(ids) for ids in IDS])
    out = tmp_path / "memory"
    export_hf(model, out, source=LLAMA, dialect="both")
    run(LLAMA, tmp_path / "disk", "nvfp4", dialect="both")
    # The cards tell who calibrated.
    memory, disk = (
        {name: h for name, h in hashes(folder).items() if not name.endswith(CARD_FILE)}
        for folder in (out, tmp_path / "disk")
    )
    assert memory == disk


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt_oss", {"recipe": "fp8"}, "experts are one tensor"),
        ("llama", {"recipe": "w4a8_nvfp4_fp8"}, "blocks of 16"),
        ("llama", {"recipe": "nvfp4_mlp_weight_only"}, "blocks of 16"),
        ("llama", {"recipe": "nvfp4_four_over_six"}, "another global scale"),
        ("llama", {"recipe": "nvfp4_svdquant"}, "no tensors for low-rank factors"),
        ("llama", {"recipe": "fp8", "kv_cache": "nvfp4"}, "another format"),
        ("llama", {"recipe": "fp8", "kv_cache": "fp8_affine"}, "another format"),
        ("llama", {"recipe": "fp8", "kv_cache": "fp8_cast"}, "wants a scale for each layer"),
    ],
)
def test_refused_when_planned(
    kind: str, options: dict[str, Any], message: str, checkpoint: MakeCheckpoint
) -> None:
    source = checkpoint(kind, hidden_size=64) if kind == "gpt_oss" else LLAMA
    with pytest.raises(RecipeError, match=f"'compressed-tensors' cannot keep .*{message}"):
        dry_run(source, dialect="both", calib_data=IDS, **options)


def test_formats_that_no_engine_loads_are_named() -> None:
    plan = dry_run(LLAMA, recipe="mxfp4", dialect="both")
    assert plan["dialects"] == ["modelopt", "compressed-tensors"]
    [note] = [note for note in plan["notes"] if "no engine" in note]
    assert "'mxfp4' in the dialect 'modelopt'" in note
    assert any(name.startswith("compressed-tensors/") for name in plan["files_to_write"])


@pytest.mark.parametrize(
    ("recipe", "beside"),
    [
        ("nvfp4", ""),
        ("nvfp4_awq_lite", " with a pre_quant_scale beside a matrix"),
        ("nvfp4_svdquant", " with low-rank factors beside a matrix"),
    ],
)
def test_a_plan_tells_where_no_engine_loads_the_export(recipe: str, beside: str) -> None:
    notes = dry_run(LLAMA, recipe=recipe, calib_data=IDS)["notes"]
    found = [note for note in notes if "no engine is known to load" in note]
    wanted = f"no engine is known to load the format 'nvfp4'{beside} in the dialect 'modelopt' "
    assert [note.startswith(wanted) for note in found] == [True] * bool(beside)


DAMAGES: list[tuple[str, Callable[[Path], None], set[str]]] = [
    ("nvfp4", drop(f"{Q}.weight_global_scale"), {"scale-missing"}),
    ("nvfp4", drop(f"{Q}.input_global_scale"), {"scale-missing"}),
    ("nvfp4", drop(f"{Q}.weight_packed"), {"scale-orphan", "source-missing"}),
    ("nvfp4", set_tensor(f"{Q}.weight_global_scale", lambda t: 2 * t), {"group-scale"}),
    ("nvfp4", set_tensor(f"{Q}.input_global_scale", lambda t: t.bfloat16()), {"scale-dtype"}),
    ("nvfp4", put(f"{Q}.weight_shape", torch.tensor([1, 2])), {"scale-unexpected"}),
    ("int4_weight_only", drop(f"{Q}.weight_shape"), {"scale-missing"}),
    ("int4_weight_only", set_tensor(f"{Q}.weight_scale", torch.zeros_like), {"scale-value"}),
    ("fp8", set_tensor(f"{Q}.weight_scale", lambda t: t.expand(2).clone()), {"scale-shape"}),
]


@pytest.mark.parametrize(("recipe", "damage", "rules"), DAMAGES)
def test_damage_is_found(
    recipe: str,
    damage: Callable[[Path], None],
    rules: set[str],
    exported: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(exported(recipe), tmp_path / "export"))
    damage(folder)
    assert rules <= errors(folder, source=LLAMA)


def config_damage(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        edit_json(folder / "config.json", lambda c: change(c["quantization_config"]))

    return damage


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda c: c.update(quantization_status="frozen"), "config-status"),
        (lambda c: c["ignore"].append(Q), "excluded-but-packed"),
        (lambda c: c["ignore"].remove("lm_head"), "unpacked-not-excluded"),
        (lambda c: c["config_groups"].clear(), "config-groups"),
        (lambda c: c.update(kv_cache_scheme={"num_bits": 8, "type": "float"}), "kv-config"),
        (lambda c: c.update(kv_cache_scheme={"num_bits": 4, "type": "float"}), "kv-config"),
        (
            lambda c: c["config_groups"].update(
                group_1={**c["config_groups"]["group_0"], "format": "dense", "targets": []}
            ),
            "config-format",
        ),
    ],
)
def test_damaged_configs_are_found(
    change: Callable[[dict[str, Any]], Any],
    rule: str,
    exported: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(exported("fp8"), tmp_path / "export"))
    config_damage(change)(folder)
    assert rule in errors(folder, source=LLAMA)


def test_a_format_that_is_not_known_here_is_told(
    exported: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported("fp8"), tmp_path / "export"))
    config_damage(lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=5))(folder)
    assert "format-unchecked" in {finding.rule for finding in audit(folder, source=LLAMA)}


def test_an_export_is_a_source_again(exported: Callable[[str], Path], tmp_path: Path) -> None:
    first = exported("fp8_per_channel_per_token")
    second = run(first, tmp_path / "second", "fp8_per_channel_per_token")
    one, two = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert one.keys() == two.keys()
    with open_source(first) as source:
        assert not any("scale" in name for name in source.tensors)
        relative = source.read(f"{Q}.weight").float()
    with open_source(second) as source:
        assert torch.allclose(source.read(f"{Q}.weight").float(), relative, rtol=0.07)


def test_experts_of_one_tensor_may_be_left(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A stack has no module of its own: readers know it by the block that it lies in."""
    recipe = Recipe(
        name="attention", weights="int4_weight_only", exclude=("*.mlp.experts",), group_size=(32,)
    )
    out = tmp_path / "out"
    report = quantize_and_export(
        checkpoint("gpt_oss"), export_dir=out, recipe=recipe, dialect="compressed-tensors"
    )
    assert report.quantized
    assert not errors(out)
    edit_json(out / "config.json", lambda c: c["quantization_config"]["ignore"].clear())
    assert "unpacked-not-excluded" in errors(out)


def test_the_table_of_clients_names_every_preset_in_every_dialect() -> None:
    from modelopt_lite.dialects.known import DIALECTS
    from modelopt_lite.recipes import load_recipe, preset_names

    text = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
    settled = [name for name in preset_names() if load_recipe(name).auto_quantize is None]
    assert settled
    for preset in settled:
        for dialect in DIALECTS:
            assert f"| {preset} | {dialect} |" in text, "run nox -s clients"
