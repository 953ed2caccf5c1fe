"""Load every compressed-tensors export with transformers, and write docs/clients.md.

Run by ``nox -s clients``, in an environment with the package compressed-tensors. Small models with
seeded weights are exported with every preset; each export is loaded compressed and decompressed.
Checked are the keys, the weights (bit for bit with what this package reads), the logits with inputs
left alone (bit for bit with the model of those weights), and the mean log-probability with rounded
inputs. The command fails where one of them does not hold although the table says "loads".
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from client_sources import read_back
from safetensors.torch import save_file
from served import kept_section
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from modelopt_lite import perplexity, quantize_and_export
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.dialects.engines import ENGINES, verdict
from modelopt_lite.dialects.known import DIALECTS
from modelopt_lite.errors import RecipeError
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes import Recipe, load_recipe, preset_names

VOCABULARY = 256
NATS = 0.02  # how far mean log-probabilities with rounded inputs may lie apart
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
EXPERTS = {**SIZES, "intermediate_size": 128, "num_experts_per_tok": 2}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **{**EXPERTS, "head_dim": 64}, moe_intermediate_size=128, num_experts=4
    ),
    "mixtral": MixtralConfig(**EXPERTS, num_local_experts=4),
}
MIXED = """weights: nvfp4
overrides:
  - modules: ["*.self_attn.*"]
    weights: fp8
  - modules: ["*.down_proj"]
    weights: int4_weight_only
"""


@dataclass(frozen=True)
class Outcome:
    """What transformers made of one export."""

    model: str
    recipe: str
    kv_cache: str
    result: str
    logits: str = ""
    nats: str = ""
    good: bool = True

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        return self.model, self.recipe, self.kv_cache, self.result, self.logits, self.nats


def tokens(seed: int) -> Tensor:
    """Return token ids [4, 64]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (4, 64), generator=generator)


def make_models(folder: Path) -> dict[str, Path]:
    """Write the models and return where each lies."""
    made = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        made[name] = folder / name.replace(", ", "-")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(made[name])
    return made


def decoded_copy(export: Path, folder: Path) -> Path:
    """Write what this package reads of an export as a plain checkpoint."""
    folder.mkdir()
    with open_source(export) as source:
        tensors = {name: source.read(name).clone() for name in source.tensors}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(source.config))
    return folder


def load(export: Path, *, compressed: bool) -> tuple[Any, dict[str, Any]]:
    """Return a model as transformers loads it, and what is wrong with its keys."""
    how = CompressedTensorsConfig(run_compressed=compressed)
    model, info = AutoModelForCausalLM.from_pretrained(
        export, dtype="auto", quantization_config=how, output_loading_info=True
    )
    return model, {key: value for key, value in info.items() if value}


def mean_nll(model: Any, ids: Tensor) -> float:
    """Return the mean negative log-likelihood of all but the first token of each row."""
    logits = model(ids).logits[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def examine(export: Path, scratch: Path) -> tuple[str, str, bool]:
    """Return how logits and log-probabilities compare with ours, and whether all is well."""
    ids = tokens(2)
    plain = AutoModelForCausalLM.from_pretrained(decoded_copy(export, scratch), dtype="auto")
    wanted = plain(ids).logits
    ours = perplexity(export, text=ids).nll
    equal, apart = True, 0.0
    for compressed in (True, False):
        model, wrong = load(export, compressed=compressed)
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: {next(iter(wrong.values()))}"[:200])
        apart = max(apart, abs(mean_nll(model, ids) - ours))
        for module in model.modules():
            module.quantization_enabled = False
        equal = equal and torch.equal(model(ids).logits, wanted)
    return "equal" if equal else "differ", f"{apart:.4f}", equal and apart <= NATS


def outcome(
    model: str, source: Path, recipe: str | Path, kv_cache: str | None, work: Path
) -> Outcome:
    """Export a model, and say what transformers makes of it."""
    name = recipe.stem if isinstance(recipe, Path) else recipe
    of = (model, name, kv_cache or "-")
    export = work / "export"
    try:
        report = quantize_and_export(
            source,
            export_dir=export,
            recipe=recipe,
            kv_cache=kv_cache,
            calib_data=[tokens(1)],
            dialect="compressed-tensors",
            progress=False,
        )
    except RecipeError as error:
        rule = str(error).partition(" in all): ")[2].partition("; choose")[0]
        return Outcome(*of, f"refused by the dialect: {rule}" if rule else "selects nothing here")
    formats = {FORMATS[fmt] for fmt in report.quantized.values()}
    experts = any(".experts." in module for module in report.quantized)
    known = [verdict("transformers", "compressed-tensors", fmt, experts=experts) for fmt in formats]
    if refused := [v for v in known if v.answer == "refused"]:
        try:
            examine(export, work / "plain")
        except (ValueError, RuntimeError):
            return Outcome(*of, f"refused: {refused[0].rule}")
        return Outcome(*of, "loads although it should be refused", good=False)
    try:
        logits, nats, good = examine(export, work / "plain")
    except (ValueError, RuntimeError) as error:
        return Outcome(*of, f"fails: {error}"[:300].replace("\n", " "), good=False)
    return Outcome(*of, "loads", logits, nats, good)


def settled_presets() -> list[str]:
    """Return the presets whose formats are not searched: those search among these."""
    return [name for name in preset_names() if load_recipe(name).auto_quantize is None]


def outcomes(folder: Path) -> Iterator[Outcome]:
    """Yield what becomes of every preset, of mixed precision and of the FP8 cache."""
    sources = make_models(folder)
    mixed = folder / "mixed.yaml"
    mixed.write_text(MIXED)
    cases: list[tuple[str, str | Path, str | None]] = [
        ("llama", name, None) for name in settled_presets()
    ]
    some = ("fp8", "int4_weight_only", "int8", "nvfp4")
    cases += [(model, name, None) for model in list(sources)[1:] for name in some]
    cases += [("qwen3_moe", "int8_weight_only", None), ("mixtral", "nvfp4_experts_only", None)]
    cases += [("llama", "fp8", "fp8"), ("llama", "nvfp4", "fp8"), ("llama", mixed, None)]
    for model, recipe, kv_cache in cases:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            found = outcome(model, sources[model], recipe, kv_cache, Path(work))
        print(" | ".join(found.cells), flush=True)
        yield found


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def answer(engine: str, dialect: str, recipe: Recipe) -> tuple[str, str]:
    """Return what an engine does with a recipe's exports, and its rule where it may refuse one."""
    fmt = FORMATS[recipe.formats[0]]
    if recipe.algorithm.rank:
        found = verdict(engine, dialect, fmt, beside="factors")
    else:
        found = verdict(engine, dialect, fmt)
        if recipe.algorithm.smooths and found.answer == "loads":
            kept = verdict(engine, dialect, fmt, beside="scale").rule
            if dialect != "modelopt":
                kept = "this package refuses the dialect"
            return "loads after folding", f"where a scale stays beside a matrix: {kept}"
    if found.answer == "refused":
        return "refused", found.rule
    return {"loads": "loads", "unknown": "?"}[found.answer], ""


def answers() -> str:
    """Preset x dialect x engine."""
    notes: list[str] = []

    def cell(word: str, rule: str) -> str:
        if rule and rule not in notes:
            notes.append(rule)
        return f"{word} [{notes.index(rule) + 1}]" if rule else word

    rows = []
    for preset in settled_presets():
        for dialect, kind in DIALECTS.items():
            recipe = load_recipe(preset)
            fmts = [FORMATS[name] for name in recipe.formats]
            held = kind(torch.bfloat16)
            problems = [p for f in fmts if (p := held.problem(f, (256, 256)))]
            if recipe.algorithm.rank and (problem := held.factors_problem()):
                problems.append(problem)
            if problems:
                cells = [cell("refused", f"by this package: {problems[0]}")] * len(ENGINES)
            else:
                cells = [cell(*answer(engine, dialect, recipe)) for engine in ENGINES]
            rows.append((preset, dialect, *cells))
    listed = "\n".join(f"{number}. {rule}" for number, rule in enumerate(notes, 1))
    return f"{table(('preset', 'dialect', *ENGINES), rows)}\n\n{listed}"


def document(found: list[Outcome], sources: list[tuple[str, str, str]]) -> str:
    """Return the text of docs/clients.md."""
    import compressed_tensors
    import transformers

    titles = ("model", "recipe", "KV cache", "result", "logits, inputs left", "nats apart")
    return f"""# Who loads what

Made by `nox -s clients` and `nox -s served`; do not edit.

## By preset, dialect and engine

What vLLM 0.32.0, SGLang 0.5.23, TensorRT-LLM and transformers 5.14.1 do with the linear layers of
an export. "?" means that no source of theirs was found to say so and nothing was run. Presets
that search scales of input channels (AWQ, SmoothQuant) leave a `pre_quant_scale` where no norm or
linear takes it up ("loads after folding": where all are taken up, which `plan` tells), and SVDQuant
leaves one and two factors beside each matrix. No engine is known to load either; `quantize`
says so, as it does of each format that none is known to load in the chosen dialect.

{answers()}

Engines take experts one by one from either dialect. transformers 5 joins the experts of a layer and
decompresses integers in words alone (`int4_weight_only`, `int8_weight_only`), so it refuses other
formats of such models in the compressed-tensors dialect.

## Run: the compressed-tensors dialect in transformers

transformers {transformers.__version__}, compressed-tensors {compressed_tensors.__version__}, torch
{torch.__version__}, on a CPU, each export loaded compressed and decompressed, with no missing and
no unexpected keys. Models have two layers, a hidden size of 256 and seeded weights. "logits"
compares those of weights alone with the model of what this package reads, bit for bit; "nats apart"
is the difference of the mean log-probability of 256 tokens, with inputs rounded, from that of
`evaluate`, which computes quotients in float32 where transformers does in bfloat16; at most {NATS}.

{table(titles, [o.cells for o in found])}

## Read: what compressed-tensors writes

A matrix [128, 256] compressed by the package itself, by its own presets, and read by this one:
compared bit for bit with what the package decompresses it to.

{table(("preset", "format", "values"), [*sources])}
"""


def main() -> None:
    """Run everything and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/clients.md"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        found, sources = list(outcomes(Path(folder))), list(read_back())
    of_vllm = kept_section(args.out)  # made by another command, in another environment
    text = document(found, sources) + (f"\n{of_vllm}\n" if of_vllm else "")
    args.out.write_text(text, encoding="utf-8")
    bad = [o.cells for o in found if not o.good] + [s for s in sources if s[-1] != "equal"]
    if bad:
        sys.exit("\n".join(" | ".join(cells) for cells in bad))


if __name__ == "__main__":
    main()
