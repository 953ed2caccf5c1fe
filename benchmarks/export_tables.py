"""What exports of every type gave: lines for the terminal, docs/models.json and docs/models.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from modelopt_lite.models import get_specs

DOCS = Path(__file__).resolve().parents[1] / "docs"
EXPORTS = {
    "modelopt": ("fp8", "nvfp4", "int4_awq"),
    "compressed-tensors": ("fp8", "nvfp4", "int4_weight_only"),
}
OK = "ok"
REFUSED = "refused: "  # the dialect has no form for what the model holds
LATE = "not begun: out of time"
_MARKS = {"ok": "+", "refused": "r", "failed": "x", "not run": "."}


@dataclass
class Result:
    """What came of one type with one release.

    Attributes:
        why: Why nothing was exported; empty where something was.
        expected: Whether that is no fault: this release lacks the type, or it predicts no token.
        exports: By "dialect/recipe": `OK`, or what it failed with.
        digests: By "dialect/recipe": of the tensors' files, and of the other files.
        seconds: Wall time.
        memory: Most resident bytes.
        made_by: The release that wrote the source checkpoint.
        unread: Why this release of transformers itself does not load the checkpoint of an older one
            that there was; one of its own was exported in its place.
        source: The digests of that.
        release: The release of transformers.
        machine: What else bytes depend on.
    """

    why: str = ""
    expected: bool = False
    exports: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    memory: int = 0
    made_by: str = ""
    unread: str = ""
    source: str = ""
    release: str = ""
    machine: str = ""

    @property
    def failed(self) -> bool:
        """Whether something is wrong that should not be."""
        return bool(self.why and not self.expected) or "failed" in map(
            status, self.exports.values()
        )


def status(told: str | None) -> str:
    """Return in a word what an export's line says; None stands for one that was not run."""
    if told is None:
        return "not run"
    return "ok" if told == OK else "refused" if told.startswith(REFUSED) else "failed"


def line(model_type: str, result: Result) -> str:
    """Return one type's result for the terminal: a line, and one for each thing that failed."""
    cost = f"{result.seconds:.1f} s, {result.memory / 1e9:.1f} GB"
    if result.why:
        return f"{'-' if result.expected else 'FAILED'} {model_type}: {result.why} ({cost})"
    states = Counter(map(status, result.exports.values()))
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    bad = [f"    {k}: {v[:300]}" for k, v in result.exports.items() if status(v) == "failed"]
    return "\n".join([f"{'FAILED' if bad else 'ok'} {model_type}: {told} ({cost})", *bad])


def summary(results: Mapping[str, Result]) -> str:
    """Return how many exports of each kind came out how, and the types that failed."""
    keys = list(dict.fromkeys(key for result in results.values() for key in result.exports))
    lines = [f"{'':34}{'ok':>6}{'refused':>9}{'failed':>8}"]
    for key in keys:
        states = Counter(status(r.exports[key]) for r in results.values() if key in r.exports)
        lines.append(f"{key:34}{states['ok']:6}{states['refused']:9}{states['failed']:8}")
    run = [r for r in results.values() if r.exports]
    left = [r for r in results.values() if not r.exports]
    lines.append(
        f"{len(run)} types exported, {sum(r.expected for r in left)} left out, "
        f"{sum(not r.expected for r in left)} not built"
    )
    if run:
        most = max(results, key=lambda name: results[name].memory)
        lines.append(f"most memory: {results[most].memory / 1e9:.1f} GB ({most})")
    if late := sorted(name for name, result in results.items() if result.why == LATE):
        lines.append(f"not begun, out of time: {', '.join(late)}")
    if failed := sorted(name for name, result in results.items() if result.failed):
        lines.append(f"failed: {', '.join(failed)}")
    return "\n".join(lines)


def keep(results: Mapping[str, Result], folder: Path = DOCS) -> None:
    """Add results to models.json in a folder, and make models.md anew from it."""
    path = folder / "models.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for model_type, result in results.items():
        if result.release:
            of_release = known.setdefault(result.release, {})
            before = {k: v for k, v in of_release.get(model_type, {}).items() if k}
            got = {**before, **result.exports} if result.exports else {"": result.why}
            of_release[model_type] = got
    path.write_text(dumps(known), encoding="utf-8")
    (folder / "models.md").write_text(table(known), encoding="utf-8")


def dumps(records: Mapping[str, Mapping[str, object]]) -> str:
    """Return records of records as JSON, one of the inner to a line."""
    outer = []
    for name in sorted(records):
        inner = records[name]
        rows = [f"  {json.dumps(k)}: {json.dumps(inner[k], sort_keys=True)}" for k in sorted(inner)]
        outer.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(outer) + "\n}\n"


def table(known: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """Return docs/models.md: types by release and format, and what does not export and why."""
    releases = sorted(known, key=Version)
    types = sorted(spec.model_type for spec in get_specs())
    formats = "; ".join(f"{d}: {', '.join(recipes)}" for d, recipes in EXPORTS.items())
    lines = [
        "# Models and formats",
        "",
        'Made by `nox -s "tests_transformers"` (benchmarks/export_all.py); do not edit. Each cell '
        "holds the exports of a small model with seeded weights, of the two dialects with three "
        f"formats each ({formats}): `+` written and audited without findings, `r` refused since "
        "the dialect has no form for what the model holds, `x` failed, `.` not run; `-` not in "
        "that release, or not exported for a reason that is told below.",
        "",
        f"| model type | {' | '.join(releases)} |",
        f"| --- |{' --- |' * len(releases)}",
    ]
    for name in types:
        cells = " | ".join(_cell(known[release].get(name)) for release in releases)
        lines.append(f"| {name} | {cells} |")
    for title, states in (("fails", ("failed",)), ("is refused", ("refused",))):
        lines += ["", f"## What {title}, and why", "", *_reasons(known, releases, types, states)]
    lines += ["", "## What is not exported, and why", ""]
    lines += _left_out(known, releases, types)
    return "\n".join(lines) + "\n"


def _cell(got: Mapping[str, str] | None) -> str:
    if got is None:
        return _MARKS["not run"]
    if not any(got):
        return "-"
    parts = []
    for dialect, recipes in EXPORTS.items():
        states = [status(got.get(f"{dialect}/{recipe}")) for recipe in recipes]
        parts.append("".join(_MARKS[state] for state in states))
    return f"`{' '.join(parts)}`"


def _reasons(
    known: Mapping[str, Mapping[str, Mapping[str, str]]],
    releases: Sequence[str],
    types: Sequence[str],
    states: Iterable[str],
) -> list[str]:
    """Return a line for each reason of a type, and the releases and exports that it is for."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name in types:
        for release in releases:
            for key, told in known[release].get(name, {}).items():
                if key and status(told) in states:
                    where = found.setdefault((name, told.removeprefix(REFUSED)[:300]), {})
                    where.setdefault(release, []).append(key)
    lines = []
    for (name, told), where in found.items():
        places = "; ".join(f"{release}: {', '.join(keys)}" for release, keys in where.items())
        lines.append(f"- {name}: {told} ({places})")
    return lines or ["Nothing."]


def _left_out(
    known: Mapping[str, Mapping[str, Mapping[str, str]]],
    releases: Sequence[str],
    types: Sequence[str],
) -> list[str]:
    """Return a line for each type that no release exports, or one could not build."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in types:
        for release in releases:
            why = known[release].get(name, {}).get("", "")
            if why and not why.startswith("not in transformers"):
                found.setdefault((name, why[:300]), []).append(release)
    return [f"- {name}: {why} ({', '.join(where)})" for (name, why), where in found.items()]
