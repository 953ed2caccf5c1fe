"""Units partition a model's entries; a store brings them in and leaves no trace when they go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.checkpoint.names import map_names
from modelopt_lite.job import Job, prepare
from modelopt_lite.offload import Unit, WeightStore, find_units
from modelopt_lite.offload.store import Loaded
from modelopt_lite.recipes import load_recipe

MakeCheckpoint = Callable[..., Path]


def job_for(folder: Path) -> Job:
    return prepare(
        folder,
        load_recipe("fp8"),
        model_type=None,
        numerics="exact",
        on_bad_shape="error",
        trust_remote_code=False,
        device="cpu",
    )


def loaded(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def bring_in(store: WeightStore, unit: Unit) -> Loaded:
    weights = store.load(unit)
    store.attach(weights)
    return weights


def take_out(store: WeightStore, weights: Loaded) -> None:
    store.detach(weights.unit)
    store.release(weights)


# --- find_units


def test_every_entry_is_in_one_unit(tiny: tuple[str, Any, list[Unit]]) -> None:
    name, model, units = tiny
    entries = [entry for unit in units for entry in unit.entries]
    assert sorted(entries) == sorted(model.state_dict())
    order = {module: index for index, (module, _) in enumerate(model.named_modules())}
    named = [unit.name for unit in units if unit.name]
    assert named == sorted(named, key=order.__getitem__)
    layers = [unit.name for unit in units if unit.is_layer]
    assert not any(a != b and b.startswith(f"{a}.") for a in layers for b in named)
    counts = {"albert": 1, "t5": 5, "bart": 3}  # bart's by structure: the longer of two lists
    assert len(layers) == counts.get(name, model.config.num_hidden_layers)


class Base(nn.Module):
    """A layer with children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.zeros(1))


class DECODERlayer(Base):
    """Its name is compared without regard to case, and so is its base's."""


class Quantized(DECODERlayer):
    """A class generated around a layer's class."""


def test_layers_by_class_or_base_without_regard_to_case() -> None:
    model = nn.Sequential(Quantized(), Base(), DECODERlayer())
    units = find_units(model, ["DecoderLayer"])
    assert units == [
        Unit("0", ("0.own", "0.inner.weight", "0.inner.bias"), True),
        Unit("1.inner", ("1.inner.weight", "1.inner.bias"), False),
        Unit("2", ("2.own", "2.inner.weight", "2.inner.bias"), True),
        Unit("", ("1.own",), False),
    ]


def test_a_part_of_a_class_name_is_no_match() -> None:
    assert not any(unit.is_layer for unit in find_units(nn.Sequential(Base()), ["Bas", "aseLayer"]))


def test_a_layer_inside_a_layer_is_part_of_it() -> None:
    outer = DECODERlayer()
    outer.inner = DECODERlayer()  # type: ignore[assignment]
    units = find_units(nn.Sequential(outer), ["decoderlayer"])
    assert [unit.name for unit in units] == ["0"]


def test_names_that_begin_alike_are_not_inside_each_other() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1)) for _ in range(12)))
    model.add_module("1b", nn.Linear(1, 1))
    model[1].add_module("layer", DECODERlayer())
    units = find_units(model, ["DecoderLayer"])
    assert [unit.name for unit in units if unit.is_layer] == ["1.layer"]
    assert {"1.0", "10.0", "1b"} <= {unit.name for unit in units}


def test_without_a_class_the_longest_outer_list_is_the_layers() -> None:
    model = nn.Module()
    model.short = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    layers = [nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1)] * 9)}) for _ in range(3)]
    model.layers = nn.ModuleList(layers)
    units = find_units(model, [])
    assert [unit.name for unit in units if unit.is_layer] == ["layers.0", "layers.1", "layers.2"]
    assert [unit.name for unit in units if not unit.is_layer] == ["short.0", "short.1"]


def test_a_model_without_layers_or_children() -> None:
    assert find_units(nn.Linear(1, 1), ["X"]) == [Unit("", ("weight", "bias"), False)]
    assert find_units(nn.Identity(), ["X"]) == []


def test_a_module_with_two_names_is_one_unit() -> None:
    model = nn.Module()
    model.shared = nn.Embedding(4, 2)
    model.encoder = nn.ModuleDict({"embed": model.shared})
    entries = ("shared.weight", "encoder.embed.weight")
    assert find_units(model, []) == [Unit("shared", entries, False)]


def test_non_persistent_buffers_belong_to_no_unit() -> None:
    model = nn.Module()
    model.layer = Base()
    model.layer.register_buffer("kept", torch.zeros(1))
    model.layer.register_buffer("made", torch.zeros(1), persistent=False)
    (unit,) = find_units(model, ["Base"])
    assert "layer.kept" in unit.entries
    assert "layer.made" not in unit.entries


# --- WeightStore

KINDS = ("llama", "llama_tied", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma3_text")


@pytest.mark.parametrize("kind", [*KINDS, "phi3"])
def test_filled_equals_from_pretrained(kind: str, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint(kind)
    job, expected = job_for(folder), loaded(folder)
    store = job.store()
    for unit in job.plan.units:
        bring_in(store, unit)
    made = job.model.state_dict()
    wanted = expected.state_dict()
    assert list(made) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(made[name], tensor), name
    kept = {"weight", "e_score_correction_bias"}  # 5.x raises the router's weight to float32
    for name, tensor in wanted.items():
        if made[name].dtype != tensor.dtype:
            assert name.rpartition(".")[2] in kept
            assert made[name].dtype == job.source.tensors[name].dtype
    assert dict(job.model.named_buffers()).keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert torch.equal(job.model.get_buffer(name), buffer), name
    assert any("inv_freq" in name for name, _ in job.model.named_buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_taken_out_leaves_the_model_as_it_was(kind: str, checkpoint: MakeCheckpoint) -> None:
    job = job_for(checkpoint(kind))
    before = job.model.state_dict(keep_vars=True)
    store = job.store()
    for unit in job.plan.units:
        weights = bring_in(store, unit)
        here = job.model.state_dict()
        assert not any(here[entry].is_meta for entry in unit.entries)
        elsewhere = before.keys() - set(unit.entries)
        assert all(here[e].is_meta == before[e].is_meta for e in elsewhere)
        take_out(store, weights)
    after = job.model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(parameter.is_meta for parameter in job.model.parameters())


def test_layers_take_turns_in_one_arena(checkpoint: MakeCheckpoint) -> None:
    job = job_for(checkpoint("qwen3_moe"))
    store = job.store()
    first, second = (unit for unit in job.plan.units if unit.is_layer)
    addresses = []
    for unit in (first, second, first):
        weights = bring_in(store, unit)
        addresses.append(storages(job.model, unit))
        take_out(store, weights)
    assert len(addresses[0]) == 1  # every entry of a unit is in the same block
    assert addresses[0] == addresses[1] == addresses[2]


def storages(model: nn.Module, unit: Unit) -> set[int]:
    entries = model.state_dict()
    return {entries[entry].untyped_storage().data_ptr() for entry in unit.entries}


def test_a_layer_that_is_in_keeps_its_memory(checkpoint: MakeCheckpoint) -> None:
    """Nothing that comes or goes meanwhile may give the arena to another layer."""
    folder = checkpoint("llama")
    job, expected = job_for(folder), loaded(folder).state_dict()
    store = job.store()
    layers = [unit for unit in job.plan.units if unit.is_layer]
    others = [unit for unit in job.plan.units if not unit.is_layer]
    bring_in(store, layers[0])
    for unit in others:
        take_out(store, bring_in(store, unit))
    bring_in(store, layers[1])
    here = job.model.state_dict()
    for unit in layers:
        for entry in unit.entries:
            assert torch.equal(here[entry], expected[entry]), entry
    assert not storages(job.model, layers[0]) & storages(job.model, layers[1])


def test_sources_are_views_where_the_model_holds_them(checkpoint: MakeCheckpoint) -> None:
    from safetensors.torch import load_file

    folder = checkpoint("qwen3_moe")
    job = job_for(folder)
    store = job.store()
    layer = next(unit for unit in job.plan.units if unit.is_layer)
    sources = bring_in(store, layer).sources
    disk = load_file(folder / "model.safetensors")
    assert set(sources) == {name for name in disk if name.startswith(f"{layer.name}.")}
    for name, value in sources.items():
        assert value.dtype == disk[name].dtype
        assert torch.equal(value, disk[name]), name
    assert {value.untyped_storage().data_ptr() for value in sources.values()} == storages(
        job.model, layer
    )


def test_dtype_on_disk_is_kept_where_the_spec_says_so(checkpoint: MakeCheckpoint) -> None:
    from safetensors.torch import load_file, save_file

    folder = checkpoint("deepseek_v3")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    bias = next(name for name in tensors if name.endswith("e_score_correction_bias"))
    exact = torch.arange(len(tensors[bias]), dtype=torch.float32) + 1 / 3
    query = next(name for name in tensors if name.endswith("q_a_proj.weight"))
    wide = tensors[query].float() * (1 + 2**-12)
    save_file({**tensors, bias: exact, query: wide}, path, {"format": "pt"})
    job = job_for(folder)
    store = job.store()
    for unit in job.plan.units:
        sources = bring_in(store, unit).sources
        if query in sources:  # what is exported keeps every bit of the source
            assert sources[query].dtype == torch.float32
            assert torch.equal(sources[query], wide)
    entries = job.model.state_dict()
    assert entries[bias].dtype == torch.float32
    assert torch.equal(entries[bias], exact)
    assert entries[query].dtype == torch.bfloat16  # the model's own
    assert torch.equal(entries[query], tensors[query])


def test_tied_embeddings_on_both_sides(checkpoint: MakeCheckpoint) -> None:
    job = job_for(checkpoint("llama_tied"))
    assert job.plan.names.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    store = job.store()
    units = {unit.name: unit for unit in job.plan.units}
    values = []
    for name in ("model.embed_tokens", "lm_head"):
        weights = bring_in(store, units[name])
        assert list(weights.sources) == ["model.embed_tokens.weight"]
        values.append(job.model.get_parameter(f"{name}.weight").clone())
        take_out(store, weights)
        assert job.model.get_parameter(f"{name}.weight").is_meta
    assert torch.equal(*values)


def test_whole_numbers_and_buffers() -> None:
    """A buffer of whole numbers keeps the disk's dtype; buffers stay buffers."""
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(2))
    disk: dict[str, Tensor] = {
        "0.weight": torch.ones(2),
        "0.bias": torch.zeros(2),
        "0.running_mean": torch.tensor([1.0, 2.0]),
        "0.running_var": torch.tensor([3.0, 4.0]),
        "0.num_batches_tracked": torch.tensor(7),
    }

    def read(name: str, out: Tensor | None) -> Tensor:
        return disk[name] if out is None else out.copy_(disk[name])

    store = WeightStore(
        model,
        map_names(model, {name: tuple(t.shape) for name, t in disk.items()}),
        read,
        keep_dtype=lambda name: False,
        dtype_on_disk=lambda name: disk[name].dtype,
        device=torch.device("cpu"),
    )
    (unit,) = find_units(model, [])
    weights = bring_in(store, unit)
    here = model.state_dict()
    assert all(
        torch.equal(here[name], t) and here[name].dtype == t.dtype for name, t in disk.items()
    )
    assert len(list(model.parameters())) == 2
    take_out(store, weights)
    assert all(t.is_meta for t in model.state_dict().values())
    assert len(list(model.buffers())) == 3


def test_a_module_that_reads_its_childrens_weights_is_one_unit() -> None:
    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.probe = nn.Parameter(torch.zeros(1, 8))
            self.attention = nn.MultiheadAttention(8, 2)
            self.norm = nn.LayerNorm(8)

    units = {unit.name: set(unit.entries) for unit in find_units(Pooling(), ())}
    ends = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    assert units == {
        "attention": {f"attention.{end}" for end in ends},
        "norm": {"norm.weight", "norm.bias"},
        "": {"probe"},
    }
