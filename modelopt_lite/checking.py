"""What ``modelopt-lite verify`` does: audit the exports of a folder, and run them where asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelopt_lite.evaluate import read_text
from modelopt_lite.fidelity import Fidelity, compare_predictions
from modelopt_lite.output import resolve_checkpoint
from modelopt_lite.verify.audit import Audit, examine
from modelopt_lite.verify.opening import export_folders
from modelopt_lite.verify.rules import engine_names

BUNDLED_TEXT = "cpython"


@dataclass(frozen=True, slots=True)
class Checked:
    """One export: its audit, and how it predicts a text where that was asked for."""

    audit: Audit
    predictions: Fidelity | None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        predictions = asdict(self.predictions) if self.predictions else None
        return {**self.audit.as_dict(), "predictions": predictions}


def check_exports(
    export: str | Path,
    *,
    source: str | Path | None = None,
    deep: bool = False,
    engines: Iterable[str] = (),
    text: str | None = None,
    seq_len: int = 512,
    max_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> list[Checked]:
    """Check an export, or one in each dialect.

    Args:
        export: Folder or hub id.
        source: What it was made from.
        deep: Dequantize and compare every matrix.
        engines: See `modelopt_lite.verify.rules.engine_names`.
        text: Path of a text that both run on, or "cpython"; an export with errors is not run.
        seq_len: Tokens that the text is cut to.
        max_tokens: The most tokens.
        trust_remote_code: Allow code that the checkpoints bring.

    Raises:
        RecipeError: An unknown engine.
        CheckpointError: A folder does not exist, or the source cannot be read.
        CalibrationError: The text cannot be read.
    """
    asked = engine_names(engines)
    read = None
    if text is not None:  # read before hours of comparing
        read = read_text(None if text == BUNDLED_TEXT else Path(text), seq_len, max_tokens)
    original = resolve_checkpoint(source) if source is not None else None
    checked = []
    for folder in export_folders(resolve_checkpoint(export)):
        audit = examine(folder, source=original, deep=deep, engines=asked)
        predictions = None
        if original is not None and read is not None and not audit.failed:
            predictions = compare_predictions(
                folder,
                original,
                text=read,
                seq_len=seq_len,
                max_tokens=max_tokens,
                trust_remote_code=trust_remote_code,
            )
        checked.append(Checked(audit, predictions))
    return checked
