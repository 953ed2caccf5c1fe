"""How three engines read the list of modules that are not quantized.

The same list means different things to each: vLLM also takes an entry as a substring, SGLang also
compares it with single parts of a name, TensorRT-LLM (and Model Optimizer itself) only with whole
names. An export is right when all of them come to the same set.

Read from: vLLM 0.32.0 ``quantization/modelopt.py``, SGLang 0.5.23
``quantization/modelopt_quant.py``, TensorRT-LLM ``quantization/modelopt_config.py``.

A prefix is the engine's name of a layer: its own name for joined layers ("….qkv_proj"), the
container for routed experts ("….mlp.experts"). Entries hold letters, digits, ``_``, ``.``, ``-``
and ``*``; ``*`` is any run of characters, dots included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelopt_lite.offload.patterns import match_part

# SGLang joins these under other names and looks for them inside of the last part of a prefix.
_SGLANG_MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def vllm_excluded(
    prefix: str,
    patterns: Sequence[str],
    *,
    fused: Mapping[str, Sequence[str]] | None = None,
    mapped: bool = False,
) -> bool | None:
    """Return whether vLLM leaves a layer unquantized; None where it refuses the list.

    Args:
        prefix: The layer in vLLM's naming.
        patterns: The entries of the list.
        fused: Last part of a joined layer -> the parts on disk, ``{"qkv_proj": ("q_proj", …)}``.
            None is returned when the list holds some of them and not all.
        mapped: The model class renames modules. vLLM then replaces ``x*`` by ``x`` and ``x.*``
            first, and ``x`` is a substring of more names than ``x*`` matches.
    """
    entries = _split_stars(patterns) if mapped else list(patterns)
    if not entries:
        return False
    listed = _listed(prefix, frozenset(entries), fused or {})
    if listed is None or listed:
        return listed
    bare = prefix.removeprefix("language_model.")
    return any(
        (entry != prefix and (entry in prefix or entry in bare)) or _matches(entry, prefix)
        for entry in entries
    )


def sglang_excluded(
    prefix: str, patterns: Sequence[str], *, fused: Mapping[str, Sequence[str]] | None = None
) -> bool | None:
    """Return whether SGLang leaves a layer unquantized; None where only a part of it is listed.

    An entry counts when it matches the whole prefix or any single part of it. One that ends with
    the name of a latent-attention projection counts for every layer whose last part contains it.
    Arguments as for `vllm_excluded`.
    """
    listed = _listed(prefix, frozenset(patterns), fused or {})
    if listed is None or listed:
        return listed
    parts = prefix.split(".")
    for entry in patterns:
        last = entry.rpartition(".")[2]
        if last in _SGLANG_MLA and last in parts[-1]:
            return True
        if _matches(entry, prefix) or any(_matches(entry, part) for part in parts):
            return True
    return False


def tensorrt_excluded(name: str, patterns: Sequence[str]) -> bool:
    """Return whether TensorRT-LLM and Model Optimizer leave a module of the disk unquantized.

    An entry counts when it is the whole name, or a glob that matches the whole name.
    """
    return any(_matches(entry, name) for entry in patterns)


def _matches(entry: str, text: str) -> bool:
    return match_part(entry, text) if "*" in entry else entry == text


def _split_stars(patterns: Sequence[str]) -> list[str]:
    entries = []
    for pattern in patterns:
        stem = pattern[:-1]
        if pattern.endswith("*") and stem and not stem.endswith("."):
            entries += [stem, f"{stem}.*"]
        else:
            entries.append(pattern)
    return entries


def _listed(
    prefix: str, entries: frozenset[str], fused: Mapping[str, Sequence[str]]
) -> bool | None:
    """Exact matching: joined layers by their parts on disk, routed experts by any of them."""
    parent, dot, last = prefix.rpartition(".")
    if last in fused:
        hits = [f"{parent}{dot}{part}" in entries for part in fused[last]]
        return hits[0] if len(set(hits)) == 1 else None
    if "experts" in prefix:
        return any(prefix in entry for entry in entries if "experts" in entry)
    return prefix in entries
