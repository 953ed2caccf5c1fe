"""Run tasks of lm-evaluation-harness on a checkpoint, original or exported; the extra ``eval``.

All requests of a task go through the model together, one decoder layer in memory at a time: a
quantized checkpoint is decoded as it is read, and read once for all requests. Tasks that generate
read it once for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from modelopt_lite.calibrate.data import load_tokenizer
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.errors import RecipeError
from modelopt_lite.evaluate import open_job
from modelopt_lite.jsons import finite
from modelopt_lite.output import resolve_checkpoint
from modelopt_lite.progress import Progress, make_progress


def run_tasks(
    ckpt: str | Path,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    activations: bool = True,
    include_path: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: bool | Progress = False,
) -> list[dict[str, Any]]:
    """Evaluate a checkpoint on tasks.

    Args:
        ckpt: Folder or hub id; original, or quantized in any way that `open_source` reads.
        tasks: Names of tasks or groups.
        num_fewshot: Examples before each question; None: as the task has it.
        limit: The most questions of each task.
        batch_size: Sequences a batch; None: 8, fewer where the logits would be too large.
        device: Where the model runs.
        activations: As for `perplexity`.
        include_path: A folder with tasks of one's own.
        trust_remote_code: Allow code that the checkpoint brings.
        progress: True, or a function to follow it.

    Returns:
        For each task and metric a row of `modelopt_lite.pages.accuracy`: ``on``, ``value`` and,
        where the task has one, ``stderr``.

    Raises:
        RecipeError: The harness is not installed, or has no such task; or a number is too small.
        ModelOptLiteError: As for `perplexity`.
    """
    if not tasks or (limit is not None and limit < 1) or (num_fewshot or 0) < 0:
        raise RecipeError(
            f"tasks are {[*tasks]}, limit is {limit} and num_fewshot {num_fewshot}; name at least "
            "one task, and give a limit of at least 1 and no negative number of examples"
        )
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RecipeError(
            f"tasks need lm-evaluation-harness ({error}); pip install 'modelopt-lite[eval]'"
        ) from error
    from modelopt_lite.harness_model import LockstepModel

    manager = TaskManager(include_path=str(include_path) if include_path else None)
    if missing := [task for task in tasks if task not in manager.all_tasks]:
        raise RecipeError(
            f"the harness has no task {', '.join(map(repr, missing))}; lm_eval ls tasks lists all, "
            "--include-path adds a folder with your own"
        )
    folder = resolve_checkpoint(ckpt)
    with closing(open_source(folder)) as source, make_progress(progress) as tell:
        job = open_job(folder, source, trust_remote_code, device)
        tokenizer = load_tokenizer(folder, trust_remote_code)
        model = LockstepModel(job, tokenizer, tell, batch_size=batch_size, activations=activations)
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[*tasks],
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=False,
        )
    return _rows(found["results"])


def _rows(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the numbers of each task, whose keys are ``metric,filter``."""
    rows = []
    for task, values in results.items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if metric.endswith("_stderr") or isinstance(value, bool | str):
                continue
            if not isinstance(value, int | float) or metric in {"alias", "sample_len"}:
                continue
            row: dict[str, Any] = {"on": f"{task}: {metric}", "value": float(value)}
            if filtered and filtered != "none":
                row["on"] += f" ({filtered})"
            error = finite(values.get(f"{metric}_stderr,{filtered}"))
            if isinstance(error, int | float):
                row["stderr"] = float(error)
            rows.append(row)
    return rows
