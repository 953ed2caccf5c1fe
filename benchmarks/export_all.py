"""Export a small model of every registered type in several formats, and write docs/models.md.

Each type's smallest model is saved with seeded weights in bfloat16 and exported; every export is
audited. What transformers cannot build here, and what does not export, is named with the reason.
Results are kept by release of transformers in docs/models.json, so that runs in several
environments, or of a few types at a time, make one table. Run by ``nox -s tests_transformers``.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

from modelopt_lite import quantize_and_export
from modelopt_lite.build import quiet_transformers
from modelopt_lite.doctor.instance import known_here, model_class
from modelopt_lite.doctor.shrink import Sizes, shrink
from modelopt_lite.errors import ModelOptLiteError
from modelopt_lite.models import ModelSpec, get_specs

DOCS = Path(__file__).resolve().parents[1] / "docs"
EXPORTS = {
    "modelopt": ("fp8", "nvfp4", "int4_awq"),
    "compressed-tensors": ("fp8", "nvfp4", "int4_weight_only"),
}
UNIT = 16  # widths are multiples of it; a matrix narrower than a group of 128 is left as it is
# What config classes have no usable default for, and what switches experts on.
GIVEN: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse"],
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "topk_group": 1,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "top_k_experts": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "nemotron": {"num_key_value_heads": 2},
}
GIVEN["gemma4"] = {"text_config": GIVEN["gemma4_text"]}
TOKENS = torch.arange(3, 3 + 4 * 16).reshape(4, 16)


def merged(small: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a config, those given in place of others, within nested ones too."""
    inner = {k: merged(small.get(k) or {}, v) for k, v in given.items() if isinstance(v, dict)}
    return {**small, **given, **inner}


def save_small(model_type: str, folder: Path) -> str:
    """Write a small checkpoint of a type; return what keeps it from being exported, or nothing."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    small = shrink(config_class(), Sizes(unit=UNIT))
    config = config_class(**merged(small, GIVEN.get(model_type, {})))
    cls, kind = model_class(config)
    if kind != "causal LM":
        return f"predicts no next token ({kind})"
    torch.manual_seed(0)
    model = cls._from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():  # classes leave some of them as memory was
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
        elif not parameter.isfinite().all():
            torch.nn.init.ones_(parameter)
    model.save_pretrained(folder)
    return ""


def absent(spec: ModelSpec) -> str:
    """Return why a type cannot be built in this environment, or nothing."""
    if spec.modeling_source == "remote_code":
        return "its code comes with the checkpoint"
    early = Version(transformers.__version__) < Version(spec.min_transformers_version or "0")
    if early or not known_here(spec.model_type):
        return f"not in transformers {transformers.__version__}"
    return ""


def told(error: Exception) -> str:
    """Return an error in one line, without the folders of whoever ran this."""
    message = re.sub(r"/\S*/site-packages/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {re.sub(r'/tmp/[^ :]+', '(folder)', message)}"


def export(source: Path, recipe: str, dialect: str) -> str:
    """Export once, audit included; return "ok", or the error's first line."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = quantize_and_export(
                source,
                export_dir=Path(folder) / "export",
                recipe=recipe,
                dialect=dialect,
                calib_data=[TOKENS],
                on_bad_shape="skip",
                progress=False,
            )
        except ModelOptLiteError as error:
            return told(error)
        except Exception as error:  # a fault of ours or of the model: told, and the run goes on
            traceback.print_exc(limit=-3)
            return told(error)
    return "ok" if report.quantized else "nothing was quantized"


def examine(spec: ModelSpec, exports: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the result of each export of a type; under "" why there are none."""
    if why := absent(spec):
        return {"": why}
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        source = Path(folder)
        try:
            why = save_small(spec.model_type, source)
        except Exception as error:  # config and model classes may raise anything
            why = f"no small model: {told(error)}"
        if why:
            return {"": why}
        return {f"{d}/{r}": export(source, r, d) for d, r in exports}


def table(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return docs/models.md: types by release, and below it what does not export and why."""
    releases = sorted(results, key=Version)
    types = sorted(spec.model_type for spec in get_specs())
    columns = [f"{d}/{r}" for d, recipes in EXPORTS.items() for r in recipes]
    lines = [
        "# Models and formats",
        "",
        "Made by `benchmarks/export_all.py`; do not edit. Each cell counts the exports of a small "
        "model with seeded weights that were written and passed the audit, of those that were run "
        f"(at most {len(columns)}: {', '.join(columns)}). `-`: not run, or not in that release.",
        "",
        f"| model type | {' | '.join(releases)} |",
        f"| --- |{' --- |' * len(releases)}",
    ]
    for name in types:
        cells = []
        for release in releases:
            got = {k: v for k, v in results[release].get(name, {}).items() if k}
            cells.append(f"{sum(v == 'ok' for v in got.values())}/{len(got)}" if got else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "## What does not export, and why", ""]
    for release in releases:
        for name in types:
            for key, result in results[release].get(name, {}).items():
                if result != "ok" and not result.startswith("not in transformers"):
                    what = f" {key}" if key else ""
                    lines.append(f"- {name}{what}, transformers {release}: {result[:300]}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Export the types asked for, keep the results, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; default all")
    parser.add_argument("--dialects", nargs="*", default=list(EXPORTS), choices=list(EXPORTS))
    parser.add_argument("--recipes", nargs="*", help="default: all of the table")
    parser.add_argument("--results", type=Path, default=DOCS / "models.json")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where one fails")
    args = parser.parse_args()
    exports = [
        (d, r) for d in args.dialects for r in EXPORTS[d] if not args.recipes or r in args.recipes
    ]
    results: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {}
    mine = results.setdefault(transformers.__version__, {})
    failed = 0
    for spec in get_specs():
        if args.types and spec.model_type not in args.types:
            continue
        start = time.perf_counter()
        got = examine(spec, exports)
        mine[spec.model_type] = (
            got
            if "" in got
            else {**{k: v for k, v in mine.get(spec.model_type, {}).items() if k}, **got}
        )
        bad = {k: v for k, v in got.items() if k and v != "ok"}
        failed += bool(bad)
        told = got.get("") or ("; ".join(f"{k}: {v[:160]}" for k, v in bad.items()) or "ok")
        print(f"{spec.model_type}: {told} ({time.perf_counter() - start:.1f} s)", flush=True)
        args.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        gc.collect()
    (DOCS / "models.md").write_text(table(results))
    return int(args.strict and failed > 0)


if __name__ == "__main__":
    sys.exit(main())
