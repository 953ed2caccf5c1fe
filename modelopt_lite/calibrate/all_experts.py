"""Have every expert see every token, without changing what the model computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_lite.calibrate.observe import InputWatch
from modelopt_lite.errors import CalibrationError
from modelopt_lite.models import is_moe


@contextmanager
def calibrate_all_experts(model: nn.Module, model_type: str, watch: InputWatch) -> Iterator[None]:
    """Before each MoE block's own pass, send all of its tokens through all of its experts.

    The watch sees that extra pass and not the experts of the block's own, so each expert is seen
    with N rows for N tokens.

    Raises:
        CalibrationError: The block's experts cannot be called in any way that is known.
    """
    hooks = []
    for path, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if not isinstance(experts, nn.Module) or not is_moe(module, model_type):
            continue
        prefix = f"{path}.experts."
        entries = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
        if isinstance(experts, nn.ModuleList):
            before, after = _list_hooks(experts, watch, entries)
            place: nn.Module = module
        else:
            before, after = _fused_hooks(path, experts, watch, entries)
            place = experts
        hooks.append(place.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(place.register_forward_hook(after, always_call=True))
    if not hooks:
        raise CalibrationError(
            "moe_calibrate_all_experts was asked for, but the model has no MoE block; leave it out"
        )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


Hooks = tuple[Callable[..., None], Callable[..., None]]


def _list_hooks(experts: nn.ModuleList, watch: InputWatch, entries: list[str]) -> Hooks:
    """Hooks on a block whose experts are modules of their own."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(iter((*args, *kwargs.values())))
        tokens = x.reshape(-1, x.shape[-1])
        for expert in experts:
            expert(tokens)
        watch.pause(entries)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        watch.resume(entries)

    return before, after


def _fused_hooks(path: str, experts: Any, watch: InputWatch, entries: list[str]) -> Hooks:
    """Hooks on a container that holds all experts in 3-D parameters."""
    counts = [p.shape[0] for p in experts.parameters(recurse=False) if p.ndim == 3]

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, *rest = (*args, *kwargs.values())
        known = len(rest) >= 2 and isinstance(rest[0], Tensor) and not rest[0].is_floating_point()
        if not counts or not known:
            raise CalibrationError(
                f"the experts of {path!r} do not take (tokens, expert indices, weights), so they "
                "cannot be sent all tokens; leave moe_calibrate_all_experts out for this model"
            )
        tokens = x.reshape(-1, x.shape[-1])
        everyone = torch.arange(counts[0], device=x.device).expand(len(tokens), counts[0])
        module.forward(
            tokens, everyone, torch.zeros(everyone.shape, dtype=x.dtype, device=x.device)
        )
        watch.pause(entries)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        watch.resume(entries)

    return before, after
