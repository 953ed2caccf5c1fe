"""Every example of the runtime's how-tos, run as users would write it.

Example -> test
    tables of patterns (names, includes, excludes, classes, forms) -> test_table_of_*
    overlapping includes -> test_overlapping_includes_make_the_outermost_the_unit
    includes of parameters -> test_parameter_includes_select_within_the_module
    dict-typed models -> test_a_dict_has_names_and_no_classes
    all but lm_head; FP8 scales; one layer; classes; torch's Linear alone; include and exclude
        together; a sub-module of a unit -> test_excluding
    excluded modules stay on the device in all phases -> test_what_is_excluded_stays
    configuration by environment -> test_from_the_environment
    configuration by YAML -> test_from_yaml
    manual trap -> test_a_manual_trap
    auto traps, and the marks by which they are found -> test_auto_trap_discovery
    FP8Linear with a kernel that torch does not see -> test_fp8_linear_with_a_hidden_kernel
    manual traps, found by the module tracker -> test_module_tracker_discovery
    prefix matching -> test_prefix_matching
    inner tensor fields -> test_inner_fields
    the mapping after discovery -> test_the_mapping_after_discovery
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Block, Everything, assert_same, tensors_of
from torch import Tensor, nn

import modelopt_lite.offload as flextensor
from modelopt_lite.errors import OffloadConfigError
from modelopt_lite.offload import OffloadConfig, Phase, api, get_offload_manager, select
from modelopt_lite.offload.discovery import common_prefix, match_prefixes
from modelopt_lite.offload.patterns import match_name, parse_patterns

QUICK: dict[str, Any] = {"profiling_iters": 2, "load_strategy": Everything()}
IDS = torch.arange(10).view(2, 5)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    for manager in api._managers.values():
        manager.release()
    api._managers.clear()


class SharedExpertMLP(Block):
    """The classes that the examples name."""


class MoELayer(Block):
    """See above."""


class Linear(nn.Linear):
    """A user's own, of the short name of torch's."""


class Layer(Block):
    """A layer with all that the examples speak of."""

    def __init__(self) -> None:
        super().__init__(16)
        self.shared = SharedExpertMLP(16)
        self.moe = MoELayer(16)
        self.own = Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.own(self.moe(self.shared(super().forward(x))))
        return y


class Model(nn.Module):
    """Has the names that the examples use; 32 layers, as layers.31 is one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers: Any = nn.ModuleList(Layer() for _ in range(32))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, 20)
        up: Any = self.layers[0].up
        up.scale = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.head(self.norm(x)))
        return logits


# --- patterns


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("layers", ["layers"], ["layer", "layers.0"]),
        ("layer_*", ["layer_0", "layer_abc"], ["layer_0.attn", "layers"]),
        ("layer?", ["layer0"], ["layer01", "layer"]),
        ("layers.*", ["layers.0", "layers.1"], ["layers.0.attn", "layers"]),
        ("*", ["layers", "norm", "head"], ["layers.0"]),
        ("layers.*.self_attn", ["layers.0.self_attn"], ["layers.0.self_attn.q_proj"]),
        ("*.weight", ["lm_head.weight", "norm.weight"], ["layers.0.attn.q_proj.weight"]),
        ("layers.*.weight", ["layers.0.weight"], ["layers.0.attn.weight"]),
    ],
)
def test_table_of_includes(pattern: str, matches: list[str], others: list[str]) -> None:
    assert all(match_name(pattern, name, star_spans=False) for name in matches)
    assert not any(match_name(pattern, name, star_spans=False) for name in others)


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("foo.*", ["foo.bar", "foo.bar.baz", "foo.bar.baz.weight"], ["foo"]),
        ("*.weight", ["lm_head.weight", "layers.0.self_attn.q_proj.weight"], ["weight"]),
        ("*", ["a", "a.b", "a.b.c"], []),
        ("layer_*", ["layer_0", "layer_abc"], ["layer_0.attn"]),
    ],
)
def test_table_of_excludes(pattern: str, matches: list[str], others: list[str]) -> None:
    assert all(match_name(pattern, name, star_spans=True) for name in matches)
    assert not any(match_name(pattern, name, star_spans=True) for name in others)


@pytest.mark.parametrize(
    ("entry", "classes", "others"),
    [
        ("class:SharedExpertMLP", [SharedExpertMLP], [MoELayer]),
        ("class:*Expert*", [SharedExpertMLP], [MoELayer, nn.Linear]),
        ("class:torch.nn.*.Linear", [nn.Linear], [Linear]),
        ("class:*.SharedExpertMLP", [SharedExpertMLP], [Linear]),
    ],
)
def test_table_of_classes(entry: str, classes: list[type], others: list[type]) -> None:
    (pattern,) = parse_patterns([entry], field="include_patterns")
    assert all(pattern.matches_class(found) for found in classes)
    assert not any(pattern.matches_class(found) for found in others)


def test_table_of_forms() -> None:
    model = Model()
    bare = select(model, ["layers.*"], [])
    assert select(model, ["name:layers.*"], []).units.keys() == bare.units.keys()
    shared = select(model, ["class:SharedExpertMLP"], [])
    assert list(shared.units)[:2] == ["layers.0.shared", "layers.1.shared"]
    linear = select(model, ["class:torch.nn.*.Linear"], [])
    assert "layers.0.up" in linear.units
    assert "layers.0.own" not in linear.units


def test_overlapping_includes_make_the_outermost_the_unit() -> None:
    selection = select(Model(), ["layers.*", "layers.*.up"], [])
    assert list(selection.units) == [f"layers.{i}" for i in range(32)]


def test_parameter_includes_select_within_the_module() -> None:
    selection = select(Model(), ["*.weight"], [])
    assert list(selection.offloaded["lm_head"]) == ["lm_head.weight"]
    assert "lm_head.bias" in selection.resident
    assert "layers.0.up.weight" in selection.resident  # more than one part before it


def test_a_dict_has_names_and_no_classes() -> None:
    tensors = {f"layers.{i}.weight": torch.ones(2) for i in range(2)}
    with pytest.raises(ValueError, match="class:"):
        select(tensors, ["class:Linear"], [])
    selection = select(tensors, ["layers.*.weight", "class:Linear"], [])
    assert any("class:Linear" in note.message for note in selection.warnings)
    assert {n for names in selection.offloaded.values() for n in names} == set(tensors)


# --- how to exclude


def run(model: Any, config: OffloadConfig) -> set[str]:
    """Offload, run to INFERENCE with the same bits in every pass; return what is brought in."""
    before = model(IDS)
    assert flextensor.offload(model, config=config) is model
    for _ in range(5):
        assert_same(model(IDS), before)
    assert get_offload_manager().phase is Phase.INFERENCE
    cargos = tensors_of(get_offload_manager())._cargos
    return {m.name for cargo in cargos.values() for m in cargo.tensors}


LAYERS = [f"layers.{i}" for i in range(32)]


@pytest.mark.parametrize(
    ("include", "exclude", "units", "stays", "moves"),
    [
        (["*"], ["lm_head"], ["embed", *LAYERS, "norm", "head"], "lm_head.weight", "norm.bias"),
        (["layers.*"], ["*.scale"], LAYERS, "layers.0.up.scale", "layers.0.up.weight"),
        (["layers.*"], ["layers.31"], LAYERS[:-1], "layers.31.up.weight", "layers.30.up.weight"),
        (
            *(["layers.*"], ["class:SharedExpertMLP", "class:MoELayer"], LAYERS),
            *("layers.3.moe.up.weight", "layers.3.up.weight"),
        ),
        (
            *(["layers.*"], ["class:torch.nn.*.Linear"], LAYERS),
            *("layers.3.up.weight", "layers.3.own.weight"),
        ),
        (
            *(["embed", "layers.*", "head"], ["head", "*.norm"], ["embed", *LAYERS]),
            *("layers.3.moe.norm.weight", "embed.weight"),
        ),
        (
            *(["layers.*"], ["layers.*.norm"], LAYERS),
            *("layers.3.norm.weight", "layers.3.up.weight"),
        ),
    ],
)
def test_excluding(
    include: list[str], exclude: list[str], units: list[str], stays: str, moves: str
) -> None:
    config = OffloadConfig(**QUICK, include_patterns=include, exclude_patterns=exclude)
    moved = run(Model(), config)
    found = [path for path, _ in flextensor.offload_units()]
    assert found == units
    assert stays not in moved
    assert moves in moved


def test_what_is_excluded_stays() -> None:
    model = Model()
    config = OffloadConfig(**QUICK, include_patterns=["layers.*"], exclude_patterns=["*.norm"])
    flextensor.offload(model, config=config)
    addresses = {n: p.data_ptr() for n, p in model.named_parameters() if ".norm." in n}
    tensors = tensors_of(get_offload_manager())
    resident = tensors.resident_bytes
    for _ in range(5):
        model(IDS)
        assert {n: p.data_ptr() for n, p in model.named_parameters() if ".norm." in n} == addresses
        assert tensors.resident_bytes == resident


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_INCLUDE_PATTERNS", "*")
    monkeypatch.setenv("FT_EXCLUDE_PATTERNS", "lm_head,*.norm")
    config = flextensor.load_config()
    assert config.enabled
    model = flextensor.offload(Model(), config=config)
    assert "lm_head" not in dict(flextensor.offload_units())
    model(IDS)


def test_from_yaml(tmp_path: Path) -> None:
    text = 'include_patterns:\n  - "*"\nexclude_patterns:\n  - "lm_head"\n  - "*.scale"\n'
    (tmp_path / "config.yaml").write_text(text)
    config = flextensor.load_config_from_file(str(tmp_path / "config.yaml"))
    assert config.include_patterns == ["*"]
    assert config.exclude_patterns == ["lm_head", "*.scale"]
    moved = run(Model(), config.model_copy(update=QUICK))
    assert "layers.0.up.scale" not in moved
    assert "lm_head.weight" not in moved


# --- discovery


class Manual(nn.Module):
    """Layers that the caller runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_0, self.layer_1 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer_1(self.layer_0(x))
        return y


def test_a_manual_trap() -> None:
    config = OffloadConfig(profiling_iters=2)  # skip_discovery=False by default
    model: Any = Manual()
    x = torch.rand(2, 8)
    before = model.layer_0(x)
    model = flextensor.offload(model, config=config)
    manager = flextensor.get_offload_manager()
    with manager.offload_block("layer_0"):
        assert_same(model.layer_0(x), before)
    manager.release()
    model = flextensor.offload(model, config=config.model_copy(update={"skip_discovery": True}))
    with pytest.raises(RuntimeError, match="skip_discovery"), manager.offload_block("layer_0"):
        pass


def test_module_tracker_discovery() -> None:
    config = OffloadConfig(**QUICK, include_patterns=[])
    manager = get_offload_manager()
    model: Any = Manual()
    dataloader = [torch.rand(2, 8) for _ in range(5)]
    expected = [model(batch) for batch in dataloader]
    model = manager.offload(model, config)
    for batch, wanted in zip(dataloader, expected, strict=True):
        with manager.offload_block("layer_0"):
            x = model.layer_0(batch)
        with manager.offload_block("layer_1"):
            x = model.layer_1(x)
        assert_same(x, wanted)
        manager.update_state()  # these passes do not go through the model's forward
    assert manager.phase is Phase.INFERENCE
    cargos = tensors_of(manager)._cargos
    for name in ("layer_0", "layer_1"):
        assert {m.name for m in cargos[name].tensors} == {f"{name}.weight", f"{name}.bias"}


def test_auto_trap_discovery() -> None:
    config = OffloadConfig(**QUICK, include_patterns=["layers.*"])
    model = flextensor.offload(Model(), config=config)
    tensor_ids: dict[str, set[int]] = {}
    for module in model.modules():
        if hasattr(module, "_ft_original_forward_func"):
            label: Any = module._ft_offload_name
            tensor_ids[label] = set()
            for param in module.parameters():
                tensor_ids[label].add(id(param))
                tensor_ids[label] |= set(flextensor.get_inner_tensor_field_ids(param))
    stats = tensors_of(get_offload_manager()).layer_statistics_collector.get_layer_stats()
    assert {stat.label: set(stat.tensor_ids) for stat in stats} == tensor_ids


def hidden_matmul(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A kernel that torch does not see: it takes addresses, as Triton's do."""
    assert type(weight) is nn.Parameter
    with torch._C.DisableTorchFunction():
        return x @ (weight.data.float() * scale.data).T


class FP8Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        fp8 = torch.randn(out_features, in_features).to(torch.float8_e4m3fn)
        weight: Any = nn.Parameter(fp8, requires_grad=False)
        weight.scale = torch.rand(out_features, 1)
        self.weight: Any = weight

    def forward(self, x: Tensor) -> Tensor:
        return hidden_matmul(x, self.weight, self.weight.scale)


def test_fp8_linear_with_a_hidden_kernel() -> None:
    model = nn.Sequential(*(FP8Linear(16, 16) for _ in range(4)))
    x = torch.rand(2, 16)
    before = model(x)
    flextensor.offload(model, config=OffloadConfig(**QUICK))
    for _ in range(5):
        assert_same(model(x), before)
    cargo = tensors_of(get_offload_manager())._cargos["1"]
    assert [m.name for m in cargo.tensors] == ["1.weight", "1.weight.scale"]


def test_prefix_matching() -> None:
    traced_names = ["layers.0.attn.q.weight", "layers.0.attn.k.weight", "layers.0.ffn.w1.weight"]
    assert common_prefix(traced_names) == "layers.0"
    found = match_prefixes({"layer 0": traced_names}, ["layers.0.attn.q.scale"])
    assert found == {"layers.0.attn.q.scale": "layer 0"}


def test_inner_fields() -> None:
    weight: Any = torch.nn.Parameter(torch.randn(10, 10))
    weight.scale = torch.tensor(1.0)  # Inner tensor field
    weight.zero_point = torch.tensor(0)  # Another inner field
    ids = flextensor.get_inner_tensor_field_ids(weight)
    assert set(ids) == {id(weight.scale), id(weight.zero_point)}


@pytest.mark.parametrize("skip", [False, True])
def test_the_mapping_after_discovery(skip: bool) -> None:
    config = OffloadConfig(**QUICK, include_patterns=["layers.*"], skip_discovery=skip)
    manager = get_offload_manager()
    model: Any = manager.offload(Model(), config)
    if not (config.skip_discovery and manager.skip_discovery_honored):
        for _ in range(config.discovery_iters):
            model(IDS)
    layer_stats = manager._tensor_manager.layer_statistics_collector.get_layer_stats()  # type: ignore[union-attr]
    own = len(list(model.layers[5].parameters()))
    assert {stat.label: len(stat.tensor_ids) for stat in layer_stats}["layers.5"] == own


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="class:Lin") as caught:
        OffloadConfig(include_patterns=["clas:Lin"])
    assert isinstance(caught.value, OffloadConfigError)
