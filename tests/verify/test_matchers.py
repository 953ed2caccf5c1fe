"""The three readings of one list, on the entries where they part."""

from __future__ import annotations

import pytest

from modelopt_lite.verify.matchers import sglang_excluded, tensorrt_excluded, vllm_excluded

QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}
ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("prefix", "entries", "vllm", "sglang", "tensorrt"),
    [
        ("lm_head", ["lm_head"], True, True, True),
        ("lm_head", [], False, False, False),
        ("model.layers.1.mlp.down_proj", ["model.layers.0.mlp.down_proj"], False, False, False),
        # vLLM: a substring excludes
        ("model.layers.10.mlp.down_proj", ["model.layers.1"], True, False, False),
        ("model.layers.0.mlp.gate_up_proj", ["mlp.gate"], True, False, False),
        ("language_model.model.embed", ["model.embed"], True, False, False),
        # SGLang: a single part excludes
        ("model.layers.0.mlp.gate", ["gate"], True, True, False),
        ("model.layers.0.mlp.gate.inner", ["gat*"], False, True, False),
        # the whole name, dots included
        ("model.layers.0.mlp.down_proj", ["model.layers.0*"], True, True, True),
        ("model.layers.0.mlp.down_proj", ["*mlp*"], True, True, True),
        ("model.layers.0.mlp.down_proj", ["*.mlp"], False, False, False),
        # latent attention in SGLang: the last part alone decides, whatever the layer
        ("m.layers.0.a.fused_qkv_a_proj_with_mqa", ["m.layers.9.a.kv_a_proj_with_mqa"], 0, 1, 0),
    ],
)
def test_one_layer(
    prefix: str, entries: list[str], vllm: bool, sglang: bool, tensorrt: bool
) -> None:
    assert vllm_excluded(prefix, entries) == vllm
    assert sglang_excluded(prefix, entries) == sglang
    assert tensorrt_excluded(prefix, entries) == tensorrt


def test_parts_of_a_joined_layer_stand_for_it() -> None:
    entries = [f"{ATTENTION}.{part}" for part in QKV["qkv_proj"]]
    assert vllm_excluded(f"{ATTENTION}.qkv_proj", entries, fused=QKV) is True
    assert sglang_excluded(f"{ATTENTION}.qkv_proj", entries, fused=QKV) is True
    assert vllm_excluded(f"{ATTENTION}.qkv_proj", [], fused=QKV) is False


@pytest.mark.parametrize("listed", [("q_proj",), ("q_proj", "v_proj")])
def test_some_parts_only_are_refused(listed: tuple[str, ...]) -> None:
    entries = [f"{ATTENTION}.{part}" for part in listed]
    assert vllm_excluded(f"{ATTENTION}.qkv_proj", entries, fused=QKV) is None
    assert sglang_excluded(f"{ATTENTION}.qkv_proj", entries, fused=QKV) is None


def test_routed_experts_are_one_layer() -> None:
    prefix = "model.layers.0.mlp.experts"
    assert vllm_excluded(prefix, [f"{prefix}.3.up_proj"]) is True
    assert sglang_excluded(prefix, [f"{prefix}.3.up_proj"]) is True
    assert vllm_excluded(prefix, ["model.layers.1.mlp.experts.3.up_proj"]) is False


def test_a_star_becomes_a_substring_where_modules_are_renamed() -> None:
    entries = ["model.layers.0.mlp.gate*"]
    assert vllm_excluded("x.model.layers.0.mlp.gate_up_proj", entries, fused=GATE_UP) is False
    assert vllm_excluded("x.model.layers.0.mlp.gate_up_proj", entries, fused=GATE_UP, mapped=True)
    assert vllm_excluded("model.layers.0", ["model.layers.0.*"], mapped=True) is False
