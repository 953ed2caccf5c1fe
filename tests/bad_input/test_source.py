"""A source that is incomplete, damaged, or not what its config says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_lite.errors import (
    CheckpointError,
    SpecError,
    UnsupportedSourceError,
)

MakeCheckpoint = Callable[..., Path]
Refuse = Callable[..., str]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q1 = "model.layers.1.self_attn.q_proj.weight"


def test_no_such_checkpoint(tmp_path: Path, refuse: Refuse) -> None:
    refuse(CheckpointError, tmp_path / "nowhere", "nowhere", "does not exist", "give a folder")


def test_no_config(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "empty").mkdir()
    refuse(CheckpointError, tmp_path / "empty", "config.json", "no such file")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_config_is_no_json_object(
    checkpoint: MakeCheckpoint, refuse: Refuse, content: bytes
) -> None:
    source = checkpoint("llama")
    (source / "config.json").write_bytes(content)
    refuse(CheckpointError, source, "config.json")


@pytest.mark.parametrize("value", [None, "", 7])
def test_no_model_type(damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse, value: Any) -> None:
    source = checkpoint("llama")
    damage.config(source, model_type=value)
    refuse(CheckpointError, source, "config.json", "no model_type", "add")


def test_another_model_type(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    refuse(CheckpointError, checkpoint("llama"), "'qwen3'", "'llama'", model_type="qwen3")


def test_unknown_architecture(damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    damage.config(source, model_type="llamma", architectures=None)
    refuse(SpecError, source, "'llamma'", "install a release")


def test_config_of_other_weights(damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    damage.config(source, intermediate_size=128)
    refuse(CheckpointError, source, "mlp.", "do not belong together")


def test_config_that_transformers_rejects(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    source = checkpoint("llama")
    damage.config(source, hidden_size="many")
    refuse(CheckpointError, source, "config.json", "transformers")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "bf16"])
def test_a_dtype_that_no_model_runs_in(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse, dtype: str
) -> None:
    source = checkpoint("llama")
    damage.config(source, dtype=dtype, torch_dtype=None)
    refuse(CheckpointError, source, "config.json states dtype", dtype, "bfloat16")


def test_no_weights(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    (source / WEIGHTS).unlink()
    refuse(CheckpointError, source, "source_llama")


def test_missing_shard(damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    damage.shards(source)
    (source / "model-00002-of-00002.safetensors").unlink()
    refuse(CheckpointError, source, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", Q1),
        ("llama", "model.norm.weight"),
        ("llama", "lm_head.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.5.up_proj.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_missing_key(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse, kind: str, name: str
) -> None:
    source = checkpoint(kind)
    damage.weights(source, lambda t: t.pop(name))
    message = refuse(CheckpointError, source, "the checkpoint is incomplete")
    assert name.partition(".experts")[0] in message


def test_index_names_a_tensor_that_its_shard_lacks(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    source = checkpoint("llama")
    weight_map = damage.shards(source)
    weight_map["model.layers.9.ghost.weight"] = "model-00001-of-00002.safetensors"
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refuse(
        CheckpointError,
        source,
        "model.layers.9.ghost.weight",
        "model-00001-of-00002.safetensors",
        "repair the index",
    )


def test_index_that_leads_out_of_the_folder(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    source = checkpoint("llama")
    weight_map = {**damage.shards(source), Q1: "../secret.safetensors"}
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refuse(CheckpointError, source, "../secret.safetensors", "same folder")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_weights(checkpoint: MakeCheckpoint, refuse: Refuse, keep: float) -> None:
    source = checkpoint("llama")
    data = (source / WEIGHTS).read_bytes()
    end = keep if isinstance(keep, int) else int(len(data) * keep)
    (source / WEIGHTS).write_bytes(data[:end])
    refuse(CheckpointError, source, WEIGHTS, "again")


def test_an_lfs_pointer(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    (source / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refuse(CheckpointError, source, "git lfs pull")


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
            "sparse-24",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_OTHER"}, "W4A8_OTHER"),
        ({"bits": 4}, "None"),
    ],
)
def test_source_is_quantized_in_another_way(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse, section: dict[str, Any], names: str
) -> None:
    source = checkpoint("llama")
    damage.config(source, quantization_config=section)
    refuse(UnsupportedSourceError, source, names, "original checkpoint")


def test_quantized_tensors_that_no_config_announces(
    damage: Any, checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    source = checkpoint("llama")
    packed = {Q1.replace("weight", "qweight"): torch.zeros(4, 32, dtype=torch.int32)}
    damage.weights(source, lambda t: t.update(packed))
    refuse(UnsupportedSourceError, source, "q_proj.qweight", "original checkpoint")
