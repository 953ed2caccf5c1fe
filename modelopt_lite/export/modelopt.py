"""The config files of the "modelopt" dialect, as vLLM, SGLang and TensorRT-LLM read them.

Two homes hold the same truth: ``hf_quant_config.json`` (nested) and ``quantization_config`` in
``config.json`` (flat). Everything in them follows from what is written, not from the recipe.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from modelopt_lite.checkpoint.reader import cut_layer_types
from modelopt_lite.formats.linear import LinearFormat
from modelopt_lite.plan import Plan

QUANT_CONFIG_FILE = "hf_quant_config.json"
# TensorRT-LLM knows the nested file by the producer's name; the version is the dialect's.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def quant_config(plan: Plan) -> dict[str, Any]:
    """Return the contents of ``hf_quant_config.json``."""
    fmt = plan.format
    section: dict[str, Any] = {
        "quant_algo": fmt.quant_algo,
        "kv_cache_quant_algo": _kv_algo(plan),
    }
    if fmt.group_size is not None:
        section["group_size"] = fmt.group_size
    section["exclude_modules"] = list(plan.unquantized)
    return {"producer": dict(_PRODUCER), "quantization": section}


def quantization_config(plan: Plan) -> dict[str, Any]:
    """Return the section ``quantization_config`` of ``config.json``."""
    fmt = plan.format
    section: dict[str, Any] = {}
    if groups := _config_groups(fmt):
        section["config_groups"] = groups
    section["ignore"] = list(plan.unquantized)
    section["quant_algo"] = fmt.quant_algo
    if fmt.group_size is not None:
        section["group_size"] = fmt.group_size
    if plan.kv_cache:
        section["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    section["producer"] = dict(_PRODUCER)
    section["quant_method"] = "modelopt"
    return section


def _kv_algo(plan: Plan) -> str | None:
    return "FP8" if plan.kv_cache else None


def _config_groups(fmt: LinearFormat) -> dict[str, Any] | None:
    """The group that describes one format, for the formats that have such a description."""
    bits = {"FP8": 8, "NVFP4": 4, "W4A16_NVFP4": 4}.get(fmt.quant_algo)
    if bits is None:
        return None
    numbers: dict[str, Any] = {"dynamic": False, "num_bits": bits, "type": "float"}
    if fmt.group_size is not None:
        numbers["group_size"] = fmt.group_size
    group: dict[str, Any] = {"weights": numbers, "targets": ["Linear"]}
    if fmt.static_input:
        group = {"input_activations": dict(numbers), **group}
    return {"group_0": group}


def edit_config(config: dict[str, Any], plan: Plan, class_name: str) -> dict[str, Any]:
    """Return the source's config with only what quantization changes.

    Quantization keys of the source are removed at every level (its own format is gone), ours is
    added at the root; ``architectures`` is filled where it is missing; a ``layer_types`` longer
    than ``num_hidden_layers`` is cut, as strict readers demand. Key order stays.
    """
    edited = cut_layer_types(copy.deepcopy(config))
    _strip(edited)
    if not edited.get("architectures"):
        edited["architectures"] = [class_name]
    edited["quantization_config"] = quantization_config(plan)
    return edited


def _strip(part: dict[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        part.pop(key, None)
    for value in part.values():
        if isinstance(value, dict):
            _strip(value)


def write_configs(folder: Path, config: dict[str, Any], plan: Plan, class_name: str) -> None:
    """Write ``config.json`` and ``hf_quant_config.json``."""
    for name, text in config_texts(config, plan, class_name).items():
        (folder / name).write_text(text, encoding="utf-8")


def config_texts(config: dict[str, Any], plan: Plan, class_name: str) -> dict[str, str]:
    """Return the names and texts of the files that `write_configs` writes."""
    contents = {
        "config.json": edit_config(config, plan, class_name),
        QUANT_CONFIG_FILE: quant_config(plan),
    }
    return {
        name: json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        for name, content in contents.items()
    }
