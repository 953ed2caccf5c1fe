"""Each spec is checked in a process of its own: order, reports, memory, and how one may end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from modelopt_lite.doctor import jobs
from modelopt_lite.doctor.findings import Checked
from modelopt_lite.models import ModelSpec, get_spec


def specs_of(*types: str) -> list[ModelSpec]:
    found = [get_spec(t) for t in types]
    assert all(found)
    return [spec for spec in found if spec is not None]


def stand_in(monkeypatch: pytest.MonkeyPatch, check: Callable[[ModelSpec], Checked]) -> None:
    monkeypatch.setattr(jobs, "check_spec", check)


@pytest.mark.parametrize("at_once", [1, 3])
def test_results_are_in_the_order_of_the_specs(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    stand_in(monkeypatch, lambda spec: Checked(spec.model_type, "ok", why=str(os.getpid())))
    told: list[tuple[str, int, int]] = []
    types = ("qwen3_moe", "llama", "gpt_oss", "gemma3")
    checked = jobs.check_specs(
        specs_of(*types),
        jobs=at_once,
        report=lambda one, done, total: told.append((one.model_type, done, total)),
    )
    assert [one.model_type for one in checked] == list(types)
    assert sorted(name for name, _, _ in told) == sorted(types)
    assert [(done, total) for _, done, total in told] == [(n, 4) for n in (1, 2, 3, 4)]
    processes = [int(one.why) for one in checked]
    assert len({*processes, os.getpid()}) == 5


def test_a_process_that_dies_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(spec: ModelSpec) -> Checked:
        if spec.model_type == "llama":
            os.kill(os.getpid(), signal.SIGKILL)
        return Checked(spec.model_type, "ok")

    stand_in(monkeypatch, check)
    killed, fine = jobs.check_specs(specs_of("llama", "gpt_oss"))
    assert fine.status == "ok"
    assert killed.status == "wrong"
    assert killed.findings[0].found == "its process ended with status -9"


def test_what_a_type_imports_and_builds_ends_with_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "transformers.models.helium.modeling_helium"
    monkeypatch.delitem(sys.modules, module, raising=False)  # another test may have imported it
    [checked] = jobs.check_specs(specs_of("helium"))
    assert checked.status == "ok", checked.findings
    assert "Helium" in checked.why
    assert module not in sys.modules
