"""Files: which are read, what lies beside the weights, how shards are cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from modelopt_lite import export_hf, quantize
from modelopt_lite.errors import CheckpointError, OutputError

Make = Callable[..., Path]
INDEX = "model.safetensors.index.json"
SIDECARS = {
    "generation_config.json": b'{"do_sample": false, "temperature": 1e-6, "top_p": 0.1}',
    "tokenizer_config.json": b'{ "tokenizer_class":"LlamaTokenizerFast" ,\n"added": 1}\n\n',
    "tokenizer.json": b'{"version": "1.0"}',
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": "{{ 'ä' }}\r\n".encode(),
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "modeling_own.py": b"raise SystemExit('never imported')",
    "preprocessor_config.json": b"not even json",
    "LICENSE": b"\xff\x00 bytes",
    "empty": b"",
}


def headers(folder: Path) -> dict[str, list[str]]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found[path.name] = list(file.keys())
    return found


def test_c32_stray_shards_are_not_read(checkpoint: Make, cases: Any) -> None:
    """Files that the index does not name were merged in with the others."""
    source = checkpoint("llama")
    whole = cases.run(source)
    name = "model.layers.0.self_attn.q_proj.weight"
    cases.shards(source)
    save_file({name: torch.ones(3, 3)}, source / "model-00001-of-00002.safetensors")
    save_file({"old.weight": torch.ones(3, 3)}, source / "consolidated.safetensors")
    out = cases.run(source)
    assert out.tensors.keys() == whole.tensors.keys()
    assert all(
        torch.equal(
            t.view(torch.uint8) if t.ndim else t,
            whole.tensors[n].view(torch.uint8) if t.ndim else whole.tensors[n],
        )
        for n, t in out.tensors.items()
    )
    notes = " ".join(out.report.notes)
    assert "model-00001-of-00002.safetensors" in notes
    assert "consolidated.safetensors" in notes


@pytest.mark.parametrize("limit", ["10GB", "10KB", "1B"])
def test_c33_index_is_made_of_what_was_written(checkpoint: Make, cases: Any, limit: str) -> None:
    """The index named tensors that no shard held."""
    out = cases.run(checkpoint("qwen3_moe"), max_shard_size=limit)
    files = headers(out.folder)
    if limit == "10GB":
        assert list(files) == ["model.safetensors"]
        assert not (out.folder / INDEX).exists()
        return
    index = cases.read_json(out.folder / INDEX)
    assert index["weight_map"] == {n: file for file, names in files.items() for n in names}
    assert sum(len(names) for names in files.values()) == len(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in out.tensors.values())
    assert not out.problems()


def test_c33_ghost_in_the_source(checkpoint: Make, cases: Any) -> None:
    """The same in a source is named with key and shard before anything runs."""
    source = checkpoint("llama")
    weight_map = cases.shards(source)
    shard = min(weight_map.values())
    weight_map["model.layers.0.ghost"] = shard
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        CheckpointError, match=rf"{shard}.*layers\.0\.ghost|layers\.0\.ghost.*{shard}"
    ):
        cases.run(source)


@pytest.mark.parametrize("recipe", ["fp8", "w4a16_nvfp4"])
def test_c34_c35_everything_else_is_copied_as_it_is(
    checkpoint: Make, cases: Any, recipe: str
) -> None:
    """Loading and saving a tokenizer or generation config rewrites it, or raises at the end."""
    source = checkpoint("llama")
    for name, content in SIDECARS.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    out = cases.run(source, recipe)
    for name, content in SIDECARS.items():
        assert (out.folder / name).read_bytes() == content, name
    assert not out.problems()


def test_c35_links_of_a_hub_cache(checkpoint: Make, cases: Any) -> None:
    """In the hub's cache every file is a link to a blob elsewhere."""
    plain = checkpoint("llama")
    (plain / "tokenizer.json").write_bytes(b"{}")
    whole = cases.run(plain)
    root = cases.tmp_path / "models--org--name"
    blobs, snapshot = root / "blobs", root / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(plain.iterdir())):
        shutil.copyfile(path, blobs / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    out = cases.run(snapshot)
    files = sorted(p.name for p in whole.folder.iterdir())
    assert sorted(p.name for p in out.folder.iterdir()) == files
    assert not [p for p in out.folder.iterdir() if p.is_symlink()]
    for name in files:
        if "report" not in name and name != "README.md":  # the card names the hub's model
            assert (out.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_c35_a_file_that_cannot_be_copied_leaves_nothing(
    checkpoint: Make, cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails at the end must not leave half an export.

    What the next run can go on from stays apart, unless it is told not to.
    """

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    source = checkpoint("llama")
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OutputError, match="No space left"):
        cases.run(source, resume=False)
    assert list(cases.tmp_path.iterdir()) == [source]
    with pytest.raises(OutputError, match="No space left"):
        cases.run(source)
    assert [path for path in cases.tmp_path.iterdir() if path.name[0] != "."] == [source]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_c36_the_limit_holds_on_every_path(checkpoint: Make, cases: Any, kind: str) -> None:
    """One path obeyed the shard limit, another wrote a single giant."""
    source = checkpoint(kind)
    model = cases.load(source)

    def loop(m: Any) -> None:
        for batch in cases.batches:
            m(batch)

    quantize(model, "nvfp4", loop)
    export_hf(model, cases.tmp_path / "mine", source=source, max_shard_size="10KB")
    folders = [
        cases.run(source, max_shard_size="10KB").folder,
        cases.run(source, max_shard_size="10KB", offload="none").folder,
        cases.run(source, max_shard_size=10_000).folder,
        cases.tmp_path / "mine",
    ]
    layouts = [headers(folder) for folder in folders]
    assert all(layout == layouts[0] for layout in layouts)
    assert len(layouts[0]) >= 2
    tensors = cases.load_all(folders[0])
    for names in layouts[0].values():
        size = sum(tensors[name].nbytes for name in names)
        assert size <= 10_000 or len(names) == 1


def test_c37_a_huge_tensor_is_alone(checkpoint: Make, cases: Any) -> None:
    """A tensor above the limit has a shard of its own; its neighbours do not grow with it."""
    out = cases.run(checkpoint("llama", vocab_size=4096), max_shard_size="30KB")
    files = headers(out.folder)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert [name] in files.values()
    others = [names for names in files.values() if len(names) > 1]
    assert all(sum(out.tensors[n].nbytes for n in names) <= 30_000 for names in others)
    assert not out.problems()


def test_c38_views_of_one_storage(checkpoint: Make, cases: Any) -> None:
    """Weights that are parts of one buffer were refused, or the whole buffer written for each."""
    source = checkpoint("llama")
    whole = cases.run(source)
    model = cases.load(source)
    with torch.no_grad():
        for layer in model.model.layers:
            joined = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
            layer.mlp.gate_proj.weight = torch.nn.Parameter(joined[:64])
            layer.mlp.up_proj.weight = torch.nn.Parameter(joined[64:])
            transposed = layer.self_attn.o_proj.weight.T.contiguous()
            layer.self_attn.o_proj.weight = torch.nn.Parameter(transposed.T)

    def loop(m: Any) -> None:
        for batch in cases.batches:
            m(batch)

    quantize(model, "nvfp4", loop)
    export_hf(model, cases.tmp_path / "mine", source=source)
    written = cases.load_all(cases.tmp_path / "mine")

    def unlike(a: Tensor, b: Tensor) -> bool:
        return not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))

    assert written.keys() == whole.tensors.keys()
    weights = [n for n in written if not n.endswith("input_scale")]
    assert not [n for n in weights if unlike(written[n], whole.tensors[n])]
    for name in written.keys() - set(weights):  # other strides may add up in another order
        assert float(written[name]) == pytest.approx(float(whole.tensors[name]), rel=2**-6)
    size = (cases.tmp_path / "mine" / "model.safetensors").stat().st_size
    assert size == (whole.folder / "model.safetensors").stat().st_size
