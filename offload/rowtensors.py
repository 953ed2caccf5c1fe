"""Rows of stacked experts as tensors of their own, that labels bring in like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from modelopt_lite.errors import OffloadError
from modelopt_lite.offload.cargo import Cargo, IndirectCargo, Managed, is_plain, plan_block
from modelopt_lite.offload.diskblock import block_from_memory
from modelopt_lite.offload.expertgroups import OpenTrap, StackedExperts, serving


class RowTensors:
    """The part of `TensorManager` that knows rows.

    A stacked parameter itself stays where it rests, with its true values: what moves are its rows.
    """

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Tensor]] = {}  # label of a group -> parameter -> its rows
        self._rows_of: dict[int, list[Tensor]] = {}  # id of a parameter -> all its rows
        self._rest_of: dict[int, Tensor] = {}  # id of rows -> where the parameter has them
        self._copied: dict[int, int] = {}  # id of rows that are kept as a copy -> their version
        self.table: dict[int, Tensor] = {}

    def can_split(self, parameter: nn.Parameter) -> bool:
        """Whether rows of a parameter can be brought in by themselves."""
        return is_plain(parameter) and parameter.is_contiguous()

    def split(self, experts: Iterable[StackedExperts]) -> None:
        """From the next `assign` on, bring stacked experts in by their groups."""
        for each in experts:
            for label, rows in each.groups.items():
                found = {n: self._rows_at_rest(p, rows) for n, p in each.parameters.items()}
                self._rows[label] = found
                for name, parameter in each.parameters.items():
                    self._rows_of.setdefault(id(parameter), []).append(found[name])
                    self._rest_of[id(found[name])] = found[name].detach()

    def serve(
        self, experts: StackedExperts, trap: OpenTrap
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return what opens a context for a container's forward."""
        places = {name: _place(p) for name, p in experts.parameters.items()}

        def opened() -> AbstractContextManager[None]:
            for name, parameter in experts.parameters.items():
                if _place(parameter) != places[name]:
                    raise OffloadError(
                        f"{name!r} was given other data, and its experts come in by groups; change "
                        "its values in place (copy_), or release() the model before"
                    )
            return serving(experts, self._rows, trap, self._renew)

        return opened

    def _note_kept(self, rows: Tensor) -> None:
        """Remember that rows stay on the device, as a copy of what the parameter has."""
        rest = self._rest_of.get(id(rows))
        self._copied.pop(id(rows), None)
        if rest is not None and rows.data_ptr() != rest.data_ptr():
            self._copied[id(rows)] = rows._version

    def _renew(self, rows: Tensor) -> None:
        """Copy rows again that are kept as a copy, where the parameter was changed."""
        version = self._copied.get(id(rows))
        if version is not None and version != rows._version:
            with torch.inference_mode(False), torch.no_grad():
                rows.data.copy_(self._rest_of[id(rows)])
            self._copied[id(rows)] = rows._version

    @property
    def _managed_rows(self) -> Mapping[str, list[Managed]]:
        return {
            label: [
                Managed(f"{name}{label[label.rindex('[') :]}", rows) for name, rows in found.items()
            ]
            for label, found in self._rows.items()
        }

    def _rows_at_rest(self, parameter: nn.Parameter, rows: range) -> Tensor:
        with torch.inference_mode(False):
            return parameter.detach()[rows.start : rows.stop]

    def _pack_rows(self, label: str, managed: Sequence[Managed], *, indirect: bool) -> Cargo:
        """Return a cargo that is copied from where the rows are: nothing is packed before."""
        resting = tuple(self._rest_of[id(m.tensor)] for m in managed)
        for m, rest in zip(managed, resting, strict=True):
            m.bind(rest)
            self._copied.pop(id(m.tensor), None)
        offsets, size = plan_block(resting)
        known = (label, tuple(managed), offsets, size, block_from_memory(resting, offsets), resting)
        return IndirectCargo(*known, self.table) if indirect else Cargo(*known)


def _place(parameter: nn.Parameter) -> int:
    with torch._C.DisableTorchFunction():
        return parameter.data_ptr()
