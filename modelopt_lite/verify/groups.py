"""Rule 6: what an engine joins shares format and scales; every expert and every layer is there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from modelopt_lite.formats.declared import MIXED
from modelopt_lite.offload.patterns import match_part
from modelopt_lite.verify.config import QuantConfig
from modelopt_lite.verify.export import Export, KVScale, Module, nested, scalar
from modelopt_lite.verify.findings import Finding, shorten

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_groups(export: Export) -> Iterator[Finding]:
    """Rules: ``group-format``, ``group-scale``.

    Unequal FP8 scales are a warning: engines then quantize the smaller ones anew, with a loss.
    """
    siblings: dict[str, dict[str, Module]] = {}
    for module in export.modules.values():
        if module.weight is not None and not module.stacked:
            siblings.setdefault(module.parent, {})[module.role] = module
    for roles in siblings.values():
        for parts in export.ptq.fused_linears:
            members = [roles[part] for part in parts if part in roles]
            if len(members) > 1:
                yield from _check_group(export, members)


def _check_group(export: Export, members: list[Module]) -> Iterator[Finding]:
    names = shorten(m.name for m in members)
    dtypes = {m.weight.dtype for m in members if m.weight}
    if len(dtypes) > 1:
        yield Finding(
            "group-format",
            f"{export.folder}: {names} are joined by engines and differ in format "
            f"({', '.join(sorted(map(str, dtypes)))}); quantize all of them or none",
        )
        return
    if not members[0].packed:
        return
    formats = {fmt.name: fmt for m in members if (fmt := export.format_of(m))}
    if len(formats) > 1:
        yield Finding(
            "group-format",
            f"{export.folder}: {names} are joined by engines and differ in format "
            f"({', '.join(sorted(formats))}); give all of them one format",
        )
    if len(formats) != 1:
        return
    two_level = "weight_scale_2" in members[0].scales
    [fmt] = formats.values()
    whole = "weight_scale_2" if two_level else "weight_scale"
    # A matrix of a single block has a scale of one element, too, and engines keep each.
    shared = (whole, "input_scale") if two_level or fmt.group_size is None else ("input_scale",)
    for suffix in shared:
        infos = [m.scales[suffix] for m in members if suffix in m.scales]
        if len(infos) < 2 or any(info.numel != 1 for info in infos):
            continue
        values = [scalar(export.checkpoint, info) for info in infos]
        if any(value != values[0] for value in values):
            yield Finding(
                "group-scale",
                f"{export.folder}: {names} are joined by engines and their {suffix} differs "
                f"({', '.join(f'{value:.6g}' for value in values)}); quantize them together",
                "error" if two_level else "warning",
            )


def check_listed(export: Export, config: QuantConfig) -> Iterator[Finding]:
    """Rule ``mixed-layers``: where there are several formats, every packed module states its own.

    Engines leave what is not listed unquantized, and look for codes where something is.
    """
    if export.algo != MIXED:
        return
    listed = set(config.declared.layers or {})
    packed = {module.name for module in export.packed()}
    for names, what in (
        (packed - listed, "is packed, and quantized_layers does not list it"),
        (listed - packed, "is listed in quantized_layers, and is not packed"),
    ):
        if names:
            yield Finding("mixed-layers", f"{export.folder}: {shorten(sorted(names))} {what}")
    if unknown := sorted(n for n in packed & listed if not export.declared.formats_of(n)):
        yield Finding(
            "mixed-layers",
            f"{export.folder}: {shorten(unknown)} is of a format that is not checked here",
            "warning",
        )


def check_experts(export: Export) -> Iterator[Finding]:
    """Rules: ``expert-missing``, ``expert-format``."""
    pattern = re.compile(rf"(.*(?:^|\.){re.escape(export.storage.container)})\.(\d+)\.(.+)")
    blocks: dict[str, dict[str, dict[int, Module]]] = {}
    for module in export.modules.values():
        if module.weight is not None and (match := pattern.fullmatch(module.name)):
            roles = blocks.setdefault(match[1], {})
            roles.setdefault(match[3], {})[int(match[2])] = module
    stated = _expert_count(export)
    for block, roles in blocks.items():
        present = {index for experts in roles.values() for index in experts}
        wanted = set(range(max(max(present) + 1, stated)))
        for role, experts in roles.items():
            if absent := sorted(wanted - set(experts)):
                shown = shorten(f"{block}.{index}.{role}" for index in absent)
                yield Finding(
                    "expert-missing",
                    f"{export.folder}: {shown} of {len(wanted)} experts lacks its weight; engines "
                    "leave its memory uninitialized, export again",
                )
        everyone = [m for experts in roles.values() for m in experts.values()]
        dtypes = {m.weight.dtype for m in everyone if m.weight}
        if len(dtypes) > 1:
            plain = shorten(m.name for m in everyone if not m.packed)
            yield Finding(
                "expert-format",
                f"{export.folder}: the experts of {block!r} differ in format, {plain} is not "
                "packed; quantize all of them or none",
            )


def _expert_count(export: Export) -> int:
    counts = [
        value
        for part in nested(export.checkpoint.config)
        for key in _EXPERT_COUNTS
        if isinstance(value := part.get(key), int)
    ]
    return max(counts, default=0)


def check_kv(export: Export) -> Iterator[Finding]:
    """Rules: ``kv-scale-shape``, ``kv-pair``, ``kv-missing``."""
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
        if name not in layers and not any(match_part(p, f"{name}.{key}") for p in left_out)
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
