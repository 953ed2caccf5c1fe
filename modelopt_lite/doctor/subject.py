"""A spec beside the models that it describes: what every check works on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from modelopt_lite.doctor.anatomy import Block, blocks_in
from modelopt_lite.doctor.findings import Finding
from modelopt_lite.doctor.instance import Instance
from modelopt_lite.models import match_class_names
from modelopt_lite.models.specs import (
    ExpertStorageSpec,
    ExportSpec,
    ModelSpec,
    PTQSpec,
    ptq_facts,
    storage_facts,
)


@dataclass
class Subject:
    """A spec, small models of its type, and what was found so far."""

    spec: ModelSpec
    instances: list[Instance]
    findings: list[Finding] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    blocks: dict[int, list[Block]] = field(default_factory=dict)
    current: Instance | None = None

    def __post_init__(self) -> None:
        for made in self.instances:
            self.blocks[id(made)] = blocks_in(made.model)

    @property
    def ptq(self) -> PTQSpec:
        """The PTQ section, or what holds without one."""
        return ptq_facts(self.spec)

    @property
    def storage(self) -> ExpertStorageSpec:
        """The section of expert storage, or what is usual."""
        return storage_facts(self.spec)

    @property
    def export(self) -> ExportSpec:
        """The export section, or an empty one."""
        return self.spec.export_spec or ExportSpec()

    def each(self) -> Iterator[Instance]:
        """Yield the models one by one; what is said meanwhile is about that model."""
        for made in self.instances:
            self.current = made
            yield made
        self.current = None

    def wrong(self, field_name: str, found: str, remedy: str) -> None:
        """Note that a field is contradicted; the same remedy of a field is told once.

        What only a form shows that the config class allows and does not default to is not proven.
        """
        if self.current is not None and self.current.optional:
            self.open(f"{field_name}: with {self.current.optional}: {remedy}")
        elif not any((f.field, f.remedy) == (field_name, remedy) for f in self.findings):
            self.findings.append(Finding(field_name, found, remedy))

    def open(self, what: str) -> None:
        """Note what could not be held to the model, once."""
        if what not in self.unproven:
            self.unproven.append(what)

    def matched_blocks(self, made: Instance) -> list[Block]:
        """Return the blocks of a model that the spec's class names match."""
        moe = self.spec.moe_spec
        if moe is None:
            return []
        return [b for b in self.blocks[id(made)] if not moe.block_names or moe.matches(b.module)]

    def all_blocks(self) -> Iterator[tuple[Instance, Block]]:
        """Yield every block that the spec matches, with its model."""
        for made in self.each():
            for block in self.matched_blocks(made):
                yield made, block

    def layers(self, made: Instance) -> dict[str, nn.Module]:
        """Return the decoder layers that the spec's class names match."""
        names = self.ptq.layer_names
        return {n: m for n, m in made.model.named_modules() if match_class_names(m, names)}


def listed(names: Any) -> str:
    """Names for a message: sorted, each once, the first eight."""
    unique = sorted(set(names))
    more = f" and {len(unique) - 8} more" if len(unique) > 8 else ""
    return (", ".join(unique[:8]) or "none") + more
