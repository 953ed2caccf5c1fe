"""The audit of index, files and configs: each damage is found by its own rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import (
    FP8,
    KV,
    MOE,
    NVFP4,
    Q,
    both_configs,
    copied,
    edit_json,
    errors,
    exclude,
    sharded,
    source_of,
    write_index,
)
from safetensors.torch import save_file

from modelopt_lite.verify.audit import audit

CONFIG_DAMAGES: list[tuple[str, Callable[[Path], object], set[str]]] = [
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
    index = sharded(folder)
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


def test_a_sharded_export_is_clean(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    write_index(folder, sharded(folder))
    assert audit(folder, source=source_of(NVFP4), deep=True) == []
