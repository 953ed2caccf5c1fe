"""Where a run computes."""

from __future__ import annotations

import torch
from torch import nn

from modelopt_lite.errors import RecipeError


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device asked for, or the accelerator if there is one, or the CPU.

    Raises:
        RecipeError: There is no such device.
    """
    accelerator = torch.accelerator.current_accelerator()
    if device is None:
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise RecipeError(f"device {device!r} is not known: {error}") from error
    if chosen.type not in {"cpu", accelerator.type if accelerator else "cpu"}:
        raise RecipeError(
            f"device {device!r} is not available here (have: cpu"
            f"{', ' + accelerator.type if accelerator else ''}); leave device out"
        )
    return chosen


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move what the config alone determines (rotary frequencies, masks) to where the model runs."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", device.type):
                module._buffers[name] = buffer.to(device)
