"""Fused experts that run in groups give the bits of the whole block, and read no other slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.build import eager_experts
from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.expert_groups import grouped_experts, sliced_parameters

FUSED = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "jamba")
GROUPINGS = ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2], [3]], [[0], [1], [2], [3]])


class Store:
    """Keeps the experts of a module; in the module itself they are NaN."""

    def __init__(self, module: nn.Module) -> None:
        parameters = sliced_parameters(module)
        self.values = {name: p.data.clone() for name, p in parameters.items()}
        self.asked: list[list[int]] = []
        for parameter in parameters.values():
            parameter.data.fill_(torch.nan)

    @contextmanager
    def bring_in(self, group: Sequence[int]) -> Iterator[Mapping[str, Tensor]]:
        self.asked.append(list(group))
        slices = {name: value[list(group)] for name, value in self.values.items()}
        yield slices
        for value in slices.values():
            value.fill_(torch.nan)


def fused_in(model: nn.Module) -> list[nn.Module]:
    found = []
    for module in model.modules():
        if any(p.ndim == 3 for p in module.parameters(recurse=False)) and hasattr(
            module, "num_experts"
        ):
            found.append(module)
    return found


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_has_the_bits_of_whole_blocks(
    name: str,
    dtype: torch.dtype,
    build_tiny: Callable[[str], Any],
    forward: Callable[[str, Any, Tensor], Tensor],
    batches: list[Tensor],
) -> None:
    model = build_tiny(name)[0].to(dtype)
    blocks = fused_in(model)
    if not blocks:
        pytest.skip("the installed transformers has one module for each expert")
    with eager_experts(model):
        expected = [forward(name, model, ids) for ids in batches]
    stores = [Store(block) for block in blocks]
    for groups in GROUPINGS:
        with ExitStack() as stack:
            for block, store in zip(blocks, stores, strict=True):
                stack.enter_context(grouped_experts(block, groups, store.bring_in))
            for ids, bits in zip(batches, expected, strict=True):
                assert torch.equal(forward(name, model, ids), bits)
    for block in blocks:
        assert "forward" not in vars(block)
        assert block.num_experts == 4
        for parameter in sliced_parameters(block).values():
            assert parameter.isnan().all()
            assert len(parameter) == 4


def test_groups_that_no_token_chose_are_left_where_they_are(
    build_tiny: Callable[[str], Any],
) -> None:
    model, _ = build_tiny("qwen3_moe")
    blocks = fused_in(model)
    if not blocks:
        pytest.skip("the installed transformers has one module for each expert")
    store = Store(blocks[0])
    hidden = torch.randn(5, 32)
    chosen = torch.tensor([[3, 2], [3, 2], [2, 3], [3, 2], [3, 2]])
    weights = torch.full((5, 2), 0.5)
    with grouped_experts(blocks[0], [[0, 1], [2], [3]], store.bring_in):
        assert blocks[0](hidden, chosen, weights).isfinite().all()
    assert store.asked == [[2], [3]]


def test_an_error_leaves_the_module_as_it_was(build_tiny: Callable[[str], Any]) -> None:
    model, _ = build_tiny("qwen3_moe")
    blocks = fused_in(model)
    if not blocks:
        pytest.skip("the installed transformers has one module for each expert")
    arguments = torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    before = {name: p.data_ptr() for name, p in blocks[0].named_parameters()}

    def fails(group: Sequence[int]) -> AbstractContextManager[Mapping[str, Tensor]]:
        raise OSError(f"group {list(group)}")

    with pytest.raises(OSError, match="group"):
        with grouped_experts(blocks[0], [[0, 1, 2, 3]], fails):
            blocks[0](*arguments)
    assert before == {name: p.data_ptr() for name, p in blocks[0].named_parameters()}
    assert blocks[0].num_experts == 4


@pytest.mark.parametrize("groups", [[[0, 1], [3, 2]], [[2, 3], [0, 1]], [[0, 1, 2]], [[0, 1], [1]]])
def test_groups_in_another_order_are_refused(
    groups: list[list[int]], build_tiny: Callable[[str], Any]
) -> None:
    blocks = fused_in(build_tiny("qwen3_moe")[0])
    if not blocks:
        pytest.skip("the installed transformers has one module for each expert")
    with pytest.raises(ValueError, match="0 to 3 in turn"):
        with grouped_experts(blocks[0], groups, Store(blocks[0]).bring_in):
            pass


class Scaled(nn.Module):
    """Does something to the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 2
        self.up = nn.Parameter(torch.randn(2, 3, 3))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(self.num_experts):
            slot, token = chosen.T.eq(expert).nonzero(as_tuple=True)
            rows = (x[token] @ self.up[expert]) * weights[token, slot, None]
            total.index_add_(0, token, rows)
        return total * 2


def test_a_sum_that_something_is_done_to_is_refused() -> None:
    module = Scaled()
    arguments = torch.randn(2, 3), torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2)
    with grouped_experts(module, [[0], [1]], Store(module).bring_in):
        with pytest.raises(OffloadError, match="Scaled cannot be run in groups: its forward does"):
            module(*arguments)


def test_experts_of_another_form_are_refused(build_tiny: Callable[[str], Any]) -> None:
    with pytest.raises(OffloadError, match="Linear cannot be run in groups"):
        sliced_parameters(nn.Linear(2, 2))
    for block in fused_in(build_tiny("llama4_text")[0]):  # all experts in one product
        with pytest.raises(OffloadError, match="Llama4TextExperts cannot be run in groups"):
            sliced_parameters(block)
