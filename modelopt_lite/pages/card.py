"""``README.md`` of an export: the model card that hubs show.

It tells nothing of the run's times, places and memory: the same inputs give the same card. What a
source's own card says of license and language is kept; the card itself lies beside ours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from modelopt_lite.dialects.engines import ENGINES, verdict
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.pages.accuracy import accuracy_rows
from modelopt_lite.pages.command import command_line
from modelopt_lite.pages.facts import calibration_text
from modelopt_lite.pages.layers import by_reason
from modelopt_lite.recipes import load_recipe, preset_names
from modelopt_lite.recipes.written import recipe_text
from modelopt_lite.report import CARD_FILE, Report, write_whole
from modelopt_lite.words import bytes_text, counted, printable
from modelopt_lite.yamls import load_yaml

_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "library_name")
_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)")
_ACCURACY = re.compile(r"^## Accuracy$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_OUR_NAME = "modelopt-lite"
_SERVE = {"vLLM": "vllm serve {name}", "SGLang": "python -m sglang.launch_server --model {name}"}


def write_card(folder: Path, report: Report, dialect: str) -> None:
    """Write the card of one export, whose folder has everything else that it needs."""
    source = Path(report.details["source"])
    size = sum(map(_tensor_bytes, folder.glob("*.safetensors")))
    text = model_card(report, dialect, front_matter(source), size)
    write_whole(folder / CARD_FILE, printable(text))


def update_card(folder: Path, report: Report, dialect: str) -> None:
    """Tell in a card what was measured since; all else in it stays as its owner may have it by now.

    A card without the section, or none, is left as it is.
    """
    path = folder / CARD_FILE
    with suppress(FileNotFoundError, UnicodeDecodeError):
        old = path.read_text(encoding="utf-8")
        new = _ACCURACY.sub(lambda _: f"{_accuracy(report, dialect)}\n", old, count=1)
        write_whole(path, printable(new))


def model_card(report: Report, dialect: str, source_card: Mapping[str, Any], size: int) -> str:
    """Return the card of an export.

    Args:
        report: What was done.
        dialect: Name of the export's dialect.
        source_card: What the source's card says in its front matter.
        size: Bytes of the export's tensors.
    """
    base = base_model(report)
    parts = [
        f"---\n{_front(report, base, source_card)}---\n",
        f"# {_name(base)}-{report.recipe}\n",
        f"[{_name(base)}]({_link(base)}) quantized with modelopt-lite."
        if _link(base)
        else f"{_name(base)} quantized with modelopt-lite.",
        _facts(report, dialect, base, size),
        _accuracy(report, dialect),
        "## Engines\n",
        _engines(report, dialect),
        "## Made by\n",
        _made_by(report, dialect, base),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def base_model(report: Report) -> str:
    """Return the hub's id of the source where its place tells one, else the name of its folder."""
    source = Path(report.details["source"])
    for part in reversed(source.parts):
        if match := _HUB_CACHE.fullmatch(part):
            return f"{match[1]}/{match[2]}"
    return " ".join(source.name.splitlines())


def front_matter(source: Path) -> dict[str, Any]:
    """Return what a checkpoint's own card says before its text; nothing where that is malformed."""
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        text = (source / CARD_FILE).read_text(encoding="utf-8")
        head, mark, _ = text.removeprefix("---\n").partition("\n---")
        value = load_yaml(head) if mark and text.startswith("---\n") else None
        if isinstance(value, dict):
            return {str(key): value for key, value in value.items()}
    return {}


def _tensor_bytes(path: Path) -> int:
    """Return the bytes of a weight file behind its header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _front(report: Report, base: str, source_card: Mapping[str, Any]) -> str:
    data: dict[str, Any] = {}
    if "/" in base:
        data |= {"base_model": base, "base_model_relation": "quantized"}
    data |= {key: source_card[key] for key in _KEPT if key in source_card}
    data.setdefault("library_name", "transformers")
    tags = [_OUR_NAME, "quantized", *sorted(set(report.quantized.values()))]
    old = source_card.get("tags")
    tags += [tag for tag in old if isinstance(tag, str)] if isinstance(old, list) else []
    data["tags"] = [*dict.fromkeys(tags)]
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _name(base: str) -> str:
    return _cell(base.rpartition("/")[2])


def _link(base: str) -> str:
    return f"https://huggingface.co/{base}" if "/" in base else ""


def _facts(report: Report, dialect: str, base: str, size: int) -> str:
    formats = Counter(report.quantized.values())
    rows = [
        ("base model", base),
        ("recipe", report.recipe),
        *(
            (f"format `{fmt}`", counted(count, "matrix", "matrices"))
            for fmt, count in formats.items()
        ),
        ("key and value cache", str(report.details["recipe"].get("kv_cache") or "as it is")),
        ("names and configs", dialect),
        ("size", f"{bytes_text(size)}, of {bytes_text(report.source_bytes)}"),
        ("bits a weight", f"{8 * size / report.parameters:.2f}" if report.parameters else "-"),
        ("calibration", calibration_text(report, places=False)),
        *(
            (f"left as it is: {reason}", counted(sum(names.values()), "module"))
            for reason, names in by_reason(report.excluded).items()
        ),
    ]
    return _table(("", ""), rows)


def _accuracy(report: Report, dialect: str) -> str:
    """Return the section that tells what was measured."""
    text = (
        "Not measured. `modelopt-lite eval EXPORT --record` measures perplexity, and "
        "`modelopt-lite verify EXPORT --source CKPT --deep --text cpython --record` the "
        "divergence from the source; both write it here.\n"
    )
    rows = [row for row in report.accuracy if row.get("part", "") in {"", dialect}]
    return f"## Accuracy\n\n{_table(*accuracy_rows(rows)) if rows else text}"


def _engines(report: Report, dialect: str) -> str:
    experts = any(".experts." in name or name.endswith(".experts") for name in report.quantized)
    formats = [FORMATS[name] for name in dict.fromkeys(report.quantized.values())]
    rows, serve = [], []
    for engine in ENGINES:
        found = [
            (fmt, verdict(engine, dialect, fmt, experts=experts, beside=report.beside))
            for fmt in formats
        ]
        rules = [f"`{fmt.name}`: {v.rule}" for fmt, v in found if v.answer != "loads"]
        answers = {v.answer for _, v in found}
        word = "yes" if answers <= {"loads"} else "no" if "refused" in answers else "not known"
        rows.append((engine, word, "; ".join(rules)))
        if word == "yes" and engine in _SERVE:
            serve.append(_SERVE[engine].format(name="THIS_REPO"))
    text = _table(("engine", "loads it", "why not"), rows)
    return text + ("\n```sh\n" + "\n".join(serve) + "\n```\n" if serve else "")


def _made_by(report: Report, dialect: str, base: str) -> str:
    details = report.details
    versions = ", ".join(
        f"{name} {details['versions'][name]}"
        for name in ("modelopt_lite", "torch", "python")
        if name in details["versions"]
    )
    options = details["options"]
    if options.get("in_memory"):
        return f"A model in memory and a loop over it (`quantize`, `export_hf`), with {versions}."
    own, cache = _is_own(report)
    given = {
        "recipe": f"{report.recipe}.yaml" if own else report.recipe,
        "kv_cache": None if own else cache,
        "dialect": dialect,
        "numerics": details["numerics"],
        "on_bad_shape": options["on_bad_shape"],
        "moe_calibrate_all_experts": options["all_experts"],
        "seed": options["seed"],
        **report.calibrated_with,
    }
    defaults = {
        "dialect": "modelopt",
        "numerics": "exact",
        "on_bad_shape": "error",
        "moe_calibrate_all_experts": False,
        "seed": 0,
        "calib_size": 512,
        "calib_seq_len": 512,
    }
    parts = [f"```sh\n{command_line(base, given, defaults)}\n```\n", f"With {versions}.\n"]
    if own:
        parts.append(f"`{report.recipe}.yaml`:\n\n```yaml\n{report.recipe_text}```\n")
    return "\n".join(parts)


def _is_own(report: Report) -> tuple[bool, str | None]:
    """Return whether the recipe is no preset, and how the cache differs from a preset's."""
    if report.recipe not in preset_names():
        return True, None
    preset, cache = load_recipe(report.recipe), report.details["recipe"].get("kv_cache")
    if recipe_text(replace(preset, kv_cache=cache)) != report.recipe_text:
        return True, None
    return False, None if cache == preset.kv_cache else cache or "none"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    """A name from a checkpoint may hold anything: no new cell, line, or HTML comes of it."""
    for bad, good in (("|", "\\|"), ("\n", " "), ("\r", " "), ("<", "&lt;")):
        text = text.replace(bad, good)
    return text
