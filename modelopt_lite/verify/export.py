"""An export as the audit sees it: modules with their weights and scales."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_lite.checkpoint.header import TensorInfo
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.dialects.base import Dialect, Stated
from modelopt_lite.errors import CheckpointError
from modelopt_lite.formats.base import TensorSpec
from modelopt_lite.formats.declared import has_channel_scales, is_turned
from modelopt_lite.formats.linear import LinearFormat
from modelopt_lite.models import get_spec
from modelopt_lite.models.specs import ExpertStorageSpec, ModelSpec, PTQSpec, ptq_facts
from modelopt_lite.recipes.algorithms import SMOOTHING
from modelopt_lite.report import REPORT_FILE

PACKED_DTYPES = frozenset({torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32})
_SCALE = re.compile(
    r"(?P<module>.+?)(?P<joint>[._])"
    r"(?P<suffix>weight_scale_2|weight_scale|input_scale|pre_quant_scale"
    r"|weight_packed|weight_global_scale|input_global_scale|weight_shape"
    r"|weight_zero_point|input_zero_point|weight_g_idx"
    r"|(weight_quantizer\._)?svdquant_lora_[ab])"
)
NO_SCALES = ("weight_zero_point", "input_zero_point", "weight_g_idx", "weight_shape")
_KV_SCALE = re.compile(r"(?P<module>.+)\.(?P<which>[kv])_scale")
_KV_BIAS = re.compile(r".+\.[kv]_proj\.[kv]_bias")
_CHUNK_BYTES = 1 << 20  # stays in the cache between reading and looking


@dataclass(slots=True)
class Module:
    """A module with a weight of two or more axes, or with scales.

    Attributes:
        name: ``….q_proj``, or ``….experts.gate_up_proj`` where ``stacked``.
        weight: Its weight; None where only scales exist.
        scales: What stands beside it: part (see `modelopt_lite.dialects.base`) -> tensor.
        stacked: All experts of a layer in one tensor, [E, in, out] or [E, out, in].
    """

    name: str
    weight: TensorInfo | None = None
    scales: dict[str, TensorInfo] = field(default_factory=dict)
    stacked: bool = False

    @property
    def packed(self) -> bool:
        """Whether the weight holds codes."""
        return self.weight is not None and self.weight.dtype in PACKED_DTYPES

    @property
    def parent(self) -> str:
        """Name of the module around it."""
        return self.name.rpartition(".")[0]

    @property
    def role(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class KVScale:
    """One ``k_scale`` or ``v_scale``: of which attention module, and which."""

    attention: str
    which: str
    tensor: TensorInfo


@dataclass(frozen=True, slots=True)
class Export:
    """What is written in a folder.

    Attributes:
        folder: The folder.
        checkpoint: Its tensors.
        spec: The model's spec, if it has one.
        modules: By name.
        kv_scales: Scales of the key and value cache.
        kv_biases: Names of the biases of an affine one.
        declared: The formats that the configs state.
        dialect: How it is written.
    """

    folder: Path
    checkpoint: Checkpoint
    spec: ModelSpec | None
    modules: dict[str, Module]
    kv_scales: tuple[KVScale, ...]
    kv_biases: frozenset[str]
    declared: Stated
    dialect: Dialect

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""
        return self.checkpoint.tensors

    @property
    def algo(self) -> str | None:
        """The ``quant_algo`` that the configs state, upper case; None without one."""
        return self.declared.algo

    def format_of(self, module: Module) -> LinearFormat | None:
        """Return the format of a packed module, None for one that this package does not write.

        Where several share a name in configs, the one whose inputs have the scale that is there.
        """
        found = self.declared.formats_of(module.name)
        given = "input_scale" in module.scales
        return next((f for f in found if f.static_input == given), next(iter(found), None))

    @property
    def smoothed(self) -> bool:
        """Whether weights may be scaled by input channel: folded into norms, or stored beside.

        Where all scales are folded, the configs do not tell; the report of our own runs does.
        """
        return any(map(has_channel_scales, self.declared.algos)) or self.method in SMOOTHING

    @property
    def method(self) -> str:
        """How the report of our own run says that scales were chosen; "max" where it is missing."""
        try:
            report = json.loads((self.folder / REPORT_FILE).read_text(encoding="utf-8"))
            return str(report["details"]["recipe"]["algorithm"]["method"])
        except (OSError, ValueError, KeyError, TypeError):
            return "max"

    @property
    def ptq(self) -> PTQSpec:
        """What the engines join, by the spec or by what they join everywhere."""
        return ptq_facts(self.spec)

    @property
    def storage(self) -> ExpertStorageSpec:
        """How experts are stored."""
        known = self.spec.expert_storage_spec if self.spec else None
        return known or ExpertStorageSpec()

    def is_turned(self, module: Module) -> bool:
        """Whether a module is a stack [E, in, out] whose blocks run along ``in``.

        All known models that export stacks have them so; an export may have quantized them along
        the wrong axis, which the shape of the block scales tells.
        """
        if not module.stacked or module.weight is None:
            return False
        known = self.spec.expert_storage_spec if self.spec else None
        input_major = known.input_major if known else True
        fmt, scale = self.format_of(module), module.scales.get("weight_scale")
        if fmt is None or scale is None or fmt.group_size is None:
            return input_major
        return is_turned(fmt, module.weight.shape, scale.shape, input_major=input_major)

    def packed(self) -> Iterator[Module]:
        """Yield the quantized modules."""
        return (m for m in self.modules.values() if m.packed)

    def logical_shape(self, module: Module) -> tuple[int, ...]:
        """Return the shape of the matrix or stack that a module's codes stand for."""
        if module.weight is None:
            return ()
        fmt = self.format_of(module)
        if fmt is None or module.weight.dtype != self.dialect.code_dtype(fmt):
            return module.weight.shape
        codes, turned = module.weight.shape, self.is_turned(module)
        return self.dialect.decoded_shape(fmt, codes, stacked_input_major=turned)

    def wanted(self, fmt: LinearFormat, shape: tuple[int, ...], turned: bool) -> list[TensorSpec]:
        """Return the tensors that a matrix or stack of a format has, its weight first."""
        parts = fmt.tensors(shape, stacked_input_major=turned)
        return list(self.dialect.tensors(fmt, parts, shape))


def read_export(checkpoint: Checkpoint, declared: Stated, dialect: Dialect) -> Export:
    """Sort an export's tensors into modules. Reads nothing but names and headers."""
    modules: dict[str, Module] = {}
    kv_scales = []
    for name, info in checkpoint.tensors.items():
        if match := _SCALE.fullmatch(name):
            module = modules.setdefault(match["module"], Module(match["module"]))
            part = dialect.part_of(match["suffix"])
            if part == "weight":
                module.weight = info
                continue
            module.scales[part] = info
            module.stacked = module.stacked or match["joint"] == "_"
        elif match := _KV_SCALE.fullmatch(name):
            kv_scales.append(KVScale(_attention(match["module"]), match["which"], info))
    for name, info in checkpoint.tensors.items():
        stem = name.removesuffix(".weight")
        if stem != name and (stem in modules or len(info.shape) > 1):
            module = modules.setdefault(stem, Module(stem))
            module.weight = info
            module.stacked |= len(info.shape) == 3 and bool(module.scales)
        elif name in modules or (len(info.shape) == 3 and _may_be_stack(name, info)):
            module = modules.setdefault(name, Module(name))
            module.weight, module.stacked = info, True
    model_type = checkpoint.config.get("model_type")
    spec = get_spec(model_type) if isinstance(model_type, str) else None
    biases = frozenset(name for name in checkpoint.tensors if _KV_BIAS.fullmatch(name))
    scales = tuple(kv_scales)
    return Export(checkpoint.path, checkpoint, spec, modules, scales, biases, declared, dialect)


def _may_be_stack(name: str, info: TensorInfo) -> bool:
    leaf = name.rpartition(".")[2]
    is_scale = _SCALE.fullmatch(name) is not None
    numeric = info.dtype.is_floating_point or info.dtype in PACKED_DTYPES
    return numeric and not is_scale and "bias" not in leaf and "expert" in name


def _attention(module: str) -> str:
    """``….self_attn.k_proj`` and ``….self_attn`` both name the attention ``….self_attn``."""
    parent, _, role = module.rpartition(".")
    return parent if role.endswith("_proj") else module


def chunks(info: TensorInfo) -> Iterator[Tensor]:
    """Read a tensor as stored, in flat pieces of at most a mebibyte, one in memory at a time.

    A piece is overwritten by the next.

    Raises:
        CheckpointError: The file cannot be read or is too short.
    """
    try:
        with info.file.open("rb") as file:
            file.seek(info.start)
            left = info.end - info.start
            data = memoryview(bytearray(min(left, _CHUNK_BYTES)))
            while left:
                data = data[: min(left, len(data))]
                if file.readinto(data) != len(data):
                    raise CheckpointError(f"{info.file}: ends inside of {info.name!r}")
                left -= len(data)
                yield torch.frombuffer(data, dtype=torch.uint8).view(info.dtype)
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read ({error.strerror or error})") from error


def scalar(checkpoint: Checkpoint, info: TensorInfo) -> float:
    """Read a tensor of one element."""
    return float(checkpoint.read(info.name).reshape(()))


def nested(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config and every config inside of it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from nested(value)
