"""The audit finds each kind of damage by its own rule, and nothing in exports that are right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.errors import AuditError, CheckpointError
from modelopt_lite.verify.audit import audit, audit_or_raise, compare_with_source

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NVFP4, FP8, MOE, KV = "llama-nvfp4", "llama-fp8", "qwen3_moe-nvfp4", "llama-nvfp4+kv_fp8"
Q = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.0.mlp.experts.7.up_proj"

Tensors = dict[str, Tensor]


def source_of(case: str) -> Path:
    return GOLDEN / "inputs" / case.partition("-")[0]


def copied(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / case / "export", tmp_path / "export"))


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def exclude(folder: Path, change: Callable[[list[str]], Any]) -> None:
    edit_json(folder / "config.json", lambda c: change(c["quantization_config"]["ignore"]))
    edit_json(
        folder / "hf_quant_config.json", lambda c: change(c["quantization"]["exclude_modules"])
    )


def both_configs(folder: Path, key: str, value: Any) -> None:
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update({key: value}))
    edit_json(folder / "hf_quant_config.json", lambda c: c["quantization"].update({key: value}))


def shard(folder: Path) -> dict[str, Any]:
    """Split the single file in two, and return a right index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def errors(folder: Path, **options: Any) -> set[str]:
    return {f.rule for f in audit(folder, **options) if f.severity == "error"}


CLEAN = sorted(path.parent.name for path in GOLDEN.glob("*/export"))


@pytest.mark.parametrize("case", CLEAN)
def test_the_peers_exports_are_clean(case: str) -> None:
    findings = audit(GOLDEN / case / "export", source=source_of(case), deep=True)
    assert [f for f in findings if f.severity == "error"] == []
    # Dense FP8 siblings keep scales of their own there, and a router's bias is stored wider.
    allowed = {"source-dtype"} | ({"group-scale"} if "-fp8" in case else set())
    assert {f.rule for f in findings} <= allowed


def test_a_sharded_export_is_clean(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    write_index(folder, shard(folder))
    assert audit(folder, source=source_of(NVFP4), deep=True) == []


def _set(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        edit(folder, lambda t: t.update({name: value(t[name])}))

    return damage


def _drop(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        edit(folder, lambda t: [t.pop(name) for name in names])

    return damage


def _put(name: str, value: Tensor) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda t: t.update({name: value}))


def _byte(at: int, byte: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        raw = tensor.clone().view(torch.uint8)
        raw.view(-1)[at] = byte
        return raw.view(tensor.dtype)

    return change


def _nan(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("nan")
    return tensor


ONE = torch.ones(())
TENSOR_DAMAGES: list[tuple[str, Callable[[Path], None], set[str]]] = [
    # 3: values
    (NVFP4, _set("model.norm.weight", _nan), {"value-finite"}),
    (FP8, _set(f"{Q}.weight", _byte(5, 0xFF)), {"weight-nan"}),
    (NVFP4, _set(f"{Q}.weight_scale", _byte(9, 0x7F)), {"scale-value"}),
    (NVFP4, _set(f"{Q}.weight_scale", _byte(0, 0)), {"scale-value"}),
    (NVFP4, _set(f"{Q}.weight_scale", _byte(1, 0xB8)), {"scale-value"}),
    (MOE, _set(f"{EXPERT.replace('up', 'down')}.input_scale", torch.zeros_like), {"scale-value"}),
    (FP8, _set(f"{Q}.input_scale", lambda t: -t), {"scale-value"}),
    (KV, _set("model.layers.1.self_attn.k_proj.k_scale", torch.zeros_like), {"scale-value"}),
    # 4: what belongs to a weight
    (MOE, _drop(f"{EXPERT}.input_scale"), {"scale-missing"}),
    (NVFP4, _drop(f"{Q}.weight_scale_2"), {"scale-missing"}),
    (FP8, _drop(f"{Q}.weight_scale"), {"scale-missing"}),
    ("gpt_oss-fp8", _drop("model.layers.0.mlp.experts.down_proj_input_scale"), {"scale-missing"}),
    (NVFP4, _drop(f"{Q}.weight"), {"scale-orphan"}),
    (NVFP4, _put("lm_head.input_scale", ONE), {"scale-on-unpacked"}),
    (FP8, _put(f"{Q}.weight_scale_2", ONE), {"scale-unexpected"}),
    ("llama-w4a16_nvfp4", _put(f"{Q}.input_scale", ONE), {"scale-unexpected"}),
    (NVFP4, _put(f"{Q}.pre_quant_scale", torch.ones(128)), {"scale-unexpected"}),
    (NVFP4, _set(f"{Q}.weight_scale", lambda t: t[:, :4].contiguous()), {"scale-shape"}),
    ("llama-fp8_pc_pt", _set(f"{Q}.weight_scale", lambda t: t[:1]), {"scale-shape"}),
    (NVFP4, _set(f"{Q}.weight_scale", lambda t: t.float()), {"scale-dtype"}),
    (FP8, _set(f"{Q}.weight_scale", lambda t: t.bfloat16()), {"scale-dtype"}),
    (
        NVFP4,
        _set("lm_head.weight", lambda t: t.view(torch.uint8)),
        {"excluded-but-packed", "scale-missing"},
    ),
    (FP8, _set(f"{Q}.weight", lambda t: t.view(torch.uint8)), {"weight-dtype", "group-format"}),
    ("llama-w4a16_nvfp4", _set(f"{Q}.weight", lambda t: t[:, :4].contiguous()), {"weight-shape"}),
    # 5 and 6: packed or not, together or not
    (NVFP4, _set(f"{Q}.weight_scale_2", lambda t: t * 2), {"group-scale"}),
    (NVFP4, _set("model.layers.1.mlp.up_proj.input_scale", lambda t: t / 2), {"group-scale"}),
    (MOE, _set(f"{EXPERT}.weight_scale_2", lambda t: t * 1.5), {"group-scale"}),
    (
        MOE,
        _drop(*(f"{EXPERT}.{s}" for s in ("weight", "weight_scale", "weight_scale_2"))),
        {"expert-missing", "scale-orphan"},
    ),
    (KV, _drop("model.layers.0.self_attn.v_proj.v_scale"), {"kv-pair"}),
    (
        KV,
        _drop(*(f"model.layers.0.self_attn.{x}_proj.{x}_scale" for x in "kv")),
        {"kv-missing"},
    ),
    (
        KV,
        _drop(*(f"model.layers.{i}.self_attn.{x}_proj.{x}_scale" for i in (0, 1) for x in "kv")),
        {"kv-config"},
    ),
    (
        NVFP4,
        _put("model.layers.0.self_attn.k_proj.k_scale", ONE),
        {"kv-pair", "kv-missing", "kv-config"},
    ),
    (
        KV,
        _set("model.layers.0.self_attn.v_proj.v_scale", lambda t: t.repeat(2)),
        {"kv-scale-shape"},
    ),
]


@pytest.mark.parametrize(("case", "damage", "rules"), TENSOR_DAMAGES)
def test_damaged_tensors(
    case: str, damage: Callable[[Path], None], rules: set[str], tmp_path: Path
) -> None:
    folder = copied(case, tmp_path)
    damage(folder)
    assert errors(folder) == rules


def test_one_unpacked_sibling_is_a_group_of_two_formats(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)

    def unpack(tensors: Tensors) -> None:
        for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{Q}.{suffix}"]
        tensors[f"{Q}.weight"] = torch.ones(128, 128, dtype=torch.bfloat16)

    edit(folder, unpack)
    assert errors(folder) == {"group-format"}


def test_one_unpacked_expert_is_named(tmp_path: Path) -> None:
    folder = copied(MOE, tmp_path)

    def unpack(tensors: Tensors) -> None:
        for role in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.0.mlp.experts.3.{role}"
            for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
                del tensors[f"{name}.{suffix}"]
            tensors[f"{name}.weight"] = torch.ones(128, 128, dtype=torch.bfloat16)

    edit(folder, unpack)
    findings = audit(folder)
    assert {f.rule for f in findings} == {"expert-format"}
    assert "experts.3.gate_proj" in findings[0].message


def test_fp8_siblings_with_other_scales_are_a_warning() -> None:
    findings = audit(GOLDEN / FP8 / "export")
    assert {(f.rule, f.severity) for f in findings} == {("group-scale", "warning")}


def test_e8m0_scales_may_be_zero_but_not_nan(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    codes = torch.zeros(128, 8, dtype=torch.uint8)
    edit(folder, lambda t: t.update({f"{Q}.weight_scale": codes}))
    assert "scale-value" not in errors(folder)
    edit(folder, lambda t: t.update({f"{Q}.weight_scale": codes + 255}))
    assert "scale-value" in errors(folder)


CONFIG_DAMAGES: list[tuple[str, Callable[[Path], None], set[str]]] = [
    (NVFP4, lambda f: (f / "hf_quant_config.json").unlink(), {"config-missing"}),
    (NVFP4, lambda f: (f / "hf_quant_config.json").write_text("{"), {"config-readable"}),
    (
        NVFP4,
        lambda f: edit_json(f / "config.json", lambda c: c.pop("quantization_config")),
        {"config-missing"},
    ),
    (
        NVFP4,
        lambda f: edit_json(
            f / "config.json", lambda c: c["quantization_config"].update(quant_method="fp8")
        ),
        {"config-method"},
    ),
    (
        NVFP4,
        lambda f: edit_json(
            f / "hf_quant_config.json", lambda c: c["quantization"].pop("kv_cache_quant_algo")
        ),
        {"config-keys"},
    ),
    (
        NVFP4,
        lambda f: edit_json(
            f / "config.json", lambda c: c["quantization_config"]["ignore"].append(Q)
        ),
        {"config-homes"},
    ),
    (
        KV,
        lambda f: edit_json(
            f / "config.json", lambda c: c["quantization_config"].pop("kv_cache_scheme")
        ),
        {"config-homes"},
    ),
    (NVFP4, lambda f: both_configs(f, "group_size", 32), {"config-group-size"}),
    (
        NVFP4,
        lambda f: edit_json(
            f / "config.json",
            lambda c: c["quantization_config"]["config_groups"]["group_0"].pop("input_activations"),
        ),
        {"config-groups"},
    ),
    (FP8, lambda f: both_configs(f, "quant_algo", "FP9"), {"quant-algo"}),
    (FP8, lambda f: both_configs(f, "quant_algo", None), {"quant-algo"}),
    (NVFP4, lambda f: exclude(f, lambda e: e.append("lm_head.\x00x")), {"exclude-entry"}),
    (NVFP4, lambda f: exclude(f, lambda e: e.append("lm_head.")), {"exclude-entry"}),
    (NVFP4, lambda f: exclude(f, lambda e: e.remove("lm_head")), {"unpacked-not-excluded"}),
    (
        MOE,
        lambda f: exclude(f, lambda e: e.remove("model.layers.1.mlp.gate")),
        {"unpacked-not-excluded"},
    ),
    # by substring (vLLM), by a single part (SGLang), by the whole name, by a part of a join
    (NVFP4, lambda f: exclude(f, lambda e: e.append("mlp.gate")), {"excluded-but-packed"}),
    (NVFP4, lambda f: exclude(f, lambda e: e.append("o_proj")), {"excluded-but-packed"}),
    (
        NVFP4,
        lambda f: exclude(f, lambda e: e.append("model.layers.0.mlp.down_proj")),
        {"excluded-but-packed"},
    ),
    (
        NVFP4,
        lambda f: exclude(f, lambda e: e.append(Q)),
        {"excluded-in-part", "excluded-but-packed"},
    ),
    (
        MOE,
        lambda f: exclude(f, lambda e: e.append("model.layers.0.mlp.experts.2.up_proj")),
        {"excluded-but-packed"},
    ),
    (NVFP4, lambda f: (f / "config.json").write_text("[]"), {"checkpoint-readable"}),
]


@pytest.mark.parametrize(("case", "damage", "rules"), CONFIG_DAMAGES)
def test_damaged_configs(
    case: str, damage: Callable[[Path], object], rules: set[str], tmp_path: Path
) -> None:
    folder = copied(case, tmp_path)
    damage(folder)
    assert errors(folder) == rules


def test_an_entry_without_a_module_is_a_warning(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    exclude(folder, lambda e: e.append("model.vision.*"))
    assert [(f.rule, f.severity) for f in audit(folder)] == [("exclude-unmatched", "warning")]


def _ghost(folder: Path, index: dict[str, Any]) -> None:
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"


def _unlisted(folder: Path, index: dict[str, Any]) -> None:
    del index["weight_map"]["model.norm.weight"]


def _moved(folder: Path, index: dict[str, Any]) -> None:
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"


def _size(folder: Path, index: dict[str, Any]) -> None:
    index["metadata"]["total_size"] += 1


def _orphan(folder: Path, index: dict[str, Any]) -> None:
    save_file({"x": torch.ones(1)}, folder / "model-00003-of-00002.safetensors")


def _missing(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def _truncated(folder: Path, index: dict[str, Any]) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def _no_map(folder: Path, index: dict[str, Any]) -> None:
    del index["weight_map"]


def _path(folder: Path, index: dict[str, Any]) -> None:
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"


@pytest.mark.parametrize(
    ("damage", "rules"),
    [
        (_ghost, {"index-ghost"}),
        (_unlisted, {"index-unlisted"}),
        (_moved, {"index-ghost", "index-unlisted"}),
        (_size, {"index-total-size"}),
        (_orphan, {"index-orphan-file"}),
        (_missing, {"index-missing-file"}),
        (_truncated, {"file-damaged"}),
        (_no_map, {"index-damaged"}),
        (_path, {"index-damaged"}),
    ],
)
def test_damaged_files(
    damage: Callable[[Path, dict[str, Any]], None], rules: set[str], tmp_path: Path
) -> None:
    folder = copied(NVFP4, tmp_path)
    index = shard(folder)
    damage(folder, index)
    write_index(folder, index)
    assert errors(folder) == rules


def test_a_stray_file_beside_a_single_one(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    save_file({"x": torch.ones(1)}, folder / "old.safetensors")
    assert errors(folder) == {"index-orphan-file"}


def test_no_folder_and_no_weights(tmp_path: Path) -> None:
    assert errors(tmp_path / "nowhere") == {"checkpoint-readable"}
    assert errors(tmp_path) == {"checkpoint-readable"}


SOURCE_DAMAGES: list[tuple[Callable[[Path], None], set[str]]] = [
    (_drop("model.norm.weight"), {"source-missing"}),
    (_put("model.layers.0.foo.bias", ONE), {"source-extra"}),
    (_set("model.norm.weight", _byte(3, 1)), {"source-bytes"}),
    (_set("model.norm.weight", lambda t: t[:64]), {"source-shape"}),
    (_set("model.norm.weight", lambda t: t.half()), {"source-dtype"}),
    (_set(f"{Q}.weight", lambda t: t[:64].contiguous()), {"scale-shape", "source-shape"}),
]


@pytest.mark.parametrize(("damage", "rules"), SOURCE_DAMAGES)
def test_departures_from_the_source(
    damage: Callable[[Path], None], rules: set[str], tmp_path: Path
) -> None:
    folder = copied(NVFP4, tmp_path)
    damage(folder)
    assert errors(folder, source=source_of(NVFP4)) == rules


def test_a_wider_dtype_with_the_same_values_is_a_warning(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    edit(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}))
    findings = audit(folder, source=source_of(NVFP4))
    assert [(f.rule, f.severity) for f in findings] == [("source-dtype", "warning")]
    edit(folder, lambda t: t["model.norm.weight"].add_(1e-6))
    assert errors(folder, source=source_of(NVFP4)) == {"source-dtype"}


def test_sidecars_are_the_sources(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    source = tmp_path / "source"
    shutil.copytree(source_of(NVFP4), source)
    (source / "chat_template.jinja").write_text("{{ x }}")
    assert errors(folder, source=source) == {"sidecar-missing"}
    (folder / "chat_template.jinja").write_text("{{ y }}")
    assert errors(folder, source=source) == {"sidecar-bytes"}


def test_a_tied_head_is_not_missed_and_an_untied_one_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(source_of("llama_tied-fp8"), source)
    edit(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    folder = copied("llama_tied-fp8", tmp_path)
    assert errors(folder, source=source) == set()
    edit_json(folder / "config.json", lambda c: c.update(tie_word_embeddings=False))
    assert errors(folder, source=source) == {"source-missing"}


@pytest.mark.parametrize(
    "damage",
    [
        _set(f"{Q}.weight", lambda t: t.flip(0).contiguous()),
        _set(f"{Q}.weight_scale", lambda t: t.flip(1).contiguous()),
        _set("model.layers.0.mlp.down_proj.weight_scale_2", lambda t: t * 1.5),
    ],
)
def test_deep_finds_wrong_values(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    damage(folder)
    assert errors(folder, source=source_of(NVFP4)) == set()
    assert errors(folder, source=source_of(NVFP4), deep=True) == {"weight-error"}


@pytest.mark.parametrize("case", [NVFP4, MOE, "gpt_oss-fp8", "llama-fp8_pc_pt"])
def test_every_packed_module_is_compared(case: str) -> None:
    reports = compare_with_source(GOLDEN / case / "export", source_of(case))
    tensors = Checkpoint(GOLDEN / case / "export").tensors
    assert len(reports) == sum(name.endswith("weight_scale") for name in tensors)
    assert all(report.worst <= 1 for report in reports.values())
    assert all(0 < report.relative < 0.2 for report in reports.values())


@pytest.mark.parametrize("input_major", [False, True])
def test_stacked_sources_map_to_single_experts(input_major: bool, tmp_path: Path) -> None:
    """The same experts in one tensor each projection, as some checkpoints have them."""
    source = tmp_path / "source"
    shutil.copytree(source_of(MOE), source)

    def stack(tensors: Tensors) -> None:
        for layer in (0, 1):
            block = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{block}.{e}.{role}.weight") for e in range(8)])
                for role in ("gate_proj", "up_proj", "down_proj")
            )
            tensors[f"{block}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{block}.down_proj"] = down.contiguous()

    edit(source, stack)
    folder = copied(MOE, tmp_path)
    if input_major:  # a wrong orientation must not pass
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.0.mlp.experts.{name}"
            edit(source, lambda t, key=key: t.update({key: t[key].transpose(1, 2).contiguous()}))
        assert "weight-error" in errors(folder, source=source, deep=True)
        return
    assert audit(folder, source=source, deep=True) == []
    edit(folder, lambda t: [t.pop(n) for n in list(t) if n.startswith(EXPERT)])
    assert errors(folder, source=source) == {"expert-missing", "source-missing"}


def _plan(folder: Path, source: Path) -> SimpleNamespace:
    outputs = [
        SimpleNamespace(name=name, dtype=info.dtype, shape=info.shape)
        for name, info in Checkpoint(folder).tensors.items()
    ]
    copies = [SimpleNamespace(source=name) for name in Checkpoint(source).tensors]
    return SimpleNamespace(outputs=outputs, copies=copies, matrices=[])


def test_a_run_is_held_against_its_plan(tmp_path: Path) -> None:
    folder, source = copied(NVFP4, tmp_path), source_of(NVFP4)
    plan = _plan(folder, source)
    audit_or_raise(folder, source=source, plan=plan)
    lost = plan.copies.pop()
    with pytest.raises(AuditError, match=rf"plan-accounting.*{lost.source}"):
        audit_or_raise(folder, source=source, plan=plan)
    plan.copies.append(lost)
    plan.outputs[0].shape = (1, 2, 3)
    plan.outputs[1].name = "another"
    with pytest.raises(AuditError) as raised:
        audit_or_raise(folder, source=source, plan=plan)
    assert str(raised.value).count("plan-outputs") == 3


def test_errors_are_listed_up_to_ten(tmp_path: Path) -> None:
    folder, source = copied(NVFP4, tmp_path), source_of(NVFP4)
    plan = _plan(folder, source)
    edit(folder, lambda t: [v.zero_() for n, v in t.items() if n.endswith("input_scale")])
    with pytest.raises(AuditError, match=r"(?s)in 14 places.*and 4 more") as raised:
        audit_or_raise(folder, source=source, plan=plan)
    assert str(raised.value).count("[scale-value]") == 10


def test_an_unreadable_source_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        audit(GOLDEN / NVFP4 / "export", source=tmp_path / "nowhere")
