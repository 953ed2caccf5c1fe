"""Plans of models of 1e12 parameters in small: from headers alone, with work in proportion."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from packaging.version import Version
from synthetic import DEEPSEEK_V3, make_sparse_deepseek

from modelopt_lite.job import Job, prepare
from modelopt_lite.recipes import load_recipe

transformers = pytest.importorskip("transformers")
DENSE, MOE = 1, 3
WIDE, NARROW, HIDDEN = 18432, 2048, 7168
ATTENTION = 1536 * 7168 + 128 * 192 * 1536 + 576 * 7168 + 128 * 256 * 512 + 7168 * 128 * 128


def job_of(folder: Path, experts: int) -> Job:
    """Plan a model of four layers, of full width, whose weights are holes in sparse files."""
    make_sparse_deepseek(
        folder,
        DEEPSEEK_V3,
        first_k_dense_replace=DENSE,
        num_hidden_layers=DENSE + MOE,
        n_routed_experts=experts,
    )
    return prepare(
        folder,
        load_recipe("nvfp4"),
        model_type=None,
        numerics="exact",
        on_bad_shape="error",
        trust_remote_code=False,
        device="cpu",
    )


def test_a_plan_reads_headers_alone(tmp_path: Path) -> None:
    job = job_of(tmp_path / "source", 16)
    layout = job.layout(10**10)
    matrices = {m.name: m for m in job.plan.matrices}
    assert job.source.bytes_read == 0
    assert sum(file.stat().st_blocks * 512 for file in job.folder.iterdir()) < 2**20
    assert len(matrices) == 5 * (DENSE + MOE) + 3 * DENSE + 3 * (16 + 1) * MOE
    weights = (DENSE + MOE) * ATTENTION + 3 * HIDDEN * (DENSE * WIDE + MOE * 17 * NARROW)
    assert sum(m.shape[0] * m.shape[1] for m in matrices.values()) == weights
    assert sum(o.name.endswith(".weight_scale_2") for o in job.plan.outputs) == len(matrices)
    outputs = [info for file in layout.parts[""].files for info in file.tensors]
    packed = [o for o in outputs if o.name.removesuffix(".weight") in matrices]
    assert sum(o.nbytes for o in packed if o.name.endswith(".weight")) == weights // 2
    assert layout.total_size == sum(o.nbytes for o in outputs)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5"), reason="before 5 an expert is three modules"
)
def test_the_work_of_a_plan_grows_with_the_number_of_tensors(tmp_path: Path) -> None:
    """Counted in lines of this package that ran: the same in each run, on every machine."""
    job_of(tmp_path / "first", 16)  # imports, and caches that are filled once
    few, more, most = (_lines_run(job_of, tmp_path / str(n), n) for n in (16, 48, 80))
    assert most - more == pytest.approx(more - few, rel=0.02)


def _lines_run(work: Callable[..., Any], *arguments: Any) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if "modelopt_lite" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(*arguments)
    finally:
        sys.settrace(before)
    return count
