"""Export the small model of one type in several formats, audit included: what one process does.

`benchmarks/export_all.py` runs `work` once a type, each time in a process of its own: what a type
leaves in memory, or crashes, is no other's matter.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import small_models
import torch
import transformers
from export_tables import OK, REFUSED, Result

from modelopt_lite import quantize_and_export
from modelopt_lite.build import quiet_transformers
from modelopt_lite.errors import ModelOptLiteError, RecipeError
from modelopt_lite.models import ModelSpec, get_spec
from modelopt_lite.recipes import Recipe, load_recipe

TOKENS = torch.arange(3, 3 + 4 * 16).reshape(4, 16)
REPORTS = ("modelopt_lite_report.json", "report.html")  # name the release that made them


def work(
    model_type: str,
    exports: Sequence[tuple[str, str]],
    checkpoints: Path | None,
    limit: int,
    log: Path,
    answer: Any,
) -> None:
    """Export a type and send the `Result`; run in a process of its own.

    Args:
        model_type: A registered one.
        exports: Pairs of dialect and recipe.
        checkpoints: Where small checkpoints are kept; one that is there is taken. None: made anew.
        limit: Bytes of memory that the process may have.
        log: Where it writes what it prints.
        answer: The sending end of a pipe.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)  # sums have the same order on any machine
    start = time.perf_counter()
    result = examine(model_type, exports, checkpoints)
    result.release, result.machine = transformers.__version__, machine()
    result.seconds = time.perf_counter() - start
    result.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    answer.send(result)
    answer.close()
    sys.stdout.flush()


def examine(
    model_type: str, exports: Sequence[tuple[str, str]], checkpoints: Path | None
) -> Result:
    """Make a type's small checkpoint, or take the one that is kept, and export it."""
    spec = get_spec(model_type)
    assert spec is not None
    if why := small_models.absent(spec):
        return Result(why, expected=True)
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        source = (checkpoints or Path(folder)) / model_type
        result = examine_checkpoint(spec, source, exports, Path(folder))
        older = result.made_by != transformers.__version__
        if result.failed and older and (why := small_models.unread(source)):
            own = source.with_name(f"{model_type}@{transformers.__version__}")
            result = examine_checkpoint(spec, own, exports, Path(folder))
            result.unread = why
    return result


def examine_checkpoint(
    spec: ModelSpec, source: Path, exports: Sequence[tuple[str, str]], folder: Path
) -> Result:
    """Export the checkpoint in ``source``, which is made where there is none.

    Args:
        spec: That of its type.
        source: Its folder.
        exports: Pairs of dialect and recipe.
        folder: For what is removed again.
    """
    if not (source / "config.json").exists():
        made = folder / "made"
        if why := small_models.save(spec, made):
            return Result(why, expected=why.startswith(small_models.EXPECTED))
        source.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    result = Result(made_by=str(config.get("transformers_version", "")), source=digest(source))
    for dialect, recipe in exports:
        target, key = folder / "export", f"{dialect}/{recipe}"
        result.exports[key] = export(source, target, recipe, dialect)
        if result.exports[key] == OK:
            result.digests[key] = digest(target)
        shutil.rmtree(target, ignore_errors=True)
    return result


def export(source: Path, target: Path, recipe: str, dialect: str) -> str:
    """Export once, audit included; return `OK`, or the error in a line."""
    try:
        report = quantize_and_export(
            source,
            export_dir=target,
            recipe=small_groups(recipe),
            dialect=dialect,
            calib_data=[TOKENS],
            on_bad_shape="skip",
            progress=False,
        )
    except RecipeError as error:
        refused = "cannot keep" in str(error) and dialect != "modelopt"
        return f"{REFUSED if refused else ''}{small_models.told(error)}"
    except ModelOptLiteError as error:
        return small_models.told(error)
    except Exception as error:  # a fault of ours or of the model: told, and the run goes on
        traceback.print_exc()
        return small_models.told(error)
    return OK if report.quantized else "nothing was quantized"


def small_groups(recipe: str) -> Recipe:
    """Return a preset, INT4 in groups that divide the widths of small models."""
    loaded = load_recipe(recipe)
    return replace(loaded, group_size=(32, 16, 8)) if recipe.startswith("int4") else loaded


def digest(folder: Path) -> str:
    """Return what tells whether an export is another's to the byte: of tensors, of the rest."""
    tensors, rest = hashlib.sha256(), hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in REPORTS:
            kind = tensors if path.suffix == ".safetensors" else rest
            kind.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{tensors.hexdigest()[:12]} {rest.hexdigest()[:12]}"


def machine() -> str:
    """Return what bytes depend on besides the release of transformers."""
    python = ".".join(map(str, sys.version_info[:2]))
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, Python {python}"
