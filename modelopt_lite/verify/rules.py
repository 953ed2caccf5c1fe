"""The rules of the audit by name: what each demands, and which engines need it.

The demands are those of vLLM 0.32.0, SGLang 0.5.23, TensorRT-LLM (its PyTorch backend),
transformers 5.14.1 and the package compressed-tensors 0.20.1, read from their sources;
`modelopt_lite.dialects` names the files. docs/verify.md is made from this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from modelopt_lite.dialects.compressed_tensors import CompressedTensors
from modelopt_lite.dialects.modelopt import ModelOpt
from modelopt_lite.errors import RecipeError
from modelopt_lite.verify.findings import Finding
from modelopt_lite.words import near

ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "vLLM",
        "sglang": "SGLang",
        "tensorrt_llm": "TensorRT-LLM",
        "transformers": "transformers",
        "compressed_tensors": "compressed-tensors",
    }
)
"""What ``--engine`` takes -> what messages call it. The last is the package that transformers
decompresses with."""

READERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        ModelOpt.name: ("vllm", "sglang", "tensorrt_llm"),
        CompressedTensors.name: ("vllm", "sglang", "transformers", "compressed_tensors"),
    }
)
"""The engines that know a dialect."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold of an export.

    Attributes:
        name: Stable, as in `Finding.rule`.
        what: What must hold.
        engines: Who refuses the export otherwise, or computes something else; None: whoever reads
            its dialect. A finding may name fewer.
        dialect: The one that it is a rule of; None: all.
    """

    name: str
    what: str
    engines: tuple[str, ...] | None = None
    dialect: str | None = None


_MODELOPT, _COMPRESSED = ModelOpt.name, CompressedTensors.name
_VLLM, _SGLANG, _TENSORRT = ("vllm",), ("sglang",), ("tensorrt_llm",)

_ALL = (
    # Files and index
    Rule("checkpoint-readable", "the folder holds a checkpoint that can be read"),
    Rule("file-damaged", "each weight file is a whole safetensors file"),
    Rule("index-damaged", "the index is JSON with a weight_map of plain file names"),
    Rule("index-missing-file", "each file that the index names exists"),
    Rule("index-ghost", "each tensor that the index names is in the file that it names"),
    Rule("index-unlisted", "each tensor of a file is in the index, under that file"),
    Rule("index-orphan-file", "no weight file lies beside those of the checkpoint"),
    Rule("index-total-size", "total_size is the bytes of all tensors"),
    # Values
    Rule("value-finite", "no value that is not quantized is NaN or infinite"),
    Rule("weight-nan", "no FP8 code is NaN (0x7f, 0xff)"),
    Rule(
        "scale-value",
        "each scale is finite and above 0; as E8M0, any byte but 255. vLLM takes a NaN for a scale "
        "that was never loaded",
    ),
    Rule(
        "scale-convention",
        "the global scale of NVFP4 is amax / 2688 (modelopt) or its reciprocal (compressed-tensors)"
        ", not the other way round",
    ),
    # Tensors of a quantized module
    Rule("scale-missing", "a quantized weight has all tensors of its format, each expert, too"),
    Rule("scale-unexpected", "it has no others"),
    Rule("scale-dtype", "each has the dtype of the format"),
    Rule("scale-shape", "each has the shape that the weight gives it; scalars have one element"),
    Rule("scale-orphan", "no scale stands without a weight"),
    Rule("scale-on-unpacked", "no scale stands beside a weight that is not quantized"),
    Rule("weight-dtype", "codes have the dtype of the format that the config states"),
    Rule("weight-shape", "K is a multiple of 16 (NVFP4), 32 (MXFP4, MXFP8) or 128 (FP8 in blocks)"),
    Rule("packed-shape", "weight_shape holds the shape of the matrix", None, _COMPRESSED),
    Rule("leftover-tensor", "no tensor of a quantizer is left (_quantizer, _amax)"),
    # What engines join
    Rule("group-format", "q/k/v, gate/up, w1/w3 and q_a/kv_a share one format"),
    Rule(
        "group-scale",
        "they share weight_scale_2 and input_scale (NVFP4), or weight_scale and input_scale (FP8: "
        "else quantized anew)",
    ),
    Rule("group-incomplete", "where other layers have all of q/k/v or gate/up, each layer has"),
    Rule("group-bias", "all of q/k/v have a bias, or none", _TENSORRT),
    Rule("expert-missing", "each expert from 0 to the config's count has each projection"),
    Rule("expert-format", "all experts of a block share one format"),
    Rule("tied-head", "a tied output head is not quantized: engines take the embedding"),
    Rule("tower-packed", "no vision tower is quantized: vLLM builds it unquantized", _VLLM),
    # The cache
    Rule("kv-scale-shape", "k_scale and v_scale have one element"),
    Rule("kv-pair", "both stand at each layer, or none"),
    Rule("kv-missing", "where one layer has them, each has"),
    Rule(
        "kv-name",
        "they stand at k_proj and v_proj, at qkv_proj, or at the attention; kv_scale is no more",
        _VLLM,
    ),
    Rule("kv-config", "scales exist where the config states a format of the cache"),
    # Configs
    Rule("config-readable", "hf_quant_config.json is readable", None, _MODELOPT),
    Rule(
        "config-missing",
        "config.json has a quantization_config (vLLM, SGLang), and hf_quant_config.json exists "
        "(TensorRT-LLM)",
        None,
        _MODELOPT,
    ),
    Rule("config-method", 'quant_method is "modelopt"', ("vllm", "sglang"), _MODELOPT),
    Rule("config-producer", "hf_quant_config.json has the producer modelopt", _TENSORRT, _MODELOPT),
    Rule(
        "config-keys",
        "the keys that must be there even as null: group_size, kv_cache_quant_algo and "
        "exclude_modules for NVFP4, the last two for MXFP8 (vLLM); ignore for NVFP4 (SGLang)",
        ("vllm", "sglang"),
        _MODELOPT,
    ),
    Rule("config-homes", "config.json and hf_quant_config.json say the same", None, _MODELOPT),
    Rule("config-group-size", "group_size is that of the format, and one throughout", None),
    Rule(
        "config-groups",
        "config_groups describe the quantized modules: with targets and numbers "
        "(compressed-tensors); with inputs for NVFP4, which vLLM else runs as weight-only",
    ),
    Rule(
        "num-bits",
        "codes have 1 to 8 bits, of floating point 4 or 8, and fill the words that are there",
        None,
        _COMPRESSED,
    ),
    Rule("config-status", 'quantization_status is "compressed"', None, _COMPRESSED),
    Rule("config-format", "format is that of the groups, or mixed-precision", None, _COMPRESSED),
    Rule(
        "kv-config-flat",
        "config.json states an FP8 cache as a kv_cache_scheme in numbers, not by name",
        _VLLM,
        _MODELOPT,
    ),
    Rule("quant-algo", "quant_algo is a name that an engine knows", None, _MODELOPT),
    Rule(
        "algo-spelling",
        "FP8 in capitals (SGLang), fp8_pb_wo in small letters (TensorRT-LLM)",
        ("sglang", "tensorrt_llm"),
        _MODELOPT,
    ),
    Rule("engine-refuses", "the engine loads each of the formats in this dialect"),
    Rule("format-unchecked", "shapes and scales are of a format that this package knows", ()),
    # Which modules
    Rule("exclude-entry", "each entry of the list of excluded modules is a name, glob or regex"),
    Rule("exclude-unmatched", "each entry stands for a module"),
    Rule("excluded-but-packed", "no quantized module is excluded, as each engine reads the list"),
    Rule("unpacked-not-excluded", "each module that is not quantized is excluded, to each"),
    Rule("excluded-in-part", "what engines join is excluded as a whole", ("vllm", "sglang")),
    Rule("mixed-layers", "quantized_layers lists the quantized modules", None, _MODELOPT),
    Rule("mixed-empty", "quantized_layers is not empty", _VLLM, _MODELOPT),
    Rule("mixed-block-size", "all layers of FP8 in blocks have one group_size", _VLLM, _MODELOPT),
    Rule(
        "mixed-method",
        "one layer is NVFP4: SGLang takes other mixtures for W4A8 with FP8",
        _SGLANG,
        _MODELOPT,
    ),
    # Against the source, and against a plan
    Rule("source-missing", "each tensor of the source is there, quantized or not"),
    Rule("source-extra", "each tensor comes from one of the source"),
    Rule("source-shape", "shapes are the source's"),
    Rule("source-dtype", "what is not quantized keeps its dtype"),
    Rule("source-bytes", "what is not quantized keeps its bytes"),
    Rule("sidecar-missing", "tokenizer, templates and code of the source are there"),
    Rule("sidecar-bytes", "they are unchanged"),
    Rule("weight-error", "dequantized, no value is further from the source than its format allows"),
    Rule("plan-outputs", "the run wrote what it planned", ()),
    Rule("plan-accounting", "the run's plan accounts for each tensor of the source", ()),
)
RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _ALL})
"""Every rule by name."""


def engine_names(asked: Iterable[str]) -> tuple[str, ...]:
    """Return the engines that are asked for; each item one name or several with commas between.

    Raises:
        RecipeError: A name that is none.
    """
    names = [name.strip() for item in asked for name in item.split(",")]
    for name in names:
        if name not in ENGINES:
            raise RecipeError(
                f"unknown engine {name!r}{near(name, ENGINES)}; known: {', '.join(ENGINES)}"
            )
    return tuple(dict.fromkeys(names))


def with_engines(finding: Finding, dialect: str | None) -> Finding:
    """Return a finding that names the engines which it concerns.

    Args:
        finding: One whose rule is in ``RULES``.
        dialect: Of the export; None where it cannot be read: whoever reads any.
    """
    if finding.engines is not None:
        return finding
    readers = READERS[dialect] if dialect else tuple(ENGINES)
    of_rule = RULES[finding.rule].engines
    return replace(finding, engines=readers if of_rule is None else of_rule)


def narrowed(findings: Iterable[Finding], asked: tuple[str, ...]) -> list[Finding]:
    """Keep what concerns the engines that are asked for, and what concerns all or none by name.

    A finding that is a warning because other engines load the export is an error to one that does
    not, see ``Finding.decisive``.
    """
    kept = []
    for finding in findings:
        engines = finding.engines or ()
        of_dialect = not engines or any(set(engines) >= set(them) for them in READERS.values())
        if of_dialect or set(engines) & set(asked):
            decided = finding.decisive and set(engines) & set(asked)
            kept.append(replace(finding, severity="error") if decided else finding)
    return kept


def rules_table() -> str:
    """Return the rules as a table in Markdown."""
    lines = ["| rule | what must hold | engines that need it |", "| --- | --- | --- |"]
    for rule in RULES.values():
        names = ["all readers"] if rule.engines is None else [ENGINES[e] for e in rule.engines]
        of = f" ({rule.dialect})" if rule.dialect else ""
        lines.append(f"| `{rule.name}` | {rule.what}{of} | {', '.join(names) or '-'} |")
    return "\n".join(lines)
