"""Scales of the key and value cache: where they stand, in pairs, as the configs say."""

from __future__ import annotations

from collections.abc import Iterator

from modelopt_lite.offload.patterns import match_part
from modelopt_lite.verify.config import QuantConfig
from modelopt_lite.verify.export import Export, KVScale
from modelopt_lite.verify.findings import Finding, shorten


def check_kv(export: Export) -> Iterator[Finding]:
    """Rules: ``kv-name``, ``kv-scale-shape``, ``kv-pair``, ``kv-missing``."""
    yield from _check_names(export)
    layers: dict[str, dict[str, KVScale]] = {}
    for scale in export.kv_scales:
        layers.setdefault(scale.attention, {})[scale.which] = scale
        if scale.tensor.shape not in {(), (1,)}:
            yield Finding(
                "kv-scale-shape",
                f"{scale.tensor.file}: {scale.tensor.name!r} has shape "
                f"{list(scale.tensor.shape)}, engines read one element; export again",
            )
    for attention, scales in layers.items():
        if len(scales) == 1:
            (which,) = scales
            other = "v" if which == "k" else "k"
            yield Finding(
                "kv-pair",
                f"{export.folder}: {attention!r} has {which}_scale and no {other}_scale; engines "
                "want both or none, export again",
            )
    if not layers:
        return
    key = export.ptq.key_value_names[0]
    attentions = [m.parent for m in export.modules.values() if m.role == key and m.weight]
    left_out = export.ptq.skip_modules
    if absent := [
        name
        for name in attentions
        if not any(name == layer or name.startswith(f"{layer}.") for layer in layers)
        and not any(match_part(p, f"{name}.{key}") for p in left_out)
    ]:
        yield Finding(
            "kv-missing",
            f"{export.folder}: {shorten(absent)} has no k_scale and v_scale, other layers have; "
            "engines scale its cache by 1, export again",
            "error" if export.spec else "warning",  # without a spec it may be of a vision tower
        )


def check_kv_config(export: Export, config: QuantConfig) -> Iterator[Finding]:
    """Rule ``kv-config``: scales of a KV cache exist where a format for it is stated.

    A format without scales is a warning: ``fp8_cast`` and ``nvfp4_cast`` mean it. An affine format
    has biases, and others have none.
    """
    affine = (config.kv_cache or "").upper().endswith("_AFFINE")
    if affine != bool(export.kv_biases):
        yield Finding(
            "kv-config",
            f"{export.folder}: the configs state the KV cache format {config.kv_cache}, and "
            f"{len(export.kv_biases)} tensors k_bias and v_bias exist; engines then subtract "
            "nothing, or what is not there, export again",
            "error" if affine else "warning",
        )
    if config.kv_cache and not export.kv_scales:
        yield Finding(
            "kv-config",
            f"{export.folder}: the configs state a {config.kv_cache} KV cache, and no k_scale or "
            "v_scale exists; engines then scale by 1, export again if that is not meant",
            "warning",
        )
    elif export.kv_scales and not config.kv_cache:
        name = export.kv_scales[0].tensor.name
        yield Finding(
            "kv-config",
            f"{export.folder}: {name!r} exists, and the configs state no KV cache format; engines "
            "ignore it, export again",
        )


def _check_names(export: Export) -> Iterator[Finding]:
    """Rule ``kv-name``: engines look for a scale at few places, and ignore it elsewhere."""
    key, value = export.ptq.key_value_names
    homes = {"k": {key, "k_proj", "qkv_proj"}, "v": {value, "v_proj", "qkv_proj"}}
    wrong = [
        scale.tensor.name
        for scale in export.kv_scales
        if (role := scale.tensor.name.split(".")[-2:][0]).endswith("_proj")
        and role not in homes[scale.which]
    ]
    wrong += [name for name in export.tensors if name.rpartition(".")[2] == "kv_scale"]
    if wrong:
        yield Finding(
            "kv-name",
            f"{export.folder}: {shorten(wrong)} stands where engines do not look for a scale of "
            "the cache; name it k_proj.k_scale, v_proj.v_scale, or k_scale and v_scale of the "
            "attention",
        )
