"""What the cases share: one call from a checkpoint to an export, and decoders of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_lite import quantize_and_export
from modelopt_lite.report import Report
from modelopt_lite.verify.audit import audit

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass
class Exported:
    """An export, read back without the package's own reader and formats."""

    folder: Path
    source: Path
    report: Report

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor."""
        return load_all(self.folder)

    @cached_property
    def original(self) -> dict[str, Tensor]:
        """Every tensor of the source."""
        return load_all(self.source)

    @property
    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        return read_json(self.folder / "config.json")

    @property
    def quantization(self) -> dict[str, Any]:
        """The section of hf_quant_config.json."""
        return dict(read_json(self.folder / "hf_quant_config.json")["quantization"])

    @property
    def excluded(self) -> set[str]:
        """Modules that the export says are not quantized; both homes must agree."""
        listed = self.quantization["exclude_modules"]
        assert set(listed) == set(self.config["quantization_config"]["ignore"])
        assert len(set(listed)) == len(listed)
        return set(listed)

    @property
    def packed(self) -> set[str]:
        """Modules whose weights are codes; stacked experts under the name of the tensor."""
        return {
            name.removesuffix(".weight")
            for name, t in self.tensors.items()
            if t.dtype in (torch.uint8, torch.float8_e4m3fn) and not name.endswith("_scale")
        }

    def scales(self, suffix: str) -> dict[str, Tensor]:
        """Module -> its scale."""
        ends = (f".{suffix}", f"_{suffix}")
        return {n[: -len(suffix) - 1]: t for n, t in self.tensors.items() if n.endswith(ends)}

    def value(self, module: str) -> Tensor:
        """Decode a matrix, [R, K]; of stacked experts [E, K, R]."""
        stacked = module in self.tensors
        joint = "_" if stacked else "."
        codes = self.tensors[module if stacked else f"{module}.weight"]
        scale = self.tensors[f"{module}{joint}weight_scale"]
        if codes.dtype == torch.float8_e4m3fn:
            return codes.float() * (scale if not scale.ndim else scale.float().unsqueeze(-1))
        second = self.tensors[f"{module}{joint}weight_scale_2"]
        if stacked:
            value = decode_nvfp4(codes.mT, scale.mT, second)
            return value.mT
        return decode_nvfp4(codes, scale, second)

    def problems(self) -> list[str]:
        """Run the audit with the source, values included."""
        findings = audit(self.folder, source=self.source, deep=True)
        return [f"[{f.rule}] {f.message}" for f in findings if f.severity == "error"]


def decode_nvfp4(codes: Tensor, scale: Tensor, second: Tensor) -> Tensor:
    """[..., R, K/2] bytes, low nibble first; a scale per 16 values of a row."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    values = E2M1[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    return values * scale.float().repeat_interleave(16, -1) * second


def load_all(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return dict(load_file(folder / "model.safetensors"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(read_json(index)["weight_map"].values())):
        tensors |= load_file(folder / file)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


Change = Callable[[dict[str, Any]], Any]


class Cases:
    """Helpers that the tests get as one fixture."""

    load_all = staticmethod(load_all)
    read_json = staticmethod(read_json)

    def __init__(self, tmp_path: Path, batches: Sequence[Tensor]) -> None:
        self.tmp_path = tmp_path
        self.batches = batches
        self.count = 0

    def run(self, source: Path, recipe: Any = "nvfp4", **options: Any) -> Exported:
        """Export with the standard batches."""
        self.count += 1
        out = self.tmp_path / f"out{self.count}"
        given = {"calib_data": self.batches, "progress": False, "export_dir": out, **options}
        report = quantize_and_export(source, recipe=recipe, **given)
        return Exported(Path(given["export_dir"]), source, report)

    def edit(self, folder: Path, change: Change) -> None:
        """Change the tensors of a single weight file."""
        tensors = dict(load_file(folder / "model.safetensors"))
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def config(self, folder: Path, change: Change) -> None:
        """Change config.json."""
        config = read_json(folder / "config.json")
        change(config)
        (folder / "config.json").write_text(json.dumps(config, indent=2))

    def shards(self, folder: Path, per_file: int = 5) -> dict[str, str]:
        """Split the single weight file; return the weight map."""
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = [names[i : i + per_file] for i in range(0, len(names), per_file)]
        weight_map: dict[str, str] = {}
        for number, part in enumerate(parts, start=1):
            file = f"model-{number:05}-of-{len(parts):05}.safetensors"
            save_file({n: tensors[n] for n in part}, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return weight_map

    def load(self, source: Path) -> Any:
        """The source in transformers, as a user loads it."""
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)


@pytest.fixture
def cases(tmp_path: Path, token_batches: list[Tensor]) -> Cases:
    return Cases(tmp_path, token_batches)
