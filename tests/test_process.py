"""What is set for the whole process: when the collector works, and that it is left as found."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from modelopt_lite.process import (
    collector_paused,
    compute_on,
    only_new_collected,
    use_huge_pages,
)


def test_the_collector_is_left_as_found() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_what_was_made_meanwhile_counts_as_old() -> None:
    """The next collection would else begin with all of it."""
    assert gc.get_freeze_count() == 0
    with collector_paused():
        kept = [[[]] for _ in range(1000)]  # type: ignore[var-annotated]
    young = {id(made) for made in gc.get_objects(generation=0)}
    assert not young & {id(made) for made in kept}
    assert gc.get_freeze_count() == 0


def test_what_a_user_has_frozen_stays_so() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with collector_paused():
        kept = [[[]] for _ in range(1000)]  # type: ignore[var-annotated]
    after = gc.get_freeze_count()
    gc.unfreeze()
    assert before - len(kept) < after < before + len(kept)
    assert before > 10_000


def test_what_stays_is_left_out_until_the_end() -> None:
    with only_new_collected():
        first = gc.get_freeze_count()
        with collector_paused(stays=True):
            kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        assert gc.get_freeze_count() >= first + len(kept)
    assert gc.get_freeze_count() == 0


def test_what_a_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    use_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    use_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"


def test_functions_for_the_end_of_the_process_are_called() -> None:
    code = """
import atexit, weakref
class Thing: pass
thing = Thing()
atexit.register(print, "first")
from modelopt_lite.process import exit_at_once
exit_at_once(), exit_at_once()
weakref.finalize(thing, print, "second")
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert sorted(run.stdout.split()) == ["first", "second"]


def test_threads_of_one_thread_are_its_own() -> None:
    found: dict[str, int] = {}

    def limited() -> None:
        compute_on(1)
        found["limited"] = torch.get_num_threads()

    def usual() -> None:
        torch.ones(8).sum()  # torch asks at the first operation of a thread
        found["usual"] = torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for work in (limited, usual):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert found == {"limited": 1, "usual": 3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
