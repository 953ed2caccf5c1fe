"""Hostile input for everything that reads files of strangers, and what is demanded of the readers.

Each target takes what hypothesis draws and a folder of its own. It may raise `ModelOptLiteError`
and nothing else (the audit not even that), opens no file outside of the folder, and stays within
seconds of processor time and memory in proportion to its input.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import arange

from modelopt_lite.checkpoint.dequant import open_source
from modelopt_lite.checkpoint.header import read_header
from modelopt_lite.checkpoint.reader import INDEX_FILE, SINGLE_FILE, Checkpoint
from modelopt_lite.checkpoint.sidecars import sidecar_files
from modelopt_lite.dialects.regexes import LONGEST, RegexError, matches
from modelopt_lite.errors import ModelOptLiteError
from modelopt_lite.offload import load_config_from_file
from modelopt_lite.offload.patterns import match_name, parse_pattern
from modelopt_lite.offload.profile_io import FORMAT, VERSION, read_profile
from modelopt_lite.pages.card import write_card
from modelopt_lite.pages.layers import layer_bytes
from modelopt_lite.pages.report_page import write_page
from modelopt_lite.recipes import load_recipe
from modelopt_lite.report import CARD_FILE, PAGE_FILE, Report
from modelopt_lite.verify.audit import audit
from modelopt_lite.verify.diff import diff
from modelopt_lite.verify.opening import export_folders

SECONDS = 3.0
MEBIBYTES = 256

# Values of JSON: of every kind, of absurd sizes, and the words that readers look for.
NAMES = st.sampled_from(
    [
        *("model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "model.norm.weight"),
        *("model.layers.0.self_attn.q_proj.weight_scale", "a.input_scale", "a.k_scale", ""),
        *("model.layers.0.mlp.experts.99999999999.up_proj.weight", "..", "a\x00b", "a" * 300),
        *(f"model.layers.0.mlp.experts.{'9' * 5000}.up_proj.weight", "m.experts.².up_proj.weight"),
        *("model.layers.0.mlp.experts.gate_up_proj", "x.weight_packed", "x.weight_shape"),
    ]
)
FILES = st.sampled_from(
    [
        *(SINGLE_FILE, "other.safetensors", "../outside/secret.safetensors", "", ".", ".."),
        *("/etc/passwd", "sub/model.safetensors", "~/x.safetensors", "a\x00.safetensors"),
        *("C:\\x.safetensors", "./model.safetensors", "model.bin", "a" * 300),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30]),
    st.floats(),
    st.text(max_size=8),
    NAMES,
    FILES,
    st.sampled_from(
        ["modelopt", "compressed-tensors", "fp8", "mxfp4", "NVFP4", "FP8", "re:(a+)+$"]
    ),
)
KEYS = st.sampled_from(
    [
        *(
            "quantization_config",
            "quant_method",
            "quant_algo",
            "config_groups",
            "group_0",
            "weights",
        ),
        *("targets", "ignore", "exclude_modules", "kv_cache_scheme", "quantized_layers", "format"),
        *("num_bits", "type", "group_size", "strategy", "input_activations", "weight_block_size"),
        *("quantization", "producer", "model_type", "num_experts", "dtype", "text_config"),
        *("weight_map", "metadata", "total_size", "modules_to_not_convert", "architectures"),
    ]
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "U8", "I32", "F99", 1, None]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, 128, 2**31, 2**62, -1]), max_size=4) | JSON,
        "data_offsets": st.lists(st.sampled_from([0, 4, 8, 2**40, 2**63, -1]), max_size=3) | JSON,
    },
)
HEADERS = st.dictionaries(NAMES | st.just("__metadata__"), TENSORS | JSON, max_size=5)
CONFIGS = st.dictionaries(KEYS, JSON, max_size=6)
SECTIONS = st.fixed_dictionaries(
    {"model_type": st.sampled_from(["llama", "qwen3_moe", "nothing"])},
    optional={
        "quantization_config": CONFIGS,
        "text_config": JSON,
        "num_experts": SCALARS,
        "torch_dtype": SCALARS,
    },
)


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _checkpoint(folder: Path) -> None:
    """A small right one, and a file beside its folder that nobody may open."""
    save_file({"lm_head.weight": arange(4.0)}, folder / SINGLE_FILE)
    (folder / "config.json").write_text('{"model_type": "llama"}')


def _read_all(folder: Path) -> None:
    """Everything that reads a checkpoint."""
    for each in export_folders(folder):
        audit(each)
    for attempt in (_open, sidecar_files, lambda f: diff(f, f)):
        with suppress(ModelOptLiteError):
            attempt(folder)


def _open(folder: Path) -> None:
    source = open_source(folder)
    try:
        for name in list(source.tensors)[:4]:
            source.read(name)
    finally:
        source.close()


def header(data: st.DataObject, folder: Path) -> None:
    """A header of any JSON over a few bytes, or a right file with bytes changed."""
    _checkpoint(folder)
    path = folder / SINGLE_FILE
    if data.draw(st.booleans(), "made up"):
        made = _dump(data.draw(HEADERS))
        length = data.draw(st.sampled_from([len(made), 0, 2**40, 2**63, len(made) + 1]), "length")
        path.write_bytes(struct.pack("<Q", length) + made + bytes(data.draw(st.integers(0, 32))))
    else:
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 6))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    with suppress(ModelOptLiteError):
        read_header(path)
    _read_all(folder)


def index(data: st.DataObject, folder: Path) -> None:
    """A map to any place, or an index that is no map."""
    _checkpoint(folder)
    weight_map = st.dictionaries(NAMES, FILES | JSON, max_size=4)
    content = data.draw(st.fixed_dictionaries({"weight_map": weight_map | JSON}) | JSON)
    (folder / INDEX_FILE).write_bytes(_dump(content))
    if data.draw(st.booleans(), "without the single file"):
        (folder / SINGLE_FILE).unlink()
    with suppress(ModelOptLiteError):
        Checkpoint(folder)
    _read_all(folder)


def config(data: st.DataObject, folder: Path) -> None:
    """Any quantization_config over tensors whose names it may speak of."""
    tensors = data.draw(st.dictionaries(NAMES.filter(_plain), st.integers(0, 6), max_size=5))
    save_file({name: _tensor(kind) for name, kind in tensors.items()}, folder / SINGLE_FILE)
    (folder / "config.json").write_bytes(_dump(data.draw(SECTIONS | JSON)))
    if data.draw(st.booleans(), "nested"):
        nested = st.fixed_dictionaries({"quantization": CONFIGS | JSON}) | JSON
        (folder / "hf_quant_config.json").write_bytes(_dump(data.draw(nested)))
    _read_all(folder)


def _plain(name: str) -> bool:
    return bool(name) and name.isprintable()


def _tensor(kind: int) -> Any:
    import torch

    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.int64)
    if kind == 5:
        return torch.ones(4, 4).to(torch.float8_e4m3fn)
    if kind == 6:
        return torch.zeros(2, 4, 4)
    return torch.ones((), dtype=dtypes[kind]) if kind == 0 else torch.ones(4, 4, dtype=dtypes[kind])


YAMLS = st.one_of(
    st.text(max_size=60),
    st.fixed_dictionaries(
        {"weights": st.sampled_from(["fp8", "nvfp4"]) | JSON},
        optional=dict.fromkeys(("include", "exclude", "overrides", "algorithm", "kv_cache"), JSON)
        | {"name": JSON, "group_size": JSON, "x": JSON},
    ).map(lambda value: yaml.dump(value, allow_unicode=True)),
    st.sampled_from(
        [
            "!!python/object/apply:os.system ['touch pwned']",
            "weights: !!python/name:os.system",
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{c}: &{c} [{','.join([f'*{p}'] * 9)}]\n"
                for p, c in zip("abcdefgh", "bcdefghi", strict=True)
            )
            + "weights: *i",
            "weights: " + "[" * 3000,
            "weights: " + "{a: " * 3000,
            "weights: &a [*a]",
            "weights: 1e400\ninclude: [.nan]",
            "weights: 2001-99-99",
            "? [a]\n: b",
            "weights: fp8\ngroup_size: " + "9" * 5000,
        ]
    ),
)


def recipe(data: st.DataObject, folder: Path) -> None:
    """YAML of any kind, with the tags and references that loaders fall for."""
    path = folder / "recipe.yaml"
    path.write_bytes(data.draw(YAMLS).encode("utf-8", "surrogatepass"))
    with suppress(ModelOptLiteError):
        load_recipe(path)
    assert not (folder / "pwned").exists()


JSON_TEXTS = st.one_of(
    JSON.map(lambda value: _dump(value).decode()),
    st.sampled_from(
        ["[" * 100_000, '{"num_blocks":' * 50_000, "9" * 10_000, '{"a": 1, "a": 2}', "NaN"]
    ),
)


def offload_config(data: st.DataObject, folder: Path) -> None:
    """The same for the configuration of the offload runtime, in each of its kinds of files."""
    suffix = data.draw(st.sampled_from([".yaml", ".json", ".ini"]))
    content = data.draw(YAMLS) if suffix != ".json" else data.draw(JSON_TEXTS)
    path = folder / f"config{suffix}"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with suppress(ModelOptLiteError):
        load_config_from_file(path)


PROFILES = st.fixed_dictionaries(
    {"format": st.just(FORMAT), "version": st.just(VERSION) | SCALARS},
    optional=dict.fromkeys(("fingerprint", "tensors", "samples_ms", "transfer_ms", "plan"), JSON),
)


def profile(data: st.DataObject, folder: Path) -> None:
    """A profile of the offload runtime: any JSON, or any text."""
    path = folder / "profile.json"
    texts = PROFILES.map(lambda value: _dump(value).decode()) | JSON_TEXTS
    path.write_bytes(data.draw(st.binary() | texts.map(str.encode)))
    with suppress(ModelOptLiteError):
        read_profile(folder)


HOSTILE_TEXT = st.one_of(
    st.text("*?.a:", max_size=40),
    st.text(max_size=20),
    st.sampled_from(
        ["*" * 200 + "b", "a*" * 100 + "b", "*.*.*.*.*.*.*.*.*.*.*.b", "class:" + "*" * 99]
    ),
)


def pattern(data: st.DataObject, folder: Path) -> None:
    """Patterns of recipes and of offloading, and expressions of configs, over long names."""
    name = data.draw(st.sampled_from(["a" * 200, "a." * 100 + "a", "model.layers.0.mlp"]))
    with suppress(ModelOptLiteError):
        parsed = parse_pattern(data.draw(HOSTILE_TEXT | JSON))
        parsed.matches_name(name, star_spans=data.draw(st.booleans()))
    match_name(data.draw(HOSTILE_TEXT), name, star_spans=True)
    with suppress(RegexError):
        matches(
            data.draw(st.text("a(|)*+?{},12.[]^$\\", max_size=30) | st.text(max_size=LONGEST)), name
        )


def pages(data: st.DataObject, folder: Path) -> None:
    """Names of any kind in a report and a model card, beside a source's card of any kind."""
    head = data.draw(YAMLS).encode("utf-8", "surrogatepass")
    (folder / CARD_FILE).write_bytes(b"---\n" + head + b"\n---\n")
    names = data.draw(st.lists(st.one_of(NAMES, st.text(max_size=40)), max_size=12))
    numbers = dict.fromkeys(names, 0.5)
    details = {"source": str(folder), "numerics": "exact", "recipe": {}, "versions": {}}
    details["options"] = {"seed": 0, "all_experts": False, "on_bad_shape": "error"}
    report = Report("out", "nvfp4", "llama", details=details, dialects=["modelopt"])
    report.quantized = dict.fromkeys(names, "nvfp4")
    report.excluded = dict(zip(names, reversed(names), strict=True))
    report.relative_errors, report.input_amax = numbers, numbers
    report.tokens_per_expert = {name: [0, 3] for name in names}
    report.cold_experts, report.notes = names, names
    report.layer_bytes = layer_bytes([(name, 3) for name in names], [(n, 1) for n in names])
    write_card(folder, report, "modelopt")
    write_page(report, folder)
    page = (folder / PAGE_FILE).read_text(encoding="utf-8")
    assert "<script" not in page
    assert (folder / CARD_FILE).read_text(encoding="utf-8").startswith("---\n")


TARGETS: dict[str, Callable[[st.DataObject, Path], None]] = {
    target.__name__: target
    for target in (header, index, config, recipe, offload_config, profile, pattern, pages)
}

_watched: list[Path] = []
_strangers: list[str] = []


def _on_open(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and "outside" in str(arguments[0]):
        _strangers.append(str(arguments[0]))


sys.addaudithook(_on_open)


@contextmanager
def demands(folder: Path) -> Iterator[None]:
    """Hold what runs inside to its time and memory, and to its folder.

    A file beside the folder, which index entries name, must not be opened.
    """
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    if not (outside / "secret.safetensors").exists():
        save_file({"lm_head.weight": arange(4.0)}, outside / "secret.safetensors")
    _strangers.clear()
    memory, started = _peak(), time.process_time()
    _watched.append(folder)
    try:
        yield
    finally:
        _watched.pop()
    spent, grown = time.process_time() - started, _peak() - memory
    assert not _strangers, f"opened {_strangers}"
    assert spent < SECONDS, f"took {spent:.1f} s of processor time"
    assert grown < MEBIBYTES << 20, f"took {grown >> 20} MiB"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
