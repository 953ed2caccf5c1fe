"""What commands print: no name broken inside, nothing padded in a file, counts in grammar."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from modelopt_lite import Recipe, dry_run
from modelopt_lite.cli import app
from modelopt_lite.cli_show import print_json
from modelopt_lite.plan_view import plan_tables
from modelopt_lite.recipes import parse_recipe
from modelopt_lite.report import Report
from modelopt_lite.report_view import audit_view, report_table
from modelopt_lite.verify.audit import Audit, Coverage, examine
from modelopt_lite.verify.findings import Finding
from modelopt_lite.words import counted

ROOT = Path(__file__).parents[1]
TINY = ROOT / "modelopt_lite" / "data" / "tiny_qwen3_moe"
LONG = "model.language_model.layers.*.feed_forward.shared_expert_projections.gate_up_projection"


def shown(what: RenderableType, width: int) -> str:
    """Return what a terminal of a width shows."""
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=True)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def run(*arguments: object, **environment: str) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], env=environment)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("none") / "out"
    return dry_run(TINY, export_dir=target, recipe="fp8", calib_size=2)


@pytest.mark.parametrize("width", [72, 80])
def test_a_plan_breaks_names_between_their_parts_alone(planned: dict[str, Any], width: int) -> None:
    linears = planned["linears"] | {LONG: {"format": "fp8", "shape": [12345, 67890]}}
    text = shown(plan_tables({**planned, "linears": linears}), width)
    assert max(map(len, text.splitlines())) <= width
    words = set(re.split(r"[\s.]+", text))
    for name in (LONG, *planned["linears"]):
        parts = [part for part in name.split(".") if not part.isdigit()]
        assert words.issuperset(parts), name
    assert "12345 x 67890" in text


def test_a_name_that_fits_is_on_one_line(planned: dict[str, Any]) -> None:
    assert "model.layers.*.mlp.experts.*.down_proj " in shown(plan_tables(planned), 80)


def test_what_is_piped_is_neither_wrapped_nor_padded(tmp_path: Path) -> None:
    given = ("plan", TINY, "-o", tmp_path / "out", "-r", "w4a16_nvfp4")
    narrow, wide = (run(*given, COLUMNS=columns).stdout for columns in ("40", "300"))
    assert narrow == wide
    lines = narrow.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert any(str(tmp_path / "out") in line for line in lines)


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    """A model may be so bad that its perplexity is infinite; JSON has no word for it."""
    print_json({"perplexity": math.inf, "rows": [(1.5, math.nan)], "path": Path("a")})
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told == {"perplexity": None, "rows": [[1.5, None]], "path": "a"}


def test_nested_sequences_of_a_spec_are_told_apart() -> None:
    lines = [line.strip() for line in run("specs", "show", "qwen3_moe").stdout.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("fused_linears"))
    assert lines[at].split(maxsplit=1)[1] == "(q_proj, k_proj, v_proj)"
    assert lines[at + 1] == "(gate_proj, up_proj)"
    readers = "(self_attn.q_proj, self_attn.k_proj, self_attn.v_proj)"
    assert any(line.endswith(f"(input_layernorm, {readers})") for line in lines)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 errors"), (1, "1 error"), (2, "2 errors"), (1234, "1,234 errors")]
)
def test_counted(count: int, text: str) -> None:
    assert counted(count, "error") == text
    assert counted(count, "matrix", "matrices").endswith("matrix" if count == 1 else "matrices")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "out"
    result = run("quantize", TINY, "-o", folder, "-r", "fp8_per_channel_per_token", "--no-progress")
    assert result.exit_code == 0, result.output
    return folder


def test_an_audit_without_findings_says_what_it_checked(export: Path) -> None:
    count = examine(export).coverage
    assert count is not None
    assert (count.files, count.quantized) == (1, 112)
    words = f"no findings in {count.tensors} tensors of 1 file, 112 quantized weights among them"
    assert run("verify", export).stdout == f"{export}: {words}; not compared with a source\n"
    compared = f"{export}: {words}, names, shapes and copies compared with {TINY}\n"
    assert run("verify", export, "--source", TINY).stdout == compared
    *table, summary = run("verify", export, "--source", TINY, "--deep").stdout.splitlines()
    assert summary == f"{export}: {words}, all compared with {TINY}"
    assert table[0].split() == ["tensor", "relative", "error", "SQNR", "cosine"]
    assert len(table) == 12
    assert "102 more" in table[-1]


def test_an_audit_of_nothing(tmp_path: Path) -> None:
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert "1 error, 0 warnings (it cannot be opened)" in result.stdout


def test_many_findings_of_a_rule_are_grouped() -> None:
    findings = [Finding("value-finite", f"tensor {i}") for i in range(112)]
    findings += [Finding("index-orphan-file", "one of its kind", "warning")]
    audit = Audit(Path("out"), "modelopt", Coverage(2, 300, 112), findings, {})
    text = shown(audit_view(audit, None), 120)
    assert [f"tensor {i} " in text for i in range(5)] == [True, True, True, False, False]
    assert "... and 109 more; --json lists all" in text
    assert text.index("tensor 0") < text.index("one of its kind")
    assert "out: 112 errors, 1 warning in 300 tensors of 2 files" in text
    assert len(text.splitlines()) < 15


def test_evaluation_names_the_checkpoint_and_rounds_seconds() -> None:
    given = ("eval", TINY, "--max-tokens", 64, "--seq-len", 32, "--no-progress")
    text = run(*given).stdout
    assert re.search(rf"^checkpoint +{re.escape(str(TINY))}$", text, re.MULTILINE)
    assert re.search(r"^seconds +\d+\.\d$", text, re.MULTILINE)
    assert re.search(r"^perplexity +\d+\.\d{4}$", text, re.MULTILINE)
    assert json.loads(run(*given, "--json").stdout)["checkpoint"] == str(TINY)


def test_cold_experts_come_with_what_to_do() -> None:
    report = Report("out", "nvfp4", "llama", {"a": "nvfp4"}, {"b": "why"}, cold_experts=["e.3"])
    text = " ".join(shown(report_table(report), 80).split())
    assert "1 cold expert:" in text
    assert "--calib-size" in text
    assert "--moe-calibrate-all-experts" in text
    assert "1 matrix; left alone: 1" in text
    report.cold_experts = []
    assert "--calib-size" not in shown(report_table(report), 80)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "phi3", "deepseek_v3"])
def test_the_recipe_of_the_readme_is_one_for_dense_and_sparse_models(
    checkpoint: Callable[..., Path], kind: str
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    recipe = parse_recipe({"name": "mine", **yaml.safe_load(example)}, where="README.md")
    assert isinstance(recipe, Recipe)
    linears = dry_run(checkpoint(kind), recipe=recipe)["linears"]
    quantized = {name for name, linear in linears.items() if "format" in linear}
    assert quantized
    assert not any(".layers.0." in name for name in quantized)
    elsewhere = {name for name in quantized if ".layers.1." not in name}  # of another format
    assert all(".mlp." in name for name in elsewhere)
    assert any(".self_attn." in name for name in quantized - elsewhere)
