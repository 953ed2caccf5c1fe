"""Scores by divergence against the whole model with one group rounded, and by any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from modelopt_lite import quantize_and_export
from modelopt_lite.auto.kl import kl_scores
from modelopt_lite.auto.outlook import SearchSchedule
from modelopt_lite.auto.search import Search
from modelopt_lite.auto.settle import prepare_search
from modelopt_lite.auto.variant_log import VariantLog
from modelopt_lite.build import eager_experts
from modelopt_lite.checkpoint.dequant import DequantizedSource, open_source
from modelopt_lite.errors import SpecError
from modelopt_lite.formats.linear import FORMATS
from modelopt_lite.recipes import Recipe
from modelopt_lite.recipes.auto import AutoQuantize
from modelopt_lite.request import Options

MakeCheckpoint = Callable[..., Path]


def search_of(source: Path) -> Search:
    auto = AutoQuantize(formats=("nvfp4", "fp8"), effective_bits=6.0, method="kl")
    recipe = Recipe(name="auto", weights="auto", auto_quantize=auto)
    return prepare_search(source, Options(progress=False), recipe)


def scores_of(
    search: Search, batches: list[Tensor], scratch: Path, schedule: SearchSchedule
) -> dict[str, dict[str, float]]:
    with eager_experts(search.job.model):
        return kl_scores(
            search.job,
            search.space,
            batches,
            schedule=schedule,
            scratch=scratch,
            progress=lambda phase, done, total: None,
        )


@contextmanager
def rounded(model: Any, names: Any, members: list[Any], export: Any, fmt: str) -> Iterator[None]:
    """The model with some matrices as an export has them, and their inputs rounded."""
    linear = functional.linear
    before: dict[str, Tensor] = {}
    scales: dict[tuple[int, int], Tensor] = {}
    for m in members:
        entry, region = names.place(m.source)
        parameter = model.get_parameter(entry)
        before.setdefault(entry, parameter.clone())
        own = parameter[region] if region else parameter
        own.copy_(export.read(f"{m.name}.weight"))
        scale = torch.tensor(export.input_scales[m.name])
        scales[own.untyped_storage().data_ptr(), first_expert(own, parameter)] = scale

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        base = weight._base if weight._base is not None else weight
        key = weight.untyped_storage().data_ptr(), first_expert(weight, base)
        if key in scales and base.data_ptr() in starts:
            x = FORMATS[fmt].fake_quantize_input(x, scales[key])
        return linear(x, weight, bias)

    starts = {model.get_parameter(entry).data_ptr() for entry in before}
    functional.linear = rounding  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.linear = linear
        for entry, value in before.items():
            model.get_parameter(entry).copy_(value)


def first_expert(weight: Tensor, base: Tensor) -> int:
    """Where a matrix lies, by the memory of the experts before it."""
    size = base[0].nbytes if base.ndim == 3 else base.nbytes
    return base.data_ptr() + (weight.data_ptr() - base.data_ptr()) // size


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_scores_are_those_of_the_whole_model(
    kind: str, checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    source = checkpoint(kind)
    search = search_of(source)
    units = search.job.unit_bytes()
    schedules = (SearchSchedule(), SearchSchedule(units=units[0], waiting=0, kept=0))
    scores, again = (scores_of(search_of(source), token_batches, tmp_path, s) for s in schedules)
    assert scores == again
    store, names, model = search.job.store(), search.job.plan.names, search.job.model
    for unit in search.job.plan.units:
        store.attach(store.load(unit))

    def logits() -> list[Tensor]:
        made = [model(input_ids=ids, use_cache=False).logits.double() for ids in token_batches]
        return [torch.log_softmax(part, -1) for part in made]

    with eager_experts(model):
        exact = logits()
        for fmt in ("nvfp4", "fp8"):
            out = tmp_path / fmt
            quantize_and_export(
                source, export_dir=out, recipe=fmt, calib_data=token_batches, progress=False
            )
            export = open_source(out)
            assert isinstance(export, DequantizedSource)
            for group in search.space.groups:
                mine = [m for m in search.job.plan.matrices if m.name in group.members]
                with rounded(model, names, mine, export, fmt):
                    made = logits()
                parts = [(p.exp() * (p - q)).sum() for p, q in zip(exact, made, strict=True)]
                wanted = float(torch.stack(parts).sum())
                assert scores[group.name][fmt] == pytest.approx(wanted, rel=1e-9)


def test_reads_are_as_planned(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    search = search_of(checkpoint("qwen3_moe"))
    scores_of(search, token_batches, tmp_path, SearchSchedule(units=search.job.unit_bytes()[1]))
    assert search.job.source.bytes_read == search.describe()["bytes_to_read"]


def test_models_that_compute_between_layers_are_refused(
    checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    search = search_of(checkpoint("llama"))
    second = search.job.model.model.layers[1]
    forward = second.__call__

    class Doubling(type(second)):  # type: ignore[misc]
        def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(hidden * 2, *args, **kwargs)

    second.__class__ = Doubling
    assert forward
    with pytest.raises(SpecError, match="use method: gradient"):
        scores_of(search, token_batches, tmp_path, SearchSchedule())


class KilledError(Exception):
    """Stands for the end of a process."""


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_search_goes_on_behind_the_last_layer_noted(
    after: int, checkpoint: MakeCheckpoint, token_batches: list[Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe", num_hidden_layers=3)
    whole = search_of(source)
    wanted = scores_of(whole, token_batches, tmp_path, SearchSchedule())
    layers: list[str] = []

    def killed(phase: str, done: int, total: int) -> None:
        if ".layers." in phase:
            layers.append(phase)
            if len(layers) == after:
                raise KilledError

    for progress in (killed, lambda phase, done, total: layers.append(phase)):
        search = search_of(source)
        job = search.job
        log = VariantLog(tmp_path / "journal", {"of": "this"}, len(token_batches), job.device)
        with eager_experts(job.model), suppress(KilledError):
            scores = kl_scores(
                job,
                search.space,
                token_batches,
                schedule=SearchSchedule(units=job.unit_bytes()[0], waiting=0, kept=0),
                scratch=tmp_path,
                progress=progress,
                log=log,
            )
    assert log.done == [f"model.layers.{index}" for index in range(after)]
    assert scores == wanted
    assert sum(".layers." in phase for phase in layers) == 3  # none ran twice
    assert len(list((tmp_path / "journal").glob("*.bin"))) == 1
    sizes = {name: info.nbytes for name, info in job.source.tensors.items()}
    layer = sum(size for name, size in sizes.items() if ".layers." in name) // 3
    assert whole.job.source.bytes_read - job.source.bytes_read == after * layer


def test_a_search_killed_by_divergence_is_resumed_by_the_api(
    checkpoint: MakeCheckpoint,
    token_batches: list[Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, recipe = checkpoint("llama"), tmp_path / "auto.yaml"
    recipe.write_text("auto_quantize: {formats: [nvfp4, fp8], effective_bits: 6.0, method: kl}\n")
    finish = VariantLog.finish

    def killed(self: VariantLog, layer: str, became: Any) -> None:
        finish(self, layer, became)
        raise KilledError

    options: dict[str, Any] = {"recipe": recipe, "calib_data": token_batches, "progress": False}
    monkeypatch.setattr(VariantLog, "finish", killed)
    with pytest.raises(KilledError):
        quantize_and_export(source, export_dir=tmp_path / "out", **options)
    monkeypatch.setattr(VariantLog, "finish", finish)
    folder = tmp_path / "out-search"
    [journal] = folder.glob("*.journal")
    quantize_and_export(source, export_dir=tmp_path / "out", **options)
    assert not journal.exists()
    quantize_and_export(source, export_dir=tmp_path / "anew", resume=False, **options)
    [one], [other] = folder.glob("*.json"), (tmp_path / "anew-search").glob("*.json")
    assert one.read_text() == other.read_text()
