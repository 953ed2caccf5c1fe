"""The checkpoint folder: what is found, what is refused, and that reads are exact and direct."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.errors import CheckpointError, InternalError

MakeCheckpoint = Callable[..., Path]
INDEX = "model.safetensors.index.json"


def same(a: Tensor, b: Tensor) -> bool:
    def raw(x: Tensor) -> Tensor:
        return x.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def two_shards() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {"b": torch.ones(3), "a": torch.zeros(2)}, {"c": torch.arange(4.0)}


def rewrite_index(folder: Path, **changes: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def test_reads_every_dtype(make_checkpoint: MakeCheckpoint, tensors: dict[str, Tensor]) -> None:
    with Checkpoint(make_checkpoint(tensors)) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        for name, expected in tensors.items():
            assert same(checkpoint.read(name), expected)
        assert checkpoint.bytes_read == checkpoint.total_bytes
        assert set(checkpoint.reads.values()) == {1}


def test_order_follows_the_disk(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = Checkpoint(make_checkpoint(*two_shards()))
    assert list(checkpoint.tensors)[-1] == "c"
    places = [(info.file, info.start) for info in checkpoint.tensors.values()]
    assert places == sorted(places)


def test_reads_into_a_slice_of_a_larger_parameter(make_checkpoint: MakeCheckpoint) -> None:
    weight = torch.randn(2, 3)
    checkpoint = Checkpoint(make_checkpoint({"w": weight}))
    fused = torch.nn.Parameter(torch.full((4, 2, 3), -1.0))
    out = fused.data[2]
    assert checkpoint.read("w", out) is out
    assert torch.equal(fused[2], weight)
    assert bool((fused[[0, 1, 3]] == -1).all())


def test_reads_into_a_parameter_that_needs_grad(make_checkpoint: MakeCheckpoint) -> None:
    weight = torch.randn(2, 3)
    checkpoint = Checkpoint(make_checkpoint({"w": weight}))
    same_dtype = torch.nn.Parameter(torch.zeros(2, 3))
    other_dtype = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    checkpoint.read("w", same_dtype)
    checkpoint.read("w", other_dtype)
    assert torch.equal(same_dtype, weight)
    assert torch.equal(other_dtype, weight.bfloat16())


def test_reads_into_strided_and_reshaped_buffers(make_checkpoint: MakeCheckpoint) -> None:
    weight = torch.randn(2, 3)
    checkpoint = Checkpoint(make_checkpoint({"w": weight}))
    transposed = torch.zeros(3, 2).T
    assert torch.equal(checkpoint.read("w", transposed), weight)
    flat = torch.zeros(6, dtype=torch.float64)
    assert torch.equal(checkpoint.read("w", flat), weight.double().flatten())


def test_a_wrong_buffer_is_our_fault(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = Checkpoint(make_checkpoint({"w": torch.ones(2, 3)}))
    with pytest.raises(InternalError, match="'w'"):
        checkpoint.read("w", torch.zeros(5))
    with pytest.raises(InternalError, match="meta"):
        checkpoint.read("w", torch.zeros(2, 3, device="meta"))


def test_unknown_tensor(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match="no tensor 'nope'"):
        Checkpoint(make_checkpoint({"w": torch.ones(1)})).read("nope")


def test_short_reads_are_continued(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(1000.0)
    checkpoint = Checkpoint(make_checkpoint({"w": weight}))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: preadv(fd, [bufs[0][:7]], at))
    assert torch.equal(checkpoint.read("w"), weight)


def test_io_error_names_tensor_and_file(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(make_checkpoint({"w": torch.ones(3)}))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*'w'.*Input/output error"):
        checkpoint.read("w")
    assert checkpoint.bytes_read == 0


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("how", ["append", "truncate", "touch", "replace"])
def test_a_file_that_changes_is_an_error(
    make_checkpoint: MakeCheckpoint, opened: bool, how: str
) -> None:
    folder = make_checkpoint({"a": torch.ones(3), "b": torch.ones(3)})
    checkpoint = Checkpoint(folder)
    if opened:
        checkpoint.read("a")
    path = folder / "model.safetensors"
    if how == "append":
        with path.open("ab") as file:
            file.write(b"x")
    elif how == "truncate":
        os.truncate(path, path.stat().st_size - 4)
    elif how == "touch":
        os.utime(path, ns=(1, 1))
    else:
        content = path.read_bytes()
        path.unlink()
        path.with_suffix(".other").write_bytes(b"takes the inode")
        path.write_bytes(content)
        if opened:
            # The old file lives on behind the descriptor and still gives what its header says.
            assert torch.equal(checkpoint.read("b"), torch.ones(3))
            return
    with pytest.raises(CheckpointError, match="changed since"):
        checkpoint.read("b")


def test_threads_read_at_once(make_checkpoint: MakeCheckpoint) -> None:
    content = {f"t{i}": torch.full((2000,), float(i)) for i in range(8)}
    checkpoint = Checkpoint(make_checkpoint(content))
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            wrong.extend(n for n, t in content.items() if not torch.equal(checkpoint.read(n), t))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert set(checkpoint.reads.values()) == {80}
    assert checkpoint.bytes_read == 80 * checkpoint.total_bytes


def test_close_and_read_again(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = Checkpoint(make_checkpoint({"w": torch.ones(3)}))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    checkpoint.read("w")
    checkpoint.close()
    checkpoint.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert torch.equal(checkpoint.read("w"), torch.ones(3))
    checkpoint.close()


def test_fingerprint_follows_files_and_config(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint({"w": torch.ones(3)})
    first = Checkpoint(folder).fingerprint()
    assert Checkpoint(folder).fingerprint() == first
    os.utime(folder / "model.safetensors", ns=(5, 5))
    touched = Checkpoint(folder).fingerprint()
    (folder / "config.json").write_text("{}")
    assert len({first, touched, Checkpoint(folder).fingerprint()}) == 3


# What is found


def test_stale_shards_beside_an_index_are_ignored(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(*two_shards())
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"rubbish")
    (folder / "model.safetensors").write_bytes(b"rubbish")
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert "model-00001-of-00009.safetensors, model.safetensors" in checkpoint.notes[0]


def test_stale_shards_beside_a_single_file_are_ignored(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint({"w": torch.ones(3)})
    save_file({"w": torch.ones(9)}, folder / "model-00001-of-00002.safetensors")
    checkpoint = Checkpoint(folder)
    assert checkpoint.tensors["w"].shape == (3,)
    assert "model-00001-of-00002.safetensors" in checkpoint.notes[0]


def test_a_single_file_of_another_name(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint({"w": torch.ones(3)})
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert list(Checkpoint(folder).tensors) == ["w"]


def test_several_files_without_an_index(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(*two_shards())
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match="holds 2 safetensors files"):
        Checkpoint(folder)


def test_pickles_only(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint({"w": torch.ones(3)})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*convert"):
        Checkpoint(folder)


def test_no_weights_no_folder(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint({"w": torch.ones(3)})
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        Checkpoint(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint(tmp_path / "nowhere")


def test_missing_shard(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(*two_shards())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.*'c'.*missing"):
        Checkpoint(folder)


@pytest.mark.parametrize("shard", ["model-00001-of-00002.safetensors", None])
def test_ghost_in_the_index(make_checkpoint: MakeCheckpoint, shard: str | None) -> None:
    folder = make_checkpoint(*two_shards())
    # Also a tensor that exists, but in the other shard.
    name = "ghost.weight" if shard else "a"
    rewrite_index(folder, **{name: shard or "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=f"places tensor '{name}' in model-0000"):
        Checkpoint(folder)


def test_tensors_that_the_index_lacks_are_noted(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(*two_shards())
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["a"]
    (folder / INDEX).write_text(json.dumps(index))
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.tensors) == {"b", "c"}
    assert "'a'" in checkpoint.notes[0]


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "..",
     "x.bin", "", "a\0b.safetensors", "x" * 300 + ".safetensors", 7, None, ["x"]],
)  # fmt: skip
def test_index_entries_that_lead_elsewhere(make_checkpoint: MakeCheckpoint, shard: object) -> None:
    folder = make_checkpoint(*two_shards())
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match=re.escape("only the plain name")):
        Checkpoint(folder)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[", "[]"])
def test_broken_index(make_checkpoint: MakeCheckpoint, index: str) -> None:
    folder = make_checkpoint(*two_shards())
    (folder / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=re.escape(INDEX)):
        Checkpoint(folder)


@pytest.mark.parametrize("config", [None, b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_broken_config(make_checkpoint: MakeCheckpoint, config: bytes | None) -> None:
    folder = make_checkpoint({"w": torch.ones(3)})
    if config is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(folder)


def test_links_into_a_blob_store(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint({"w": torch.ones(3)})
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to("../blob")
    assert torch.equal(Checkpoint(folder).read("w"), torch.ones(3))


def test_constructing_reads_no_weights(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint({"w": torch.ones(3)})
    raw = save({"w": torch.ones(1 << 16)})
    (folder / "model.safetensors").write_bytes(raw)
    checkpoint = Checkpoint(folder)
    assert (checkpoint.bytes_read, checkpoint.total_bytes) == (0, 4 << 16)


@pytest.mark.parametrize("uncached", [False, True])
def test_tensors_that_follow_one_another_are_read_at_once(
    make_checkpoint: MakeCheckpoint, uncached: bool
) -> None:
    content = {f"t{i}": torch.randn(5, 301 + i) for i in range(4)}
    checkpoint = Checkpoint(make_checkpoint(content))
    checkpoint.uncached = uncached
    names = list(checkpoint.tensors)[1:3]
    expected = b"".join(content[name].numpy().tobytes() for name in names)
    room = torch.zeros(len(expected), dtype=torch.uint8)
    infos = [checkpoint.tensors[name] for name in names]
    checkpoint.read_run(infos, room)
    assert room.numpy().tobytes() == expected
    assert checkpoint.bytes_read == len(expected)
    assert checkpoint.reads == dict.fromkeys(names, 1)
    with pytest.raises(InternalError, match="does not follow"):
        checkpoint.read_run(infos[::-1], room)
    with pytest.raises(InternalError, match="to be read into"):
        checkpoint.read_run(infos, room[1:])
