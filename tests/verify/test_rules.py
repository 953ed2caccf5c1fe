"""The table of rules, the docs made from it, and the choice of engines."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from damage import FP8, GOLDEN, KV, MOE, NVFP4, copied, edit_json, errors

from modelopt_lite.errors import RecipeError
from modelopt_lite.verify.audit import audit
from modelopt_lite.verify.findings import Finding
from modelopt_lite.verify.rules import (
    ENGINES,
    READERS,
    RULES,
    engine_names,
    narrowed,
    rules_table,
    with_engines,
)

ROOT = Path(__file__).parents[2]


def test_every_finding_has_a_rule_and_every_rule_a_finding() -> None:
    named = set()
    for path in (ROOT / "modelopt_lite" / "verify").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}"
                named.add(node.args[0].value)
    assert named == set(RULES)


def test_the_docs_have_the_table() -> None:
    page = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    assert rules_table() in page, "replace the table by what rules_table() returns"


def test_engines_are_named_with_commas_or_each() -> None:
    assert engine_names(["vllm,sglang", "vllm", " transformers"]) == (
        "vllm",
        "sglang",
        "transformers",
    )
    assert engine_names([]) == ()
    with pytest.raises(RecipeError, match=r"'vlm'; did you mean 'vllm'.*known: vllm, sglang"):
        engine_names(["vlm"])


def test_findings_name_the_engines_of_their_rule_and_dialect() -> None:
    assert with_engines(Finding("kv-name", ""), "modelopt").engines == ("vllm",)
    assert with_engines(Finding("kv-pair", ""), "modelopt").engines == READERS["modelopt"]
    assert with_engines(Finding("file-damaged", ""), None).engines == tuple(ENGINES)
    own = Finding("kv-pair", "", engines=("sglang",))
    assert with_engines(own, "modelopt") is own


def test_a_choice_keeps_what_concerns_it_and_what_concerns_all() -> None:
    every = Finding("kv-pair", "", engines=READERS["modelopt"])
    nobody = Finding("plan-outputs", "", engines=())
    vllm = Finding("engine-refuses", "", "warning", engines=("vllm",), decisive=True)
    assert narrowed([every, nobody, vllm], ("sglang",)) == [every, nobody]
    [decided] = narrowed([vllm], ("vllm", "sglang"))
    assert decided.severity == "error"


@pytest.mark.parametrize(
    ("case", "engine", "refused"),
    [
        (NVFP4, "vllm", False),
        (NVFP4, "sglang", False),
        (NVFP4, "tensorrt_llm", False),
        (NVFP4, "transformers", True),
        (NVFP4, "compressed_tensors", True),
        (MOE, "vllm", False),
        ("llama-int8_wo", "vllm", True),
        ("llama-int8_wo", "tensorrt_llm", False),
        ("llama-int4_awq", "sglang", True),
        ("llama-fp8_pb_wo", "sglang", True),
        ("llama-fp8_pb_wo", "tensorrt_llm", False),
        ("llama-fp8_pc_pt", "sglang", True),
        ("llama-nvfp4_awq", "sglang", False),
        ("llama-nvfp4_awq", "vllm", True),
    ],
)
def test_what_an_engine_refuses_is_an_error_to_it(case: str, engine: str, refused: bool) -> None:
    assert errors(GOLDEN / case / "export", engines=(engine,)) == (
        {"engine-refuses"} if refused else set()
    )


def test_an_engine_does_not_hear_of_others_rules(tmp_path: Path) -> None:
    """One file that only TensorRT-LLM needs, one key that only vLLM needs."""
    folder = copied(NVFP4, tmp_path)
    nested = folder / "hf_quant_config.json"
    edit_json(nested, lambda c: c.pop("producer"))
    assert errors(folder, engines=("vllm",)) == set()
    assert errors(folder, engines=("tensorrt_llm",)) == {"config-producer"}
    edit_json(nested, lambda c: c["quantization"].pop("kv_cache_quant_algo"))
    assert errors(folder, engines=("vllm",)) == {"config-keys"}
    assert errors(folder, engines=("sglang",)) == set()


def test_engines_that_nothing_is_known_of_are_said_to_be_unknown() -> None:
    assert audit(GOLDEN / KV / "export", engines=("tensorrt_llm",)) == []
    [warned] = audit(GOLDEN / "llama-fp8_pc_pt" / "export", engines=("tensorrt_llm",))
    assert (warned.rule, warned.severity) == ("engine-refuses", "warning")
    assert "not stated by its source" in warned.message


def test_both_dialects_of_a_run_are_checked(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from modelopt_lite import cli, quantize_and_export

    source = ROOT / "modelopt_lite" / "data" / "tiny_qwen3_moe"
    out = tmp_path / "out"
    quantize_and_export(
        source,
        export_dir=out,
        recipe="fp8_per_channel_per_token",
        dialect="both",
        progress=False,
    )
    made = CliRunner().invoke(cli.app, ["verify", str(out), "--json"])
    seen = json.loads(made.stdout)
    assert [e["dialect"] for e in seen["exports"]] == ["modelopt", "compressed-tensors"]
    assert seen["ok"]
    assert made.exit_code == 0
    config = out / "compressed-tensors" / "config.json"
    edit_json(config, lambda c: c["quantization_config"].update(quantization_status="frozen"))
    made = CliRunner().invoke(cli.app, ["verify", str(out), "--json"])
    assert made.exit_code == 1
    first, second = json.loads(made.stdout)["exports"]
    assert first["findings"] == []
    [found] = second["findings"]
    assert found["rule"] == "config-status"
    assert found["engines"] == list(READERS["compressed-tensors"])


def test_fp8_in_small_letters_is_unknown_to_sglang(tmp_path: Path) -> None:
    folder = copied(FP8, tmp_path)
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(quant_algo="fp8"))
    edit_json(folder / "hf_quant_config.json", lambda c: c["quantization"].update(quant_algo="fp8"))
    assert errors(folder) == set()
    assert errors(folder, engines=("sglang",)) == {"algo-spelling"}
