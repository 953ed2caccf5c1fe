"""What `diff` says of two exports that differ in one thing each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import (
    GOLDEN,
    KV,
    NVFP4,
    Q,
    copied,
    drop,
    edit_json,
    put,
    set_tensor,
    sharded,
    with_byte,
    write_index,
)
from typer.testing import CliRunner

from modelopt_lite import cli
from modelopt_lite.verify.diff import Difference, diff

ORIGINAL = GOLDEN / NVFP4 / "export"


def changed(tmp_path: Path, change: Callable[[Path], Any]) -> Difference:
    folder = copied(NVFP4, tmp_path)
    change(folder)
    return diff(ORIGINAL, folder)


def test_nothing(tmp_path: Path) -> None:
    def shard(folder: Path) -> None:
        write_index(folder, sharded(folder))

    got = changed(tmp_path, shard)
    assert got == Difference()
    assert not got.found


def test_tensors_of_one_side(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        drop("model.norm.weight")(folder)
        put("model.new", torch.ones(3))(folder)

    first, second = changed(tmp_path, change).tensors
    assert (first.name, first.kind, first.b) == ("model.new", "only in B", "float32 [3]")
    assert (second.name, second.kind, second.b) == ("model.norm.weight", "only in A", None)


def test_codes_are_counted_and_decoded(tmp_path: Path) -> None:
    """One byte holds two codes: 0x76 is 4 above 6, whatever stood there before."""
    got = changed(tmp_path, set_tensor(f"{Q}.weight", with_byte(3, 0x76)))
    [tensor] = got.tensors
    assert (tensor.name, tensor.kind) == (f"{Q}.weight", "values")
    assert (tensor.differing, tensor.elements) == (1, 128 * 64)
    [value] = got.values
    assert value.name == f"{Q}.weight"

    from safetensors.torch import load_file

    tensors = load_file(ORIGINAL / "model.safetensors")
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    before = int(tensors[f"{Q}.weight"][0, 3])
    step = float(tensors[f"{Q}.weight_scale"][0, 0]) * float(tensors[f"{Q}.weight_scale_2"])
    moved = max(abs(e2m1[before & 15] - 4), abs(e2m1[before >> 4] - 6)) * step
    assert value.largest == pytest.approx(moved, rel=0.01)


def test_a_scale_moves_the_whole_matrix(tmp_path: Path) -> None:
    got = changed(tmp_path, set_tensor(f"{Q}.weight_scale_2", lambda t: t * 1.5))
    assert [t.name for t in got.tensors] == [f"{Q}.weight_scale_2"]
    assert got.values[0].relative == pytest.approx(0.5, rel=0.01)


def test_dtypes_shapes_and_plain_values(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        set_tensor("model.norm.weight", lambda t: t.float() + 1)(folder)
        set_tensor("lm_head.weight", lambda t: t[:100].contiguous())(folder)

    got = changed(tmp_path, change)
    assert [(t.name, t.kind) for t in got.tensors] == [
        ("lm_head.weight", "shape"),
        ("model.norm.weight", "dtype"),
    ]
    assert [(v.name, v.largest) for v in got.values] == [("model.norm.weight", 1.0)]


def test_configs_and_files(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        edit_json(
            folder / "hf_quant_config.json", lambda c: c["quantization"].update(group_size=32)
        )
        (folder / "generation_config.json").write_text("{}")
        (folder / "extra.txt").write_text("x")

    got = changed(tmp_path, change)
    assert got.configs == {"hf_quant_config.json: quantization.group_size": (16, 32)}
    assert got.files == {"extra.txt": "only in B", "generation_config.json": "bytes"}


def test_two_formats_of_one_model() -> None:
    got = diff(GOLDEN / "llama-fp8" / "export", ORIGINAL)
    kinds = {t.name: t.kind for t in got.tensors}
    assert kinds[f"{Q}.weight"] == "dtype"
    assert kinds[f"{Q}.weight_scale_2"] == "only in B"
    assert len(got.values) == 14
    assert all(0.02 < v.relative < 0.2 for v in got.values)
    assert "config.json: quantization_config.quant_algo" in got.configs


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["diff", *map(str, arguments)])


def test_the_command_ends_as_diff_does(tmp_path: Path) -> None:
    same, other = run(ORIGINAL, ORIGINAL), run(ORIGINAL, GOLDEN / KV / "export")
    assert (same.exit_code, other.exit_code) == (0, 1)
    assert same.stdout == ""
    assert "k_proj.k_scale" in other.stdout
    assert "only in B" in other.stdout
    shown = json.loads(run(ORIGINAL, GOLDEN / KV / "export", "--json").stdout)
    assert shown["differ"]
    assert len(shown["tensors"]) == 4
    trouble = run(ORIGINAL, tmp_path / "nowhere")
    assert trouble.exit_code == 2
    assert "error [MOL100]" in trouble.stderr
