"""The same bytes, however a run is scheduled."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaModel

from modelopt_lite import export_hf, quantize, quantize_and_export
from modelopt_lite.budgets import Schedule
from modelopt_lite.calibrate.algorithm import Choices, Each, Weight, here
from modelopt_lite.calibrate.awq import AWQLite
from modelopt_lite.export.exporter import Exporter
from modelopt_lite.job import Job, split_layers
from modelopt_lite.offload import Unit
from modelopt_lite.offload.prefetch import Prefetcher
from modelopt_lite.predict import predict
from modelopt_lite.report import CARD_FILE, OF_THE_RUN

MakeCheckpoint = Callable[..., Path]
KINDS = (
    *("llama", "llama_tied", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma3_text"),
    "llama4_text",  # it moves its tokens to the device of an embedding that is not there yet
)


def hashes(folder: Path, *without: str) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name not in OF_THE_RUN and path.name not in without
    }


def run(source: Path, out: Path, batches: Sequence[torch.Tensor], **options: Any) -> dict[str, str]:
    options = {"recipe": "nvfp4", "progress": False, **options}
    quantize_and_export(source, export_dir=out, calib_data=batches, **options)
    return hashes(out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_offloaded_is_resident(
    kind: str,
    recipe: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
) -> None:
    source = checkpoint(kind)
    offloaded = run(source, tmp_path / "a", token_batches, recipe=recipe)
    resident = run(source, tmp_path / "b", token_batches, recipe=recipe, offload="none")
    assert offloaded == resident


def test_twice_in_a_row(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe")
    first = run(source, tmp_path / "a", token_batches, kv_cache="fp8")
    assert first == run(source, tmp_path / "b", token_batches, kv_cache="fp8")


def test_layers_that_run_twice(
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their scales are of both times, though they are finished and written in between."""
    once = LlamaModel.forward

    def twice(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        first = once(self, input_ids=input_ids, **kwargs).last_hidden_state
        kwargs.pop("inputs_embeds", None)
        return once(self, inputs_embeds=first * 0.05, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", twice)
    source = checkpoint("llama")
    offloaded = run(source, tmp_path / "a", token_batches, recipe="fp8")
    assert offloaded == run(source, tmp_path / "b", token_batches, recipe="fp8", offload="none")


def test_what_entered_a_finished_layer_is_kept_as_numbers(
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of tensors, each an allocation among temporaries, split what larger ones need."""
    seen, export_rest = [], Exporter.export_rest

    def looked_at(self: Exporter, units: Sequence[Unit]) -> None:
        inputs = self.evidence.inputs
        seen.append((len(self.evidence.numbers), dict(inputs.amax)))
        export_rest(self, units)

    monkeypatch.setattr(Exporter, "export_rest", looked_at)
    run(checkpoint("qwen3_moe"), tmp_path / "out", token_batches)
    [(sites, kept)] = seen
    assert sites > 10
    assert kept == {}


def test_another_model_in_between(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    one, other = checkpoint("qwen3_moe"), checkpoint("mixtral")
    first = run(one, tmp_path / "a", token_batches)
    run(other, tmp_path / "b", token_batches)
    assert first == run(one, tmp_path / "c", token_batches)


def test_one_shard_and_many_hold_the_same_tensors(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("mixtral")
    run(source, tmp_path / "one", token_batches)
    many = run(source, tmp_path / "many", token_batches, max_shard_size="10KB")
    assert many == run(
        source, tmp_path / "again", token_batches, max_shard_size="10KB", offload="none"
    )
    assert sum(name.startswith("model-") for name in many) >= 5
    whole = load_file(tmp_path / "one" / "model.safetensors")
    shards: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "many").glob("*.safetensors"):
        shards |= load_file(path)
    assert whole.keys() == shards.keys()
    assert all(
        torch.equal(t.reshape(-1).view(torch.uint8), shards[name].reshape(-1).view(torch.uint8))
        for name, t in whole.items()
    )


def test_source_in_shards_gives_the_same_export(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    import transformers

    source = checkpoint("qwen3_moe")
    split = tmp_path / "split"
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(split, max_shard_size="20KB")
    (split / "config.json").write_bytes((source / "config.json").read_bytes())
    assert len(list(split.glob("*.safetensors"))) > 3
    for folder, out in ((source, "a"), (split, "b")):
        run(folder, tmp_path / out, token_batches)
    # The card names the folder of the source.
    assert hashes(tmp_path / "a", CARD_FILE) == hashes(tmp_path / "b", CARD_FILE)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_model_in_memory_gives_the_same_bytes(
    kind: str, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    import transformers

    source = checkpoint(kind)
    kv_cache = "fp8" if kind != "gpt_oss" else None
    run(source, tmp_path / "a", token_batches, kv_cache=kv_cache)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    before = {name: p.clone() for name, p in model.state_dict().items()}

    def loop(m: Any) -> None:
        for batch in token_batches:
            m(batch)

    quantize(model, "nvfp4", loop, kv_cache=kv_cache)
    export_hf(model, tmp_path / "b", source=source)
    # The card tells who calibrated.
    assert hashes(tmp_path / "a", CARD_FILE) == hashes(tmp_path / "b", CARD_FILE)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def schedule(monkeypatch: pytest.MonkeyPatch, make: Callable[[Job], Schedule]) -> None:
    """Have runs follow a schedule of the test's own."""
    monkeypatch.setattr(
        "modelopt_lite.request.make_schedule", lambda job, *args, **options: make(job)
    )


def in_parts(size: int) -> Callable[[Job], Schedule]:
    def split(job: Job) -> Schedule:
        split_layers(job.plan, job.model, size)
        return Schedule(units=job.unit_bytes()[1])

    return split


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_quantizing_beside_computing(
    kind: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bytes as one after the other, and no more units in memory than was foretold."""
    source = checkpoint(kind)
    schedule(
        monkeypatch,
        lambda job: Schedule(units=job.unit_bytes()[1], overlapped=False),
    )
    apart = run(source, tmp_path / "a", token_batches, offload="none")
    peaks: list[tuple[int, int]] = []

    class Watched(Prefetcher):
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            peaks.append((self.peak, limits[-1]))

    limits: list[int] = []

    def at_least(job: Job) -> Schedule:
        units = job.unit_bytes()[0]
        layout = job.layout(10**9)
        shapes = [(len(batch), batch.shape[1]) for batch in token_batches]
        limits.append(int(predict(job, layout, shapes, budget=units).work["weights"]))
        return Schedule(units=units)

    monkeypatch.setattr("modelopt_lite.offload.stream.Prefetcher", Watched)
    schedule(monkeypatch, at_least)
    assert run(source, tmp_path / "b", token_batches) == apart
    assert [peak <= limit for peak, limit in peaks] == [True]


MOE_KINDS = ("qwen3_moe", "mixtral", "deepseek_v3")


@pytest.mark.parametrize("kind", [*MOE_KINDS, "llama", "gpt_oss"])
@pytest.mark.parametrize("units", [0, 1, 2, 5])
def test_any_budget(
    kind: str,
    units: int,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget of no byte, one unit, two and five of them."""
    source = checkpoint(kind)
    whole = run(source, tmp_path / "a", token_batches, kv_cache=None, offload="none")
    schedule(monkeypatch, lambda job: Schedule(units=units * job.unit_bytes()[0]))
    assert run(source, tmp_path / "b", token_batches, kv_cache=None) == whole


@pytest.mark.parametrize("kind", MOE_KINDS)
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_experts_in_parts(
    kind: str,
    recipe: str,
    size: int,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoint(kind)
    whole = run(source, tmp_path / "a", token_batches, recipe=recipe, offload="none")
    parts: list[Unit] = []

    def split(job: Job) -> Schedule:
        split_layers(job.plan, job.model, size)
        parts.extend(unit for unit in job.plan.units if unit.parent)
        return Schedule(units=job.unit_bytes()[1])

    schedule(monkeypatch, split)
    seen: list[str] = []
    report = quantize_and_export(
        source,
        export_dir=tmp_path / "b",
        calib_data=token_batches,
        recipe=recipe,
        progress=lambda phase, done, total: seen.append(phase),
    )
    assert hashes(tmp_path / "b") == whole
    layers = {part.parent for part in parts}
    assert len(parts) >= (len(layers) if size > 3 else 2 * len(layers)) > 0
    assert all(seen.count(f"unit {part.name}") == 1 for part in parts)
    assert report.bytes_read <= report.source_bytes


def test_interrupted_between_parts(
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoint("qwen3_moe")
    whole = run(source, tmp_path / "a", token_batches, offload="none")
    schedule(monkeypatch, in_parts(1))

    def stop(phase: str, done: int, total: int) -> None:
        if "layers.1." in phase and "[1:2]" in phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="to go on"):
        run(source, tmp_path / "b", token_batches, progress=stop)
    assert run(source, tmp_path / "b", token_batches) == whole


def test_every_expert_sees_every_token_in_parts(
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoint("qwen3_moe")
    whole = run(source, tmp_path / "a", token_batches, moe_calibrate_all_experts=True)
    schedule(monkeypatch, in_parts(3))
    parts = run(source, tmp_path / "b", token_batches, moe_calibrate_all_experts=True)
    assert parts == whole


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe"])
def test_what_shares_a_scale_is_summed_in_one_order(
    kind: str,
    checkpoint: MakeCheckpoint,
    token_batches: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shared experts lie in the layer, the others in units of their own: sums would differ."""
    source = checkpoint(kind, hidden_size=128, moe_intermediate_size=128)
    choose, orders = AWQLite.choose, []

    def noted(self: AWQLite, weights: Sequence[Weight], each: Each = here) -> Choices:
        order.append([weight.key for weight in weights])
        return choose(self, weights, each)

    monkeypatch.setattr(AWQLite, "choose", noted)
    for name, size in (("whole", None), ("parts", 1)):
        if size is not None:
            schedule(monkeypatch, in_parts(size))
        order: list[list[tuple[str, int | None]]] = []
        options: dict[str, Any] = {"recipe": "int4_awq", "on_bad_shape": "skip"}
        quantize_and_export(
            source, export_dir=tmp_path / name, calib_data=token_batches, progress=False, **options
        )
        orders.append(order)
    assert any(len(keys) > 4 for keys in orders[0])
    assert sorted(orders[0]) == sorted(orders[1])
