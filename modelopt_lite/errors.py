"""Every error that a user can meet, each with a stable code.

A message says what is wrong, the value that is wrong, and what to do about it. The command line
prints it without a traceback and exits with status 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ModelOptLiteError(Exception):
    """Base of all errors of this package. ``code`` is stable across releases."""

    code = "MOL000"


class CheckpointError(ModelOptLiteError):
    """A source or exported checkpoint is incomplete, damaged or of an unknown kind."""

    code = "MOL100"


class UnsupportedSourceError(CheckpointError):
    """The source is already quantized in a way that cannot be read exactly."""

    code = "MOL110"


class SpecError(ModelOptLiteError):
    """A model spec is missing, contradictory, or refused by the installed transformers."""

    code = "MOL200"


class RecipeError(ModelOptLiteError, ValueError):
    """An unknown recipe, format or option, or a pattern that matches nothing."""

    code = "MOL300"


class ShapeError(ModelOptLiteError, ValueError):
    """A matrix cannot be divided into the blocks that its format needs."""

    code = "MOL310"


class OffloadConfigError(ModelOptLiteError, ValueError):
    """A pattern, value or name in the configuration of the offload runtime is wrong."""

    code = "MOL320"


class OffloadConfigFileError(OffloadConfigError, FileNotFoundError):
    """The file of the offload configuration does not exist."""

    code = "MOL321"


class OffloadError(ModelOptLiteError, RuntimeError):
    """An offloaded model, or its manager, was asked for something that it cannot do now."""

    code = "MOL325"


class StrategyComputeError(ModelOptLiteError):
    """No offload plan meets the request.

    ``smallest_budget`` is the least number of bytes with which the strategy would find one; None
    where the budget is not what stands in the way.
    """

    code = "MOL330"

    def __init__(self, message: str, smallest_budget: int | None = None) -> None:
        super().__init__(message)
        self.smallest_budget = smallest_budget


class CalibrationError(ModelOptLiteError):
    """Calibration data is missing, empty, out of range, or never reached a quantizer."""

    code = "MOL400"


class NonFiniteError(ModelOptLiteError, ValueError):
    """A weight or an activation holds NaN or infinity."""

    code = "MOL410"


class ForwardError(ModelOptLiteError):
    """The model's own code failed in a forward pass; ``__cause__`` is what it raised."""

    code = "MOL420"


class OutputError(ModelOptLiteError):
    """The export cannot be written where it was asked for."""

    code = "MOL500"


class RemoteCodeError(ModelOptLiteError):
    """The checkpoint wants to run its own code and was not allowed to."""

    code = "MOL600"


class RankError(ModelOptLiteError):
    """Another process of the run failed, died, or never started; the message names it.

    ``keeps`` says that nothing is wrong with the inputs: the same run may go on later.
    """

    code = "MOL650"

    def __init__(self, message: str, keeps: bool = False) -> None:
        super().__init__(message)
        self.keeps = keeps


class AuditError(ModelOptLiteError):
    """A written checkpoint breaks one of the rules of the audit."""

    code = "MOL700"


class InternalError(ModelOptLiteError):
    """The run departed from its own plan: a fault of this package, please report it."""

    code = "MOL900"


class DegradedError(ModelOptLiteError):
    """A strict run had to fall back somewhere. The export is complete; ``report`` lists what."""

    code = "MOL800"

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report


@contextmanager
def loading_specs() -> Iterator[None]:
    """Give the failure to import ``modelopt_lite.models`` as `SpecError`.

    That package knows nothing of ours, so what users write into specs can only surface there as an
    `ImportError`. Where a user meets it, at the public names and the command, it is translated.
    """
    try:
        yield
    except ImportError as error:
        if error.name != "modelopt_lite.models":
            raise
        raise SpecError(str(error)) from error
