"""Each rule of the audit is broken in good exports, one at a time: it is found, and nothing else.

The exports are made by this package, once a session, from the sources of the golden cases.
"""

# ruff: noqa: E501  a damage a line

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from damage import (
    GOLDEN,
    both_configs,
    drop,
    edit,
    edit_json,
    exclude,
    put,
    set_tensor,
    sharded,
    with_byte,
    with_nan,
    write_index,
)
from safetensors.torch import save_file

from modelopt_lite import quantize_and_export
from modelopt_lite.recipes import Override, Recipe
from modelopt_lite.verify.audit import audit
from modelopt_lite.verify.rules import RULES

Damage = Callable[[Path], Any]
LLAMA, MOE = GOLDEN / "inputs" / "llama", GOLDEN / "inputs" / "qwen3_moe"
MIXED = Recipe(
    name="mixed",
    weights="nvfp4",
    overrides=(
        Override(modules=("*.self_attn",), weights="fp8"),
        Override(modules=("*.down_proj",), weights="fp8_2d_blockwise_weight_only"),
    ),
)
# Name -> source, recipe, options.
EXPORTS: dict[str, tuple[Path, Any, dict[str, Any]]] = {
    "fp8": (LLAMA, "fp8", {"kv_cache": "fp8"}),
    "nvfp4": (MOE, "nvfp4", {}),
    "int4": (LLAMA, "int4_weight_only", {}),
    "mixed": (LLAMA, MIXED, {}),
    "ct_fp8": (MOE, "fp8", {"kv_cache": "fp8", "dialect": "compressed-tensors"}),
    "ct_nvfp4": (LLAMA, "nvfp4", {"dialect": "compressed-tensors"}),
    "ct_int4": (LLAMA, "int4_weight_only", {"dialect": "compressed-tensors"}),
}
# vLLM does not load INT4 of the modelopt dialect, and SGLang no mixture without NVFP4.
KNOWN = {"int4": {"engine-refuses"}}
Q, K, OUT = (f"model.layers.0.self_attn.{x}_proj" for x in "qko")
GATE, UP, DOWN = (f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down"))
EXPERT = "model.layers.0.mlp.experts.7"
ONE = torch.ones(())


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives a good export by its name, made when it is first asked for."""
    made: dict[str, Path] = {}
    base = tmp_path_factory.mktemp("exports")
    ids = [torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(0))]

    def get(name: str) -> Path:
        if name not in made:
            source, recipe, options = EXPORTS[name]
            given = {"calib_data": ids, "progress": False, "moe_calibrate_all_experts": False}
            quantize_and_export(
                source, export_dir=base / name, recipe=recipe, **{**given, **options}
            )
            made[name] = base / name
        return made[name]

    return get


def found(name: str, folder: Path, **options: Any) -> set[str]:
    return {f.rule for f in audit(folder, **options)} - KNOWN.get(name, set())


@pytest.mark.parametrize("name", EXPORTS)
def test_good_exports_are_clean(name: str, exports: Callable[[str], Path]) -> None:
    assert found(name, exports(name), source=EXPORTS[name][0], deep=True) == set()


class Case(NamedTuple):
    """A damage to an export, and the rules that it breaks."""

    export: str
    what: str
    damage: Damage
    rules: str
    deep: bool = False


def file(name: str, content: str | None) -> Damage:
    """Overwrite or delete a file."""

    def damage(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content)

    return damage


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def index(change: Callable[[Path, dict[str, Any]], Any]) -> Damage:
    """Split the weights over two files, and damage the index or a file."""

    def damage(folder: Path) -> None:
        content = sharded(folder)
        change(folder, content)
        write_index(folder, content)

    return damage


FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


def flat(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda f: edit_json(f / "config.json", lambda c: change(c["quantization_config"]))


def inner(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda f: edit_json(f / "hf_quant_config.json", lambda c: change(c["quantization"]))


def both(key: str, value: Any) -> Damage:
    return lambda f: both_configs(f, key, value)


def listed(change: Callable[[list[str]], Any]) -> Damage:
    return lambda f: exclude(f, change)


def layers(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        flat(lambda c: change(c["quantized_layers"]))(folder)
        inner(lambda c: change(c["quantized_layers"]))(folder)

    return damage


def every(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Change all tensors whose names end so."""
    return lambda f: edit(f, lambda t: t.update({n: change(t[n]) for n in t if n.endswith(suffix)}))


def rename(before: str, after: str) -> Damage:
    return lambda f: edit(f, lambda t: t.update({after: t.pop(before)}))


def drop_below(*prefixes: str) -> Damage:
    return lambda f: edit(f, lambda t: [t.pop(n) for n in list(t) if n.startswith(prefixes)])


def unpack(*modules: str) -> Damage:
    """Put 16-bit matrices in the place of codes and scales."""

    def damage(folder: Path) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for module in modules:
                for name in [n for n in tensors if n.startswith(f"{module}.")]:
                    del tensors[name]
                tensors[f"{module}.weight"] = torch.ones(128, 128, dtype=torch.bfloat16)

        edit(folder, change)

    return damage


def quantized_tower(folder: Path) -> None:
    codes = torch.ones(16, 16).to(torch.float8_e4m3fn)
    for name, value in (("weight", codes), ("weight_scale", ONE), ("input_scale", ONE)):
        put(f"model.vision_tower.proj.{name}", value)(folder)


def quantized_tied_head(folder: Path) -> None:
    codes = torch.ones(256, 128).to(torch.float8_e4m3fn)
    for name, value in (("weight", codes), ("weight_scale", ONE), ("input_scale", ONE)):
        put(f"lm_head.{name}", value)(folder)
    exclude(folder, lambda e: e.remove("lm_head"))
    edit_json(folder / "config.json", lambda c: c.update(tie_word_embeddings=True))


def two_formats_of_experts(folder: Path) -> None:
    """All are stated one by one, and one expert as weight-only."""
    names = {
        n.removesuffix(".weight_scale"): {"quant_algo": "NVFP4", "group_size": 16}
        for n in _names(folder)
        if n.endswith(".weight_scale")
    }
    for role in ("gate_proj", "up_proj", "down_proj"):
        names[f"{EXPERT}.{role}"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    both_configs(folder, "quant_algo", "MIXED_PRECISION")
    both_configs(folder, "quantized_layers", names)
    drop(*(f"{EXPERT}.{role}_proj.input_scale" for role in ("gate", "up", "down")))(folder)


def _names(folder: Path) -> list[str]:
    header = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    return list(json.loads(header[8 : 8 + length]))


CASES = (
    # Files and index
    Case("fp8", "no config", file("config.json", None), "checkpoint-readable"),
    Case("fp8", "no JSON", file("config.json", "{"), "checkpoint-readable"),
    Case("fp8", "no weights", file("model.safetensors", None), "checkpoint-readable"),
    Case("nvfp4", "cut", cut, "file-damaged"),
    Case("ct_int4", "git-lfs", file("model.safetensors", "version https://git-lfs"), "file-damaged"),
    Case("fp8", "stray file", lambda f: save_file({"x": ONE}, f / "a.safetensors"), "index-orphan-file"),
    Case("fp8", "index no JSON", file("model.safetensors.index.json", "["), "index-damaged"),
    Case("fp8", "no map", index(lambda f, i: i.pop("weight_map")), "index-damaged"),
    Case("fp8", "map of paths", index(lambda f, i: i["weight_map"].update(x=f"../{FIRST}")), "index-damaged"),
    Case("fp8", "absolute path", index(lambda f, i: i["weight_map"].update(x="/etc/passwd")), "index-damaged"),
    Case("fp8", "file lost", index(lambda f, i: (f / SECOND).unlink()), "index-missing-file"),
    Case("fp8", "ghost", index(lambda f, i: i["weight_map"].update(x=FIRST)), "index-ghost"),
    Case("fp8", "unlisted", index(lambda f, i: i["weight_map"].pop("model.norm.weight")), "index-unlisted"),
    Case("fp8", "size", index(lambda f, i: i["metadata"].update(total_size=1)), "index-total-size"),
    Case("fp8", "third file", index(lambda f, i: save_file({"x": ONE}, f / "b.safetensors")), "index-orphan-file"),
    # Values
    Case("nvfp4", "NaN in a norm", set_tensor("model.norm.weight", with_nan), "value-finite"),
    Case("int4", "infinite embedding", set_tensor("model.embed_tokens.weight", lambda t: t / 0), "value-finite"),
    Case("fp8", "NaN code", set_tensor(f"{Q}.weight", with_byte(5, 0x7F)), "weight-nan"),
    Case("nvfp4", "NaN block scale", set_tensor(f"{Q}.weight_scale", with_byte(9, 0xFF)), "scale-value"),
    Case("nvfp4", "zero block scale", set_tensor(f"{Q}.weight_scale", with_byte(0, 0)), "scale-value"),
    Case("fp8", "zero cache scale", set_tensor(f"{K}.k_scale", torch.zeros_like), "scale-value"),
    Case("fp8", "negative scale", set_tensor(f"{OUT}.weight_scale", lambda t: -t), "scale-value"),
    Case("ct_int4", "infinite scale", set_tensor(f"{OUT}.weight_scale", lambda t: t / 0), "scale-value"),
    Case("nvfp4", "reciprocals", every("weight_scale_2", lambda t: 1 / t), "scale-convention"),
    Case("ct_nvfp4", "no reciprocals", every("weight_global_scale", lambda t: 1 / t), "scale-convention"),
    # Tensors of a quantized module
    Case("nvfp4", "cold expert", drop(f"{EXPERT}.up_proj.input_scale"), "scale-missing"),
    Case("nvfp4", "no block scales", drop(f"{Q}.weight_scale"), "scale-missing"),
    Case("ct_nvfp4", "no global scale", drop(f"{Q}.weight_global_scale"), "scale-missing"),
    Case("ct_int4", "no shape", drop(f"{Q}.weight_shape"), "scale-missing"),
    Case("fp8", "second scale", put(f"{Q}.weight_scale_2", ONE), "scale-unexpected"),
    Case("int4", "scale of inputs", put(f"{Q}.input_scale", ONE), "scale-unexpected"),
    Case("nvfp4", "scale of channels", put(f"{Q}.pre_quant_scale", torch.ones(128)), "scale-unexpected"),
    Case("nvfp4", "wide block scales", set_tensor(f"{Q}.weight_scale", lambda t: t.float()), "scale-dtype"),
    Case("fp8", "short scale", set_tensor(f"{Q}.input_scale", lambda t: t.bfloat16()), "scale-dtype"),
    Case("nvfp4", "half of the scales", set_tensor(f"{Q}.weight_scale", lambda t: t[:, :4].contiguous()), "scale-shape"),
    Case("fp8", "scale of rows", set_tensor(f"{OUT}.weight_scale", lambda t: t.repeat(128)), "scale-shape"),
    Case("ct_int4", "scales turned", set_tensor(f"{Q}.weight_scale", lambda t: t.mT.contiguous()), "scale-shape"),
    Case("nvfp4", "no codes", drop(f"{OUT}.weight"), "scale-orphan"),
    Case("fp8", "scale of the head", put("lm_head.weight_scale", ONE), "scale-on-unpacked"),
    Case("fp8", "bytes for FP8", set_tensor(f"{OUT}.weight", lambda t: t.view(torch.uint8)), "weight-dtype"),
    Case("int4", "FP8 for bytes", set_tensor(f"{OUT}.weight", lambda t: (t & 0x77).view(torch.float8_e4m3fn)), "weight-dtype"),
    Case("nvfp4", "odd width", set_tensor(f"{OUT}.weight", lambda t: t[:, :28].contiguous()), "weight-shape"),
    Case("ct_int4", "another shape", set_tensor(f"{Q}.weight_shape", lambda t: t * 2), "packed-shape"),
    Case("fp8", "an amax", put(f"{Q}.input_quantizer._amax", ONE), "leftover-tensor"),
    Case("ct_fp8", "an amax", put("model.layers.0.q_proj_amax", ONE), "leftover-tensor"),
    # What engines join
    Case("nvfp4", "k alone", unpack(Q), "group-format"),
    Case("nvfp4", "second scale of k", set_tensor(f"{K}.weight_scale_2", lambda t: t * 2), "group-scale"),
    Case("nvfp4", "inputs of an expert", set_tensor(f"{EXPERT}.up_proj.input_scale", lambda t: t * 2), "group-scale"),
    Case("fp8", "scale of q", set_tensor(f"{Q}.weight_scale", lambda t: t * 2), "group-scale"),
    Case("ct_nvfp4", "inputs of up", set_tensor(f"{UP}.input_global_scale", lambda t: t * 2), "group-scale"),
    Case("ct_fp8", "inputs of an expert", set_tensor(f"{EXPERT}.up_proj.input_scale", lambda t: t * 2), "group-scale"),
    Case("int4", "no v", drop_below("model.layers.1.self_attn.v_proj."), "group-incomplete"),
    Case("nvfp4", "no k", drop_below("model.layers.1.self_attn.k_proj."), "group-incomplete"),
    Case("fp8", "a bias", put(f"{Q}.bias", torch.ones(128)), "group-bias"),
    Case("nvfp4", "no up of an expert", drop_below(f"{EXPERT}.up_proj."), "expert-missing"),
    Case("nvfp4", "no last expert", drop_below(f"{EXPERT}."), "expert-missing"),
    Case("ct_fp8", "no up at all", lambda f: edit(f, lambda t: [t.pop(n) for n in list(t) if "layers.0.mlp.experts" in n and ".up_proj." in n]), "expert-missing"),
    Case("nvfp4", "an expert in 16 bits", unpack(*(f"{EXPERT}.{r}_proj" for r in ("gate", "up", "down"))), "expert-format"),
    Case("nvfp4", "an expert weight-only", two_formats_of_experts, "expert-format"),
    Case("fp8", "a tied head", quantized_tied_head, "tied-head"),
    Case("fp8", "a tower", quantized_tower, "tower-packed"),
    # The cache
    Case("fp8", "two elements", set_tensor(f"{K}.k_scale", lambda t: t.repeat(2)), "kv-scale-shape"),
    Case("fp8", "no k_scale", drop(f"{K}.k_scale"), "kv-pair"),
    Case("ct_fp8", "no v_scale", drop("model.layers.1.self_attn.v_scale"), "kv-pair"),
    Case("fp8", "a layer without", drop(f"{K}.k_scale", "model.layers.0.self_attn.v_proj.v_scale"), "kv-missing"),
    Case("fp8", "at another projection", rename(f"{K}.k_scale", f"{OUT}.k_scale"), "kv-name"),
    Case("fp8", "the old name", put("model.layers.0.self_attn.kv_scale", ONE), "kv-name"),
    Case("fp8", "no scales", lambda f: edit(f, lambda t: [t.pop(n) for n in list(t) if n.endswith(("k_scale", "v_scale"))]), "kv-config"),
    Case("ct_fp8", "no scheme", flat(lambda c: c.update(kv_cache_scheme=None)), "kv-config"),
    Case("nvfp4", "scales without a format", lambda f: [put(f"model.layers.{i}.self_attn.{x}_proj.{x}_scale", ONE)(f) for i in (0, 1) for x in "kv"], "kv-config"),
    # Configs
    Case("fp8", "nested no JSON", file("hf_quant_config.json", "{"), "config-readable"),
    Case("fp8", "list is a word", inner(lambda c: c.update(exclude_modules="lm_head")), "config-readable config-homes unpacked-not-excluded"),
    Case("fp8", "no nested file", file("hf_quant_config.json", None), "config-missing"),
    Case("nvfp4", "no section", lambda f: edit_json(f / "config.json", lambda c: c.pop("quantization_config")), "config-missing"),
    Case("fp8", "another method", flat(lambda c: c.update(quant_method="fp8")), "config-method"),
    Case("fp8", "no producer", lambda f: edit_json(f / "hf_quant_config.json", lambda c: c.pop("producer")), "config-producer"),
    Case("nvfp4", "no cache key", inner(lambda c: c.pop("kv_cache_quant_algo")), "config-keys"),
    Case("nvfp4", "no list", flat(lambda c: c.pop("ignore")), "config-keys config-homes"),
    Case("nvfp4", "algos differ", inner(lambda c: c.update(quant_algo="NVFP4_AWQ")), "config-homes engine-refuses"),
    Case("fp8", "caches differ", flat(lambda c: c.pop("kv_cache_scheme")), "config-homes"),
    Case("fp8", "lists differ", flat(lambda c: c["ignore"].append("model.nothing")), "config-homes"),
    Case("mixed", "layers differ", flat(lambda c: c["quantized_layers"].pop(DOWN)), "config-homes"),
    Case("nvfp4", "another block", both("group_size", 32), "config-group-size"),
    Case("nvfp4", "two sizes", inner(lambda c: c.update(x={"group_size": 32})), "config-group-size"),
    Case("nvfp4", "no inputs", flat(lambda c: c["config_groups"]["group_0"].pop("input_activations")), "config-groups"),
    Case("ct_nvfp4", "no groups", flat(lambda c: c.pop("config_groups")), "config-groups"),
    Case("ct_fp8", "no targets", flat(lambda c: c["config_groups"]["group_0"].update(targets=[])), "config-groups"),
    Case("ct_int4", "not compressed", flat(lambda c: c.update(quantization_status="frozen")), "config-status"),
    Case("ct_fp8", "one format for two", flat(lambda c: c["config_groups"].update(group_1={"targets": ["re:x"], "format": "pack-quantized", "weights": {"num_bits": 4, "type": "int"}})), "config-format"),
    Case("fp8", "cache by name", flat(lambda c: c.update(kv_cache_scheme="FP8")), "kv-config-flat"),
    Case("fp8", "unknown algo", both("quant_algo", "FP9"), "quant-algo"),
    Case("nvfp4", "no algo", both("quant_algo", None), "quant-algo"),
    Case("fp8", "small letters", both("quant_algo", "fp8"), "algo-spelling"),
    Case("fp8", "an algo of others", both("quant_algo", "INT8"), "engine-refuses format-unchecked"),
    Case("ct_int4", "five bits", flat(lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=5)), "num-bits format-unchecked"),
    Case("ct_int4", "no bits", flat(lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=0)), "num-bits format-unchecked"),
    Case("ct_int4", "bits beyond words", flat(lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=1e9)), "num-bits format-unchecked"),
    Case("ct_fp8", "floats of seven bits", flat(lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=7)), "num-bits format-unchecked"),
    # Which modules
    Case("fp8", "trailing dot", listed(lambda e: e.append("lm_head.")), "exclude-entry"),
    Case("fp8", "NUL", listed(lambda e: e.append("lm_head.\0x")), "exclude-entry"),
    Case("ct_fp8", "no expression", flat(lambda c: c["ignore"].append("re:(")), "exclude-entry"),
    Case("fp8", "nothing", listed(lambda e: e.append("model.tower.*")), "exclude-unmatched"),
    Case("fp8", "part of a name", listed(lambda e: e.append("layers.1.mlp.gate")), "exclude-unmatched excluded-but-packed"),
    Case("fp8", "a single part", listed(lambda e: e.append("o_proj")), "exclude-unmatched excluded-but-packed"),
    Case("nvfp4", "an expert", listed(lambda e: e.append(f"{EXPERT}.up_proj")), "excluded-but-packed"),
    Case("ct_nvfp4", "ignored", flat(lambda c: c["ignore"].append(OUT)), "excluded-but-packed"),
    Case("fp8", "not the head", listed(lambda e: e.remove("lm_head")), "unpacked-not-excluded"),
    Case("nvfp4", "not a router", listed(lambda e: e.remove("model.layers.1.mlp.gate")), "unpacked-not-excluded"),
    Case("ct_fp8", "not the head", flat(lambda c: c["ignore"].remove("lm_head")), "unpacked-not-excluded"),
    Case("fp8", "q of qkv", listed(lambda e: e.append(Q)), "excluded-in-part excluded-but-packed"),
    Case("mixed", "not listed", layers(lambda c: c.pop(DOWN)), "mixed-layers"),
    Case("mixed", "listed", layers(lambda c: c.update({"lm_head": {"quant_algo": "FP8"}})), "mixed-layers"),
    Case("mixed", "empty", layers(dict.clear), "mixed-empty"),
    Case("mixed", "two block sizes", layers(lambda c: c[DOWN].update(group_size=64)), "mixed-block-size"),
    Case("mixed", "a wrong format", layers(lambda c: c[OUT].update(quant_algo="W8A16")), "weight-dtype engine-refuses"),
    # Against the source
    Case("fp8", "no norm", drop("model.norm.weight"), "source-missing", True),
    Case("nvfp4", "another tensor", put("model.layers.0.mlp.x", ONE), "source-extra", True),
    Case("int4", "half a norm", set_tensor("model.norm.weight", lambda t: t[:64]), "source-shape", True),
    Case("fp8", "a norm in half", set_tensor("model.norm.weight", lambda t: t.half()), "source-dtype", True),
    Case("ct_nvfp4", "a bit of a norm", set_tensor("model.norm.weight", with_byte(3, 1)), "source-bytes", True),
    Case("nvfp4", "rows turned", set_tensor(f"{OUT}.weight", lambda t: t.flip(0)), "weight-error", True),
    Case("fp8", "a doubled scale", set_tensor(f"{OUT}.weight_scale", lambda t: t * 2), "weight-error", True),
    Case("int4", "swapped nibbles", set_tensor(f"{OUT}.weight", lambda t: (t << 4) | (t >> 4)), "weight-error", True),
    Case("ct_fp8", "a halved scale", set_tensor(f"{EXPERT}.down_proj.weight_scale", lambda t: t / 2), "weight-error", True),
    Case("ct_int4", "columns turned", set_tensor(f"{OUT}.weight_packed", lambda t: t.flip(1)), "weight-error", True),
    Case("mixed", "blocks swapped", set_tensor(f"{DOWN}.weight_scale", lambda t: t.flip(2)), "weight-error", True),
    Case("fp8", "no generation config", file("generation_config.json", None), "sidecar-missing", True),
    Case("fp8", "another generation config", file("generation_config.json", "{}"), "sidecar-bytes", True),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{c.export}: {c.what}" for c in CASES])
def test_damage_is_found_by_its_rule(
    case: Case, exports: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exports(case.export), tmp_path / "export"))
    case.damage(folder)
    options = {"source": EXPORTS[case.export][0], "deep": True} if case.deep else {}
    assert found(case.export, folder, **options) == set(case.rules.split())


def test_every_rule_is_broken() -> None:
    broken = {rule for case in CASES for rule in case.rules.split()}
    of_a_run = {"plan-outputs", "plan-accounting"}  # tests/verify/test_audit_source.py
    of_mixtures = {"mixed-method"}  # below
    assert broken | of_a_run | of_mixtures == set(RULES)
    assert len(CASES) >= 60


def test_a_mixture_that_sglang_takes_for_another(
    exports: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exports("fp8"), tmp_path / "export"))
    names = [n.removesuffix(".weight_scale") for n in _names(folder) if n.endswith("weight_scale")]
    both_configs(folder, "quant_algo", "MIXED_PRECISION")
    both_configs(folder, "quantized_layers", {name: {"quant_algo": "FP8"} for name in names})
    assert found("fp8", folder) == {"mixed-method"}
    assert found("fp8", folder, engines=("tensorrt_llm",)) == set()
    [finding] = audit(folder, engines=("sglang",))
    assert finding.severity == "error"
