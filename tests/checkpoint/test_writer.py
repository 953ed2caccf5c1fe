"""The writer: a fixed layout, any order of writing, files that safetensors itself reads."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from modelopt_lite.checkpoint.header import read_header
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.checkpoint.shards import ShardLayout, TensorPlan, plan_layout
from modelopt_lite.checkpoint.writer import StreamingWriter, parse_size
from modelopt_lite.errors import InternalError, OutputError, RecipeError

INDEX = "model.safetensors.index.json"


def plan_of(tensors: dict[str, Tensor]) -> list[TensorPlan]:
    return [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def export(
    folder: Path, tensors: dict[str, Tensor], limit: int, order: Sequence[str] | None = None
) -> ShardLayout:
    layout = plan_layout(plan_of(tensors), limit)
    with StreamingWriter(folder, layout) as writer:
        for name in order or list(tensors):
            writer.write(name, tensors[name])
        writer.finish()
    return layout


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# Layout


def test_one_file_is_plain() -> None:
    layout = plan_layout([("a", torch.float32, (2,)), ("b", torch.uint8, ())], 10**9)
    assert [file.name for file in layout.files] == ["model.safetensors"]
    assert layout.index == b""
    assert layout.total_size == 9
    assert layout.total_bytes == layout.files[0].size


def test_greedy_in_the_given_order() -> None:
    sizes = [40, 50, 20, 500, 5, 95, 1]
    layout = plan_layout([(f"t{i}", torch.uint8, (n,)) for i, n in enumerate(sizes)], 100)
    groups = [[info.numel for info in file.tensors] for file in layout.files]
    assert groups == [[40, 50], [20], [500], [5, 95], [1]]
    assert layout.files[2].name == "model-00003-of-00005.safetensors"


def test_index_is_complete_and_sorted() -> None:
    layout = plan_layout([("b", torch.uint8, (9,)), ("a", torch.float32, (2,))], 10)
    index = json.loads(layout.index)
    assert list(index["weight_map"]) == ["a", "b"]
    assert index["metadata"] == {"total_size": 17}
    assert index["weight_map"]["a"] == "model-00002-of-00002.safetensors"
    assert layout.total_bytes == sum(file.size for file in layout.files) + len(layout.index)


@settings(max_examples=100, deadline=None)
@given(
    items=st.lists(
        st.tuples(
            st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        min_size=1,
        max_size=20,
    ),
    limit=st.integers(1, 500),
)
def test_layout_rules(items: list[tuple[torch.dtype, list[int]]], limit: int) -> None:
    plan = [(f"t.{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(items)]
    layout = plan_layout(plan, limit)
    placed = [info for file in layout.files for info in file.tensors]
    assert {(i.name, i.dtype, i.shape) for i in placed} == set(plan)
    assert layout.total_size == sum(info.nbytes for info in placed)
    for file in layout.files:
        assert len(file.header()) % 8 == 0
        position = len(file.header())
        for info in file.tensors:
            assert info.start == position
            assert info.start % info.dtype.itemsize == 0
            position = info.end
        assert position == file.size
        filled = [info for info in file.tensors if info.numel]
        assert file.size - len(file.header()) <= limit or len(filled) == 1


@pytest.mark.parametrize(
    "plan",
    [
        [],
        [("a", torch.uint8, (1,)), ("a", torch.uint8, (1,))],
        [("__metadata__", torch.uint8, (1,))],
        [("a", torch.complex128, (1,))],
    ],
)
def test_impossible_plans(plan: list[TensorPlan]) -> None:
    with pytest.raises(InternalError):
        plan_layout(plan, 100)


# Files


@pytest.mark.parametrize("limit", [10**9, 200])
def test_safetensors_reads_them_back(
    tmp_path: Path, tensors: dict[str, Tensor], limit: int
) -> None:
    tensors["ü 名"] = torch.ones(1)
    layout = export(tmp_path / "out", tensors, limit)
    loaded: dict[str, Tensor] = {}
    for file in layout.files:
        path = tmp_path / "out" / file.name
        assert path.stat().st_size == file.size
        loaded |= load_file(path)
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                assert torch.equal(raw(opened.get_tensor(name)), raw(tensors[name]))
        assert [(i.name, i.start, i.end) for i in read_header(path).values()] == [
            (i.name, i.start, i.end) for i in file.tensors
        ]
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(raw(loaded[name]), raw(tensor))
    assert (tmp_path / "out" / INDEX).exists() == (len(layout.files) > 1)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert on_disk == layout.total_bytes


def test_our_reader_reads_them_back(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    export(tmp_path, tensors, 100)
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint(tmp_path) as checkpoint:
        assert not checkpoint.notes
        for name, tensor in tensors.items():
            assert torch.equal(raw(checkpoint.read(name)), raw(tensor))


def test_order_of_writing_does_not_matter(tmp_path: Path) -> None:
    tensors = {name: torch.randn(5) for name in "abcd"}
    results = []
    for i, order in enumerate(itertools.permutations(tensors)):
        export(tmp_path / str(i), tensors, 45, order)
        results.append(digests(tmp_path / str(i)))
    assert len(results[0]) == 3
    assert all(result == results[0] for result in results)


def test_threads_write_at_once(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((500,), float(i)) for i in range(32)}
    with StreamingWriter(tmp_path, plan_layout(plan_of(tensors), 10_000)) as writer:

        def work(part: list[str]) -> None:
            for name in part:
                writer.write(name, tensors[name])

        names = list(tensors)
        threads = [
            threading.Thread(target=work, args=(part,)) for part in (names[0::2], names[1::2])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.finish()
    for path in tmp_path.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, tensors[name])


def test_views_strides_and_grad(tmp_path: Path) -> None:
    storage = torch.randn(8, 6)
    tensors = {
        "top": storage[:4],
        "bottom": storage[4:],
        "transposed": storage.T,
        "expanded": torch.ones(1).expand(3, 3),
        "parameter": torch.nn.Parameter(storage.clone()),
    }
    layout = export(tmp_path, tensors, 10**9)
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert layout.total_size == sum(t.numel() * 4 for t in tensors.values())


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    tensors = {"w": torch.randn(100)}
    export(tmp_path, tensors, 10**9)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], tensors["w"])


# Refusals


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w", torch.ones(2, device="meta"), "'w' reached the writer without data"),
        ("w", torch.ones(2, dtype=torch.float16), "planned as torch.float32"),
        ("w", torch.ones(2, 1), r"came as torch.float32 \[2, 1\]"),
        ("v", torch.ones(2), "'v' is not part"),
    ],
)
def test_departures_from_the_plan(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    with StreamingWriter(tmp_path, plan_layout([("w", torch.float32, (2,))], 999)) as writer:
        with pytest.raises(InternalError, match=message):
            writer.write(name, tensor)


def test_twice_and_never(tmp_path: Path) -> None:
    plan: list[TensorPlan] = [(name, torch.float32, (2,)) for name in "abc"]
    with StreamingWriter(tmp_path, plan_layout(plan, 999)) as writer:
        writer.write("a", torch.ones(2))
        with pytest.raises(InternalError, match="'a' was written twice"):
            writer.write("a", torch.ones(2))
        with pytest.raises(InternalError, match=r"2 of 3 planned tensors .* first is 'b'"):
            writer.finish()


def test_existing_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"model\.safetensors: exists already"):
        StreamingWriter(tmp_path, plan_layout([("w", torch.float32, (2,))], 999))
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"


def test_full_disk_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        if calls.append(length) or len(calls) == 2:  # type: ignore[func-returns-value]
            raise OSError(errno.ENOSPC, "No space left on device")

    calls: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    layout = plan_layout([("a", torch.uint8, (50,)), ("b", torch.uint8, (50,))], 60)
    with pytest.raises(OutputError, match=f"need {layout.total_bytes} bytes, \\d+ are free"):
        StreamingWriter(tmp_path, layout)
    assert not list(tmp_path.iterdir())


def test_full_disk_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamingWriter(tmp_path, plan_layout([("a", torch.uint8, (50,))], 60)) as writer:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OutputError, match="are free"):
            writer.write("a", torch.zeros(50, dtype=torch.uint8))


def test_file_system_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    tensors = {"w": torch.randn(3)}
    export(tmp_path, tensors, 999)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], tensors["w"])


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be written"):
        StreamingWriter(tmp_path / "file" / "out", plan_layout([("w", torch.uint8, (1,))], 9))


def test_files_have_their_size_before_the_first_write(tmp_path: Path) -> None:
    layout = plan_layout([("w", torch.uint8, (1000,))], 9)
    with StreamingWriter(tmp_path, layout):
        assert (tmp_path / "model.safetensors").stat().st_size == layout.total_bytes


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GB", 10**10), ("5 GiB", 5 << 30), ("1.5kb", 1500), ("7", 7), (12, 12), ("3b", 3),
        ("0.5MiB", 1 << 19), ("2TB", 2 * 10**12), (" 1 KiB ", 1024),
        ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "10 G B", "-1GB", "1e9", "ten", "10XB", "0", 0, -5, "0.1B", "1.GB", True,
     "\u0661GB"],
)  # fmt: skip
def test_parse_size_refuses(text: str | int) -> None:
    with pytest.raises(RecipeError, match="write 10GB, 512MiB"):
        parse_size(text)
