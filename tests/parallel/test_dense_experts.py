"""Experts that all see every token are known by their container, and run one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modelopt_lite.dense_experts import is_dense, one_by_one
from modelopt_lite.errors import SpecError
from modelopt_lite.parallel.experts import check_container

E, N, H, I = 3, 5, 8, 6  # noqa: E741


class Dense(nn.Module):
    """As Llama 4 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, H, 2 * I))
        self.down_proj = nn.Parameter(torch.randn(E, I, H))

    def forward(self, rows_SH: Tensor) -> Tensor:
        rows_ENH = rows_SH.view(len(self.gate_up_proj), -1, H)
        gate_ENI, up_ENI = torch.bmm(rows_ENH, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(up_ENI * gate_ENI.sigmoid(), self.down_proj).view(-1, H)


class Strided(Dense):
    """Rows lie token by token."""

    def forward(self, rows_SH: Tensor) -> Tensor:
        count = len(self.gate_up_proj)
        rows_SH = rows_SH.view(-1, count, H).transpose(0, 1).reshape(-1, H)
        return super().forward(rows_SH).view(count, -1, H).transpose(0, 1).reshape(-1, H)


class Routed(Dense):
    """Takes what a router chose."""

    def forward(self, rows_SH: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return rows_SH


def test_which_containers_are_dense() -> None:
    assert is_dense(Dense())
    assert not is_dense(Routed())
    assert not is_dense(nn.Conv1d(4, 4, 3, bias=False))
    assert not is_dense(nn.Linear(4, 4))


def test_one_by_one_gives_what_the_stack_gives() -> None:
    module, rows_SH = Dense(), torch.randn(E * N, H)
    assert torch.allclose(one_by_one(module)(rows_SH), module(rows_SH), atol=1e-5)


def test_a_container_that_divides_rows_otherwise_is_refused() -> None:
    check_container("mlp.experts", Dense())
    with pytest.raises(SpecError, match=r"'mlp.experts' \(Strided\) divide"):
        check_container("mlp.experts", Strided())
