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
from modelopt_lite.yamls import load_yaml

ENV_PREFIX = "FT_"
# Budgets of a run share the prefix; `quantize_and_export` reads them.
_NOT_OURS = ("HOST_MEMORY", "DEVICE_MEMORY", "DISK_SCRATCH")
_TRUE, _FALSE = ("true", "1", "yes", "y", "on"), ("false", "0", "no", "n", "off")
_NONE = ("none", "null", "")
_INI_SECTION = "flextensor"


def load_config(
    config_path: str | os.PathLike[str] | None = None,
    env_prefix: str = ENV_PREFIX,
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
    return _gather(config_path, env_prefix if use_env else None, config_file_env_var, values)


def load_config_from_env(env_prefix: str = ENV_PREFIX, **values: Any) -> OffloadConfig:
    """Read variables and no file, as `load_config` does; keywords go before them."""
    return _gather(None, env_prefix, None, values)


def load_config_from_file(config_path: str | os.PathLike[str], **values: Any) -> OffloadConfig:
    """Read a file and no variables, as `load_config` does; keywords go before it."""
    return _gather(config_path, None, None, values)


def _gather(
    path: str | os.PathLike[str] | None,
    env_prefix: str | None,
    config_file_env_var: str | None,
    values: Mapping[str, Any],
) -> OffloadConfig:
    """Put the sources together; no prefix: no variables count."""
    check_names(values, "OffloadConfig has no field")
    if path is None and env_prefix is not None and config_file_env_var:
        path = os.environ.get(config_file_env_var, "").strip() or None
    from_file = _read_file(Path(path)) if path is not None else {}
    from_env = _read_env(env_prefix, config_file_env_var) if env_prefix is not None else {}
    if env_prefix is not None and path is None and not from_env and not values:
        return OffloadConfig(enabled=False)
    sources = [str(path)] * bool(from_file) + [f"{env_prefix}* variables"] * bool(from_env)
    try:
        return OffloadConfig(**{**from_file, **from_env, **values})
    except OffloadConfigError as error:
        if not sources:
            raise
        raise OffloadConfigError(f"{error} (read from {' and '.join(sources)})") from None


def _read_env(prefix: str, config_file_env_var: str | None) -> dict[str, Any]:
    """Return the fields that variables set; warn of variables that name none."""
    found: dict[str, Any] = {}
    others = {config_file_env_var, f"{prefix}CONFIG_FILE", *(f"{prefix}{n}" for n in _NOT_OURS)}
    for variable in sorted(os.environ):
        if not variable.startswith(prefix) or variable in others:
            continue
        name = variable.removeprefix(prefix).lower()
        if name in REMOVED_NAMES:
            raise OffloadConfigError(f"{variable} is no variable any more; {REMOVED_NAMES[name]}")
        if name not in OffloadConfig.model_fields:
            known = [f"{prefix}{field.upper()}" for field in OffloadConfig.model_fields]
            hint = nearest(variable.upper(), known)
            message = f"{variable} names no field of OffloadConfig and is ignored; {hint}"
            warnings.warn(message, UserWarning, stacklevel=4)
            continue
        found[name] = _convert(name, os.environ[variable], variable)
    return found


def _convert(name: str, text: str, source: str) -> Any:
    """Make a field's value of text.

    Raises:
        OffloadConfigError: The text is no such value; the value's range is checked later.
    """
    _refuse_object(name, source)
    kind, optional = _kind(OffloadConfig.model_fields[name].annotation)
    text = text.strip()
    if optional and text.lower() in _NONE:
        return None
    if kind is list:
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return _CONVERTERS.get(kind, str)(text)
    except ValueError:
        raise OffloadConfigError(
            f"{source}={text!r} is no {kind.__name__}; unset it for the default"
        ) from None


def _kind(annotation: Any) -> tuple[type, bool]:
    """Return the type that a field takes besides None, and whether it takes None."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return _kind(inner[0])[0], True
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    return (origin if origin is list else annotation), False


def _to_bool(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(text)
    return text.lower() in _TRUE


_CONVERTERS: Mapping[type, Callable[[str], Any]] = {bool: _to_bool, int: int, float: float}


def _refuse_object(name: str, source: str) -> None:
    if name == "load_strategy":
        raise OffloadConfigError(
            f"{source} cannot be given as text: a strategy is an object; pass it in Python, "
            "load_config(load_strategy=GreedyStrategy())"
        )


def _read_file(path: Path) -> dict[str, Any]:
    """Return the fields that a file sets, its names checked."""
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise OffloadConfigError(
            f"{path} has the unknown suffix {path.suffix!r}; use one of {', '.join(_READERS)}"
        )
    if not path.is_file():
        raise OffloadConfigFileError(f"there is no configuration file {path}")
    try:
        content = read(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, configparser.Error, ValueError, RecursionError) as error:
        raise OffloadConfigError(f"{path} cannot be read: {error}{_star_hint(error)}") from None
    if not isinstance(content, dict):
        raise OffloadConfigError(f"{path} holds a {type(content).__name__}, not names with values")
    check_names(content, f"{path} has a key that OffloadConfig does not know:")
    for name in content:
        _refuse_object(name, f"the key {name!r} of {path}")
    if read is _read_ini:
        return {name: _convert(name, text, f"{path}: {name}") for name, text in content.items()}
    return content


def _star_hint(error: Exception) -> str:
    return "; put quotes around patterns that begin with *" if "alias" in str(error) else ""


def _read_yaml(text: str) -> Any:
    content = load_yaml(text, _UniqueKeys)
    return {} if content is None else content


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key that comes twice: the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        found = super().construct_mapping(node, deep)
        _unique([(self.construct_object(key, deep=True), None) for key, _ in node.value])
        return found


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} comes twice")
        found[key] = value
    return found


def _read_ini(text: str) -> Any:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read_string(text)
    if not parser.has_section(_INI_SECTION):
        raise ValueError(f"it has no section [{_INI_SECTION}], only {parser.sections()}")
    return dict(parser[_INI_SECTION])


_READERS: Mapping[str, Callable[[str], Any]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_json,
    ".ini": _read_ini,
    ".conf": _read_ini,
}
