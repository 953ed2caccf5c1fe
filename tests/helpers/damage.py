"""Copies of golden exports, ways to damage them, and what the audit says of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_lite.verify.audit import audit

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NVFP4, FP8, MOE, KV = "llama-nvfp4", "llama-fp8", "qwen3_moe-nvfp4", "llama-nvfp4+kv_fp8"
Q = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.0.mlp.experts.7.up_proj"

Tensors = dict[str, Tensor]


def source_of(case: str) -> Path:
    """The checkpoint that a golden export was made of."""
    return GOLDEN / "inputs" / case.partition("-")[0]


def copied(case: str, tmp_path: Path) -> Path:
    """A copy of a golden export, to be damaged."""
    return Path(shutil.copytree(GOLDEN / case / "export", tmp_path / "export"))


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the tensors of a single weight file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def errors(folder: Path, **options: Any) -> set[str]:
    """The rules that the audit finds broken."""
    return {f.rule for f in audit(folder, **options) if f.severity == "error"}


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_tensor(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        edit(folder, lambda t: t.update({name: value(t[name])}))

    return damage


def drop(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        edit(folder, lambda t: [t.pop(name) for name in names])

    return damage


def put(name: str, value: Tensor) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda t: t.update({name: value}))


def with_byte(at: int, byte: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        raw = tensor.clone().view(torch.uint8)
        raw.view(-1)[at] = byte
        return raw.view(tensor.dtype)

    return change


def with_nan(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("nan")
    return tensor


def exclude(folder: Path, change: Callable[[list[str]], Any]) -> None:
    """Change the list of excluded modules in both configs."""
    edit_json(folder / "config.json", lambda c: change(c["quantization_config"]["ignore"]))
    edit_json(
        folder / "hf_quant_config.json", lambda c: change(c["quantization"]["exclude_modules"])
    )


def both_configs(folder: Path, key: str, value: Any) -> None:
    """Set a key in both configs."""
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update({key: value}))
    edit_json(folder / "hf_quant_config.json", lambda c: c["quantization"].update({key: value}))


def sharded(folder: Path) -> dict[str, Any]:
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
    """Write an index."""
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
