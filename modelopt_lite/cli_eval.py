"""The command `eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from modelopt_lite.cli_show import AsJson, Trust, plain, print_json, set_up_torch, show


def evaluate(
    ckpt: Annotated[str, typer.Argument(help="Folder of a checkpoint, or a hub id.")],
    *,
    text: Annotated[
        str | None, typer.Option(help="A .txt file; default the text that comes with CPython.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Blocks a batch.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs.")] = None,
    activations: Annotated[
        bool, typer.Option(help="Round inputs of quantized layers, keys and values as engines do.")
    ] = True,
    keep: Annotated[str | None, typer.Option(help="Folder to write all predictions into.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Folder of kept predictions to measure a divergence from.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="In the place of a text: tasks of lm-evaluation-harness, with commas."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Of tasks: examples before each question.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Of tasks: the most questions of each.")] = None,
    include_path: Annotated[
        str | None, typer.Option(help="Of tasks: a folder with your own.")
    ] = None,
    recording: Annotated[
        bool, typer.Option("--record", help="Write it into the export's report and model card.")
    ] = False,
    trust_remote_code: Trust = False,
    progress: Annotated[bool, typer.Option(help="Show how far it is.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a checkpoint, original or exported, or how it does at tasks."""
    set_up_torch()
    if recording:
        from modelopt_lite.record import check_recordable

        check_recordable(ckpt)
    if tasks is not None:
        if text is not None or keep is not None or against is not None or max_tokens is not None:
            raise typer.BadParameter("--tasks bring their own text; leave out the options of one")
        rows = _run_tasks(
            ckpt,
            tasks,
            num_fewshot=num_fewshot,
            limit=limit,
            include_path=include_path,
            batch_size=batch_size,
            device=device,
            activations=activations,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
        _show_tasks(ckpt, rows, as_json=as_json)
        for row in rows if recording else ():
            _record(ckpt, row)
        return
    if num_fewshot is not None or limit is not None or include_path is not None:
        raise typer.BadParameter("--num-fewshot, --limit and --include-path belong to --tasks")
    from modelopt_lite.evaluate import perplexity
    from modelopt_lite.report_view import facts_table

    result = perplexity(
        ckpt,
        text=Path(text) if text is not None else None,
        seq_len=seq_len,
        max_tokens=max_tokens,
        batch_size=batch_size,
        device=device,
        activations=activations,
        keep=keep,
        against=against,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    values = {"checkpoint": ckpt, **dataclasses.asdict(result)}
    if as_json:
        print_json(values)
    else:
        show(facts_table({k.replace("_", " "): _measured(k, v) for k, v in values.items()}))
    if recording:
        from modelopt_lite.record import text_label

        _record(
            ckpt,
            {
                "on": text_label(text),
                "perplexity": result.perplexity,
                "tokens": result.tokens,
                "kl": result.kl,
            },
        )


def _run_tasks(ckpt: str, tasks: str, **options: Any) -> list[dict[str, Any]]:
    from modelopt_lite.harness import run_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    return run_tasks(ckpt, names, **options)


def _show_tasks(ckpt: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    from modelopt_lite.pages.accuracy import accuracy_rows

    if as_json:
        print_json({"checkpoint": ckpt, "tasks": rows})
        return
    head, cells = accuracy_rows(rows)
    table = Table(*head, box=None, pad_edge=False)
    for row in cells:
        table.add_row(*map(Text, row))
    show(table)


def _record(export: str, measured: dict[str, Any]) -> None:
    from modelopt_lite.record import record

    record(export, measured)


def _measured(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if name == "seconds" else f"{value:,.4f}"
    return f"{value:,}" if type(value) is int else plain(value)
