"""How experts and batches are divided over ranks, and what is refused before any weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modelopt_lite import dry_run
from modelopt_lite.errors import RecipeError, SpecError
from modelopt_lite.models import get_spec
from modelopt_lite.models.specs import EPSpec, ModelSpec
from modelopt_lite.parallel.degrees import choose_degrees
from modelopt_lite.parallel.spec import adapt_config, check_plan, check_supported, whole_experts

MakeCheckpoint = Callable[..., Path]


@given(st.integers(1, 64), st.integers(1, 64))
def test_the_largest_degree_that_divides_both(world: int, experts: int) -> None:
    degrees = choose_degrees(world, experts)
    assert degrees.ep * degrees.edp == world
    dividing = [d for d in range(1, 65) if world % d == 0 and experts % d == 0]
    assert degrees.ep == max(dividing)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 8), st.integers(0, 20))
def test_every_expert_and_every_batch_has_its_rank(
    ep: int, edp: int, share: int, batches: int
) -> None:
    degrees, count = choose_degrees(ep * edp, ep * share, ep), ep * share
    written = [
        e for r in range(ep * edp) if degrees.writes(r) for e in degrees.experts_of(r, count)
    ]
    assert written == list(range(count))
    for rank in range(ep * edp):
        for expert in range(count):
            owner = degrees.owner(expert, count, rank)
            assert expert in degrees.experts_of(owner, count)
            assert owner // ep == rank // ep  # in the same group
    seen = sorted(b for r in range(ep * edp) for b in degrees.batches_of(r, batches))
    assert seen == list(range(batches))


@pytest.mark.parametrize(
    ("world", "experts", "ep", "words"),
    [
        (4, 8, 3, ["ep is 3", "ranks (4)", "8 experts", "1, 2, 4"]),
        (6, 4, 4, ["ep is 4", "1, 2"]),
        (4, 0, 2, ["ep is 2", "no routed experts", "it can be 1"]),
        (0, 8, None, ["world_size is 0"]),
        (4, 8, 0, ["ep is 0"]),
    ],
)
def test_other_degrees_are_refused(
    world: int, experts: int, ep: int | None, words: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        choose_degrees(world, experts, ep)
    assert all(word in str(caught.value) for word in words)


def test_a_dense_model_shares_batches_alone() -> None:
    assert choose_degrees(4, 0) == choose_degrees(4, 0, 1)
    assert choose_degrees(4, 0).edp == 4


# --- EPSpec


def spec_with(**fields: Any) -> ModelSpec:
    spec = get_spec("qwen3_moe")
    assert spec is not None
    return dataclasses.replace(spec, ep_spec=EPSpec(**fields))


@pytest.mark.parametrize(
    ("fields", "version", "words"),
    [
        ({"unsupported": "its router drops tokens"}, "5.14.1", ["its router drops tokens"]),
        ({"requires_transformers": "5.7"}, "5.6.2", ["5.7", "5.6.2"]),
        ({"requires_transformers": "5.10"}, "5.9.0", ["5.10"]),  # as versions, not as texts
        ({}, "4.57.6", ["needs transformers 5.6"]),
        ({"requires_transformers": "4.57"}, "5.5.0", ["needs transformers 5.6"]),
    ],
)
def test_what_the_spec_refuses(fields: dict[str, Any], version: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        check_supported(spec_with(**fields), "qwen3_moe", version)
    assert all(word in str(caught.value) for word in [*words, "ep=1"])


def test_what_the_spec_allows() -> None:
    check_supported(spec_with(requires_transformers="5.7"), "qwen3_moe", "5.7.0")
    check_supported(None, "unknown", "5.6")


class Config:
    """A config that may carry a plan, and another one."""

    def __init__(self, plan: dict[str, str] | None = None, text: Config | None = None) -> None:
        self.base_model_ep_plan = plan
        if text is not None:
            self.text_config = text


PLAN = {"layers.*.mlp.experts.gate_up_proj": "grouped_gemm"}


def adapted(config: Config, **fields: Any) -> Any:
    return adapt_config(config, spec_with(**fields), ckpt_path=Path("x"), trust_remote_code=True)


def test_a_stock_plan_wins() -> None:
    assert adapted(Config({"a": "b"}), base_model_ep_plan=PLAN).base_model_ep_plan == {"a": "b"}
    assert adapted(Config(), base_model_ep_plan=PLAN).base_model_ep_plan == PLAN


def test_the_plan_goes_on_the_config_that_carries_it() -> None:
    config = adapted(Config(text=Config()), base_model_ep_plan=PLAN, plan_config_attr="text_config")
    assert config.base_model_ep_plan is None
    assert config.text_config.base_model_ep_plan == PLAN
    with pytest.raises(SpecError, match="has no 'llm_config'"):
        adapted(Config(), plan_config_attr="llm_config")


def test_prepare_is_called_behind_the_fields() -> None:
    calls: list[Any] = []

    def prepare(config: Any, **given: Any) -> Any:
        calls.append((config.base_model_ep_plan, given))
        return Config({"made": "here"})

    config = adapted(Config(), base_model_ep_plan=PLAN, prepare=prepare)
    assert config.base_model_ep_plan == {"made": "here"}
    assert calls == [(PLAN, {"ckpt_path": Path("x"), "trust_remote_code": True})]


def test_parameters_that_no_plan_names_are_refused() -> None:
    model: Any = nn.Module()
    model.config = Config(PLAN)
    check_plan(model, None, ["model.layers.3.mlp.experts.gate_up_proj"])
    with pytest.raises(SpecError, match=r"'model\.layers\.3\.mlp\.experts\.down_proj'"):
        check_plan(model, None, ["model.layers.3.mlp.experts.down_proj"])
    model.config = Config()
    with pytest.raises(SpecError, match="plan of Module is missing"):
        check_plan(model, None, ["model.layers.3.mlp.experts.gate_up_proj"])


def test_a_prepared_plan_is_only_read() -> None:
    spec = spec_with(prepared_ep_plan=PLAN, prepare=lambda *a, **k: pytest.fail("called"))
    names = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.gate.weight"]
    assert whole_experts(spec, names) == names[:1]
    assert whole_experts(None, names) == []


# --- a plan of a run, without starting it


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_ranks_read_their_own_experts_and_the_rest(
    kind: str, checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint(kind, hidden_size=64)

    def plan(**options: Any) -> dict[str, Any]:
        return dry_run(
            source, export_dir=tmp_path / "x", recipe="fp8", calib_data=token_batches, **options
        )

    alone = plan()
    assert alone["parallel"] is None
    split = plan(world_size=2)["parallel"]
    assert (split["ep"], split["edp"]) == (2, 1)
    first, second = split["ranks"]
    [[[begin, middle]], [[again, end]]] = ([*r["experts"].values()] for r in (first, second))
    assert (begin, middle) == (0, again)
    assert end == 2 * middle
    # All experts are of one size: what one rank leaves out is what the other reads. The head, which
    # nothing depends on, is copied by the first.
    experts, head = 2 * (alone["bytes_to_read"] - first["bytes_read"]), 64 * 64 * 2
    assert first["bytes_read"] == alone["bytes_to_read"] - experts // 2
    assert second["bytes_read"] == first["bytes_read"] - head
    assert experts > alone["bytes_to_read"] / 8
    held = plan(world_size=4, ep=1)["parallel"]["ranks"]
    others = [alone["bytes_to_read"] - head] * 3
    assert [rank["bytes_read"] for rank in held] == [alone["bytes_to_read"], *others]
    assert first["host"] <= held[0]["host"]


def test_budgets_split_a_ranks_experts_further(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("qwen3_moe")
    options: dict[str, Any] = {
        "export_dir": tmp_path / "x",
        "recipe": "fp8",
        "calib_data": token_batches,
        "world_size": 2,
        "device_memory": "1GB",
    }
    assert dry_run(source, **options)["schedule"]["experts"] is None
    options["device_memory"] = 1
    refused = dry_run(source, **options)
    assert "device_memory is 1 " in refused["problems"][0]["message"]


def test_stacked_experts_are_read_in_rows(
    checkpoint: MakeCheckpoint, token_batches: list[torch.Tensor], tmp_path: Path
) -> None:
    source = checkpoint("gpt_oss")
    options: dict[str, Any] = {"recipe": "fp8", "calib_data": token_batches}
    ranks = dry_run(source, export_dir=tmp_path / "x", world_size=4, **options)["parallel"]["ranks"]
    # Two layers of four experts, with biases, in bfloat16; rank 0 reads all to export them, and the
    # head, which nothing depends on.
    experts, head = 2 * 4 * (32 * 64 + 64 + 32 * 32 + 32) * 2, 64 * 32 * 2
    read = [rank["bytes_read"] for rank in ranks]
    assert [read[0] - other for other in read] == [0, *[experts * 3 // 4 + head] * 3]
