"""Facts about models, one package for each Hugging Face ``model_type``.

A package is named after the ``model_type`` it describes and its ``specs.py`` registers one
``ModelSpec`` when imported. Importing this package finds them all. It imports those of the entry
point group ``modelopt_lite.models`` and those in the folders that ``MODELOPT_LITE_MODELS_PATH``
lists; those beside this file are imported when they are first asked for. Neither torch nor
transformers is imported. ``README.md`` tells how to add a model.
"""

from __future__ import annotations

if __name__ == "models":
    raise ImportError(
        "imported as 'models': that would make a second registry; "
        "import modelopt_lite.models instead"
    )

from modelopt_lite.models.discovery import import_all
from modelopt_lite.models.registry import (
    get_spec,
    get_specs,
    hf_model_type,
    is_moe,
    list_all_possible,
    match_class_names,
    match_moe_block,
    match_moe_model,
    register,
)
from modelopt_lite.models.specs import (
    EPSpec,
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
    SpecSection,
)

__all__ = [
    "EPSpec",
    "ExpertStorageSpec",
    "ExportSpec",
    "MoESpec",
    "ModelSpec",
    "NamingSpec",
    "PTQSpec",
    "SpecSection",
    "get_spec",
    "get_specs",
    "hf_model_type",
    "is_moe",
    "list_all_possible",
    "match_class_names",
    "match_moe_block",
    "match_moe_model",
    "register",
]

import_all(__name__, __path__)
