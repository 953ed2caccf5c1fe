"""What the tests of bad input share: the demand itself, and ways to damage a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelopt_lite import quantize_and_export
from modelopt_lite.errors import ModelOptLiteError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Forwards:
    """Counts the calls of modules."""

    count = 0


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    counter, call = Forwards(), nn.Module.__call__

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        counter.count += 1
        return call(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", counted)
    return counter


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default folders of exports must not land in the repository."""
    monkeypatch.chdir(tmp_path)


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    } | {f"{path.relative_to(folder)}/": (0, b"") for path in folder.rglob("*") if path.is_dir()}


Refuse = Callable[..., str]


@pytest.fixture
def refuse(tmp_path: Path, forwards: Forwards, token_batches: list[Tensor]) -> Refuse:
    """Return a function that demands an error, and that it comes early and leaves nothing."""

    def check(
        kind: type[ModelOptLiteError],
        source: Path,
        *says: str,
        while_running: bool = False,
        **options: Any,
    ) -> str:
        given: dict[str, Any] = {
            "export_dir": tmp_path / "out",
            "recipe": "nvfp4",
            "calib_data": token_batches,
            "progress": False,
            **options,
        }
        before = listing(tmp_path)
        forwards.count = 0
        with pytest.raises(ModelOptLiteError) as caught:
            quantize_and_export(source, **given)
        message = str(caught.value)
        assert type(caught.value) is kind, (type(caught.value), message)
        for text in says:
            assert text in message
        assert len(message) > 40, message
        assert listing(tmp_path) == before
        assert while_running or not forwards.count
        return message

    return check


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config))


def in_shards(folder: Path) -> dict[str, str]:
    """Split the single weight file in two; return the weight map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in ((1, names[::2]), (2, names[1::2])):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def poison(source: Path, name: str, values: dict[int, float]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for at, value in values.items():
            tensors[name].view(-1)[at] = value

    edit_weights(source, change)


class Damage:
    """Ways to damage a checkpoint."""

    weights = staticmethod(edit_weights)
    config = staticmethod(edit_config)
    shards = staticmethod(in_shards)
    poison = staticmethod(poison)
    listing = staticmethod(listing)


@pytest.fixture
def damage() -> Damage:
    return Damage()
