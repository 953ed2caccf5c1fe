"""Compare exports of fresh random models with those of NVIDIA Model Optimizer, tensor by tensor.

Run by ``nox -s parity``, which installs Model Optimizer 0.47 with transformers 5.14.1 in an
environment of its own. Each model gets weights of a seed that was not used before (``--seed`` takes
one again) and is exported by both, here with ``numerics="modelopt"``; every tensor is compared to
the last bit. The table goes to docs/parity.md. The command fails where tensors differ without a
reason in REASONS; docs/numerics.md has the reasons at length, with the tests that hold them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_lite import Recipe, quantize_and_export
from modelopt_lite.errors import ModelOptLiteError

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 256, "sliding_window": 16},
}


@dataclass(frozen=True)
class Format:
    """One column of the table: our recipe, and the peer's configuration of the same name."""

    recipe: str | Recipe
    config: str | None
    kv_cache: str | None = None
    peer_cache: str | None = None


FORMATS: dict[str, Format] = {
    "fp8": Format("fp8", "FP8_DEFAULT_CFG"),
    "fp8_pc_pt": Format("fp8_pc_pt", "FP8_PER_CHANNEL_PER_TOKEN_CFG"),
    "fp8_pb_wo": Format("fp8_pb_wo", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "int8_sq": Format("int8_sq", "INT8_SMOOTHQUANT_CFG"),
    "int8_wo": Format("int8_wo", "INT8_WEIGHT_ONLY_CFG"),
    "int4_wo": Format("int4_weight_only", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "int4_awq": Format("int4_awq", "INT4_AWQ_CFG"),
    "w4a8_awq": Format("w4a8_awq", "W4A8_AWQ_BETA_CFG"),
    "nvfp4": Format("nvfp4", "NVFP4_DEFAULT_CFG"),
    "w4a16_nvfp4": Format("w4a16_nvfp4", "W4A16_NVFP4_CFG"),
    "w4a8_nvfp4_fp8": Format("w4a8_nvfp4_fp8", "W4A8_NVFP4_FP8_CFG"),
    "nvfp4_mlp_only": Format("nvfp4_mlp_only", "NVFP4_MLP_ONLY_CFG"),
    "nvfp4_mlp_wo": Format("nvfp4_mlp_weight_only", "NVFP4_MLP_WEIGHT_ONLY_CFG"),
    "nvfp4_omlp_only": Format("nvfp4_omlp_only", "NVFP4_OMLP_ONLY_CFG"),
    "nvfp4_awq_lite": Format("nvfp4_awq_lite", "NVFP4_AWQ_LITE_CFG"),
    "mxfp4": Format("mxfp4", "MXFP4_DEFAULT_CFG"),
    "mxfp4_mlp_wo": Format("mxfp4_mlp_weight_only", "MXFP4_MLP_WEIGHT_ONLY_CFG"),
    # Without the static scale that our preset has: the peer calibrates nothing there.
    "w4a8_mxfp4_fp8": Format(
        Recipe(name="w4a8_mxfp4_fp8", weights="w4a8_mxfp4_fp8_dynamic"), "W4A8_MXFP4_FP8_CFG"
    ),
    "mxfp8": Format("mxfp8", "MXFP8_DEFAULT_CFG"),
    "fp8+kv_fp8": Format("fp8", "FP8_DEFAULT_CFG", "fp8", "FP8_KV_CFG"),
    "fp8+kv_fp8_affine": Format("fp8", "FP8_DEFAULT_CFG", "fp8_affine", "FP8_AFFINE_KV_CFG"),
    "nvfp4+kv_nvfp4": Format("nvfp4", "NVFP4_DEFAULT_CFG", "nvfp4", "NVFP4_KV_CFG"),
    "kv_fp8_only": Format(
        Recipe(name="kv", weights="none", kv_cache="fp8"), None, "fp8", "FP8_KV_CFG"
    ),
}
# Model, format and tensors that may differ, as patterns, and the name of the reason.
REASONS: tuple[tuple[str, str, str, str], ...] = (
    ("(qwen3_moe|mixtral|deepseek_v3)", "int8_sq", r".*\.experts\.\d+\..*", "experts are smoothed"),
    ("gpt_oss", "fp8_pc_pt", r".*\.experts\..*_proj(_weight_scale)?", "channels have scales"),
    ("gpt_oss", "fp8_pb_wo", r".*\.experts\..*_proj(_weight_scale)?", "blocks keep their scales"),
    ("gpt_oss", "w4a8_mxfp4_fp8", r".*\.experts\..*_input_scale", "inputs have scales as they run"),
)
# Model and format that are refused here, and the name of the reason.
REFUSED = {("deepseek_v3", "fp8+kv_fp8_affine"): "affine caches need whole heads"}
# Model, format, what the peer calls a tensor, and what the source does; the reason beside it.
NAMES_OF_THE_SOURCE = "names stay those of the source"
RENAMED: tuple[tuple[str, str, str, str], ...] = (
    *(
        ("mixtral", "fp8_pb_wo", rf"mlp\.(experts\.\d+)\.{theirs}", rf"block_sparse_moe.\1.{ours}")
        for theirs, ours in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    ),
    ("mixtral", "fp8_pb_wo", r"mlp\.gate\.", "block_sparse_moe.gate."),
)


@dataclass
class Compared:
    """What two exports have in common.

    Attributes:
        equal: How many tensors are the same to the last bit.
        named: Reason -> tensors that differ for it.
        unnamed: Tensors that differ for no reason that is known.
        problem: Why there is nothing to compare: which side refused, and what it said.
    """

    equal: int = 0
    named: dict[str, list[str]] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def cell(self) -> str:
        """A cell of the table, without what the notes say."""
        if self.unnamed:
            return f"**{len(self.unnamed)} of {len(self.unnamed) + self.equal} differ**"
        return f"{self.equal} equal" + "".join(f", {len(n)}: {r}" for r, n in self.named.items())


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the last bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (one, other)))


def renamed(name: str, model: str, fmt: str) -> str:
    """Return what the source calls a tensor that the peer has given another name."""
    for of_model, of_format, theirs, ours in RENAMED:
        if (of_model, of_format) == (model, fmt):
            name = re.sub(theirs, ours, name)
    return name


def compare(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], model: str, fmt: str
) -> Compared:
    """Compare every tensor of either side."""
    found = Compared()
    called = {renamed(name, model, fmt): name for name in theirs}
    theirs = {name: theirs[before] for name, before in called.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if name in ours and name in theirs and same(ours[name], theirs[name]):
            if called[name] == name:
                found.equal += 1
            else:
                found.named.setdefault(NAMES_OF_THE_SOURCE, []).append(name)
            continue
        for of_model, of_format, of_name, reason in REASONS:
            pairs = ((of_model, model), (of_format, fmt), (of_name, name))
            if all(re.fullmatch(pattern, value) for pattern, value in pairs):
                found.named.setdefault(reason, []).append(name)
                break
        else:
            found.unnamed.append(name)
    return found


def make_model(model: str, seed: int, folder: Path) -> Path:
    """Write a checkpoint with random weights, each matrix of its own size, and token ids."""
    source = folder / model
    config = transformers.AutoConfig.for_model(model, **{**SIZES, **MODELS[model]})
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for index, parameter in enumerate(made.parameters()):
            if parameter.ndim > 1:
                parameter.normal_(0, 0.03).mul_(2.0 ** (index % 5 - 2))
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(source)
    generator = torch.Generator().manual_seed(seed + 1)
    batches = {
        f"{n:03}": torch.randint(3, SIZES["vocab_size"], (2, 32), generator=generator)
        for n in range(3)
    }
    save_file(batches, source / "calib_ids.safetensors")
    return source


def run_peer(python: Path, source: Path, formats: list[str], folder: Path) -> dict[str, Path]:
    """Have the peer export a model in several formats; return where each lies."""
    outs = {name: folder / f"{source.name}-{name}-peer" for name in formats}
    jobs = [
        {
            "source": str(source),
            "out": str(outs[name]),
            "config": FORMATS[name].config,
            "kv_cache": FORMATS[name].peer_cache,
        }
        for name in formats
    ]
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs), encoding="utf-8")
    script = Path(__file__).parent / "parity_peer.py"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([python, script, file], check=True, stdout=subprocess.DEVNULL, env=environment)
    return outs


def run_ours(source: Path, name: str, out: Path) -> str:
    """Export a model with the peer's arithmetic; return what was refused."""
    fmt = FORMATS[name]
    data = load_file(source / "calib_ids.safetensors")
    try:
        quantize_and_export(
            source,
            export_dir=out,
            recipe=fmt.recipe,
            kv_cache=fmt.kv_cache,
            calib_data=[data[key] for key in sorted(data)],
            numerics="modelopt",
            device="cpu",
            progress=False,
        )
    except ModelOptLiteError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compare_formats(
    model: str, formats: list[str], seed: int, python: Path, folder: Path
) -> dict[str, Compared]:
    """Compare a model in several formats."""
    source = make_model(model, seed, folder)
    peers = run_peer(python, source, formats, folder)
    found = {}
    for name, peer in peers.items():
        out = folder / f"{model}-{name}"
        refused = run_ours(source, name, out)
        error = Path(f"{peer}.error")
        if error.exists():
            said = error.read_text(encoding="utf-8")
            here = "ours is refused, too" if refused else "ours is written"
            found[name] = Compared(problem=f"the peer fails ({here}): {said}")
        elif refused:
            reason = REFUSED.get((model, name))
            said = f"refused here ({reason}): {refused}"
            found[name] = Compared(problem=said, unnamed=[] if reason else ["all"])
        else:
            ours, theirs = (load_file(path / "model.safetensors") for path in (out, peer))
            found[name] = compare(ours, theirs, model, name)
        line = found[name].problem or found[name].cell
        print(f"{model} {name}: {line[:160]} {found[name].unnamed[:3] or ''}", flush=True)
    return found


def document(found: dict[str, dict[str, Compared]], seed: int, torch_version: str) -> str:
    """Return the text of docs/parity.md."""
    notes: list[str] = []

    def cell(compared: Compared | None) -> str:
        if compared is None:
            return ""
        if not compared.problem:
            return compared.cell
        said = compared.problem.replace("|", "/")[:240]
        if said not in notes:
            notes.append(said)
        return f"[{notes.index(said) + 1}]"

    models = list(found)
    titles = ("format", *models)
    formats = [name for name in FORMATS if any(name in found[model] for model in models)]
    rows = [(name, *(cell(found[model].get(name)) for model in models)) for name in formats]
    lines = [titles, tuple("---" for _ in titles), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    listed = "\n".join(f"{number}. {said}" for number, said in enumerate(notes, 1))
    return f"""# Parity with Model Optimizer

Made by `nox -s parity`; do not edit.

Fresh random models (seed {seed}), exported by Model Optimizer 0.47 and here with
`numerics="modelopt"`; both with transformers {transformers.__version__} and torch {torch_version},
one thread, {torch.backends.cpu.get_cpu_capability()}. A cell counts the tensors that are equal to
the last bit; others are named with the reason that [numerics.md](numerics.md) gives. What the peer
does not export on a CPU, or at all, is said below.

{table}

{listed}
"""


def main() -> None:
    """Compare everything and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of the peer's environment")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--rows", type=Path, help="file that keeps and adds up what runs found")
    parser.add_argument("--out", type=Path, default=Path("docs/parity.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, dict[str, Compared]] = {}
    if args.rows and args.rows.is_file():
        kept = json.loads(args.rows.read_text(encoding="utf-8"))
        found = {m: {f: Compared(**row) for f, row in rows.items()} for m, rows in kept.items()}
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            new = compare_formats(model, args.formats, args.seed, args.python, Path(folder))
            found[model] = found.get(model, {}) | new
            if args.rows:
                args.rows.write_text(json.dumps(found, default=vars, indent=1), encoding="utf-8")
    args.out.write_text(document(found, args.seed, torch.__version__), encoding="utf-8")
    bad = [
        f"{model} {name}: {', '.join(compared.unnamed[:5])} {compared.problem}"
        for model, formats in found.items()
        for name, compared in formats.items()
        if compared.unnamed
    ]
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
