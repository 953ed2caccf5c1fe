"""What a plan foretells: bytes exactly, memory from shapes; and budgets held against it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import bytes_of
from torch import Tensor

from modelopt_lite import dry_run, quantize_and_export
from modelopt_lite.budgets import Budgets, Schedule, make_schedule, read_budgets
from modelopt_lite.calibrate.observe import Site
from modelopt_lite.calibrate.statistics import Statistics
from modelopt_lite.errors import RecipeError
from modelopt_lite.job import Job, prepare
from modelopt_lite.offload.hostmemory import host_memory
from modelopt_lite.predict import Batch, Prediction, planned_batches, predict
from modelopt_lite.recipes import load_recipe
from modelopt_lite.report import CARD_FILE, OF_THE_RUN

MakeCheckpoint = Callable[..., Path]
CPU = torch.device("cpu")


def job_of(folder: Path, recipe: str = "fp8", **fields: Any) -> Job:
    return prepare(
        folder,
        load_recipe(recipe, **fields),
        model_type=None,
        numerics="exact",
        on_bad_shape="error",
        trust_remote_code=False,
        device="cpu",
    )


def foretell(job: Job, batches: list[Batch], *, budget: int | None) -> Prediction:
    return predict(job, job.layout(10**10), batches, budget=budget)


def budgets(**given: Any) -> Budgets:
    return read_budgets(given, CPU, Path.cwd())


# --- bytes


@pytest.mark.parametrize("kind", ["llama_tied", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_per_channel_per_token"])
def test_bytes_are_foretold_exactly(
    kind: str,
    recipe: str,
    checkpoint: MakeCheckpoint,
    with_tokenizer: Callable[[Path], Path],
    token_batches: list[Tensor],
    tmp_path: Path,
) -> None:
    folder, out = with_tokenizer(checkpoint(kind)), tmp_path / "out"
    foretold = foretell(job_of(folder, recipe), [(2, 16)], budget=None)
    report = quantize_and_export(
        folder, export_dir=out, recipe=recipe, calib_data=token_batches, progress=False
    )
    told = {*OF_THE_RUN, CARD_FILE}
    files = [path for path in out.rglob("*") if path.is_file() and path.name not in told]
    assert foretold.bytes_written == sum(path.stat().st_size for path in files)
    assert foretold.bytes_read == report.source_bytes
    assert report.predicted_memory_bytes > foretold.process["process"] / 2


# --- memory


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("llama", "nvfp4_awq_lite"),
        ("llama", "int8_smoothquant"),
        ("llama", "nvfp4_w4a4_weight_local_hessian"),
        ("qwen3_moe", "nvfp4_awq_lite"),
    ],
)
def test_statistics_of_searches(
    kind: str,
    recipe: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint(kind)
    shapes = [(len(batch), batch.shape[1]) for batch in token_batches]
    foretold = foretell(job_of(folder, recipe), shapes, budget=0).work["statistics of inputs"]
    kept, drop = [0], Statistics.drop

    def weigh(self: Statistics, sites: Iterable[Site]) -> None:
        kept.append(bytes_of(self))
        drop(self, sites)

    monkeypatch.setattr(Statistics, "drop", weigh)
    quantize_and_export(
        folder, export_dir=tmp_path / "out", recipe=recipe, calib_data=token_batches, progress=False
    )
    if kind == "llama":
        assert foretold == max(kept)
    else:  # how tokens are routed is not foretold
        assert max(kept) <= foretold <= 4 * max(kept)


def test_waiting_activations_grow_with_all_tokens_running_ones_with_a_batch(
    checkpoint: MakeCheckpoint,
) -> None:
    job = job_of(checkpoint("llama"))
    one, four, wide = (
        foretell(job, batches, budget=1).work
        for batches in ([(2, 16)], [(2, 16)] * 4, [(8, 16), (1, 16)])
    )
    hidden, width = 32, 64
    assert one["waiting activations"] == 2 * hidden * 2 * (2 * 16)
    assert four["waiting activations"] == 4 * one["waiting activations"]
    assert four["running activations"] == one["running activations"]
    assert one["running activations"] == 2 * 16 * 2 * max(2 * hidden + 3 * width, 8 * hidden)
    assert wide["running activations"] == 4 * one["running activations"]


def test_weights_are_those_of_two_units_at_the_least_and_of_all_at_most(
    checkpoint: MakeCheckpoint,
) -> None:
    job = job_of(checkpoint("llama", num_hidden_layers=6))
    store = job.store()
    sizes = {unit.name: store.bytes_of(unit) for unit in job.plan.units}
    layer = sizes["model.layers.0"]
    head = sizes.pop("lm_head")  # stays out: nothing depends on it
    least, some, everything = (
        foretell(job, [(1, 8)], budget=budget).work["weights"] for budget in (1, 4 * layer, None)
    )
    assert least == 2 * layer
    assert some == 4 * layer
    assert everything == sum(sizes.values())
    assert head > 0


def test_batches_of_a_plan() -> None:
    assert planned_batches(20, 512, 8) == [(8, 512), (8, 512), (4, 512)]
    assert planned_batches(8, 512, 8) == [(8, 512)]


# --- budgets


def test_sizes_and_fractions() -> None:
    total = host_memory()[1]
    assert budgets() == Budgets()
    assert budgets(host_memory="2GiB").host == budgets(host_memory=2**31).host == 2**31
    for half in ("50%", "50.0 %", "0.5", 0.5):
        assert budgets(host_memory=half).host == total // 2
    assert budgets(device_memory=1.0, disk_scratch="1KB") == Budgets(device=total, disk=1000)


def test_variables_stand_in_for_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOST_MEMORY", "3GB")
    monkeypatch.setenv("FT_DISK_SCRATCH", " ")
    assert budgets() == Budgets(host=3 * 10**9)
    assert budgets(host_memory="2GB") == Budgets(host=2 * 10**9)
    monkeypatch.setenv("FT_DEVICE_MEMORY", "much")
    with pytest.raises(RecipeError, match=r"FT_DEVICE_MEMORY.*'much'"):
        budgets()


@pytest.mark.parametrize("given", ["120%", 0.0, 1.5, "0%", "half", -1])
def test_no_size(given: Any) -> None:
    with pytest.raises(RecipeError, match=r"host_memory.*50%|host_memory.*100%"):
        budgets(host_memory=given)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelopt_lite.budgets.usable_cores", lambda: 2)


def test_the_smallest_budget_is_named_and_suffices(checkpoint: MakeCheckpoint) -> None:
    job = job_of(checkpoint("llama"))
    least = foretell(job, [(2, 16)], budget=1)

    def fixed(*, budget: int | None, waiting: int | None) -> Prediction:
        return least

    for name, need in (("host", least.host_peak), ("device", least.work_peak)):
        with pytest.raises(RecipeError, match=f"{name}_memory is {need - 1:,} .* {need:,} "):
            make_schedule(job, Budgets(**{name: need - 1}), fixed, stream=True)
        schedule = make_schedule(job, Budgets(**{name: need}), fixed, stream=True)
        assert schedule == Schedule(units=least.work["weights"])


def test_memory_to_spare_is_for_reading_ahead(checkpoint: MakeCheckpoint) -> None:
    job = job_of(checkpoint("llama"))
    least = foretell(job, [(2, 16)], budget=1)
    spare = 10**6
    schedule = make_schedule(
        job,
        Budgets(device=int((least.work_peak + spare) / 0.9) + 1),
        lambda **_: least,
        stream=True,
    )
    assert schedule.units == pytest.approx(least.work["weights"] + spare, abs=2)
    free, held = (
        make_schedule(job, Budgets(), lambda **_: least, stream=stream) for stream in (True, False)
    )
    assert free == Schedule(units=job.unit_bytes(layers=3)[1])
    assert held == Schedule()


def test_one_core_does_one_thing_after_another(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(checkpoint("llama"))
    least = foretell(job, [(2, 16)], budget=1)
    monkeypatch.setattr("modelopt_lite.budgets.usable_cores", lambda: 1)
    alone = make_schedule(job, Budgets(), lambda **_: least, stream=True)
    assert alone == Schedule(units=job.unit_bytes(layers=2)[1], overlapped=False)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "llama"])
def test_a_small_budget_sends_activations_to_disk_and_splits_layers(
    kind: str, checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    """The smallest budget that the error names suffices, and gives the same bytes."""
    folder = checkpoint(kind)
    options: dict[str, Any] = {"calib_data": token_batches, "recipe": "nvfp4"}
    problems = dry_run(folder, device_memory=1, **options)["problems"]
    [message] = [problem["message"] for problem in problems]
    smallest = int(message.split("that can be met is ")[1].split(" ")[0].replace(",", ""))
    small = dry_run(folder, device_memory=smallest, **options)
    assert small["problems"] == []
    assert small["schedule"]["waiting"] == 0
    assert small["schedule"]["experts"] == (None if kind == "llama" else 1)
    assert small["predicted"]["disk_scratch"] > 0
    largest = max(unit["bytes"] for unit in dry_run(folder, **options)["units"])
    assert (small["schedule"]["units"] < 2 * largest) or kind == "llama"
    exports = []
    for name, budget in (("a", None), ("b", smallest)):
        out = tmp_path / name
        quantize_and_export(folder, export_dir=out, device_memory=budget, progress=False, **options)
        exports.append((out / "model.safetensors").read_bytes())
    assert exports[0] == exports[1]


def test_activations_may_not_go_to_a_disk_without_budget(checkpoint: MakeCheckpoint) -> None:
    options: dict[str, Any] = {"calib_data": [torch.ones(2, 8, dtype=torch.long)] * 4}
    plans = [
        dry_run(checkpoint("llama"), device_memory=1, disk_scratch=scratch, **options)
        for scratch in (1, "1GB")
    ]
    asked = [
        int(plan["problems"][0]["message"].split("met is ")[1].split(" ")[0].replace(",", ""))
        for plan in plans
    ]
    assert asked[0] >= asked[1]


@pytest.mark.parametrize(
    ("kind", "recipe", "size", "named"),
    [
        ("llama", "nvfp4", {"vocab_size": 20_000}, r"model\.embed_tokens"),
        ("llama", "w4a16_nvfp4", {"vocab_size": 20_000}, r"model\.embed_tokens\.weight|lm_head"),
        ("gpt_oss", "mxfp4", {}, r"lm_head\.weight"),  # its experts come in by rows
    ],
)
def test_a_budget_below_one_tensor_names_it(
    kind: str, recipe: str, size: dict[str, int], named: str, checkpoint: MakeCheckpoint
) -> None:
    """What comes in whole cannot come in by rows: the run is refused, and says what is too big."""
    [problem] = dry_run(
        checkpoint(kind, **size),
        device_memory=1,
        recipe=recipe,
        calib_data=[torch.ones(1, 8, dtype=torch.long)],
    )["problems"]
    assert re.search(
        rf"smallest that can be met is [\d,]+ .*comes in whole is ({named}).* of [\d,]+\)",
        problem["message"],
    )
