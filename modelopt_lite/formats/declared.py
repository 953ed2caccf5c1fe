"""What a quantization section of the modelopt dialect says of each module's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from modelopt_lite.formats.groups import fits_groups
from modelopt_lite.formats.linear import FORMATS, LinearFormat

MIXED = "MIXED_PRECISION"
# Their weights lie on disk as those of NVFP4 do; other tensors come beside them.
OTHER_NAMES = {"NVFP4_AWQ": "NVFP4", "NVFP4_SVD": "NVFP4"}
_SMOOTHED, _FACTORED = ("AWQ", "SVD", "SQ"), "SVD"


def has_channel_scales(algo: str | None) -> bool:
    """Whether scales of the channels of inputs may stand beside matrices of a ``quant_algo``."""
    return any(part in (algo or "") for part in _SMOOTHED)


def has_factors(algo: str | None) -> bool:
    """Whether low-rank factors may."""
    return _FACTORED in (algo or "")


@dataclass(frozen=True, slots=True)
class Declared:
    """The formats that a config states; everything in upper case.

    Attributes:
        algo: ``quant_algo``, None without one.
        layers: Module -> its ``quant_algo``, where there are several formats.
        group_size: Elements that share a block scale, None where it is not said.
        sizes: Module -> the same, where there are several formats.
        inputs: Whether inputs are quantized, None where it is not said.
    """

    algo: str | None = None
    layers: Mapping[str, str] | None = None
    group_size: int | None = None
    inputs: bool | None = None
    sizes: Mapping[str, int] | None = None

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Declared:
        """Read ``quantization_config``, or the object ``quantization`` of the nested file."""
        algo, size = section.get("quant_algo"), section.get("group_size")
        listed = section.get("quantized_layers")
        layers = listed if isinstance(listed, dict) else {}
        groups = section.get("config_groups")
        parts = groups.values() if isinstance(groups, dict) else ()
        given = [group for group in parts if isinstance(group, dict)]
        return cls(
            algo=None if algo is None else str(algo).upper(),
            layers={
                name: str(entry.get("quant_algo")).upper()
                for name, entry in layers.items()
                if isinstance(entry, dict)
            },
            group_size=size if isinstance(size, int) else None,
            inputs=any(g.get("input_activations") for g in given) if given else None,
            sizes={
                name: entry["group_size"]
                for name, entry in layers.items()
                if isinstance(entry, dict) and isinstance(entry.get("group_size"), int)
            },
        )

    @property
    def entries(self) -> set[str]:
        """The listed modules, each with its format."""
        return {f"{name}: {algo}" for name, algo in (self.layers or {}).items()}

    @property
    def algos(self) -> set[str]:
        """Every ``quant_algo`` that is stated."""
        return {*filter(None, (self.algo, *(self.layers or {}).values()))}

    def algo_of(self, module: str) -> str | None:
        """Return the ``quant_algo`` of a module; None where none is stated."""
        return (self.layers or {}).get(module) if self.algo == MIXED else self.algo

    def formats_of(self, module: str) -> tuple[LinearFormat, ...]:
        """Return the formats that a module may have, the likeliest first; none that is unknown."""
        mixed = self.algo == MIXED
        algo = self.algo_of(module)
        algo = OTHER_NAMES.get(str(algo), algo)
        found = [f for f in FORMATS.values() if f.quant_algo.upper() == algo]
        size = (self.sizes or {}).get(module) if mixed else self.group_size
        if size is not None and fits_groups(size):
            found = [f.with_group_size(size) if f.codec.any_block else f for f in found]
        if mixed:
            return tuple(found)

        def unlikely(fmt: LinearFormat) -> tuple[bool, bool]:
            size = self.group_size is not None and fmt.group_size != self.group_size
            return size, self.inputs is not None and self.inputs != fmt.inputs.rounds

        return tuple(sorted(found, key=unlikely))


def fits(
    fmt: LinearFormat, codes: tuple[int, ...], scale: tuple[int, ...], *, turned: bool
) -> bool:
    """Return whether codes and block scales of these shapes belong together in a format."""
    shape = fmt.decoded_shape(codes, stacked_input_major=turned)
    if fmt.problem(shape, stacked_input_major=turned):
        return False
    wanted = next(
        spec.shape
        for spec in fmt.tensors(shape, stacked_input_major=turned)
        if spec.suffix == "weight_scale"
    )
    return same_shape(scale, wanted)


def same_shape(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether two shapes are equal, or both of a single element."""
    return given == wanted or (torch.Size(given).numel() == 1 == torch.Size(wanted).numel())


def is_turned(
    fmt: LinearFormat, codes: tuple[int, ...], scale: tuple[int, ...], *, input_major: bool
) -> bool:
    """Return whether a stack's blocks run along its second axis rather than its last.

    The shapes tell; where both or neither fit, the layout of the stack does.
    """
    if len(codes) != 3:
        return False
    return fits(fmt, codes, scale, turned=True) or (
        input_major and not fits(fmt, codes, scale, turned=False)
    )
