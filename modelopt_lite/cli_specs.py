"""The commands ``modelopt-lite specs``: what is known of models, held to transformers, drafted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from modelopt_lite.cli_show import AsJson, Trust, plain, print_json, set_up_torch, show
from modelopt_lite.errors import SpecError
from modelopt_lite.words import counted, near

specs_app = typer.Typer(no_args_is_help=True, help="What is known about models.")


@specs_app.command("list")
def specs_list(*, as_json: AsJson = False) -> None:
    """List the model types that have a spec."""
    from modelopt_lite.models import get_specs

    specs = sorted(get_specs(), key=lambda spec: spec.model_type)
    if as_json:
        print_json([spec.model_type for spec in specs])
        return
    table = Table("model_type", "experts", "transformers", box=None, pad_edge=False)
    for spec in specs:
        since = f">= {spec.min_transformers_version}" if spec.min_transformers_version else "-"
        table.add_row(spec.model_type, "yes" if spec.moe_spec else "", since)
    show(table)


@specs_app.command("show")
def specs_show(model_type: str, *, as_json: AsJson = False) -> None:
    """Show what is known about one model type."""
    from modelopt_lite.report_view import facts_table

    values = dataclasses.asdict(_known_spec(model_type))
    if as_json:
        print_json(values)
        return
    facts: dict[str, str] = {}
    for name, value in values.items():
        facts[name] = "" if isinstance(value, dict) else plain(value)
        if isinstance(value, dict):
            facts |= {f"  {field}": plain(content) for field, content in value.items()}
    show(facts_table(facts))


def _known_spec(model_type: str) -> Any:
    """Return a type's spec, or raise `SpecError` with the nearest name."""
    from modelopt_lite.models import get_spec, get_specs

    if (spec := get_spec(model_type)) is not None:
        return spec
    known = [spec.model_type for spec in get_specs()]
    raise SpecError(
        f"no spec for model_type {model_type!r}{near(model_type, known)} "
        f"(known: {', '.join(known)}); `modelopt-lite specs new {model_type}` writes a first draft"
    )


@specs_app.command("check")
def specs_check(
    types: Annotated[
        list[str] | None, typer.Argument(help="Model types; default all.", metavar="[TYPE]...")
    ] = None,
    *,
    ckpt: Annotated[
        str | None,
        typer.Option(
            help="Folder of a checkpoint, whose config, and code, is taken.", metavar="CKPT"
        ),
    ] = None,
    trust_remote_code: Trust = False,
    jobs: Annotated[int, typer.Option(min=1, help="Specs that are checked at once.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Hold specs to the installed transformers; exits with 1 where one is wrong.

    For each spec the smallest models of its type are built, with random weights, and every field is
    compared with them. With --ckpt they are built from its config; its weights are not read.
    """
    set_up_torch()
    from modelopt_lite.doctor.check import check_checkpoint
    from modelopt_lite.doctor.jobs import check_specs
    from modelopt_lite.models import get_specs

    if ckpt is not None:
        checked = [check_checkpoint(Path(ckpt), trust_remote_code=trust_remote_code)]
    else:
        specs = [_known_spec(t) for t in types] if types else get_specs()
        checked = check_specs(specs, jobs=jobs, report=_tell if len(specs) > 1 else None)
    _show_checked(checked, as_json=as_json)


@specs_app.command("new")
def specs_new(
    what: Annotated[
        str, typer.Argument(help="Folder of a checkpoint, or a model type.", metavar="CKPT_OR_TYPE")
    ],
    *,
    to: Annotated[
        str | None,
        typer.Option(help="Folder of packages; default the first of MODELOPT_LITE_MODELS_PATH."),
    ] = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write the first draft of a spec from what small models show, and check it."""
    set_up_torch()
    from modelopt_lite.doctor.new import write_first_draft

    file, checked, todo = write_first_draft(what, to, trust_remote_code=trust_remote_code)
    typer.echo(f"wrote {file}: {counted(todo, 'TODO')} left", err=as_json)
    _show_checked([checked], as_json=as_json)


def _tell(checked: Any, done: int, total: int) -> None:
    """Say on stderr that a spec was checked."""
    line = f"{done}/{total} {checked.model_type}: {checked.status}, {checked.seconds:.1f} s"
    typer.echo(line, err=True)


def _show_checked(checked: Any, *, as_json: bool) -> None:
    """Show what a check found; exit with 1 where a spec is wrong."""
    import transformers

    from modelopt_lite.doctor.view import check_data, check_table

    if as_json:
        print_json(check_data(checked, transformers.__version__))
    else:
        show(check_table(checked, transformers.__version__))
    if any(one.status == "wrong" for one in checked):
        raise typer.Exit(1)
