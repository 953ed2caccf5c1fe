"""Names on disk and in the model, in whatever transformers is installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_lite.build import build_meta_model
from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.checkpoint.fill import read_entries
from modelopt_lite.checkpoint.names import NameMap, map_names, natural_key
from modelopt_lite.errors import CheckpointError

MakeCheckpoint = Callable[..., Path]
INPUTS = Path(__file__).parent / "data" / "golden" / "inputs"
V5 = Version(transformers.__version__) >= Version("5")
KINDS = (
    *("llama", "llama_tied", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma3_text"),
    *("phi3", "qwen2_moe", "glm4_moe", "nemotron_h"),
)


def mapped(folder: Path) -> tuple[Any, Any, NameMap]:
    source = open_source(folder)
    model = build_meta_model(folder, source.config, trust_remote_code=False)
    return source, model, map_names(model, {n: info.shape for n, info in source.tensors.items()})


def filled(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every entry of the model, and every tensor on disk, as `read_entries` gives them."""
    source, model, names = mapped(folder)
    entries = model.state_dict()
    buffers = {
        target: torch.empty(entries[target].shape, dtype=entries[target].dtype)
        for group in names.groups
        for target in group.targets
    }
    for buffer in buffers.values():
        buffer.fill_(torch.nan)
    kept: dict[str, Tensor] = {}
    for group in names.groups:
        read_entries(group, source.read, buffers, keep=kept.__setitem__)
    return {entry: buffers[names.resolve(entry)] for entry in entries}, kept


def assert_as_loaded(folder: Path) -> None:
    made, _ = filled(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    wanted = model.state_dict()
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(made[name], tensor.to(made[name].dtype)), name


@pytest.mark.parametrize("kind", KINDS)
def test_filled_as_transformers_fills_it(kind: str, checkpoint: MakeCheckpoint) -> None:
    assert_as_loaded(checkpoint(kind))


@pytest.mark.parametrize("name", sorted(path.name for path in INPUTS.iterdir()))
def test_the_peers_checkpoints(name: str) -> None:
    if name == "qwen3_moe" and Version(transformers.__version__) < Version("5.1"):
        pytest.skip("transformers before 5.1 does not read num_local_experts of this config")
    source, model, names = mapped(INPUTS / name)
    assert not names.unmapped
    assert set(names.by_source) == set(source.tensors)
    assert set(names.by_target) | set(names.aliases) == set(model.state_dict())
    assert not set(names.by_target) & set(names.aliases)
    made, kept = filled(INPUTS / name)
    disk = load_file(INPUTS / name / "model.safetensors")
    assert all(torch.equal(kept[key], disk[key].to(kept[key].dtype)) for key in disk)
    assert_as_loaded(INPUTS / name)
    assert all(not tensor.isnan().any() for tensor in made.values())


def test_experts_are_read_to_their_place(checkpoint: MakeCheckpoint) -> None:
    _, model, names = mapped(checkpoint("qwen3_moe", num_experts=12))
    prefix = "model.layers.0.mlp.experts"
    fused = f"{prefix}.gate_up_proj" in model.state_dict()
    assert fused == V5
    for expert in (2, 11):  # natural order: 2 before 11
        for leaf, region in (
            ("gate_proj", (expert, slice(0, 32))),
            ("up_proj", (expert, slice(32, 64))),
            ("down_proj", (expert,)),
        ):
            source = f"{prefix}.{expert}.{leaf}.weight"
            target = f"{prefix}.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"
            expected: Any = (target, region) if fused else (source, ())
            assert names.place(source) == expected
    assert names.place("nothing") is None


def test_ties_both_ways(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama_tied")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    _, _, names = mapped(folder)
    assert names.aliases == {head: embedding}
    assert names.resolve(head) == embedding
    assert names.resolve(embedding) == embedding
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[head] = tensors.pop(embedding)
    save_file(tensors, path, {"format": "pt"})
    _, _, names = mapped(folder)
    assert names.aliases == {embedding: head}
    tensors[embedding] = tensors[head].clone()
    save_file(tensors, path, {"format": "pt"})
    _, _, names = mapped(folder)
    assert names.aliases == {}  # both are there, as in an untied checkpoint


def test_the_base_models_prefix(checkpoint: MakeCheckpoint) -> None:
    """Files of the bare model lack the prefix that the whole model has."""
    folder = checkpoint("llama_tied")
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): t for name, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    _, model, names = mapped(folder)
    assert names.place("layers.0.mlp.up_proj.weight") == ("model.layers.0.mlp.up_proj.weight", ())
    assert set(names.by_target) | set(names.aliases) == set(model.state_dict())


# --- what does not fit


@pytest.fixture
def edited(checkpoint: MakeCheckpoint) -> Callable[..., Path]:
    """Return a function (kind, edit) that changes a checkpoint's tensors in place."""

    def make(kind: str, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
        folder = checkpoint(kind)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, {"format": "pt"})
        return folder

    return make


Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


def test_a_tensor_that_the_model_does_not_take(edited: Callable[..., Path]) -> None:
    extra = "model.layers.7.self_attn.q_proj.weight"
    folder = edited("llama", lambda tensors: tensors.update({extra: torch.zeros(2, 2)}))
    _, _, names = mapped(folder)
    assert names.unmapped == (extra,)
    assert names.place(extra) is None


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("llama", lambda t: t.pop(Q), f"no tensor .* gives '{Q}', which LlamaForCausalLM"),
        ("llama", lambda t: t.pop("lm_head.weight"), r"gives 'lm_head\.weight'"),
        ("llama", lambda t: t.update({Q: torch.zeros(3, 5)}), rf"'{Q}' has shape \[3, 5\]"),
        ("qwen3_moe", lambda t: t.pop(EXPERT), "download it again|no tensor"),
        ("qwen3_moe", lambda t: t.update({EXPERT: torch.zeros(3, 5)}), rf"'{EXPERT}' has shape"),
        (
            "qwen3_moe",
            lambda t: [t.pop(name) for name in list(t) if "gate_proj" in name],
            "download it again|no tensor",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    kind: str,
    edit: Callable[[dict[str, Tensor]], Any],
    message: str,
    edited: Callable[..., Path],
) -> None:
    with pytest.raises(CheckpointError, match=message):
        mapped(edited(kind, edit))


def test_many_missing_tensors_are_counted(edited: Callable[..., Path]) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"and 4 more, which"):
        mapped(edited("llama", edit))


def test_two_tensors_for_one_parameter(edited: Callable[..., Path]) -> None:
    short = Q.removeprefix("model.")
    with pytest.raises(CheckpointError, match="both claim the parameter"):
        mapped(edited("llama", lambda tensors: tensors.update({short: tensors[Q].clone()})))


# --- rules that do more than stack and concatenate


@pytest.fixture
def llama_rules() -> Iterator[Callable[[list[Any]], None]]:
    """Return a function that gives llama conversion rules, for this test only."""
    if not V5:
        pytest.skip("transformers 4 has no conversion rules")
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    before = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    registered = set(conversion_mapping.USER_REGISTERED_MAPPINGS)

    def give(rules: list[Any]) -> None:
        conversion_mapping.register_checkpoint_conversion_mapping("llama", rules, overwrite=True)

    yield give
    conversion_mapping._checkpoint_conversion_mapping_cache.clear()
    conversion_mapping._checkpoint_conversion_mapping_cache.update(before)
    conversion_mapping.USER_REGISTERED_MAPPINGS.clear()
    conversion_mapping.USER_REGISTERED_MAPPINGS.update(registered)


def test_splitting_and_transposing(
    llama_rules: Callable[[list[Any]], None], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    from transformers.core_model_loading import Chunk, Transpose, WeightConverter

    folder = checkpoint("llama", num_key_value_heads=4)
    plain, _ = filled(folder)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(folder / "model.safetensors")
    for index in range(2):
        layer = f"model.layers.{index}"
        parts = [tensors.pop(f"{layer}.self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[f"{layer}.self_attn.qkv.weight"] = torch.cat(parts)
        down = tensors.pop(f"{layer}.mlp.down_proj.weight")
        tensors[f"{layer}.mlp.c_proj.weight"] = down.T.contiguous()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    projections = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    llama_rules(
        [
            WeightConverter("self_attn.qkv.weight", projections, operations=[Chunk(dim=0)]),
            WeightConverter(
                "mlp.c_proj.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)]
            ),
        ]
    )
    _, _, names = mapped(other)
    group = names.by_source["model.layers.0.self_attn.qkv.weight"]
    assert group.targets == tuple(f"model.layers.0.{name}" for name in projections)
    assert not group.pieces
    made, kept = filled(other)
    assert all(torch.equal(made[name], tensor) for name, tensor in plain.items())
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items())
    assert_as_loaded(other)


def test_concatenation_alone(
    llama_rules: Callable[[list[Any]], None], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    from transformers.core_model_loading import Concatenate, WeightConverter

    folder = checkpoint("llama")
    plain, _ = filled(folder)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(folder / "model.safetensors")
    for index in range(2):
        name = f"model.layers.{index}.mlp.down_proj.weight"
        left, right = tensors.pop(name).split([16, 48], dim=1)
        tensors[name.replace("down_proj", "down_b")] = left.contiguous()
        tensors[name.replace("down_proj", "down_a")] = right.contiguous()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    rule = WeightConverter(
        ["mlp.down_b.weight", "mlp.down_a.weight"],
        "mlp.down_proj.weight",
        operations=[Concatenate(dim=1)],
    )
    llama_rules([rule])
    _, _, names = mapped(other)
    source = "model.layers.0.mlp.down_a.weight"
    target = "model.layers.0.mlp.down_proj.weight"
    assert names.place(source) == (target, (slice(None), slice(16, 64)))
    made, _ = filled(other)
    assert all(torch.equal(made[name], tensor) for name, tensor in plain.items())
    assert_as_loaded(other)


def test_natural_order() -> None:
    names = ["l.10.a", "l.2.b", "l.2.a", "l.2", "l.x", "k.11"]
    assert sorted(names, key=natural_key) == ["k.11", "l.2", "l.2.a", "l.2.b", "l.10.a", "l.x"]
