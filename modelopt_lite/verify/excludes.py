"""The list of excluded modules, as each engine reads it, against what is quantized on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from modelopt_lite.formats.declared import MIXED
from modelopt_lite.verify.config import QuantConfig
from modelopt_lite.verify.export import Export, Module
from modelopt_lite.verify.findings import Finding, shorten
from modelopt_lite.verify.matchers import sglang_excluded, tensorrt_excluded, vllm_excluded

# Joined layers of the engines -> their parts on disk.
FUSED_NAMES = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj_with_mqa",
}
_KEYS = {"vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "tensorrt_llm"}
_ENTRY = re.compile(r"[\w.*-]*[\w*-]")
# vLLM never quantizes layers with one of these in their names, whatever the list says.
_VLLM_TOWERS = ("vision_tower", "vision_model", "vit_large_projector")


def check_excludes(export: Export, config: QuantConfig) -> Iterator[Finding]:
    """Compare the excluded modules with what is packed, as each of the engines reads the list.

    Rules: ``exclude-entry``, ``exclude-unmatched``, ``excluded-but-packed``,
    ``unpacked-not-excluded``, ``excluded-in-part``.
    """
    if export.algo in (None, MIXED):
        return
    usable = []
    for entry in config.exclude:
        if _ENTRY.fullmatch(entry):
            usable.append(entry)
        else:
            yield Finding(
                "exclude-entry",
                f"{export.folder}: the excluded module {entry!r} is no name that an engine can "
                "match; export again",
            )
    names = {*export.modules, *(m.parent for m in export.modules.values())}
    names.update(name.rpartition(".")[0] for name in export.tensors)
    for entry in usable:
        head = entry.rpartition(".")[2] == "lm_head"  # a tied head has no tensor of its own
        if not head and not any(tensorrt_excluded(name, (entry,)) for name in names):
            yield Finding(
                "exclude-unmatched",
                f"{export.folder}: the excluded module {entry!r} does not exist; remove the entry",
                "warning",
            )
    for layer in engine_layers(export):
        yield from _check_layer(export, layer, usable)


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """A layer as engines build it: its name there and the modules on disk that it is made of."""

    prefix: str
    members: tuple[Module, ...]
    fused: dict[str, tuple[str, ...]]


def engine_layers(export: Export) -> Iterator[EngineLayer]:
    """Yield every layer with a weight: joined projections and the experts of a block as one."""
    container = re.compile(rf"(.*(?:^|\.){re.escape(export.storage.container)})\.\d+\..+")
    experts: dict[str, list[Module]] = {}
    dense: dict[str, dict[str, Module]] = {}
    for module in export.modules.values():
        if module.weight is None:
            continue
        if match := container.fullmatch(module.name):
            experts.setdefault(match[1], []).append(module)
        elif module.stacked:
            experts.setdefault(module.parent, []).append(module)
        else:
            dense.setdefault(module.parent, {})[module.role] = module
    for name, members in experts.items():
        yield EngineLayer(name, tuple(members), {})
    for parent, roles in dense.items():
        dot = "." if parent else ""
        for parts in export.ptq.fused_linears:
            members = [roles.pop(part) for part in parts if part in roles]
            fused = FUSED_NAMES.get(parts)
            if fused and len(members) == len(parts):
                yield EngineLayer(f"{parent}{dot}{fused}", tuple(members), {fused: parts})
            else:
                yield from (EngineLayer(m.name, (m,), {}) for m in members)
        yield from (EngineLayer(m.name, (m,), {}) for m in roles.values())


def _check_layer(export: Export, layer: EngineLayer, entries: list[str]) -> Iterator[Finding]:
    packed = [m.packed for m in layer.members]
    if len(set(packed)) > 1:
        return  # reported as a group that does not share its format
    tower = any(word in layer.prefix for word in _VLLM_TOWERS)
    by_name = [tensorrt_excluded(name, entries) for name in (m.name for m in layer.members)]
    listed = any(by_name) if packed[0] else all(by_name)
    answers = {
        "vLLM": vllm_excluded(layer.prefix, entries, fused=layer.fused),
        "vLLM with renamed modules": vllm_excluded(
            layer.prefix, entries, fused=layer.fused, mapped=True
        ),
        "SGLang": sglang_excluded(layer.prefix, entries, fused=layer.fused),
        "TensorRT-LLM": listed or tensorrt_excluded(layer.prefix, entries),
    }
    if refusing := [engine for engine, answer in answers.items() if answer is None]:
        yield Finding(
            "excluded-in-part",
            f"{export.folder}: the list of excluded modules names a part of {layer.prefix!r} only; "
            f"{', '.join(refusing)} refuses that, name all of "
            f"{shorten(m.name for m in layer.members)}",
            engines=_keys(refusing),
        )
    if packed[0]:
        if wrong := [engine for engine, answer in answers.items() if answer]:
            yield Finding(
                "excluded-but-packed",
                f"{export.folder}: {layer.prefix!r} is packed, and the list of excluded modules "
                f"leaves it out as {', '.join(wrong)} reads it; correct the list",
                engines=_keys(wrong),
            )
        return
    wrong = [
        engine
        for engine, answer in answers.items()
        if answer is False and not (tower and engine.startswith("vLLM"))
    ]
    # Engines do not quantize embeddings, listed or not.
    if wrong and "embed" not in layer.prefix.rpartition(".")[2]:
        yield Finding(
            "unpacked-not-excluded",
            f"{export.folder}: {layer.prefix!r} is not packed, and {', '.join(wrong)} does not "
            "find it among the excluded modules; add it",
            engines=_keys(wrong),
        )


def _keys(readers: list[str]) -> tuple[str, ...]:
    """The engines, as findings name them, of the readers of a list."""
    return tuple(dict.fromkeys(_KEYS[reader.partition(" ")[0]] for reader in readers))


def check_towers(export: Export) -> Iterator[Finding]:
    """Rule ``tower-packed``."""
    packed = [m.name for m in export.packed() if any(word in m.name for word in _VLLM_TOWERS)]
    if packed:
        yield Finding(
            "tower-packed",
            f"{export.folder}: {shorten(packed)} is packed, and vLLM builds vision towers without "
            "quantization; export again with the tower left out",
        )
