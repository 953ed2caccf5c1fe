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
from modelopt_lite.formats.cache import CACHE_FORMATS
from modelopt_lite.formats.declared import MIXED
from modelopt_lite.formats.linear import FORMATS, LinearFormat
from modelopt_lite.plan import Plan

QUANT_CONFIG_FILE = "hf_quant_config.json"
# TensorRT-LLM knows the nested file by the producer's name; the version is the dialect's.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
# Algorithms whose group size the peer leaves out.
_PEER_SILENT = {"fp8_pb_wo", "mxfp4"}
# The only single formats that the peer describes in numbers, too; others are known by name alone.
_PEER_GROUPS = {"FP8", "NVFP4", "W4A16_NVFP4", "NVFP4_SVD"}


def quant_config(plan: Plan) -> dict[str, Any]:
    """Return the contents of ``hf_quant_config.json``."""
    kv_cache = {"kv_cache_quant_algo": _kv_algo(plan)}
    formats = plan.formats
    if len(formats) == 1:
        layer = _layer(formats[0], plan)
        section = {"quant_algo": layer.pop("quant_algo"), **kv_cache, **layer}
        section["exclude_modules"] = list(plan.unquantized)
    else:  # what is not listed is not quantized
        section = {"quant_algo": MIXED if formats else None, **kv_cache}
        section["quantized_layers"] = _layers(plan)
    return {"producer": dict(_PRODUCER), "quantization": section}


def quantization_config(plan: Plan) -> dict[str, Any]:
    """Return the section ``quantization_config`` of ``config.json``."""
    formats = plan.formats
    section: dict[str, Any] = {}
    if groups := _config_groups(plan):
        section["config_groups"] = groups
    if len(formats) == 1:
        section |= {"ignore": list(plan.unquantized), **_layer(formats[0], plan)}
    elif formats:
        section |= {"quantized_layers": _layers(plan), "ignore": [], "quant_algo": MIXED}
    else:
        section["ignore"] = []
    if (algo := _kv_algo(plan)) is not None:
        eight = {"dynamic": False, "num_bits": 8, "type": "float"}
        section["kv_cache_scheme"] = eight if algo == "FP8" else algo
    section["producer"] = dict(_PRODUCER)
    section["quant_method"] = "modelopt"
    return section


def _kv_algo(plan: Plan) -> str | None:
    """Name of the cache's format. The peer calls affine FP8 plain, which loses its biases."""
    if plan.recipe.kv_cache is None:
        return None
    algo = CACHE_FORMATS[plan.recipe.kv_cache].algo
    return "FP8" if algo == "FP8_AFFINE" and plan.numerics == "modelopt" else algo


def _layer(fmt: LinearFormat, plan: Plan) -> dict[str, Any]:
    """What describes one format: its name and, with blocks, their size."""
    layer: dict[str, Any] = {"quant_algo": algo_name(fmt, plan)}
    silent = plan.numerics == "modelopt" and fmt.quant_algo in _PEER_SILENT
    if fmt.group_size is not None and not silent:
        layer["group_size"] = fmt.group_size
    if any(part in layer["quant_algo"] for part in ("AWQ", "SVD")):
        # Readers look for what the peer states even where it does not hold.
        smooth = plan.recipe.algorithm.smooths and (
            plan.keeps_scales or plan.numerics == "modelopt"
        )
        layer |= {"has_zero_point": False, "pre_quant_scale": smooth}
    if "SVD" in layer["quant_algo"] and plan.numerics == "exact":
        layer["lora_rank"] = plan.recipe.algorithm.options["lowrank"]
    return layer


def algo_name(fmt: LinearFormat, plan: Plan) -> str:
    """Return what configs call a format; another name says that inputs have scales of their own."""
    if fmt.name != "nvfp4" or not plan.recipe.algorithm.smooths:
        return fmt.quant_algo
    if plan.recipe.algorithm.method == "svdquant":
        return "NVFP4_SVD"
    return "NVFP4_AWQ" if plan.keeps_scales or plan.numerics == "modelopt" else fmt.quant_algo


def _layers(plan: Plan) -> dict[str, dict[str, Any]]:
    return {m.name: _layer(FORMATS[m.format], plan) for m in plan.matrices}


def _config_groups(plan: Plan) -> dict[str, Any]:
    """The groups that describe each format in numbers."""
    formats = plan.formats
    if len(formats) == 1:
        described = algo_name(formats[0], plan) in _PEER_GROUPS or plan.numerics == "exact"
        return {"group_0": _group(formats[0], ["Linear"])} if described else {}
    return {
        f"group_{index}": _group(fmt, sorted(m.name for m in plan.matrices if m.format == fmt.name))
        for index, fmt in enumerate(formats)
    }


def _group(fmt: LinearFormat, targets: list[str]) -> dict[str, Any]:
    codec, inputs = fmt.codec, fmt.inputs
    weights = _numbers(codec.num_bits, codec.kind, codec.block, dynamic=False)
    group: dict[str, Any] = {"weights": weights, "targets": targets}
    if inputs.bits is None:
        return group
    dynamic = not fmt.static_input
    numbers = _numbers(inputs.bits, inputs.kind, inputs.group_size, dynamic=dynamic)
    return {"input_activations": numbers, **group}


def _numbers(bits: int, kind: str, group_size: int | None, *, dynamic: bool) -> dict[str, Any]:
    numbers: dict[str, Any] = {"dynamic": dynamic, "num_bits": bits, "type": kind}
    if group_size is not None:
        numbers["group_size"] = group_size
    return numbers


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
    for name, content in (
        ("config.json", edit_config(config, plan, class_name)),
        (QUANT_CONFIG_FILE, quant_config(plan)),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
