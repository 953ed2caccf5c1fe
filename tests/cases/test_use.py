"""Use: offline, read-only, twice in one process; the plan as data."""

from __future__ import annotations

import inspect
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from modelopt_lite.cli import app

Make = Callable[..., Path]


@pytest.mark.parametrize("data", ["batches", "jsonl", "ids", "default"])
def test_c74_no_network_and_a_source_that_is_not_written(
    checkpoint: Make,
    cases: Any,
    with_tokenizer: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    data: str,
) -> None:
    """Hidden downloads and files dropped beside the source break offline machines."""
    from safetensors.torch import save_file

    source = with_tokenizer(checkpoint("llama", vocab_size=320))
    jsonl = cases.tmp_path / "data.jsonl"
    jsonl.write_text('{"text": "some words"}\n{"text": "and others, a few more"}\n')
    ids = cases.tmp_path / "ids.safetensors"
    save_file({"a": torch.arange(3, 35).view(2, 16), "b": torch.arange(5, 9)}, ids)
    given: Any = {"batches": cases.batches, "jsonl": jsonl, "ids": ids, "default": None}[data]

    def no_network(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a connection to {args} was tried")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in source.iterdir()}
    for path in (*before, source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        out = cases.run(source, calib_data=given, calib_size=8, calib_seq_len=32)
    finally:
        source.chmod(0o755)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in source.iterdir()} == before
    assert not out.problems()


@pytest.mark.parametrize(
    ("kind", "count"),
    [("llama", 15), ("qwen3_moe", 57), ("deepseek_v3", 30), ("gpt_oss", 13), ("nemotron_h", 20)],
)
def test_c75_plan_lists_every_linear_once(
    checkpoint: Make, cases: Any, kind: str, count: int
) -> None:
    """Hours of work began without a word on what would be quantized, and what not and why."""
    source = checkpoint(kind)
    target = str(cases.tmp_path / "planned")
    result = CliRunner().invoke(
        app, ["plan", str(source), "--recipe", "fp8", "--export-dir", target, "--json"]
    )
    assert result.exit_code == 0, result.output
    assert list(cases.tmp_path.iterdir()) == [source]
    plan = json.loads(result.stdout)
    out = cases.run(source, "fp8")
    linears = plan["linears"]
    quantized = {name for name, linear in linears.items() if "format" in linear}
    assert quantized == out.packed
    assert all(("format" in linear) != ("excluded" in linear) for linear in linears.values())
    assert all(linear.get("excluded", "x") for linear in linears.values())
    assert plan["outputs"] == len(out.tensors)
    assert plan["bytes_to_read"] == sum(t.nbytes for t in out.original.values())
    size = sum(
        p.stat().st_size
        for p in out.folder.iterdir()
        if p.name not in {"modelopt_lite_report.json", "report.html", "README.md"}
    )
    assert plan["bytes_to_write"] == size
    model = cases.load(source)
    modules = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    names = {n.replace("model.layers", "backbone.layers") for n in modules}
    found = set(linears) | {n.replace("backbone.layers", "model.layers") for n in linears}
    assert set(modules) <= found or names <= found
    assert len(linears) >= count - 4  # routers are linear layers in some releases only


def fingerprint_of_transformers() -> dict[str, Any]:
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    found: dict[str, Any] = {"attention": {n: TABLE[n] for n in TABLE}}
    for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"):
        cls = getattr(transformers, name)
        module = inspect.getmodule(cls)
        for other in vars(module).values():
            if inspect.isclass(other) and other.__module__ == cls.__module__:
                found[f"{name}.{other.__name__}"] = dict(vars(other))
    found["linear"] = (nn.Linear.forward, nn.functional.linear, nn.Module.__call__)
    found["state"] = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
    )
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_c76_nothing_stays_behind_in_the_process(checkpoint: Make, cases: Any, fails: bool) -> None:
    """The second model of a process met classes that the first had changed."""
    one, other = checkpoint("qwen3_moe"), checkpoint("mixtral")
    broken = checkpoint("llama")
    cases.edit(broken, lambda t: t["model.layers.1.mlp.up_proj.weight"].fill_(torch.inf))
    before = fingerprint_of_transformers()
    random = torch.get_rng_state()
    first = cases.run(one, kv_cache="fp8", moe_calibrate_all_experts=True)
    if fails:
        with pytest.raises(ValueError, match="infinite"):
            cases.run(broken, kv_cache="fp8")
    else:
        cases.run(other, "fp8", kv_cache="fp8")
    assert fingerprint_of_transformers() == before
    assert torch.equal(torch.get_rng_state(), random)
    again = cases.run(one, kv_cache="fp8", moe_calibrate_all_experts=True)
    for path in first.folder.iterdir():
        if "report" not in path.name:
            assert path.read_bytes() == (again.folder / path.name).read_bytes(), path.name


def test_c14_a_prepared_model_may_be_prepared_again(checkpoint: Make, cases: Any) -> None:
    """Preparing twice changed the model, or quantized what was quantized."""
    from modelopt_lite import export_hf, quantize

    source = checkpoint("qwen3_moe")
    model = cases.load(source)
    modules = [(n, type(m)) for n, m in model.named_modules()]

    def loop(m: Any) -> None:
        for batch in cases.batches:
            m(batch)

    for turn in ("a", "b"):
        quantize(model, "nvfp4", loop)
        export_hf(model, cases.tmp_path / turn, source=source)
        assert [(n, type(m)) for n, m in model.named_modules()] == modules
    one, other = (cases.tmp_path / t / "model.safetensors" for t in ("a", "b"))
    assert one.read_bytes() == other.read_bytes()
