"""The configuration of the offload runtime: `OffloadConfig`. Every value is checked at once.

Names, defaults and ranges are those that users of such runtimes know; docs/offload_config.md says
what each does here. `modelopt_lite.offload.config_sources` reads files and the environment.
"""

from __future__ import annotations

import copy
import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, runtime_checkable

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from modelopt_lite.errors import OffloadConfigError
from modelopt_lite.offload.patterns import parse_patterns

REMOVED_NAMES: Mapping[str, str] = {
    "warmup_iters": "it is called discovery_iters now",
    "profile_iters": "it is called profiling_iters now",
    "release_tensors": "leave it out: weights leave their block when the next ones need it",
    "enable_direct_mode": "set profile_mode: 'view' and 'getter' are direct, 'torch_function' is "
    "indirect",
    "enable_tracing": "set enable_diagnostics, which records a timeline too",
    "rearrange_transfers": "leave it out: copies start as early as their block is free",
    "compute_transfer_gap": "leave it out: copies start as early as their block is free",
    "enable_untraced_tensor_discovery": "leave it out: it is always on",
    "enable_module_tracker": "leave it out: it is always on",
}
"""Names of earlier releases of such runtimes -> what to do instead."""

ONE_SHOT_FIELDS = frozenset(
    {
        *("enabled", "enable_diagnostics", "exclude_patterns", "gpu_device", "include_patterns"),
        *("load_strategy", "max_gpu_mem_fraction", "min_blocks", "num_blocks", "offload_timing"),
        *("piecewise_prefetch", "pinned_memory", "pinned_memory_mode", "profile_mode"),
        *("shm_enabled", "transfer_budget_scale", "transfer_mode"),
    }
)
"""Fields that take effect at ``offload()`` alone; changing them afterwards is worth a warning."""

_BLOCK_MODES = ("allocation_block_transfer", "raw_block_transfer")


@runtime_checkable
class LoadStrategy(Protocol):
    """Anything that decides what is brought in when; see modelopt_lite.offload.strategies."""

    @property
    def compute(self) -> Any:
        """``compute(layer_stats, memory_stats, max_gpu_mem_bytes)``; see `strategies.Strategy`."""


def _pattern_texts(value: object, field: str) -> list[str]:
    return [pattern.text for pattern in parse_patterns(value, field=field)]


def _path_text(value: object) -> object:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str) and not text.strip():
        raise ValueError("an empty path; leave it out or name a folder")
    return text


def _strategy(value: object) -> object:
    if isinstance(value, type):
        raise ValueError(f"a class; make one: {value.__name__}()")
    return value


IncludePatterns = Annotated[
    list[str], BeforeValidator(lambda value: _pattern_texts(value, "include_patterns"))
]
ExcludePatterns = Annotated[
    list[str], BeforeValidator(lambda value: _pattern_texts(value, "exclude_patterns"))
]
Folder = Annotated[str, BeforeValidator(_path_text)]
Strategy = Annotated[LoadStrategy, BeforeValidator(_strategy)]


class OffloadConfig(BaseModel):
    """How a model is offloaded.

    Immutable; ``config.model_copy(update={...})`` makes a changed copy, checked like a new one.
    Numbers, booleans and strings are taken as they are, never converted into each other.

    Raises:
        OffloadConfigError: An unknown or removed name, or a value that is not allowed, alone or
            beside another one. The message names every one of them.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )

    enabled: bool = True
    gpu_device: int = Field(default=0, ge=0)
    pinned_memory: bool = True
    pinned_memory_mode: Literal["torch", "host_register"] = "torch"
    shm_enabled: bool = False
    shm_namespace: str | None = None
    shm_wait_timeout: float = Field(default=0.0, ge=0)
    discovery_iters: int = Field(default=1, ge=0)
    skip_discovery: bool = False
    profiling_iters: int = Field(default=10, ge=0)
    external_compile: bool = False
    transfer_budget_scale: float = Field(default=1.0, gt=0)
    transfer_mode: Literal["allocation_block_transfer", "raw_block_transfer", "strategy"] = (
        "allocation_block_transfer"
    )
    num_blocks: int = Field(default=4, ge=2)
    min_blocks: int = Field(default=4, ge=2)
    max_gpu_mem_fraction: float | None = Field(default=None, gt=0, le=1)
    profile_storage_dir: Folder | None = None
    profile_read_only: bool = False
    load_strategy: Strategy | None = None
    enable_instrumentation: bool = False
    instrumentation_output_dir: Folder = ".flextensor/instrumentation"
    offload_timing: Literal["off", "eager", "cuda_graph"] = "off"
    piecewise_prefetch: Literal["off", "warn", "error"] = "warn"
    include_patterns: IncludePatterns = Field(default_factory=lambda: ["*"])
    exclude_patterns: ExcludePatterns = Field(default_factory=list)
    enable_diagnostics: bool = False
    profile_mode: Literal["torch_function", "getter", "view"] = "view"

    if not TYPE_CHECKING:  # type checkers keep the signature that the fields make

        def __init__(self, **values: Any) -> None:
            check_names(values, "OffloadConfig has no field")
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise OffloadConfigError(_explain(error)) from None

        def __setattr__(self, name: str, value: object) -> None:
            raise OffloadConfigError(
                f"{name} cannot be set to {value!r}: an OffloadConfig does not change; use "
                f"config.model_copy(update={{{name!r}: {value!r}}})"
            )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed, checked like a new one."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**(copy.deepcopy(values) if deep else values), **(update or {})})

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = [found for found in self._problems() if isinstance(found, str)]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def records_passes(self) -> bool:
        """Whether something wants to know when units are copied, computed and waited for."""
        timed = self.offload_timing != "off"
        return timed or self.enable_diagnostics or self.enable_instrumentation

    def _problems(self) -> Iterable[str | bool]:
        """Yield what is wrong with values beside each other; false where nothing is."""
        mode, timing = self.transfer_mode, self.offload_timing
        blocks = f"needs one of the transfer modes {', '.join(_BLOCK_MODES)}, not {mode!r}"
        yield self.num_blocks < self.min_blocks and (
            f"num_blocks={self.num_blocks} is less than min_blocks={self.min_blocks}; set "
            f"min_blocks to {self.num_blocks} or less, too"
        )
        in_blocks = mode in _BLOCK_MODES
        yield self.external_compile and not in_blocks and f"external_compile=True {blocks}"
        yield timing != "off" and not in_blocks and f"offload_timing={timing!r} {blocks}"
        yield (
            self.profile_mode == "torch_function"
            and in_blocks
            and (f"profile_mode='torch_function' needs transfer_mode='strategy', not {mode!r}")
        )
        yield from self._shm_problems()

    def _shm_problems(self) -> Iterable[str | bool]:
        if not self.shm_enabled:
            return
        yield not (self.shm_namespace or "").strip() and (
            f"shm_enabled=True needs a shm_namespace, got {self.shm_namespace!r}; processes that "
            "give the same one share the weights"
        )
        yield self.transfer_mode != _BLOCK_MODES[0] and (
            f"shm_enabled=True needs transfer_mode={_BLOCK_MODES[0]!r}, not {self.transfer_mode!r}"
        )
        yield sys.platform == "win32" and "shm_enabled=True does not work on Windows"


def check_names(names: Iterable[str], what: str) -> None:
    """Refuse names that are no field, with the nearest one.

    Args:
        names: What the user wrote.
        what: Beginning of the message, for example ``config.yaml has no key``.

    Raises:
        OffloadConfigError: At least one name is unknown, or was removed.
    """
    fields = list(OffloadConfig.model_fields)
    problems = []
    for name in names:
        if name in REMOVED_NAMES:
            problems.append(f"{what} {name!r} any more; {REMOVED_NAMES[name]}")
        elif name not in fields:
            problems.append(f"{what} {name!r}; {nearest(str(name), fields)}")
    if problems:
        raise OffloadConfigError("; ".join(problems))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint: the known name that is most like another one, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    if not near:
        near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"


def _explain(error: ValidationError) -> str:
    """One sentence for each problem: field, value, what is allowed."""
    sentences = []
    for problem in error.errors(include_url=False):
        reason = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
        field = problem["loc"][0] if problem["loc"] else None
        if isinstance(problem.get("ctx", {}).get("error"), OffloadConfigError) or field is None:
            sentences.append(reason)  # names the field and the value itself
        else:
            sentences.append(f"{field}={problem['input']!r}: {reason}")
    return "; ".join(sentences)
