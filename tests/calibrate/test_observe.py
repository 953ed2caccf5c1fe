"""What enters each weight, against hooks on modules and against direct computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modelopt_lite.build import eager_experts
from modelopt_lite.calibrate.observe import InputStats, InputWatch, Site

BuildModel = Callable[..., Any]
Seen = list[tuple[Site, Tensor, bool]]


@pytest.fixture
def stats() -> InputStats:
    return InputStats()


@pytest.fixture
def watch(stats: InputStats) -> InputWatch:
    return InputWatch(stats.visit)


def recorder() -> tuple[Seen, InputWatch]:
    """A watch that notes every visit."""
    seen: Seen = []

    def visit(site: Site, x: Tensor, batched: bool) -> None:
        seen.append((site, x.clone(), batched))

    return seen, InputWatch(visit)


def hooked_amax(model: nn.Module, run: Callable[[], Any]) -> dict[str, float]:
    """Largest magnitude that enters each linear layer, by a hook on the module."""
    amax: dict[str, float] = {}

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if x.numel():
                amax[name] = max(amax.get(name, 0.0), float(x.abs().max()))

        return note

    handles = [
        module.register_forward_pre_hook(hook(f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    run()
    for handle in handles:
        handle.remove()
    return amax


# --- models


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_linear_layers_as_hooks_see_them(
    model_type: str, build_model: BuildModel, stats: InputStats, watch: InputWatch
) -> None:
    model = build_model(model_type)
    batches = [torch.randint(0, 64, size) for size in ((2, 9), (1, 5))]

    def run() -> list[Tensor]:
        with torch.inference_mode():
            return [model(ids, use_cache=False).logits for ids in batches]

    expected = hooked_amax(model, run)
    plain = run()
    watch.watch(dict(model.named_parameters()))
    with watch:
        watched = run()
    assert all(map(torch.equal, plain, watched))
    made = {site.entry: float(amax) for site, amax in stats.amax.items() if site.expert is None}
    if model.config.tie_word_embeddings:  # one parameter goes by one name
        expected["model.embed_tokens.weight"] = expected.pop("lm_head.weight")
    assert expected.items() <= made.items()
    rows = stats.rows[Site("model.layers.0.self_attn.o_proj.weight")]
    assert rows == 2 * 9 + 5


def expert_inputs(model: Any, ids: Tensor) -> tuple[dict[tuple[str, int], float], dict[Any, int]]:
    """Largest magnitudes and rows by (leaf, expert) in the first layer, from the weights alone."""
    layer = model.model.layers[0]
    caught: list[Tensor] = []
    handle = layer.mlp.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    with torch.inference_mode():
        model(ids, use_cache=False)
    handle.remove()
    (x,) = caught
    x = x.reshape(-1, x.shape[-1])
    entries = model.state_dict()
    name = "model.layers.0.mlp"
    chosen = (x @ entries[f"{name}.gate.weight"].T).topk(2, dim=-1).indices
    amax: dict[tuple[str, int], float] = {}
    rows: dict[Any, int] = {}
    for expert in range(4):
        own = x[(chosen == expert).any(-1)]
        rows[expert] = len(own)
        if not len(own):
            continue
        if f"{name}.experts.gate_up_proj" in entries:
            gate, up = entries[f"{name}.experts.gate_up_proj"][expert].chunk(2)
        else:
            gate, up = (
                entries[f"{name}.experts.{expert}.{leaf}.weight"]
                for leaf in ("gate_proj", "up_proj")
            )
        amax["up", expert] = float(own.abs().max())
        amax["down", expert] = float((functional.silu(own @ gate.T) * (own @ up.T)).abs().max())
    return amax, rows


def test_experts_one_by_one(build_model: BuildModel, stats: InputStats, watch: InputWatch) -> None:
    """Fused parameters in 5.x, a list of modules in 4.57: each expert sees its own tokens."""
    model = build_model("qwen3_moe")
    ids = torch.arange(24).reshape(2, 12)
    with eager_experts(model):
        expected, rows = expert_inputs(model, ids)
        watch.watch(dict(model.named_parameters()))
        with watch, torch.inference_mode():
            model(ids, use_cache=False)
    prefix = "model.layers.0.mlp.experts"
    fused = f"{prefix}.gate_up_proj" in dict(model.named_parameters())
    for (kind, expert), amax in expected.items():
        if fused:
            site = Site(f"{prefix}.{'gate_up_proj' if kind == 'up' else 'down_proj'}", expert)
        else:
            site = Site(f"{prefix}.{expert}.{kind}_proj.weight")
        torch.testing.assert_close(float(stats.amax[site]), amax, rtol=1e-5, atol=0)
        assert stats.rows[site] == rows[expert]


def test_experts_stored_input_major(
    build_model: BuildModel, stats: InputStats, watch: InputWatch
) -> None:
    model = build_model("gpt_oss")
    ids = torch.arange(24).reshape(2, 12)
    entries = {n: p for n, p in model.named_parameters() if n.endswith("_proj") and p.ndim == 3}
    watch.watch(entries)
    with eager_experts(model), watch, torch.inference_mode():
        model(ids, use_cache=False)
    rows = {entry: sum(stats.rows.get(Site(entry, e), 0) for e in range(4)) for entry in entries}
    assert len(entries) == 4
    assert set(rows.values()) == {24 * 2}


def test_products_over_all_experts(build_model: BuildModel) -> None:
    """llama4 multiplies a whole stack at once: [E, N, H] by [E, H, 2I]."""
    model = build_model("llama4_text")
    entry = "model.layers.0.feed_forward.experts.gate_up_proj"
    seen, watch = recorder()
    watch.watch({entry: model.get_parameter(entry)})
    with watch, torch.inference_mode():
        model(torch.arange(10).reshape(2, 5), use_cache=False)
    ((site, x, batched),) = seen
    assert (site, batched, list(x.shape)) == (Site(entry), True, [4, 10, 32])
    stats = InputStats()
    stats.visit(*seen[0])
    for expert in range(4):
        assert stats.amax[Site(entry, expert)] == x[expert].abs().max()
        assert stats.rows[Site(entry, expert)] == 10
    seen.clear()
    with eager_experts(model), watch, torch.inference_mode():
        model(torch.arange(10).reshape(2, 5), use_cache=False)
    for expert, (site, own, batched) in enumerate(seen):
        assert (site, batched) == (Site(entry, expert), False)
        assert torch.equal(own[0], x[expert])
    assert len(seen) == 4


# --- one product


E, N, K, R = 3, 5, 4, 6


@pytest.fixture
def tokens() -> Tensor:
    """[N, K]."""
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def stack() -> nn.Parameter:
    """[E, R, K]."""
    values = torch.randn(E, R, K, generator=torch.Generator().manual_seed(1))
    return nn.Parameter(values, requires_grad=False)


SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda w: w[1],
    "index from the end": lambda w: w[-2],
    "tensor index": lambda w: w[torch.tensor(1)],
    "index and slices": lambda w: w[1, :, :],
    "index and ellipsis": lambda w: w[1, ...],
    "select": lambda w: w.select(0, 1),
    "select by name": lambda w: torch.select(w, dim=0, index=1),
    "select from the end": lambda w: w.select(-3, -2),
    "unbind": lambda w: w.unbind(0)[1],
    "unbind by name": lambda w: torch.unbind(w, dim=0)[1],
    "converted": lambda w: w.to(torch.float64).to(torch.float32)[1],
    "cloned": lambda w: w.detach().clone()[1].contiguous(),
    "data": lambda w: w.data[1],
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": functional.linear,
    "linear by name": lambda x, w: functional.linear(input=x, weight=w),
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "operator": lambda x, w: x @ w.T,
    "mT": lambda x, w: x @ w.mT,
    "transpose": lambda x, w: x @ w.transpose(0, 1),
    "permute": lambda x, w: torch.mm(x, w.permute(1, 0)),
    "addmm": lambda x, w: torch.addmm(torch.zeros(R), x, w.t()),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_one_expert(selection: str, product: str, tokens: Tensor, stack: nn.Parameter) -> None:
    seen, watch = recorder()
    watch.watch({"stack": stack})
    with watch:
        y = PRODUCTS[product](tokens, SELECTIONS[selection](stack))
    torch.testing.assert_close(y, tokens @ stack[1].T)
    ((site, x, batched),) = seen
    assert (site, batched) == (Site("stack", 1), False)
    assert torch.equal(x, tokens)


@pytest.mark.parametrize("product", PRODUCTS)
def test_one_matrix(product: str, tokens: Tensor) -> None:
    seen, watch = recorder()
    weight = nn.Parameter(torch.randn(R, K))
    watch.watch({"matrix": weight})
    with watch:
        PRODUCTS[product](tokens, weight)
        PRODUCTS[product](tokens, weight[:3].contiguous() if product != "addmm" else weight)
    assert [(site, batched) for site, _, batched in seen] == [(Site("matrix"), False)] * 2


@pytest.mark.parametrize(
    "select",
    [
        lambda w: w[:, 1],
        lambda w: w.select(1, 1),
        lambda w: w.select(2, 0)[:, :K],
        lambda w: w.unbind(1)[0],
        lambda w: w[0:2][0],
        lambda w: w[torch.tensor([1, 0])][0],
    ],
)
def test_other_parts_of_a_stack_are_no_expert(
    select: Callable[[Tensor], Tensor], stack: nn.Parameter
) -> None:
    seen, watch = recorder()
    watch.watch({"stack": stack})
    with watch:
        part = select(stack)
        functional.linear(torch.ones(2, part.shape[-1]), part)
    assert not [site for site, _, _ in seen if site.expert is not None]


BATCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda x, w: torch.bmm(x, w.transpose(1, 2)),
    "operator": lambda x, w: x @ w.mT,
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(E, 1, R), x, w.transpose(1, 2)),
}


@pytest.mark.parametrize("product", BATCHED)
def test_all_experts_at_once(product: str, stack: nn.Parameter, stats: InputStats) -> None:
    x_ENK = torch.randn(E, N, K) * torch.tensor([1.0, 10.0, 100.0]).reshape(E, 1, 1)
    watch = InputWatch(stats.visit)
    watch.watch({"stack": stack})
    with watch:
        BATCHED[product](x_ENK, stack)
    for expert in range(E):
        assert stats.amax[Site("stack", expert)] == x_ENK[expert].abs().max()
        assert stats.rows[Site("stack", expert)] == N
    assert Site("stack") not in stats.amax


@pytest.mark.parametrize("shape", [(N, K), (1, N, K), (2, E, N, K), (2, 1, N, K)])
def test_a_product_that_broadcasts_over_experts(
    shape: tuple[int, ...], stack: nn.Parameter, stats: InputStats
) -> None:
    x = torch.randn(shape)
    whole = x.expand(*shape[:-3], E, N, K)
    watch = InputWatch(stats.visit)
    watch.watch({"stack": stack})
    with watch:
        x @ stack.mT
    for expert in range(E):
        own = whole[..., expert, :, :]
        assert stats.amax[Site("stack", expert)] == own.abs().max()
        assert stats.rows[Site("stack", expert)] == own.numel() // K
    double = InputWatch(lambda site, x, batched: 2 * x)
    double.watch({"stack": stack})
    with double:
        y = x @ stack.mT
    torch.testing.assert_close(y, 2 * x @ stack.mT)


# --- the watch itself


def test_replaced_inputs(tokens: Tensor, stack: nn.Parameter) -> None:
    watch = InputWatch(lambda site, x, batched: torch.zeros_like(x) if site.expert == 0 else None)
    watch.watch({"stack": stack})
    with watch:
        first = functional.linear(input=tokens, weight=stack[0])
        second = functional.linear(tokens, stack[1], None)
    assert not first.any()
    assert torch.equal(second, functional.linear(tokens, stack[1]))


def test_pause_and_resume(tokens: Tensor) -> None:
    seen, watch = recorder()
    weights = {name: nn.Parameter(torch.randn(R, K)) for name in ("a", "b")}
    watch.watch(weights)
    with watch:
        watch.pause(["a"])
        for weight in weights.values():
            functional.linear(tokens, weight)
        kept = weights["a"].T  # made while paused, used after
        watch.resume(["a", "b"])
        tokens @ kept
    assert [site.entry for site, _, _ in seen] == ["b", "a"]


def test_nothing_outside_of_the_context_or_unwatched(tokens: Tensor) -> None:
    seen, watch = recorder()
    weight, other = nn.Parameter(torch.randn(R, K)), nn.Parameter(torch.randn(R, K))
    watch.watch({"a": weight})
    functional.linear(tokens, weight)
    with watch:
        functional.linear(tokens, other)
        torch.matmul(tokens, other.T)
        weight + 1
    assert not seen


def test_a_new_parameter_at_an_old_address_is_not_watched(tokens: Tensor) -> None:
    seen, watch = recorder()
    room = torch.randn(R, K)
    watch.watch({"a": nn.Parameter(room)})  # freed at once
    with watch:
        functional.linear(tokens, nn.Parameter(room))
    assert not seen


# --- statistics


def test_largest_over_calls_and_signs(stats: InputStats) -> None:
    site = Site("a")
    for values in ([1.0, -2.0], [-7.0, 3.0], [5.0, 0.0]):
        stats.visit(site, torch.tensor([values]), False)
    assert float(stats.amax[site]) == 7.0
    assert stats.rows[site] == 3


@pytest.mark.parametrize("position", [0, 1, 2])
def test_nan_and_infinity_are_kept(position: int, stats: InputStats) -> None:
    rows = [torch.ones(1, 2) for _ in range(3)]
    rows[position][0, 1] = torch.nan
    for row in rows:
        stats.visit(Site("nan"), row, False)
    assert stats.amax[Site("nan")].isnan()
    stats.visit(Site("inf"), torch.tensor([[1.0, -torch.inf]]), False)
    stats.visit(Site("inf"), torch.ones(1, 2), False)
    assert stats.amax[Site("inf")] == torch.inf


def test_no_rows(stats: InputStats) -> None:
    stats.visit(Site("a"), torch.empty(0, 4), False)
    stats.visit(Site("b"), torch.empty(2, 0, 4), True)
    assert not stats.amax
    assert stats.rows == {Site("a"): 0, Site("b", 0): 0, Site("b", 1): 0}


def test_dtype_is_the_inputs(stats: InputStats) -> None:
    stats.visit(Site("a"), torch.ones(2, 2, dtype=torch.bfloat16), False)
    assert stats.amax[Site("a")].dtype == torch.bfloat16
    assert stats.amax[Site("a")].ndim == 0
