"""Exports of several formats in the modelopt dialect: every packed module states its own."""

from __future__ import annotations

from collections.abc import Iterator

from modelopt_lite.formats.declared import MIXED
from modelopt_lite.verify.config import QuantConfig
from modelopt_lite.verify.export import Export
from modelopt_lite.verify.findings import Finding, shorten

_BLOCK_FP8 = frozenset({"FP8_PB_WO", "FP8_BLOCK_SCALES"})
_NVFP4 = frozenset({"NVFP4", "W4A16_NVFP4"})


def check_mixed(export: Export, config: QuantConfig) -> Iterator[Finding]:
    """Rules: ``mixed-layers``, ``mixed-empty``, ``mixed-block-size``, ``mixed-method``.

    Engines leave what is not listed unquantized, and look for codes where something is.
    """
    if export.algo != MIXED:
        return
    layers = dict(config.declared.layers or {})
    packed = {module.name for module in export.packed()}
    if not layers:
        yield Finding(
            "mixed-empty",
            f"{export.folder}: quant_algo is {MIXED}, and quantized_layers lists no module; vLLM "
            "refuses that, export again",
        )
    for names, what in (
        (packed - layers.keys(), "is packed, and quantized_layers does not list it"),
        (layers.keys() - packed, "is listed in quantized_layers, and is not packed"),
    ):
        if names and layers:
            yield Finding("mixed-layers", f"{export.folder}: {shorten(sorted(names))} {what}")
    unknown = sorted(n for n in packed & layers.keys() if not export.declared.formats_of(n))
    if unknown:
        yield Finding(
            "format-unchecked",
            f"{export.folder}: {shorten(unknown)} is of a format that is not checked here",
            "warning",
        )
    yield from _check_sizes(export, config, layers)
    if layers and not _NVFP4 & set(layers.values()):
        yield Finding(
            "mixed-method",
            f"{export.folder}: no layer is NVFP4 ({', '.join(sorted(set(layers.values())))}); "
            "SGLang takes such a mixture for W4A8 with FP8, serve it with another engine",
            "warning",
            decisive=True,
        )


def _check_sizes(export: Export, config: QuantConfig, layers: dict[str, str]) -> Iterator[Finding]:
    listed = config.section["quantized_layers"] if layers else {}
    sizes = {
        repr(listed[name].get("group_size", 128))
        for name, algo in layers.items()
        if algo in _BLOCK_FP8
    }
    if len(sizes) > 1:
        yield Finding(
            "mixed-block-size",
            f"{export.folder}: layers of FP8 in blocks state several group_sizes, "
            f"{', '.join(sorted(sizes))}; vLLM wants one, export again",
        )
