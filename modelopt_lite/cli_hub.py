"""The command `push`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from modelopt_lite.cli_show import AsJson, print_json, show


def push(
    export: Annotated[str, typer.Argument(help="Folder of a finished export, of one dialect.")],
    repo_id: Annotated[str, typer.Argument(help="owner/name on the hub; made if need be.")],
    *,
    revision: Annotated[
        str | None, typer.Option(help="Branch, made if need be; default the main one.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a repository that is made.")
    ] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead.")
    ] = False,
    reports: Annotated[
        bool,
        typer.Option(
            "--reports", help="Upload the reports too, which tell folders, times and memory."
        ),
    ] = False,
    verify: Annotated[bool, typer.Option(help="Audit the export first.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, and upload nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Upload an export to the Hugging Face hub, with its model card."""
    from modelopt_lite import hub
    from modelopt_lite.report_view import facts_table
    from modelopt_lite.words import bytes_text, counted

    done = hub.push(
        export,
        repo_id,
        revision=revision,
        message=message,
        private=private,
        create_pr=create_pr,
        reports=reports,
        verify=verify,
        dry_run=dry_run,
    )
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    size = bytes_text(sum(done.files.values()))
    facts = {
        "would upload" if dry_run else "uploaded": f"{counted(len(done.files), 'file')}, {size}",
        "to": done.repo_id,
        **({"commit": done.url} if done.url else {}),
        **({"removed there": ", ".join(done.removed)} if done.removed else {}),
        "files": ", ".join(done.files),
    }
    show(facts_table(facts))
