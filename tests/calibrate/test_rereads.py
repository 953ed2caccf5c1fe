"""A plan says how often experts are read that come in a few at a time, and the run keeps to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_lite import dry_run, quantize_and_export
from modelopt_lite.budgets import Schedule, make_outlook
from modelopt_lite.job import Job, split_layers
from modelopt_lite.predict import Prediction

MakeCheckpoint = Callable[..., Path]
# Recipe and numerics -> how often each expert is read.
TIMES = {
    ("nvfp4", "exact"): 1,
    ("int8_smoothquant", "exact"): 5,
    ("nvfp4_awq_lite", "exact"): 6,
    ("nvfp4_awq_lite", "modelopt"): 5,
    ("nvfp4_awq_clip", "exact"): 5,
    ("nvfp4_awq_full", "exact"): 8,
    ("nvfp4_svdquant", "exact"): 7,
    ("nvfp4_w4a4_weight_local_hessian", "exact"): 5,
    ("int4_gptq", "exact"): 7,
}
# The first of those that share a scale of channels is read once more than the others.
SMOOTHING = ("int8_smoothquant", "nvfp4_awq_lite", "nvfp4_awq_full", "nvfp4_svdquant")
# With every expert seeing every token, one time more each; what runs a quantized layer cannot.
EVERY = [
    (*key, every) for key in TIMES for every in (False, True) if not (every and "gptq" in key[0])
]
WIDE = {"hidden_size": 128, "moe_intermediate_size": 128}


@pytest.mark.parametrize(("recipe", "numerics", "every"), EVERY)
@pytest.mark.parametrize("ahead", [1, 3])
def test_foretells_how_often_experts_are_read(
    recipe: str,
    numerics: Any,
    every: bool,
    ahead: int,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoint("qwen3_moe", **WIDE)
    jobs: list[Job] = []
    foretold: list[Prediction] = []

    def in_parts(job: Job, *args: Any, **options: Any) -> Schedule:
        split_layers(job.plan, job.model, 1)
        jobs.append(job)
        return Schedule(units=ahead * job.unit_bytes()[0], experts=1, overlapped=False)

    def outlook(job: Job, predicted: Prediction, *args: Any) -> Any:
        foretold.append(predicted)
        return make_outlook(job, predicted, *args)

    monkeypatch.setattr("modelopt_lite.request.make_schedule", in_parts)
    monkeypatch.setattr("modelopt_lite.api.make_outlook", outlook)
    report = quantize_and_export(
        source,
        export_dir=tmp_path / "out",
        recipe=recipe,
        numerics=numerics,
        calib_data=token_batches,
        on_bad_shape="skip",
        moe_calibrate_all_experts=every,
        progress=False,
    )
    reads, times = jobs[0].source.reads, TIMES[recipe, numerics] + every
    counts = {count for name, count in reads.items() if ".experts." in name}
    assert counts <= {times, times - (recipe in SMOOTHING)}
    assert max(counts) == times
    assert {count for name, count in reads.items() if ".experts." not in name} == {1}
    assert foretold[0].expert_reads == times
    assert foretold[0].bytes_read == report.bytes_read
    assert foretold[0].bytes_read_again == report.bytes_read - report.source_bytes


@pytest.mark.parametrize(
    ("recipe", "options", "experts"),
    [
        ("nvfp4_w4a4_weight_local_hessian", {"numerics": "exact"}, 1),
        ("nvfp4_w4a4_weight_local_hessian", {"numerics": "modelopt"}, None),
        ("int4_gptq", {"on_bad_shape": "skip"}, 1),
        ("int4_gptq", {"on_bad_shape": "skip", "moe_calibrate_all_experts": True}, None),
    ],
)
def test_a_second_run_may_need_all_experts_at_once(
    recipe: str, options: dict[str, Any], experts: int | None, checkpoint: MakeCheckpoint
) -> None:
    """Its inputs are rounded under a scale that all experts of a layer share, or it begins when all
    tokens have been through all experts."""
    source = checkpoint("qwen3_moe", **WIDE)

    def planned(memory: int) -> dict[str, Any]:
        return dry_run(
            source,
            recipe=recipe,
            **options,
            calib_data=[torch.ones(1, 8, dtype=torch.long)],
            device_memory=memory,
        )

    found = re.search(r"that can be met is ([\d,]+)", planned(1)["problems"][0]["message"])
    assert found is not None
    assert planned(int(found[1].replace(",", "")))["schedule"]["experts"] == experts
