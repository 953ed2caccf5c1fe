"""See, and change, the keys and values that every attention layer attends to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from modelopt_lite.errors import RecipeError

_EAGER = "eager_attention_forward"
_TABLE = "ALL_ATTENTION_FUNCTIONS"
Seen = tuple[Tensor, Tensor]
Visit = Callable[[str, Tensor, Tensor], Seen | None]


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
def watch_attention(model: nn.Module, visit: Visit) -> Iterator[None]:
    """Call ``visit(module name, key, value)`` at each attention call, after rotation and norms.

    What it returns, unless None, is attended to instead. transformers looks attention functions up
    in one table, but for the eager one, which stands in each model's file; while this context
    lasts, those that the model uses are wrapped. The function that runs stays the same. Several
    models may be watched at a time, whichever is let go first.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    paths = {id(module): path for path, module in model.named_modules()}

    def seen(module: nn.Module, key: Tensor, value: Tensor) -> Seen | None:
        path = paths.get(id(module))
        return None if path is None else visit(path, key, value)

    places: list[tuple[dict[str, Any], str, Any]] = [
        (TABLE._local_mapping, name, TABLE[name])
        for name in {"sdpa", *_implementations(model)}
        if name in TABLE
    ]
    places += [(scope, _EAGER, scope[_EAGER]) for scope in _scopes_with_eager(model)]
    with ExitStack() as stack:
        for mapping, name, function in places:
            stack.enter_context(_tapped(mapping, name, function, seen))
        yield


class _Tap:
    """An attention function that asks all who watch before it runs.

    Attributes:
        before: What stood in the table in its place, if anything did.
        watching: Who is asked.
    """

    def __init__(self, function: Callable[..., Any], before: Mapping[str, Any]) -> None:
        self.before = before
        self.watching: list[Callable[[nn.Module, Tensor, Tensor], Seen | None]] = []
        self._function = function

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Any:
        for seen in self.watching:
            key, value = seen(module, key, value) or (key, value)
        return self._function(module, query, key, value, *args, **more)


@contextmanager
def _tapped(
    mapping: dict[str, Any],
    name: str,
    function: Callable[..., Any],
    seen: Callable[[nn.Module, Tensor, Tensor], Seen | None],
) -> Iterator[None]:
    """Have a function of a table tell of its calls; the last who leaves puts it back."""
    if isinstance(function, _Tap):
        tap = function
    else:
        tap = _Tap(function, {name: mapping[name]} if name in mapping else {})
        mapping[name] = tap
    tap.watching.append(seen)
    try:
        yield
    finally:
        tap.watching.remove(seen)
        if not tap.watching:
            del mapping[name]
            mapping.update(tap.before)


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
