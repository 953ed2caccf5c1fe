"""Whether one small checkpoint gives the same bytes under every release of transformers.

`benchmarks/export_all.py --checkpoints FOLDER` keeps the digests of its exports in
docs/versions.json and makes docs/versions.md from it. Alone, this makes the table anew, and exits
with 1 where a difference has no explanation here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_tables import DOCS, Result, dumps
from packaging.version import Version


@dataclass(frozen=True, slots=True)
class Explained:
    """Why some bytes differ from those of older releases.

    Attributes:
        types: Expression that the whole model type fits.
        what: "tensors" or "configs".
        releases: Expression that the release whose bytes are others fits.
        why: In a sentence, as it stands in the table.
    """

    types: str
    what: str
    releases: str
    why: str


# Each cause was read in the code of both releases. Those of tensors were proven besides: with that
# one piece of the newer release's code brought back to what the older one does, its exports have
# the older one's tensors, to the byte.
EXPLAINED: tuple[Explained, ...] = (
    Explained(
        "mixtral|minimax|hunyuan_v1_moe",
        "tensors",
        r"5\..*",
        "4.57 rounds the weights of a token's experts to bfloat16 before it multiplies by them; "
        "later releases multiply in float32.",
    ),
    Explained(
        "deepseek_v2|dots1|longcat_flash",
        "tensors",
        r"5\..*",
        "4.57 sums in float32 what a token's experts put out, and rounds once; later releases "
        "round after each expert.",
    ),
    Explained(
        "qwen3_vl_moe",
        "tensors",
        r"5\..*",
        "4.57 runs every expert on every token, with the weight zero where it was not chosen; "
        "later releases run it on the tokens that chose it, and what enters it ranges otherwise.",
    ),
    Explained(
        "olmo3",
        "tensors",
        r"5\.6\..*",
        "4.57 rotates queries and keys by cosines and sines in float32; 5.6 rounds these to "
        "bfloat16 first.",
    ),
    Explained(
        "olmo3",
        "tensors",
        r"5\.(14|24)\..*",
        "Of a config in the form of 4.57 later releases read `rope_theta` for full attention "
        "alone; layers with a window take the default, 500,000.",
    ),
    Explained(
        "gemma4|gemma4_text",
        "tensors",
        r"5\.(14|24)\..*",
        "5.6 takes the softmax over experts in bfloat16; later releases in float32.",
    ),
    Explained(
        "glm_moe_dsa",
        "tensors",
        r"5\.(14|24)\..*",
        "5.6 rotates the halves of queries and keys against each other, and lets tokens see those "
        "behind them where no mask is given; later releases rotate neighbours, and are causal.",
    ),
    Explained(
        "qwen3_next|qwen3_5(_moe)?(_text)?|olmo_hybrid",
        "tensors",
        r"5\.24\..*",
        "5.24 computes the gated delta rule anew: queries and keys are normed in float32, not in "
        "bfloat16, and a triangular system is solved where rows were substituted.",
    ),
    Explained(
        "jamba",
        "tensors",
        r"5\.24\..*",
        "5.24 adds and gates what Mamba's scan puts out in float32; older releases in bfloat16.",
    ),
    Explained(
        "mistral4",
        "tensors",
        r"5\.24\..*",
        "5.24 multiplies the scores of attention by the square of YaRN's mscale, which older "
        "releases leave out.",
    ),
    Explained(
        "gemma2|vaultgemma",
        "tensors",
        r"5\.24\..*",
        "5.24 caps the scores of attention, as these models ask; older releases run a function of "
        "torch that cannot, and leave the cap out.",
    ),
    Explained(
        "inkling_mm_model",
        "tensors",
        r"5\.24\..*",
        "5.24 computes the router in float32; 5.14 in bfloat16.",
    ),
    Explained(
        "gemma3|granitemoe(hybrid|shared)?|minimax|mixtral|phimoe|qwen3_omni_moe(_thinker)?",
        "configs",
        ".*",
        "The list of modules that are left as they are has their names on disk, and where the "
        "model of the release that wrote it calls them otherwise, those too.",
    ),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """An export whose bytes are not those of the oldest release that made it."""

    model_type: str
    export: str
    release: str
    oldest: str
    what: str

    @property
    def why(self) -> str:
        """The explanation, of each part that differs; empty where one has none."""
        found = [self._explain(part) for part in self.what.split(" and ")]
        return " ".join(found) if all(found) else ""

    def _explain(self, part: str) -> str:
        return next(
            (
                e.why
                for e in EXPLAINED
                if e.what == part
                and re.fullmatch(e.types, self.model_type)
                and re.fullmatch(e.releases, self.release)
            ),
            "",
        )


def record(results: Mapping[str, Result], folder: Path = DOCS) -> None:
    """Add the digests of exports to versions.json in a folder, and make versions.md anew.

    What was measured with another torch, Python or instruction set, or of another checkpoint of the
    type, is no measure of these and goes. A release that does not read the checkpoint exported
    another one, whose bytes say nothing: why it does not is kept.
    """
    path = folder / "versions.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for model_type, result in results.items():
        of_machine = known.get(result.machine, {})
        if model_type in of_machine and (result.unread or result.why):
            _forget(of_machine[model_type], result.release)
        if result.unread and model_type in of_machine:
            of_machine[model_type].setdefault("unread", {})[result.release] = result.unread
        if result.unread or not result.digests:
            continue
        of_machine = known.setdefault(result.machine, {})
        of_machine.get(model_type, {}).get("unread", {}).pop(result.release, None)
        for key, digest in result.digests.items():
            before = of_machine.get(model_type, {})
            if before.get("source") != result.source:
                before = {"source": result.source, "made_by": result.made_by, "exports": {}}
            of_machine[model_type] = before
            found = _without(before["exports"].get(key, {}), result.release)
            before["exports"][key] = found
            found[digest] = sorted({*found.get(digest, ()), result.release}, key=Version)
    known = {name: known[name] for name in list(known)[-1:]}
    path.write_text(dumps(known), encoding="utf-8")
    (folder / "versions.md").write_text(table(known), encoding="utf-8")


def _forget(entry: dict[str, Any], release: str) -> None:
    """Remove what a release gave: it cannot export the checkpoint any more."""
    left = {key: _without(found, release) for key, found in entry["exports"].items()}
    entry["exports"] = {key: found for key, found in left.items() if found}


def _without(found: Mapping[str, list[str]], release: str) -> dict[str, list[str]]:
    left = {digest: [r for r in releases if r != release] for digest, releases in found.items()}
    return {digest: releases for digest, releases in left.items() if releases}


def differences(of_machine: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield every export under a release whose bytes are not those of the oldest."""
    for model_type, entry in sorted(of_machine.items()):
        for export, found in sorted(entry["exports"].items()):
            of_release = {r: digest for digest, releases in found.items() for r in releases}
            oldest = min(of_release, key=Version)
            tensors, rest = of_release[oldest].split()
            for release in sorted(of_release, key=Version):
                other_tensors, other_rest = of_release[release].split()
                parts = [w for w, same in (("tensors", tensors == other_tensors),) if not same]
                parts += [w for w, same in (("configs", rest == other_rest),) if not same]
                if parts:
                    what = " and ".join(parts)
                    yield Difference(model_type, export, release, oldest, what)


def table(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Return docs/versions.md."""
    [(machine, of_machine)] = known.items()
    releases = sorted(
        {
            release
            for entry in of_machine.values()
            for found in entry["exports"].values()
            for some in found.values()
            for release in some
        },
        key=Version,
    )
    found = list(differences(of_machine))
    lines = [
        "# The same bytes under every release",
        "",
        'Made by `nox -s "tests_transformers" -- --checkpoints FOLDER` for one release after '
        "another, the oldest first (benchmarks/export_all.py and versions.py); do not edit. One "
        "small checkpoint of each type, which the oldest of these releases that has the type "
        f"wrote, is exported under each of them, on one machine ({machine}). `=`: all exports "
        "have the bytes that the oldest release gave them, tensors and configs; `-`: not "
        "exported, or, as told below, not read; else how many of them differ. Of "
        f"{_count(of_machine)} exports, {len(found)} differ.",
        "",
        f"| model type | checkpoint of | {' | '.join(releases)} |",
        f"| --- | --- |{' --- |' * len(releases)}",
    ]
    for name, entry in sorted(of_machine.items()):
        there = {r for d in entry["exports"].values() for some in d.values() for r in some}
        cells = []
        for release in releases:
            count = sum(d.model_type == name and d.release == release for d in found)
            cells.append(str(count or "=") if release in there else "-")
        lines.append(f"| {name} | {entry['made_by']} | {' | '.join(cells)} |")
    lines += ["", "## What differs, and why", "", *_told(found)]
    lines += ["", "## What a release of transformers does not read", ""]
    lines += [
        f"- {name}, which {entry['made_by']} wrote: {why} ({release})"
        for name, entry in sorted(of_machine.items())
        for release, why in sorted(entry.get("unread", {}).items())
    ] or ["Nothing."]
    return "\n".join(lines) + "\n"


def _count(of_machine: Mapping[str, Any]) -> int:
    exports = (found for entry in of_machine.values() for found in entry["exports"].values())
    return sum(len(releases) for found in exports for releases in found.values())


def _told(found: list[Difference]) -> list[str]:
    """Return a line for each explanation and what it explains."""
    grouped: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for d in found:
        where = grouped.setdefault((d.model_type, d.what, d.why), {})
        where.setdefault(d.release, []).append(d.export)
    lines: dict[str, list[str]] = {}
    for (model_type, what, why), where in grouped.items():
        alike: dict[str, list[str]] = {}
        for release, keys in where.items():
            alike.setdefault(", ".join(keys), []).append(release)
        places = "; ".join(f"{', '.join(releases)}: {keys}" for keys, releases in alike.items())
        line = f"{what} ({places}). {why or 'NOT EXPLAINED.'}"
        lines.setdefault(line, []).append(model_type)
    return [f"- {', '.join(types)}: {line}" for line, types in lines.items()] or ["Nothing."]


def main() -> int:
    """Make the table anew."""
    known = json.loads((DOCS / "versions.json").read_text(encoding="utf-8"))
    (DOCS / "versions.md").write_text(table(known), encoding="utf-8")
    [of_machine] = known.values()
    unexplained = [d for d in differences(of_machine) if not d.why]
    for d in unexplained:
        print(f"not explained: {d.model_type} {d.export} {d.release}: {d.what}")
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
