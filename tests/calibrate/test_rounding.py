"""Which scale rounds the inputs of which matrix."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_lite.build import build_meta_model
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.rounding import InputRounding
from modelopt_lite.checkpoint.dequant import DequantizedSource, open_source
from modelopt_lite.checkpoint.names import NameMap, Piece, TensorGroup, map_names
from modelopt_lite.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CPU = torch.device("cpu")


def opened(folder: Path) -> tuple[DequantizedSource, NameMap]:
    source = open_source(folder)
    assert isinstance(source, DequantizedSource)
    model = build_meta_model(folder, source.config, trust_remote_code=False)
    return source, map_names(model, {name: info.shape for name, info in source.tensors.items()})


def round_fp8(x: Tensor, scale: float) -> Tensor:
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_stacked_experts_share_one_scale_batched_or_one_by_one() -> None:
    source, names = opened(GOLDEN / "gpt_oss-fp8" / "export")
    rounding = InputRounding(source, names, CPU)
    name = next(n for n in source.encoded if n.endswith("experts.gate_up_proj"))
    experts, width = source.tensors[name].shape[:2]
    x = random(experts, 3, width)
    expected = round_fp8(x, source.input_scales[name])
    whole = rounding.visit(Site(name), x, True)
    assert whole is not None
    assert torch.equal(whole, expected)
    single = rounding.visit(Site(name, 1), x[1], False)
    assert single is not None
    assert torch.equal(single, expected[1])


def test_experts_in_one_parameter_keep_their_scales_and_fused_matrices_take_the_larger() -> None:
    source, names = opened(GOLDEN / "llama-fp8" / "export")
    layer = "model.layers.0.mlp"
    gate, up = f"{layer}.gate_proj.weight", f"{layer}.up_proj.weight"
    source.input_scales[f"{layer}.gate_proj"] = 0.25
    source.input_scales[f"{layer}.up_proj"] = 2.0

    apart = TensorGroup((gate, up), ("w",), pieces=(Piece(gate, (0,)), Piece(up, (1,))))
    rounding = InputRounding(source, replace(names, groups=(apart,)), CPU)
    x = random(3, 4, 32)
    whole = rounding.visit(Site("w"), x, True)
    assert whole is not None
    assert torch.equal(whole[0], round_fp8(x[0], 0.25))
    assert torch.equal(whole[1], round_fp8(x[1], 2.0))
    assert torch.equal(whole[2], x[2])  # an expert that is not quantized

    halves = (Piece(gate, (0, slice(0, 8))), Piece(up, (0, slice(8, 16))))
    fused = TensorGroup((gate, up), ("w",), pieces=halves)
    rounding = InputRounding(source, replace(names, groups=(fused,)), CPU)
    single = rounding.visit(Site("w", 0), x[0], False)
    assert single is not None
    assert torch.equal(single, round_fp8(x[0], 2.0))


def test_what_is_not_quantized_and_what_is_empty_is_left_alone() -> None:
    source, names = opened(GOLDEN / "llama-fp8" / "export")
    rounding = InputRounding(source, names, CPU)
    assert rounding.entries == {name for name in source.encoded if name.endswith(".weight")}
    assert rounding.visit(Site("lm_head.weight"), random(3, 4), False) is None
    assert rounding.visit(Site(min(rounding.entries)), random(0, 4), False) is None


def test_other_methods_are_left_alone(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "llama-fp8" / "export", tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    source, names = opened(folder)
    assert source.encoded
    assert not InputRounding(source, names, CPU).entries


def test_missing_scale_is_an_error(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "llama-fp8" / "export", tmp_path / "export")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.input_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"0\.mlp\.down_proj' has no input_scale"):
        InputRounding(*opened(folder), CPU)
