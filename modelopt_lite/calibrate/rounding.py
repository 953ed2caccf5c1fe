"""Round the inputs of a quantized checkpoint's layers as the kernels of an engine do.

A simulation: the rounded inputs are multiplied in the model's dtype, where an engine multiplies the
codes themselves and adds up in float32. The two differ by the rounding of products.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from modelopt_lite.calibrate.observe import Site
from modelopt_lite.checkpoint.dequant import DequantizedSource
from modelopt_lite.checkpoint.names import NameMap
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats.linear import LinearFormat


class InputRounding:
    """Rounds what enters each quantized matrix, as a checkpoint in one of our dialects says.

    The format is that which the checkpoint states for the matrix, and a static scale comes from its
    ``input_scale`` tensors. Experts that share a parameter have a site each. Where several tensors
    on disk make up one matrix of the model, the largest of their scales holds, as in engines, which
    fuse them, too. Where the checkpoint states no format of ours, nothing is rounded.

    Args:
        source: The quantized checkpoint.
        names: Its correspondence with the model.
        device: Where the model runs.

    Raises:
        CheckpointError: A quantized matrix lacks the scale that its format needs.
    """

    def __init__(self, source: DequantizedSource, names: NameMap, device: torch.device) -> None:
        self._formats: dict[Site, LinearFormat] = {}
        self._scales: dict[Site, Tensor] = {}
        for site, name in _sites(source, names):
            fmt = source.encoded[name].served
            if fmt is None:
                continue
            self._formats[site] = fmt
            if not fmt.static_input:
                continue
            module = name.removesuffix(".weight")
            if module not in source.input_scales:
                raise CheckpointError(
                    f"{source.path}: the quantized {module!r} has no input_scale, which "
                    f"{fmt.quant_algo} needs; restore it, or leave its inputs alone with "
                    "activations=False"
                )
            scale = torch.tensor(source.input_scales[module], dtype=torch.float32, device=device)
            before = self._scales.get(site)
            self._scales[site] = scale if before is None else torch.maximum(before, scale)

    @property
    def entries(self) -> set[str]:
        """Parameters of the model whose inputs are rounded."""
        return {site.entry for site in self._formats}

    def visit(self, site: Site, x: Tensor, batched: bool) -> Tensor | None:
        """Return ``x`` rounded, in its shape and dtype; an `InputWatch` calls it."""
        if not x.numel():
            return None
        for known in (site, Site(site.entry)):
            if known in self._formats:
                return self._formats[known].fake_quantize_input(x, self._scales.get(known))
        if not batched:
            return None
        parts = [(self.visit(Site(site.entry, e), x_e, False), x_e) for e, x_e in enumerate(x)]
        return torch.stack([x_e if rounded is None else rounded for rounded, x_e in parts])


def _sites(source: DequantizedSource, names: NameMap) -> Iterator[tuple[Site, str]]:
    """Yield where each quantized tensor on disk is multiplied in the model."""
    for group in names.groups:
        regions = {piece.source: piece.region for piece in group.pieces}
        for name in group.sources:
            if name not in source.encoded:
                continue
            region = regions.get(name, ())
            expert = region[0] if region and isinstance(region[0], int) else None
            for target in group.targets:
                yield Site(target, expert), name
