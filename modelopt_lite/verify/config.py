"""Rule 5: both configs tell the same story, and it is the one that the tensors tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelopt_lite.checkpoint.reader import Checkpoint, read_json
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats.declared import MIXED, Declared
from modelopt_lite.verify.export import Export, Module, nested
from modelopt_lite.verify.findings import Finding, shorten
from modelopt_lite.verify.matchers import sglang_excluded, tensorrt_excluded, vllm_excluded

NESTED_FILE = "hf_quant_config.json"
# vLLM refuses all others under quant_method "modelopt" (upper-cased before it compares).
_VLLM_ALGOS = frozenset(
    {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8"}
)
# TensorRT-LLM, and partly SGLang, load these as well.
_OTHER_ALGOS = frozenset(
    {
        "NVFP4_AWQ",
        "W4A16_AWQ",
        "W4A8_AWQ",
        "W8A8_SQ_PER_CHANNEL",
        "W8A16",
        "INT8",
        "FP8_BLOCK_SCALES",
        "W4A8_NVFP4_FP8",
        "W4A8_MXFP4_FP8",
        "MIXED_PRECISION",
    }
)
# Joined layers of the engines -> their parts on disk.
FUSED_NAMES = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj_with_mqa",
}
_NESTED_KEYS = ("group_size", "kv_cache_quant_algo", "exclude_modules")
_ENTRY = re.compile(r"[\w.*-]*[\w*-]")
# vLLM never quantizes layers with one of these in their names, whatever the list says.
_VLLM_TOWERS = ("vision_tower", "vision_model", "vit_large_projector")


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """What one home of the quantization config says.

    Attributes:
        algo: ``quant_algo`` as written.
        kv_cache: Format of the key and value cache, None without one.
        group_size: Elements that share a scale, None where it is not said.
        exclude: The modules that are not quantized.
        declared: The formats that it states.
    """

    algo: str | None
    kv_cache: str | None
    group_size: int | None
    exclude: tuple[str, ...]
    declared: Declared


def read_configs(checkpoint: Checkpoint) -> tuple[QuantConfig | None, list[Finding]]:
    """Read both homes, and check each by itself and one against the other.

    Rules: ``config-missing``, ``config-readable``, ``config-method``, ``config-keys``,
    ``config-homes``.

    Returns:
        The config, ``hf_quant_config.json`` first as TensorRT-LLM has it; None without any.
    """
    findings: list[Finding] = []
    flat = _read_flat(checkpoint, findings)
    nested_config = _read_nested(checkpoint.path, findings)
    if flat is not None and nested_config is not None:
        findings += _disagreements(checkpoint.path, flat, nested_config)
    return nested_config or flat, findings


def declared_formats(checkpoint: Checkpoint, config: QuantConfig | None) -> Declared:
    """Return what both homes together say of each module's format."""
    declared = config.declared if config is not None else Declared()
    flat = checkpoint.config.get("quantization_config")
    if isinstance(flat, dict) and declared.inputs is None:  # only config.json has config_groups
        declared = replace(declared, inputs=Declared.of(flat).inputs)
    return declared


def _read_flat(checkpoint: Checkpoint, findings: list[Finding]) -> QuantConfig | None:
    path = checkpoint.path / "config.json"
    section = checkpoint.config.get("quantization_config")
    if not isinstance(section, dict):
        findings.append(
            Finding(
                "config-missing",
                f"{path}: has no quantization_config; vLLM and SGLang then load the codes as "
                "plain weights, export again",
            )
        )
        return None
    if not str(section.get("quant_method", "")).startswith("modelopt"):
        findings.append(
            Finding(
                "config-method",
                f'{path}: quant_method is {section.get("quant_method")!r}, must be "modelopt"',
            )
        )
    scheme = section.get("kv_cache_scheme", section.get("kv_cache_quant_algo"))
    if isinstance(scheme, dict):
        eight = scheme.get("type") == "float" and scheme.get("num_bits") == 8
        scheme = "FP8" if eight else str(scheme)
    size = section.get("group_size")
    groups = section.get("config_groups") if section.get("quant_algo") != MIXED else None
    for group in groups.values() if isinstance(groups, dict) and size is None else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        size = weights.get("group_size", size) if isinstance(weights, dict) else size
    return _made(path, section, scheme, size, section.get("ignore"), findings)


def _read_nested(folder: Path, findings: list[Finding]) -> QuantConfig | None:
    path = folder / NESTED_FILE
    if not path.exists():
        findings.append(
            Finding(
                "config-missing",
                f"{path}: does not exist; TensorRT-LLM then takes the model for unquantized, "
                "export again",
            )
        )
        return None
    try:
        section = read_json(path).get("quantization")
    except CheckpointError as error:
        findings.append(Finding("config-readable", str(error)))
        return None
    if not isinstance(section, dict):
        findings.append(Finding("config-readable", f"{path}: has no object 'quantization'"))
        return None
    algo = section.get("quant_algo")
    lacking = [key for key in _NESTED_KEYS if key not in section]
    if "NVFP4" in str(algo).upper() and lacking:
        findings.append(
            Finding(
                "config-keys",
                f"{path}: lacks {shorten(lacking)}, which vLLM demands for {algo}; export again",
            )
        )
    kv_cache, size = section.get("kv_cache_quant_algo"), section.get("group_size")
    return _made(path, section, kv_cache, size, section.get("exclude_modules"), findings)


def _made(
    path: Path,
    section: Mapping[str, Any],
    kv_cache: Any,
    size: Any,
    exclude: Any,
    findings: list[Finding],
) -> QuantConfig:
    exclude = [] if exclude is None else exclude
    if not isinstance(exclude, list) or not all(isinstance(e, str) for e in exclude):
        findings.append(
            Finding("config-readable", f"{path}: the list of excluded modules is {exclude!r}")
        )
        exclude = []
    algo = section.get("quant_algo")
    return QuantConfig(
        algo=None if algo is None else str(algo),
        kv_cache=None if kv_cache is None else str(kv_cache),
        group_size=size if isinstance(size, int) else None,
        exclude=tuple(exclude),
        declared=Declared.of({**section, "group_size": size}),
    )


def _disagreements(folder: Path, flat: QuantConfig, inner: QuantConfig) -> Iterator[Finding]:
    for what, one, other in (
        ("quant_algo", flat.algo, inner.algo),
        ("KV cache format", flat.kv_cache, inner.kv_cache),
        ("group_size", flat.group_size, inner.group_size),
        ("excluded modules", set(flat.exclude), set(inner.exclude)),
        ("quantized layers", flat.declared.entries, inner.declared.entries),
    ):
        silent = what == "group_size" and one is None  # readers fall back to the format's own
        if one != other and not silent:
            shown = (one, other)
            if isinstance(one, set) and isinstance(other, set):
                shown = (shorten(sorted(one - other)), shorten(sorted(other - one)))
            yield Finding(
                "config-homes",
                f"{folder}: {what} is {shown[0]} in config.json and {shown[1]} in {NESTED_FILE}; "
                "engines read one or the other, export again",
            )


def check_algo(export: Export, config: QuantConfig) -> Iterator[Finding]:
    """Rules: ``quant-algo``, ``config-groups``, ``config-group-size``."""
    packed = next(export.packed(), None)
    if export.algo is None:
        if packed is not None:
            yield Finding(
                "quant-algo",
                f"{export.folder}: the configs name no quant_algo, and {packed.name!r} is packed; "
                "export again",
            )
        else:
            yield Finding(
                "quant-algo",
                f"{export.folder}: the configs name no quant_algo; vLLM refuses such a config",
                "warning",
            )
        return
    if export.algo not in _VLLM_ALGOS | _OTHER_ALGOS:
        yield Finding(
            "quant-algo",
            f"{export.folder}: no engine loads quant_algo {config.algo!r}; export another format",
            "warning" if export.declared.formats_of("") else "error",  # ours at least reads it
        )
    elif export.algo not in _VLLM_ALGOS and export.algo != MIXED:
        yield Finding(
            "quant-algo",
            f"{export.folder}: vLLM does not load quant_algo {config.algo!r}; serve it with "
            "another engine, or export another format",
            "warning",
        )
    elif packed is not None and export.format_of(packed) is None:
        yield Finding(
            "quant-algo",
            f"{export.folder}: shapes and scales of {config.algo} are not checked here",
            "warning",
        )
    fmt = export.format_of(packed) if packed is not None and export.algo != MIXED else None
    # Readers know the size of all blocks but NVFP4's by the name of the format.
    stated = config.group_size is not None or (export.algo is not None and "NVFP4" in export.algo)
    if fmt and stated and config.group_size != fmt.group_size:
        yield Finding(
            "config-group-size",
            f"{export.folder}: group_size is {config.group_size!r}, {fmt.quant_algo} has blocks of "
            f"{fmt.group_size}; export again",
        )
    section = export.checkpoint.config.get("quantization_config")
    groups = section.get("config_groups") if isinstance(section, dict) else None
    if export.algo == "NVFP4" and isinstance(groups, dict) and groups:
        given = [g.get("input_activations") for g in groups.values() if isinstance(g, dict)]
        if not any(given):
            yield Finding(
                "config-groups",
                f"{export.folder}: config_groups name no input_activations; vLLM then runs NVFP4 "
                "as weight-only, export again",
            )


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
        )
    if packed[0]:
        if wrong := [engine for engine, answer in answers.items() if answer]:
            yield Finding(
                "excluded-but-packed",
                f"{export.folder}: {layer.prefix!r} is packed, and the list of excluded modules "
                f"leaves it out as {', '.join(wrong)} reads it; correct the list",
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
        )


def tied(config: dict[str, Any]) -> bool:
    """Return whether the output head is the embedding, by a config or one nested in it."""
    return any(part.get("tie_word_embeddings") is True for part in nested(config))
