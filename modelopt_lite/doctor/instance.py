"""Small models of an architecture, in the installed transformers, with seeded weights."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from modelopt_lite.build import eager_experts, load_config, quiet_transformers
from modelopt_lite.checkpoint.names import NameMap, map_names
from modelopt_lite.checkpoint.reader import read_json
from modelopt_lite.doctor.repairs import give_missing, give_parts
from modelopt_lite.doctor.shrink import Sizes, shrink
from modelopt_lite.errors import CheckpointError
from modelopt_lite.offload.units import text_model
from modelopt_lite.structure import TensorShape

# transformers' tables of model classes, what predicts tokens first.
_COMPOSITE = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM")
_PLAIN = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
_OTHERS = ("SEQ_TO_SEQ_CAUSAL_LM", "TEXT_TO_WAVEFORM", "TOKEN_CLASSIFICATION")
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "ForBlockDiffusion")
_TOKENS = 12
_MOST_PARAMETERS = 60_000_000  # 240 MB in float32
_REPAIRS = 4  # fields that a class reads and its config lacks, added one at a time
_FORMS = (Sizes(), Sizes(fill=True), Sizes(other=True), Sizes(fill=True, other=True))


@dataclass(eq=False)
class Instance:
    """A small model.

    Attributes:
        config: Its config.
        model: In float32 on the CPU, with seeded weights.
        kind: What sort of model it is: "causal LM", "encoder-decoder", or "base model".
        calls: Of each module that ran, the arguments of its first call, by position and by name.
        inputs: Of each module that ran, the first tensor among them.
        outputs: Of each module that ran, its first tensor result.
        not_run: Why a forward pass failed; empty where it ran.
        optional: What was changed in a form that is not the one by default; empty for that one.
    """

    config: Any
    model: Any
    kind: str
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    inputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    not_run: str = ""
    optional: str = ""

    @functools.cached_property
    def saved(self) -> tuple[dict[str, TensorShape], dict[str, Any]]:
        """Names, shapes and dtypes that transformers saves the model under, and its config.json."""
        with tempfile.TemporaryDirectory() as folder, quiet_transformers():
            generation = getattr(self.model, "generation_config", None)
            if generation is not None:  # a config's top_k may be that of a router
                self.model.generation_config = type(generation)()
            self.model.save_pretrained(folder)
            tensors: dict[str, TensorShape] = {}
            for file in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(file, "pt") as opened:
                    for key in opened.keys():  # noqa: SIM118 -- not a dict
                        shape = tuple(opened.get_slice(key).get_shape())
                        tensors[key] = TensorShape(shape, torch.float32)
            config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            # Up to 4.57 some composites write it into the config of their text model alone.
            config.setdefault("architectures", [type(self.model).__name__])
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


def instances(model_type: str) -> list[Instance]:
    """Build the small models that together show what an architecture can hold.

    Args:
        model_type: One that the installed transformers knows.

    Raises:
        CannotBuildError: None could be built.
    """
    return _in_all_forms(partial(small_model, model_type))


def small_model(
    model_type: str, sizes: Sizes, given: Mapping[str, Any] = MappingProxyType({})
) -> Instance:
    """Build one form of an architecture, and run it; ``given`` fields of its config are as said.

    Raises:
        Exception: What the config or the model class raised.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    fields = _merge(shrink(cls(), sizes), given)
    for _ in range(_REPAIRS):
        try:
            return _instance(config := cls(**fields))
        except AttributeError as error:
            if not give_missing(config, fields, error, sizes):
                raise
        except ValueError as error:
            # A class asks for the model of a part that its config's defaults leave out.
            if "NoneType" not in str(error) or not give_parts(cls, fields, sizes):
                raise
    return _instance(cls(**fields))


def instances_of_checkpoint(folder: Path, *, trust_remote_code: bool) -> list[Instance]:
    """Build small models from a checkpoint's config; its weights are not read.

    Raises:
        ModelOptLiteError: As `modelopt_lite.build.load_config`.
        CannotBuildError: None could be built.
    """
    config_json = read_json(folder / "config.json")
    config = load_config(folder, config_json, trust_remote_code=trust_remote_code)
    remote = bool(config_json.get("auto_map")) and trust_remote_code

    def build(sizes: Sizes) -> Instance:
        fields = {k: v for k, v in config.to_dict().items() if k != "quantization_config"}
        small = type(config).from_dict(_merge(fields, shrink(config, sizes)))
        small._name_or_path = str(folder)  # where transformers looks for the code
        make = partial(_remote_model, trust_remote_code=trust_remote_code)
        return _instance(small, make if remote else None)

    return _in_all_forms(build)


def _remote_model(config: Any, *, trust_remote_code: bool) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(
        config, trust_remote_code=trust_remote_code, dtype=torch.float32
    )


def _in_all_forms(build: Callable[[Sizes], Instance]) -> list[Instance]:
    """Build every form; keep one model of each shape, those that run where any does."""
    found: dict[str, Instance] = {}
    errors: list[str] = []
    for sizes in _FORMS:
        try:
            with quiet_transformers():
                made = build(sizes)
            _ = made.saved  # what transformers cannot save has no names on disk to hold
        except Exception as error:  # config and model classes may raise anything
            errors.append(told(error))
            continue
        made.optional = "the other form (q_lora_rank, dense layers)" if sizes.other else ""
        shape = str([(n, tuple(p.shape)) for n, p in made.model.named_parameters()])
        if shape not in found or (found[shape].not_run and not made.not_run):
            found[shape] = made
    if not found:
        raise CannotBuildError("; and ".join(dict.fromkeys((errors[0], errors[1]))))
    kept = [made for made in found.values() if not made.not_run] or list(found.values())
    if all(made.optional for made in kept):
        for made in kept:
            made.optional = ""
    return kept


def told(error: Exception) -> str:
    """Return an error of someone else's code in one short line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}"


def _merge(small: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(small)
    for key, value in given.items():
        before = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(before, dict)
        merged[key] = _merge(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _instance(config: Any, make: Callable[[Any], Any] | None = None) -> Instance:
    torch.manual_seed(0)
    kind = "causal LM"
    if make is None:
        cls, kind = model_class(config)

        def make(config: Any) -> Any:
            return cls._from_config(config, dtype=torch.float32)

    with suppress(NotImplementedError), torch.device("meta"):  # a class reads what it has made
        _check_size(make(config))
    model = make(config)
    _check_size(model)
    model.eval().requires_grad_(False)
    _spread(model)
    made = Instance(config, model, kind)
    _run(made)
    return made


def _check_size(model: nn.Module) -> None:
    """Refuse what is not small: a size of it has a name that says nothing of what it is."""
    count = sum(p.numel() for p in model.parameters())
    if count > _MOST_PARAMETERS:
        name, largest = max(model.named_parameters(), key=lambda pair: pair[1].numel())
        raise CannotBuildError(
            f"the smallest model has {count:,} parameters; the largest is {name} "
            f"{list(largest.shape)}"
        )


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
    """Run tokens through the model, and through parts with experts that they did not reach."""
    hooks = [
        m.register_forward_hook(_recorder(made), with_kwargs=True) for m in made.model.modules()
    ]
    try:
        with torch.no_grad(), eager_experts(made.model):
            for part in _parts(made.model):
                if part in made.outputs:
                    continue
                try:
                    _forward(part)
                except Exception as error:  # the model's own code
                    made.not_run = made.not_run or told(error)
                else:
                    made.not_run = "" if part is made.model else made.not_run
    finally:
        for hook in hooks:
            hook.remove()
    if any(part in made.outputs for part in _parts(made.model)[:2]):
        made.not_run = ""


def _parts(model: Any) -> list[Any]:
    """Return the model, its text model, and other models inside that have token embeddings."""
    others = [
        m
        for m in model.modules()
        if hasattr(m, "base_model_prefix") and m is not model and _takes_tokens(m)
    ]
    try:
        text = [text_model(model)]
    except Exception:  # a composite without a decoder of its own
        text = []
    return list(dict.fromkeys([model, *text, *others]))


def _takes_tokens(model: Any) -> bool:
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except (NotImplementedError, AttributeError):
        return False


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
