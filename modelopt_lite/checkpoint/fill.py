"""Read the tensors of a checkpoint to their places in the model's entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from modelopt_lite.checkpoint.names import TensorGroup


def read_entries(
    group: TensorGroup,
    read: Callable[[str, Tensor | None], Tensor],
    buffers: Mapping[str, Tensor],
    *,
    keep: Callable[[str, Tensor], None],
) -> None:
    """Fill a group's entries from disk.

    Args:
        group: What to read.
        read: ``read(name, out)`` reads a tensor, into ``out`` where given.
        buffers: Target -> tensor of the target's shape that is filled in place.
        keep: Called with each source tensor's name and its values in the dtype of the disk; a view
            of the buffer where that holds them unchanged.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    if group.convert is None:
        buffer = buffers[group.targets[0]]
        for piece in group.pieces:
            region = buffer[piece.region] if piece.region else buffer
            value = read(piece.source, region)
            keep(piece.source, value)
        return
    values = {name: read(name, None) for name in group.sources}
    for name, value in values.items():
        keep(name, value)
    with torch.no_grad():
        for target, value in group.convert(dict(values)).items():
            if target in buffers:
                buffers[target].copy_(value)
