"""Profiles: written, read, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.errors import OffloadConfigError, OffloadError
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.device import HostDevice
from modelopt_lite.offload.manager import OffloadManager, Phase
from modelopt_lite.offload.profile_io import read_profile, save_profile

CONFIG = OffloadConfig(include_patterns=["layers.*"], profiling_iters=2, transfer_budget_scale=1e9)
X = torch.linspace(-1, 1, 3 * 200).reshape(3, 200)


class Net(nn.Module):
    def __init__(
        self, depth: int = 4, width: int = 300, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(200, width, dtype=dtype), nn.ReLU(), nn.Linear(width, 200, dtype=dtype)
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def net(**kwargs: Any) -> Net:
    torch.manual_seed(3)
    return Net(**kwargs).requires_grad_(False)


def manager() -> OffloadManager:
    return OffloadManager("test", device=HostDevice())


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A folder with a profile of ``net()``."""
    one, model = manager(), net()
    one.offload(model, CONFIG)
    for _ in range(3):
        model(X)
    assert one.phase is Phase.INFERENCE
    assert save_profile(one, tmp_path / "new" / "folder") == tmp_path / "new/folder/profile.json"
    one.release()
    return tmp_path / "new" / "folder"


def test_a_profile_leads_to_inference_without_a_pass(profile: Path) -> None:
    model, expected = net(), net()(X)
    other = manager()
    assert other.offload_from_profile(model, profile, CONFIG) is model
    assert other.phase is Phase.INFERENCE
    plan = other.get_tensor_manager().plan  # type: ignore[union-attr]
    assert plan is not None
    kept = read_profile(profile)
    assert {label: [t.name for t in ts] for label, ts in plan.offloaded.items()} == kept.plan
    assert kept.plan
    for _ in range(4):
        assert torch.equal(model(X), expected)
    again = profile.parent / "again"
    save_profile(other, again)
    assert read_profile(again).samples_ms == kept.samples_ms
    other.release()
    assert torch.equal(model(X), expected)


def test_the_file_is_versioned_json_without_ids(profile: Path) -> None:
    content = json.loads((profile / "profile.json").read_text())
    assert (content["format"], content["version"]) == ("modelopt-lite offload profile", 1)
    assert list(content["samples_ms"]) == [f"layers.{i}" for i in range(4)]
    assert content["fingerprint"]["tensors"]["layers.0.0.weight"] == "float32[300, 200]"
    assert [path.name for path in profile.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (
            {"depth": 5},
            {},
            r"the module 'layers\.4' is missing in the profile and torch\.nn\.modules\.container",
        ),
        ({"depth": 3}, {}, r"'layers\.3' is .*Sequential in the profile and missing in the model"),
        (
            {"width": 301},
            {},
            r"'layers\.0\.0\.weight' is float32\[300, 200\] in the profile and float32\[301, 200\]",
        ),
        ({"dtype": torch.float64}, {}, r"is float32\[300, 200\] .* float64\[300, 200\]"),
        ({}, {"include_patterns": ["layers.*.0"]}, r"include_patterns is \['layers\.\*'\] in"),
        ({}, {"exclude_patterns": ["*.bias"]}, r"exclude_patterns is \[\] in the profile"),
    ],
)
def test_a_profile_of_another_model_is_refused(
    profile: Path, model: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    other, target = manager(), net(**model)
    before = [p.data_ptr() for p in target.parameters()]
    with pytest.raises(OffloadError, match=message):
        other.offload_from_profile(target, profile, CONFIG.model_copy(update=config))
    assert other.phase is Phase.NOT_INITIALIZED
    assert all("forward" not in vars(m) for m in target.modules())
    assert len(before) == len(list(target.parameters()))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("fingerprint", "device"), "cuda NVIDIA", "device is 'cuda NVIDIA' in the profile"),
        (("fingerprint", "torch"), "1.0", r"torch is '1\.0' in the profile"),
        (("version",), 7, "has version 7, and this release reads 1; profile again"),
        (("format",), "other", "is no profile"),
        (("samples_ms", "layers.1"), [-1.0], "damaged"),
        (("tensors",), 3, "damaged"),
    ],
)
def test_a_profile_of_another_place_or_version_is_refused(
    profile: Path, path: tuple[str, ...], value: Any, message: str
) -> None:
    content = json.loads((profile / "profile.json").read_text())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (profile / "profile.json").write_text(json.dumps(content))
    with pytest.raises(OffloadError, match=message):
        manager().offload_from_profile(net(), profile, CONFIG)


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="there is no profile"):
        read_profile(tmp_path)
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(OffloadError, match="cannot be read"):
        read_profile(tmp_path)


def test_when_a_profile_cannot_be_saved(tmp_path: Path) -> None:
    one, model = manager(), net()
    with pytest.raises(OffloadError, match="no model"):
        save_profile(one, tmp_path)
    one.offload(model, CONFIG)
    with pytest.raises(OffloadError, match="run 3 more passes"):
        save_profile(one, tmp_path)
    for _ in range(3):
        model(X)
    with pytest.raises(OffloadConfigError, match="profile_storage_dir"):
        save_profile(one)
    one.release()
    one.offload(model, CONFIG.model_copy(update={"profile_read_only": True}))
    with pytest.raises(OffloadConfigError, match="profile_read_only"):
        save_profile(one, tmp_path)
    one.release()
    assert not list(tmp_path.iterdir())


def test_the_folder_of_the_configuration(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"profile_storage_dir": str(tmp_path / "here")})
    one, model = manager(), net()
    one.offload(model, config)
    for _ in range(3):
        model(X)
    save_profile(one)
    one.release()
    one.offload_from_profile(model, config=config)
    assert one.phase is Phase.INFERENCE
    one.release()
