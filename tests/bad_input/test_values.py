"""NaN and infinity in weights: found when their unit is read, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelopt_lite.errors import NonFiniteError

MakeCheckpoint = Callable[..., Path]
Refuse = Callable[..., str]
Q1 = "model.layers.1.self_attn.q_proj.weight"
STATIC = ("fp8", "nvfp4")
DATA_FREE = ("w4a16_nvfp4", "fp8_per_channel_per_token")


@pytest.mark.parametrize("offload", ["auto", "none"])
@pytest.mark.parametrize("recipe", [*STATIC, *DATA_FREE])
def test_nan_and_infinity_in_a_weight(
    damage: Any,
    checkpoint: MakeCheckpoint,
    refuse: Refuse,
    forwards: Any,
    recipe: str,
    offload: str,
) -> None:
    source = checkpoint("llama")
    damage.poison(source, Q1, {3: float("nan"), 40: float("inf"), 41: float("-inf")})
    options: dict[str, Any] = {"recipe": recipe, "offload": offload, "while_running": True}
    if recipe in DATA_FREE:
        options["calib_data"] = None
    refuse(NonFiniteError, source, Q1, "3 values", "repair", **options)
    if offload == "none":
        assert not forwards.count  # every weight was read before the first batch


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "w4a16_nvfp4", "nvfp4_experts_only"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.6.down_proj.weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj"),
    ],
)
def test_nan_in_an_expert(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse, kind: str, name: str, recipe: str
) -> None:
    source = checkpoint(kind)
    damage.poison(source, name, {-1: float("nan")})
    refuse(NonFiniteError, source, name, "1 value", recipe=recipe, while_running=True)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
)
def test_nan_in_a_weight_that_stays_is_named_too(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse, name: str
) -> None:
    source = checkpoint("llama")
    damage.poison(source, name, {5 * 32 if "embed" in name else 5: float("nan")})
    refuse(NonFiniteError, source, name, while_running=True)


def test_nan_in_a_weight_that_no_forward_reads(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    source = checkpoint("llama")
    damage.poison(source, "lm_head.weight", {5: float("nan")})
    for verify in (True, False):  # found as it is copied, not by the audit
        refuse(
            NonFiniteError, source, "lm_head.weight", "1 value", recipe="w4a16_nvfp4", verify=verify
        )


def test_nan_in_a_tensor_that_no_module_of_the_model_owns(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    source = checkpoint("llama")
    name = "model.layers.2.extra.weight"  # as a layer for multi-token prediction has them

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.full((2, 2**22), 1.0, dtype=torch.bfloat16)  # in more than one piece
        tensors[name][0, 3] = float("nan")
        tensors[name][1, -1] = float("-inf")

    damage.weights(source, add)
    refuse(NonFiniteError, source, name, "2 values", verify=False, while_running=True)
