"""The parts of `benchmarks/parity.py` and `benchmarks/served.py` that need no peer."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelopt_lite import quantize_and_export

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


def test_names_that_the_peer_changed_are_undone(scripts: tuple[Any, Any]) -> None:
    """The tensor is compared under the source's name, and counted apart."""
    parity, _ = scripts
    value = torch.ones(2)
    theirs = {"model.layers.0.mlp.experts.3.up_proj.weight": value, "lm_head.weight": value}
    ours = {"model.layers.0.block_sparse_moe.experts.3.w3.weight": value, "lm_head.weight": value}
    found = parity.compare(ours, theirs, "mixtral", "fp8_pb_wo")
    assert found.named == {parity.NAMES_OF_THE_SOURCE: [next(iter(ours))]}
    assert (found.equal, found.unnamed) == (1, [])
    assert len(parity.compare(ours, theirs, "mixtral", "fp8").unnamed) == 2


def test_mixtral_keeps_its_names_in_block_fp8(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 128)
    source, out = checkpoint("mixtral", **sizes), tmp_path / "out"
    recipe = "fp8_2d_blockwise_weight_only"
    quantize_and_export(source, export_dir=out, recipe=recipe, numerics="modelopt", progress=False)
    written = load_file(out / "model.safetensors").keys()
    assert {name for name in written if not name.endswith("_scale")} == set(
        load_file(source / "model.safetensors")
    )
    assert any("block_sparse_moe.experts.0.w1.weight_scale" in name for name in written)


def test_reasons_are_in_the_documentation(scripts: tuple[Any, Any]) -> None:
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    parity, _ = scripts
    reasons = {reason for *_, reason in parity.REASONS}
    assert len(reasons) > 3
    for name in (*reasons, parity.NAMES_OF_THE_SOURCE, *parity.REFUSED.values()):
        assert f"- *{name}*:" in text, name
    for *patterns, _reason in parity.REASONS:
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
