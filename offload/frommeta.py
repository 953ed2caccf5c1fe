"""Build a model without weights, read them from safetensors, and begin in INFERENCE."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.diagnostics import log_diagnostics
from modelopt_lite.offload.disk import parameters_on_meta
from modelopt_lite.offload.manager import OffloadManager
from modelopt_lite.offload.profile_io import read_profile

log = logging.getLogger("modelopt_lite.offload")


def load_model_from_profile(
    manager: OffloadManager,
    profile_dir: Path | str,
    model_class: Callable[..., nn.Module],
    model_args: Sequence[Any] = (),
    safetensor_path: Path | str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    buffer_device: torch.device | str | None = None,
    diagnose: bool = False,
    strict: bool = False,
) -> nn.Module:
    """Build a model, fill it from safetensors, and offload it with a profile.

    The class is called once, its parameters on the meta device: weights are never made to be
    overwritten, and the profile is compared before any of them is read.

    Args:
        manager: Without a model; it offloads the new one with its configuration.
        profile_dir: Of the profile.
        model_class: Called with ``model_args`` and ``model_kwargs``.
        model_args: See there.
        safetensor_path: A file, or a folder of files that hold the weights together under the names
            of ``state_dict()``. None: ``profile_dir``.
        model_kwargs: See there.
        buffer_device: Where buffers are made; None: where the class makes them.
        diagnose: Log the tables of `diagnostics` at the end.
        strict: Whether a tensor of the files that the model has no place for is an error.

    Returns:
        The model, in INFERENCE.

    Raises:
        OffloadError: The profile is another model's; a weight is missing, or has another dtype or
            shape than the model; or as in `offload`.
    """
    profile = read_profile(profile_dir)
    with parameters_on_meta(), torch.device(buffer_device) if buffer_device else nullcontext():
        model = model_class(*model_args, **(model_kwargs or {}))
    profile.check_model(model)
    path = Path(profile_dir if safetensor_path is None else safetensor_path)
    _fill(model, _read(path), path, strict=strict)
    manager.offload_from_state(model, profile)
    if diagnose:
        log_diagnostics(manager)
    return model


def _read(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, or of the files in a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except Exception as error:  # what the reader raises is not told
            raise OffloadError(f"{file} cannot be read as safetensors: {error}") from error
    if not tensors:
        raise OffloadError(f"there are no weights in {path}; give safetensor_path")
    return tensors


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: Path, *, strict: bool) -> None:
    """Give a model its values; tied parameters, of which files hold one, stay one."""
    state = model.state_dict(keep_vars=True)
    unknown = sorted(tensors.keys() - state.keys())
    if unknown and strict:
        raise OffloadError(f"{path} holds {_some(unknown)}, for which the model has no place")
    if unknown:
        log.warning("%s: %s are not used", path, _some(unknown))
    values: dict[int, Tensor] = {}
    for name, blank in state.items():
        if name in tensors:
            value = tensors[name]
            if value.dtype != blank.dtype or value.shape != blank.shape:
                raise OffloadError(
                    f"{name!r} is {value.dtype} {list(value.shape)} in {path}, and {blank.dtype} "
                    f"{list(blank.shape)} in the model"
                )
            values.setdefault(id(blank), value)
    missing = sorted(n for n, blank in state.items() if blank.is_meta and id(blank) not in values)
    if missing:
        raise OffloadError(f"{path} does not hold {_some(missing)}")
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, blank in module._parameters.items():
            if blank is not None and id(blank) in values:
                parameter = nn.Parameter(values[id(blank)], requires_grad=blank.requires_grad)
                module._parameters[leaf] = made.setdefault(id(blank), parameter)
        for leaf, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in values:
                module._buffers[leaf] = values[id(buffer)].to(buffer.device)


def _some(names: Iterable[str]) -> str:
    """Name the first few."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
