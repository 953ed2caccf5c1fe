"""See the keys and values that every attention layer attends to, and nothing else of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class CacheStats:
    """Largest magnitude of keys and values by attention module: 0-d tensors in their dtype."""

    key: dict[str, Tensor] = field(default_factory=dict)
    value: dict[str, Tensor] = field(default_factory=dict)

    def visit(self, module: str, key: Tensor, value: Tensor) -> None:
        """Take one call into account; keys and values are [B, heads, T, head_dim]."""
        for stats, tensor in ((self.key, key), (self.value, value)):
            low, high = torch.aminmax(tensor.detach())
            amax = torch.maximum(-low, high)
            stats[module] = torch.maximum(stats[module], amax) if module in stats else amax


@contextmanager
def watch_attention(
    model: nn.Module, visit: Callable[[str, Tensor, Tensor], None]
) -> Iterator[None]:
    """Call ``visit(module name, key, value)`` at each attention call, after rotation and norms.

    transformers looks attention functions up in one table; while this context lasts, the entries
    that the model uses are wrapped. The function that runs stays the same.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    paths = {id(module): path for path, module in model.named_modules()}

    def wrapped(function: Callable[..., Any] | None) -> Callable[..., Any]:
        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if (path := paths.get(id(module))) is not None:
                visit(path, key, value)
            run = function or sys.modules[type(module).__module__].eager_attention_forward
            return run(module, query, key, value, *args, **kwargs)

        return attention

    local = TABLE._local_mapping
    before = dict(local)
    names = {name for name in ("sdpa", "eager", *_implementations(model)) if name}
    for name in names:
        function = None if name == "eager" else TABLE.get(name)
        if name == "eager" or function is not None:
            local[name] = wrapped(function)
    try:
        yield
    finally:
        local.clear()
        local.update(before)


def _implementations(model: nn.Module) -> set[str]:
    return {
        getattr(module.config, "_attn_implementation", None) or ""
        for module in model.modules()
        if hasattr(module, "config")
    }
