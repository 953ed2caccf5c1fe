"""Run exports in vLLM on a CPU, and write what it makes of them into docs/clients.md.

Run by ``nox -s served``, which installs vLLM's CPU build in an environment of its own. Each export
is loaded by the engine as it is, and the mean log-probability that it gives to the tokens of four
prompts is held against that of this package's own simulation (`modelopt_lite.perplexity`, which
rounds weights and inputs). The command fails where the two lie further apart than NATS although the
table says that the engine's build has the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

import modelopt_lite
from modelopt_lite import Recipe, perplexity, quantize_and_export
from modelopt_lite.calibrate.text import evaluation_text
from modelopt_lite.errors import RecipeError

NATS = 0.02
# So many that the mean is determined: by how much is told below the table.
PROMPTS, LENGTH = 64, 256
HAS_AMX = torch.cpu._is_amx_tile_supported()
BEGIN, END = "<!-- made by: nox -s served -->", "<!-- end -->"
WHY = f"""
Why {PROMPTS} prompts: INT8 with one static scale for all inputs costs SmolLM2 most of a nat a
token, as its inputs have outliers, and by how much a token suffers is chance. With embeddings moved
at random by a step of bfloat16 or none, the mean over 508 tokens went from -4.007 to -4.104 by
`evaluate`, from -4.009 to -4.172 by products of integers that are rounded once, as kernels do it,
and the original's from -3.086 to -3.090 (`python benchmarks/served_int8.py`). A scale for each
token (`int8_per_channel_per_token`) loses far less.
"""
HERE = Path(__file__).parent
DATA = Path(modelopt_lite.__file__).parent / "data"
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # so that tokens differ in what is predicted for them
    "dtype": "bfloat16",
}
SEEDED = {
    "llama, hidden 512": LlamaConfig(**SIZES),
    "qwen3, hidden 512": Qwen3Config(**SIZES, head_dim=64),
    "mixtral, hidden 512": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
BUNDLED, SMOLLM2 = "tiny_qwen3_moe (trained)", "SmolLM2-135M-Instruct"
# What reads the outliers of SmolLM2 is left: what is compared then is arithmetic, see WHY.
NO_DOWN = Recipe(name="int8, down_proj left", weights="int8", exclude=("*.down_proj",))
# Without AMX llama's feed-forward layers ask for silu_and_mul_quant, which the CPU build lacks.
FP8_NO_DOWN = Recipe(name="fp8, down_proj left", weights="fp8", exclude=("*.down_proj",))
# Model, recipe, dialect, and where it must run: by the kernels that the CPU build has. Those of
# quantized experts, of FP8 in blocks, and of static FP8 in the compressed-tensors dialect take a
# processor with AMX; NVFP4 and MXFP8 have none.
Case = tuple[str, str | Recipe, str, str]
EVERYWHERE, WITH_AMX, NOWHERE = "everywhere", "with AMX", "nowhere"
CASES: tuple[Case, ...] = (
    (SMOLLM2, "fp8", "modelopt", WITH_AMX),
    (SMOLLM2, FP8_NO_DOWN, "modelopt", EVERYWHERE),
    (SMOLLM2, "fp8_per_channel_per_token", "modelopt", EVERYWHERE),
    (SMOLLM2, "int8", "compressed-tensors", EVERYWHERE),
    (SMOLLM2, NO_DOWN, "compressed-tensors", EVERYWHERE),
    (SMOLLM2, "int8_per_channel_per_token", "compressed-tensors", EVERYWHERE),
    (BUNDLED, "fp8", "modelopt", WITH_AMX),
    (BUNDLED, "int8", "compressed-tensors", NOWHERE),  # its experts want dynamic scales of inputs
    (BUNDLED, "int8_per_channel_per_token", "compressed-tensors", WITH_AMX),
    ("llama, hidden 512", "fp8_2d_blockwise_weight_only", "modelopt", WITH_AMX),
    ("llama, hidden 512", "int4_weight_only", "compressed-tensors", EVERYWHERE),
    ("llama, hidden 512", "int4_gptq", "compressed-tensors", EVERYWHERE),
    ("llama, hidden 512", "fp8", "modelopt", WITH_AMX),
    ("llama, hidden 512", "fp8", "compressed-tensors", WITH_AMX),
    ("qwen3, hidden 512", "fp8", "modelopt", EVERYWHERE),
    ("qwen3, hidden 512", "fp8", "compressed-tensors", WITH_AMX),
    ("llama, hidden 512", "int8", "compressed-tensors", EVERYWHERE),
    ("llama, hidden 512", "int8_per_channel_per_token", "compressed-tensors", EVERYWHERE),
    ("llama, hidden 512", "fp8_per_channel_per_token", "modelopt", EVERYWHERE),
    ("llama, hidden 512", "fp8_per_channel_per_token", "compressed-tensors", EVERYWHERE),
    ("mixtral, hidden 512", "fp8", "modelopt", WITH_AMX),
    ("llama, hidden 512", "nvfp4", "modelopt", NOWHERE),
    ("llama, hidden 512", "nvfp4", "compressed-tensors", NOWHERE),
    ("llama, hidden 512", "mxfp8", "modelopt", NOWHERE),
    (BUNDLED, "int4_weight_only", "compressed-tensors", WITH_AMX),
)


@dataclass(frozen=True)
class Served:
    """What the engine made of one export."""

    model: str
    recipe: str
    dialect: str
    ours: str
    engine: str
    result: str
    good: bool
    version: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        return self.model, self.recipe, self.dialect, self.ours, self.engine, self.result


def prompts(source: Path) -> Tensor:
    """Return token ids [PROMPTS, LENGTH]: of text, where the model has a tokenizer."""
    if not (source / "tokenizer.json").is_file():
        vocabulary = AutoConfig.from_pretrained(source).vocab_size
        generator = torch.Generator().manual_seed(7)
        return torch.randint(3, vocabulary, (PROMPTS, LENGTH), generator=generator)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(evaluation_text(), return_tensors="pt")["input_ids"]
    return ids[0, : PROMPTS * LENGTH].view(PROMPTS, LENGTH)


def source_of(model: str, folder: Path, smollm2: Path | None) -> Path | None:
    """Return the checkpoint of a model, made where it has to be; None where it is not here."""
    if model == BUNDLED:
        return DATA / "tiny_qwen3_moe"
    if model == SMOLLM2:
        return smollm2
    source = folder / model.replace(", ", "-").replace(" ", "")
    if not source.is_dir():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(SEEDED[model], dtype=torch.bfloat16)
        made.save_pretrained(source)
    return source


def ask_engine(python: Path, export: Path, ids: Tensor, work: Path) -> dict[str, Any]:
    """Return what vLLM finds, or ``{"error": why it does not}``."""
    (work / "ids.json").write_text(json.dumps(ids.tolist()))
    out = work / "found.json"
    command = [python, HERE / "vllm_logprobs.py", export, work / "ids.json", out]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    if ran.returncode or not out.is_file():
        told = ran.stderr.partition("Traceback")[2].partition("Processed prompts:")[0]
        said = " ".join(told.split()) or "no output"
        at = max(said.rfind("Error: "), said.rfind("Exception: "))
        return {"error": said[at:].partition(": ")[2][:300] if at >= 0 else said[-300:]}
    return dict(json.loads(out.read_text()))


def label_of(case: Case) -> str:
    """Return what the table calls a case's recipe."""
    return case[1] if isinstance(case[1], str) else case[1].name


def serve(case: Case, source: Path, python: Path, work: Path) -> Served:
    """Export a model, and run the export in the engine."""
    (model, recipe, dialect, where), label = case, label_of(case)
    runs = where == EVERYWHERE or (where == WITH_AMX and HAS_AMX)
    ids, export = prompts(source), work / "export"
    options: dict[str, Any] = {"calib_size": 16, "calib_seq_len": 256}
    if not (source / "tokenizer.json").is_file():
        generator = torch.Generator().manual_seed(11)
        options = {"calib_data": [torch.randint(3, int(ids.max()), (4, 64), generator=generator)]}
    options |= {"recipe": recipe, "dialect": dialect, "progress": False}
    try:
        quantize_and_export(source, export_dir=export, **options)
    except RecipeError as error:
        return Served(model, label, dialect, "-", "-", f"refused: {error}"[:200], False)
    ours = -perplexity(export, text=ids).nll
    found = ask_engine(python, export, ids, work)
    if "error" in found:
        said = found["error"].replace("|", "/")
        return Served(model, label, dialect, f"{ours:.4f}", "-", f"does not run: {said}", not runs)
    apart = abs(found["logprob"] - ours)
    good = apart <= NATS
    result = f"runs, {apart:.4f} nats apart{'' if good else ': too far'}"
    engine = f"{found['logprob']:.4f}"
    return Served(model, label, dialect, f"{ours:.4f}", engine, result, good, found["version"])


def section(rows: list[Served]) -> str:
    """Return the section of docs/clients.md."""
    version = next((row.version for row in rows if row.version), "?")
    titles = ("model", "recipe", "dialect", "ours", "vLLM", "result")
    lines = [titles, tuple("---" for _ in titles), *(row.cells for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"""{BEGIN}

## Run: vLLM

vLLM {version}, its CPU build, nothing in it replaced; {_processor()}. "ours" and
"vLLM" are the mean log-probability of {PROMPTS * (LENGTH - 1):,} tokens in {PROMPTS} prompts (of
text, where the model is a trained one): by `evaluate`, which rounds weights and inputs, and by the
engine. They may lie {NATS} nats apart. If the build has no kernel on this processor, what it says
is there: by its source those of quantized experts, of FP8 in blocks, and of FP8 with static scales
in the compressed-tensors dialect need AMX; NVFP4 and MXFP8 have none, nor have experts in INT8
whose inputs have static scales. Without AMX the engine's code of llama joins the activation before
`down_proj` with the rounding to FP8 in one operation, which its CPU build lacks: FP8 with static
scales runs there in other models, or where `down_proj` is left.

{table}
{WHY}
{END}"""


def _processor() -> str:
    tiles = "with" if HAS_AMX else "without"
    return f"{torch.backends.cpu.get_cpu_capability()} {tiles} AMX"


def kept_section(document: Path) -> str:
    """Return the section that a document has, with its marks; nothing where it has none."""
    content = document.read_text(encoding="utf-8") if document.is_file() else ""
    found = content.partition(BEGIN)[2].partition(END)[0]
    return f"{BEGIN}{found}{END}" if found else ""


def put(document: Path, text: str) -> None:
    """Put the section into a document, in the place of the one before or at its end."""
    content = document.read_text(encoding="utf-8")
    before = kept_section(document)
    content = content.replace(before, text) if before else f"{content.rstrip()}\n\n{text}\n"
    document.write_text(content, encoding="utf-8")


def main() -> None:
    """Run everything and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--smollm2", type=Path, help="folder of the converted checkpoint")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of the cases to run")
    parser.add_argument("--rows", type=Path, help="file that keeps finished rows")
    parser.add_argument("--out", type=Path, default=Path("docs/clients.md"))
    args = parser.parse_args()
    kept: dict[str, Any] = {}
    if args.rows and args.rows.is_file():
        kept = json.loads(args.rows.read_text())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            key = " / ".join((case[0], label_of(case), case[2]))
            if key not in kept and (args.only is None or number in args.only):
                source = source_of(case[0], Path(folder), args.smollm2)
                if source is None:
                    continue
                with tempfile.TemporaryDirectory(dir=folder) as work:
                    row = serve(case, source, args.python, Path(work))
                print(" | ".join(row.cells), flush=True)
                kept[key] = vars(row)
                if args.rows:
                    args.rows.write_text(json.dumps(kept, indent=1))
            if key in kept:
                rows.append(Served(**kept[key]))
    put(args.out, section(rows))
    if bad := [row for row in rows if not row.good]:
        sys.exit("\n".join(" | ".join(row.cells) for row in bad))


if __name__ == "__main__":
    main()
