"""The command ``modelopt-lite``: parses, calls the library, shows what came of it.

torch and transformers are imported inside the commands that need them: help and the lists of specs
and recipes answer at once.

Exit status: 0 done; 1 an error, or an audit that found one; 2 wrong usage; 3 done, but a strict run
had to fall back; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from modelopt_lite import __version__
from modelopt_lite.cli_options import RunOptions, with_run_options
from modelopt_lite.errors import (
    DegradedError,
    ModelOptLiteError,
    SpecError,
    loading_specs,
)

DEGRADED = 3
INTERRUPTED = 130


class _Commands(typer.core.TyperGroup):
    """Turns the library's errors into one line on stderr and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that ``ctx`` names."""
        try:
            with loading_specs():
                return super().invoke(ctx)
        except ModelOptLiteError as error:
            _show_error(error.code, str(error))
            status = DEGRADED if isinstance(error, DegradedError) else 1
            raise typer.Exit(status) from error
        except KeyboardInterrupt as error:
            typer.echo(str(error) or "interrupted; nothing was left behind", err=True)
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    cls=_Commands,
    help="Quantize Hugging Face checkpoints larger than your memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
specs_app = typer.Typer(no_args_is_help=True, help="What is known about models.")
recipes_app = typer.Typer(no_args_is_help=True, help="What to quantize, and how.")
app.add_typer(specs_app, name="specs")
app.add_typer(recipes_app, name="recipes")

Checkpoint = Annotated[str, typer.Argument(help="Folder of a checkpoint, or a hub id.")]
Bandwidth = Annotated[str, typer.Option(help="Of the disk, a second, to foretell its time.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line; a request to end (SIGTERM) cleans up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app(prog_name="modelopt-lite")


_WIDE = 10_000  # columns: what goes to a file or another program is not wrapped


def _show(what: Any) -> None:
    """Print for a person, to the width of the terminal; elsewhere unwrapped and not padded."""
    console = Console()
    if console.is_terminal:
        console.print(what)
        return
    lines = Console(width=_WIDE, file=io.StringIO(), color_system=None)
    lines.print(what)
    for line in lines.file.getvalue().splitlines():  # type: ignore[attr-defined]
        typer.echo(line.rstrip())


def _show_error(code: str, message: str) -> None:
    typer.secho(f"error [{code}]: {message}", err=True, fg=typer.colors.RED)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _set_up_torch() -> None:
    """Set what torch's libraries read from the environment as they are loaded.

    Threads that wait for each other spin by default: where other processes want the processors, a
    run of many small products then takes ten times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    from modelopt_lite.offload.memory import bound_caches

    bound_caches()


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Quantize Hugging Face checkpoints larger than your memory."""
    if version:
        typer.echo(f"modelopt-lite {__version__}")
        raise typer.Exit


@app.command()
@with_run_options
def quantize(ckpt: Checkpoint, options: RunOptions) -> None:
    """Quantize a checkpoint and write one that engines load."""
    _set_up_torch()
    from modelopt_lite.api import quantize_and_export
    from modelopt_lite.parallel.team import is_first_process
    from modelopt_lite.report import Report
    from modelopt_lite.report_view import report_table

    try:
        report = quantize_and_export(ckpt, **options.arguments())
    except DegradedError as error:
        if isinstance(error.report, Report) and is_first_process():
            _show(report_table(error.report))
        raise
    if is_first_process():
        _show(report_table(report))


@app.command()
@with_run_options
def plan(
    ckpt: Checkpoint,
    options: RunOptions,
    *,
    as_json: AsJson = False,
    read_bandwidth: Bandwidth = "1GB",
    write_bandwidth: Bandwidth = "1GB",
    world_size: Annotated[
        int, typer.Option(help="Processes that would run it with torchrun; starts none.")
    ] = 1,
) -> None:
    """Show what `quantize` with the same options would do; reads no weight, writes nothing."""
    from modelopt_lite.plan_view import plan_tables
    from modelopt_lite.preview import dry_run

    bandwidths = {"read_bandwidth": read_bandwidth, "write_bandwidth": write_bandwidth}
    described = dry_run(ckpt, world_size=world_size, **bandwidths, **options.arguments())
    if as_json:
        _print_json(described)
    else:
        _show(plan_tables(described))
    for problem in described["problems"]:
        _show_error(problem["code"], problem["message"])
    if described["problems"]:
        raise typer.Exit(1)


@app.command()
def verify(
    export: Annotated[str, typer.Argument(help="Folder of an export, or of one in each dialect.")],
    *,
    source: Annotated[
        str | None,
        typer.Option(
            help="What it was made from: names, shapes and the bytes of copies are compared.",
            metavar="CKPT",
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="With --source: dequantize and compare every matrix.")
    ] = False,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Only what these refuse or load wrongly: vllm, sglang, tensorrt_llm, "
            "transformers, compressed_tensors; several with commas."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Audit an export, of any tool; exits with 1 where a rule is broken."""
    _set_up_torch()
    from modelopt_lite.output import resolve_checkpoint
    from modelopt_lite.report_view import audit_view
    from modelopt_lite.verify.audit import examine
    from modelopt_lite.verify.opening import export_folders
    from modelopt_lite.verify.rules import engine_names

    if deep and source is None:
        raise typer.BadParameter("--deep compares with a source; give --source CKPT")
    engines = engine_names(engine or ())
    original = resolve_checkpoint(source) if source is not None else None
    folders = export_folders(resolve_checkpoint(export))
    audits = [examine(f, source=original, deep=deep, engines=engines) for f in folders]
    failed = any(audit.failed for audit in audits)
    if as_json:
        _print_json({"ok": not failed, "exports": [audit.as_dict() for audit in audits]})
    else:
        compared_with = None if original is None else str(original)
        for audit in audits:
            _show(audit_view(audit, compared_with, deep=deep))
    if failed:
        raise typer.Exit(1)


@app.command(name="eval")
def evaluate(
    ckpt: Checkpoint,
    *,
    text: Annotated[
        str | None, typer.Option(help="A .txt file; default the text that comes with CPython.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Blocks a batch.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs.")] = None,
    activations: Annotated[
        bool, typer.Option(help="Round inputs of quantized layers as engines do.")
    ] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code that the checkpoint brings.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show how far it is.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a checkpoint, original or exported."""
    _set_up_torch()
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
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    values = {"checkpoint": ckpt, **dataclasses.asdict(result)}
    if as_json:
        _print_json(values)
    else:
        _show(facts_table({k.replace("_", " "): _measured(k, v) for k, v in values.items()}))


def _measured(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if name == "seconds" else f"{value:,.4f}"
    return f"{value:,}" if type(value) is int else _plain(value)


@specs_app.command("list")
def specs_list(*, as_json: AsJson = False) -> None:
    """List the model types that have a spec."""
    from modelopt_lite.models import get_specs

    specs = sorted(get_specs(), key=lambda spec: spec.model_type)
    if as_json:
        _print_json([spec.model_type for spec in specs])
        return
    table = Table("model_type", "experts", "transformers", box=None, pad_edge=False)
    for spec in specs:
        since = f">= {spec.min_transformers_version}" if spec.min_transformers_version else "-"
        table.add_row(spec.model_type, "yes" if spec.moe_spec else "", since)
    _show(table)


@specs_app.command("show")
def specs_show(model_type: str, *, as_json: AsJson = False) -> None:
    """Show what is known about one model type."""
    from modelopt_lite.report_view import facts_table

    values = dataclasses.asdict(_known_spec(model_type))
    if as_json:
        _print_json(values)
        return
    facts: dict[str, str] = {}
    for name, value in values.items():
        facts[name] = "" if isinstance(value, dict) else _plain(value)
        if isinstance(value, dict):
            facts |= {f"  {field}": _plain(content) for field, content in value.items()}
    _show(facts_table(facts))


def _known_spec(model_type: str) -> Any:
    """Return a type's spec, or raise `SpecError` with the nearest name."""
    from modelopt_lite.models import get_spec, get_specs

    if (spec := get_spec(model_type)) is not None:
        return spec
    known = [spec.model_type for spec in get_specs()]
    near = difflib.get_close_matches(model_type, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SpecError(
        f"no spec for model_type {model_type!r}{hint} (known: {', '.join(known)}); "
        f"`modelopt-lite specs new {model_type}` writes a first draft"
    )


@specs_app.command("check")
def specs_check(
    types: Annotated[
        list[str] | None, typer.Argument(help="Model types; default all.", metavar="[TYPE]...")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Hold specs to the installed transformers; exits with 1 where one is wrong.

    For each spec the smallest models of its type are built, with random weights, and every field is
    compared with them.
    """
    _set_up_torch()
    import transformers

    from modelopt_lite.doctor.check import check_specs
    from modelopt_lite.doctor.view import check_data, check_table
    from modelopt_lite.models import get_specs

    specs = [_known_spec(t) for t in types] if types else get_specs()
    checked = check_specs(specs)
    if as_json:
        _print_json(check_data(checked, transformers.__version__))
    else:
        _show(check_table(checked, transformers.__version__))
    if any(one.status == "wrong" for one in checked):
        raise typer.Exit(1)


@recipes_app.command("list")
def recipes_list(*, as_json: AsJson = False) -> None:
    """List the presets."""
    from modelopt_lite.recipes import load_recipe, preset_names

    recipes = [load_recipe(name) for name in preset_names()]
    if as_json:
        _print_json([recipe.name for recipe in recipes])
        return
    table = Table("recipe", "what it does", box=None, pad_edge=False)
    for recipe in recipes:
        table.add_row(recipe.name, Text(recipe.description))
    _show(table)


@recipes_app.command("show")
def recipes_show(name: str, *, as_json: AsJson = False) -> None:
    """Show a preset, or a recipe file, as it is understood."""
    from modelopt_lite.recipes import load_recipe
    from modelopt_lite.report_view import facts_table

    values = dataclasses.asdict(load_recipe(name))
    if as_json:
        _print_json(values)
    else:
        _show(facts_table({key: _plain(value) for key, value in values.items()}))


def _plain(value: Any) -> str:
    """A value as text; a sequence of sequences takes a line for each."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_plain(item)}" for key, item in value.items()) or "-"
    if isinstance(value, tuple | list):
        nested = any(isinstance(item, tuple | list) for item in value)
        return ("\n" if nested else ", ").join(map(_element, value)) or "-"
    return "-" if value is None else str(value)


def _element(value: Any) -> str:
    """The same inside of a sequence; a sequence stands in parentheses."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_element, value))})"
    return str(value)
