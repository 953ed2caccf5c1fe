"""Writing behind: in order, bounded, and an error is never lost."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelopt_lite.checkpoint.behind import WriteBehind
from modelopt_lite.checkpoint.shards import plan_layout
from modelopt_lite.checkpoint.writer import StreamingWriter
from modelopt_lite.errors import InternalError, OutputError


def writer_for(folder: Path, tensors: dict[str, torch.Tensor]) -> StreamingWriter:
    plan = [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    return StreamingWriter(folder, plan_layout(plan, 10**9))


def test_everything_is_written(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(i, 3) for i in range(20)}
    order: list[str] = []
    with writer_for(tmp_path, tensors) as writer:
        with WriteBehind(writer, limit=100) as sink:  # less than one of the larger tensors
            for name, tensor in tensors.items():
                assert not sink.is_taken(name)
                sink.write(name, tensor)
                assert sink.is_taken(name)
                sink.then(lambda name=name: order.append(name))  # type: ignore[misc]
            sink.flush()
            assert order == list(tensors)
        writer.finish()
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_caller_waits_where_too_much_waits(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(10), "b": torch.ones(10), "c": torch.ones(10)}
    gate, third = threading.Event(), threading.Event()
    with writer_for(tmp_path, tensors) as writer, WriteBehind(writer, limit=80) as sink:
        sink.then(partial(hold, gate))

        def hand_over() -> None:
            for name, tensor in tensors.items():
                sink.write(name, tensor)
            third.set()

        thread = threading.Thread(target=hand_over)
        thread.start()
        assert not third.wait(0.2)
        gate.set()
        assert third.wait(10)
        thread.join()


def test_a_mistake_is_raised_at_once(tmp_path: Path) -> None:
    with writer_for(tmp_path, {"a": torch.ones(2)}) as writer, WriteBehind(writer) as sink:
        with pytest.raises(InternalError, match="not part"):
            sink.write("b", torch.ones(2))
        with pytest.raises(InternalError, match="planned as"):
            sink.write("a", torch.ones(3))


def hold(gate: threading.Event) -> None:
    assert gate.wait(10)


def fail() -> None:
    raise OutputError("the disk is full")


@pytest.mark.parametrize("call", ["write", "then", "flush", "leave"])
def test_an_error_reaches_the_caller(call: str, tmp_path: Path) -> None:
    with writer_for(tmp_path, {"a": torch.ones(2)}) as writer:
        with pytest.raises(OutputError, match="full"):
            use(WriteBehind(writer), call)


def use(sink: WriteBehind, call: str) -> None:
    with sink:
        sink.then(fail)
        if call != "leave":
            with pytest.raises(OutputError, match="full"):
                sink.flush()
        if call == "write":
            sink.write("a", torch.ones(2))
        if call == "then":
            sink.then(lambda: pytest.fail("ran after an error"))


def test_an_error_of_the_caller_drops_what_waits(tmp_path: Path) -> None:
    gate = threading.Event()
    with writer_for(tmp_path, {"a": torch.ones(2)}) as writer:
        with pytest.raises(ZeroDivisionError):
            interrupt(WriteBehind(writer), gate)


def interrupt(sink: WriteBehind, gate: threading.Event) -> None:
    with sink:
        sink.then(partial(hold, gate))
        sink.then(lambda: pytest.fail("ran after an error"))
        threading.Timer(0.1, gate.set).start()
        raise ZeroDivisionError


def test_an_interruption_waits_for_what_was_taken(tmp_path: Path) -> None:
    done: list[int] = []
    with writer_for(tmp_path, {"a": torch.ones(2)}) as writer:
        with pytest.raises(KeyboardInterrupt):
            interrupted(WriteBehind(writer), done)
    assert done == [1]


def interrupted(sink: WriteBehind, done: list[int]) -> None:
    with sink:
        sink.then(lambda: time.sleep(0.1))
        sink.then(lambda: done.append(1))
        raise KeyboardInterrupt
