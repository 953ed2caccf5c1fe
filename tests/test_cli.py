"""The command line: its speed, its flags, its exit statuses, and what it prints."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer.main
from safetensors.torch import save_file
from typer.testing import CliRunner

import modelopt_lite
from modelopt_lite import cli
from modelopt_lite.cli_options import RunOptions
from modelopt_lite.errors import DegradedError
from modelopt_lite.report import REPORT_FILE, Report

ROOT = Path(__file__).parents[1]
TINY = ROOT / "modelopt_lite" / "data" / "tiny_qwen3_moe"
DATA_FREE = ("--recipe", "fp8_per_channel_per_token", "--no-progress")

RUN_FLAGS = """
    --batch-size --calib-data --calib-seq-len --calib-size --device --device-memory --dialect
    --disk-scratch --effective-bits --ep --export-dir --host-memory --kv-cache --max-shard-size
    --model-type --moe-calibrate-all-experts --no-progress --no-resume --no-verify --numerics
    --offload --offload-config --on-bad-shape --overwrite --progress --recipe --resume
    --search-dir --seed --strict
    --trust-remote-code --verify -o -r
"""
FLAGS = {
    "": "--version",
    "quantize": RUN_FLAGS,
    "plan": f"{RUN_FLAGS} --json --read-bandwidth --world-size --write-bandwidth",
    "verify": """
        --deep --engine --json --max-tokens --record --seq-len --source --text --trust-remote-code
    """,
    "diff": "--json",
    "eval": """
        --activations --against --batch-size --device --include-path --json --keep --limit
        --max-tokens --no-activations --no-progress --num-fewshot --progress --record --seq-len
        --tasks --text --trust-remote-code
    """,
    "push": """
        --create-pr --dry-run --json --message --no-verify --private --public --reports
        --revision --verify
    """,
    "specs check": "--ckpt --jobs --json --trust-remote-code",
    "specs list": "--json",
    "specs new": "--json --to --trust-remote-code",
    "specs show": "--json",
    "recipes list": "--json",
    "recipes show": "--json",
}


def run(*arguments: object) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def commands(command: Any, name: str = "") -> dict[str, Any]:
    """Map the names of all commands that take options to the commands."""
    found = {} if name in ("specs", "recipes") else {name: command}
    for child, sub in getattr(command, "commands", {}).items():
        found |= commands(sub, f"{name} {child}".strip())
    return found


def test_flags_are_frozen() -> None:
    """A new flag is a decision: take it here too, and into the changelog."""
    seen = {
        name: {
            flag
            for param in command.params
            if param.param_type_name == "option"
            for flag in (*param.opts, *param.secondary_opts)
        }
        - {"--help"}
        for name, command in commands(typer.main.get_command(cli.app)).items()
    }
    assert seen == {name: set(flags.split()) for name, flags in FLAGS.items()}


def test_options_are_those_of_the_library() -> None:
    parameters = inspect.signature(modelopt_lite.quantize_and_export).parameters
    wanted = {name: p.default for name, p in parameters.items() if name != "ckpt"}
    wanted["offload_config"] = None  # a file, that the library takes as an object
    assert {f.name: f.default for f in dataclasses.fields(RunOptions)} == wanted


def processor_seconds(code: str, runs: int) -> float:
    """Return the least processor time that a new interpreter takes; tests run on busy machines."""
    # Compiled by the first run, as an installed package is.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(runs):
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=env,
            check=False,
        )
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        seconds.append(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)
    return min(seconds)


@pytest.fixture(scope="module")
def torch_seconds() -> float:
    """What importing torch takes on this machine."""
    return processor_seconds("import torch", 2)


@pytest.mark.parametrize("arguments", [["--help"], ["specs", "list"], ["recipes", "list"]])
def test_answers_at_once(arguments: list[str], torch_seconds: float) -> None:
    code = (
        "import sys\n"
        "from modelopt_lite.cli import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'accelerate'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    assert processor_seconds(code, 3) < torch_seconds / 2  # a quarter of it as a rule


def test_version_and_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "modelopt_lite", "--version"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.split() == ["modelopt-lite", modelopt_lite.__version__]


def test_specs_are_shown() -> None:
    names = json.loads(run("specs", "list", "--json").stdout)
    assert names == sorted(p.parent.name for p in (ROOT / "models").glob("*/specs.py"))
    assert set(names) <= set(run("specs", "list").stdout.split())
    for name in names[::8]:
        result = run("specs", "show", name)
        assert result.exit_code == 0
        assert "layer_names" in result.stdout
        assert json.loads(run("specs", "show", name, "--json").stdout)["model_type"] == name


def test_recipes_are_shown() -> None:
    for name in json.loads(run("recipes", "list", "--json").stdout):
        assert name in run("recipes", "list").stdout
        assert json.loads(run("recipes", "show", name, "--json").stdout)["name"] == name
        assert "weights" in run("recipes", "show", name).stdout


def failed(result: Any, status: int, *words: str) -> None:
    """Check that a command ended with a status and a message without traceback on stderr."""
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit)
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["specs", "show", "qwen3mo"], ["error [MOL200]", "did you mean 'qwen3_moe'"]),
        (["recipes", "show", "nvfp5"], ["error [MOL300]", "did you mean 'nvfp4'"]),
        (["quantize", "no/such/folder"], ["error [MOL100]", "'no/such/folder' does not exist"]),
        (["plan", "no/such/folder"], ["error [MOL100]"]),
        (["verify", "no/such/folder"], ["error [MOL100]"]),
        (["eval", "no/such/folder"], ["error [MOL100]"]),
        (["quantize", TINY, "-r", "nvfp"], ["error [MOL300]"]),
        (["quantize", TINY, "--dialect", "onnx"], ["error [MOL300]", "'onnx'"]),
        (["quantize", TINY, "--offload", "some"], ["error [MOL300]", "'some'"]),
        (["plan", TINY, "--numerics", "best"], ["error [MOL300]", "'best'"]),
        (["plan", TINY, "--max-shard-size", "10 miles"], ["error [MOL300]", "10 miles"]),
        (["plan", TINY, "--model-type", "llama"], ["error [MOL100]", "'llama'", "'qwen3_moe'"]),
        (["plan", TINY, "--export-dir", TINY], ["error [MOL500]"]),
    ],
)
def test_errors_are_one_message(arguments: list[object], words: list[str]) -> None:
    failed(run(*arguments), 1, *words)


def test_wrong_usage() -> None:
    assert run("quantize").exit_code == 2
    assert run("quantize", TINY, "--calib-size", "many").exit_code == 2
    assert run("frobnicate").exit_code == 2


def test_unexpected_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise ZeroDivisionError

    monkeypatch.setattr("modelopt_lite.recipes.preset_names", broken)
    assert isinstance(run("recipes", "list").exception, ZeroDivisionError)


def test_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("modelopt_lite.api.quantize_and_export", interrupted)
    result = run("quantize", TINY)
    failed(result, 130, "interrupted")
    assert result.stderr.count("\n") == 1


def test_strict_shows_the_report_and_exits_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def degraded(ckpt: str, **options: Any) -> None:
        given.update(options)
        report = Report("out", "nvfp4", "llama", cold_experts=["mlp.experts.3"], notes=["careful"])
        raise DegradedError("fell back", report)

    monkeypatch.setattr("modelopt_lite.api.quantize_and_export", degraded)
    result = run("quantize", TINY, "--strict", "--no-resume", "--calib-size", "7")
    failed(result, 3, "error [MOL800]: fell back")
    assert "mlp.experts.3" in result.stdout
    assert "note: careful" in result.stdout
    assert (given["strict"], given["resume"], given["calib_size"]) == (True, False, 7)


def test_plan_reads_no_weight_and_writes_nothing(tmp_path: Path) -> None:
    source = tmp_path / "tiny"
    source.mkdir()
    for file in TINY.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    weights = source / "model.safetensors"
    size = weights.stat().st_size
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    os.truncate(weights, header)
    os.truncate(weights, size)  # a hole: every value reads as zero, which no format would take
    before = sorted(tmp_path.rglob("*"))
    target = tmp_path / "out"
    result = run("plan", source, "--json", "--export-dir", target)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert sorted(tmp_path.rglob("*")) == before
    assert plan["problems"] == []
    assert plan["export_dir"] == str(target)
    assert (plan["model_type"], plan["formats"]) == ("qwen3_moe", ["nvfp4"])
    assert plan["has_spec"]
    experts = [name for name in plan["linears"] if ".experts." in name]
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    count = config.get("num_experts", config.get("num_local_experts"))
    assert len(experts) == 3 * count * config["num_hidden_layers"]
    assert "output head" in plan["linears"]["lm_head"]["excluded"]
    assert plan["needs_calibration"]
    assert plan["bytes_to_read"] == size - header
    assert 0 < plan["bytes_to_write"] < size
    assert sum(unit["is_layer"] for unit in plan["units"]) == config["num_hidden_layers"]


def test_plan_says_whether_the_export_could_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    result = run("plan", TINY, "--export-dir", tmp_path, *DATA_FREE)
    failed(result, 1, "error [MOL500]", "not empty", "--overwrite")
    assert "model.layers.*.mlp.experts.*" in result.stdout
    assert run("plan", TINY, "--export-dir", tmp_path, "--overwrite", *DATA_FREE).exit_code == 0


def test_a_finished_export_is_reused_and_said_to_be(tmp_path: Path) -> None:
    target = tmp_path / "out"
    given = ("-o", target, *DATA_FREE)
    assert "reused" not in run("quantize", TINY, *given).stdout
    weights = target / "model.safetensors"
    before = weights.stat().st_mtime_ns
    planned = json.loads(run("plan", TINY, *given, "--json").stdout)
    assert planned["reuses_export"] is True
    assert "--overwrite" in planned["notes"][-1]
    result = run("quantize", TINY, *given)
    assert result.exit_code == 0
    assert "reused" in result.stdout
    assert "--overwrite" in result.stdout
    assert weights.stat().st_mtime_ns == before

    again = ("plan", TINY, *given, "--json", "--overwrite")
    assert json.loads(run(*again).stdout)["reuses_export"] is False
    assert "reused" not in run("quantize", TINY, *given, "--overwrite").stdout
    assert weights.stat().st_mtime_ns > before
    assert json.loads((target / REPORT_FILE).read_text(encoding="utf-8"))["reused"] is False
    result = run("plan", TINY, *given, "--seed", "1")
    failed(result, 1, "error [MOL500]", "not empty", "differs in options")
    failed(run("plan", TINY, *given, "--no-resume"), 1, "error [MOL500]", "not empty")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["--host-memory", "1MB", *DATA_FREE],
            ["error [MOL300]", "host_memory is 1,000,000 bytes"],
        ),
        (["--device-memory", "1MB", *DATA_FREE], ["error [MOL300]", "device_memory"]),
        (["--host-memory", "lots"], ["error [MOL300]", "lots"]),
        (["--calib-data", "no/such.txt"], ["error [MOL400]", "no/such.txt", "does not exist"]),
        (["--calib-data", ROOT], ["error [MOL400]", str(ROOT)]),
        (["--calib-data", "{tmp}/empty.txt"], ["error [MOL400]", "no tokens"]),
        (["--calib-data", "{tmp}/locked.jsonl"], ["error [MOL400]", "cannot be read"]),
        (["--dialect", "onnx"], ["error [MOL300]", "'onnx'"]),
        (["--seed", "-1"], ["error [MOL300]", "seed"]),
    ],
)
def test_plan_foretells_what_the_run_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[Any], words: list[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "locked.jsonl").touch()
    open_path = Path.open

    def locked(path: Path, *args: Any, **kwargs: Any) -> Any:  # root may read any file
        if path.name == "locked.jsonl":
            raise PermissionError(13, "Permission denied")
        return open_path(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", locked)
    options = [str(word).replace("{tmp}", str(tmp_path)) for word in given]
    for command in ("plan", "quantize"):
        failed(run(command, TINY, "-o", tmp_path / "out", *options), 1, *words)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "empty.txt", tmp_path / "locked.jsonl"]


def test_plan_shows_where_the_export_goes_and_what_it_calibrates_with(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 500, encoding="utf-8")
    given = ("--calib-data", text, "--calib-size", "3", "--calib-seq-len", "16")
    result = run("plan", TINY, "-o", tmp_path / "out", *given)
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "out") in result.stdout.replace("\n", "")
    assert "3 sequences, 48 tokens of" in result.stdout


def test_plan_shows_how_inference_is_offloaded(tmp_path: Path) -> None:
    given = ("plan", TINY, "-o", tmp_path / "out", "--recipe", "fp8", "--calib-size", "2")
    result = run(*given)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    offload = json.loads(run(*given, "--json").stdout)["offload"]
    assert f"offloaded inference {len(offload['units'])} units of " in told
    assert "expert parallelism by 2, 4" in told
    model = tiny_model()
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    for path, size in offload["units"].items():
        inside = {n for n in sizes if n.startswith(f"{path}.")}
        assert 0 < size <= sum(sizes[n] for n in inside)
    buffers = sum(b.nbytes for b in model.buffers())
    whole = sum(sizes.values()) + buffers
    assert sum(offload["units"].values()) + sum(offload["resident"].values()) == whole
    assert offload["ep_bytes"]["1"] == sum(sizes.values())
    small = json.loads(run(*given, "--json", "--device-memory", "1500kB").stdout)["offload"]
    assert small["expert_groups"]


def tiny_model() -> Any:
    config = transformers.AutoConfig.from_pretrained(TINY)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_dry_run_gives_the_same_in_python(tmp_path: Path) -> None:
    planned = modelopt_lite.dry_run(TINY, export_dir=tmp_path, recipe="fp8", calib_size=2)
    assert planned["calibration"]["samples"] == 2
    assert (planned["formats"], planned["problems"]) == (["fp8"], [])
    (tmp_path / "mine").touch()
    planned = modelopt_lite.dry_run(
        TINY, export_dir=tmp_path, recipe=DATA_FREE[1], host_memory="1MB"
    )
    assert [problem["code"] for problem in planned["problems"]] == ["MOL500", "MOL300"]


def test_strict_holds_for_a_reused_export(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(3, 7)[None]}, tmp_path / "ids.safetensors")
    given = ("-o", tmp_path / "out", "--calib-data", tmp_path / "ids.safetensors", "--no-progress")
    assert run("quantize", TINY, *given).exit_code == 0
    failed(run("quantize", TINY, *given, "--strict"), 3, "saw no calibration token")


def test_quantize_verify_and_eval(tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = run("quantize", TINY, "-o", target, *DATA_FREE)
    assert result.exit_code == 0, result.output
    for word in ("bits per weight", "peak memory", "relative error", "cold experts", "seconds"):
        assert word in result.stdout
    assert json.loads((target / REPORT_FILE).read_text(encoding="utf-8"))["recipe"] == DATA_FREE[1]

    assert "no findings" in run("verify", target, "--source", TINY).stdout
    text = ("--text", "cpython", "--max-tokens", "64", "--seq-len", "32")
    deep = json.loads(run("verify", target, "--source", TINY, "--deep", *text, "--json").stdout)
    [export] = deep["exports"]
    assert (deep["ok"], export["findings"], export["dialect"]) == (True, [], "modelopt")
    relative = [entry["relative"] for entry in export["errors"]]
    assert len(relative) == export["checked"]["quantized"] == 112
    assert relative == sorted(relative, reverse=True)
    assert 0 < relative[-1] < relative[0] < 0.04
    predicted = export["predictions"]
    assert (predicted["tokens"], len(predicted["layers"])) == (62, 4)
    assert 0 < predicted["kl"] < 0.1
    assert json.loads(run("verify", target, "--json").stdout)["exports"][0]["errors"] == []
    values = json.loads(run("eval", target, "--max-tokens", "256", "--json").stdout)
    assert values["quantized"] is True
    assert 1 < values["perplexity"] < 30

    config = target / "hf_quant_config.json"
    config.write_text(config.read_text("utf-8").replace("lm_head", "lm_hat"), encoding="utf-8")
    result = run("verify", target)
    assert result.exit_code == 1
    assert "error" in result.stdout
    found = json.loads(run("verify", target, "--json").stdout)
    assert not found["ok"]
    assert any(f["severity"] == "error" for f in found["exports"][0]["findings"])
    assert run("verify", target, "--deep").exit_code == 2
    assert run("verify", target, "--source", TINY, "--text", "cpython").exit_code == 2
    failed(run("verify", target, "--engine", "vlm"), 1, "error [MOL300]", "did you mean 'vllm'")
