"""See the keys and values that every attention layer attends to, and nothing else of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from modelopt_lite.errors import RecipeError

_EAGER = "eager_attention_forward"
_TABLE = "ALL_ATTENTION_FUNCTIONS"


def check_watched(path: str, module: nn.Module) -> None:
    """Refuse an attention layer whose class computes attention where `watch_attention` is blind.

    Older classes have code of their own (Falcon, BLOOM, GPT-J), and linear attention has no keys
    and values to keep.

    Raises:
        RecipeError: No method of the class mentions transformers' attention functions.
    """
    for cls in type(module).__mro__:
        for member in vars(cls).values() if cls is not nn.Module else ():
            code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
            if code is not None and {_EAGER, _TABLE} & {*code.co_names}:
                return
    raise RecipeError(
        f"the recipe asks for KV cache scales, but the keys and values of {path!r} "
        f"({type(module).__name__}) cannot be seen: its code does not call transformers' "
        "attention functions; leave kv_cache out"
    )


@contextmanager
def watch_attention(
    model: nn.Module, visit: Callable[[str, Tensor, Tensor], None]
) -> Iterator[None]:
    """Call ``visit(module name, key, value)`` at each attention call, after rotation and norms.

    transformers looks attention functions up in one table, but for the eager one, which stands in
    each model's file; while this context lasts, those that the model uses are wrapped. The function
    that runs stays the same.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    paths = {id(module): path for path, module in model.named_modules()}

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if (path := paths.get(id(module))) is not None:
                visit(path, key, value)
            return function(module, query, key, value, *args, **kwargs)

        return attention

    with ExitStack() as stack:
        for name in {"sdpa", *_implementations(model)}:
            if name in TABLE:
                stack.enter_context(_replaced(TABLE._local_mapping, name, wrapped(TABLE[name])))
        for scope in _scopes_with_eager(model):
            stack.enter_context(_replaced(scope, _EAGER, wrapped(scope[_EAGER])))
        yield


@contextmanager
def _replaced(mapping: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    before = {name: mapping[name]} if name in mapping else {}
    mapping[name] = value
    try:
        yield
    finally:
        del mapping[name]
        mapping.update(before)


def _scopes_with_eager(model: nn.Module) -> list[dict[str, Any]]:
    """Globals of the files whose attention classes name the eager function there."""
    scopes: dict[int, dict[str, Any]] = {}
    for cls in {type(module) for module in model.modules()}:
        scope = getattr(inspect.unwrap(cls.forward), "__globals__", {})
        if _EAGER in scope:
            scopes[id(scope)] = scope
    return list(scopes.values())


def _implementations(model: nn.Module) -> set[str]:
    return {
        getattr(module.config, "_attn_implementation", None) or ""
        for module in model.modules()
        if hasattr(module, "config")
    }
