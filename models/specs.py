"""The records a model package fills in: one ``ModelSpec`` made of sections.

A section holds facts of one topic, never an instruction and never a choice. Everything is frozen
and keyword-only; sequences are tuples. Names of modules and tensors are those on disk unless a
field says otherwise. This file imports neither torch nor transformers: modules are duck-typed.
"""

from __future__ import annotations

import functools
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from modelopt_lite.models.fieldtypes import check_fields


def match_class_names(module: object, names: tuple[str, ...]) -> bool:
    """Return whether a class in ``module``'s MRO has one of ``names``.

    Whole names are compared, case aside: a class generated around a model's class (a quantized or
    sharded one) still matches through its base, and ``FooMoE`` never matches ``FooMoEBlock``.

    Args:
        module: Any object, in practice an ``nn.Module``.
        names: Class names without their module paths.
    """
    wanted = {name.casefold() for name in names}
    return any(cls.__name__.casefold() in wanted for cls in type(module).__mro__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecSection:
    """Base of every section of a ``ModelSpec``.

    It marks a class as a section, so that the lookups find a new one from the annotations of
    ``ModelSpec`` and need no list of section names.

    Raises:
        TypeError: A field got a value that is not of its type; also where a sequence got
            something other than a tuple.
    """

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec(SpecSection):
    """What a model's mixture-of-experts blocks are: their classes and how experts are named.

    One layout a model. A model whose blocks go by several class names lists them all, provided
    that they share the layout. These are facts of the architecture; whether a grouped export may
    use them is ``ExportSpec``'s matter, and whether the experts of a built model can be iterated
    depends on the installed transformers and is read off the module.

    Attributes:
        block_names: Class names of the MoE block, compared with ``match_class_names``.
        expert_linear_names: Names of an expert's linear projections. Where experts are rewritten
            into one module each, the names on the rewritten module.
        fused_expert_names: True where ``expert_linear_names`` are the 3-D parameters of a fused
            container, False where they are modules of one expert. The same model takes either
            form, depending on the transformers release.
        gate_up_pair: The (gate, up) names among ``expert_linear_names`` that engines fuse into
            one projection. None for experts without a gate and for names that are fused already.

    Raises:
        TypeError: A sequence that is not a tuple.
        ValueError: ``gate_up_pair`` names something that ``expert_linear_names`` lacks.
    """

    block_names: tuple[str, ...] = ()
    expert_linear_names: tuple[str, ...] | None = None
    fused_expert_names: bool = False
    gate_up_pair: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        SpecSection.__post_init__(self)  # super() does not work in a class remade for slots
        if self.gate_up_pair is None or self.expert_linear_names is None:
            return
        missing = set(self.gate_up_pair) - set(self.expert_linear_names)
        if missing:
            raise ValueError(
                f"gate_up_pair {self.gate_up_pair} must be among expert_linear_names "
                f"{self.expert_linear_names}; {sorted(missing)} is not"
            )

    @property
    def gate_up_pairs(self) -> tuple[tuple[str, str], ...]:
        """``gate_up_pair`` as a tuple of none or one, for ``list_all_possible``."""
        return () if self.gate_up_pair is None else (self.gate_up_pair,)

    def matches(self, module: object) -> bool:
        """Return whether ``module``'s class is one of ``block_names``."""
        return match_class_names(module, self.block_names)

    def expert_linear_names_for(
        self, module: object, fused: bool | None = None
    ) -> tuple[str, ...] | None:
        """Return the names of ``module``'s expert projections, or None when unknown here.

        Args:
            module: The MoE block. Its class is not looked at: a spec may give names without
                giving ``block_names``, and there is one layout a model.
            fused: What the caller saw on the module: True for a container with 3-D parameters,
                False for a list of experts. The answer is None when the names describe the
                other form. None accepts either.
        """
        if fused is not None and fused != self.fused_expert_names:
            return None
        return self.expert_linear_names


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSpec(SpecSection):
    """What the exporter needs to know of a model beyond its architecture.

    Attributes:
        grouped_expert_export: Whether the experts may be treated as one group when AWQ or
            SVDQuant scales are averaged. It says what has been validated, not what the model is.
        pqs_fuse_rules: Triples (parts of class names, fuse_into, fuse_from). In a module whose
            class name contains one of the parts, the AWQ ``pre_quant_scale`` of child
            ``fuse_from`` is folded into the rows of child ``fuse_into``. A rule claims that the
            two are equal for this model's modules.
        weight_plus_one_norm_names: Classes of norms that scale by ``weight + 1``. A fold of s
            into such a norm writes ``(weight + 1) * s - 1``. Compared with
            ``match_class_names``.
    """

    grouped_expert_export: bool = False
    pqs_fuse_rules: tuple[tuple[tuple[str, ...], str, str], ...] = ()
    weight_plus_one_norm_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EPSpec(SpecSection):
    """What calibration with sharded experts (expert-parallel ranks) needs of a model.

    Most models need data only. ``prepare`` is for checkpoints that bring their own code.

    Attributes:
        base_model_ep_plan: Parameter glob -> parallel style, set on the config when it has no
            plan of its own. None where transformers ships one: the model's own wins. Where the
            router gives global expert ids, an entry for it would mask them.
        requires_transformers: The first release that shards this model, where that is later than
            what expert parallelism needs anyway. ``min_transformers_version`` is another matter.
        plan_config_attr: The nested config that carries the plan ("text_config"). None: the root.
            Globs are written against that config's module tree; elsewhere they match nothing.
        prepare: ``prepare(hf_config, ckpt_path=..., trust_remote_code=...)`` returns the config
            to load. Called after the fields above were applied.
        prepared_ep_plan: The plan that ``prepare`` sets. Stated, never applied: it lets a run
            without expert parallelism find the routed experts without calling ``prepare``.
        unsupported: Why this model cannot be sharded although its config says it could. The run
            is refused with this reason before weights are read.
    """

    base_model_ep_plan: dict[str, str] | None = None
    requires_transformers: str | None = None
    plan_config_attr: str | None = None
    prepare: Callable[..., Any] | None = None
    prepared_ep_plan: dict[str, str] | None = None
    unsupported: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PTQSpec(SpecSection):
    """What quantization and streaming need to know of a model's layers.

    Attributes:
        layer_names: Classes of the decoder layer, every spelling across releases; each instance
            is one streaming unit. Compared with ``match_class_names``.
        router_names: Children of the MoE block that are never quantized: the router, and gates
            with one output.
        skip_modules: Globs of module names left alone by default besides routers, embeddings and
            the head: towers, projectors, convolutions, extra prediction layers. ``*`` is any run
            of characters, dots included, ``?`` is one. Tensors that no module of the built model
            owns are copied by the accounting and need no glob.
        fused_linears: Groups of children of one parent that engines join into one matrix and
            that therefore share scales. A parent that lacks a member has no such group.
        norm_feeds: Pairs (norm, readers), paths within one decoder layer. A fold into the norm is
            exact only when it reaches every reader that the layer has. A path of the experts
            container stands for the gate and up projection of each expert. Paths that a layer
            lacks are skipped; so are readers whose input width is not the norm's.
        keep_dtype_names: Last parts of names of tensors that keep the source's dtype in the
            loaded model, whatever dtype the rest is loaded in.
        key_value_names: Children of the attention module whose names carry ``k_scale`` and
            ``v_scale``. Engines look for these names even where no such child exists (MLA).
    """

    layer_names: tuple[str, ...] = ()
    router_names: tuple[str, ...] = ()
    skip_modules: tuple[str, ...] = ()
    fused_linears: tuple[tuple[str, ...], ...] = ()
    norm_feeds: tuple[tuple[str, tuple[str, ...]], ...] = ()
    keep_dtype_names: tuple[str, ...] = ()
    key_value_names: tuple[str, str] = ("k_proj", "v_proj")


# For a model without facts of its own: what engines join in every architecture that has it, and
# what routers are called. Seen in the classes of transformers 5.14.1.
STRUCTURAL_PTQ = PTQSpec(
    router_names=("gate", "router"),
    fused_linears=(
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStorageSpec(SpecSection):
    """How the routed experts lie on disk, and how engines want them.

    Letters: E experts, I expert width, H hidden width.

    Attributes:
        container: Path of the experts inside the MoE block.
        linear_names: Names of one expert's linears, (gate, up, down), or (up, down) without a
            gate. Empty where neither checkpoints nor engines know experts one by one.
        stacked_names: Names of the 3-D tensors of checkpoints that store all experts in one:
            (gate and up, down), or (up, down) without a gate. [E, 2I, H] and [E, H, I], gate
            first, unless the two fields below say otherwise. As many as ``linear_names``, in
            the same order, where each stands for one of them.
        stacked_parent: Path inside the block of the module that holds the stacked tensors on
            disk, where that is not ``container``; "" is the block itself.
        input_major: The stacked tensors are [E, H, 2I] and [E, I, H], unless their shapes say
            otherwise.
        either_major: Files of both orientations exist, by the release that wrote them.
        interleaved_gate_up: Gate and up alternate along 2I, gate at 0, 2, 4, ...
        export_stacked: Engines read the stacked names. False: they want one tensor an expert,
            also when the source is stacked.
        shared_expert_names: Children of the block that run for every token.
    """

    container: str = "experts"
    linear_names: tuple[str, ...] = ()
    stacked_names: tuple[str, ...] = ()
    stacked_parent: str | None = None
    input_major: bool = False
    either_major: bool = False
    interleaved_gate_up: bool = False
    export_stacked: bool = False
    shared_expert_names: tuple[str, ...] = ()

    def oriented(self, first: tuple[int, ...], last: tuple[int, ...]) -> ExpertStorageSpec:
        """Return these facts with the orientation that a checkpoint's stacks have.

        Files of both exist for some types: releases of transformers hold the stacks of one type
        either way, and keep what they loaded. Where the shapes leave it open, the spec says it.

        Args:
            first: Shape of the tensor called ``stacked_names[0]``.
            last: Shape of the one called ``stacked_names[-1]``.
        """
        if len(first) != 3 or len(last) != 3 or len(self.stacked_names) != 2:
            return self
        parts = len(self.roles(self.stacked_names[0]))
        output_major = (first[1], first[2]) == (parts * last[2], last[1])
        input_major = (first[1], first[2]) == (last[2], parts * last[1])
        if input_major in (output_major, self.input_major):
            return self
        return replace(self, input_major=input_major)

    def expert_of(self, module: str) -> tuple[int | None, str | None]:
        """Split ``…experts.3.gate_proj`` into (3, "…experts"); (None, None) for other names.

        Some models call them ``experts.expert_3``.
        """
        parts = module.split(".")
        depth = self.container.count(".") + 1
        for at in range(len(parts) - 2, depth - 1, -1):
            label = parts[at].removeprefix("expert_")
            number = label.isascii() and label.isdigit() and len(label) < 10
            if number and ".".join(parts[at - depth : at]) == self.container:
                return int(label), sys.intern(".".join(parts[:at]))  # shared by all experts
        return None, None

    def container_above(self, parent: str) -> str | None:
        """Return the container of the stacked experts in the module ``parent``, None for others."""
        place = self.container if self.stacked_parent is None else self.stacked_parent
        if place and not f".{parent}".endswith(f".{place}"):
            return None
        block = parent.removesuffix(place).removesuffix(".")
        return f"{block}.{self.container}" if block else self.container

    def roles(self, stacked_name: str) -> tuple[str, ...]:
        """Return which of ``linear_names`` a stacked tensor holds, in order."""
        if len(self.stacked_names) == len(self.linear_names):
            return (self.linear_names[self.stacked_names.index(stacked_name)],)
        down = stacked_name == self.stacked_names[-1]
        return self.linear_names[-1:] if down else self.linear_names[:-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamingSpec(SpecSection):
    """What a checkpoint's matrices are called, so that one can be understood without the model.

    Paths and names are given in every spelling that checkpoints have.

    Attributes:
        layer_linear_names: Last parts of the names of a decoder layer's linear layers, the experts'
            among them, routers not.
        layer_lists: Paths of the list of decoder layers.
        embedding_names: The token embedding.
        head_names: The output head; the first is its name in the model.
        is_tied: Head and embedding are one where config.json does not say.
        layer_count_keys: Keys of config.json that give the number of decoder layers, or a list of
            as many; the first that is there holds.
    """

    layer_linear_names: tuple[str, ...] = ()
    layer_lists: tuple[str, ...] = ("model.layers",)
    embedding_names: tuple[str, ...] = ("model.embed_tokens",)
    head_names: tuple[str, ...] = ("lm_head",)
    is_tied: bool = False
    layer_count_keys: tuple[str, ...] = ("num_hidden_layers",)


# q, k, v, o, and a gated MLP, as most models call them.
GATED_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# The low-rank projections of latent attention, and its last one.
LATENT_LINEARS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Everything recorded about one model type; a section it does not need is None.

    Attributes:
        model_type: ``config.model_type``, unique in the registry.
        min_transformers_version: The first release whose classes this spec describes, 4.57 for
            older models (nothing older is supported). None where the code comes with the
            checkpoint.
        removed_in_transformers: The first release without these classes; None where the latest has
            them.
        modeling_source: Where the model's code lives. "remote_code" needs trust_remote_code.
        moe_spec: The MoE layout. None for a dense model.
        export_spec: None when export needs nothing particular.
        ep_spec: None for a dense model, or where stock transformers has all that is needed.
        ptq_spec: None when nothing is known: ``STRUCTURAL_PTQ`` then holds.
        expert_storage_spec: None for a dense model.
        naming_spec: None where names alone do not tell: planning then always needs the model.

    Raises:
        ValueError: An empty ``model_type``.
        TypeError: A field got a value that is not of its type.
    """

    model_type: str
    min_transformers_version: str | None = None
    removed_in_transformers: str | None = None
    modeling_source: Literal["transformers", "remote_code"] = "transformers"
    moe_spec: MoESpec | None = None
    export_spec: ExportSpec | None = None
    ep_spec: EPSpec | None = None
    ptq_spec: PTQSpec | None = None
    expert_storage_spec: ExpertStorageSpec | None = None
    naming_spec: NamingSpec | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.model_type:
            raise ValueError(
                f"model_type is {self.model_type!r}; give the model_type of the model's config.json"
            )


def storage_facts(spec: ModelSpec | None) -> ExpertStorageSpec:
    """Return how a model's experts are stored, or what is usual."""
    return (spec.expert_storage_spec if spec else None) or ExpertStorageSpec()


def ptq_facts(spec: ModelSpec | None) -> PTQSpec:
    """Return a model's PTQ section, or what holds for models that have none."""
    return (spec.ptq_spec if spec else None) or STRUCTURAL_PTQ


@functools.cache
def _spec_sections() -> dict[str, type[SpecSection]]:
    """Map each field of ``ModelSpec`` that holds a section to the section's class."""
    sections: dict[str, type[SpecSection]] = {}
    for field, hint in typing.get_type_hints(ModelSpec).items():
        for part in typing.get_args(hint) or (hint,):
            if isinstance(part, type) and issubclass(part, SpecSection):
                sections[field] = part
    return sections
