"""From what a user gives to batches of token ids: never padded, never out of the vocabulary."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import modelopt_lite
from modelopt_lite.calibrate.data import (
    CalibrationData,
    batch_by_length,
    load_calibration_data,
    load_tokenizer,
    text_blocks,
)
from modelopt_lite.calibrate.text import calibration_text
from modelopt_lite.errors import CalibrationError

TINY = Path(modelopt_lite.__file__).parent / "data" / "tiny_qwen3_moe"
END = 256  # <|endoftext|>, the only other id than the 256 bytes and a pad


def load(data: Any, source: Path = TINY, **options: Any) -> CalibrationData:
    options = {"size": 8, "seq_len": 16, "batch_size": 4, "vocab_size": 258, **options}
    return load_calibration_data(data, source, **options)


def shapes(data: CalibrationData) -> list[tuple[int, ...]]:
    return [tuple(batch.shape) for batch in data.batches]


def rows(data: CalibrationData) -> list[list[int]]:
    return [row.tolist() for batch in data.batches for row in batch]


def with_template(folder: Path, single: list[str]) -> Path:
    """A copy of the tokenizer that puts special tokens around each text ("$A")."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TINY / name, folder / name)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())

    def piece(token: str, type_id: int) -> dict[str, Any]:
        if token.startswith("$"):
            return {"Sequence": {"id": token[1:], "type_id": type_id}}
        return {"SpecialToken": {"id": token, "type_id": type_id}}

    special = {"<|endoftext|>": END, "<|pad|>": END + 1}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece(token, 0) for token in single],
        "pair": [piece("$A", 0), piece("$B", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in special.items()
        },
    }
    path.write_text(json.dumps(tokenizer))
    return folder


# --- the default text


def test_default_is_the_calibration_share() -> None:
    data = load(None)
    assert data.origin == "pydoc_data.topics"
    assert shapes(data) == [(4, 16), (4, 16)]
    assert (data.samples, data.tokens) == (8, 128)
    ids = [number for row in rows(data) for number in row]
    assert load_tokenizer(TINY, False).decode(ids) == calibration_text()[:128]
    assert data.fingerprint() == load(None).fingerprint()


def test_fewer_samples_than_asked_for() -> None:
    assert load(["a" * 40], size=100).samples == 1


# --- files


def test_text_file_is_cut_to_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.txt"
    path.write_text("x" * 70)
    data = load(path)
    assert shapes(data) == [(4, 16)]  # the last 6 are no block
    assert data.origin == str(path)
    monkeypatch.chdir(tmp_path)
    for spelled in ("some.txt", f"../{tmp_path.name}/./some.txt"):  # a resumed run compares it
        assert load(spelled).origin == str(path)
    assert rows(load(str(path))) == rows(data)


def test_short_text_file_is_one_sequence(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("x" * 7)
    assert shapes(load(path)) == [(1, 7)]


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("\n\n".join(json.dumps(record) for record in records) + "\n")
    return path


RECORDS: list[Any] = ["ab", {"text": "cd", "more": 1}, {"text": "efg"}]


def test_records(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", RECORDS)
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps(RECORDS))
    for data in (load(path), load(whole), load(["ab", "cd", "efg"])):
        assert shapes(data) == [(2, 2), (1, 3)]
        assert rows(data) == rows(load(["ab", "cd", "efg"]))
    assert load(path, size=2).samples == 2


def test_only_the_records_asked_for_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\nno json')
    assert load(path, size=1).samples == 1
    with pytest.raises(CalibrationError, match="no valid JSON"):
        load(path, size=2)


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    source = with_template(tmp_path / "tokenizer", ["<|endoftext|>", "$A"])
    path = source / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    path.write_text(json.dumps(config))
    file = lines(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    (row,) = rows(load(file, source))
    assert row == rows(load(["<user>hi"]))[0]  # a template writes its own special tokens


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read through pyarrow, which the tests do without."""

    class Batch:
        @staticmethod
        def to_pylist() -> list[Any]:
            return [{"text": "ab"}, {"text": "cd"}]

    parquet: Any = types.ModuleType("pyarrow.parquet")
    parquet.ParquetFile = lambda path: types.SimpleNamespace(iter_batches=lambda: [Batch, Batch])
    pyarrow: Any = types.ModuleType("pyarrow")
    pyarrow.parquet = parquet
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    path = tmp_path / "a.parquet"
    path.touch()
    assert load(path).samples == 4
    assert load(path, size=3).samples == 3


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    path = tmp_path / "a.parquet"
    path.touch()
    monkeypatch.setattr(builtins, "__import__", no_pyarrow)
    with pytest.raises(CalibrationError, match=r"pip install 'modelopt-lite\[parquet\]'"):
        load(path)


def test_ids_from_a_file_in_natural_order(tmp_path: Path) -> None:
    path = tmp_path / "ids.safetensors"
    save_file(
        {
            "batch.10": torch.full((1, 3), 10),
            "batch.2": torch.full((2, 5), 2, dtype=torch.int32),
            "batch.1": torch.full((4,), 1),
        },
        path,
    )
    data = load(path, size=1, seq_len=2)  # used as it is
    assert shapes(data) == [(1, 4), (2, 5), (1, 3)]
    assert [int(batch[0, 0]) for batch in data.batches] == [1, 2, 10]
    assert all(batch.dtype == torch.int64 for batch in data.batches)


# --- lists and batches


def test_texts_are_cut_and_batched_by_length() -> None:
    data = load(["abc", "x" * 40, "de", "fgh", "", "y" * 16], batch_size=1)
    assert shapes(data) == [(1, 3), (1, 3), (1, 16), (1, 16), (1, 2)]
    assert shapes(load(["abc", "de", "fgh"], batch_size=None)) == [(2, 3), (1, 2)]


def test_batches_are_used_as_they_are() -> None:
    given_batches = [torch.randint(0, 258, (b, t)) for b, t in ((1, 40), (3, 2), (2, 2))]
    for data in (
        load(given_batches, size=1),
        load(iter(given_batches)),
        load(tuple(given_batches)),
    ):
        assert all(map(torch.equal, data.batches, given_batches))
        assert data.origin == "batches of token ids"
        assert data.samples == 6


def test_fingerprint_depends_on_shape_and_order() -> None:
    one, two = torch.arange(6).reshape(2, 3), torch.arange(6).reshape(3, 2)
    prints = {load(batches).fingerprint() for batches in ([one], [two], [one, two], [two, one])}
    assert len(prints) == 4


# --- what begins a text


@pytest.mark.parametrize(
    ("template", "start"),
    [
        (["$A"], []),
        (["<|endoftext|>", "$A"], [END]),
        (["<|endoftext|>", "<|pad|>", "$A"], [END, END + 1]),
        (["$A", "<|endoftext|>"], []),
        (["<|pad|>", "$A", "<|endoftext|>"], [END + 1]),
    ],
)
def test_every_block_begins_as_a_text_does(
    template: list[str], start: list[int], tmp_path: Path
) -> None:
    source = with_template(tmp_path / "tokenizer", template)
    text = "".join(chr(97 + i % 26) for i in range(50))
    path = tmp_path / "a.txt"
    path.write_text(text)
    plain = rows(load([text], seq_len=50))[0]
    made = rows(load(path, source))
    width = 16 - len(start)
    expected = [start + plain[i * width : (i + 1) * width] for i in range(50 // width)]
    assert made == expected


def test_no_room_behind_the_start(tmp_path: Path) -> None:
    source = with_template(tmp_path / "tokenizer", ["<|endoftext|>", "<|pad|>", "$A"])
    path = tmp_path / "a.txt"
    path.write_text("some text")
    with pytest.raises(CalibrationError, match=r"calib_seq_len 2 .* 2 tokens"):
        load(path, source, seq_len=2)


def test_text_blocks_of_nothing() -> None:
    class Tokenizer:
        def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
            return {"input_ids": [END] if kwargs["add_special_tokens"] else []}

    assert text_blocks(Tokenizer(), "", 8, 8) == []


# --- batches of equal length


@given(st.lists(st.integers(0, 4), max_size=20), st.integers(1, 5))
def test_batch_by_length(lengths: list[int], batch_size: int) -> None:
    sequences = [torch.full((length,), index) for index, length in enumerate(lengths)]
    batches = list(batch_by_length(sequences, batch_size))
    assert all(1 <= len(batch) <= batch_size and batch.shape[1] for batch in batches)
    kept = sorted(int(row[0]) for batch in batches for row in batch)
    assert kept == [index for index, length in enumerate(lengths) if length]
    for batch in batches:
        assert {lengths[int(row[0])] for row in batch} == {batch.shape[1]}
    by_length: dict[int, list[Tensor]] = {}
    for batch in batches:
        by_length.setdefault(batch.shape[1], []).append(batch)
    for group in by_length.values():  # only the last of a length may be short
        assert all(len(batch) == batch_size for batch in group[:-1])
        order = [int(row[0]) for batch in group for row in batch]
        assert order == sorted(order)


# --- errors


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "holds no tokens"),
        (["", ""], {}, "holds no tokens"),
        ([torch.empty(1, 0, dtype=torch.int64)], {}, "holds no tokens"),
        ([torch.zeros(3, dtype=torch.int64)], {}, r"batch 0 is torch.int64 \[3\]"),
        ([torch.zeros(1, 3, dtype=torch.bool)], {}, r"batch 0 is torch.bool \[1, 3\]"),
        ([torch.zeros(1, 3)], {}, r"batch 0 is torch.float32 \[1, 3\]"),
        ([torch.zeros(1, 3, dtype=torch.int64), "text"], {}, "batch 1 is <class 'str'>"),
        ([[1, 2]], {}, "batch 0 is <class 'list'>"),
        ([torch.tensor([[1, 258]])], {}, r"batch 0 .* token id 258, .* 0\.\.257"),
        ([torch.tensor([[1]]), torch.tensor([[-1, 999]])], {}, "batch 1 .* token id -1"),
        (["a"], {"size": 0}, "calib_size 0"),
        (["a"], {"seq_len": 1}, "calib_seq_len 1"),
        (["a"], {"batch_size": 0}, "batch_size 0"),
    ],
)
def test_bad_data(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        load(data, **options)


def test_no_vocabulary_no_upper_bound() -> None:
    assert load([torch.tensor([[1, 10**9]])], vocab_size=None).tokens == 2
    with pytest.raises(CalibrationError, match="token id -1"):
        load([torch.tensor([[-1]])], vocab_size=None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "a,b", "unknown ending"),
        ("a.json", "{", "no valid JSON"),
        ("a.json", '{"text": "ab"}', "holds a dict"),
        ("a.jsonl", '{"prompt": "ab"}', "'prompt'"),
        ("a.jsonl", "[1]", r"a sample of .* is '\[1\]'"),
        ("a.txt", "", "holds no tokens"),
        ("a.jsonl", "", "holds no tokens"),
    ],
)
def test_bad_files(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(CalibrationError, match=message):
        load(path)


def test_no_file_and_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="does not exist"):
        load(tmp_path / "none.txt")
    with pytest.raises(CalibrationError, match="no tokenizer that loads"):
        load(["a"], tmp_path)
    assert load([torch.tensor([[1]])], tmp_path).tokens == 1  # ids need none


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"\xff\xfe\xff")
        with pytest.raises(CalibrationError):
            load(path)
