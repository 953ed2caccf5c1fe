"""Rule 1: the index and the files tell the same story. Headers only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelopt_lite.checkpoint.header import TensorInfo, read_header
from modelopt_lite.checkpoint.reader import INDEX_FILE, SINGLE_FILE, Checkpoint, read_json
from modelopt_lite.errors import CheckpointError
from modelopt_lite.verify.findings import Finding, shorten


def open_export(folder: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """Open an export and check its files.

    Returns:
        The checkpoint, None where it cannot be opened, and what is wrong with its files.
    """
    findings = list(check_files(folder))
    try:
        return Checkpoint(folder), findings
    except CheckpointError as error:
        if not any(f.severity == "error" for f in findings):
            findings.append(Finding("checkpoint-readable", str(error)))
        return None, findings


def check_files(folder: Path) -> Iterator[Finding]:
    """Compare the index with the shards, or check the single file.

    Rules: ``file-damaged``, ``index-damaged``, ``index-missing-file``, ``index-ghost``,
    ``index-unlisted``, ``index-orphan-file``, ``index-total-size``.
    """
    if not folder.is_dir():
        return
    on_disk = {path.name for path in folder.glob("*.safetensors")}
    index = folder / INDEX_FILE
    if not index.exists():
        if SINGLE_FILE in on_disk:
            yield from _readable(folder / SINGLE_FILE)[1]
            yield from _orphans(folder, on_disk - {SINGLE_FILE})
        return
    try:
        content = read_json(index)
    except CheckpointError as error:
        yield Finding("index-damaged", str(error))
        return
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        yield Finding("index-damaged", f"{index}: has no weight_map; export again")
        return
    if odd := [str(v) for v in weight_map.values() if not isinstance(v, str) or "/" in v]:
        yield Finding(
            "index-damaged",
            f"{index}: places tensors in {shorten(odd)}, which is no file name; export again",
        )
        return
    yield from _compare(folder, content, weight_map, on_disk)


def _compare(
    folder: Path, content: dict[str, Any], weight_map: dict[str, str], on_disk: set[str]
) -> Iterator[Finding]:
    index = folder / INDEX_FILE
    shards = sorted(set(weight_map.values()))
    total, complete = 0, True
    for shard in shards:
        named = {name for name, file in weight_map.items() if file == shard}
        if shard not in on_disk:
            complete = False
            yield Finding(
                "index-missing-file",
                f"{folder / shard}: does not exist, and {INDEX_FILE} places "
                f"{shorten(sorted(named))} there; copy the file or export again",
            )
            continue
        tensors, problems = _readable(folder / shard)
        yield from problems
        complete = complete and not problems
        if problems:
            continue
        total += sum(info.nbytes for info in tensors.values())
        if ghosts := sorted(named - set(tensors)):
            yield Finding(
                "index-ghost",
                f"{index}: places {shorten(ghosts)} in {shard}, which does not hold it; export "
                "again",
            )
        if unlisted := sorted(set(tensors) - named):
            yield Finding(
                "index-unlisted",
                f"{folder / shard}: holds {shorten(unlisted)}, which {INDEX_FILE} does not place "
                "there; readers that follow the index never see it, export again",
            )
    metadata = content.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if complete and stated != total:
        yield Finding(
            "index-total-size",
            f"{index}: states total_size {stated!r}, the tensors have {total} bytes; export again",
        )
    yield from _orphans(folder, on_disk - set(shards))


def _orphans(folder: Path, names: set[str]) -> Iterator[Finding]:
    if names:
        yield Finding(
            "index-orphan-file",
            f"{folder}: holds {shorten(sorted(names))}, no part of the checkpoint; readers that "
            "glob for weights load it too, remove it",
        )


def _readable(path: Path) -> tuple[dict[str, TensorInfo], list[Finding]]:
    try:
        return read_header(path), []
    except CheckpointError as error:
        return {}, [Finding("file-damaged", str(error))]
