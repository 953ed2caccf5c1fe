"""Reads past the page cache give the same bytes, and the usual way where they cannot be had."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.checkpoint.uncached import AHEAD, ALIGN, FLAG, ROOM, UncachedReader
from modelopt_lite.errors import CheckpointError

MakeCheckpoint = Callable[..., Path]
SIZE = 5 * ROOM + 12345

pytestmark = pytest.mark.skipif(not FLAG, reason="the system has no such reads")


@pytest.fixture(scope="module")
def content() -> bytes:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (SIZE,), generator=generator, dtype=torch.uint8)
    return values.numpy().tobytes()


@pytest.fixture(scope="module")
def digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@pytest.fixture(scope="module")
def direct(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    path = tmp_path_factory.mktemp("uncached") / "file"
    path.write_bytes(content)
    try:
        fd = os.open(path, os.O_RDONLY | FLAG)
    except OSError:
        pytest.skip("the file system has no such reads")
    return fd, path


def blame(fd: int, path: Path, content: bytes, digest: bytes) -> str:
    """Say who is wrong where a read differs: it happened once, and nothing told.

    The same wrong bytes again and again, in one process of many, may be the reader's, or of what is
    expected in memory, of the page cache, or of the disk.
    """
    room = mmap.mmap(-1, -(-SIZE // ALIGN) * ALIGN)
    os.preadv(fd, [room], 0)
    again = bytearray(SIZE)
    UncachedReader().read(fd, path, 0, memoryview(again))
    right = {
        "expected": hashlib.sha256(content).digest() == digest,
        "page cache": path.read_bytes() == content,
        "disk": room[:SIZE] == content,
        "another reader": again == content,
    }
    return f"right now: {right}"


pieces = st.lists(
    st.tuples(
        st.one_of(st.integers(0, SIZE), st.sampled_from((0, 4095, 4096, ROOM - 1, SIZE - 1))),
        st.one_of(st.integers(1, 9000), st.sampled_from((4096, ROOM, ROOM + 1, SIZE))),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reads=pieces)
def test_any_reads_in_any_order(
    direct: tuple[int, Path], content: bytes, digest: bytes, reads: list[tuple[int, int, bool]]
) -> None:
    fd, path = direct
    reader, end = UncachedReader(), 0
    for anywhere, size, forward in reads:
        start = end if forward else anywhere
        buffer = bytearray(b"\xa5" * size)
        count = reader.read(fd, path, start, memoryview(buffer))
        expected = content[start : start + size]
        assert count == len(expected)
        wanted = expected + b"\xa5" * (size - count)
        if buffer != wanted:  # what pytest says of megabytes takes minutes
            at = next(at for at in range(size) if buffer[at] != wanted[at])
            pytest.fail(f"{(start, size)} differs at {at}; {blame(fd, path, content, digest)}")
        end = start + count


@settings(
    deadline=None,
    max_examples=30,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(reads=pieces)
def test_memory_that_lies_as_the_file_is_read_to_directly(
    direct: tuple[int, Path], content: bytes, reads: list[tuple[int, int, bool]]
) -> None:
    fd, path = direct
    reader, end = UncachedReader(), 0
    room = mmap.mmap(-1, SIZE + 4 * ALIGN)
    for anywhere, size, forward in reads:
        start = end if forward else anywhere
        at = ALIGN + start % ALIGN
        room[:] = b"\xa5" * len(room)
        count = reader.read(fd, path, start, memoryview(room)[at : at + size])
        expected = content[start : start + size]
        right = count == len(expected) and room[at : at + count] == expected
        assert right, (start, size, count)
        around = room[:at] + room[at + size :]
        assert around.count(b"\xa5") == len(around), (start, size)
        end = start + count


def test_many_pages_are_one_request(
    direct: tuple[int, Path], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, path = direct
    reader, asked, preadv = UncachedReader(), [], os.preadv
    room = mmap.mmap(-1, SIZE)

    def counted(fd: int, parts: list[memoryview], at: int) -> int:
        asked.append((at, len(parts[0])))
        return preadv(fd, parts, at)

    monkeypatch.setattr(os, "preadv", counted)
    reader.read(fd, path, 100, memoryview(room)[100 : 2 * ROOM + 300])
    reader.read(fd, path, 2 * ROOM + 300, memoryview(room)[2 * ROOM + 300 :])
    same = room[100:] == content[100:]
    assert same
    last = SIZE - SIZE % ALIGN
    assert asked == [
        (0, ALIGN),
        (ALIGN, 2 * ROOM - ALIGN),
        (2 * ROOM, ALIGN),  # serves both: the end of the one and the beginning of the other
        (2 * ROOM + ALIGN, last - 2 * ROOM - ALIGN),
        (last, ALIGN),
    ]
    reader.close()


def test_small_tensors_in_turn_are_read_together(
    direct: tuple[int, Path], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, path = direct
    reader, sizes, preadv = UncachedReader(), [], os.preadv

    def counted(fd: int, parts: list[memoryview], at: int) -> int:
        sizes.append(len(parts[0]))
        return preadv(fd, parts, at)

    monkeypatch.setattr(os, "preadv", counted)
    for start in range(100, ROOM, 10_000):
        buffer = bytearray(10_000)
        reader.read(fd, path, start, memoryview(buffer))
        assert buffer == content[start : start + 10_000]
    reader.close()
    assert sizes[0] <= 16_384  # nothing says yet that more will be wanted
    assert len(sizes) <= 2 + AHEAD + 1


def test_what_was_read_ahead_is_forgotten_with_the_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    reader, buffer = UncachedReader(), bytearray(2 * ROOM)
    try:
        fd = os.open(path, os.O_RDONLY | FLAG)
    except OSError:
        pytest.skip("the file system has no such reads")
    reader.read(fd, path, 0, memoryview(buffer))
    reader.close()
    os.close(fd)
    path.write_bytes(content[::-1])
    fd = os.open(path, os.O_RDONLY | FLAG)
    reader.read(fd, path, 2 * ROOM, memoryview(buffer))
    assert buffer == content[::-1][2 * ROOM : 4 * ROOM]
    reader.close()
    os.close(fd)


def test_a_checkpoint_reads_past_the_cache(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    content: dict[str, Tensor] = {f"t{i}": torch.randn(5, 301 + i) for i in range(4)}
    checkpoint = Checkpoint(make_checkpoint(content))
    checkpoint.uncached = True
    flags, preadv = [], os.preadv

    def seen(fd: int, parts: list[memoryview], at: int) -> int:
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL) & FLAG)
        return preadv(fd, parts, at)

    monkeypatch.setattr(os, "preadv", seen)
    for name in ("t2", "t0", "t1", "t3"):
        assert torch.equal(checkpoint.read(name), content[name])
    assert checkpoint.bytes_read == checkpoint.total_bytes
    if checkpoint.uncached:
        assert all(flags)


def test_the_usual_way_where_it_cannot(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(1000.0)
    checkpoint = Checkpoint(make_checkpoint({"w": weight}))
    checkpoint.uncached = True
    preadv = os.preadv

    def refuse(fd: int, parts: list[memoryview], at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & FLAG:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, parts, at)

    monkeypatch.setattr(os, "preadv", refuse)
    assert torch.equal(checkpoint.read("w"), weight)
    assert not checkpoint.uncached


@pytest.mark.parametrize("how", ["truncate", "touch"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_file_that_changes_is_an_error(
    make_checkpoint: MakeCheckpoint, opened: bool, how: str
) -> None:
    checkpoint = Checkpoint(make_checkpoint({"a": torch.ones(3), "b": torch.ones(3)}))
    checkpoint.uncached = True
    if opened:
        checkpoint.read("a")
    [path] = checkpoint.files
    if how == "truncate":
        os.truncate(path, path.stat().st_size - 4)
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed since"):
        checkpoint.read("b")
