"""Upload a finished export to the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelopt_lite.checkpoint.journal import JOURNAL
from modelopt_lite.errors import AuditError, OutputError
from modelopt_lite.output import is_unfinished
from modelopt_lite.paths import asked_path
from modelopt_lite.record import read_report
from modelopt_lite.report import OF_THE_RUN
from modelopt_lite.verify.audit import examine
from modelopt_lite.words import counted, printable

# What engines would mix up: what exports have by these names, and another one may lack.
_OURS = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|hf_quant_config\.json"
).fullmatch


@dataclass(frozen=True, slots=True)
class Upload:
    """What was uploaded, or would be.

    Attributes:
        repo_id: Where to.
        files: Names in the repository -> bytes.
        url: Of the commit; empty for a dry run.
        removed: Names in the repository that were of an earlier export, and that this one lacks.
    """

    repo_id: str
    files: dict[str, int]
    url: str = ""
    removed: tuple[str, ...] = ()


def push(
    export: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    message: str | None = None,
    private: bool | None = None,
    create_pr: bool = False,
    reports: bool = False,
    verify: bool = True,
    dry_run: bool = False,
) -> Upload:
    """Upload the folder of a finished export in one commit.

    Weights, their index and the config of quantization of an earlier export go with that commit:
    engines would load them beside the new ones, or in their place. Other files stay.

    Args:
        export: Folder of an export, or of one of its dialects.
        repo_id: ``owner/name``; made where it is not there.
        revision: Branch, made where it is not there; default the main one.
        message: Of the commit.
        private: Whether a repository that is made is private; None: as the owner has it.
        create_pr: Open a pull request instead of writing to the branch.
        reports: Upload the reports too, which tell folders of this machine, times and memory.
        verify: Audit the export first.
        dry_run: Check everything, and upload nothing.

    Raises:
        OutputError: It is not finished, no one export, or the hub refuses it.
        AuditError: It breaks a rule of the audit.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    folder = asked_path(export, OutputError).resolve()
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise OutputError(f"{repo_id!r} is no name of a repository: {error}") from error
    recipe = _check_finished(folder)
    if verify and (audit := examine(folder)).failed:
        wrong = [finding.message for finding in audit.findings if finding.severity == "error"]
        raise AuditError(
            f"{folder} is not uploaded: {counted(len(wrong), 'rule is', 'rules are')} broken, "
            f"first: {wrong[0]}; modelopt-lite verify shows all, --no-verify uploads it as it is"
        )
    files = dict(_files(folder, reports=reports))
    if dry_run:
        return Upload(repo_id, files)
    said = message or f"Upload an export of modelopt-lite, recipe {recipe}"
    url, removed = _upload(
        folder, repo_id, files, said, private=private, revision=revision, create_pr=create_pr
    )
    return Upload(repo_id, files, url, removed)


def _check_finished(folder: Path) -> str:
    """Refuse a folder that is no finished export; return the name of its recipe."""
    if not folder.is_dir():
        raise OutputError(f"the export {folder} does not exist; give the folder of an export")
    if is_unfinished(folder):
        raise OutputError(
            f"{folder} belongs to an unfinished run; run quantize again to finish it, then give "
            "its export_dir"
        )
    where, report = read_report(folder)
    if where == folder and len(report.dialects) > 1:
        raise OutputError(
            f"{folder} holds an export in each of {', '.join(report.dialects)}; give the folder "
            "of one of them"
        )
    return report.recipe


def _files(folder: Path, *, reports: bool) -> Iterator[tuple[str, int]]:
    """Yield what belongs to an export: no hidden files, no journal, nothing outside of it."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        hidden = any(part.startswith(".") or part == JOURNAL for part in relative.parts)
        if hidden or not path.is_file() or not path.resolve().is_relative_to(folder):
            continue
        if str(relative) in OF_THE_RUN and not reports:
            continue
        name = relative.as_posix()
        if name != printable(name):
            raise OutputError(f"{folder} has a file {name!r}, a name that is not UTF-8; rename it")
        yield name, path.stat().st_size


def _upload(
    folder: Path,
    repo_id: str,
    files: dict[str, int],
    message: str,
    *,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
) -> tuple[str, tuple[str, ...]]:
    """Make the commit; return its address, and the names that it removes.

    `upload_folder` would make several where the client has hf_xet: whoever loads the repository
    meanwhile, or after an interruption, would get weights of two models.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo_id, revision=revision)
        removed = tuple(name for name in sorted(there) if name not in files and _OURS(name))
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationDelete(name) for name in removed),
                *(CommitOperationAdd(name, folder / name) for name in files),
            ],
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
        )
    except KeyboardInterrupt as error:
        error.args = (
            f"interrupted before the hub confirmed the commit to {repo_id!r}; run the same again: "
            "what it has by now is not sent again",
        )
        raise
    except Exception as error:  # the client raises many kinds, and other ones in each release
        raise OutputError(
            f"{repo_id!r} cannot be written on the hub: {_reason(error)}; log in with "
            "`hf auth login`, check the name, your rights and the network, and run the same again"
        ) from error
    return str(getattr(commit, "pr_url", None) or commit.commit_url), removed


def _reason(error: BaseException) -> str:
    """Return what an error of the client says; of one that says nothing, what it came of."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return f"{error} {_reason(error.__cause__)}"
    return " ".join([f"{type(error).__name__}:", *str(error).split()])
