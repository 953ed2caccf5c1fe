"""Models of all kinds, and the oracle: an offloaded model gives the bits that it gave before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from modelopt_lite.offload import HostDevice, OffloadConfig, OffloadManager, Phase
from modelopt_lite.offload.cargo import inner_fields
from modelopt_lite.offload.config import LoadStrategy
from modelopt_lite.offload.device import Device, current_device
from modelopt_lite.offload.simdevice import SimDevice

DEVICES: dict[str, Callable[[], Device]] = {
    "host": HostDevice,
    "sim": lambda: SimDevice(1 << 28),
    "sim_blocking": lambda: SimDevice(1 << 28, host_blocks=True),
}
# With an accelerator, if there is one: for tests that leave it to `check_passes` to bring inputs.
ON_ACCELERATOR = [pytest.param("accelerator", marks=pytest.mark.gpu)]
CHECKED = [*DEVICES, *(ON_ACCELERATOR if torch.accelerator.is_available() else [])]
QUICK: dict[str, Any] = {"profiling_iters": 2, "pinned_memory": False}

_LOOKS = frozenset(
    {"detach", "alias", "view", "as_strided", "slice", "clone", "copy_", "_to_copy", "set_"}
)


class Everything(LoadStrategy):
    """A strategy that offloads every tensor of every label, through so many blocks in turn."""

    def __init__(self, blocks: int = 2, keep: Callable[[str], bool] = lambda name: False) -> None:
        self.blocks, self.keep = blocks, keep

    def compute(self, layer_stats: Any, memory_stats: Any = None, budget: Any = None) -> Any:
        from modelopt_lite.offload.simulate import Simulation
        from modelopt_lite.offload.strategies import BlockStrategyData, StrategyResult

        moving = {
            layer.label: tuple(t for t in layer.tensors if not self.keep(t.name))
            for layer in layer_stats
        }
        moving = {label: tensors for label, tensors in moving.items() if tensors}
        block = {label: at % self.blocks for at, label in enumerate(moving)}
        size = {label: sum(t.size_bytes for t in ts) for label, ts in moving.items()}
        data = BlockStrategyData(
            label_to_size_map=size,
            allocation_ordered={
                b: [m for m in moving if block[m] == b] for b in set(block.values())
            },
            block_sizes={b: max(size[m] for m in moving if block[m] == b) for b in block.values()},
            label_to_block_id=block,
            transfer_to_compute_map={label: label for label in moving},
        )
        nothing = Simulation(
            pass_ms=0.0, compute_ms=0.0, stall_ms={}, peak_bytes=0, events=(), bound_by="compute"
        )
        return StrategyResult(strategy_map=moving, block_data=data, prediction=nothing)


def tensors_of(manager: OffloadManager) -> Any:
    """Return what owns the tensors of a manager with a model, for looks at what is private."""
    tensors = manager.get_tensor_manager()
    assert tensors is not None
    return tensors


def make_device(device: str | Device) -> Device:
    """Return a new device of a name, or the device itself."""
    if not isinstance(device, str):
        return device
    return current_device() if device == "accelerator" else DEVICES[device]()


class HostReads(TorchDispatchMode):
    """Fails where an operation reads a weight from where it rests instead of from the device."""

    def __init__(self, manager: OffloadManager) -> None:
        super().__init__()
        self._manager = manager
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name.split("::")[1] not in _LOOKS:
            tensors: Any = self._manager.get_tensor_manager()
            rooms = {
                c.source.untyped_storage().data_ptr(): label
                for label, c in (tensors._cargos.items() if tensors else ())
                if isinstance(c.source, Tensor)
            }
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self.seen += 1
                    found = rooms.get(leaf.untyped_storage().data_ptr())
                    discovering = self._manager.phase is Phase.DISCOVERY
                    if found and discovering and not tensors.loader.is_in(found):
                        continue  # discovery sees such reads, and lets the weight stay
                    assert found is None, f"{func} reads a weight of {found!r} in host memory"
        return func(*args, **(kwargs or {}))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What `release` must leave as it was."""
    return {
        "parameters": {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)},
        "buffers": {n: id(b) for n, b in model.named_buffers(remove_duplicate=False)},
        "gradients": {n: p.requires_grad for n, p in model.named_parameters()},
        "devices": {n: str(p.device) for n, p in model.named_parameters()},
        "values": {n: v.clone() for n, v in model.state_dict().items()},
        "attributes": {n: set(m.__dict__) for n, m in model.named_modules()},
        "hooks": {
            n: [
                tuple(getattr(m, kind))
                for kind in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
            ]
            for n, m in model.named_modules()
        },
        "forwards": {n: m.forward.__func__ for n, m in model.named_modules()},
        "storages": [
            [i for i, q in enumerate(model.parameters()) if _same_storage(p, q)]
            for p in model.parameters()
        ],
    }


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def assert_same(one: Any, other: Any) -> None:
    """Compare bit by bit; NaN equals itself."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if one.numel():
            pair = one.cpu(), other.cpu()
            mine, yours = (t.contiguous().reshape(-1).view(torch.uint8) for t in pair)
            assert torch.equal(mine, yours)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other


@contextmanager
def offloaded(
    model: nn.Module, device: str | Device = "sim", **fields: Any
) -> Iterator[OffloadManager]:
    """Offload a model; check orders, bytes and the model as it was left at the end."""
    made = make_device(device)
    before = snapshot(model)
    manager = OffloadManager(device=made)
    if isinstance(made, SimDevice):
        manager.on_compute = lambda label: made.compute(label, 1.0)
    manager.offload(model, OffloadConfig(**{**QUICK, **fields}))
    try:
        yield manager
        assert_same(dict(model.state_dict()), before["values"])
        if isinstance(made, SimDevice):
            made.check()
            assert made.peak <= made.capacity
    finally:
        manager.release()
        manager.release()
    assert_same(snapshot(model), before)
    if isinstance(made, SimDevice):
        assert made.used == 0
    made.close()


def check_passes(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    device: str | Device = "sim",
    passes: int = 6,
    in_inference: Callable[[OffloadManager], None] = lambda manager: None,
    **fields: Any,
) -> None:
    """Run passes through all phases; every one must give the bits of the model before."""
    made = make_device(device)
    here = made.torch_device

    def bring_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda x: x.to(here) if isinstance(x, Tensor) else x, (args, kwargs))

    hook = model.register_forward_pre_hook(bring_inputs, with_kwargs=True)
    with torch.no_grad():
        with living_on(here, model):
            before = run()
            with HostReads(OffloadManager()):  # a mode changes which kernels some operations use
                seen_before = run()
        with offloaded(model, made, **fields) as manager:
            values = {n: v.clone() for n, v in model.state_dict().items()}
            for number in range(passes):
                if number % 2:
                    with HostReads(manager) as reads:
                        assert_same(run(), seen_before)
                    assert reads.seen
                else:
                    assert_same(run(), before)
                assert_same(dict(model.state_dict()), values)
            assert manager.phase is Phase.INFERENCE
            in_inference(manager)
        with living_on(here, model):
            assert_same(run(), before)
    hook.remove()


@contextmanager
def living_on(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Have a model's tensors on a device; afterwards they are what and where they were."""
    named = (*model.parameters(), *model.buffers())
    tensors = {id(t): t for tensor in named for t in (tensor, *inner_fields(tensor).values())}
    before = [(tensor, tensor.data) for tensor in tensors.values()]
    for tensor, value in before:
        tensor.data = value.to(device)
    try:
        yield
    finally:
        for tensor, value in before:
            tensor.data = value


class Block(nn.Module):
    """A residual block."""

    def __init__(self, d: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d, bias=bias)
        self.down = nn.Linear(2 * d, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


class Stack(nn.Module):
    """Embedding, blocks in an order that can be set, norm, head."""

    def __init__(self, n: int = 4, d: int = 16, tied: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(20, d)
        layers: Any = nn.ModuleList(Block(d) for _ in range(n))
        self.layers: Any = layers
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 20, bias=False)
        self.order: list[int] | None = None
        self.fail_at: int | None = None
        if tied == "embeddings":
            self.head.weight = self.embed.weight
        elif tied == "middle":
            layers[2].up.weight = layers[1].up.weight
        elif tied == "three":
            for layer in layers[:3]:
                layer.down.weight = layers[0].down.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in self.order if self.order is not None else range(len(self.layers)):
            if i == self.fail_at:
                raise ArithmeticError("the pass is broken off")
            x = self.layers[i](x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Views(nn.Module):
    """Weights that are views of one storage, strided, repeated, empty, zero-dimensional."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        storage = torch.randn(4 * d * d)
        self.a = nn.Module()
        self.layers: Any = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(6))
        self.layers[0].weight = nn.Parameter(storage[: d * d].view(d, d))
        self.layers[1].weight = nn.Parameter(storage[d * d // 2 : d * d // 2 + d * d].view(d, d))
        self.layers[2].weight = nn.Parameter(storage[2 * d * d : 3 * d * d].view(d, d).t())
        self.layers[3].weight = nn.Parameter(torch.randn(1, d).expand(d, d))
        self.layers[4].weight = nn.Parameter(torch.randn(2 * d, 2 * d)[::2, ::2])
        self.layers[5].weight = nn.Parameter(self.layers[0].weight.data)  # all of another's
        self.layers[0].nothing = nn.Parameter(torch.empty(0, 3))
        self.layers[1].scalar = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.randn(d))
        self.layers[2].register_buffer("own", torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = x * self.layers[1].scalar + self.table + self.layers[2].own
        return y


class Scaled(nn.Module):
    """FP8 weights with fields, as custom kernels read them."""

    def __init__(self, d: int, shared: Tensor | None = None) -> None:
        super().__init__()
        fp8 = torch.randn(d, d).to(torch.float8_e4m3fn)
        weight: Any = nn.Parameter(fp8, requires_grad=False)
        weight.scale = torch.rand(d, 1) + 0.5
        weight.zero_point = torch.zeros((), dtype=torch.int32) if shared is None else shared
        self.weight: Any = weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() * self.weight.scale + self.weight.zero_point
        return nn.functional.linear(x, weight)


class Router(nn.Module):
    """Experts as units, in an order that the data decide; some never run."""

    def __init__(self, d: int = 16, experts: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(Block(d) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).mean(dim=tuple(range(x.dim() - 1)))
        order = scores.topk(3).indices.tolist()
        y: Tensor = x + sum(self.experts[i](x) * scores[i] for i in order)
        return y


class Moe(nn.Module):
    """Two routers and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Router(), Block(16), Router()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Hybrid(nn.Module):
    """Layers of several kinds, with state in buffers."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Conv1d(d, d, 3, padding=1), nn.GRU(d, d, batch_first=True), Block(d), Router(d)]
        )
        self.register_buffer("decay", torch.rand(d))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x.transpose(1, 2)).transpose(1, 2)
        x = self.layers[1](x)[0] * self.decay
        y: Tensor = self.layers[3](self.layers[2](x))
        return y
