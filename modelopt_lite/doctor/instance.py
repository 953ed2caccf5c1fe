"""Small models of an architecture, in the installed transformers, with seeded weights."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from modelopt_lite.build import eager_experts, quiet_transformers
from modelopt_lite.checkpoint.names import NameMap, map_names
from modelopt_lite.doctor.shrink import Sizes, shrink
from modelopt_lite.errors import CheckpointError
from modelopt_lite.structure import TensorShape

# transformers' tables of model classes, what predicts tokens first.
_COMPOSITE = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM")
_PLAIN = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
_OTHERS = ("SEQ_TO_SEQ_CAUSAL_LM", "TEXT_TO_WAVEFORM", "TOKEN_CLASSIFICATION")
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "ForBlockDiffusion")
_TOKENS = 12


@dataclass
class Instance:
    """A small model.

    Attributes:
        config: Its config.
        model: In float32 on the CPU, with seeded weights.
        kind: What sort of model it is: "causal LM", "encoder-decoder", or "base model".
        calls: Of each module that ran, the arguments of its first call, by position and by name.
        inputs: Of each module that ran, the first tensor among them.
        outputs: Of each module that ran, its first tensor result.
        not_run: Why no forward pass was possible; empty where it was.
    """

    config: Any
    model: Any
    kind: str
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    inputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    not_run: str = ""

    @functools.cached_property
    def saved(self) -> tuple[dict[str, TensorShape], dict[str, Any]]:
        """Names, shapes and dtypes that transformers saves the model under, and its config.json."""
        with tempfile.TemporaryDirectory() as folder, quiet_transformers():
            self.model.save_pretrained(folder)
            tensors: dict[str, TensorShape] = {}
            for file in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(file, "pt") as opened:
                    for key in opened.keys():  # noqa: SIM118 -- not a dict
                        shape = tuple(opened.get_slice(key).get_shape())
                        tensors[key] = TensorShape(shape, torch.float32)
            config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return tensors, config

    @functools.cached_property
    def names(self) -> NameMap | CheckpointError:
        """How those names and the model's own correspond, or why they do not."""
        try:
            return map_names(self.model, {n: t.shape for n, t in self.saved[0].items()})
        except CheckpointError as error:
            return error


class CannotBuildError(Exception):
    """No small model could be built; the message is what transformers said."""


def known_here(model_type: str) -> bool:
    """Whether the installed transformers has a config class for a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def instances(model_type: str, given: Mapping[str, Any] | None = None) -> list[Instance]:
    """Build the small models that together show what an architecture can hold.

    Args:
        model_type: One that the installed transformers knows.
        given: Config fields that the class has no usable defaults for.

    Raises:
        CannotBuildError: None could be built.
    """
    found: list[Instance] = []
    errors: list[str] = []
    shapes: set[str] = set()
    for sizes in (Sizes(), Sizes(fill=True), Sizes(other=True), Sizes(fill=True, other=True)):
        try:
            with quiet_transformers():
                config = small_config(model_type, sizes, given or {})
                made = _instance(config)
        except Exception as error:  # config and model classes may raise anything
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
            continue
        shape = str([(n, tuple(p.shape)) for n, p in made.model.named_parameters()])
        if shape not in shapes:
            shapes.add(shape)
            found.append(made)
    if not found:
        raise CannotBuildError(errors[-1])
    if any(not made.not_run for made in found):
        found = [made for made in found if not made.not_run]
    return found


def small_config(model_type: str, sizes: Sizes, given: Mapping[str, Any]) -> Any:
    """Return a small config of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    return cls(**_merge(shrink(cls(), sizes), given))


def _merge(small: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(small)
    for key, value in given.items():
        before = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(before, dict)
        merged[key] = _merge(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _instance(config: Any) -> Instance:
    cls, kind = model_class(config)
    torch.manual_seed(0)
    model = cls._from_config(config, dtype=torch.float32).eval()
    model.requires_grad_(False)
    _spread(model)
    made = Instance(config, model, kind)
    _run(made)
    return made


def _spread(model: nn.Module) -> None:
    """Give every parameter values of its own: zeros and ones would hide what they are used for."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(0.5 + 0.1 * noise if parameter.ndim == 1 else 0.2 * noise)


def model_class(config: Any) -> tuple[Any, str]:
    """Return the class that a config is of, and what kind of model that is.

    Raises:
        CannotBuildError: transformers has none.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    kind = "encoder-decoder" if getattr(config, "is_encoder_decoder", False) else "causal LM"
    for table in (*(_COMPOSITE if config.sub_configs else _PLAIN), *_OTHERS):
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {})
        name = names.get(config.model_type)
        name = name if isinstance(name, str) or not name else name[0]
        if name and hasattr(transformers, name):
            known = table in _PLAIN or kind != "causal LM"
            return getattr(transformers, name), kind if known else "base model"
    module = importlib.import_module(
        type(config).__module__.replace(".configuration_", ".modeling_")
    )
    classes = sorted(_classes_of(module, type(config)), key=_preference)
    if not classes:
        raise CannotBuildError(f"no model class takes a {type(config).__name__}")
    generates = classes[0].__name__.endswith(_GENERATES)
    return classes[0], kind if generates else "base model"


def _classes_of(module: Any, config_class: type) -> Iterator[Any]:
    """Yield the model classes of a module that are made from a config of this class."""
    import transformers

    for name, cls in vars(module).items():
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            continue
        wanted = inspect.signature(cls).parameters.get("config")
        annotation = getattr(wanted, "annotation", None)
        if not name.endswith("PreTrainedModel") and annotation in (
            config_class,
            config_class.__name__,
        ):
            yield cls


def _preference(cls: Any) -> tuple[int, str]:
    for rank, suffix in enumerate((*_GENERATES, "Model")):
        if cls.__name__.endswith(suffix):
            return rank, cls.__name__
    return len(_GENERATES) + 1, cls.__name__


def _run(made: Instance) -> None:
    """Run tokens through the model, and through parts that tokens did not reach."""
    parts = [m for m in made.model.modules() if hasattr(m, "base_model_prefix")]
    hooks = [
        m.register_forward_hook(_recorder(made), with_kwargs=True) for m in made.model.modules()
    ]
    errors = []
    try:
        with torch.no_grad(), eager_experts(made.model):
            for part in parts:
                if part in made.outputs or any(m in made.outputs for m in part.modules()):
                    continue
                try:
                    _forward(part)
                except Exception as error:  # the model's own code
                    errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    finally:
        for hook in hooks:
            hook.remove()
    if not made.inputs:
        made.not_run = errors[0] if errors else "it has nothing to run"


def _forward(part: Any) -> None:
    ids = torch.arange(3, 3 + 2 * _TOKENS).reshape(2, _TOKENS)
    if getattr(part.config, "is_encoder_decoder", False):
        part(input_ids=ids, decoder_input_ids=ids, use_cache=False)
        return
    try:
        part(input_ids=ids, use_cache=False)
    except (TypeError, ValueError):
        part(ids)


def _recorder(made: Instance) -> Any:
    def record(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given = [*args, *(kwargs.get(k) for k in ("hidden_states", "x", "input", "input_ids"))]
        first = next((a for a in given if isinstance(a, torch.Tensor)), None)
        result = first_tensor(output)
        if first is not None and result is not None and module not in made.calls:
            made.calls[module] = (args, kwargs)
            made.inputs[module] = first
            made.outputs[module] = result

    return record


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of what a module gave."""
    results = output.values() if isinstance(output, Mapping) else output
    results = results if isinstance(output, tuple | list | Mapping) else (output,)
    return next((r for r in results if isinstance(r, torch.Tensor)), None)


def rerun(made: Instance, module: nn.Module) -> torch.Tensor:
    """Run a module again with the arguments of its first call, weights as they are now."""
    args, kwargs = made.calls[module]
    with torch.no_grad(), eager_experts(made.model):
        result = first_tensor(module(*args, **kwargs))
    assert result is not None
    return result.clone()
