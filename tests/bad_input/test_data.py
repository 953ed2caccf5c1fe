"""Calibration data that is missing, empty, or not for this model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelopt_lite import quantize_and_export
from modelopt_lite.errors import (
    CalibrationError,
)
from modelopt_lite.verify.audit import audit

MakeCheckpoint = Callable[..., Path]
Refuse = Callable[..., str]
WEIGHTS = "model.safetensors"
STATIC = ("fp8", "nvfp4")
DATA_FREE = ("w4a16_nvfp4", "fp8_per_channel_per_token")


@pytest.mark.parametrize("recipe", STATIC)
@pytest.mark.parametrize(
    "data",
    [[], iter(()), [torch.zeros(0, 4, dtype=torch.int64)], [torch.zeros(2, 0, dtype=torch.int64)]],
    ids=["none", "iterator", "no rows", "no columns"],
)
def test_no_calibration_data(
    checkpoint: MakeCheckpoint, refuse: Refuse, recipe: str, data: Any
) -> None:
    refuse(CalibrationError, checkpoint("llama"), "no tokens", recipe=recipe, calib_data=data)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.json", "empty.safetensors"])
def test_empty_calibration_file(
    checkpoint: MakeCheckpoint, refuse: Refuse, with_tokenizer: Callable[[Path], Path], name: str
) -> None:
    source = with_tokenizer(checkpoint("llama", vocab_size=512))
    path = source.parent / name
    path.write_text("[]" if name.endswith(".json") else "")
    if name.endswith(".safetensors"):
        save_file({}, path)
    refuse(CalibrationError, source, name, "no tokens", calib_data=path)


def test_no_data_is_fine_where_none_is_needed(
    checkpoint: MakeCheckpoint, forwards: Any, tmp_path: Path
) -> None:
    for recipe in DATA_FREE:
        out = tmp_path / recipe
        quantize_and_export(checkpoint("llama"), export_dir=out, recipe=recipe, progress=False)
        assert audit(out) == []
    assert not forwards.count


@pytest.mark.parametrize("bad", [64, 10**9, -1])
def test_token_ids_outside_of_the_vocabulary(
    checkpoint: MakeCheckpoint, refuse: Refuse, token_batches: list[Tensor], bad: int
) -> None:
    batch = torch.full((2, 3), 5)
    batch[1, 2] = bad
    refuse(
        CalibrationError,
        checkpoint("llama"),
        f"batch {len(token_batches)}",
        f"token id {bad}",
        "0..63",
        "tokenize",
        calib_data=[*token_batches, batch],
    )


def test_tokenizer_of_another_model(
    checkpoint: MakeCheckpoint, refuse: Refuse, with_tokenizer: Callable[[Path], Path]
) -> None:
    source = with_tokenizer(checkpoint("llama"))
    refuse(CalibrationError, source, "0..63", calib_data=["zzzz" * 9])


@pytest.mark.parametrize(
    "data",
    [
        [torch.zeros(4, dtype=torch.int64)],
        [torch.zeros(1, 2, 3, dtype=torch.int64)],
        [torch.zeros(2, 3)],
        [[1, 2, 3]],
        ["text", torch.zeros(2, 3, dtype=torch.int64)],
        [{"input_ids": torch.zeros(2, 3, dtype=torch.int64)}],
        [None],
        torch.zeros(4, dtype=torch.int64),
        {"input_ids": 3},
        5,
    ],
    ids=repr,
)
def test_batch_of_a_wrong_type(checkpoint: MakeCheckpoint, refuse: Refuse, data: Any) -> None:
    source = checkpoint("llama")
    refuse(CalibrationError, source, "token ids", calib_data=data)


def test_an_empty_batch_among_others_changes_nothing(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe")
    empty = torch.zeros(0, 4, dtype=torch.int64)
    for name, data in (("a", token_batches), ("b", [empty, *token_batches, empty.T])):
        quantize_and_export(source, export_dir=tmp_path / name, calib_data=data, progress=False)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.txt", None),
        ("data.csv", b"a,b"),
        ("data.jsonl", b'{"text": '),
        ("data.jsonl", b'{"prompt": "x"}'),
        ("data.json", b"\xff\xfe"),
        ("data.json", b'{"a": 1}'),
        ("data.txt", b"\xff\xfe\xff"),
        ("data.safetensors", b"not this"),
        ("folder.txt", b""),
    ],
)
def test_bad_calibration_file(
    checkpoint: MakeCheckpoint,
    refuse: Refuse,
    with_tokenizer: Callable[[Path], Path],
    name: str,
    content: bytes | None,
) -> None:
    source = with_tokenizer(checkpoint("llama", vocab_size=512))
    path = source.parent / name
    if name.startswith("folder"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    refuse(CalibrationError, source, name, calib_data=path)


def test_no_tokenizer(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    refuse(CalibrationError, checkpoint("llama"), "no tokenizer", "token ids", calib_data=["hi"])
    refuse(CalibrationError, checkpoint("llama"), "no tokenizer", "token ids", calib_data=None)


def test_no_tokenizer_where_transformers_makes_an_empty_one(
    checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    refuse(CalibrationError, checkpoint("gemma3_text"), "no tokenizer", calib_data=["hi"])
