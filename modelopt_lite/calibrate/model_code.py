"""Run the model's own code, and say where in the model it failed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from modelopt_lite.errors import ForwardError, ModelOptLiteError


@contextmanager
def model_code(model: nn.Module) -> Iterator[None]:
    """Turn what a forward pass raises into `ForwardError`; errors of ours stay as they are.

    The message names the innermost module that was running and its line; the original is the cause.
    """
    try:
        yield
    except ModelOptLiteError:
        raise
    except Exception as error:  # a model may raise anything
        where, line = _innermost(model, error)
        message = " ".join(str(error).split())
        raise ForwardError(
            f"the model's own code failed in {where} ({line}): {type(error).__name__}: {message}; "
            "see whether the same input runs in transformers alone: its code, the config or the "
            "input may be at fault"
        ) from error


def _innermost(model: nn.Module, error: Exception) -> tuple[str, str]:
    """Return the last module that an error passed on its way, and the file and line there."""
    names = {id(module): name for name, module in model.named_modules()}
    where = f"module {type(model).__name__!r}"
    line = "no line is known"
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        name = names.get(id(module))
        if name is not None and "torch/nn/modules" not in frame.f_code.co_filename:
            where = f"module {name!r} ({type(module).__name__})" if name else where
            line = f"{frame.f_code.co_filename}:{number}"
    return where, line
