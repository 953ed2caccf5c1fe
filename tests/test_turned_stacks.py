"""Stacks of experts that checkpoints hold either way round give one export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from modelopt_lite import quantize_and_export
from modelopt_lite.doctor.instance import instances
from modelopt_lite.verify.audit import audit


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5"), reason="a release that loads either"
)
def test_both_orientations_give_the_same_export(tmp_path: Path) -> None:
    model = instances("qwen3_vl_moe")[0].model
    exports = []
    for kind in ("upright", "turned"):
        source = tmp_path / kind
        model.save_pretrained(source)
        tensors = load_file(source / "model.safetensors")
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16()
            if tensor.ndim == 3 and kind == "turned":
                tensors[name] = tensors[name].mT.contiguous()
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        report = quantize_and_export(
            source, export_dir=tmp_path / f"{kind}-out", recipe="int8_weight_only", progress=False
        )
        assert report is not None
        findings = audit(tmp_path / f"{kind}-out", source=source, deep=True)
        assert not [f for f in findings if f.severity == "error"]
        exports.append(load_file(tmp_path / f"{kind}-out" / "model.safetensors"))
    upright, turned = exports
    assert any(".experts.3.up_proj.weight" in name for name in upright)
    assert upright.keys() == turned.keys()
    for name, tensor in upright.items():
        assert torch.equal(tensor, turned[name]), name
