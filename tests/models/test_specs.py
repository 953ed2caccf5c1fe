"""Every registered spec against the models that the installed transformers builds."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from torch import Tensor, nn

from modelopt_lite.models import (
    ExpertStorageSpec,
    ModelSpec,
    MoESpec,
    NamingSpec,
    PTQSpec,
    get_specs,
    is_moe,
    match_class_names,
    match_moe_block,
)
from modelopt_lite.models.specs import STRUCTURAL_PTQ, _spec_sections
from modelopt_lite.offload.patterns import match_part

installed = Version(transformers.__version__)

# model_type -> the configurations that together show every path a spec names. Every width is
# another number, so that a shape tells which one it is. These types stand for the others, which
# take too long to build in every run: `modelopt-lite specs check` holds all to their models.
CONFIGS = json.loads(Path(__file__).with_name("tiny.json").read_text())


@functools.cache
def models_of(model_type: str) -> tuple[Any, ...]:
    """Build the seeded float32 models of a type."""
    built = []
    for fields in CONFIGS[model_type]:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model_type, **fields)
        built.append(transformers.AutoModelForCausalLM.from_config(config).float().eval())
    return tuple(built)


def models(spec: ModelSpec) -> tuple[Any, ...]:
    """Return the models of ``spec``; skip where the installed transformers predates them."""
    if installed < Version(spec.min_transformers_version or "0"):
        pytest.skip(
            f"{spec.model_type} needs transformers {spec.min_transformers_version}, "
            f"{installed} is installed"
        )
    return models_of(spec.model_type)


def layers_of(model: Any, spec: ModelSpec) -> list[nn.Module]:
    """Return the instances of the decoder layer."""
    assert spec.ptq_spec is not None
    wanted = {name.casefold() for name in spec.ptq_spec.layer_names}
    return [m for m in model.modules() if type(m).__name__.casefold() in wanted]


def child(module: nn.Module, path: str) -> Any:
    """Return the submodule at ``path``, None where there is none or it passes through."""
    try:
        found = module.get_submodule(path)
    except AttributeError:
        return None
    return None if isinstance(found, nn.Identity) else found


def ptq(spec: ModelSpec) -> PTQSpec:
    assert spec.ptq_spec is not None, "every spec of this repository has one"
    return spec.ptq_spec


def moe(spec: ModelSpec) -> tuple[MoESpec, ExpertStorageSpec]:
    assert spec.moe_spec is not None
    assert spec.expert_storage_spec is not None
    return spec.moe_spec, spec.expert_storage_spec


def over(specs: list[ModelSpec]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spec", [pytest.param(s, id=s.model_type) for s in specs])


ALL = get_specs()
BUILT = [spec for spec in ALL if spec.model_type in CONFIGS]
every_record = over(ALL)
every_moe_record = over([spec for spec in ALL if spec.moe_spec is not None])
every_spec = over(BUILT)
every_moe = over([spec for spec in BUILT if spec.moe_spec is not None])


def blocks_of(model: Any, spec: ModelSpec) -> list[nn.Module]:
    found = [m for m in model.modules() if match_moe_block(m, spec.model_type) is spec.moe_spec]
    assert found, f"no module of {type(model).__name__} is a block of {spec.moe_spec}"
    return found


def experts_of(block: nn.Module, spec: ModelSpec) -> Any:
    container = child(block, moe(spec)[1].container)
    assert container is not None
    return container


# --- records among themselves


@every_record
def test_a_version_is_given_and_never_below_the_floor(spec: ModelSpec) -> None:
    if spec.modeling_source == "transformers":
        assert Version(spec.min_transformers_version or "0") >= Version("4.57")
    else:
        assert spec.min_transformers_version is None


@every_spec
def test_the_first_release_is_not_later_than_the_installed_one_that_has_the_model(
    spec: ModelSpec,
) -> None:
    """A version that is too high would skip every other test of a spec."""
    if installed >= Version(spec.min_transformers_version or "0"):
        return
    try:
        built = models_of(spec.model_type)
    except (ValueError, TypeError, AttributeError, KeyError):
        return  # this release does not know it
    assert not all(layers_of(model, spec) for model in built), (
        f"{installed} has the classes of {spec.model_type}; lower min_transformers_version"
    )


@every_record
def test_moe_sections_come_together(spec: ModelSpec) -> None:
    assert (spec.moe_spec is None) == (spec.expert_storage_spec is None)
    assert (spec.moe_spec is None) == (not ptq(spec).router_names)
    if spec.moe_spec is None:
        assert spec.ep_spec is None


@every_record
def test_a_name_is_given_once(spec: ModelSpec) -> None:
    sections = [getattr(spec, name) for name in _spec_sections()]
    for section in filter(None, sections):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if isinstance(value, tuple) and field.name != "key_value_names":
                assert len(set(value)) == len(value), field.name
    assert len(dict(ptq(spec).norm_feeds)) == len(ptq(spec).norm_feeds)


@every_record
def test_globs_leave_the_linear_layers_that_the_spec_names(spec: ModelSpec) -> None:
    """A glob that is too wide would leave a whole model as it is, without an error."""
    naming = spec.naming_spec or NamingSpec()
    for path in naming.layer_lists:
        for role in naming.layer_linear_names or ("q_proj", "down_proj"):
            name = f"{path}.0.mixer.{role}"
            assert not [g for g in ptq(spec).skip_modules if match_part(g, name)], name


@every_moe_record
def test_naming_agrees_between_sections(spec: ModelSpec) -> None:
    layout, storage = moe(spec)
    names = storage.stacked_names if layout.fused_expert_names else storage.linear_names
    assert set(layout.expert_linear_names or ()) == set(names)
    if layout.gate_up_pair is not None:
        assert storage.linear_names[:2] == layout.gate_up_pair, "the order is gate, up, down"
        assert layout.gate_up_pair in ptq(spec).fused_linears


# --- classes


@every_spec
def test_blocks_are_what_is_moe_finds_with_and_without_the_spec(spec: ModelSpec) -> None:
    for model in models(spec):
        blocks = set() if spec.moe_spec is None else set(blocks_of(model, spec))
        for module in model.modules():
            assert is_moe(module, spec.model_type) == (module in blocks)
            assert is_moe(module, "unregistered") == (module in blocks)


@every_spec
def test_layers_hold_everything_that_can_be_quantized(spec: ModelSpec) -> None:
    for model in models(spec):
        layers = layers_of(model, spec)
        assert len(layers) == model.config.get_text_config().num_hidden_layers
        inside = {m for layer in layers for m in layer.modules()}
        for name, module in model.named_modules():
            skipped = any(fnmatch.fnmatchcase(name, glob) for glob in ptq(spec).skip_modules)
            if next(module.parameters(recurse=False), None) is None:
                continue
            if isinstance(module, nn.Linear):
                assert name == "lm_head" or skipped != (module in inside), name
            elif isinstance(module, nn.modules.conv._ConvNd) or "vision" in name:
                assert skipped, name


@every_spec
def test_weight_plus_one_norms(spec: ModelSpec) -> None:
    """A norm whose weight is all zeros gives zeros, unless it scales by weight + 1."""
    names = () if spec.export_spec is None else spec.export_spec.weight_plus_one_norm_names
    seen = False
    for model in models(spec):
        for layer in layers_of(model, spec):
            for norm in norms_of(layer).values():
                with torch.no_grad():
                    kept = norm.weight.clone()
                    norm.weight.zero_()
                    out = norm(torch.randn(2, 3, len(kept)))
                    norm.weight.copy_(kept)
                assert match_class_names(norm, names) == bool(out.any())
                seen |= bool(out.any())
    assert seen == bool(names)


# --- names


@every_moe
def test_routers(spec: ModelSpec) -> None:
    """The children of a block with one output an expert, or one in all, are its routers."""
    for model in models(spec):
        for block in blocks_of(model, spec):
            found = {
                name
                for name, module in block.named_children()
                if isinstance(weight := getattr(module, "weight", None), Tensor)
                and weight.shape[0] in (1, 4)
            }
            assert found == set(ptq(spec).router_names)


def siblings(model: Any, group: tuple[str, ...]) -> list[list[Any]]:
    """Return the linears of a group in each module that has them all as children."""
    found: list[list[Any]] = [
        [getattr(module, name, None) for name in group] for module in model.modules()
    ]
    return [linears for linears in found if all(isinstance(m, nn.Linear) for m in linears)]


def inputs_of(model: Any) -> dict[nn.Module, int]:
    """Run the model; return where the input of each linear lies. Nothing is freed meanwhile."""
    held: list[Tensor] = []
    seen: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        held.append(args[0])
        seen[module] = args[0].data_ptr()

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(note) for module in linears]
    with torch.no_grad():
        model(torch.arange(1, 25).reshape(2, 12), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@every_spec
def test_fused_linears_are_siblings_that_read_the_same_input(spec: ModelSpec) -> None:
    """A group is what a forward pass shows, or the stated gate and up of experts on disk."""
    pair = None if spec.moe_spec is None else spec.moe_spec.gate_up_pair
    inputs = [(model, inputs_of(model)) for model in models(spec)]
    for group in ptq(spec).fused_linears:
        found = [(seen, linears) for model, seen in inputs for linears in siblings(model, group)]
        assert found or group == pair, group
        for seen, linears in found:
            assert len({linear.in_features for linear in linears}) == 1
            assert len({seen[linear] for linear in linears if linear in seen}) <= 1, group


@every_spec
def test_what_engines_join_everywhere_is_joined(spec: ModelSpec) -> None:
    for group in STRUCTURAL_PTQ.fused_linears:
        present = any(
            siblings(layer, group) for model in models(spec) for layer in layers_of(model, spec)
        )
        assert not present or group in ptq(spec).fused_linears, group


@every_spec
def test_rules_that_fold_scales_name_modules_that_there_are(spec: ModelSpec) -> None:
    rules = () if spec.export_spec is None else spec.export_spec.pqs_fuse_rules
    modules = [module for model in models(spec) for module in model.modules()]
    for parts, into, source in rules:
        for part in parts:
            named = [module for module in modules if part in type(module).__name__]
            both = [(child(module, into), child(module, source)) for module in named]
            assert both, f"no class is called {part}"
            for one, other in both:
                assert isinstance(one, nn.Linear), into
                assert isinstance(other, nn.Linear), source
                # With grouped queries, several channels of the reader share one of the writer.
                assert other.in_features % one.out_features == 0


@every_spec
def test_names_that_carry_key_and_value_scales(spec: ModelSpec) -> None:
    for model in models(spec):
        attentions = [
            m
            for layer in layers_of(model, spec)
            for m in layer.modules()
            if hasattr(m, "o_proj") and not hasattr(m, "kv_b_proj")  # MLA: see the spec
        ]
        for attention in attentions:
            for name in ptq(spec).key_value_names:
                assert isinstance(getattr(attention, name), nn.Linear)


@every_moe
def test_shared_experts(spec: ModelSpec) -> None:
    _, storage = moe(spec)
    for model in models(spec):
        for block in blocks_of(model, spec):
            known = {storage.container, *storage.shared_expert_names, *ptq(spec).router_names}
            known |= {"act_fn", "fc1_latent_proj", "fc2_latent_proj"}
            assert {name for name, _ in block.named_children()} <= known
            for name in storage.shared_expert_names:
                assert child(block, name) is not None


@every_moe
def test_layout_of_the_experts(spec: ModelSpec) -> None:
    layout, storage = moe(spec)
    for model in models(spec):
        config = model.config
        intermediate = getattr(config, "moe_intermediate_size", config.intermediate_size)
        hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
        for block in blocks_of(model, spec):
            experts = experts_of(block, spec)
            if isinstance(experts, nn.ModuleList):
                linears = {n for n, m in experts[0].named_children() if isinstance(m, nn.Linear)}
                assert linears == set(layout.expert_linear_names_for(block, fused=False) or ())
                continue
            up, down = (getattr(experts, name) for name in storage.stacked_names)
            rows = intermediate * (2 if layout.gate_up_pair or storage.interleaved_gate_up else 1)
            up_shape, down_shape = (rows, hidden), (hidden, intermediate)
            if storage.input_major:
                up_shape, down_shape = up_shape[::-1], down_shape[::-1]
            assert tuple(up.shape) == (4, *up_shape)
            assert tuple(down.shape) == (4, *down_shape)
            gate = getattr(experts, "_apply_gate", None)
            if gate is not None and storage.interleaved_gate_up:
                # Gate in the even places: with up at -1, gpt-oss gives zeros for any gate.
                joined = torch.randn(3, rows)
                joined[:, 1::2] = -1
                assert not gate(joined).any()


@every_moe
def test_first_release_with_an_expert_parallel_plan(spec: ModelSpec) -> None:
    needs = None if spec.ep_spec is None else spec.ep_spec.requires_transformers
    for model in models(spec):
        has_plan = bool(getattr(model.config, "base_model_ep_plan", None))
        # Without an entry the plan is older than expert parallelism itself, 5.6.
        assert has_plan == (installed >= Version(needs or "5.6"))


# --- who reads a norm


def norms_of(layer: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in layer.named_modules()
        if "norm" in type(module).__name__.casefold() and hasattr(module, "weight")
    }


def input_width(module: nn.Module, storage: ExpertStorageSpec | None) -> int:
    if isinstance(module, nn.Linear):
        return module.in_features
    if storage is not None and hasattr(module, storage.stacked_names[0]):
        shape = getattr(module, storage.stacked_names[0]).shape
        return int(shape[1] if storage.input_major else shape[2])
    return int(module.get_parameter("weight").shape[-1])


def stated_readers(layer: nn.Module, spec: ModelSpec) -> dict[str, set[str]]:
    """Apply the rules of ``norm_feeds`` to one layer."""
    stated: dict[str, set[str]] = {}
    for norm, readers in ptq(spec).norm_feeds:
        source = child(layer, norm)
        for reader in readers:
            module = child(layer, reader)
            # Experts in a list read gathered copies: not to be seen by address.
            if source is None or module is None or isinstance(module, nn.ModuleList):
                continue
            if input_width(module, spec.expert_storage_spec) == len(source.weight):
                stated.setdefault(norm, set()).add(reader)
    return stated


def seen_readers(model: Any, layer: nn.Module, spec: ModelSpec) -> dict[str, set[str]]:
    """Run the model and note which linears, routers and experts get a norm's very output."""
    outputs: dict[str, Tensor] = {}  # held, so that no address is used twice
    seen: dict[str, set[str]] = {}
    hooks = []

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        for norm, output in outputs.items():
            if isinstance(first, Tensor) and first.data_ptr() == output.data_ptr():
                seen.setdefault(norm, set()).add(name)

    norms = norms_of(layer)
    for name, module in layer.named_modules():
        if name in norms:
            hooks.append(
                module.register_forward_hook(
                    lambda _module, _args, output, name=name: outputs.update({name: output})
                )
            )
        elif isinstance(module, nn.Linear) or {"gate", "router", "experts"} & {name.split(".")[-1]}:
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _module, args, kwargs, name=name: note(name, args, kwargs),
                    with_kwargs=True,
                )
            )
    with torch.no_grad():
        model(torch.arange(1, 25).reshape(2, 12), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@every_spec
def test_norm_feeds_are_complete(spec: ModelSpec) -> None:
    """In every layer, the stated readers of each norm are those that read it in a forward pass."""
    unseen = set(ptq(spec).norm_feeds)
    for model in models(spec):
        for layer in layers_of(model, spec):
            stated = stated_readers(layer, spec)
            assert seen_readers(model, layer, spec) == stated
            unseen -= {pair for pair in unseen if pair[0] in stated}
    assert not unseen, "a norm that no layer has"


# --- on disk


def saved(model: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 -- not a dict


@every_moe
def test_names_on_disk(spec: ModelSpec, tmp_path: Path) -> None:
    _, storage = moe(spec)
    for number, model in enumerate(models(spec)):
        keys = saved(model, tmp_path / str(number))
        count = len(blocks_of(model, spec))
        if storage.linear_names:
            tails = [f".{storage.container}.3.{name}.weight" for name in storage.linear_names]
        else:
            tails = [f".{storage.container}.{name}" for name in storage.stacked_names]
        for tail in tails:
            assert sum(key.endswith(tail) for key in keys) == count, tail
        blocks = {key.removesuffix(tails[0]) for key in keys if key.endswith(tails[0])}
        for block in blocks:
            for router in ptq(spec).router_names:
                assert f"{block}.{router}.weight" in keys
            for shared in storage.shared_expert_names:
                assert any(key.startswith(f"{block}.{shared}.") for key in keys)
            within_layer = block.split(".layers.")[1].split(".", 1)[1]
            readers = {reader for _, readers in ptq(spec).norm_feeds for reader in readers}
            assert f"{within_layer}.{storage.container}" in readers


@every_spec
def test_what_matrices_are_called(spec: ModelSpec, tmp_path: Path) -> None:
    """Linear layers and experts on disk have the stated names, nothing else has, and all occur."""
    naming = spec.naming_spec
    assert naming is not None, "every spec of this repository has one"
    storage, seen = spec.expert_storage_spec or ExpertStorageSpec(), set()
    for number, model in enumerate(models(spec)):
        keys = saved(model, tmp_path / str(number))
        modules = {str(name): module for name, module in model.named_modules()}
        assert any(f"{name}.weight" in keys for name in naming.embedding_names)
        assert naming.head_names[0] in modules
        inside = [k for k in keys if k.startswith(tuple(f"{p}." for p in naming.layer_lists))]
        assert len(inside) > len(keys) / 2
        linears = {
            name.rpartition(".")[2]
            for name, module in modules.items()
            if isinstance(module, nn.Linear) and ".layers." in name and "vision" not in name
        }
        linears -= set(ptq(spec).router_names)
        matrices = [k for k in inside if k.endswith(".weight") and len(keys[k]) == 2]
        roles = {k.split(".")[-2] for k in matrices} - set(ptq(spec).router_names)
        experts = {k.split(".")[-2] for k in matrices if storage.expert_of(k[:-7])[1]}
        assert roles == linears | experts
        seen |= roles
    assert seen == set(naming.layer_linear_names)


@every_spec
def test_whether_the_head_is_tied_by_default(spec: ModelSpec) -> None:
    naming = spec.naming_spec
    assert naming is not None
    models(spec)
    config = transformers.AutoConfig.for_model(spec.model_type).get_text_config()
    assert bool(config.tie_word_embeddings) == naming.is_tied


@every_spec
def test_tensors_that_keep_their_dtype(spec: ModelSpec, tmp_path: Path) -> None:
    """Loaded as bfloat16, a float32 checkpoint keeps float32 in the stated tensors only."""
    model = models(spec)[0]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    leaves: dict[str, set[str]] = {"float32": set(), "bfloat16": set()}
    for name, tensor in loaded.state_dict().items():
        leaves[str(tensor.dtype).removeprefix("torch.")].add(name.rsplit(".", 1)[1])
    stated = set(ptq(spec).keep_dtype_names)
    if installed < Version("5"):  # casts some of them
        assert leaves["float32"] <= stated
    else:  # newer releases raise the router's weight to float32, whatever the source has
        assert leaves["float32"] - {"weight"} == stated
