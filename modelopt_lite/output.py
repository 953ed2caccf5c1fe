"""Where checkpoints come from and go to: folders, hub ids, temporary folders, free space."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from modelopt_lite.checkpoint.journal import has_entries
from modelopt_lite.errors import CheckpointError, OutputError
from modelopt_lite.locks import OWNER, held
from modelopt_lite.paths import asked_path

_PARTIAL = ".partial"  # ends the name of the folder that a run works in
_EXPORT = "export"  # inside of the folder that an interrupted run leaves, beside the journal
_OLD = "old"  # there, the export that is being replaced


def resolve_checkpoint(ckpt: str | Path) -> Path:
    """Return the folder of a checkpoint: the one given, or that of a model on the Hugging Face hub.

    Raises:
        CheckpointError: No such folder, and no such model in reach.
    """
    path = asked_path(ckpt, CheckpointError)
    if path.is_dir():
        return path.resolve()
    name = str(ckpt)
    is_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~")) and not path.exists()
    if not is_hub_id:
        wrong = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"the checkpoint folder {name!r} {wrong}; give a folder with config.json and "
            "safetensors files, or a hub id such as org/model"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf"]))
    except Exception as error:  # the client raises many kinds: offline, gated, not found, timeouts
        raise CheckpointError(
            f"{name!r} is no folder, and cannot be had from the hub: {error}"
        ) from error


def default_export_dir(ckpt: str | Path, recipe: str) -> Path:
    """Return ``./<checkpoint name>-<recipe>``."""
    return Path.cwd() / f"{Path(str(ckpt).rstrip('/')).resolve().name}-{recipe}"


def resolved(export_dir: Path) -> Path:
    """Return the folder that a path leads to.

    Raises:
        OutputError: Its links lead in a circle.
    """
    try:
        return export_dir.resolve()
    except (OSError, RuntimeError) as error:  # which of them depends on the release of Python
        raise OutputError(
            f"export_dir {export_dir} cannot be followed ({error}); remove the link, or choose "
            "another folder"
        ) from error


def check_export_dir(export_dir: Path, source: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot or must not be written.

    Raises:
        OutputError: It is the source or inside of it, is not empty, or cannot be made.
    """
    target = resolved(export_dir)
    if target == source or source in target.parents or target in source.parents:
        raise OutputError(
            f"export_dir {export_dir} and the source {source} lie one inside the other; choose a "
            "folder elsewhere"
        )
    if target.exists() and not target.is_dir():
        raise OutputError(f"export_dir {export_dir} is a file; choose a folder")
    _check_empty(target, overwrite=overwrite)
    parent = _existing_parent(target)
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable, so {export_dir} cannot be made there")


def _check_empty(target: Path, *, overwrite: bool) -> None:
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise OutputError(
            f"export_dir {target} is not empty; choose another folder, or replace it with "
            "overwrite=True (--overwrite)"
        )


def check_free_space(export_dir: Path, needed: int) -> None:
    """Raise `OutputError` where the disk of ``export_dir`` has fewer than ``needed`` bytes."""
    free = shutil.disk_usage(_existing_parent(resolved(export_dir))).free
    if free < needed:
        raise OutputError(
            f"the export needs {needed:,} bytes, and only {free:,} are free at {export_dir}; free "
            f"{needed - free:,} bytes or choose another disk"
        )


def unfinished_bytes(export_dir: Path) -> int:
    """Return the bytes on disk of the export that an interrupted run into ``export_dir`` left."""
    export = staged_export(export_dir)
    return sum(path.stat().st_blocks * 512 for path in export.rglob("*") if path.is_file())


@contextmanager
def staged(export_dir: Path, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """Give a folder beside ``export_dir`` that takes its place when the block ends well.

    When it does not, nothing is left behind and an existing ``export_dir`` stays as it was; but
    with ``resume``, a folder whose journal (beside it, see `checkpoint.journal`) has entries stays
    for the next run where the run was interrupted or could not write, and is what that run gets.

    Raises:
        OutputError: The folder cannot be made or renamed, or another run has it.
        KeyboardInterrupt: As it came, with a message where the folder stays.
    """
    target = resolved(export_dir)
    made = [p for p in (target.parent, *target.parent.parents) if not p.exists()]
    work = _work_folder(target)
    with _locked(work, target):
        export = work / _EXPORT
        try:
            with writing(work):
                _put_back(work, target)
                _check_empty(target, overwrite=overwrite)  # as it was before others had the folder
                if not (resume and has_entries(work)):
                    _empty(work)
                export.mkdir(exist_ok=True)
            yield export
            _replace(export, target, overwrite=overwrite)
            shutil.rmtree(work, ignore_errors=True)
        except BaseException as error:
            _put_back(work, target)
            if resume and has_entries(work) and may_go_on(error):
                tell_kept(error, work)
                raise
            shutil.rmtree(work, ignore_errors=True)
            for parent in made:
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()
            raise


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Give what the system says of a block that writes into a folder as `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); free some "
            "space, check permissions and the disk, or choose another export_dir"
        ) from error


def staged_export(export_dir: Path) -> Path:
    """Return the folder that `staged` gives, for other processes of the same run."""
    return _work_folder(resolved(export_dir)) / _EXPORT


def discard_unfinished(export_dir: Path) -> None:
    """Remove what an interrupted run into ``export_dir`` left; what a run has now stays."""
    target = resolved(export_dir)
    work = _work_folder(target)
    if work.is_dir():
        with suppress(OutputError), _locked(work, target):
            shutil.rmtree(work, ignore_errors=True)


def may_go_on(error: BaseException) -> bool:
    """Whether nothing is wrong with the inputs, so that a later run can go on."""
    return isinstance(error, KeyboardInterrupt | OutputError) or getattr(error, "keeps", False)


def tell_kept(error: BaseException, folder: Path) -> None:
    """Have an error say where what is finished stays, for a later run to go on from."""
    kept = f"what is finished stays in {folder}; run the same again to go on"
    error.args = (f"{str(error) or 'interrupted'}; {kept}",)


def is_unfinished(folder: Path) -> bool:
    """Whether a folder is one that `staged` writes into, or lies inside of it."""
    within = (folder, *folder.parents)
    return any(p.name.startswith(".") and p.name.endswith(_PARTIAL) for p in within)


def _work_folder(target: Path) -> Path:
    return target.parent / f".{target.name}{_PARTIAL}"


def _locked(work: Path, target: Path) -> AbstractContextManager[None]:
    """Hold the folder of a run against other runs."""
    return held(work, f"is writing {target}", "export_dir")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == OWNER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _replace(export: Path, target: Path, *, overwrite: bool) -> None:
    """Put an export into its place; the one that it replaces goes with the folder of the run."""
    old = export.with_name(_OLD)
    try:
        if target.is_dir() and any(target.iterdir()) and overwrite:
            if old.exists():
                shutil.rmtree(old)
            target.rename(old)
        elif target.is_dir():
            target.rmdir()  # empty, as checked at the start
        export.rename(target)
    except OSError as error:
        raise OutputError(f"cannot put the export in place at {target}: {error}") from error


def _put_back(work: Path, target: Path) -> None:
    """Give the export back its place that a run took away to replace it, and did not."""
    old = work / _OLD
    if old.is_dir() and not target.exists():
        with suppress(OSError):
            old.rename(target)


def _existing_parent(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())
