"""The command ``modelopt-lite``: parses, calls the library, shows what came of it.

torch and transformers are imported inside the commands that need them: help and the lists of specs
and recipes answer at once.

Exit status: 0 done; 1 an error, or an audit that found one; 2 wrong usage; 3 done, but a strict run
had to fall back; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import signal
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from modelopt_lite import __version__
from modelopt_lite.cli_audit import diff, verify
from modelopt_lite.cli_eval import evaluate
from modelopt_lite.cli_hub import push
from modelopt_lite.cli_options import RunOptions, with_run_options
from modelopt_lite.cli_show import (
    AsJson,
    plain,
    print_json,
    set_up_torch,
    show,
    show_error,
)
from modelopt_lite.cli_specs import specs_app
from modelopt_lite.errors import (
    DegradedError,
    ModelOptLiteError,
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
            show_error(error.code, str(error))
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
recipes_app = typer.Typer(no_args_is_help=True, help="What to quantize, and how.")
app.add_typer(specs_app, name="specs")
app.add_typer(recipes_app, name="recipes")

Checkpoint = Annotated[str, typer.Argument(help="Folder of a checkpoint, or a hub id.")]
Bandwidth = Annotated[str, typer.Option(help="Of the disk, a second, to foretell its time.")]


def main() -> None:
    """Run the command line; a request to end (SIGTERM) cleans up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app(prog_name="modelopt-lite")


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
    set_up_torch()
    from modelopt_lite.api import quantize_and_export
    from modelopt_lite.parallel.team import is_first_process
    from modelopt_lite.report import Report
    from modelopt_lite.report_view import report_table

    try:
        report = quantize_and_export(ckpt, **options.arguments())
    except DegradedError as error:
        if isinstance(error.report, Report) and is_first_process():
            show(report_table(error.report))
        raise
    if is_first_process():
        show(report_table(report))


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
        print_json(described)
    else:
        show(plan_tables(described))
    for problem in described["problems"]:
        show_error(problem["code"], problem["message"])
    if described["problems"]:
        raise typer.Exit(1)


app.command()(verify)
app.command()(diff)
app.command(name="eval")(evaluate)
app.command()(push)


@recipes_app.command("list")
def recipes_list(*, as_json: AsJson = False) -> None:
    """List the presets."""
    from modelopt_lite.recipes import load_recipe, preset_names

    recipes = [load_recipe(name) for name in preset_names()]
    if as_json:
        print_json([recipe.name for recipe in recipes])
        return
    table = Table("recipe", "what it does", box=None, pad_edge=False)
    for recipe in recipes:
        table.add_row(recipe.name, Text(recipe.description))
    show(table)


@recipes_app.command("show")
def recipes_show(name: str, *, as_json: AsJson = False) -> None:
    """Show a preset, or a recipe file, as it is understood."""
    from modelopt_lite.recipes import load_recipe
    from modelopt_lite.report_view import facts_table

    recipe = load_recipe(name)
    values = dataclasses.asdict(recipe)
    if recipe.auto_quantize is None:  # else the search decides how inputs are rounded
        values["inputs"] = recipe.input_format
    if as_json:
        print_json(values)
    else:
        show(facts_table({key: plain(value) for key, value in values.items()}))
