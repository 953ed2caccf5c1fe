"""The parts of `benchmarks/parity.py` and `benchmarks/served.py` that need no peer."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The modules parity and served."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("parity"), importlib.import_module("served")
    for name in ("parity", "served"):
        sys.modules.pop(name, None)


def test_every_difference_is_seen(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sign of a zero, a dtype, a shape, a tensor of one side; and what has a reason."""
    parity, _ = scripts
    theirs = {name: torch.zeros(2, 3) for name in ("same", "sign", "dtype", "shape", "gone", "why")}
    ours = {name: tensor.clone() for name, tensor in theirs.items()}
    ours["sign"][0, 0] = -0.0
    ours["dtype"] = ours["dtype"].bfloat16()
    ours["shape"] = ours["shape"].reshape(3, 2)
    ours["why"] += 1
    ours["new"] = ours.pop("gone")
    monkeypatch.setattr(parity, "REASONS", (("llama", "fp.*", "why", "a reason"),))
    found = parity.compare(ours, theirs, "llama", "fp8")
    assert found.unnamed == ["dtype", "gone", "new", "shape", "sign"]
    assert (found.equal, found.named) == (1, {"a reason": ["why"]})
    assert "why" in parity.compare(ours, theirs, "mixtral", "fp8").unnamed
    assert found.cell == "**5 of 6 differ**"


def test_reasons_are_in_the_documentation(scripts: tuple[Any, Any]) -> None:
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    for *patterns, reason in scripts[0].REASONS:
        assert reason in text
        for pattern in patterns:
            re.compile(pattern)


def test_a_section_is_put_in_the_place_of_the_one_before(
    scripts: tuple[Any, Any], tmp_path: Path
) -> None:
    _, served = scripts
    document = tmp_path / "clients.md"
    document.write_text("# Who\n\nbefore\n")
    rows = [served.Served("m", "fp8", "modelopt", "-1", "-1", "runs", True, "0.1")]
    served.put(document, served.section(rows))
    once = document.read_text()
    assert once.startswith("# Who\n\nbefore\n\n")
    assert "| m | fp8 | modelopt | -1 | -1 | runs |" in once
    document.write_text(f"{once}\n## After\n")
    served.put(document, served.section(rows * 2))
    twice = document.read_text()
    assert twice.count(served.BEGIN) == twice.count(served.END) == 1
    assert twice.count("| m | fp8 |") == 2
    assert twice.endswith("\n\n## After\n")
