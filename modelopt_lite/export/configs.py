"""Write the config files of an export, in the words of its dialect."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from modelopt_lite.checkpoint.reader import cut_layer_types
from modelopt_lite.export.translate import contents
from modelopt_lite.plan import Plan


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
    edited["quantization_config"] = plan.dialect.quantization_config(contents(plan))
    return edited


def _strip(part: dict[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        part.pop(key, None)
    for value in part.values():
        if isinstance(value, dict):
            _strip(value)


def write_configs(folder: Path, config: dict[str, Any], plan: Plan, class_name: str) -> None:
    """Write ``config.json`` and the dialect's other config files."""
    for name, text in config_texts(config, plan, class_name).items():
        (folder / name).write_text(text, encoding="utf-8")


def config_texts(config: dict[str, Any], plan: Plan, class_name: str) -> dict[str, str]:
    """Return the names and texts of the files that `write_configs` writes."""
    files = {
        "config.json": edit_config(config, plan, class_name),
        **plan.dialect.extra_configs(contents(plan)),
    }
    return {
        name: json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        for name, content in files.items()
    }
