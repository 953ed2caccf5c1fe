"""OffloadConfig: defaults and ranges, sources and their precedence, and errors that help."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelopt_lite.errors import OffloadConfigError, OffloadConfigFileError
from modelopt_lite.offload.config import ONE_SHOT_FIELDS, REMOVED_NAMES, OffloadConfig
from modelopt_lite.offload.config_sources import (
    load_config,
    load_config_from_env,
    load_config_from_file,
)

DOCS = Path(__file__).parents[2] / "docs" / "offload_config.md"
DEFAULTS: dict[str, Any] = {
    "enabled": True,
    "gpu_device": 0,
    "pinned_memory": True,
    "pinned_memory_mode": "torch",
    "shm_enabled": False,
    "shm_namespace": None,
    "shm_wait_timeout": 0.0,
    "discovery_iters": 1,
    "skip_discovery": False,
    "profiling_iters": 10,
    "external_compile": False,
    "transfer_budget_scale": 1.0,
    "transfer_mode": "allocation_block_transfer",
    "num_blocks": 4,
    "min_blocks": 4,
    "max_gpu_mem_fraction": None,
    "profile_storage_dir": None,
    "profile_read_only": False,
    "load_strategy": None,
    "enable_instrumentation": False,
    "instrumentation_output_dir": ".flextensor/instrumentation",
    "offload_timing": "off",
    "piecewise_prefetch": "warn",
    "include_patterns": ["*"],
    "exclude_patterns": [],
    "enable_diagnostics": False,
    "profile_mode": "view",
}


class Strategy:
    """Does nothing."""

    def compute(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FT_")]:
        monkeypatch.delenv(name)


def test_defaults() -> None:
    assert OffloadConfig().model_dump() == DEFAULTS
    assert set(DEFAULTS) > ONE_SHOT_FIELDS
    assert not set(DEFAULTS) & set(REMOVED_NAMES)


@pytest.mark.parametrize(
    "values",
    [
        {"gpu_device": 3, "num_blocks": 8, "min_blocks": 2},
        {"max_gpu_mem_fraction": 1.0, "transfer_budget_scale": 2},
        {"max_gpu_mem_fraction": 1},
        {"discovery_iters": 0, "profiling_iters": 0},
        {"transfer_mode": "strategy", "profile_mode": "torch_function"},
        {"transfer_mode": "strategy", "profile_mode": "getter"},
        {"transfer_mode": "raw_block_transfer", "external_compile": True},
        {"offload_timing": "eager", "piecewise_prefetch": "off"},
        {"load_strategy": Strategy()},
        {"include_patterns": ("a", "class:B"), "exclude_patterns": []},
        {"pinned_memory": False, "pinned_memory_mode": "host_register"},
    ],
)
def test_allowed(values: dict[str, Any]) -> None:
    config = OffloadConfig(**values)
    for name, value in values.items():
        found = getattr(config, name)
        assert found == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu_device": -1}, "gpu_device=-1"),
        ({"gpu_device": "0"}, "gpu_device='0'"),
        ({"num_blocks": True}, "num_blocks=True"),
        ({"num_blocks": 4.5}, "num_blocks=4.5"),
        ({"num_blocks": 3}, "set min_blocks to 3 or less"),
        ({"num_blocks": 1, "min_blocks": 1}, "num_blocks=1.*min_blocks=1"),
        ({"enabled": 1}, "enabled=1"),
        ({"pinned_memory": None}, "pinned_memory=None"),
        ({"pinned_memory_mode": "pin"}, "'torch' or 'host_register'"),
        ({"shm_wait_timeout": -0.1}, "shm_wait_timeout=-0.1"),
        ({"shm_wait_timeout": float("inf")}, "finite"),
        ({"shm_enabled": True}, "needs a shm_namespace, got None"),
        ({"shm_enabled": True, "shm_namespace": " "}, "needs a shm_namespace"),
        (
            {"shm_enabled": True, "shm_namespace": "a", "transfer_mode": "raw_block_transfer"},
            "needs transfer_mode='allocation_block_transfer'",
        ),
        ({"discovery_iters": -1}, "discovery_iters=-1"),
        ({"profiling_iters": -1}, "profiling_iters=-1"),
        ({"transfer_budget_scale": 0}, "transfer_budget_scale=0"),
        ({"transfer_budget_scale": float("nan")}, "finite"),
        ({"transfer_mode": "strateg"}, "'strategy'"),
        ({"max_gpu_mem_fraction": 0.0}, "max_gpu_mem_fraction=0.0"),
        ({"max_gpu_mem_fraction": 1.01}, "less than or equal to 1"),
        ({"profile_storage_dir": ""}, "empty path"),
        ({"profile_storage_dir": 3}, "profile_storage_dir=3"),
        ({"load_strategy": "knapsack"}, "load_strategy='knapsack'"),
        ({"load_strategy": Strategy}, r"make one: Strategy\(\)"),
        ({"offload_timing": "on"}, "'cuda_graph'"),
        ({"offload_timing": "eager", "transfer_mode": "strategy"}, "needs one of the transfer"),
        ({"external_compile": True, "transfer_mode": "strategy"}, "needs one of the transfer"),
        ({"profile_mode": "torch_function"}, "needs transfer_mode='strategy'"),
        ({"profile_mode": "views"}, "'view'"),
        ({"piecewise_prefetch": False}, "piecewise_prefetch=False"),
        ({"num_block": 3}, "no field 'num_block'; did you mean 'num_blocks'?"),
        ({"INCLUDE_PATTERNS": []}, "did you mean 'include_patterns'?"),
        ({"zzz": 3}, "there are enabled, "),
        ({"warmup_iters": 3}, "discovery_iters"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OffloadConfigError, match=message) as caught:
        OffloadConfig(**values)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "MOL320"


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(OffloadConfigError, match=r"gpu_device=-1.*; num_blocks='x'"):
        OffloadConfig(gpu_device=-1, num_blocks="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REMOVED_NAMES)
def test_removed_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{name}: 3\n")
    monkeypatch.setenv(f"FT_{name.upper()}", "3")
    keywords: dict[str, Any] = {name: 3}
    for make in (
        lambda: OffloadConfig(**keywords),
        lambda: load_config(use_env=False, **keywords),
        lambda: load_config_from_file(file),
        load_config,
    ):
        with pytest.raises(OffloadConfigError, match="any more; "):
            make()


def test_copies_are_checked_and_originals_stay() -> None:
    config = OffloadConfig()
    changed = config.model_copy(update={"num_blocks": 6, "include_patterns": [" a "]})
    assert (changed.num_blocks, changed.include_patterns) == (6, ["a"])
    assert config == OffloadConfig()
    with pytest.raises(OffloadConfigError, match="num_blocks=3 is less"):
        config.model_copy(update={"num_blocks": 3})
    with pytest.raises(OffloadConfigError, match="did you mean 'num_blocks'"):
        config.model_copy(update={"num_block": 3})
    with pytest.raises(OffloadConfigError, match="model_copy"):
        config.num_blocks = 6
    assert pickle.loads(pickle.dumps(changed)) == copy.deepcopy(changed) == changed
    assert changed.model_copy(deep=True).include_patterns is not changed.include_patterns


def test_paths_become_text(tmp_path: Path) -> None:
    config = OffloadConfig(profile_storage_dir=tmp_path)  # type: ignore[arg-type]
    assert config.profile_storage_dir == str(tmp_path)


VALUES: dict[str, Any] = {
    "num_blocks": 6,
    "pinned_memory": False,
    "transfer_budget_scale": 1.5,
    "max_gpu_mem_fraction": 0.5,
    "transfer_mode": "raw_block_transfer",
    "include_patterns": ["embed", "layers.*"],
    "exclude_patterns": [],
    "shm_namespace": None,
}
INI = """[flextensor]
num_blocks = 6
pinned_memory = No
transfer_budget_scale = 1.5
max_gpu_mem_fraction = 0.5
transfer_mode = raw_block_transfer
include_patterns = embed, layers.*
exclude_patterns =
shm_namespace = none
"""


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("yaml", yaml.safe_dump(VALUES)),
        ("yml", yaml.safe_dump(VALUES)),
        ("YAML", json.dumps(VALUES)),
        ("json", json.dumps(VALUES)),
        ("ini", INI),
        ("conf", INI),
    ],
)
def test_files(suffix: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"config.{suffix}"
    file.write_text(text)
    expected = OffloadConfig(**VALUES)
    assert load_config_from_file(file) == load_config(str(file)) == expected
    monkeypatch.setenv("FT_CONFIG_FILE", str(file))
    assert load_config() == expected
    assert load_config(config_file_env_var="OTHER") != expected
    assert load_config_from_env() != expected
    assert load_config(use_env=False) == OffloadConfig()


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VALUES.items():
        text = ",".join(value) if isinstance(value, list) else str(value)
        monkeypatch.setenv(f"FT_{name.upper()}", text)
    assert load_config() == load_config_from_env() == OffloadConfig(**VALUES)
    monkeypatch.setenv("MY_NUM_BLOCKS", "8")
    assert load_config(env_prefix="MY_") == OffloadConfig(num_blocks=8)


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"num_blocks": 5, "gpu_device": 5, "discovery_iters": 5}')
    monkeypatch.setenv("FT_NUM_BLOCKS", "6")
    monkeypatch.setenv("FT_GPU_DEVICE", "6")
    config = load_config(file, num_blocks=7)
    assert (config.num_blocks, config.gpu_device, config.discovery_iters) == (7, 6, 5)
    assert config.profiling_iters == 10


def test_nothing_set_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not load_config().enabled
    assert not load_config_from_env().enabled
    assert load_config(use_env=False).enabled
    assert load_config(include_patterns=["layers.*"]).enabled
    monkeypatch.setenv("FT_INCLUDE_PATTERNS", "*")
    monkeypatch.setenv("FT_EXCLUDE_PATTERNS", "lm_head,*.norm")
    config = load_config()
    assert config.enabled
    assert config.exclude_patterns == ["lm_head", "*.norm"]
    monkeypatch.setenv("FT_ENABLED", "0")
    assert not load_config().enabled


@pytest.mark.parametrize("text", ["true", "1", "yes", "Y", "ON", " True "])
def test_true(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_SKIP_DISCOVERY", text)
    assert load_config().skip_discovery


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("FT_SKIP_DISCOVERY", "maybe", "FT_SKIP_DISCOVERY='maybe' is no bool"),
        ("FT_SKIP_DISCOVERY", "", "FT_SKIP_DISCOVERY='' is no bool; unset it"),
        ("FT_NUM_BLOCKS", "four", "FT_NUM_BLOCKS='four' is no int"),
        ("FT_NUM_BLOCKS", "", "FT_NUM_BLOCKS='' is no int; unset it"),
        ("FT_MAX_GPU_MEM_FRACTION", "half", "is no float"),
        ("FT_MAX_GPU_MEM_FRACTION", "nan", "max_gpu_mem_fraction=nan"),
        ("FT_INCLUDE_PATTERNS", "clas:A", "did you mean 'class:A'"),
        ("FT_LOAD_STRATEGY", "knapsack", "pass it in Python"),
        ("FT_CONFIG_FILE", "missing.yaml", "no configuration file missing.yaml"),
    ],
)
def test_wrong_variables(
    variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OffloadConfigError, match=message):
        load_config()


def test_unknown_variables_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_NUM_BLOCK", "6")
    monkeypatch.setenv("FT_VLLM_TIMING_BATCH", "decode")
    for read in (load_config, load_config_from_env):
        with pytest.warns(UserWarning, match="names no field") as caught:
            assert read().num_blocks == 4
        messages = [str(warning.message) for warning in caught]
        assert "did you mean 'FT_NUM_BLOCKS'?" in messages[0]
        assert "FT_VLLM_TIMING_BATCH" in messages[1]
        assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "", "unknown suffix '.toml'; use one of .yaml"),
        ("a.yaml", "num_block: 3", "'num_block'; did you mean 'num_blocks'"),
        ("a.yaml", "num_blocks: 4\nnum_blocks: 5", "'num_blocks' comes twice"),
        ("a.json", '{"num_blocks": 4, "num_blocks": 5}', "'num_blocks' comes twice"),
        ("a.yaml", "include_patterns:\n  - *", "put quotes around"),
        ("a.yaml", "- 3", "holds a list"),
        ("a.yaml", "load_strategy: greedy", "pass it in Python"),
        ("a.yaml", "include_patterns: layers", r"write \['layers'\]"),
        ("a.yaml", "num_blocks: '4'", "num_blocks='4'"),
        ("a.yaml", "3: 4", "does not know: 3"),
        ("a.yaml", "[a]: 4", "cannot be read"),
        ("a.json", "{", "cannot be read"),
        ("a.ini", "[other]\nnum_blocks = 4", r"no section \[flextensor\], only \['other'\]"),
        ("a.ini", "[flextensor]\nnum_blocks = x", "num_blocks='x' is no int"),
        ("a.ini", "[flextensor]\nblocks = 4", "did you mean 'num_blocks'"),
        ("a.ini", "[flextensor]\nnum_blocks = 4\nnum_blocks = 4", "cannot be read"),
    ],
)
def test_wrong_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(OffloadConfigError, match=message) as caught:
        load_config_from_file(file)
    assert name in str(caught.value)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no configuration file \S*missing.yaml"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(OffloadConfigFileError):
        load_config_from_file(tmp_path / "missing.json")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config_from_file(tmp_path / "empty.yaml") == OffloadConfig()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OffloadConfigError, match="cannot be read"):
        load_config_from_file(tmp_path / "binary.yaml")


def test_docs_list_every_field_with_its_default() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in DOCS.read_text().splitlines()
        if line.startswith("| `")
    ]
    fields = {row[0].strip("`"): row[2] for row in rows if len(row) == 4}
    assert set(fields) == set(DEFAULTS)
    for name, value in DEFAULTS.items():
        text = value if isinstance(value, str) else repr(value).replace("'", '"')
        assert fields[name] == f"`{text}`", name
    named = {cell for row in rows if len(row) == 2 for cell in row[0].replace("`", "").split(", ")}
    assert set(REMOVED_NAMES) <= named <= set(REMOVED_NAMES) | set(DEFAULTS)
