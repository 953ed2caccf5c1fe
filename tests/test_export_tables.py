"""The tables of what exports of every type gave, and of bytes across releases."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import export_all
import export_tables
import exporting
import pytest
import small_models
import transformers
import versions
from export_tables import OK, REFUSED, Result

from modelopt_lite.models import get_spec

FP8, INT4 = "modelopt/fp8", "compressed-tensors/int4_weight_only"


def exported(release: str, digest: str = "aa bb", **exports: str) -> Result:
    made = {FP8: OK, **exports}
    return Result(
        exports=made,
        digests={key: digest for key, told in made.items() if told == OK},
        made_by="4.57.6",
        source="s",
        release=release,
        machine="torch, AVX, Python",
    )


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        (Result(exports={FP8: OK, INT4: f"{REFUSED}RecipeError: no form"}), False),
        (Result(exports={FP8: OK, INT4: "AuditError: broken"}), True),
        (Result("not in transformers 4.57.6", expected=True), False),
        (Result("no small model: TypeError"), True),
        (Result(export_tables.LATE, expected=True), False),
    ],
)
def test_what_counts_as_failed(result: Result, failed: bool) -> None:
    assert result.failed == failed
    assert export_tables.line("mixtral", result).startswith("FAILED") == failed
    assert ("failed: mixtral" in export_tables.summary({"mixtral": result})) == failed


def test_results_of_several_runs_make_one_table(tmp_path: Path) -> None:
    one = {"llama": exported("5.14.1"), "mixtral": exported("5.14.1")}
    export_tables.keep(one, tmp_path)
    more = exported("5.14.1", **{INT4: f"{REFUSED}RecipeError: no form"})
    later = {
        "llama": Result(exports={INT4: more.exports[INT4]}, release="5.14.1"),
        "mixtral": exported("4.57.6", **{INT4: "AuditError: broken"}),
        "afmoe": Result("not in transformers 4.57.6", expected=True, release="4.57.6"),
    }
    export_tables.keep(later, tmp_path)
    lines = (tmp_path / "models.md").read_text().splitlines()
    assert "| model type | 4.57.6 | 5.14.1 |" in lines  # by version, not by letters
    assert "| llama | . | `+.. ..r` |" in lines
    assert "| mixtral | `+.. ..x` | `+.. ...` |" in lines
    assert "| afmoe | - | . |" in lines
    assert f"- mixtral: AuditError: broken (4.57.6: {INT4})" in lines
    assert f"- llama: RecipeError: no form (5.14.1: {INT4})" in lines
    assert not any("not in transformers" in line for line in lines)


def test_types_that_were_not_begun_keep_what_is_known(tmp_path: Path) -> None:
    export_tables.keep({"llama": exported("5.14.1")}, tmp_path)
    export_tables.keep({"llama": Result(export_tables.LATE, expected=True)}, tmp_path)
    assert json.loads((tmp_path / "models.json").read_text())["5.14.1"]["llama"] == {FP8: OK}


def test_bytes_are_those_of_the_oldest_release_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "EXPLAINED", ())
    versions.record({"llama": exported("4.57.6"), "mixtral": exported("4.57.6")}, tmp_path)
    versions.record({"llama": exported("5.14.1"), "mixtral": exported("5.14.1", "cc bb")}, tmp_path)
    [known] = json.loads((tmp_path / "versions.json").read_text()).values()
    [found] = versions.differences(known)
    assert (found.model_type, found.export, found.release) == ("mixtral", FP8, "5.14.1")
    assert (found.oldest, found.what, found.why) == ("4.57.6", "tensors", "")
    lines = (tmp_path / "versions.md").read_text().splitlines()
    assert "| llama | 4.57.6 | = | = |" in lines
    assert "| mixtral | 4.57.6 | = | 1 |" in lines
    assert any(line.endswith("NOT EXPLAINED.") for line in lines)
    why = versions.Explained("mix.*", "tensors", r"5\..*", "It rounds later.")
    monkeypatch.setattr(versions, "EXPLAINED", (why,))
    assert found.why == "It rounds later."
    both = replace(found, what="tensors and configs")
    assert [both.why] == [""]  # of the configs nothing is said
    names = versions.Explained("mixtral", "configs", ".*", "It has other names.")
    monkeypatch.setattr(versions, "EXPLAINED", (names, why))
    assert both.why == "It rounds later. It has other names."


def test_every_difference_that_was_measured_is_explained() -> None:
    known = json.loads((export_tables.DOCS / "versions.json").read_text(encoding="utf-8"))
    [of_machine] = known.values()
    found = list(versions.differences(of_machine))
    assert not [d for d in found if not d.why]
    used = {e.why for e in versions.EXPLAINED if any(e.why in d.why for d in found)}
    assert used == {e.why for e in versions.EXPLAINED}  # none for what no longer differs
    page = (export_tables.DOCS / "versions.md").read_text(encoding="utf-8")
    assert page == versions.table(known)


def test_another_checkpoint_of_a_type_begins_anew(tmp_path: Path) -> None:
    versions.record({"llama": exported("4.57.6", "old one")}, tmp_path)
    other = exported("5.14.1", "new one")
    other.source = "t"
    versions.record({"llama": other}, tmp_path)
    [known] = json.loads((tmp_path / "versions.json").read_text()).values()
    assert known["llama"]["exports"][FP8] == {"new one": ["5.14.1"]}
    assert not list(versions.differences(known))


def test_a_release_that_is_run_again_is_counted_once(tmp_path: Path) -> None:
    for digest in ("aa bb", "cc bb"):
        versions.record({"llama": exported("5.14.1", digest)}, tmp_path)
    [known] = json.loads((tmp_path / "versions.json").read_text()).values()
    assert known["llama"]["exports"][FP8] == {"cc bb": ["5.14.1"]}


def test_a_release_that_does_not_read_a_checkpoint_is_told(tmp_path: Path) -> None:
    """Its own checkpoint is another; what the older ones gave stays."""
    versions.record({"aria": exported("4.57.6")}, tmp_path)
    own = exported("5.6.2", "other bytes")
    own.source, own.unread = "t", "it takes nothing for 'lm_head.weight' and 26 more"
    versions.record({"aria": own, "doge": Result("a defect", True)}, tmp_path)
    versions.record({"aria": exported("5.24.0")}, tmp_path)
    text = (tmp_path / "versions.md").read_text()
    assert "| aria | 4.57.6 | = | = |" in text
    assert (
        "- aria, which 4.57.6 wrote: it takes nothing for 'lm_head.weight' and 26 more (5.6.2)"
        in text
    )
    versions.record({"aria": exported("5.6.2")}, tmp_path)
    assert "| aria | 4.57.6 | = | = | = |" in (tmp_path / "versions.md").read_text()
    assert "26 more" not in (tmp_path / "versions.md").read_text()


def test_what_names_the_release_is_no_part_of_the_digest(tmp_path: Path) -> None:
    for name in ("config.json", "report.html", "modelopt_lite_report.json", "model.safetensors"):
        (tmp_path / name).write_text("5.6.2")
    before = exporting.digest(tmp_path)
    (tmp_path / "report.html").write_text("5.24.0")
    (tmp_path / "modelopt_lite_report.json").write_text("5.24.0")
    assert exporting.digest(tmp_path) == before
    (tmp_path / "config.json").write_text("5.24.0")
    assert exporting.digest(tmp_path).split()[0] == before.split()[0]
    assert exporting.digest(tmp_path) != before


def test_a_release_that_exports_no_more_is_forgotten(tmp_path: Path) -> None:
    for release in ("4.57.6", "5.6.2", "5.24.0"):
        versions.record({"dbrx": exported(release)}, tmp_path)
    defect = Result("a defect", True, release="5.6.2", machine=exported("5.6.2").machine)
    versions.record({"dbrx": defect}, tmp_path)
    [known] = json.loads((tmp_path / "versions.json").read_text()).values()
    assert known["dbrx"]["exports"] == {FP8: {"aa bb": ["4.57.6", "5.24.0"]}}


def test_a_checkpoint_that_the_release_does_not_load_gives_way_to_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = get_spec("llama")
    assert spec is not None
    assert small_models.save(spec, tmp_path / "llama") == ""
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    older = {**config, "transformers_version": "4.57.0", "num_hidden_layers": 9}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(older))
    exports = [("modelopt", "fp8")]
    result = exporting.examine("llama", exports, tmp_path)
    assert result.exports == {FP8: OK}
    assert "takes nothing for 'model.layers." in result.unread
    assert (tmp_path / f"llama@{transformers.__version__}" / "config.json").exists()
    # A fault of ours is no reason: transformers reads the checkpoint.
    (tmp_path / "llama" / "config.json").write_text(
        json.dumps({**config, "transformers_version": "4.57.0"})
    )
    monkeypatch.setattr(exporting, "export", lambda *_: "AuditError: broken")
    result = exporting.examine("llama", exports, tmp_path)
    assert result.failed
    assert result.unread == ""


@pytest.mark.parametrize(
    ("model_type", "release", "told"),
    [
        ("llama4", "5.24.1", "a defect of transformers ==5.24.*: "),
        ("llama4", "5.25.0", ""),
        ("dbrx", "5.6.2", "a defect of transformers >=5,<5.18: "),
        ("dbrx", "5.18.0", ""),
        ("dbrx", "4.57.6", ""),
    ],
)
def test_defects_are_of_some_releases(
    model_type: str, release: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = get_spec(model_type)
    assert spec is not None
    monkeypatch.setattr(transformers, "__version__", release)
    why = small_models.absent(spec)
    assert why.startswith(told)
    assert bool(why) == bool(told)


def test_types_with_experts_come_first_and_strangers_are_refused() -> None:
    assert export_all.chosen(["llama", "mixtral"]) == ["mixtral", "llama"]
    with pytest.raises(SystemExit, match="not registered: nothing"):
        export_all.chosen(["nothing", "llama"])


def test_a_type_that_crashes_or_hangs_is_its_own_result(tmp_path: Path) -> None:
    export_all.prepare()
    exports = [("modelopt", "fp8_2d_blockwise_weight_only")]
    options = {"start": 1e18, "minutes": 1, "checkpoints": None, "memory": 4.0, "timeout": 300.0}
    run = export_all.one("llama", exports, argparse.Namespace(**options), tmp_path)
    assert run.exports == {"modelopt/fp8_2d_blockwise_weight_only": OK}
    assert run.made_by == run.release
    small = argparse.Namespace(**{**options, "memory": 0.001})
    why = export_all.one("llama", exports, small, tmp_path).why
    # Whatever asks for memory first may tell of it, or may end the process.
    assert re.search("its process ended with|allocate memory|MemoryError", why), why
    quick = argparse.Namespace(**{**options, "timeout": 0.001})
    slow = export_all.one("llama", exports, quick, tmp_path)
    assert "took longer than" in slow.why
    assert slow.release == run.release
    late = argparse.Namespace(**{**options, "start": -1e18})
    assert export_all.one("llama", exports, late, tmp_path).why == export_tables.LATE
