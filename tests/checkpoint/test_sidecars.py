"""Sidecars: everything but weights and our own files, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelopt_lite.checkpoint.sidecars import copy_sidecars, sidecar_files
from modelopt_lite.errors import CheckpointError, OutputError

KEPT = {
    "tokenizer.json": b'{"a":  1}',
    "tokenizer.model": b"\x00\x01\xff",
    "generation_config.json": b'{"do_sample": false, "temperature": 1e-6}',
    "chat_template.jinja": "{{ x }}é\r\n".encode(),
    "modeling_foo.py": b"import nothing\n",
    "README.md": b"",
    "original/params.json": b"{}",
    "original/config.json": b"nested, so not ours",
    "chat_templates/tool use.jinja": b"x",
    ".hidden": b"x",
}
LEFT = (
    "config.json", "hf_quant_config.json", "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack",
    "x.PTH", "x.pt", "x.gguf", "x.onnx", "original/consolidated.00.pth", "metal/model.bin",
    ".git/HEAD", ".cache/huggingface/x.lock", ".gitattributes", "__pycache__/m.pyc",
    "sub/.cache/x",
)  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, content in (KEPT | dict.fromkeys(LEFT, b"not this")).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_lists_what_is_kept(source: Path) -> None:
    assert sidecar_files(source) == sorted(map(Path, KEPT))


def test_copies_bytes(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    copied = copy_sidecars(source, target)
    assert copied == sidecar_files(source)
    present = {p.relative_to(target): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    names = {name: "SOURCE_README.md" if name == "README.md" else name for name in KEPT}
    assert present == {Path(names[name]): content for name, content in KEPT.items()}


def test_the_card_of_an_export_of_ours_goes_before_that_of_its_source(
    source: Path, tmp_path: Path
) -> None:
    (source / "README.md").write_bytes(b"ours")
    (source / "SOURCE_README.md").write_bytes(b"of what that was made from")
    (source / "report.html").write_bytes(b"of another run")
    target = tmp_path / "target"
    copy_sidecars(source, target)
    assert (target / "SOURCE_README.md").read_bytes() == b"ours"
    assert not (target / "report.html").exists()


def test_links_become_files(source: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "abc"
    blob.parent.mkdir()
    blob.write_bytes(b"merges")
    (source / "merges.txt").symlink_to("../blobs/abc")
    (source / "templates").symlink_to("chat_templates")
    target = tmp_path / "target"
    copy_sidecars(source, target)
    assert (target / "merges.txt").read_bytes() == b"merges"
    assert not (target / "merges.txt").is_symlink()
    assert (target / "templates" / "tool use.jinja").read_bytes() == b"x"


def test_source_behind_a_link(source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(source)
    assert sidecar_files(link) == sidecar_files(source)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("loop", ".", "back to a folder above it"),
        ("original/up", "..", "back to a folder above it"),
        ("outside", "/etc", "out of the checkpoint"),
        ("vocab.json", "gone", "missing"),
        ("self", "self", "missing"),
    ],
)
def test_links_that_lead_astray(source: Path, name: str, target: str, message: str) -> None:
    (source / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=message) as caught:
        sidecar_files(source)
    assert name in str(caught.value)


def test_a_dangling_link_to_weights_is_no_sidecar(source: Path) -> None:
    (source / "old.safetensors").symlink_to("gone")
    assert sidecar_files(source) == sorted(map(Path, KEPT))


def test_target_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"a file")
    with pytest.raises(OutputError, match="target"):
        copy_sidecars(source, target)
