"""First drafts: what a type's small models show is what its package says."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from typer.testing import CliRunner

from modelopt_lite.cli import app
from modelopt_lite.doctor.check import examine
from modelopt_lite.doctor.draft import Draft, draft_spec
from modelopt_lite.doctor.instance import CannotBuildError, Instance, instances, known_here
from modelopt_lite.doctor.jobs import in_processes
from modelopt_lite.doctor.new import write_first_draft
from modelopt_lite.doctor.source import source_of
from modelopt_lite.errors import OutputError, SpecError
from modelopt_lite.models import ModelSpec, MoESpec, get_spec, get_specs, specs

installed = Version(transformers.__version__)
TYPES = ("deepseek_v3", "gpt_oss", "mixtral", "nemotron_h", "qwen2_moe", "qwen3_moe")
DENSE = ("gemma3", "llama", "nemotron", "phi3")
stacks = pytest.mark.skipif(installed < Version("5"), reason="a release that stacks experts")


@functools.cache
def built(model_type: str) -> list[Instance]:
    return instances(model_type)


@functools.cache
def drafted(model_type: str) -> Draft:
    """Drafts never ask the registry, so the type's own package is as good as hidden."""
    return draft_spec(model_type, built(model_type), remote_code=False)


def registered(model_type: str) -> ModelSpec:
    spec = get_spec(model_type)
    assert spec is not None
    if installed < Version(spec.min_transformers_version or "0"):
        pytest.skip(f"transformers {installed} has no {model_type}")
    return spec


def agree(draft: MoESpec | None, spec: MoESpec | None) -> bool:
    """Whether two MoE sections say the same; names of other releases and their order aside."""
    if draft is None or spec is None:
        return draft is spec
    return (
        {n.casefold() for n in draft.block_names} <= {n.casefold() for n in spec.block_names}
        and set(draft.expert_linear_names or ()) == set(spec.expert_linear_names or ())
        and draft.fused_expert_names == spec.fused_expert_names
        and draft.gate_up_pair == spec.gate_up_pair
    )


@stacks
@pytest.mark.parametrize("model_type", [*TYPES, *DENSE])
def test_a_draft_says_what_the_package_says(model_type: str) -> None:
    spec, draft = registered(model_type), drafted(model_type).spec
    assert agree(draft.moe_spec, spec.moe_spec)
    if draft.expert_storage_spec is not None:
        assert draft.expert_storage_spec == spec.expert_storage_spec
    assert draft.ptq_spec is not None
    assert spec.ptq_spec is not None
    assert set(draft.ptq_spec.layer_names) <= set(spec.ptq_spec.layer_names)
    assert set(draft.ptq_spec.router_names) == set(spec.ptq_spec.router_names)
    assert set(draft.ptq_spec.fused_linears) == set(spec.ptq_spec.fused_linears)
    if spec.export_spec is not None:
        draft_names = draft.export_spec.weight_plus_one_norm_names if draft.export_spec else ()
        assert set(draft_names) <= set(spec.export_spec.weight_plus_one_norm_names)


@pytest.mark.parametrize("model_type", [*TYPES, *DENSE])
def test_the_check_passes_a_draft(model_type: str) -> None:
    registered(model_type)
    assert examine(drafted(model_type).spec, built(model_type)).findings == []


def value_of(source: str) -> ModelSpec:
    """Run a written package without registering what it holds."""
    found: list[ModelSpec] = []
    names: dict[str, Any] = {**vars(specs), "register": found.append}
    lines = [line for line in source.splitlines() if not line.startswith(("from ", "    specs"))]
    body = "\n".join(lines)
    exec(body[body.index("SPEC = ") :], names)
    [spec] = found
    return spec


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma3", "nemotron_h"])
def test_what_is_written_is_the_draft_in_our_style(model_type: str, tmp_path: Path) -> None:
    registered(model_type)
    draft = drafted(model_type)
    source = source_of(draft, "a test")
    assert value_of(source) == draft.spec
    for field, todo in draft.todo.items():
        assert f"# TODO: {todo}\n" in source, field
    if ruff := shutil.which("ruff") or shutil.which("ruff", path=Path(sys.executable).parent):
        file = tmp_path / "specs.py"
        file.write_text(source)
        command = [ruff, "format", "--check", "--line-length", "100", str(file)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, source


def test_the_command_writes_a_package_and_checks_it(tmp_path: Path) -> None:
    """With a type that the installed release knows and the registry does not."""
    to = tmp_path / "packages"
    made = CliRunner().invoke(app, ["specs", "new", "diffllama", "--to", str(to)])
    assert made.exit_code == 0, made.output
    assert f"wrote {to / 'diffllama' / 'specs.py'}: 1 TODO left" in made.output
    assert "1 ok" in made.output
    with pytest.raises(OutputError, match="exists"):
        write_first_draft("diffllama", str(to))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("llama", "has a spec"),
        ("nowhere", "neither a folder"),
        ("diffllama", "no folder to write to"),
    ],
)
def test_what_cannot_be_drafted_is_refused(
    what: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELOPT_LITE_MODELS_PATH", raising=False)
    folder = None if "folder to write" in said else str(tmp_path)
    with pytest.raises(SpecError, match=said):
        write_first_draft(what, folder)


@stacks
@pytest.mark.parametrize("model_type", ["granitemoe", "jetmoe", "llama4_text", "dbrx"])
def test_experts_that_lie_otherwise_are_drafted(model_type: str) -> None:
    """In the block itself; in attention, too; turned; all rows in one matrix."""
    assert drafts_agree(registered(model_type)) is True


@pytest.mark.skipif("DRAFT_ALL_TYPES" not in os.environ, reason="minutes: nox -s drafts")
def test_drafts_agree_for_nearly_all_types() -> None:
    """Over all types with experts that the installed release can build."""
    wanted = [
        spec
        for spec in get_specs()
        if spec.moe_spec is not None
        and spec.modeling_source != "remote_code"
        and installed >= Version(spec.min_transformers_version or "0")
    ]
    verdicts = {wanted[at].model_type: told for at, told in in_processes(drafts_agree, wanted)}
    other = {name: told for name, told in verdicts.items() if told not in (True, None)}
    built_here = sum(told is not None for told in verdicts.values())
    lines = [f"{built_here - len(other)} of {built_here} drafts agree, transformers {installed}"]
    lines += [f"{name}: {told}" for name, told in other.items()]
    sys.stdout.write("\n".join(["", *lines, ""]))
    assert len(other) <= 0.05 * built_here, f"{built_here - len(other)} agree, not {sorted(other)}"


def drafts_agree(spec: ModelSpec) -> bool | str | None:
    """Whether the draft of a type says what its package says; None where nothing is built."""
    try:
        made = instances(spec.model_type) if known_here(spec.model_type) else []
    except CannotBuildError:
        made = []
    if not made or made[0].kind == "encoder-decoder":
        return None
    draft = draft_spec(spec.model_type, made, remote_code=False).spec.moe_spec
    return agree(draft, spec.moe_spec) or f"{draft}, registered {spec.moe_spec}"


def test_agreement_can_fail() -> None:
    moe = registered("qwen3_moe").moe_spec
    assert moe is not None
    for other in (
        replace(moe, block_names=("Other",)),
        replace(moe, gate_up_pair=("up_proj", "gate_proj")),
        replace(moe, fused_expert_names=True),
        replace(moe, expert_linear_names=None, gate_up_pair=None),
        None,
    ):
        assert not agree(other, moe)
