"""What a run did: the plan, the scales' evidence, errors, timings and memory."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelopt_lite.words import printable

REPORT_FILE = "modelopt_lite_report.json"
PAGE_FILE = "report.html"
CARD_FILE = "README.md"
OF_THE_RUN = frozenset({REPORT_FILE, PAGE_FILE})
"""Files that tell of times and places: all others of an export are the same whenever it is made."""


@dataclass(slots=True)
class Report:
    """The outcome of one run; written as JSON into the export's folder.

    Attributes:
        export_dir: Folder of the export.
        recipe: Name of the recipe.
        model_type: The model's type.
        quantized: Module -> format.
        excluded: Module -> why it was left as it is.
        relative_errors: Module -> ``|dequantized - source| / |source|`` (Frobenius).
        beyond_bound: Modules with a value outside of the format's error bound: must be empty.
        tokens_per_expert: Expert container -> rows that each expert saw in calibration.
        cold_experts: Experts that saw none, and took the largest input of their peers.
        input_amax: Input group -> largest magnitude seen.
        fallbacks: Where else the run departed from what was asked.
        notes: Everything else that a user should know.
        source_bytes: Bytes of all tensors of the source.
        export_bytes: Bytes of all tensors of the export.
        bytes_read: Bytes read from the source's weight files.
        parameters: Values in the export's weights, each counted once.
        seconds: Phase -> wall seconds.
        peak_memory_bytes: High-water mark of the process's resident memory.
        predicted_memory_bytes: What was foretold of it when the run began.
        ranks: Of several processes, what each read, its peak of weights and that of its memory.
        details: Fingerprints and versions that the bytes depend on.
        dialects: Names of the export's dialects.
        beside: What the modelopt dialect keeps beside matrices: ``scale``, ``factors``, or nothing.
        recipe_text: The recipe as YAML.
        command: What does the same again on the command line; empty for a model in memory.
        calibrated_with: Options that choose the calibration data, where those are no batches.
        budgets: Tier -> bytes that the run was allowed; those that were given.
        layer_bytes: Layer -> bytes of its tensors in the source, and in the export (of several
            dialects the first).
        timeline: What was in use, and read and written, over the seconds of the last run.
        accuracy: What was measured of the export later, and recorded.
        reused: This is the report of an earlier run with the same inputs, whose finished export
            was found; nothing was done. Never true in a file.
    """

    export_dir: str
    recipe: str
    model_type: str
    quantized: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    relative_errors: dict[str, float] = field(default_factory=dict)
    beyond_bound: list[str] = field(default_factory=list)
    tokens_per_expert: dict[str, list[int]] = field(default_factory=dict)
    cold_experts: list[str] = field(default_factory=list)
    input_amax: dict[str, float] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    source_bytes: int = 0
    export_bytes: int = 0
    bytes_read: int = 0
    parameters: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    predicted_memory_bytes: int = 0
    ranks: list[dict[str, int]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    dialects: list[str] = field(default_factory=list)
    beside: str = ""
    recipe_text: str = ""
    command: str = ""
    calibrated_with: dict[str, Any] = field(default_factory=dict)
    budgets: dict[str, int] = field(default_factory=dict)
    layer_bytes: dict[str, list[int]] = field(default_factory=dict)
    timeline: dict[str, list[float]] = field(default_factory=dict)
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    reused: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per value of the source, scales included."""
        return 8 * self.export_bytes / self.parameters if self.parameters else 0.0

    @property
    def degraded(self) -> bool:
        """Whether the run had to fall back somewhere; ``strict`` makes that a failure."""
        return bool(self.cold_experts or self.fallbacks or self.beyond_bound)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of a block to ``seconds[name]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def to_json(self) -> str:
        """Return the report as JSON text."""
        data = {**asdict(self), "bits_per_weight": round(self.bits_per_weight, 4)}
        return printable(json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def write(self, folder: Path) -> None:
        """Write the report into a folder."""
        write_whole(folder / REPORT_FILE, self.to_json())


def write_whole(path: Path, text: str) -> None:
    """Write a text file that, whenever the process ends, is there as a whole or as it was before.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def peak_memory_bytes() -> int:
    """Return the high-water mark of this process's resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
