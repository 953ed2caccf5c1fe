"""Rule 6: what an engine joins shares format and scales; every expert and every layer is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from modelopt_lite.dialects.compressed_tensors import CompressedTensors
from modelopt_lite.verify.config import tied
from modelopt_lite.verify.export import Export, Module, nested, scalar
from modelopt_lite.verify.findings import Finding, shorten

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHOWN = 4
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# vLLM compares the input scales of gate and up of compressed-tensors' FP8 experts with it.
_CLOSE = 1e-5


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
                yield from _check_biases(export, members)
    yield from _check_complete(export)


def _check_biases(export: Export, members: list[Module]) -> Iterator[Finding]:
    """Rule ``group-bias``."""
    given = {m.name: f"{m.name}.bias" in export.tensors for m in members}
    if len(set(given.values())) > 1:
        yield Finding(
            "group-bias",
            f"{export.folder}: of {shorten(given)}, which engines join, "
            f"{shorten(name for name, has in given.items() if not has)} has no bias; TensorRT-LLM "
            "wants all of them or none, export again",
        )


def _check_complete(export: Export) -> Iterator[Finding]:
    """Rule ``group-incomplete``: a part is missing that other layers have at the same place."""
    siblings: dict[str, set[str]] = {}
    packed: set[str] = set()
    for module in export.modules.values():
        if not module.stacked:
            siblings.setdefault(module.parent, set()).add(module.role)
            packed.update({module.parent} if module.packed else ())
    places: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for parent, roles in siblings.items():
        for parts in export.ptq.fused_linears:
            present = {part for part in parts if part in roles}
            places.setdefault((_NUMBER.sub("*", f".{parent}."), parts), set()).update(present)
    for parent, roles in siblings.items():
        if parent not in packed or export.storage.expert_of(f"{parent}.x")[0] is not None:
            continue  # experts are counted by their own rule
        for parts in export.ptq.fused_linears:
            elsewhere = places[_NUMBER.sub("*", f".{parent}."), parts]
            absent = [p for p in parts if p in elsewhere and p not in roles]
            if absent and len(absent) < len(elsewhere) and not _of_the_model(export, parent, parts):
                yield Finding(
                    "group-incomplete",
                    f"{export.folder}: {parent!r} has no {shorten(absent)}, and other layers have; "
                    f"engines want all of {shorten(parts)}, export again unless the model's own "
                    "layer lacks it",
                    "warning",  # the last layers of some models take keys and values from others
                )


def _of_the_model(export: Export, parent: str, parts: tuple[str, ...]) -> bool:
    """Whether the config says that values are keys, so that a layer has no ``v_proj``."""
    return "v_proj" in parts and any(
        part.get("attention_k_eq_v") for part in nested(export.checkpoint.config)
    )


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
            refused = _refused(export, members[0], suffix, values)
            yield Finding(
                "group-scale",
                f"{export.folder}: {names} are joined by engines and their {suffix} differs "
                f"({', '.join(f'{value:.6g}' for value in values)}); quantize them together",
                "error" if two_level or refused else "warning",
                engines=("vllm",) if refused else None,
            )


def _refused(export: Export, member: Module, suffix: str, values: list[float]) -> bool:
    """Whether vLLM refuses one-level experts for their input scales."""
    expert = export.storage.expert_of(member.name)[0] is not None
    far = max(values) - min(values) > _CLOSE
    return far and expert and suffix == "input_scale" and _is_compressed(export)


def _is_compressed(export: Export) -> bool:
    return export.dialect.name == CompressedTensors.name


def check_experts(export: Export) -> Iterator[Finding]:
    """Rules: ``expert-missing``, ``expert-format``."""
    pattern = re.compile(
        rf"(.*(?:^|\.){re.escape(export.storage.container)})\.([0-9]{{1,9}})\.(.+)"
    )
    blocks: dict[str, dict[str, dict[int, Module]]] = {}
    for module in export.modules.values():
        if module.weight is not None and (match := pattern.fullmatch(module.name)):
            roles = blocks.setdefault(match[1], {})
            roles.setdefault(match[3], {})[int(match[2])] = module
    stated = _expert_count(export)
    for block, roles in blocks.items():
        everyone = [m for experts in roles.values() for m in experts.values()]
        ours = not export.storage.linear_names or not roles.keys().isdisjoint(
            export.storage.linear_names
        )
        if not ours and not any(m.packed for m in everyone):
            continue  # experts of a tower, which are others than those of the text
        present = {index for experts in roles.values() for index in experts}
        wanted = max(
            max(present) + 1, stated
        )  # a number of strangers: nothing of that size is made
        for role in export.storage.linear_names:
            roles.setdefault(role, {})
        for role, experts in roles.items():
            if absent := wanted - len(experts):
                first = islice((i for i in range(wanted) if i not in experts), _SHOWN)
                shown = ", ".join(repr(f"{block}.{index}.{role}") for index in first)
                more = f" and {absent - _SHOWN} more" if absent > _SHOWN else ""
                yield Finding(
                    "expert-missing",
                    f"{export.folder}: {shown}{more} of {wanted} experts lacks its weight; engines "
                    "leave its memory uninitialized, export again",
                )
        yield from _check_formats(export, block, everyone)


def _check_formats(export: Export, block: str, experts: list[Module]) -> Iterator[Finding]:
    """Rule ``expert-format``."""
    plain = [m.name for m in experts if not m.packed]
    if plain and len(plain) < len(experts):
        yield Finding(
            "expert-format",
            f"{export.folder}: the experts of {block!r} differ in format, {shorten(plain)} is not "
            "packed; quantize all of them or none",
        )
        return
    formats = {fmt.name: m.name for m in experts if m.packed and (fmt := export.format_of(m))}
    if len(formats) > 1:
        shown = ", ".join(f"{name!r} is {fmt}" for fmt, name in sorted(formats.items()))
        yield Finding(
            "expert-format",
            f"{export.folder}: the experts of {block!r} differ in format, {shown}; vLLM takes that "
            "of the first for all, give them one",
        )


def check_head(export: Export) -> Iterator[Finding]:
    """Rule ``tied-head``."""
    if not tied(export.checkpoint.config):
        return
    for module in export.modules.values():
        if module.role == "lm_head" and (module.packed or module.scales):
            yield Finding(
                "tied-head",
                f"{export.folder}: tie_word_embeddings is true, and {module.name!r} is quantized; "
                "engines take the embedding for it, set the flag to false or leave the head",
            )


def _expert_count(export: Export) -> int:
    counts = [
        value
        for part in nested(export.checkpoint.config)
        for key in _EXPERT_COUNTS
        if isinstance(value := part.get(key), int)
    ]
    return max(counts, default=0)
