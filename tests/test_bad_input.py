"""Bad input is refused: the right class, what and what to do, no forward pass, nothing left."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from modelopt_lite import Recipe, quantize_and_export
from modelopt_lite.cli import app
from modelopt_lite.errors import (
    CalibrationError,
    CheckpointError,
    ModelOptLiteError,
    NonFiniteError,
    OutputError,
    RecipeError,
    RemoteCodeError,
    ShapeError,
    SpecError,
    UnsupportedSourceError,
)
from modelopt_lite.verify.audit import audit

MakeCheckpoint = Callable[..., Path]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q1 = "model.layers.1.self_attn.q_proj.weight"
STATIC = ("fp8", "nvfp4")
DATA_FREE = ("w4a16_nvfp4", "fp8_per_channel_per_token")
Usage = namedtuple("Usage", "total used free")


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


# The source


def test_no_such_checkpoint(tmp_path: Path, refuse: Refuse) -> None:
    refuse(CheckpointError, tmp_path / "nowhere", "nowhere", "does not exist", "give a folder")


def test_no_config(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "empty").mkdir()
    refuse(CheckpointError, tmp_path / "empty", "config.json", "no such file")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_config_is_no_json_object(
    checkpoint: MakeCheckpoint, refuse: Refuse, content: bytes
) -> None:
    source = checkpoint("llama")
    (source / "config.json").write_bytes(content)
    refuse(CheckpointError, source, "config.json")


@pytest.mark.parametrize("value", [None, "", 7])
def test_no_model_type(checkpoint: MakeCheckpoint, refuse: Refuse, value: Any) -> None:
    source = checkpoint("llama")
    edit_config(source, model_type=value)
    refuse(CheckpointError, source, "config.json", "no model_type", "add")


def test_another_model_type(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    refuse(CheckpointError, checkpoint("llama"), "'qwen3'", "'llama'", model_type="qwen3")


def test_unknown_architecture(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    edit_config(source, model_type="llamma", architectures=None)
    refuse(SpecError, source, "'llamma'", "install a release")


def test_config_of_other_weights(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    edit_config(source, intermediate_size=128)
    refuse(CheckpointError, source, "mlp.", "do not belong together")


def test_config_that_transformers_rejects(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    edit_config(source, hidden_size="many")
    refuse(CheckpointError, source, "config.json", "transformers")


def test_no_weights(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    (source / WEIGHTS).unlink()
    refuse(CheckpointError, source, "source_llama")


def test_missing_shard(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    in_shards(source)
    (source / "model-00002-of-00002.safetensors").unlink()
    refuse(CheckpointError, source, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", Q1),
        ("llama", "model.norm.weight"),
        ("llama", "lm_head.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.5.up_proj.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_missing_key(checkpoint: MakeCheckpoint, refuse: Refuse, kind: str, name: str) -> None:
    source = checkpoint(kind)
    edit_weights(source, lambda t: t.pop(name))
    message = refuse(CheckpointError, source, "the checkpoint is incomplete")
    assert name.partition(".experts")[0] in message


def test_index_names_a_tensor_that_its_shard_lacks(
    checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    source = checkpoint("llama")
    weight_map = in_shards(source)
    weight_map["model.layers.9.ghost.weight"] = "model-00001-of-00002.safetensors"
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refuse(
        CheckpointError,
        source,
        "model.layers.9.ghost.weight",
        "model-00001-of-00002.safetensors",
        "repair the index",
    )


def test_index_that_leads_out_of_the_folder(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    weight_map = {**in_shards(source), Q1: "../secret.safetensors"}
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refuse(CheckpointError, source, "../secret.safetensors", "same folder")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_weights(checkpoint: MakeCheckpoint, refuse: Refuse, keep: float) -> None:
    source = checkpoint("llama")
    data = (source / WEIGHTS).read_bytes()
    end = keep if isinstance(keep, int) else int(len(data) * keep)
    (source / WEIGHTS).write_bytes(data[:end])
    refuse(CheckpointError, source, WEIGHTS, "again")


def test_an_lfs_pointer(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    (source / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refuse(CheckpointError, source, "git lfs pull")


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"bits": 4}, "None"),
    ],
)
def test_source_is_quantized_in_another_way(
    checkpoint: MakeCheckpoint, refuse: Refuse, section: dict[str, Any], names: str
) -> None:
    source = checkpoint("llama")
    edit_config(source, quantization_config=section)
    refuse(UnsupportedSourceError, source, names, "original checkpoint")


def test_quantized_tensors_that_no_config_announces(
    checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    source = checkpoint("llama")
    packed = {Q1.replace("weight", "qweight"): torch.zeros(4, 32, dtype=torch.int32)}
    edit_weights(source, lambda t: t.update(packed))
    refuse(UnsupportedSourceError, source, "q_proj.qweight", "original checkpoint")


# Values in the weights: found when their unit is read


def poison(source: Path, name: str, values: dict[int, float]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for at, value in values.items():
            tensors[name].view(-1)[at] = value

    edit_weights(source, change)


@pytest.mark.parametrize("offload", ["auto", "none"])
@pytest.mark.parametrize("recipe", [*STATIC, *DATA_FREE])
def test_nan_and_infinity_in_a_weight(
    checkpoint: MakeCheckpoint, refuse: Refuse, recipe: str, offload: str
) -> None:
    source = checkpoint("llama")
    poison(source, Q1, {3: float("nan"), 40: float("inf"), 41: float("-inf")})
    options: dict[str, Any] = {"recipe": recipe, "offload": offload, "while_running": True}
    if recipe in DATA_FREE:
        options["calib_data"] = None
    refuse(NonFiniteError, source, Q1, "3 values", "repair", **options)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "w4a16_nvfp4", "nvfp4_experts_only"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.6.down_proj.weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj"),
    ],
)
def test_nan_in_an_expert(
    checkpoint: MakeCheckpoint, refuse: Refuse, kind: str, name: str, recipe: str
) -> None:
    source = checkpoint(kind)
    poison(source, name, {-1: float("nan")})
    refuse(NonFiniteError, source, name, "1 value", recipe=recipe, while_running=True)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
)
def test_nan_in_a_weight_that_stays_is_named_too(
    checkpoint: MakeCheckpoint, refuse: Refuse, name: str
) -> None:
    source = checkpoint("llama")
    poison(source, name, {5 * 32 if "embed" in name else 5: float("nan")})
    refuse(NonFiniteError, source, name, while_running=True)


def test_nan_in_a_weight_that_no_forward_reads(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    poison(source, "lm_head.weight", {5: float("nan")})
    with pytest.raises(ModelOptLiteError, match=r"lm_head\.weight"):
        quantize_and_export(
            source, export_dir=source.parent / "out", recipe="w4a16_nvfp4", progress=False
        )
    assert list(source.parent.iterdir()) == [source]


# The recipe and other options


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("nvpf4", "did you mean 'nvfp4'"),
        ("fp88", "did you mean 'fp8'"),
        ("int3", "presets: "),
        ("nowhere.yaml", "nowhere.yaml"),
        (Recipe(name="mine", weights="nvfp5"), "did you mean 'nvfp4'"),
    ],
)
def test_unknown_recipe_or_format(
    checkpoint: MakeCheckpoint, refuse: Refuse, recipe: Any, says: str
) -> None:
    refuse(RecipeError, checkpoint("llama"), says, recipe=recipe)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("weigths: fp8", "did you mean 'weights'"),
        ("weights: fp9", "did you mean 'fp8'"),
        ("weights: fp8\ninclude: mlp", "list of patterns"),
        ("weights: [fp8", "no valid YAML"),
        ("- fp8", "mapping"),
        ("weights: fp8\nkv_cache: fp9", "did you mean 'fp8'"),
        ("include: ['*.mlp']", "weights must name a format"),
    ],
)
def test_bad_recipe_file(
    checkpoint: MakeCheckpoint, refuse: Refuse, tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    refuse(RecipeError, checkpoint("llama"), says, recipe=path)


@pytest.mark.parametrize("kind", ["include", "exclude"])
def test_pattern_that_matches_nothing(
    checkpoint: MakeCheckpoint, refuse: Refuse, kind: str
) -> None:
    patterns = ("*.mlp", "*.experts_typo*")
    included = patterns if kind == "include" else ()
    excluded = patterns if kind == "exclude" else ()
    recipe = Recipe(name="mine", weights="fp8", include=included, exclude=excluded)
    refuse(RecipeError, checkpoint("qwen3_moe"), "'*.experts_typo*'", kind, recipe=recipe)


def test_nothing_is_left_to_quantize(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    recipe = Recipe(name="mine", weights="fp8", exclude=("*",))
    refuse(RecipeError, checkpoint("llama"), "quantizes nothing", recipe=recipe)
    refuse(RecipeError, checkpoint("llama"), "quantizes nothing", recipe="nvfp4_experts_only")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dialect": "compresed"}, "'compresed'"),
        ({"numerics": "exakt"}, "'exakt'"),
        ({"offload": "disk"}, "'disk'"),
        ({"on_bad_shape": "ignore"}, "'ignore'"),
        ({"kv_cache": "fp4"}, "'fp4'"),
        ({"device": "warp"}, "'warp'"),
        ({"max_shard_size": "10 bananas"}, "10 bananas"),
        ({"max_shard_size": 0}, "0"),
        ({"disk_scratch": "all"}, "'all'"),
        ({"host_memory": "1KB"}, "1,000 bytes"),
        ({"device_memory": "1KB"}, "1,000 bytes"),
    ],
)
def test_bad_option(
    checkpoint: MakeCheckpoint, refuse: Refuse, options: dict[str, Any], says: str
) -> None:
    refuse(RecipeError, checkpoint("llama"), says, **options)


@pytest.mark.parametrize("options", [{"calib_size": 0}, {"calib_seq_len": 1}, {"batch_size": 0}])
def test_bad_calibration_size(
    checkpoint: MakeCheckpoint, refuse: Refuse, options: dict[str, int]
) -> None:
    refuse(CalibrationError, checkpoint("llama"), "at least", **options)


def test_a_budget_that_suffices(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    quantize_and_export(
        checkpoint("llama"),
        export_dir=tmp_path / "out",
        calib_data=token_batches,
        host_memory="1MB",
        device_memory="1MB",
        progress=False,
    )
    assert audit(tmp_path / "out") == []


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16_nvfp4", "nvfp4_mlp_only"])
def test_shape_that_the_block_does_not_divide(
    checkpoint: MakeCheckpoint, refuse: Refuse, recipe: str
) -> None:
    source = checkpoint("llama", intermediate_size=40)
    refuse(ShapeError, source, "down_proj", "[32, 40]", "16", "on_bad_shape", recipe=recipe)


@pytest.mark.parametrize(
    ("kind", "size", "left"),
    [
        ("llama", "intermediate_size", {"down_proj": 2}),
        ("qwen3_moe", "moe_intermediate_size", {"down_proj": 16, "up_proj": 16, "gate_proj": 16}),
    ],
)
def test_skipping_shapes(
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
    kind: str,
    size: str,
    left: dict[str, int],
) -> None:
    source, out = checkpoint(kind, **{size: 40}), tmp_path / "out"
    report = quantize_and_export(
        source, export_dir=out, calib_data=token_batches, on_bad_shape="skip", progress=False
    )
    skipped = [n for n, why in report.excluded.items() if "shape" in why or "fuse" in why]
    assert {role: sum(n.endswith(role) for n in skipped) for role in left} == left
    assert any("shape" in note for note in report.notes)
    excluded = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert set(skipped) <= set(excluded["exclude_modules"])
    assert audit(out, source=source, deep=True) == []


# The output


def test_folder_that_is_not_empty(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    out = source.parent / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    refuse(OutputError, source, "is not empty", str(out), "overwrite=True")


def test_overwrite_replaces_and_a_failed_run_keeps(
    checkpoint: MakeCheckpoint, refuse: Refuse, token_batches: list[Tensor]
) -> None:
    source = checkpoint("llama")
    out = source.parent / "out"
    (out / "deep").mkdir(parents=True)
    (out / "deep" / "old").write_text("old")
    poison(source, Q1, {0: float("nan")})
    refuse(NonFiniteError, source, Q1, overwrite=True, while_running=True)
    poison(source, Q1, {0: 0.0})
    quantize_and_export(
        source, export_dir=out, calib_data=token_batches, overwrite=True, progress=False
    )
    assert not (out / "deep").exists()
    assert audit(out, source=source, deep=True) == []
    assert sorted(source.parent.iterdir()) == sorted([out, source])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("where", ["source", "inside", "around", "link"])
def test_source_and_export_lie_inside_one_another(
    checkpoint: MakeCheckpoint, refuse: Refuse, tmp_path: Path, where: str, overwrite: bool
) -> None:
    source = checkpoint("llama")
    (tmp_path / "link").symlink_to(source)
    out = {
        "source": source,
        "inside": source / "a" / "b",
        "around": tmp_path,
        "link": tmp_path / "link" / "a",
    }[where]
    refuse(OutputError, source, "inside", "elsewhere", export_dir=out, overwrite=overwrite)


def test_export_dir_is_a_file(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    file = source.parent / "file"
    file.write_text("x")
    refuse(OutputError, source, "is a file", export_dir=file)
    refuse(OutputError, source, str(file), export_dir=file / "below")


def test_parent_that_cannot_be_written(
    checkpoint: MakeCheckpoint, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, parent = checkpoint("llama"), tmp_path / "locked"
    parent.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != parent)
    refuse(OutputError, source, "not writable", str(parent), export_dir=parent / "out")


def test_disk_without_room(
    checkpoint: MakeCheckpoint, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 1234, 1234))
    message = refuse(OutputError, source, "needs ", "1,234", "are free", "free ")
    needs = int(message.split("needs ")[1].split(" ")[0].replace(",", ""))
    assert f"{needs - 1234:,} bytes or choose" in message
    weights = sum(t.numel() for t in load_file(source / WEIGHTS).values())
    assert weights / 2 < needs < 2.5 * weights + 50_000


def test_unwritten_parents_are_removed_again(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    source = checkpoint("llama")
    poison(source, Q1, {0: float("nan")})
    out = source.parent / "new" / "newer" / "out"
    refuse(NonFiniteError, source, Q1, export_dir=out, while_running=True)


# The calibration data


@pytest.mark.parametrize("recipe", STATIC)
@pytest.mark.parametrize(
    "data",
    [[], iter(()), [torch.zeros(0, 4, dtype=torch.int64)], [torch.zeros(2, 0, dtype=torch.int64)]],
    ids=["none", "iterator", "no rows", "no columns"],
)
def test_no_calibration_data(
    checkpoint: MakeCheckpoint, refuse: Refuse, recipe: str, data: Any
) -> None:
    refuse(CalibrationError, checkpoint("llama"), "no tokens", recipe=recipe, calib_data=data)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.json", "empty.safetensors"])
def test_empty_calibration_file(
    checkpoint: MakeCheckpoint, refuse: Refuse, with_tokenizer: Callable[[Path], Path], name: str
) -> None:
    source = with_tokenizer(checkpoint("llama", vocab_size=512))
    path = source.parent / name
    path.write_text("[]" if name.endswith(".json") else "")
    if name.endswith(".safetensors"):
        save_file({}, path)
    refuse(CalibrationError, source, name, "no tokens", calib_data=path)


def test_no_data_is_fine_where_none_is_needed(
    checkpoint: MakeCheckpoint, forwards: Forwards, tmp_path: Path
) -> None:
    for recipe in DATA_FREE:
        out = tmp_path / recipe
        quantize_and_export(checkpoint("llama"), export_dir=out, recipe=recipe, progress=False)
        assert audit(out) == []
    assert not forwards.count


@pytest.mark.parametrize("bad", [64, 10**9, -1])
def test_token_ids_outside_of_the_vocabulary(
    checkpoint: MakeCheckpoint, refuse: Refuse, token_batches: list[Tensor], bad: int
) -> None:
    batch = torch.full((2, 3), 5)
    batch[1, 2] = bad
    refuse(
        CalibrationError,
        checkpoint("llama"),
        f"batch {len(token_batches)}",
        f"token id {bad}",
        "0..63",
        "tokenize",
        calib_data=[*token_batches, batch],
    )


def test_tokenizer_of_another_model(
    checkpoint: MakeCheckpoint, refuse: Refuse, with_tokenizer: Callable[[Path], Path]
) -> None:
    source = with_tokenizer(checkpoint("llama"))
    refuse(CalibrationError, source, "0..63", calib_data=["zzzz" * 9])


@pytest.mark.parametrize(
    "data",
    [
        [torch.zeros(4, dtype=torch.int64)],
        [torch.zeros(1, 2, 3, dtype=torch.int64)],
        [torch.zeros(2, 3)],
        [[1, 2, 3]],
        ["text", torch.zeros(2, 3, dtype=torch.int64)],
        [{"input_ids": torch.zeros(2, 3, dtype=torch.int64)}],
        [None],
        torch.zeros(4, dtype=torch.int64),
        {"input_ids": 3},
        5,
    ],
    ids=repr,
)
def test_batch_of_a_wrong_type(checkpoint: MakeCheckpoint, refuse: Refuse, data: Any) -> None:
    source = checkpoint("llama")
    refuse(CalibrationError, source, "token ids", calib_data=data)


def test_an_empty_batch_among_others_changes_nothing(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe")
    empty = torch.zeros(0, 4, dtype=torch.int64)
    for name, data in (("a", token_batches), ("b", [empty, *token_batches, empty.T])):
        quantize_and_export(source, export_dir=tmp_path / name, calib_data=data, progress=False)
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.txt", None),
        ("data.csv", b"a,b"),
        ("data.jsonl", b'{"text": '),
        ("data.jsonl", b'{"prompt": "x"}'),
        ("data.json", b"\xff\xfe"),
        ("data.json", b'{"a": 1}'),
        ("data.txt", b"\xff\xfe\xff"),
        ("data.safetensors", b"not this"),
        ("folder.txt", b""),
    ],
)
def test_bad_calibration_file(
    checkpoint: MakeCheckpoint,
    refuse: Refuse,
    with_tokenizer: Callable[[Path], Path],
    name: str,
    content: bytes | None,
) -> None:
    source = with_tokenizer(checkpoint("llama", vocab_size=512))
    path = source.parent / name
    if name.startswith("folder"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    refuse(CalibrationError, source, name, calib_data=path)


def test_no_tokenizer(checkpoint: MakeCheckpoint, refuse: Refuse) -> None:
    refuse(CalibrationError, checkpoint("llama"), "no tokenizer", "token ids", calib_data=["hi"])
    refuse(CalibrationError, checkpoint("llama"), "no tokenizer", "token ids", calib_data=None)


def test_no_tokenizer_where_transformers_makes_an_empty_one(
    checkpoint: MakeCheckpoint, refuse: Refuse
) -> None:
    refuse(CalibrationError, checkpoint("gemma3_text"), "no tokenizer", calib_data=["hi"])


# Code that comes with the checkpoint

CODE = """
from pathlib import Path
Path(__file__).parent.joinpath("ran").touch()
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class MineConfig(LlamaConfig):
    model_type = "mine"
class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def remote(checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = checkpoint("llama")
    (source / "mine.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    edit_config(
        source,
        model_type="mine",
        architectures=["MineForCausalLM"],
        auto_map={"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"},
    )
    return source


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16_nvfp4"])
def test_remote_code_is_not_run_untrusted(
    remote: Path, refuse: Refuse, tmp_path: Path, recipe: str
) -> None:
    refuse(RemoteCodeError, remote, str(remote), "'mine'", "trust_remote_code", recipe=recipe)
    assert not (tmp_path / "marker").exists()


def test_remote_code_of_a_known_type_is_not_run_untrusted(
    remote: Path, tmp_path: Path, token_batches: list[Tensor]
) -> None:
    edit_config(remote, model_type="llama", architectures=["LlamaForCausalLM"])
    quantize_and_export(
        remote, export_dir=tmp_path / "out", calib_data=token_batches, progress=False
    )
    assert not (tmp_path / "marker").exists()
    assert (tmp_path / "out" / "mine.py").read_bytes() == (remote / "mine.py").read_bytes()


def test_remote_tokenizer_is_not_run_untrusted(
    checkpoint: MakeCheckpoint, refuse: Refuse, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    code = f"from pathlib import Path\nPath({str(tmp_path / 'marker')!r}).touch()\n"
    (source / "tok.py").write_text(f"{code}class Tok: pass\n")
    config = {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    refuse(CalibrationError, source, "no tokenizer", calib_data=["some text"])
    assert not (tmp_path / "marker").exists()


def test_remote_code_is_run_when_trusted(
    remote: Path, tmp_path: Path, token_batches: list[Tensor]
) -> None:
    out = tmp_path / "out"
    report = quantize_and_export(
        remote,
        export_dir=out,
        recipe="fp8",
        calib_data=token_batches,
        trust_remote_code=True,
        progress=False,
    )
    assert (tmp_path / "marker").exists()
    assert len(report.quantized) == 14
    assert any("no spec for model_type 'mine'" in note for note in report.notes)
    assert not [f for f in audit(out, source=remote, deep=True) if f.severity == "error"]


# The command line


def test_command_line_exits_with_one(
    checkpoint: MakeCheckpoint, remote: Path, tmp_path: Path
) -> None:
    source = checkpoint("gemma3_text")
    out = str(tmp_path / "out")
    before = listing(tmp_path)
    for arguments, code in (
        ([str(tmp_path / "nowhere")], "MOL100"),
        ([str(source), "--recipe", "nvpf4"], "MOL300"),
        ([str(source), "--export-dir", out], "MOL400"),
        ([str(source), "--recipe", "w4a16_nvfp4", "--export-dir", str(source / "x")], "MOL500"),
        ([str(remote), "--export-dir", out], "MOL600"),
    ):
        result = CliRunner().invoke(app, ["quantize", *arguments])
        assert result.exit_code == 1, (arguments, result.output)
        assert f"error [{code}]" in result.output
        assert "Traceback" not in result.output
        assert listing(tmp_path) == before
