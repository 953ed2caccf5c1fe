"""Nothing that a model moves or makes beside a weight that is not in memory loses its values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelopt_lite.offload.expert_parts import ExpertRows

CPU = torch.device("cpu")


def rows() -> ExpertRows:
    return ExpertRows(nn.Module(), [], CPU, lambda part: None)


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_tokens_moved_to_a_weight_keep_their_values(device: str | torch.device) -> None:
    ids = torch.arange(5)
    with rows():
        moved = [ids.to(device), ids.to(device=device), ids.to(device, torch.float32)]
    assert [tensor.device for tensor in moved] == [CPU] * 3
    assert all(tensor.tolist() == [0, 1, 2, 3, 4] for tensor in moved)
    assert [tensor.dtype for tensor in moved] == [torch.int64, torch.int64, torch.float32]


def test_positions_made_beside_a_weight_have_values() -> None:
    weight = torch.empty(3, device="meta")
    with rows():
        assert torch.arange(3, device=weight.device).tolist() == [0, 1, 2]
        assert torch.zeros_like(torch.ones(2), device="meta").tolist() == [0, 0]


def test_what_has_no_values_moves_as_it_is_told() -> None:
    weight = torch.empty(3, device="meta")
    with rows():
        assert weight.to(torch.float16).is_meta
        assert weight.to("meta").is_meta
