"""Rule ``engine-refuses``: whether an engine loads the formats of an export in its dialect."""

from __future__ import annotations

from collections.abc import Iterator

from modelopt_lite.dialects.compressed_tensors import CompressedTensors
from modelopt_lite.dialects.engines import Verdict, verdict
from modelopt_lite.dialects.modelopt import ModelOpt
from modelopt_lite.formats.declared import MIXED, Declared
from modelopt_lite.formats.linear import LinearFormat
from modelopt_lite.verify.config import (
    KNOWN_ALGOS,
    SGLANG_ALGOS,
    SGLANG_MIXED_ALGOS,
    VLLM_ALGOS,
)
from modelopt_lite.verify.export import Export
from modelopt_lite.verify.findings import Finding
from modelopt_lite.verify.rules import ENGINES

_PACKAGE = "compressed_tensors"


def check_engines(export: Export, asked: tuple[str, ...]) -> Iterator[Finding]:
    """Yield what each of the engines refuses, and which formats it is not known to load.

    Where none is asked for, vLLM is, by its list of names: an export for other engines is right,
    so that this is a warning.
    """
    default = ("vllm",) if export.dialect.name == ModelOpt.name else ()
    for engine in asked or default:
        for what, answer in _answers(export, engine):
            if answer.answer == "refused":
                yield Finding(
                    "engine-refuses",
                    f"{export.folder}: {ENGINES[engine]} does not load {what}: {answer.rule}; "
                    "serve it with another engine, or export another format or dialect",
                    "warning",
                    engines=(engine,),
                    decisive=True,
                )
            elif answer.answer == "unknown" and asked:
                yield Finding(
                    "engine-refuses",
                    f"{export.folder}: whether {ENGINES[engine]} loads {what} is {answer.rule}; "
                    "try it there",
                    "warning",
                    engines=(engine,),
                )


def _answers(export: Export, engine: str) -> Iterator[tuple[str, Verdict]]:
    """Yield each format of an export by name, and what an engine does with it."""
    if isinstance(export.declared, Declared):
        yield from _by_algo(export, export.declared, engine)
        return
    seen: dict[tuple[str, bool], LinearFormat] = {}
    for module in export.packed():
        if (fmt := export.format_of(module)) is not None:
            expert = export.storage.expert_of(module.name)[0] is not None
            seen.setdefault((fmt.name, expert), fmt)
    for (name, experts), fmt in seen.items():
        what = f"experts in {name}" if experts else name
        yield what, _verdict(export, engine, fmt, experts)


def _by_algo(export: Export, declared: Declared, engine: str) -> Iterator[tuple[str, Verdict]]:
    """The modelopt dialect, where some engines go by the name of a format alone."""
    mixed = declared.algo == MIXED
    known = {"vllm": VLLM_ALGOS, "sglang": SGLANG_ALGOS | (SGLANG_MIXED_ALGOS if mixed else set())}
    seen: dict[tuple[str, LinearFormat | None], None] = {}
    for module in export.packed():
        algo = (declared.layers or {}).get(module.name) if mixed else declared.algo
        seen.setdefault((str(algo), export.format_of(module)))
    for algo, fmt in seen:
        if algo not in KNOWN_ALGOS:
            continue  # a finding of its own
        what = f"quant_algo {algo!r}"
        if algo not in known.get(engine, {algo}):
            yield what, Verdict("refused", f"{ENGINES[engine]} knows no such quant_algo")
            continue
        answer = Verdict("unknown", "not known") if fmt is None else _verdict(export, engine, fmt)
        by_name = engine in known and (answer.answer == "unknown" or mixed or fmt is None)
        yield what, Verdict("loads") if by_name else answer


def _verdict(export: Export, engine: str, fmt: LinearFormat, experts: bool = False) -> Verdict:
    dialect = export.dialect.name
    if engine != _PACKAGE:
        return verdict(ENGINES[engine], dialect, fmt, experts=experts)
    if dialect == CompressedTensors.name:
        return Verdict("loads")
    return Verdict("refused", "it reads its own dialect alone")
