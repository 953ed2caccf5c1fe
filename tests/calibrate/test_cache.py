"""Statistics of affine caches: against all tokens at once, and what the peer does instead."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_lite.calibrate.cache import CacheStats


def batches(seed: int, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randn(1, 3, 1, 8, generator=generator) * 4
    return [
        (torch.randn(2, 3, length, 8, generator=generator) + shift).bfloat16() for length in lengths
    ]


def seen(calls: list[Tensor], numerics: str) -> CacheStats:
    stats = CacheStats(affine=True, numerics="exact" if numerics == "exact" else "modelopt")
    for x in calls:
        stats.visit("a", x, -x)
    return stats


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_all_tokens_count_the_same(seed: int, lengths: list[int]) -> None:
    calls = batches(seed, lengths)
    whole = torch.cat(calls, dim=2)
    stats = seen(calls, "exact")
    bias = stats.key["a"].bias
    assert bias is not None
    mean = whole.double().mean(dim=(0, 2), keepdim=True)
    assert bias.equal(mean.bfloat16())
    assert float(stats.key["a"].amax) == float((whole.float() - bias.float()).abs().max())
    negative = stats.value["a"].bias
    assert negative is not None
    assert negative.equal(-bias)


def test_no_value_lies_beyond_the_scale() -> None:
    """Where exact is better: the peer's scale is that of a mean which then moves on."""
    calls = batches(1, [64, 3, 5])
    calls[0] = calls[0] + 20
    whole = torch.cat(calls, dim=2).float()
    beyond = {}
    for numerics in ("exact", "modelopt"):
        stats = seen(calls, numerics).key["a"]
        assert stats.bias is not None
        distance = (whole - stats.bias.float()).abs().max()
        beyond[numerics] = float(distance - stats.amax.float())
    assert beyond["exact"] == 0
    assert beyond["modelopt"] > 1


def test_equal_batches_agree() -> None:
    """Batches of one size: both means are that of all tokens, but for the peer's rounding."""
    calls = batches(2, [16, 16, 16, 16])
    one, other = (seen(calls, n).key["a"].bias for n in ("exact", "modelopt"))
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)
