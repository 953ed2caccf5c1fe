"""The table of `examples/real_model.py`, which needs no model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from example import load_example

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def real_model() -> ModuleType:
    return load_example("real_model")


def test_the_table_of_the_readme_is_read_as_it_was_written(real_model: ModuleType) -> None:
    section = README.read_text(encoding="utf-8")
    section = section.partition(real_model.BEGIN)[2].partition(real_model.END)[0]
    cells = real_model.read_table(section)
    assert (real_model.SMOLLM2, "nvfp4") in cells
    assert real_model.table(cells) in section


def test_rows_that_were_not_measured_stay(
    real_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled, smollm2 = real_model.BUNDLED, real_model.SMOLLM2
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{real_model.BEGIN}\n{real_model.END}\nafter\n")
    monkeypatch.setattr(real_model, "ROOT", tmp_path)
    real_model.write_readme({(smollm2, "nvfp4"): ["5.00", "1.000", "0.5000"]}, 100)
    real_model.write_readme({(bundled, "nvfp4"): ["4.50", "2.000", "0.2500"]}, 100)
    real_model.write_readme({(bundled, "fp8"): ["refused"] * 3}, 100)
    section = readme.read_text()
    assert section.startswith("before\n")
    assert section.endswith("\nafter\n")
    assert "| `nvfp4` | 4.50 | 2.000 | 0.2500 | 5.00 | 1.000 | 0.5000 |" in section
    assert "| `fp8` | refused | refused | refused | - | - | - |" in section
