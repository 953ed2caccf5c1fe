"""Refuse configs whose counts the weights beside them contradict, before anything is built."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from modelopt_lite.errors import CheckpointError

_COUNT = re.compile(r"(?:^|_)(layers?|experts?|heads?|blocks?)(?:$|_)")
_NO_COUNT = re.compile(r"_(size|dim|eps|length|window|factor|coef|scale|theta|freq|interval)$")
_LARGEST = 10**18  # is told of larger values
_ALWAYS = 4096  # a model of so many layers or experts is built in a second


def check_counts(
    config: Mapping[str, Any], shapes: Collection[tuple[int, ...]], folder: Path
) -> None:
    """Refuse a config that counts more layers, experts or heads than the weights can hold.

    Models, lists of layers and tables of routers are made as large as a config says, before their
    weights are missed: 10**9 layers would fill the memory. No layer is without a tensor, and
    experts and heads have tensors of their own or are rows of one. Counts up to 4,096 pass.

    Args:
        config: config.json, at any depth of nesting.
        shapes: Those of all tensors in the weight files.
        folder: Of both, for the message.

    Raises:
        CheckpointError: It names the key, its value, and the largest that can be.
    """
    rows = max((size for shape in shapes for size in shape), default=0)
    for key, value in _counts(config):
        most = max(_ALWAYS, len(shapes))
        if "layer" not in key.rpartition(".")[2]:
            most = max(most, rows)
        if value > most:
            raise CheckpointError(
                f"{folder / 'config.json'}: {key} is {value:,}, and the weights have "
                f"{len(shapes):,} tensors of at most {rows:,} rows, so it can be no more than "
                f"{most:,}; correct it, or use the config that belongs to the weights"
            )


def _counts(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int]]:
    """Yield each count with its path; sections may lie in one another."""
    waiting: list[tuple[str, Any]] = [(path, config)]
    while waiting:
        above, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{above}.{key}" if above else str(key), v) for key, v in value.items()]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            key = above.rpartition(".")[2]
            if _COUNT.search(key) and not _NO_COUNT.search(key):
                yield above, int(value) if abs(value) < _LARGEST else _LARGEST
