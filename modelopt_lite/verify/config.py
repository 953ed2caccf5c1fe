"""Rule 5: both configs tell the same story, and it is the one that the tensors tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelopt_lite.checkpoint.reader import Checkpoint, read_json
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats.cache import is_fp8
from modelopt_lite.formats.declared import MIXED, Declared
from modelopt_lite.verify.export import Export, nested
from modelopt_lite.verify.findings import Finding, shorten

NESTED_FILE = "hf_quant_config.json"
# What vLLM loads under quant_method "modelopt" (upper-cased before it compares).
VLLM_ALGOS = frozenset(
    {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8"}
)
# What SGLang does, and what it takes in mixtures alone.
SGLANG_ALGOS = frozenset({"FP8", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MXFP8"})
SGLANG_MIXED_ALGOS = frozenset({"FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"})
# TensorRT-LLM knows these as well.
_OTHER_ALGOS = frozenset(
    {
        "W4A16_AWQ",
        "W4A8_AWQ",
        "W8A8_SQ_PER_CHANNEL",
        "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
        "W8A16",
        "INT8",
        "FP8_BLOCK_SCALES",
        "W4A8_NVFP4_FP8",
        "W4A8_MXFP4_FP8",
    }
)
KNOWN_ALGOS = VLLM_ALGOS | SGLANG_ALGOS | _OTHER_ALGOS | {MIXED}
# As written -> who does not know it so, and what it is there.
_SPELLED = {
    "fp8": ("sglang", "FP8"),
    "Fp8": ("sglang", "FP8"),
    "FP8_PB_WO": ("tensorrt_llm", "fp8_pb_wo"),
}
# Part of a quant_algo -> what the nested file must state for it, if only as null.
_NESTED_KEYS = {
    "NVFP4": ("group_size", "kv_cache_quant_algo", "exclude_modules"),
    "MXFP8": ("kv_cache_quant_algo", "exclude_modules"),
}


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """What one home of the quantization config says.

    Attributes:
        algo: ``quant_algo`` as written.
        kv_cache: Format of the key and value cache, None without one.
        group_size: Elements that share a scale, None where it is not said.
        exclude: The modules that are not quantized.
        declared: The formats that it states.
        section: All of it.
    """

    algo: str | None
    kv_cache: str | None
    group_size: int | None
    exclude: tuple[str, ...]
    declared: Declared
    section: Mapping[str, Any]


def read_configs(checkpoint: Checkpoint) -> tuple[QuantConfig | None, list[Finding]]:
    """Read both homes, and check each by itself and one against the other.

    Rules: ``config-missing``, ``config-readable``, ``config-method``, ``config-keys``,
    ``config-producer``, ``config-homes``, ``kv-config-flat``.

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
                engines=("vllm", "sglang"),
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
    if "NVFP4" in str(section.get("quant_algo")).upper() and "ignore" not in section:
        findings.append(
            Finding(
                "config-keys",
                f"{path}: quantization_config lacks 'ignore', which SGLang demands for NVFP4, even "
                "as an empty list; export again",
                engines=("sglang",),
            )
        )
    scheme = section.get("kv_cache_scheme", section.get("kv_cache_quant_algo"))
    if isinstance(scheme, dict):
        scheme = "FP8" if is_fp8(scheme) else str(scheme)
    elif str(scheme).upper() == "FP8":
        findings.append(
            Finding(
                "kv-config-flat",
                f"{path}: states the KV cache as {scheme!r}, which vLLM ignores there; state "
                'kv_cache_scheme as {"type": "float", "num_bits": 8}',
                "warning",
                decisive=True,
            )
        )
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
                engines=("tensorrt_llm",),
            )
        )
        return None
    try:
        content = read_json(path)
    except CheckpointError as error:
        findings.append(Finding("config-readable", str(error)))
        return None
    section, producer = content.get("quantization"), content.get("producer")
    if not isinstance(section, dict):
        findings.append(Finding("config-readable", f"{path}: has no object 'quantization'"))
        return None
    if not isinstance(producer, dict) or producer.get("name") != "modelopt":
        findings.append(
            Finding(
                "config-producer",
                f"{path}: producer is {producer!r}; TensorRT-LLM reads the file only with the "
                'producer {"name": "modelopt"}, add it',
            )
        )
    algo = section.get("quant_algo")
    demanded = next((keys for name, keys in _NESTED_KEYS.items() if name in str(algo).upper()), ())
    if lacking := [key for key in demanded if key not in section]:
        findings.append(
            Finding(
                "config-keys",
                f"{path}: lacks {shorten(lacking)}, which vLLM demands for {algo}; export again",
                engines=("vllm",),
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
        section=section,
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
    """Rules: ``quant-algo``, ``algo-spelling``, ``format-unchecked``, ``config-groups``."""
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
                engines=("vllm",),
                decisive=True,
            )
        return
    if export.algo not in KNOWN_ALGOS:
        yield Finding(
            "quant-algo",
            f"{export.folder}: no engine loads quant_algo {config.algo!r}; export another format",
            "warning" if export.declared.formats_of("") else "error",  # ours at least reads it
            decisive=True,
        )
    elif packed is not None and export.algo != MIXED and export.format_of(packed) is None:
        yield Finding(
            "format-unchecked",
            f"{export.folder}: shapes and scales of {config.algo} are not checked here",
            "warning",
        )
    if (wrong := _SPELLED.get(str(config.algo))) is not None:
        engine, right = wrong
        yield Finding(
            "algo-spelling",
            f"{export.folder}: quant_algo is {config.algo!r}, which {engine} knows as {right!r} "
            "alone; spell it so",
            "warning",
            engines=(engine,),
            decisive=True,
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
                engines=("vllm",),
            )


def check_group_size(export: Export, config: QuantConfig) -> Iterator[Finding]:
    """Rule ``config-group-size``."""
    if export.algo in (None, MIXED):
        return
    packed = next(export.packed(), None)
    fmt = export.format_of(packed) if packed is not None else None
    # Readers know the size of all blocks but NVFP4's by the name of the format.
    stated = config.group_size is not None or "NVFP4" in str(export.algo)
    if fmt and stated and config.group_size != fmt.group_size:
        yield Finding(
            "config-group-size",
            f"{export.folder}: group_size is {config.group_size!r}, {fmt.quant_algo} has blocks of "
            f"{fmt.group_size}; export again",
        )
    sizes = {repr(part["group_size"]) for part in nested(config.section) if "group_size" in part}
    if "FP4" in str(export.algo) and len(sizes) > 1:
        yield Finding(
            "config-group-size",
            f"{export.folder / NESTED_FILE}: states several group_sizes, {', '.join(sorted(sizes))}"
            "; SGLang refuses that, state one",
            engines=("sglang",),
        )


def tied(config: dict[str, Any]) -> bool:
    """Return whether the output head is the embedding, by a config or one nested in it."""
    return any(part.get("tie_word_embeddings") is True for part in nested(config))
