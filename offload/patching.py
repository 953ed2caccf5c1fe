"""What offloading changes in a model, and how each change is undone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.cargo import is_plain

log = logging.getLogger("modelopt_lite.offload")

_P = ParamSpec("_P")
_T = TypeVar("_T")

CompileFn = Callable[[nn.Module], Callable[..., Any]]
OpenTrap = Callable[[str], AbstractContextManager[object]]

_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_REFUSED = ("_apply", "__deepcopy__", "__reduce_ex__")


class Patches:
    """Changes of one model. `undo` takes them back, last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Leave the model as it was."""
        while self._undo:
            self._undo.pop()()

    def on_undo(self, call: Callable[[], object]) -> None:
        """Add something to undo."""
        self._undo.append(call)

    def wrap_forward(
        self,
        path: str,
        module: nn.Module,
        trap: OpenTrap,
        block_of: Callable[[str], int | None],
        compile_fn: CompileFn | None = None,
    ) -> None:
        """Run a unit's forward inside of its trap; seed 002 names the marks.

        ``block_of`` tells the storage that a label's weights are in while its trap is open: what
        the unit returns of that is copied, as it will hold other weights soon.

        Raises:
            OffloadError: Another manager has patched it.
        """
        if "_ft_offload_name" in module.__dict__:
            raise OffloadError(
                f"{path!r} is offloaded by another manager already; release() that one first"
            )
        own, original = module.__dict__.get("forward"), module.forward
        run = original if compile_fn is None else _compiled(path, module, compile_fn)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Opened(trap, path):
                result = _detached(run(*args, **kwargs), block_of(path))
            if torch.is_grad_enabled():
                _refuse_gradients(path, result)
            return result

        # The frame itself cannot be compiled; what it calls still is.
        module.forward = torch._dynamo.decorators.skip(forward)
        module._ft_original_forward_func = original  # type: ignore[assignment]
        module._ft_offload_name = path  # type: ignore[assignment]

        def undo() -> None:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own
            del module._ft_original_forward_func, module._ft_offload_name

        self._undo.append(undo)

    def wrap_inside(
        self, module: nn.Module, opened: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Run a module's forward inside of a context of its own."""
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with opened():
                return original(*args, **kwargs)

        self._set(module.__dict__, "forward", torch._dynamo.decorators.skip(forward))

    def guard(self, model: nn.Module) -> None:
        """Refuse what would move or copy weights behind the manager's back."""

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise OffloadError(
                "the model is offloaded: release() it before moving, casting or copying it"
            )

        for module in model.modules():
            for name in _REFUSED:
                self._set(module.__dict__, name, refuse)

    def _set(self, namespace: dict[str, Any], name: str, value: object) -> None:
        missing = object()
        before = namespace.get(name, missing)
        namespace[name] = value

        def undo() -> None:
            if before is missing:
                namespace.pop(name, None)
            else:
                namespace[name] = before

        self._undo.append(undo)


def uncompiled(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep a compiler from looking into a function and into all that it calls."""
    made: Callable[_P, _T] = torch.compiler.disable(call)
    return made


class _Opened:
    """A trap that is opened and closed uncompiled, with all that this calls."""

    def __init__(self, trap: OpenTrap, path: str) -> None:
        self._trap = trap
        self._path = path

    @uncompiled
    def __enter__(self) -> None:
        self._open = self._trap(self._path)
        self._open.__enter__()

    @uncompiled
    def __exit__(self, *details: Any) -> None:
        self._open.__exit__(*details)


@uncompiled
def _detached(result: Any, block: int | None) -> Any:
    """Copy the tensors of a result that lie in a block."""

    def in_block(leaf: object) -> bool:
        plain = isinstance(leaf, Tensor) and is_plain(leaf)
        return plain and leaf.untyped_storage().data_ptr() == block  # type: ignore[attr-defined]

    if block is None or not any(map(in_block, tree_leaves(result))):
        return result
    return tree_map(lambda leaf: leaf.detach().clone() if in_block(leaf) else leaf, result)


def _refuse_gradients(path: str, result: object) -> None:
    """Let a backward pass fail where it would go through weights that are gone."""

    def refuse(gradient: Tensor) -> None:
        raise OffloadError(
            f"gradients are wanted through {path!r}, whose weights are gone by now; an offloaded "
            "model is for inference: run it under torch.no_grad()"
        )

    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(refuse)


def _compiled(path: str, module: nn.Module, compile_fn: CompileFn) -> Callable[..., Any]:
    """Return what `compile_fn` makes of a unit; where that fails, the unit itself, uncompiled.

    It gets a twin: the same parameters and children, with the original forward and no hooks, which
    the unit itself runs.
    """
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name in _HOOKS:
        twin.__dict__[name] = type(module.__dict__[name])()
    original = module.forward
    try:
        made = compile_fn(twin)
    except Exception:
        log.exception("compile_fn failed for %r; the unit runs uncompiled", path)
        return original
    working = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal working
        if working:
            twin.training = module.training
            try:
                return made(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException:
                log.exception("%r cannot be compiled; the unit runs uncompiled", path)
                working = False
        return original(*args, **kwargs)

    return run
