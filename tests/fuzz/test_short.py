"""A little of `nox -s fuzz` in every run of the tests; see tests/helpers/fuzzing.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fuzzing import TARGETS, demands
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "given"

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def once(data: st.DataObject) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with demands(folder):
            TARGETS[name](data, folder)

    once()
