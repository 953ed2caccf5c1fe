"""Everything in a checkpoint folder that is neither weights nor ours to write.

Tokenizers, chat templates, generation and processor configs and remote code are copied byte for
byte and never parsed: loading and saving them again changes them between releases.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from modelopt_lite.errors import CheckpointError, OutputError

_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx",
    ".onnx_data",
)  # fmt: skip
_WEIGHTS = (*_WEIGHT_SUFFIXES, *(f"{suffix}.index.json" for suffix in _WEIGHT_SUFFIXES))
_SKIPPED_NAMES = frozenset({".git", ".cache", ".gitattributes", "__pycache__"})
_WRITTEN_BY_US = frozenset(
    map(
        Path,
        ("config.json", "hf_quant_config.json", "modelopt_lite_report.json", "report.html"),
    )
)
_CARD, _CARD_OF_SOURCE = Path("README.md"), Path("SOURCE_README.md")


def sidecar_files(source_dir: Path) -> list[Path]:
    """List the files to carry over, relative to ``source_dir``, sorted.

    Weights (by suffix, at any depth), their indices, the files that the export writes
    itself, and version-control and cache entries are left out. Links to files count as their
    targets, as the hub's cache is made of them; a link to a folder is followed inside
    ``source_dir`` only.

    Raises:
        CheckpointError: A dangling link, or a link to a folder outside ``source_dir`` or back to
            a folder above itself.
    """
    return sorted(_walk(Path(source_dir), Path(), ()))


def copy_sidecars(source_dir: Path, target_dir: Path) -> list[Path]:
    """Copy the sidecar files byte for byte; return their relative paths.

    Raises:
        CheckpointError: As ``sidecar_files``.
        OutputError: A file cannot be copied.
    """
    files = sidecar_files(source_dir)
    for file in files:
        target = target_dir / name_in_export(file)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source_dir / file, target)
        except OSError as error:
            raise OutputError(
                f"{target}: copying {source_dir / file} failed ({error.strerror or error})"
            ) from error
    return files


def name_in_export(file: Path) -> Path:
    """Return where a sidecar file lies in an export: the source's card lies beside the new one."""
    return _CARD_OF_SOURCE if file == _CARD else file


def _walk(root: Path, relative: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    folder = root / relative
    real = folder.resolve()
    if above and (not real.is_relative_to(above[0]) or real in above):
        where = "back to a folder above it" if real in above else "out of the checkpoint"
        raise CheckpointError(
            f"{folder}: is a link that leads {where}, to {real}; replace it by the files or "
            "remove it"
        )
    for path in sorted(folder.iterdir()):
        name = path.name
        if name in _SKIPPED_NAMES:
            continue
        if path.is_dir():
            yield from _walk(root, relative / name, (*above, real))
        elif name.lower().endswith(_WEIGHTS) or relative / name in _WRITTEN_BY_US:
            continue
        elif relative / name == _CARD_OF_SOURCE and (root / _CARD).is_file():
            continue  # of an export of ours: the card of what that was made from
        elif path.is_file():  # not a socket, a pipe or a device
            yield relative / name
        elif path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"{path}: is a link to {path.readlink()}, which is missing; download the file or "
                "remove the link"
            )
