"""Host weights that processes share: one copy, never another's values, nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import QUICK, Everything, Stack, assert_same, check_passes, snapshot, tensors_of
from safetensors.torch import save_file

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload import (
    HostDevice,
    OffloadConfig,
    OffloadManager,
    cleanup_unused,
    sharedfile,
)
from modelopt_lite.offload.disk import open_from_disk
from modelopt_lite.offload.sharedcargo import SHARED
from modelopt_lite.offload.sharedfile import SharedFile

IDS = torch.arange(10).view(2, 5)
NAMESPACE = f"test {os.getpid()}"
SHARING: dict[str, Any] = {"shm_enabled": True, "shm_namespace": NAMESPACE}

pytestmark = pytest.mark.skipif(
    not sharedfile.FOLDER.is_dir(), reason="no shared memory on this system"
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with torch.no_grad():
        yield
    cleanup_unused(NAMESPACE)
    assert files() == []


def files(namespace: str = NAMESPACE) -> list[Path]:
    short = sharedfile._short(namespace)
    return list(sharedfile.FOLDER.glob(f"{sharedfile._prefix()}{short}-*"))


def stack(**kwargs: Any) -> Stack:
    torch.manual_seed(3)
    return Stack(3, **kwargs)


def sharing(model: Any, strategy: Any = None, **fields: Any) -> OffloadManager:
    manager = OffloadManager(device=HostDevice())
    strategy = strategy or Everything(2)
    fields = {**QUICK, **SHARING, "load_strategy": strategy, **fields}
    manager.offload(model, OffloadConfig(**fields))
    return manager


def mapped(tensor: torch.Tensor) -> str:
    """The file in which a tensor's values are; nothing where they are in memory of their own."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(text, 16) for text in line.split()[0].split("-"))
        if first <= address < last:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return ""


def test_outputs_and_release_in_all_phases() -> None:
    for device in ("host", "sim", "sim_blocking"):
        for keep in (lambda name: False, lambda name: name.endswith(("bias", "up.weight"))):
            model: Any = stack()
            strategy = Everything(2, keep)
            run = functools.partial(model, IDS)
            check_passes(model, run, device=device, load_strategy=strategy, **SHARING)
            assert mapped(model.layers[0].down.weight) in ("", "[heap]")
            assert files() == []


def test_two_users_one_file() -> None:
    one, two = stack(), stack()
    expected = one(IDS)
    first = sharing(one)
    (file,) = files()
    # The second keeps on its device what the first one brings in.
    second = sharing(two, Everything(2, keep=lambda name: "up" in name))
    for model in (one, two):
        for _ in range(5):
            assert_same(model(IDS), expected)
    assert files() == [file]
    weights = one.layers[0].down.weight, two.layers[0].down.weight
    assert [mapped(weight) for weight in weights] == [str(file)] * 2
    assert mapped(two.layers[0].up.weight) != str(file)
    size = file.stat().st_size - sharedfile.HEADER
    for manager in (first, second):
        held = tensors_of(manager).ledger.held(SHARED)
        assert held == {"host": size}
        assert tensors_of(manager).ledger.total("host") == size
    assert len(list(tensors_of(second)._cargos["layers.0"].copies(torch.empty(1 << 20)))) == 2
    with torch.no_grad():
        weights[0].mul_(2)  # in place: seen here, and here alone
    assert not torch.equal(one(IDS), expected)
    assert_same(two(IDS), expected)
    first.release()
    assert files() == [file]
    assert_same(two(IDS), expected)
    second.release()
    assert files() == []
    assert_same(two(IDS), expected)


def test_what_changed_on_the_device_goes_to_no_other_process() -> None:
    one, two = stack(), stack()
    first = sharing(one, Everything(2, keep=lambda name: "up" in name))
    second = sharing(two)
    for _ in range(4):
        expected = two(IDS)
        one(IDS)
    one.layers[1].up.weight.mul_(3)
    changed = one(IDS)
    tensors_of(first).strategy = Everything(2)
    for _ in range(first.request_strategy_replan()):
        assert_same(one(IDS), changed)
    assert first.strategy_replan_status.applied
    assert "layers.1.up.weight" in {m.name for m in tensors_of(first)._cargos["layers.1"].tensors}
    assert_same(one(IDS), changed)
    assert_same(two(IDS), expected)
    first.release()
    assert_same(one(IDS), changed)
    second.release()


def test_other_values_are_refused_and_other_shapes_are_another_file() -> None:
    first = sharing(stack())
    other = stack()
    other.layers[1].up.bias.data[3] += 1
    before = snapshot(other)
    with pytest.raises(OffloadError, match=r"'layers\.1\.up\.bias' has other values in this"):
        sharing(other)
    assert_same(snapshot(other), before)
    assert len(files()) == 1
    second = sharing(stack(d=32))
    assert len(files()) == 2
    for manager in (first, second):
        manager.release()


def test_weights_that_are_tied_or_views_are_as_without_sharing() -> None:
    for tied in ("embeddings", "middle"):
        model = stack(tied=tied)
        run = functools.partial(model, IDS)
        check_passes(model, run, device="sim", load_strategy=Everything(), **SHARING)


def test_manual_blocks_are_shared_once_they_are_known() -> None:
    model: Any = stack()
    expected = model.layers[0](torch.ones(2, 16))
    manager = sharing(model, include_patterns=[])
    assert files() == []
    for _ in range(5):
        with manager.offload_block("first"):
            assert_same(model.layers[0](torch.ones(2, 16)), expected)
        with manager.offload_block("second"):
            model.layers[1](torch.ones(2, 16))
        manager.update_state()
    assert len(files()) == 1
    manager.release()


def test_what_is_on_disk_is_shared_already(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(stack().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    model = open_from_disk(stack, tmp_path)
    manager = sharing(model)
    assert "no effect on weights on disk" in caplog.text
    assert files() == []
    manager.release()


# --- the file


def shared(layout: str = "a", nbytes: int = 64, timeout: float = 0.0) -> SharedFile:
    return SharedFile(NAMESPACE, layout, nbytes, wait_timeout=timeout, private=True)


def test_the_file_is_written_once() -> None:
    one = shared()
    assert one.writing
    one.write(8, torch.arange(8, dtype=torch.uint8))
    with pytest.raises(OffloadError, match="still writes"):
        shared(timeout=0.05)
    one.complete()
    two = shared()
    assert not two.writing
    assert two.bytes[8:16].tolist() == list(range(8))
    two.bytes[8] = 77
    assert one.bytes[8] == 0
    assert two.path == one.path != shared("b").path
    one.close()
    one.close()
    assert two.path.exists()
    two.close()
    assert not two.path.exists()
    assert two.bytes[9] == 1  # what is mapped stays


def test_a_writer_that_died_is_followed_by_another() -> None:
    dead = shared()
    dead.write(0, torch.ones(64, dtype=torch.uint8))
    dead._finalizer.detach()
    os.close(dead._file)  # all that is left of a process that was killed
    two = shared()
    assert two.writing
    assert not two.bytes.any()
    two.close()


def test_what_killed_processes_left_is_used_or_removed() -> None:
    dead = shared()
    dead.write(0, torch.ones(64, dtype=torch.uint8))
    dead.complete()
    dead._finalizer.detach()
    os.close(dead._file)
    again = shared()
    assert not again.writing
    again._finalizer.detach()
    os.close(again._file)
    used = shared("b")
    assert [dead.path.exists(), used.path.exists()] == [False, True]
    assert cleanup_unused(NAMESPACE) == []
    used.close()


def test_a_child_that_ends_changes_nothing() -> None:
    parent = shared()
    parent.complete()
    child = os.fork()
    if not child:
        parent.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert parent.path.exists()
    other = os.open(parent.path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    parent.close()


def test_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = stack()
    before = snapshot(model)
    space = os.statvfs(sharedfile.FOLDER)
    fields = list(space)
    with monkeypatch.context() as patch:
        fields[4] = 1  # one block is available
        patch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
        with pytest.raises(OffloadError, match=r"are free; enlarge it \(mount -o remount,size="):
            sharing(model)
    with monkeypatch.context() as patch:

        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OffloadError, match="No space left on device; enlarge it"):
            sharing(model)
    with monkeypatch.context() as patch:
        patch.setattr(sharedfile, "FOLDER", tmp_path / "nowhere")
        with pytest.raises(OffloadError, match=r"needs .*nowhere, which this system lacks"):
            sharing(model)
    assert_same(snapshot(model), before)
    assert files() == []
    with monkeypatch.context() as patch:
        patch.setattr(sharedfile, "FOLDER", tmp_path)
        path = shared().path
        path.symlink_to("elsewhere")
        with pytest.raises(OffloadError, match="cannot be shared"):
            shared()


def test_pinned_memory_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = stack()
    monkeypatch.setattr("modelopt_lite.offload.sharedcargo._private", lambda *_: False)
    manager = sharing(model)
    for _ in range(4):
        model(IDS)

    def scale(module: Any, args: Any) -> None:
        module.up.weight.mul_(2)

    handle = model.layers[1].norm.register_forward_pre_hook(lambda *_: scale(model.layers[1], _))
    with pytest.raises(OffloadError, match=r"'layers\.1' changes its weights in place"):
        model(IDS)
    handle.remove()
    manager.release()


# --- real processes

WORKER = """
import hashlib, json, sys
import torch
sys.path.insert(0, sys.argv[1])
from oracle import QUICK, Everything, Stack
from modelopt_lite.offload import OffloadConfig, OffloadManager, HostDevice

torch.set_num_threads(1)
torch.manual_seed(3)
model = Stack(4, d=512)
ids = torch.arange(10).view(2, 5)
digest = lambda t: hashlib.sha256(t.numpy().tobytes()).hexdigest()
with torch.no_grad():
    plain = digest(model(ids))
    manager = OffloadManager(device=HostDevice())
    manager.offload(model, OffloadConfig(
        **QUICK, load_strategy=Everything(2), shm_enabled=True, shm_namespace=sys.argv[2]))
    for _ in range(5):
        output = digest(model(ids))
print(json.dumps({"plain": plain, "output": output}), flush=True)
for line in sys.stdin:
    if line == "memory\\n":
        sizes, inside = {"Rss": 0, "Pss": 0, "Private_Dirty": 0}, False
        for row in open("/proc/self/smaps"):
            key = row.split(":")[0]
            if "-" in row.split()[0]:
                inside = "modelopt-lite-" in row
            elif inside and key in sizes:
                sizes[key] += int(row.split()[1]) * 1024
        print(json.dumps(sizes), flush=True)
    else:
        with torch.no_grad():
            print(json.dumps({"output": digest(model(ids))}), flush=True)
manager.release()
"""


class Worker:
    """A process that offloads a model with shared weights."""

    def __init__(self, namespace: str) -> None:
        helpers = Path(__file__).parent.parent / "helpers"
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(helpers), namespace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=60)


def test_processes_keep_one_copy_and_survive_each_others_deaths() -> None:
    workers = [Worker(NAMESPACE) for _ in range(2)]
    try:
        first, second = (worker.answer() for worker in workers)
        assert first["output"] == first["plain"] == second["plain"] == second["output"]
        (file,) = files()
        size = file.stat().st_size
        for worker in workers:
            memory = worker.ask("memory")
            assert memory["Rss"] > 0.95 * size
            assert memory["Pss"] < 0.55 * size  # half of one copy each
            assert memory["Private_Dirty"] < 0.01 * size
        workers[0].process.send_signal(signal.SIGKILL)
        workers[0].process.wait(timeout=60)
        assert files() == [file]
        assert workers[1].ask("run")["output"] == first["plain"]
        assert cleanup_unused(NAMESPACE) == []  # it is in use
        assert workers[1].end() == 0
        assert files() == []
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


def come_and_go(seed: int) -> None:
    """Share and leave many times; die in the middle of it at last."""
    random = torch.Generator().manual_seed(seed)
    wanted = torch.arange(256, dtype=torch.uint8).repeat(64)
    for _ in range(40):
        file = shared("race", wanted.numel())
        if file.writing:
            file.write(0, wanted[:5000])
            file.write(5000, wanted[5000:])
            file.complete()
        if not torch.equal(file.bytes, wanted):
            os._exit(1)
        if torch.rand((), generator=random) < 0.7:
            file.close()
    file = shared("last", wanted.numel())
    if file.writing:
        file.write(0, wanted[:5000])
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_come_and_go_and_nobody_reads_half_a_file() -> None:
    children = []
    for seed in range(4):
        child = os.fork()
        if not child:
            come_and_go(seed)
        children.append(child)
    for child in children:
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(files()) <= 2
    last = shared("last", 64 * 256)
    assert last.writing  # none of them has completed it
    last.close()
