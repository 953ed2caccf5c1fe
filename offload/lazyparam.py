"""A parameter whose values are on disk in another form: read when an operation asks for them.

Fused experts are many tensors on disk, a quantized weight is codes and scales, and a weight may
have another dtype than the model: none of these can be a view of the file. At rest such a parameter
holds no values. Whatever reads it then gets the true ones, read for that moment alone: slow, and
right. The runtime binds values instead before a unit runs, and no reading happens.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelopt_lite.errors import OffloadError

_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # attributes that are values
_LOOKS = frozenset(
    {
        *("__len__", "__hash__", "dim", "element_size", "is_complex", "is_contiguous"),
        *("is_floating_point", "is_inference", "is_pinned", "is_shared", "ndimension", "nelement"),
        *("numel", "requires_grad_", "size", "storage_offset", "stride", "untyped_storage"),
    }
)  # methods that tell of a tensor without reading it


class LazyParameter(nn.Parameter):
    """A parameter at rest on disk, until ``data`` is set.

    Attributes:
        reads_at_rest: How often operations outside of the runtime have read it from disk.
    """

    reads_at_rest: int
    _read: Callable[[Tensor], None]
    _rest: Tensor

    @classmethod
    def make(
        cls, shape: Iterable[int], dtype: torch.dtype, read: Callable[[Tensor], None]
    ) -> LazyParameter:
        """Return a parameter at rest.

        Args:
            shape: Its shape; at rest it takes addresses and no memory.
            dtype: Its dtype.
            read: Fills a contiguous tensor of this shape and dtype with its values.
        """
        rest = _addresses(tuple(shape), dtype)
        made = cls(rest, requires_grad=False)
        with torch._C.DisableTorchFunctionSubclass():
            made.__dict__.update(_read=read, _rest=made.data, reads_at_rest=0, _kept=False)
        return made

    @property
    def resting(self) -> Tensor:
        """What ``data`` is set to for the parameter to be at rest; its values mean nothing."""
        found: Tensor = self.__dict__["_rest"]
        return found

    @property
    def at_rest(self) -> bool:
        """Whether the values are on disk only."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.__dict__["_kept"] or not self.numel():
                return False
            return self.data_ptr() == self.resting.data_ptr()

    def keep(self) -> None:
        """Let what ``resting`` holds be the values from now on: someone has written them there."""
        self.__dict__["_kept"] = True

    def load(self) -> Tensor:
        """Read the values into new memory."""
        value = torch.empty(self.resting.shape, dtype=self.resting.dtype)
        self.__dict__["_read"](value)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        made = memo.get(id(self))
        if made is None:
            with torch._C.DisableTorchFunctionSubclass():
                value = self.load() if self.at_rest else self.data.clone()
            made = memo[id(self)] = nn.Parameter(value, requires_grad=False)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            value = self.load() if self.at_rest else self.data
            return nn.Parameter(value, requires_grad=False).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function, with values read from disk in the place of parameters at rest."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not reads_values(func):
                return func(*args, **kwargs)
            loaded: dict[int, Tensor] = {}

            def true(value: Any) -> Any:
                if not isinstance(value, LazyParameter) or not value.at_rest:
                    return value
                if id(value) not in loaded:
                    loaded[id(value)] = value.load()
                    value.__dict__["reads_at_rest"] += 1
                return loaded[id(value)]

            true_args, true_kwargs = tree_map(true, args), tree_map(true, kwargs)
            _refuse_writing(func, args, kwargs, loaded)
            return func(*true_args, **true_kwargs)

    def __new__(cls, data: Any = None, requires_grad: bool = False) -> Self:
        """Make a parameter around a tensor; `make` is for callers."""
        return super().__new__(cls, data, requires_grad)


def reads_values(func: Callable[..., Any]) -> bool:
    """Whether a torch function reads values of its arguments, and not only what they look like."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return name == "__get__" and attribute in _VALUES
    return name not in _LOOKS


def _refuse_writing(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loaded: dict[int, Any]
) -> None:
    """Refuse what would change values that are read for one moment: the change would be lost."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in (
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__"),
    )
    target = args[0] if in_place and args else kwargs.get("out")
    if id(target) in loaded:
        raise OffloadError(
            f"{name} would change a weight that is read from disk; set its data instead: "
            "parameter.data = parameter.detach().clone()"
        )


def _addresses(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor with a place of its own in the address space and no memory behind it."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    room = mmap.mmap(-1, size, flags=flags)
    return torch.from_numpy(np.frombuffer(room, np.uint8)).view(dtype).view(shape)
