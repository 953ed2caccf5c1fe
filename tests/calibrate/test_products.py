"""Half-precision products in float32: against float64, against torch, and where they apply."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from modelopt_lite.calibrate import products
from modelopt_lite.calibrate.observe import InputStats, InputWatch, Site
from modelopt_lite.calibrate.products import fast_products, multiply

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def without_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that multiplies neither bfloat16 nor float16."""
    monkeypatch.setattr(products, "_has", lambda question: False)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(product: Tensor, exact: Tensor, size: Tensor, depth: int) -> None:
    """Hold a product to half a step of its dtype and the error of a sum in float32."""
    assert product.shape == exact.shape
    step = torch.finfo(product.dtype).eps / 2
    tiny = torch.finfo(product.dtype).smallest_normal * step * 2
    summed = depth * 2.0**-24 * size
    bound = summed + step * (exact.abs() + summed) + tiny
    assert bool(((product.double() - exact).abs() <= bound).all())


@settings(deadline=None)
@given(
    st.sampled_from(HALVES),
    st.tuples(st.integers(0, 9), st.integers(1, 70), st.integers(1, 9)),
    st.sampled_from([(), (1,), (3,), (2, 3)]),
    st.booleans(),
    st.integers(0, 5),
)
def test_products_are_those_of_float64_rounded_once(
    dtype: torch.dtype, sizes: tuple[int, int, int], leading: tuple[int, ...], flat: bool, seed: int
) -> None:
    rows, depth, columns = sizes
    a = random(*leading, rows, depth, dtype=dtype, seed=seed)
    b = random(*(() if flat else leading), depth, columns, dtype=dtype, seed=seed + 1)
    bias = random(columns, dtype=dtype, seed=seed + 2)
    size = a.double().abs() @ b.double().abs() + bias.double().abs()
    assert_rounded_once(multiply(a, b), a.double() @ b.double(), size, depth)
    exact = a.double() @ b.double() + bias.double()
    assert_rounded_once(multiply(a, b, bias), exact, size, depth + 1)


def test_blocks_cover_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, bias = random(50, 64), random(64, 70, seed=1), random(50, 70, seed=2)
    exact = a.double() @ b.double() + bias.double()
    size = a.double().abs() @ b.double().abs() + bias.double().abs()
    for block in (64, 640, 1 << 20):
        monkeypatch.setattr(products, "BLOCK", block)
        assert_rounded_once(multiply(a, b, bias), exact, size, 65)


@pytest.mark.usefixtures("without_halves")
@pytest.mark.parametrize("dtype", HALVES)
def test_every_kind_of_product_is_taken(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def noted(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        taken.append(1)
        return multiply(a, b, bias)

    monkeypatch.setattr(products, "multiply", noted)
    x, w, bias = random(6, 8, dtype=dtype), random(5, 8, dtype=dtype), random(5, dtype=dtype)
    xs, ws = random(3, 6, 8, dtype=dtype), random(3, 8, 5, dtype=dtype)
    asked = [
        lambda: functional.linear(x, w),
        lambda: functional.linear(x, w, bias),
        lambda: functional.linear(input=x, weight=w, bias=bias),
        lambda: functional.linear(xs, w),
        lambda: x @ w.T,
        lambda: torch.matmul(xs, ws),
        lambda: torch.matmul(xs, w.T),
        lambda: x.matmul(w.T),
        lambda: torch.mm(x, w.T),
        lambda: torch.bmm(xs, ws),
        lambda: torch.addmm(bias, x, w.T),
        lambda: torch.baddbmm(bias, xs, ws),
    ]
    with torch.inference_mode():
        for count, ask in enumerate(asked, start=1):
            expected = ask()
            with fast_products(CPU):
                made = ask()
            assert len(taken) == count
            assert made.dtype == dtype
            torch.testing.assert_close(made, expected)


@pytest.mark.usefixtures("without_halves")
def test_all_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiply", lambda *operands: pytest.fail("taken"))
    x, w, bias = random(6, 8), random(5, 8), random(5)
    with fast_products(CPU), torch.inference_mode():
        functional.linear(x.float(), w.float())
        torch.addmm(bias, x, w.T, beta=0.5)
        torch.matmul(x[0], w.T)
        torch.mv(w, x[0])
        with pytest.raises(RuntimeError, match="dtype"):
            functional.linear(x, w.float())


@pytest.mark.usefixtures("without_halves")
@pytest.mark.parametrize("leading", [((), ()), ((3,), ()), ((3,), (3,)), ((), (3,)), ((1,), (3,))])
def test_gradients_pass_through(
    leading: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """Those of both factors are float64's, and their sums over axes that were broadcast."""
    a = random(*leading[0], 6, 64).requires_grad_()
    b = random(*leading[1], 64, 5, seed=1).requires_grad_()
    bias = random(5, seed=2).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (a, b, bias)]
    exact = wide[0] @ wide[1] + wide[2]
    gradient = random(*exact.shape, seed=3)
    exact.backward(gradient.double())
    with fast_products(CPU):
        (torch.matmul(a, b) + bias).backward(gradient)
    for own, expected in zip((a, b, bias), wide, strict=True):
        assert own.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(own.grad.double(), expected.grad, rtol=2**-8, atol=2**-5)


@pytest.mark.usefixtures("without_halves")
def test_gradients_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Size] = []

    def counted(*operands: torch.Tensor) -> torch.Tensor:
        taken.append(operands[0].shape)
        return multiply(*operands)

    monkeypatch.setattr(products, "multiply", counted)
    layer, x = nn.Linear(64, 5, dtype=torch.bfloat16), random(2, 6, 64).requires_grad_()
    with fast_products(CPU):
        y = layer(x)
        y.backward(torch.ones_like(y))
        layer(x.detach())
    assert len(taken) == 4  # a product, two gradients, a product again
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x), rtol=2**-7, atol=2**-6)


def test_only_dtypes_that_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has", lambda question: "bf16" in question)
    assert products.slow_dtypes() == {torch.float16}
    monkeypatch.setattr(products, "_has", lambda question: True)
    x = random(4, 8)
    with torch.inference_mode(), fast_products(CPU):
        monkeypatch.setattr(products, "multiply", lambda *operands: pytest.fail("taken"))
        functional.linear(x, x)


@pytest.mark.usefixtures("without_halves")
def test_a_watch_sees_what_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = InputStats()
    watch = InputWatch(stats.visit)
    linear = nn.Linear(8, 5, dtype=torch.bfloat16)
    watch.watch({"w": linear.weight})
    x = random(6, 8)
    with torch.inference_mode(), fast_products(CPU), watch:
        made = linear(x)
    assert stats.rows == {Site("w"): 6}
    with torch.inference_mode():
        torch.testing.assert_close(made, linear(x))
