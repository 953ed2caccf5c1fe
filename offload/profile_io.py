"""Profiles: what discovery and profiling found of a model, kept in a file, to go on from there.

A profile is ``profile.json`` in a folder of its own: versioned JSON, keyed by names. It holds a
fingerprint of the model, the patterns, the device and torch; one that does not fit is refused, and
the first difference named. The plan is not replayed but made anew from the same timings, so that a
profile outlives a change of budget or strategy.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelopt_lite.errors import OffloadConfigError, OffloadError
from modelopt_lite.offload.config import OffloadConfig
from modelopt_lite.offload.managerstate import Phase

if TYPE_CHECKING:
    from modelopt_lite.offload.managerplan import PlanningManager

FILE = "profile.json"
FORMAT = "modelopt-lite offload profile"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a profile is valid for.

    Attributes:
        modules: Path -> class of every module, the model itself under ``""``.
        tensors: Name of every parameter and buffer -> dtype and shape, ``float32[4, 3]``.
        include_patterns: Of the configuration.
        exclude_patterns: Of the configuration.
        device: Name of the hardware.
        torch: Release.
    """

    modules: Mapping[str, str]
    tensors: Mapping[str, str]
    include_patterns: Sequence[str]
    exclude_patterns: Sequence[str]
    device: str
    torch: str

    @classmethod
    def of(cls, model: nn.Module, config: OffloadConfig, device: str) -> Fingerprint:
        """Take the fingerprint of a model, here and now, for a device of some name."""
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        return cls(
            modules={
                path: f"{type(module).__module__}.{type(module).__qualname__}"
                for path, module in model.named_modules()
            },
            tensors={name: _describe(tensor) for name, tensor in named},
            include_patterns=list(config.include_patterns),
            exclude_patterns=list(config.exclude_patterns),
            device=device,
            torch=torch.__version__.partition("+")[0],
        )

    def first_difference(self, other: Fingerprint) -> str | None:
        """Say what differs first between this (the profile's) and another one; None: nothing."""
        differences = itertools.chain(self._of_the_model(other), self._around_it(other))
        return next(differences, None)

    def _of_the_model(self, other: Fingerprint) -> Iterator[str]:
        for what in ("module", "tensor"):
            mine: Mapping[str, str] = getattr(self, f"{what}s")
            theirs: Mapping[str, str] = getattr(other, f"{what}s")
            for name in dict.fromkeys((*mine, *theirs)):
                if mine.get(name) != theirs.get(name):
                    yield (
                        f"the {what} {name!r} is {mine.get(name, 'missing')} in the profile and "
                        f"{theirs.get(name, 'missing')} in the model"
                    )

    def _around_it(self, other: Fingerprint) -> Iterator[str]:
        for field in ("include_patterns", "exclude_patterns", "device", "torch"):
            old, new = getattr(self, field), getattr(other, field)
            if old != new:
                yield f"{field} is {old!r} in the profile and {new!r} here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The contents of a profile.

    Attributes:
        fingerprint: What it is valid for.
        tensors: Label -> names of the parameters that it owns; labels in the order of a pass.
        samples_ms: Label -> measured compute times.
        transfer_ms: Bytes -> measured copy time.
        plan: For people: label -> names of the tensors that were brought in, under the
            configuration of that time.
    """

    fingerprint: Fingerprint
    tensors: Mapping[str, Sequence[str]]
    samples_ms: Mapping[str, Sequence[float]]
    transfer_ms: Mapping[int, float]
    plan: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, manager: PlanningManager) -> Profile:
        """Gather the profile of an offloaded model.

        Raises:
            OffloadError: Before INFERENCE.
        """
        tensors, model = manager.get_tensor_manager(), manager.model
        if manager.phase is not Phase.INFERENCE or tensors is None or model is None:
            raise OffloadError(
                f"a profile is complete in INFERENCE, and manager {manager.name!r} is in "
                f"{manager.phase.name}; run {manager.iters_before_inference} more passes"
                if model is not None
                else f"manager {manager.name!r} has no model to profile; call offload() first"
            )
        collector = tensors.layer_statistics_collector
        stats = {layer.label: layer for layer in collector.get_layer_stats()}
        samples = collector.samples()
        order = [*samples, *(label for label in stats if label not in samples)]
        plan = tensors.plan.offloaded if tensors.plan is not None else {}
        return cls(
            fingerprint=Fingerprint.of(model, manager.config, manager.device.name),
            tensors={label: [t.name for t in stats[label].tensors] for label in order},
            samples_ms={label: list(samples.get(label, ())) for label in order},
            transfer_ms=dict(tensors.transfer_curve()),
            plan={label: [t.name for t in moved] for label, moved in plan.items()},
        )

    def check(self, model: nn.Module, config: OffloadConfig, device: str) -> None:
        """Raise `OffloadError`, with the first difference, where the profile is for others."""
        here = Fingerprint.of(model, config, device)
        _refuse(self.fingerprint.first_difference(here))

    def check_model(self, model: nn.Module) -> None:
        """Do the same for the model alone, which may be on the meta device."""
        here = Fingerprint.of(model, OffloadConfig(), "")
        _refuse(next(self.fingerprint._of_the_model(here), None))

    def owned(self, model: nn.Module) -> dict[str, list[str]]:
        """Return the names of the parameters that each label owns."""
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return {label: [n for n in ns if n in parameters] for label, ns in self.tensors.items()}


def save_profile(manager: PlanningManager, directory: Path | str | None = None) -> Path:
    """Write a manager's profile; an older one in the folder is replaced as a whole.

    Args:
        manager: In INFERENCE.
        directory: Made where it does not exist. None: ``profile_storage_dir`` of the configuration.

    Returns:
        The file.

    Raises:
        OffloadConfigError: No directory, or ``profile_read_only``.
        OffloadError: Before INFERENCE.
    """
    if manager.config.profile_read_only:
        raise OffloadConfigError("profile_read_only is set: the profile is not written")
    profile = Profile.of(manager)
    folder = profile_folder(manager.config, directory)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "version": VERSION, **asdict(profile)}
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(folder / FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return folder / FILE


def read_profile(directory: Path | str) -> Profile:
    """Read a profile.

    Raises:
        OffloadError: There is none, it is damaged, or of another version.
    """
    path = Path(directory) / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OffloadError(f"there is no profile {path}; make one with save_profile()") from error
    except (OSError, ValueError, RecursionError) as error:
        raise OffloadError(f"{path} cannot be read ({error}); profile again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise OffloadError(f"{path} is no profile of an offloaded model")
    if content.get("version") != VERSION:
        raise OffloadError(
            f"{path} has version {content.get('version')!r}, and this release reads {VERSION}; "
            "profile again"
        )
    try:
        return Profile(
            fingerprint=Fingerprint(**content["fingerprint"]),
            tensors={str(k): [str(n) for n in v] for k, v in content["tensors"].items()},
            samples_ms={k: [_ms(x) for x in v] for k, v in content["samples_ms"].items()},
            transfer_ms={int(k): _ms(v) for k, v in content["transfer_ms"].items()},
            plan=content["plan"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OffloadError(f"{path} is damaged ({error!r}); profile again") from error


def profile_folder(config: OffloadConfig, directory: Path | str | None) -> Path:
    """Return the folder of a profile: the given one, or the configuration's.

    Raises:
        OffloadConfigError: There is neither.
    """
    folder = directory or config.profile_storage_dir
    if folder is None:
        raise OffloadConfigError(
            "no folder for the profile: give one, or set profile_storage_dir in the configuration"
        )
    return Path(folder)


def _refuse(difference: str | None) -> None:
    if difference is not None:
        raise OffloadError(f"the profile does not fit: {difference}; profile again")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _ms(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no time in ms")
    return float(value)
