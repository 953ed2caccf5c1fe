"""Build a checkpoint's model without its weights, in the installed transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelopt_lite.checkpoint.dequant import model_dtype
from modelopt_lite.checkpoint.reader import cut_layer_types
from modelopt_lite.dense_experts import is_dense, one_by_one
from modelopt_lite.errors import CheckpointError, RemoteCodeError, SpecError
from modelopt_lite.offload.forwards import running
from modelopt_lite.offload.memory import map_large_blocks


def build_meta_model(
    source: Path,
    config_json: dict[str, Any],
    *,
    trust_remote_code: bool,
    adapt: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the checkpoint's model with its parameters on the meta device.

    Buffers are real, so that those which no checkpoint holds (the frequencies of rotary position
    embeddings, for one) have the values that the config gives them. ``adapt`` may change the config
    before.

    Raises:
        RemoteCodeError: The model's code comes with the checkpoint and was not trusted.
        SpecError: The installed transformers does not know the architecture.
        CheckpointError: transformers rejects the config, or it states a dtype of no model.
    """
    import transformers
    from accelerate import init_empty_weights

    dtype = model_dtype(config_json)
    config = load_config(source, config_json, trust_remote_code=trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise SpecError(
            f"the checkpoint {source} is an encoder-decoder ({config_json.get('model_type')!r}); "
            "only decoders, which predict the next token, can be calibrated: give one of these"
        )
    if adapt is not None:
        config = adapt(config)
    map_large_blocks()
    with quiet_transformers(), init_empty_weights(include_buffers=False), _no_initial_weights():
        try:
            model = _instantiate(transformers, config, config_json, dtype, trust_remote_code)
        except Exception as error:  # a constructor may raise anything
            raise CheckpointError(
                f"transformers {transformers.__version__} cannot build a model from "
                f"{source / 'config.json'}: {error}"
            ) from error
    cut_unread_rows(model)
    model.requires_grad_(False)
    _lend_text_part(model)
    if transformers.__version__.startswith("4."):
        model.tie_weights()
    else:
        _compute_buffers(model, model)
    return model.eval()


def cut_unread_rows(model: nn.Module) -> None:
    """Leave stacked experts as many gates as they have down projections.

    LongCat-Flash also chooses experts without weights, for which release 5 holds gates that it
    never reads and no published checkpoint has.
    """
    for module in model.modules():
        gates = getattr(module, "gate_up_proj", None)
        downs = getattr(module, "down_proj", None)
        if not isinstance(gates, nn.Parameter) or not isinstance(downs, nn.Parameter):
            continue
        if gates.ndim == downs.ndim == 3 and len(gates) > len(downs):
            rows = gates.detach()[: len(downs)].clone()
            module.gate_up_proj = nn.Parameter(rows, requires_grad=gates.requires_grad)


def _lend_text_part(model: Any) -> None:
    """Let a model that generates but has no forward of its own run as its text part does.

    Qwen3-Omni is one: text runs through its thinker. Of its parts, the first that has a head is it.
    """
    if type(model).forward is not nn.Module.forward:
        return
    for part in model.children():
        if hasattr(part, "get_output_embeddings") and part.get_output_embeddings() is not None:
            for name in ("forward", "get_input_embeddings", "get_output_embeddings", "get_decoder"):
                setattr(model, name, getattr(part, name))
            return


def _compute_buffers(module: nn.Module, owner: Any) -> None:
    """Compute again, outside of the constructor, what no checkpoint holds, as the loader does.

    The constructor ran with the checkpoint's dtype as the default one: in bfloat16, frequencies
    that a class computes in the default dtype (GPT-J's) are off by radians at far positions.
    Releases before 5 leave them so. ``owner`` is the innermost model around the module.
    """
    if hasattr(module, "_init_weights"):
        owner = module
    if module._non_persistent_buffers_set:
        owner._init_weights(module)
    for child in module.children():
        _compute_buffers(child, owner)


def _no_initial_weights() -> AbstractContextManager[Any]:
    """Keep release 4 from drawing weights that nobody reads, as its loader does.

    Some classes compute them on the CPU and cannot put them in the place of what is on the meta
    device (Bamba's A_log). Release 5 skips there by itself what is on that device.
    """
    import transformers
    from transformers import modeling_utils

    old = transformers.__version__.startswith("4.")
    return modeling_utils.no_init_weights() if old else nullcontext()


def load_config(source: Path, config_json: dict[str, Any], *, trust_remote_code: bool) -> Any:
    """Return the checkpoint's config, as an object of the class that transformers has for it.

    Raises:
        RemoteCodeError: Its code comes with the checkpoint and was not trusted.
        SpecError: The installed transformers does not know the architecture.
        CheckpointError: transformers rejects the config.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config_json.get("model_type")
    if not model_type:
        raise CheckpointError(
            f"{source / 'config.json'} has no model_type; add the architecture's model_type, for "
            'example "llama"'
        )
    native = model_type in CONFIG_MAPPING
    remote = "AutoConfig" in (config_json.get("auto_map") or {})
    if remote and not native and not trust_remote_code:
        raise RemoteCodeError(
            f"the checkpoint {source} brings its own modeling code for model_type {model_type!r}; "
            "read that code, then allow it with trust_remote_code=True (--trust-remote-code)"
        )
    if not native and not remote:
        raise SpecError(
            f"transformers {transformers.__version__} does not know model_type {model_type!r}; "
            "install a release that does, or a checkpoint that brings its own code"
        )
    try:
        with quiet_transformers():
            if native:  # as AutoConfig does it, but for what strict readers reject
                cls = CONFIG_MAPPING[model_type]
                read, _ = cls.get_config_dict(source, local_files_only=True)
                read = cut_layer_types(read)
                old = transformers.__version__.startswith("4.")
                return cls.from_dict(_old_rope(read, source) if old else read)
            return transformers.AutoConfig.from_pretrained(
                source, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except CheckpointError:
        raise
    except Exception as error:  # configs check themselves, with errors of many kinds
        raise CheckpointError(
            f"transformers {transformers.__version__} rejects {source / 'config.json'}: {error}"
        ) from error


def _old_rope(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """Spell the rotary embedding as transformers 4 reads it; it else takes its own defaults."""
    old = {k: _old_rope(v, source) if k == "text_config" else v for k, v in config.items()}
    rope = old.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" in old:
        return old
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(
            f"{source / 'config.json'} has rope_parameters for each kind of layer, which "
            "transformers 4 does not read; install transformers 5"
        )
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            old.setdefault(key, rope[key])
    if rope.get("rope_type", "default") != "default":
        old.setdefault("rope_scaling", {k: v for k, v in rope.items() if k != "rope_theta"})
    return old


def _instantiate(
    transformers: Any,
    config: Any,
    config_json: dict[str, Any],
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> Any:
    names = config_json.get("architectures") or ()
    remote = trust_remote_code and (config_json.get("auto_map") or {})
    cls = getattr(transformers, names[0], None) if names and not remote else None
    if cls is not None:
        return cls._from_config(config, dtype=dtype)
    return transformers.AutoModelForCausalLM.from_config(
        config, trust_remote_code=trust_remote_code, dtype=dtype
    )


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Have every expert run by a product of its own, where the release offers a choice.

    Other backends join the experts of a layer in one call, where single ones cannot be seen.
    """
    before: list[tuple[Any, Any]] = []
    dense = {module: one_by_one(module) for module in model.modules() if is_dense(module)}
    for module in model.modules():
        config = getattr(module, "config", None)
        for part in (config, *_sub_configs(config)):
            if hasattr(part, "_experts_implementation"):
                before.append((part, part._experts_implementation))
                part._experts_implementation = "eager"
    try:
        with running(dense):
            yield
    finally:
        for part, implementation in reversed(before):
            part._experts_implementation = implementation


def _sub_configs(config: Any) -> Iterator[Any]:
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None:
            yield part
            yield from _sub_configs(part)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers: its progress bars, and advice on training and kernels.

    Neither is the user's to follow.
    """
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
