"""The quantization schemes of compressed-tensors: what each of our formats is called there.

A config has groups; each names its targets (modules, regular expressions after ``re:``, or classes
of modules) and tells in numbers how their weights and inputs are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modelopt_lite.dialects.regexes import RegexError, matches
from modelopt_lite.formats import fp8_block, inputs, mxfp4, nvfp4
from modelopt_lite.formats.codecs import fp4, fp8, integer
from modelopt_lite.formats.codecs.base import Codec
from modelopt_lite.formats.groups import fits_groups
from modelopt_lite.formats.linear import FORMATS, LinearFormat

_PACKED = {"weight": "weight_packed"}
_NVFP4 = {**_PACKED, "weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
_FP8_SCALES = {"scale_dtype": "torch.float8_e4m3fn"}
_E8M0_SCALES = {"scale_dtype": "torch.uint8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How weights of a codec are kept.

    Attributes:
        format: Name of the compressor.
        bits: Bits of a code.
        arguments: What a group states of its weights, beyond bits and kind.
        suffixes: Part -> suffix on disk, where the two differ.
        in_words: Codes are packed into 32-bit words.
    """

    format: str
    bits: int
    arguments: Mapping[str, Any]
    suffixes: Mapping[str, str] = field(default_factory=dict)
    in_words: bool = False

    def suffix(self, part: str) -> str:
        """Return the name of a part on disk."""
        return self.suffixes.get(part, part)


_LAYOUTS: dict[Codec, Layout] = {
    fp8.PER_TENSOR: Layout(format="float-quantized", bits=8, arguments={"strategy": "tensor"}),
    fp8.PER_ROW: Layout(format="float-quantized", bits=8, arguments={"strategy": "channel"}),
    fp8.BLOCKS: Layout(
        format="float-quantized",
        bits=8,
        arguments={"strategy": "block", "block_structure": [fp8_block.BLOCK] * 2},
    ),
    fp8.MXFP8: Layout(
        format="mxfp8-quantized",
        bits=8,
        arguments={"strategy": "group", "group_size": mxfp4.BLOCK, **_E8M0_SCALES},
    ),
    fp4.NVFP4: Layout(
        format="nvfp4-pack-quantized",
        bits=4,
        arguments={"strategy": "tensor_group", "group_size": nvfp4.BLOCK, **_FP8_SCALES},
        suffixes=_NVFP4,
    ),
    fp4.MXFP4: Layout(
        format="mxfp4-pack-quantized",
        bits=4,
        arguments={"strategy": "group", "group_size": mxfp4.BLOCK, **_E8M0_SCALES},
        suffixes=_PACKED,
    ),
    integer.INT8: Layout(format="int-quantized", bits=8, arguments={"strategy": "channel"}),
    integer.INT4: Layout(
        format="pack-quantized",
        bits=4,
        arguments={"strategy": "group", "group_size": integer.INT4.block},
        suffixes=_PACKED,
        in_words=True,
    ),
}
# Engines look for integer weights of plain inputs in words alone.
_INT8_WORDS = Layout(
    format="pack-quantized",
    bits=8,
    arguments={"strategy": "channel"},
    suffixes=_PACKED,
    in_words=True,
)

_INPUTS: dict[str, dict[str, Any]] = {
    inputs.FP8.name: {"strategy": "tensor", "dynamic": False},
    inputs.INT8.name: {"strategy": "tensor", "dynamic": False},
    inputs.FP8_PER_TOKEN.name: {"strategy": "token", "dynamic": True},
    inputs.INT8_PER_TOKEN.name: {"strategy": "token", "dynamic": True},
    inputs.FP8_AT_RUN_TIME.name: {"strategy": "tensor", "dynamic": True},
    inputs.MXFP4.name: {
        "strategy": "group",
        "group_size": mxfp4.BLOCK,
        "dynamic": True,
        **_E8M0_SCALES,
    },
    inputs.MXFP8.name: {
        "strategy": "group",
        "group_size": mxfp4.BLOCK,
        "dynamic": True,
        **_E8M0_SCALES,
    },
    inputs.NVFP4.name: {
        "strategy": "tensor_group",
        "group_size": nvfp4.BLOCK,
        "dynamic": "local",
        **_FP8_SCALES,
    },
}


def layout_of(fmt: LinearFormat) -> Layout | None:
    """Return how weights of a format are kept, None where they cannot be."""
    codec = fmt.codec
    if codec == integer.INT8 and not fmt.inputs.rounds:
        return _INT8_WORDS
    if codec.any_block and codec == integer.INT4.with_block(codec.block or 0):
        return replace(_LAYOUTS[integer.INT4], arguments=_groups_of(codec.block))
    return _LAYOUTS.get(codec)


def _groups_of(size: int | None) -> dict[str, Any]:
    return {"strategy": "group", "group_size": size}


def arguments(fmt: LinearFormat) -> dict[str, Any]:
    """Return what a group states of the weights and inputs of a format that has a layout."""
    codec, layout = fmt.codec, layout_of(fmt)
    assert layout is not None
    kinds = {"num_bits": codec.num_bits, "type": codec.kind, "symmetric": True, "dynamic": False}
    weights = {**kinds, **layout.arguments}
    if fmt.inputs.bits is None:
        return {"weights": weights, "input_activations": None}
    rounding = {"num_bits": fmt.inputs.bits, "type": fmt.inputs.kind, "symmetric": True}
    return {"weights": weights, "input_activations": {**rounding, **_INPUTS[fmt.inputs.name]}}


@dataclass(frozen=True, slots=True)
class Scheme:
    """One group of a config."""

    targets: tuple[str, ...]
    format: str | None
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None

    @property
    def known(self) -> LinearFormat | None:
        """The format of ours that it describes; None where it describes none."""
        size = self.weights.get("group_size")
        for base in FORMATS.values():
            fmt = base
            if base.codec.any_block and isinstance(size, int) and fits_groups(size):
                fmt = base.with_group_size(size)
            layout = layout_of(fmt)
            if layout is None or self.format not in (None, layout.format):
                continue
            ours = arguments(fmt)
            if _agrees(self.weights, ours["weights"]) and (
                _agrees(self.inputs, ours["input_activations"])
            ):
                return fmt
        return None


@dataclass(frozen=True, slots=True)
class Schemes:
    """The groups that a ``quantization_config`` states.

    Attributes:
        schemes: In their order; of several that fit a module, one that names it comes before one
            that names its class.
        ignore: Modules that are left, or regular expressions after ``re:``.
        format: Of the whole export; "mixed-precision" where groups differ.
        kv_cache: How keys and values are kept, None where they are left.
    """

    schemes: tuple[Scheme, ...] = ()
    ignore: tuple[str, ...] = ()
    format: str | None = None
    kv_cache: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Schemes:
        """Read a ``quantization_config``; what is malformed there counts as absent."""
        groups = section.get("config_groups")
        whole, ignore = section.get("format"), section.get("ignore")
        found = []
        for group in groups.values() if isinstance(groups, dict) else ():
            if not isinstance(group, dict):
                continue
            weights, rounding = group.get("weights"), group.get("input_activations")
            targets = group.get("targets", ["Linear"])
            own = group.get("format") or (whole if whole != "mixed-precision" else None)
            found.append(
                Scheme(
                    tuple(map(str, targets if isinstance(targets, list) else ())),
                    None if own is None else str(own),
                    weights if isinstance(weights, dict) else {},
                    rounding if isinstance(rounding, dict) else None,
                )
            )
        cache = section.get("kv_cache_scheme")
        return cls(
            tuple(found),
            tuple(map(str, ignore if isinstance(ignore, list) else ())),
            None if whole is None else str(whole),
            cache if isinstance(cache, dict) else None,
        )

    @property
    def algo(self) -> str | None:
        """None: groups tell in numbers, not by a name."""
        return None

    @property
    def algos(self) -> set[str]:
        """None, as of `algo`."""
        return set()

    def algo_of(self, module: str) -> str | None:
        """None, as of `algo`."""
        return None

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the group of a linear layer, whether it is ignored or not."""
        for scheme in self.schemes:
            if any(names(target, module) for target in scheme.targets):
                return scheme
        of_class = (s for s in self.schemes if any(t[:1].isupper() for t in s.targets))
        return next(of_class, None)

    def ignores(self, module: str) -> bool:
        """Return whether the config leaves a module as it is."""
        return any(names(entry, module) for entry in self.ignore)

    def formats_of(self, module: str) -> tuple[LinearFormat, ...]:
        """Return the format of ours that a module has; empty where it is another."""
        scheme = self.scheme_of(module)
        known = scheme.known if scheme else None
        return (known,) if known else ()


def names(entry: str, module: str) -> bool:
    """Return whether a target or an ignored entry names a module; regular expressions begin it."""
    if entry.startswith("re:"):
        try:
            return matches(entry.removeprefix("re:"), module)
        except RegexError:  # the audit names it
            return False
    return entry == module


def _agrees(given: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> bool:
    """Whether a group's numbers are those of ours; dtypes of scales follow from the rest."""
    if given is None or ours is None:
        return given is None and ours is None
    defaults = {"symmetric": True, "dynamic": False}
    return all(
        given.get(key, defaults.get(key)) == value
        for key, value in ours.items()
        if key != "scale_dtype"
    ) and (given.get("group_size") in (None, -1, ours.get("group_size")))
