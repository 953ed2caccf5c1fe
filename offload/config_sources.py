"""Read an `OffloadConfig` from keywords, ``FT_`` variables and a file, in that precedence."""

from __future__ import annotations

import configparser
import json
import os
import types
import typing
import warnings
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from modelopt_lite.errors import OffloadConfigError, OffloadConfigFileError
from modelopt_lite.offload.config import REMOVED_NAMES, OffloadConfig, check_names, nearest

_TRUE, _FALSE = ("true", "1", "yes", "y", "on"), ("false", "0", "no", "n", "off")
_NONE = ("none", "null", "")
_INI_SECTION = "flextensor"


def load_config(
    config_path: str | os.PathLike[str] | None = None,
    env_prefix: str = "FT_",
    use_env: bool = True,
    config_file_env_var: str = "FT_CONFIG_FILE",
    **values: Any,
) -> OffloadConfig:
    """Gather a configuration: keywords before variables before the file before the defaults.

    Args:
        config_path: A file, .yaml, .yml, .json, .ini or .conf (both with a section
            ``[flextensor]``). None: the one that ``config_file_env_var`` names, if any.
        env_prefix: Begins the variables: ``FT_NUM_BLOCKS=6``. Lists are separated by commas,
            ``none`` stands for no value.
        use_env: Whether variables count, ``config_file_env_var`` included.
        config_file_env_var: Variable with the path of a file.
        **values: Fields of `OffloadConfig`.

    Returns:
        The configuration. Where variables count and nothing at all is set, ``enabled`` is False:
        a program that calls this is switched on from outside.

    Raises:
        OffloadConfigError: An unknown name or key, or a value that is not allowed.
        OffloadConfigFileError: The file does not exist; also a FileNotFoundError.

    Warns:
        UserWarning: A variable that begins with the prefix and names no field.
    """
    check_names(values, "OffloadConfig has no field")
    if config_path is None and use_env:
        config_path = os.environ.get(config_file_env_var, "").strip() or None
    from_file = _read_file(Path(config_path)) if config_path is not None else {}
    from_env = _read_env(env_prefix, config_file_env_var) if use_env else {}
    if use_env and config_path is None and not from_env and not values:
        return OffloadConfig(enabled=False)
    return OffloadConfig(**{**from_file, **from_env, **values})


def load_config_from_env(env_prefix: str = "FT_", **values: Any) -> OffloadConfig:
    """Read variables alone, as `load_config` does; keywords go before them."""
    check_names(values, "OffloadConfig has no field")
    return OffloadConfig(
        **{"enabled": False, **_on(found := _read_env(env_prefix, ""), values), **found, **values}
    )


def load_config_from_file(config_path: str | os.PathLike[str], **values: Any) -> OffloadConfig:
    """Read a file alone, as `load_config` does; keywords go before it."""
    return load_config(config_path, use_env=False, **values)
