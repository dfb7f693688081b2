"""Launches the kernels of a call one by one, for callers that run other work between them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from ..launch import runtime
from ..select import registry
from ..spec.kernel import SM90, Arch
from .fast_path import Table
from .operator import Call
from .planning import grid_of

_chosen, _launches = Table(), Table()


class Kernels:
    """Chooses, loads and launches a call's kernels on a GPU. Calls share a launch if only their tensor addresses differ, with equal
    alignment."""

    def __init__(self, call: Call, more: Mapping[str, Tensor]):
        """more: operands of kernels that are not operands of the call."""
        self.call, self.operands = call, {**call.operands, **more}

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """The call's operands, checked. Raises ArgumentError."""
        call = self.call
        return call.caller.checked(call.operands, call.options, call.pdl, call.objections)

    @cached_property
    def device(self) -> int:
        index: int = next(iter(self.operands.values())).device.index
        return index

    @property
    def arch(self) -> Arch:
        return runtime.device_arch(self.device)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Everything that the choice of kernels and their launches depend on."""
        laid = [(name, t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for name, t in self.operands.items()]
        return (self.call.caller.name, self.call.options, self.call.pdl, self.device, *laid)

    def chosen(self) -> Any:
        """The variant that serves the call."""
        if not (found := _chosen.rows.get(self.key)):
            _chosen.add(self.key, self.choose(self.arch, runtime.device_name(self.device)))
            found = _chosen.rows[self.key]
        return found[0]

    def choose(self, arch: Arch, device: str | None) -> Any:
        call, family = self.call, self.call.caller.family
        problem = family.problem_of(self.views, {name: t.data_ptr() for name, t in call.operands.items()}, call.options)
        pdl = arch >= SM90 if call.pdl is None else call.pdl
        return registry.select(family.operator, problem, family.size_of(self.views), arch, pdl, device)

    def launch(self, kernel: Any) -> None:
        """On the current stream."""
        key = (kernel, self.key)
        if not (found := _launches.rows.get(key)):
            family, name = self.call.caller.family, self.call.caller.name
            values, grid = family.values_of(kernel, self.views, self.call.options), grid_of(family, name, kernel, self.views)
            _launches.add(key, runtime.Launch(runtime.load(kernel, self.device, name), self.device, grid, values))
            found = _launches.rows[key]
        found[0].at([self.operands[name].data_ptr() for name in kernel.operands()])()
