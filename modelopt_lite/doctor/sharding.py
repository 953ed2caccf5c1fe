"""Checks of expert parallelism: the plan, and the config that carries it."""

from __future__ import annotations

import re
from typing import Any

from packaging.version import Version

from modelopt_lite.doctor.instance import Instance
from modelopt_lite.doctor.subject import Subject, listed

# transformers shards experts since this release; an older plan serves nothing.
_FRAMEWORK = "5.6"


def check_sharding(subject: Subject) -> None:
    """Hold the EP section to the configs and parameters of the models."""
    import transformers

    spec, ep = subject.spec, subject.spec.ep_spec
    if spec.moe_spec is None and ep is None:
        return
    installed = Version(Version(transformers.__version__).base_version)
    attribute = ep.plan_config_attr if ep is not None else None
    for made in subject.each():
        plans = {path: c for path, c in _configs(made.config) if _plan(c)}
        config = _at(made.config, attribute)
        if config is None:
            subject.wrong(
                "ep_spec.plan_config_attr",
                f"{type(made.config).__name__} has no {attribute!r}",
                f"name one of its configs: {listed(p for p, _ in _configs(made.config) if p)}",
            )
            continue
        own = _plan(config)
        if ep is not None and ep.unsupported:
            continue
        if not own and plans and not (ep is not None and ep.base_model_ep_plan):
            subject.wrong(
                "ep_spec.plan_config_attr",
                f"{attribute!r}, and the plan is on {listed(map(repr, plans))}",
                f"write {next(iter(plans))!r}",
            )
        needs = Version((ep.requires_transformers if ep is not None else None) or _FRAMEWORK)
        given = ep.base_model_ep_plan if ep is not None else None
        ours = spec.modeling_source == "transformers"
        if ours and not given and bool(own or plans) != (installed >= needs):
            subject.wrong(
                "ep_spec.requires_transformers",
                f"{needs}, and transformers {installed} has {'a' if own or plans else 'no'} plan",
                "give the first release whose config class has base_model_ep_plan",
            )
        for plan, whose in ((given, "ep_spec.base_model_ep_plan"), (own, "")):
            _globs(subject, made, config, plan or {}, whose)


def _globs(subject: Subject, made: Instance, config: Any, plan: dict[str, str], field: str) -> None:
    """Every glob of the spec's plan matches a parameter or module of the config's own model."""
    if not field:
        return
    names = names_below(made, config)
    if dead := [glob for glob in plan if glob not in names]:
        experts = {n for n in names if "expert" in n}
        subject.wrong(
            field,
            f"{listed(dead)} match nothing in the model of {type(config).__name__}",
            f"write them as in {listed(experts)}",
        )


def names_below(made: Instance, config: Any) -> set[str]:
    """Return names of modules and parameters in the base models of a config, numbers as ``*``."""
    found: set[str] = set()
    for module in made.model.modules():
        if getattr(module, "config", None) is not config or not hasattr(module, "base_model"):
            continue
        base = module.base_model
        for name, _ in (*base.named_modules(), *base.named_parameters()):
            found.add(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name))
    return found


def configs_with_plan(config: Any) -> list[str]:
    """Return the paths of the configs, from this one down, that carry a plan."""
    return [path for path, part in _configs(config) if _plan(part)]


def _plan(config: Any) -> dict[str, str]:
    return dict(getattr(config, "base_model_ep_plan", None) or {})


def _at(config: Any, path: str | None) -> Any:
    for part in filter(None, (path or "").split(".")):
        config = getattr(config, part, None)
    return config


def _configs(config: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return a config and those below it, with their paths."""
    found = [(path, config)]
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None:
            found += _configs(part, f"{path}.{name}".lstrip("."))
    return found
