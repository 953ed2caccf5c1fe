"""The audit against the source and against the plan of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from damage import (
    EXPERT,
    GOLDEN,
    MOE,
    NVFP4,
    Q,
    Tensors,
    copied,
    drop,
    edit,
    edit_json,
    errors,
    put,
    set_tensor,
    source_of,
    with_byte,
)

from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.errors import AuditError, CheckpointError
from modelopt_lite.verify.audit import audit, audit_or_raise, compare_with_source

SOURCE_DAMAGES: list[tuple[Callable[[Path], None], set[str]]] = [
    (drop("model.norm.weight"), {"source-missing"}),
    (put("model.layers.0.foo.bias", torch.ones(())), {"source-extra"}),
    (set_tensor("model.norm.weight", with_byte(3, 1)), {"source-bytes"}),
    (set_tensor("model.norm.weight", lambda t: t[:64]), {"source-shape"}),
    (set_tensor("model.norm.weight", lambda t: t.half()), {"source-dtype"}),
    (set_tensor(f"{Q}.weight", lambda t: t[:64].contiguous()), {"scale-shape", "source-shape"}),
]


@pytest.mark.parametrize(("damage", "rules"), SOURCE_DAMAGES)
def test_departures_from_the_source(
    damage: Callable[[Path], None], rules: set[str], tmp_path: Path
) -> None:
    folder = copied(NVFP4, tmp_path)
    damage(folder)
    assert errors(folder, source=source_of(NVFP4)) == rules


def test_a_wider_dtype_with_the_same_values_is_a_warning(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    edit(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}))
    findings = audit(folder, source=source_of(NVFP4))
    assert [(f.rule, f.severity) for f in findings] == [("source-dtype", "warning")]
    edit(folder, lambda t: t["model.norm.weight"].add_(1e-6))
    assert errors(folder, source=source_of(NVFP4)) == {"source-dtype"}


def test_sidecars_are_the_sources(tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    source = tmp_path / "source"
    shutil.copytree(source_of(NVFP4), source)
    (source / "chat_template.jinja").write_text("{{ x }}")
    assert errors(folder, source=source) == {"sidecar-missing"}
    (folder / "chat_template.jinja").write_text("{{ y }}")
    assert errors(folder, source=source) == {"sidecar-bytes"}


def test_a_tied_head_is_not_missed_and_an_untied_one_is(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(source_of("llama_tied-fp8"), source)
    edit(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    folder = copied("llama_tied-fp8", tmp_path)
    assert errors(folder, source=source) == set()
    edit_json(folder / "config.json", lambda c: c.update(tie_word_embeddings=False))
    assert errors(folder, source=source) == {"source-missing"}


@pytest.mark.parametrize(
    "damage",
    [
        set_tensor(f"{Q}.weight", lambda t: t.flip(0).contiguous()),
        set_tensor(f"{Q}.weight_scale", lambda t: t[:, [7, 6, 5, 4, 3, 2, 1, 0]].contiguous()),
        set_tensor("model.layers.0.mlp.down_proj.weight_scale_2", lambda t: t * 1.5),
    ],
)
def test_deep_finds_wrong_values(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = copied(NVFP4, tmp_path)
    damage(folder)
    assert errors(folder, source=source_of(NVFP4)) == set()
    assert errors(folder, source=source_of(NVFP4), deep=True) == {"weight-error"}


@pytest.mark.parametrize("case", [NVFP4, MOE, "gpt_oss-fp8", "llama-fp8_pc_pt"])
def test_every_packed_module_is_compared(case: str) -> None:
    reports = compare_with_source(GOLDEN / case / "export", source_of(case))
    tensors = Checkpoint(GOLDEN / case / "export").tensors
    assert len(reports) == sum(name.endswith("weight_scale") for name in tensors)
    assert all(report.worst <= 1 for report in reports.values())
    assert all(0 < report.relative < 0.2 for report in reports.values())


@pytest.mark.parametrize("input_major", [False, True])
def test_stacked_sources_map_to_single_experts(input_major: bool, tmp_path: Path) -> None:
    """The same experts in one tensor each projection, as some checkpoints have them."""
    source = tmp_path / "source"
    shutil.copytree(source_of(MOE), source)

    def stack(tensors: Tensors) -> None:
        for layer in (0, 1):
            block = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{block}.{e}.{role}.weight") for e in range(8)])
                for role in ("gate_proj", "up_proj", "down_proj")
            )
            tensors[f"{block}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{block}.down_proj"] = down.contiguous()

    edit(source, stack)
    folder = copied(MOE, tmp_path)
    keys = [f"model.layers.{n}.mlp.experts.{x}_proj" for n in (0, 1) for x in ("gate_up", "down")]
    if input_major:
        for key in keys:
            set_tensor(key, lambda t: t.mT.contiguous())(source)
    assert audit(folder, source=source, deep=True) == []
    for key in keys:  # a wrong orientation must not pass: values as they were, and other shapes
        set_tensor(key, lambda t: t.reshape(len(t), t.shape[2], t.shape[1]))(source)
    assert "weight-error" in errors(folder, source=source, deep=True)
    edit(folder, lambda t: [t.pop(n) for n in list(t) if n.startswith(EXPERT)])
    assert errors(folder, source=source) == {"expert-missing", "source-missing"}


def _plan(folder: Path, source: Path) -> SimpleNamespace:
    outputs = [
        SimpleNamespace(name=name, dtype=info.dtype, shape=info.shape)
        for name, info in Checkpoint(folder).tensors.items()
    ]
    copies = [SimpleNamespace(source=name) for name in Checkpoint(source).tensors]
    return SimpleNamespace(outputs=outputs, copies=copies, matrices=[])


def test_a_run_is_held_against_its_plan(tmp_path: Path) -> None:
    folder, source = copied(NVFP4, tmp_path), source_of(NVFP4)
    plan = _plan(folder, source)
    audit_or_raise(folder, source=source, plan=plan)
    lost = plan.copies.pop()
    with pytest.raises(AuditError, match=rf"plan-accounting.*{lost.source}"):
        audit_or_raise(folder, source=source, plan=plan)
    plan.copies.append(lost)
    plan.outputs[0].shape = (1, 2, 3)
    plan.outputs[1].name = "another"
    with pytest.raises(AuditError) as raised:
        audit_or_raise(folder, source=source, plan=plan)
    assert str(raised.value).count("plan-outputs") == 3


def test_errors_are_listed_up_to_ten(tmp_path: Path) -> None:
    folder, source = copied(NVFP4, tmp_path), source_of(NVFP4)
    plan = _plan(folder, source)
    edit(folder, lambda t: [v.zero_() for n, v in t.items() if n.endswith("input_scale")])
    with pytest.raises(AuditError, match=r"(?s)in 14 places.*and 4 more") as raised:
        audit_or_raise(folder, source=source, plan=plan)
    assert str(raised.value).count("[scale-value]") == 10


def test_an_unreadable_source_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        audit(GOLDEN / NVFP4 / "export", source=tmp_path / "nowhere")
