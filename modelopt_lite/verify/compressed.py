"""Rule 5 in the compressed-tensors dialect: the config tells the story that the tensors tell."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.dialects.compressed_tensors import MIXED_FORMATS, STATUS
from modelopt_lite.dialects.regexes import RegexError, matches
from modelopt_lite.dialects.schemes import Schemes
from modelopt_lite.formats.packed import words
from modelopt_lite.verify.export import Export, Module
from modelopt_lite.verify.findings import Finding, shorten


def read_schemes(checkpoint: Checkpoint) -> tuple[Schemes, list[Finding]]:
    """Read the groups of ``config.json``. Rules: ``config-status``, ``config-format``."""
    section = checkpoint.config["quantization_config"]
    path = checkpoint.path / "config.json"
    stated = Schemes.of(section)
    findings = []
    if section.get("quantization_status") != STATUS:
        findings.append(
            Finding(
                "config-status",
                f"{path}: quantization_status is {section.get('quantization_status')!r}, must be "
                f"{STATUS!r}; transformers then takes codes for weights, export again",
            )
        )
    empty = not stated.schemes and stated.kv_cache is None  # a cache may be all that is quantized
    if empty or not all(s.targets and s.weights for s in stated.schemes):
        findings.append(
            Finding(
                "config-groups",
                f"{path}: config_groups must name targets and tell their weights in numbers, in "
                "each group; export again",
            )
        )
    formats = {scheme.format for scheme in stated.schemes}
    if len(formats) > 1 and stated.format != MIXED_FORMATS:
        findings.append(
            Finding(
                "config-format",
                f"{path}: format is {stated.format!r}, and the groups have {len(formats)} formats "
                f"({shorten(sorted(map(str, formats)))}); it must be {MIXED_FORMATS!r}",
            )
        )
    return stated, findings


def check_schemes(export: Export, stated: Schemes) -> Iterator[Finding]:
    """Compare what the config says of each module with its tensors.

    Rules: ``config-groups``, ``format-unchecked``, ``excluded-but-packed``,
    ``unpacked-not-excluded``, ``kv-config``, ``num-bits``.
    """
    yield from _check_entries(export, stated)
    yield from _check_bits(export, stated)
    unchecked: list[str] = []
    for module in export.packed():
        scheme = stated.scheme_of(module.name)
        if scheme is None:
            yield Finding(
                "config-groups",
                f"{export.folder}: {module.name!r} is packed, and no group of config.json targets "
                "it; export again",
            )
        elif scheme.known is None and scheme.weights:
            unchecked.append(module.name)
        if stated.ignores(module.name):
            yield Finding(
                "excluded-but-packed",
                f"{export.folder}: {module.name!r} is packed, and the config ignores it; correct "
                "the list",
            )
    if unchecked:
        yield Finding(
            "format-unchecked",
            f"{export.folder}: {shorten(unchecked)} is of a format that is not checked here",
            "warning",
        )
    left = [
        module.name
        for module in export.modules.values()
        # Readers do not quantize embeddings, listed or not.
        if module.weight is not None and not module.packed and "embed" not in module.role
        # Readers know the experts of a stack by the name of the block that holds it.
        if stated.scheme_of(module.name) and not stated.ignores(module.name)
        if not (module.stacked and stated.ignores(module.parent))
    ]
    if left:
        yield Finding(
            "unpacked-not-excluded",
            f"{export.folder}: {shorten(left)} is not packed, and the config does not ignore "
            "it; readers then look for its codes, add it",
        )
    yield from _check_cache(export, stated)


def _check_bits(export: Export, stated: Schemes) -> Iterator[Finding]:
    """Rule ``num-bits``: there are codes of that many bits, and the words that they would fill."""
    for scheme in stated.schemes:
        bits, kind = scheme.weights.get("num_bits"), scheme.weights.get("type", "int")
        possible = (4, 8) if kind == "float" else range(1, 9)
        if scheme.weights and (type(bits) is not int or bits not in possible):
            yield Finding(
                "num-bits",
                f"{export.folder / 'config.json'}: num_bits is {bits!r} for weights of type "
                f"{kind!r}, which must be one of {', '.join(map(str, possible))}; correct the "
                "group, or export again",
            )
    wrong = [module.name for module in export.packed() if not _fills_words(export, module, stated)]
    if wrong:
        yield Finding(
            "num-bits",
            f"{export.folder}: {shorten(wrong)} has another number of words than codes of the "
            "config's num_bits fill; correct num_bits, or export again",
        )


def _fills_words(export: Export, module: Module, stated: Schemes) -> bool:
    """Whether a row has the words that its codes need; true where that cannot be told.

    A shape that disagrees with the rows is the matter of the rule ``packed-shape``.
    """
    scheme, codes, shape = stated.scheme_of(module.name), module.weight, None
    info = module.scales.get("weight_shape")
    if info is not None and info.shape == (2,) and info.dtype == torch.int64:
        shape = export.checkpoint.read(info.name).tolist()
    if scheme is None or codes is None or shape is None or codes.dtype != torch.int32:
        return True
    bits = scheme.weights.get("num_bits")
    if type(bits) is not int or not 1 <= bits <= 8 or scheme.known is not None:
        return True
    return codes.shape[0] != shape[0] or codes.shape[-1] == words(shape[1], bits)


def _check_entries(export: Export, stated: Schemes) -> Iterator[Finding]:
    """Rule ``exclude-entry``: regular expressions are such, in the list and in targets."""
    for entry in (*stated.ignore, *(t for s in stated.schemes for t in s.targets)):
        if entry.startswith("re:"):
            try:
                matches(entry.removeprefix("re:"), "")
            except RegexError as error:
                yield Finding(
                    "exclude-entry",
                    f"{export.folder / 'config.json'}: the expression {entry[:80]!r} {error}; "
                    "correct it",
                )


def _check_cache(export: Export, stated: Schemes) -> Iterator[Finding]:
    if bool(stated.kv_cache) != bool(export.kv_scales):
        yield Finding(
            "kv-config",
            f"{export.folder}: kv_cache_scheme is {stated.kv_cache!r}, and "
            f"{len(export.kv_scales)} tensors k_scale and v_scale exist; readers want both or "
            "none, export again",
        )
    if stated.kv_cache and (stated.kv_cache.get("num_bits"), stated.kv_cache.get("type")) != (
        8,
        "float",
    ):
        yield Finding(
            "kv-config",
            f"{export.folder}: kv_cache_scheme is {stated.kv_cache!r}; engines know FP8 alone",
        )
