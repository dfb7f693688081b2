"""Linear layers of a model, for 1 to 16 rows: `accelerate` replaces their forward, one module at a time. Weights stay where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..shared import linears
from ..shared.linears import MOST, MOST_FMA
from . import gated, scaled, siblings
from .elsewhere import is_elsewhere


def objection(module: torch.nn.Linear) -> str:
    """Why the forward of a linear layer is not replaced, in words; empty if it is."""
    if type(module) is not torch.nn.Linear:
        return "their class has its own forward"
    if "forward" in module.__dict__ or is_elsewhere(module):
        return "something else has replaced their forward"
    return linears.objection(module.weight, module.bias)


def forward(self: torch.nn.Linear, x: Tensor) -> Tensor:
    """The forward of a linear layer on tensor cores: skinny_linear for up to 16 rows (of f32 one), else PyTorch's."""
    return _product(self, x, linears.most_rows(self.weight.dtype, True))


def forward_by_fma(self: torch.nn.Linear, x: Tensor) -> Tensor:
    """The forward of a linear layer without tensor cores: skinny_linear for one row, else PyTorch's."""
    return _product(self, x, linears.most_rows(self.weight.dtype, False))


def _product(self: torch.nn.Linear, x: Tensor, most: int) -> Tensor:
    weight, bias = self.weight, self.bias
    if not linears.fits(x, weight, bias, most):
        return linear(x, weight, bias)
    found = scaled.finished(self, x)
    return siblings.product(self, x) if found is None else found


class Linears:
    """The linear layers of a model whose forward is replaced. `undo` puts PyTorch's back."""

    def __init__(self, model: torch.nn.Module):
        self.modules: list[torch.nn.Linear] = []
        self.mlps: list[Any] = []
        self._left: Counter[str] = Counter()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                if why := objection(module):
                    self._left[why] += 1
                else:
                    self.modules.append(module)
        for module in self.modules:
            module.__dict__["forward"] = MethodType(forward if linears.tensor_cores(module.weight.device) else forward_by_fma, module)
        ours = {*self.modules}
        for mlp in model.modules():
            if gated.is_served(mlp) and ours.issuperset(gated.layers(mlp)):
                self.mlps.append(mlp)
                mlp.__dict__["forward"] = MethodType(gated.forward, mlp)

    @property
    def words(self) -> str:
        """The changed layers and the others, for a report."""
        rows = f"up to {MOST} rows (f32, and GPUs before sm_90: {MOST_FMA})"
        done = f"{len(self.modules)} linear layers multiply {rows} by skinny_linear, and more by PyTorch"
        done += ", and layers that multiply the same x share a launch"
        done += f"; of {len(self.mlps)} MLPs, all products and the activation before the last product are one launch" if self.mlps else ""
        return "; ".join([done, *(f"{count} stay PyTorch's: {why}" for why, count in self._left.items())])

    def load(self, sizes: Iterable[int]) -> None:
        """Compiles and loads the kernels of these numbers of rows."""
        shapes = {_shape(module): module for module in self.modules}
        mlps = {(type(mlp), _shape(gated.layers(mlp)[0])): mlp for mlp in self.mlps}
        with torch.no_grad():
            for rows in {size for size in sizes if size <= MOST}:
                for module in shapes.values():
                    if (x := siblings.zeros(module, rows)) is not None:
                        linears.product(x, module.weight, module.bias)
                siblings.load(self.modules, rows)
                for mlp in mlps.values():
                    if (x := siblings.zeros(gated.layers(mlp)[0], rows)) is not None:
                        gated.multiply(mlp, x)

    def undo(self) -> None:
        """PyTorch's forward, where ours still is. A second time: nothing."""
        for module in self.modules:
            siblings.forget(module)
            if getattr(module.__dict__.get("forward"), "__func__", None) in (forward, forward_by_fma):
                del module.__dict__["forward"]
        for mlp in self.mlps:
            if getattr(mlp.__dict__.get("forward"), "__func__", None) is gated.forward:
                del mlp.__dict__["forward"]
        self.modules, self.mlps = [], []


def _shape(module: torch.nn.Linear) -> Any:
    """The kernels of layers with the same shape are the same."""
    return (module.weight.shape, module.weight.dtype, module.bias is None, module.weight.device)
