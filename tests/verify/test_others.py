"""The audit of llm-compressor's exports: nothing is wrong with them, and damage is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from damage import drop, edit_json, errors, set_tensor

from modelopt_lite.verify.audit import examine

DATA = Path(__file__).parents[1] / "data" / "llmcompressor"
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("scheme", "worst"),
    [("FP8_DYNAMIC", 0.03), ("NVFP4", 0.11), ("W4A16", 0.13), ("W4A16_ASYM", 0.13)],
)
def test_right_exports_are_clean_and_measured(scheme: str, worst: float) -> None:
    seen = examine(DATA / scheme, source=DATA / "source", deep=True)
    unchecked = [f for f in seen.findings if f.rule != "sidecar-missing"]
    assert {f.rule for f in unchecked} == ({"format-unchecked"} if "ASYM" in scheme else set())
    assert len(seen.errors) == 7
    for report in seen.errors.values():
        assert worst / 2 < report.relative < worst
        assert report.cosine == pytest.approx(1 - report.relative**2 / 2, abs=1e-3)
        assert report.sqnr == pytest.approx(-20 * torch.tensor(report.relative).log10().item())


@pytest.mark.parametrize(
    ("scheme", "engine", "rules"),
    [
        ("NVFP4", "vllm", set()),
        ("NVFP4", "transformers", set()),
        ("NVFP4", "compressed_tensors", set()),
        ("NVFP4", "tensorrt_llm", set()),  # what it does is not known, which is a warning
    ],
)
def test_engines(scheme: str, engine: str, rules: set[str]) -> None:
    assert errors(DATA / scheme, engines=(engine,)) == rules


def test_damage_is_found(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "NVFP4", tmp_path / "export"))
    set_tensor(f"{Q}.weight_global_scale", lambda t: t * 2)(folder)
    assert errors(folder) == {"group-scale"}
    found = errors(folder, source=DATA / "source", deep=True)
    assert found == {"group-scale", "weight-error"}
    drop(f"{Q}.weight_global_scale")(folder)
    assert errors(folder) == {"scale-missing"}
    edit_json(
        folder / "config.json", lambda c: c["quantization_config"]["ignore"].remove("lm_head")
    )
    assert errors(folder) == {"scale-missing", "unpacked-not-excluded"}
