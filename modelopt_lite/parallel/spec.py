"""What a model's `EPSpec` says of a run whose experts are sharded.

Weights are read by this package's own reader, rank by rank, and tokens are sent by its own forward
of the experts: transformers' runtime for expert parallelism, which changed three times and was a
silent no-op in some releases, is not used. Of its plan only the fact is used which parameters are
the routed experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from modelopt_lite.errors import SpecError
from modelopt_lite.models.specs import EPSpec, ModelSpec

FLOOR = "5.6"
"""The first release of transformers whose experts take a forward from outside."""

_EXPERT_STYLES = ("grouped_gemm",)  # every generation of plans has it on the experts' parameters
_ALONE = "run it in one process, or give ep=1 (--ep 1): every rank then holds all experts"


def check_supported(spec: ModelSpec | None, model_type: str, version: str) -> None:
    """Refuse to shard the experts of a model that cannot be sharded here.

    Args:
        spec: The model's spec.
        model_type: Its type, for messages.
        version: Of the installed transformers.

    Raises:
        SpecError: It names the reason that the spec gives, or the release that is needed.
    """
    ep = _facts(spec)
    if ep.unsupported is not None:
        raise SpecError(
            f"the experts of {model_type!r} cannot be sharded: {ep.unsupported}; {_ALONE}"
        )
    needed = max(FLOOR, ep.requires_transformers or FLOOR, key=Version)
    if Version(version) < Version(needed):
        raise SpecError(
            f"sharding the experts of {model_type!r} needs transformers {needed} or newer, and "
            f"{version} is installed; install that, or {_ALONE}"
        )


def adapt_config(
    config: Any, spec: ModelSpec | None, *, ckpt_path: Path, trust_remote_code: bool
) -> Any:
    """Return the config to build an expert-parallel model from: the spec's fields applied.

    The spec's plan is set where the config that carries it has none; then ``prepare`` is called.

    Raises:
        SpecError: The spec names a nested config that the model does not have.
    """
    ep = _facts(spec)
    carrier = _carrier(config, ep)
    if ep.base_model_ep_plan is not None and not getattr(carrier, "base_model_ep_plan", None):
        carrier.base_model_ep_plan = dict(ep.base_model_ep_plan)
    if ep.prepare is not None:
        return ep.prepare(config, ckpt_path=ckpt_path, trust_remote_code=trust_remote_code)
    return config


def check_plan(model: Any, spec: ModelSpec | None, sharded: Iterable[str]) -> None:
    """Refuse to shard parameters of which the model's plan does not say that they are experts.

    Args:
        model: The model, built from what `adapt_config` gave.
        spec: Its spec.
        sharded: The parameters that would be sharded.

    Raises:
        SpecError: There is no plan, or it does not name them.
    """
    plan = _plan(model.config, _facts(spec))
    named = [_pattern(glob) for glob, style in plan.items() if style in _EXPERT_STYLES]
    for parameter in sharded:
        if not any(pattern.search(parameter) for pattern in named):
            found = f"names {', '.join(map(repr, plan))}" if plan else "is missing"
            raise SpecError(
                f"the expert-parallel plan of {type(model).__name__} {found}, and so does not say "
                f"that {parameter!r} holds routed experts; give the spec a base_model_ep_plan for "
                f"it (and plan_config_attr where a nested config carries it), or {_ALONE}"
            )


def whole_experts(spec: ModelSpec | None, parameters: Iterable[str]) -> list[str]:
    """Return which parameters a plan that only ``prepare`` would set says are routed experts.

    For runs that rule sharding out and so never call ``prepare``.
    """
    plan = _facts(spec).prepared_ep_plan or {}
    named = [_pattern(glob) for glob, style in plan.items() if style in _EXPERT_STYLES]
    return [name for name in parameters if any(pattern.search(name) for pattern in named)]


def adapter(
    spec: ModelSpec | None, folder: Path, *, trust_remote_code: bool
) -> Callable[[Any], Any]:
    """Return `adapt_config` for one checkpoint."""

    def adapt(config: Any) -> Any:
        return adapt_config(config, spec, ckpt_path=folder, trust_remote_code=trust_remote_code)

    return adapt


def _facts(spec: ModelSpec | None) -> EPSpec:
    return (spec.ep_spec if spec is not None else None) or EPSpec()


def _carrier(config: Any, ep: EPSpec) -> Any:
    """The config that carries the plan."""
    for attribute in (ep.plan_config_attr or "").split(".") if ep.plan_config_attr else ():
        nested = getattr(config, attribute, None)
        if nested is None:
            raise SpecError(
                f"plan_config_attr is {ep.plan_config_attr!r}, but {type(config).__name__} has no "
                f"{attribute!r}; correct the EPSpec"
            )
        config = nested
    return config


def _plan(config: Any, ep: EPSpec) -> Mapping[str, str]:
    plan = getattr(_carrier(config, ep), "base_model_ep_plan", None)
    if plan or ep.plan_config_attr is not None:
        return plan or {}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "base_model_ep_plan", None) or {}


def _pattern(glob: str) -> re.Pattern[str]:
    """A glob of a plan: relative to some module, ``*`` for one part of a name."""
    return re.compile(r"(?:^|\.)" + re.escape(glob).replace(r"\*", r"[^.]+") + r"$")
