"""What is done to models of transformers so that a checkpoint's weights fit and tokens run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_lite.build import build_meta_model, cut_unread_rows
from modelopt_lite.checkpoint.reader import read_json
from modelopt_lite.doctor.instance import CannotBuildError, known_here, small_model
from modelopt_lite.doctor.shrink import Sizes


def small(model_type: str) -> Any:
    if not known_here(model_type):
        pytest.skip(f"this release has no {model_type}")
    try:
        return small_model(model_type, Sizes(fill=True)).model
    except (CannotBuildError, AttributeError) as error:  # release 4 leaves fields at None
        pytest.skip(f"this release builds no small model: {error}")


def meta(folder: Path) -> Any:
    return build_meta_model(folder, read_json(folder / "config.json"), trust_remote_code=False)


def test_gates_of_experts_without_weights_are_left(tmp_path: Path) -> None:
    model = small("longcat_flash")
    experts = model.get_submodule("model.layers.0.mlp.experts")
    if not hasattr(experts, "gate_up_proj"):
        pytest.skip("this release holds experts one by one")
    assert len(experts.gate_up_proj) > len(experts.down_proj)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        cut_unread_rows(model)
        after = model(input_ids=ids, use_cache=False).logits
    assert len(experts.gate_up_proj) == len(experts.down_proj)
    assert torch.equal(before, after)
    model.save_pretrained(tmp_path)
    built = meta(tmp_path).get_submodule("model.layers.0.mlp.experts")
    assert built.gate_up_proj.shape == experts.gate_up_proj.shape


def test_a_part_that_the_config_leaves_out_is_built_where_the_class_asks_for_it() -> None:
    model = small("diffusion_gemma")
    assert any("vision_tower" in name for name, _ in model.named_modules())


def test_a_model_without_a_forward_runs_as_its_text_part(tmp_path: Path) -> None:
    model = small("qwen3_omni_moe")
    model.save_pretrained(tmp_path)
    built = meta(tmp_path)
    assert built.get_input_embeddings() is built.thinker.get_input_embeddings()
    assert built.forward == built.thinker.forward
    assert type(model).forward is torch.nn.Module.forward
