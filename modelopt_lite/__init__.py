"""Quantize Hugging Face checkpoints larger than your memory, in the formats that engines load."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from modelopt_lite.api import dry_run, export_hf, quantize, quantize_and_export
    from modelopt_lite.errors import ModelOptLiteError
    from modelopt_lite.evaluate import perplexity
    from modelopt_lite.recipes import Recipe, load_recipe
    from modelopt_lite.report import Report
    from modelopt_lite.verify.audit import audit

# Loaded on first use: importing modelopt_lite.models must not import torch.
_WHERE = {
    "ModelOptLiteError": "errors",
    "Recipe": "recipes",
    "Report": "report",
    "audit": "verify.audit",
    "dry_run": "preview",
    "export_hf": "api",
    "load_recipe": "recipes",
    "perplexity": "evaluate",
    "quantize": "api",
    "quantize_and_export": "api",
}
__all__ = [
    "ModelOptLiteError",
    "Recipe",
    "Report",
    "audit",
    "dry_run",
    "export_hf",
    "load_recipe",
    "perplexity",
    "quantize",
    "quantize_and_export",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'modelopt_lite' has no attribute {name!r}")
    from modelopt_lite.errors import loading_specs
    from modelopt_lite.process import collector_paused, use_huge_pages

    use_huge_pages()
    with loading_specs(), collector_paused():
        return getattr(importlib.import_module(f"modelopt_lite.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
