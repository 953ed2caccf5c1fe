"""The same bytes whatever surrounds a run: hash seeds, locales, umask, imports, threads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modelopt_lite
from modelopt_lite import data_free, quantize_and_export, run
from modelopt_lite.report import OF_THE_RUN

MakeCheckpoint = Callable[..., Path]
TINY = Path(modelopt_lite.__file__).parent / "data" / "tiny_qwen3_moe"
SCRIPT = """
import json, os, sys
given = json.loads(sys.argv[1])
for name in given["first"]:
    __import__(name)
if given["umask"] is not None:
    os.umask(given["umask"])
if given["cwd"]:
    os.chdir(given["cwd"])
import random, torch
if given["drawn"]:
    torch.manual_seed(99); torch.rand(7); random.seed(5)
    torch.set_default_dtype(torch.float32)
import modelopt_lite
for recipe in given["recipes"]:
    modelopt_lite.quantize_and_export(
        given["source"], export_dir=f"{given['out']}/{recipe}", recipe=recipe, kv_cache=given["kv"],
        calib_data=given["ids"], calib_size=4, calib_seq_len=16, progress=False,
    )
"""
RECIPES = ("nvfp4", "int4_gptq")


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in OF_THE_RUN
    }


class Place:
    """A source, token ids, and what a run in a process of its own makes of them."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.source = folder, source
        self.ids = folder / "ids.safetensors"
        ids = torch.arange(4 * 16).reshape(4, 16) % 61 + 3
        save_file({"ids": ids}, self.ids)
        self.count = 0
        self.wanted = self.run()

    def run(self, variables: dict[str, str] | None = None, **changes: Any) -> dict[str, str]:
        self.count += 1
        out = self.folder / f"out-{self.count}"
        given = {
            "first": [],
            "umask": None,
            "cwd": None,
            "drawn": False,
            "recipes": RECIPES,
            "source": str(self.source),
            "ids": str(self.ids),
            "out": str(out),
            "kv": "fp8",
            **changes,
        }
        command = [sys.executable, "-c", SCRIPT, json.dumps(given)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = hashes(out)
        assert {name.partition("/")[0] for name in found} == set(given["recipes"])
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("surroundings")
    source = Path(shutil.copytree(TINY, folder / "source"))
    (source / "generation_config.json").write_text('{"note": "é"}', encoding="utf-8")
    return Place(folder, source)


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "4242", "TZ": "Asia/Tokyo"},
        {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "LANGUAGE": "tr"},
    ],
    ids=["hash seed", "hash seed and time zone", "ASCII", "Turkish"],
)
def test_variables(place: Place, variables: dict[str, str]) -> None:
    assert place.run(variables) == place.wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"umask": 0o077, "cwd": "/"},
        {"umask": 0},
        {"first": ["transformers", "scipy.optimize", "safetensors.torch"]},
        {"first": ["modelopt_lite.offload", "modelopt_lite.verify.audit", "torch"]},
        {"drawn": True, "recipes": [*reversed(RECIPES)]},
    ],
    ids=["umask and folder", "no umask", "others first", "ours first", "drawn, other order"],
)
def test_processes(place: Place, changes: dict[str, Any]) -> None:
    assert place.run(**changes) == place.wanted


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers(
    workers: int,
    checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that quantize a data-free run; units small enough that there are many."""
    monkeypatch.setattr("modelopt_lite.job.UNIT_BYTES", 4 << 10)
    source = checkpoint("mixtral")
    for name, count in (("a", 1), ("b", workers)):
        monkeypatch.setattr(run, "quantizer_count", lambda device, count=count: count)
        quantize_and_export(
            source, export_dir=tmp_path / name, recipe="w4a16_nvfp4", progress=False
        )
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert data_free.quantizer_count(torch.device("cpu")) >= 1
