"""Small checkpoints of any registered type that the installed transformers builds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_lite.build import quiet_transformers
from modelopt_lite.doctor.instance import known_here, small_model
from modelopt_lite.doctor.shrink import Sizes

CODE = Path(__file__).parents[1] / "data" / "wren_moe"
WREN = {
    "model_type": "wren_moe",
    "architectures": ["WrenForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_wren.WrenConfig",
        "AutoModelForCausalLM": "modeling_wren.WrenForCausalLM",
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def make_small(folder: Path, model_type: str, *, turned: bool = False, **given: Any) -> Path:
    """Write a checkpoint in bfloat16 of a hidden size of 64, whose experts are half as wide.

    Args:
        folder: Where.
        model_type: Which; the test is skipped where transformers lacks it.
        turned: Whether stacks of experts lie the other way round than the model has them.
        given: Fields of the config.
    """
    if not known_here(model_type):
        pytest.skip(f"this release of transformers has no {model_type}")
    model = small_model(model_type, Sizes(), given).model.to(torch.bfloat16)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.ndim > 1:  # scales near one would hide one that is left out
                parameter.mul_(2.0 ** (index % 3 - 1))
    with quiet_transformers():
        model.save_pretrained(folder)
    if turned:
        path = folder / "model.safetensors"
        tensors = {n: t.mT.contiguous() if t.ndim == 3 else t for n, t in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def make_wren(source: Path) -> None:
    """Write a checkpoint of a type of its own, with its code, without transformers."""
    shutil.copytree(CODE, source)
    (source / "config.json").write_text(json.dumps(WREN))
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (512, 256), "lm_head": (512, 256), "model.norm": (256,)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.{norm}": (256,) for norm in ("first_norm", "second_norm")}
        shapes |= {f"{layer}.self_attn.{x}_proj": (256, 256) for x in "qkvo"}
        shapes[f"{layer}.flock.chooser"] = (4, 256)
        for expert in range(4):
            shapes[f"{layer}.flock.experts.{expert}.bend"] = (128, 256)
            shapes[f"{layer}.flock.experts.{expert}.lift"] = (128, 256)
            shapes[f"{layer}.flock.experts.{expert}.land"] = (256, 128)
    tensors = {
        f"{name}.weight": (torch.randn(shape, generator=generator) * 0.1).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
