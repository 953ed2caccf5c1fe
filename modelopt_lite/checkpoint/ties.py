"""Entries of a model that share their values with others, and have no tensor of their own."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def tied_entries(
    model: nn.Module, entries: Mapping[str, tuple[int, ...]], filled: Container[str]
) -> dict[str, str]:
    """Find, for each entry that no tensor fills, the filled entry that it is tied to."""
    tied: dict[str, str] = {}
    declared = getattr(model, "all_tied_weights_keys", None)
    if isinstance(declared, dict):
        tied.update(declared)
    elif _is_tied(getattr(model, "config", None)):
        source = _embedding_entry(model)
        for name in getattr(model, "_tied_weights_keys", None) or ():
            if source is not None and name != source:
                tied[name] = source
    aliases: dict[str, str] = {}
    for one, other in tied.items():
        for name, source in ((one, other), (other, one)):
            if name in entries and name not in filled and source in filled:
                aliases[name] = source
    return aliases


def _is_tied(config: Any) -> bool:
    if config is None:
        return False
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(
        getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False)
    )


def _embedding_entry(model: Any) -> str | None:
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # a composite of several models that have one each
        return None
    for name, module in model.named_modules():
        if module is embedding:
            return f"{name}.weight"
    return None
