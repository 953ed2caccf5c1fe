"""A unit is finished while the next one computes: one behind, in order, the first error first."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from modelopt_lite.finishing import OneBehind


def test_one_task_at_a_time_beside_the_caller() -> None:
    may_end = [threading.Event() for _ in range(3)]
    began, ended = [threading.Event() for _ in range(3)], []

    def task(index: int) -> None:
        began[index].set()
        assert may_end[index].wait(10)
        ended.append(index)

    with OneBehind() as behind:
        behind.start(lambda: task(0))  # returns although the task cannot end yet
        assert began[0].wait(10)
        threading.Timer(0.05, may_end[0].set).start()
        behind.start(lambda: task(1))
        assert ended == [0]  # waited for it
        may_end[1].set()
        may_end[2].set()
        behind.start(lambda: task(2))
    assert ended == [0, 1, 2]


@pytest.mark.parametrize("overlapped", [True, False])
def test_tasks_run_without_gradients(overlapped: bool) -> None:
    seen: list[tuple[bool, bool]] = []

    def task() -> None:
        own = threading.current_thread() is threading.main_thread()
        seen.append((torch.is_inference_mode_enabled(), own))

    with torch.inference_mode(), OneBehind(overlapped=overlapped) as behind:
        behind.start(task)
    assert seen == [(True, not overlapped)]


@pytest.mark.parametrize("threads", [None, 1])
def test_tasks_compute_on_as_many_threads_as_said(threads: int | None) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with OneBehind(threads=threads) as behind:
            behind.start(lambda: seen.append(torch.zeros(1).numel() and torch.get_num_threads()))
        assert seen == [threads or 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def fail() -> None:
    raise ZeroDivisionError("the task")


def test_errors_reach_the_caller() -> None:
    done: list[int] = []
    with OneBehind() as behind:
        behind.start(fail)
        with pytest.raises(ZeroDivisionError, match="the task"):
            behind.start(lambda: done.append(1))
        behind.start(lambda: done.append(2))
    assert done == [2]
    with pytest.raises(ZeroDivisionError, match="the task"), OneBehind() as behind:
        behind.start(fail)


def block(task: Callable[[], None], error: BaseException) -> None:
    """End by an error while a task is in hand."""
    with OneBehind() as behind:
        behind.start(task)
        raise error


def test_the_first_error_is_the_one_to_see() -> None:
    with pytest.raises(ZeroDivisionError, match="the task"):
        block(fail, ValueError("what followed from it"))
    with pytest.raises(ValueError, match="alone"):
        block(lambda: None, ValueError("alone"))


def test_an_interruption_stays_one_and_waits_for_the_task() -> None:
    done: list[int] = []
    may_end = threading.Event()

    def task() -> None:
        may_end.wait(10)
        done.append(1)

    threading.Timer(0.05, may_end.set).start()
    with pytest.raises(KeyboardInterrupt):
        block(task, KeyboardInterrupt())
    assert done == [1]
