"""Scores by gradient against ordinary autograd on the whole model, and the same by any schedule.

Shape suffixes: N rows of inputs, R rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from modelopt_lite import quantize_and_export
from modelopt_lite.auto import gradient
from modelopt_lite.auto.gradient import gradient_scores
from modelopt_lite.auto.outlook import SearchSchedule
from modelopt_lite.auto.resume import SearchLog
from modelopt_lite.auto.search import Search
from modelopt_lite.auto.settle import prepare_search
from modelopt_lite.auto.space import Scores
from modelopt_lite.build import eager_experts
from modelopt_lite.calibrate.observe import InputWatch
from modelopt_lite.checkpoint.dequant import DequantizedSource, open_source
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.job import Job
from modelopt_lite.recipes import Recipe
from modelopt_lite.recipes.auto import AutoQuantize
from modelopt_lite.request import Options

MakeCheckpoint = Callable[..., Path]
FORMATS_TRIED = ("nvfp4", "fp8")
KINDS = ("llama", "deepseek_v3", "gpt_oss", "gemma3_text", "qwen2_moe")


def search_of(source: Path, formats: Sequence[str] = FORMATS_TRIED) -> Search:
    auto = AutoQuantize(formats=tuple(formats), effective_bits=6.0)
    recipe = Recipe(name="auto", weights="auto", auto_quantize=auto)
    return prepare_search(source, Options(progress=False), recipe)


def scores_of(
    search: Search,
    batches: Sequence[Tensor],
    scratch: Path,
    schedule: SearchSchedule | None = None,
) -> Scores:
    job = search.job
    schedule = schedule or SearchSchedule(units=job.unit_bytes()[1])
    with eager_experts(job.model):
        return gradient_scores(
            job,
            search.space,
            batches,
            schedule=schedule,
            scratch=scratch,
            progress=lambda phase, done, total: None,
        )


def whole_model(job: Job) -> Any:
    """The model with all of its weights."""
    store = job.store()
    for unit in job.plan.units:
        store.attach(store.load(unit))
    return job.model


class Products:
    """Every ``functional.linear`` of a model that runs: its input, weight and output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []
        linear = functional.linear

        def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y = linear(x, weight, bias)
            if y.requires_grad:
                y.retain_grad()
                self.seen.append((x.detach(), weight, y))
            return y

        monkeypatch.setattr(functional, "linear", noted)


def summed_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits.float()
    targets = ids[:, 1:].flatten()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")


def ordinary_scores(
    search: Search,
    source: Path,
    batches: Sequence[Tensor],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Scores:
    """The same from the whole model, and weights and scales of exports in each format."""
    exports: dict[str, DequantizedSource] = {}
    for fmt in FORMATS_TRIED:
        out = folder / fmt
        quantize_and_export(
            source, export_dir=out, recipe=fmt, calib_data=list(batches), progress=False
        )
        opened = open_source(out)
        assert isinstance(opened, DequantizedSource)
        exports[fmt] = opened
    model = whole_model(search.job)
    names, groups = search.job.plan.names, search.space.group_of()
    own = open_source(source)
    rows_of = {
        (entry, row): m
        for m in search.job.plan.matrices
        for entry, row in rows_in_model(m, names, model)
    }
    entries = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    sums = {name: dict.fromkeys(FORMATS_TRIED, 0.0) for name in groups.values()}
    products = Products(monkeypatch)
    with eager_experts(model), search.job.products():
        for ids in batches:
            products.seen.clear()
            embedded = model.get_input_embeddings().weight
            embedded.requires_grad_()
            summed_loss(model, ids).backward()
            for x, weight, y in products.seen:
                base = weight._base if weight._base is not None else weight
                entry = entries.get(base.data_ptr())
                start = (weight.data_ptr() - base.data_ptr()) // weight[0].nbytes
                add_scores(sums, groups, exports, own, rows_of, entry, start, x, y)
    monkeypatch.undo()
    return sums


def rows_in_model(m: Any, names: Any, model: Any) -> list[tuple[str, int]]:
    """The first row that a matrix fills of a parameter, all axes but the last one flattened."""
    entry, region = names.place(m.source)
    parameter = model.get_parameter(entry)
    rows = torch.arange(parameter.numel() // parameter.shape[-1]).view(parameter.shape[:-1])
    own = rows[region[:2]] if region else rows
    own = own[m.region] if m.region else own
    return [(entry, int(own.flatten()[0]))]


def add_scores(
    sums: Scores,
    groups: dict[str, str],
    exports: dict[str, DequantizedSource],
    own: Any,
    rows_of: dict[tuple[str, int], Any],
    entry: str | None,
    start: int,
    x: Tensor,
    y: Tensor,
) -> None:
    x_NK, g_NR = x.reshape(-1, x.shape[-1]), y.grad
    assert g_NR is not None
    g_NR = g_NR.reshape(len(x_NK), -1)
    at = 0
    while entry is not None and at < g_NR.shape[1] and (m := rows_of.get((entry, start + at))):
        count = m.shape[0]
        g = g_NR[:, at : at + count].double()
        exact = functional.linear(x_NK, own.read(m.source)).double()
        for fmt, export in exports.items():
            scale = torch.tensor(export.input_scales[m.name])
            rounded = FORMATS[fmt].fake_quantize_input(x_NK, scale)
            made = functional.linear(rounded, export.read(f"{m.name}.weight")).double()
            sums[groups[m.name]][fmt] += float(((made - exact) * g).square().sum())
        at += count


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_scores_are_those_of_ordinary_autograd(
    kind: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoint(kind)
    scores = scores_of(search_of(source), token_batches, tmp_path)
    wanted = ordinary_scores(search_of(source), source, token_batches, tmp_path, monkeypatch)
    assert scores.keys() == wanted.keys()
    for group, own in scores.items():
        assert own == pytest.approx(wanted[group], rel=1e-5)
        assert own["nvfp4"] > own["fp8"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_ordinary_autograd(
    kind: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, wherever a score is taken."""
    source, seen = checkpoint(kind), []

    def note(self: Any, parts: Any, site: Any, x: Tensor, g: Tensor) -> None:
        seen.append(sorted(g.flatten().tolist()))

    monkeypatch.setattr(gradient._Scorer, "_score", note)
    monkeypatch.setattr(gradient._Scorer, "scores", lambda self: {})
    scores_of(search_of(source), token_batches, tmp_path)
    monkeypatch.undo()
    wanted = []
    job = search_of(source).job
    model = whole_model(job)
    made: list[Tensor] = []

    def note_product(site: Any, x: Tensor, changed: Tensor, y: Tensor, batched: bool) -> Tensor:
        made.append(y)
        return y

    watch = InputWatch(lambda site, x, batched: x, note_product)
    watch.watch({n: p for n, p in model.named_parameters() if searched(n)})
    with eager_experts(model), job.products():
        for ids in token_batches:
            model.get_input_embeddings().weight.requires_grad_()
            with watch:
                loss = summed_loss(model, ids)
            for y in made:
                y.retain_grad()
            loss.backward()
            wanted += [sorted(y.grad.flatten().tolist()) for y in made if y.grad is not None]
            made.clear()
    assert len(seen) == len(wanted)
    assert sorted(seen) == sorted(wanted)


def searched(name: str) -> bool:
    inside = ".layers." in name and "norm" not in name and "bias" not in name
    return inside and not name.endswith(("router.weight", "mlp.gate.weight", "_gate.weight"))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_same_scores_by_any_schedule(kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint(kind)
    generator = torch.Generator().manual_seed(1)  # hidden states large enough to go to disk
    batches = [torch.randint(3, 64, (8, 128), generator=generator) for _ in range(2)]
    units = search_of(source).job.unit_bytes()
    schedules = (
        SearchSchedule(),
        SearchSchedule(units=units[0], waiting=0, kept=0),
        SearchSchedule(units=units[1], waiting=100_000, kept=200_000),
    )
    found = [scores_of(search_of(source), batches, tmp_path, s) for s in schedules]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama_tied"])
def test_layers_are_read_twice(
    kind: str, checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    search = search_of(checkpoint(kind))
    scores_of(search, token_batches, tmp_path)
    assert search.job.source.bytes_read == search.describe()["bytes_to_read"]


class KilledError(Exception):
    """Stands for the end of a process."""


@pytest.mark.parametrize("after", [1, 3])
def test_a_search_goes_on_where_it_was_killed(
    after: int, checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe", num_hidden_layers=3)
    whole = search_of(source)
    wanted = scores_of(whole, token_batches, tmp_path)

    def killed(phase: str, done: int, total: int) -> None:
        if phase.startswith("backward") and done == total - 3 + after:
            raise KilledError

    for progress in (killed, lambda phase, done, total: None):
        search = search_of(source)
        job, log = search.job, SearchLog(tmp_path / "journal", {"of": "this"})
        with eager_experts(job.model), suppress(KilledError):
            scores = gradient_scores(
                job,
                search.space,
                token_batches,
                schedule=SearchSchedule(units=job.unit_bytes()[0], waiting=0, kept=0),
                scratch=tmp_path,
                progress=progress,
                log=log,
            )
    assert len(log.done) == after
    assert scores == wanted
    sizes = {name: info.nbytes for name, info in job.source.tensors.items()}
    layer = sum(size for name, size in sizes.items() if ".layers." in name) // 3
    behind = sizes["model.norm.weight"] + sizes["lm_head.weight"]
    saved = whole.job.source.bytes_read - job.source.bytes_read
    assert 0 <= saved - 2 * after * layer <= behind  # which may have been read ahead
