"""Small checkpoints of an architecture: its smallest model with seeded weights, in bfloat16.

The doctor's builder makes them, so that what it can build is what is exported here; widths are
larger than the doctor's, so that formats with blocks find a matrix to quantize.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from modelopt_lite.build import cut_unread_rows, quiet_transformers
from modelopt_lite.doctor.instance import Instance, known_here, small_model
from modelopt_lite.doctor.shrink import Sizes
from modelopt_lite.models import ModelSpec

UNIT = 16  # widths are multiples of it: 8 of them are a group of 128
# Switching on what a class leaves off first: experts are what most types are described for.
# Fields that release 4 needs: the parts of heads that turn with time, height and width, which its
# classes leave at None and read; kinds of layers by its names; no kernels of other packages.
_MROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}}
GIVEN: dict[str, dict[str, Any]] = {  # classes of some releases want a number, of others a float
    "dbrx": {"attn_config": {"clip_qkv": 8.0}},
    "olmo": {"clip_qkv": 8.0},
    "olmoe": {"clip_qkv": 8.0},
}
GIVEN_4: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "jamba": {"use_mamba_kernels": False},
    "qwen2_5_vl": {"text_config": _MROPE},
    "qwen2_vl": {"text_config": _MROPE},
    "qwen3_omni_moe": {
        "thinker_config": {"text_config": _MROPE},
        "talker_config": {"text_config": _MROPE},
    },
    "qwen3_vl": {"text_config": _MROPE},
    "qwen3_vl_moe": {"text_config": _MROPE},
    "qwen3_vl_moe_text": _MROPE,
}
# What releases of transformers themselves cannot do, by type.
DEFECTS = (
    ("glm4v", "<5", "its text model runs with a mask alone"),
    ("glm4v_moe", "<5", "its text model runs with a mask alone"),
    ("llama4", "==5.24.*", "it asks its text model's output for image_outputs, which is not there"),
    # Read: still so in 5.16.1, no longer in 5.18.0.
    ("doge", "<5.17", "its experts return a pair, which its layers do not take apart"),
    # Read: so in 5.0.0, 5.6.2 and 5.14.1, no longer in 5.18.0.
    ("dbrx", ">=5,<5.18", "its router and experts take inputs as wide as an expert"),
    # Read: so in 5.14.1, no longer in 5.15.0.
    ("diffusion_gemma", "<5.15", "its decoder refuses `use_cache`, which all others take"),
    ("gemma3n_text", "<5", "save_pretrained writes 'per_layer_model.language_model_projection'"),
)
NO_DECODER = "predicts no next token"
NEEDS_PACKAGES = "needs packages that are not installed"
EXPECTED = (NO_DECODER, NEEDS_PACKAGES)  # no fault of ours, nor of a release
FORMS = (Sizes(UNIT, fill=True), Sizes(UNIT), Sizes(UNIT, fill=True, other=True))


def absent(spec: ModelSpec) -> str:
    """Return why a type cannot be built in this environment, or nothing."""
    if spec.modeling_source == "remote_code":
        return "its code comes with the checkpoint"
    early = Version(transformers.__version__) < Version(spec.min_transformers_version or "0")
    if early or not known_here(spec.model_type):
        return f"not in transformers {transformers.__version__}"
    for model_type, releases, why in DEFECTS:
        if model_type == spec.model_type and transformers.__version__ in SpecifierSet(releases):
            return f"a defect of transformers {releases}: {why}"
    return ""


def told(error: Exception) -> str:
    """Return an error in one line, without the folders of whoever ran this."""
    message = re.sub(r"/\S*/site-packages/", "", " ".join(str(error).split()))
    message = re.sub(r"/(tmp|\S*/\.nox)/[^ :,]+", "(folder)", message)
    return f"{type(error).__name__}: {message}"


def build(spec: ModelSpec) -> Instance:
    """Return the first form of a type that runs, with experts where its spec describes some.

    Raises:
        Exception: What the first form failed with, where none runs.
    """
    old = transformers.__version__.startswith("4.")
    given: dict[str, Any] = (GIVEN | GIVEN_4 if old else GIVEN).get(spec.model_type, {})
    made: list[Instance] = []
    errors: list[Exception] = []
    for sizes in FORMS:
        try:
            with quiet_transformers():
                instance = small_model(spec.model_type, sizes, given)
        except Exception as error:  # config and model classes may raise anything
            errors.append(error)
            continue
        moe = spec.moe_spec
        if (
            moe is None
            or not moe.block_names
            or any(moe.matches(m) for m in instance.model.modules())
        ):
            made.append(instance)
            if not instance.not_run:
                return instance
        else:
            errors.append(ValueError(f"its smallest model has none of {moe.block_names}"))
    if made:
        return made[0]
    raise errors[0]


def unread(source: Path) -> str:
    """Return why the installed transformers does not load a checkpoint whole, or nothing.

    Weights that it would make up are a reason too: it goes on with them.
    """
    try:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(source)
            cls = getattr(transformers, config.architectures[0])
            _, loading = cls.from_pretrained(source, output_loading_info=True)
    except Exception as error:  # classes may raise anything
        return told(error)
    missing = sorted(map(str, loading["missing_keys"]))
    return f"it takes nothing for {missing[0]!r} and {len(missing) - 1} more" if missing else ""


def _forget_backends(config: Any) -> None:
    """Remove how experts were run: towers without experts refuse to be told."""
    if getattr(config, "_experts_implementation_internal", None) is not None:
        config._experts_implementation_internal = None
    for part in vars(config).values():
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            _forget_backends(part)


def save(spec: ModelSpec, folder: Path) -> str:
    """Write a small checkpoint of a type; return what keeps it from being exported, or nothing.

    Args:
        spec: Of a type that the installed transformers knows.
        folder: It is made; it stays empty where a reason is returned.
    """
    try:
        instance = build(spec)
    except ImportError as error:
        return f"{NEEDS_PACKAGES}: {told(error)}"
    except Exception as error:
        return f"no small model: {told(error)}"
    if instance.kind != "causal LM":
        return f"{NO_DECODER} ({instance.kind})"
    if instance.not_run:
        return f"no small model that runs: {instance.not_run}"
    config = copy.deepcopy(instance.config)
    _forget_backends(config)
    model = type(instance.model)._from_config(config, dtype=torch.bfloat16)
    cut_unread_rows(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # classes leave some of them as memory was
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
        elif not parameter.isfinite().all():
            torch.nn.init.ones_(parameter)
    model.generation_config = type(model.generation_config)()  # a top_k may be that of a router
    with quiet_transformers():
        model.save_pretrained(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    if not saved.get("architectures"):  # Qwen2-VL's config of release 4 puts them elsewhere
        saved["architectures"] = [type(model).__name__]
        path.write_text(json.dumps(saved, indent=2), encoding="utf-8")
    return ""
