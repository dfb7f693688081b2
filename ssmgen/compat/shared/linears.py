"""Linear layers with skinny_linear: which layers and how many rows it multiplies. `accelerate` and both engines' plugins ask here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...calls.checks import DTYPES
from ...calls.planning import is_memory
from ...families.skinny_linear.call import skinny_linear
from ...families.skinny_linear.problem import MAX_K, ROWS
from ...launch.runtime import device_arch
from ...spec.kernel import SM90
from . import invariance
from .replacing import Engine, NotReplaced, Replacement

MOST = ROWS[-1]  # rows
MOST_FMA = 1  # without tensor cores (f32 weights; GPUs before sm_90), cuBLAS was faster for 8 rows


def objection(weight: Tensor, bias: Tensor | None) -> str:
    """Why skinny_linear does not multiply with these weights, in words; empty if it does. Weights sharded over ranks: this rank's part."""
    if not is_memory(type(weight)):
        return f"their weights are of class {type(weight).__name__}"
    if weight.dtype not in DTYPES:
        return f"their weights are {str(weight.dtype).removeprefix('torch.')}"
    if weight.dim() != 2 or not weight.numel() or any(n % 8 for n in weight.shape) or weight.shape[1] > MAX_K:
        return "their sizes are not multiples of 8"
    if weight.stride(1) != 1 or weight.stride(0) * weight.element_size() % 16 or weight.data_ptr() % 16:
        return "rows of their weights do not begin at multiples of 16 bytes"
    return "" if bias is None or (bias.dtype in DTYPES and bias.is_contiguous()) else "their biases are not contiguous floats"


def tensor_cores(device: torch.device) -> bool:
    """Whether skinny_linear has tensor cores for 16-bit weights on this device. A CPU runs the reference and counts as such a device."""
    return device.type != "cuda" or device_arch(device.index) >= SM90


def most_rows(dtype: torch.dtype, cores: bool) -> int:
    """The rows of x up to which skinny_linear multiplies. dtype: of the weights   cores: whether the device has tensor cores for it"""
    return MOST if cores and dtype is not torch.float32 else MOST_FMA


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, most: int) -> bool:
    """Whether x has 1 to `most` rows of the weight's dtype, and no gradient is recorded."""
    return x.dtype == weight.dtype and 0 < x.numel() <= most * x.shape[-1] and not _records(x, weight, bias)


def is_possible(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call of some number of rows may be served, as far as a tracer knows: dtypes, the weight's sizes, gradients."""
    sizes = weight.dim() == 2 and weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
    return sizes and weight.dtype in DTYPES and x.dtype == weight.dtype and not _records(x, weight, bias)


def _records(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a gradient is recorded."""
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias by skinny_linear, for any strides of x. Raises the errors of skinny_linear."""
    found: Tensor = skinny_linear(in_rows(x), weight, bias)  # type: ignore[assignment]  # of one weight
    return found


def in_rows(x: Tensor) -> Tensor:
    """x if its rows have one distance or it is contiguous, else a copy."""
    return x if x.stride(-1) == 1 and sum(n > 1 for n in x.shape[:-1]) <= 1 else x.contiguous()


def served(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of an engine's layer. Raises NotReplaced for calls that stay the engine's own, and the errors of skinny_linear."""
    if not fits(x, weight, bias, most_rows(weight.dtype, tensor_cores(weight.device))) or objection(weight, bias):
        raise NotReplaced
    return product(x, weight, bias)


def stays() -> bool:
    """Whether linear layers stay the engine's own in this process: in a batch-invariant mode, more than 16 rows have other bits."""
    return invariance.on()


stays._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, which would import Dynamo here


class Layers:
    """One engine's linear layers in graphs of torch.compile: `call` is an operator that chooses by the number of rows when it runs.

    name: of the operator, in torch.ops.ssmgen   engine: the owner of the log and of the mode
    A graph of any number of rows is therefore one graph, without a guard on it. Calls that skinny_linear refuses run
    torch.nn.functional.linear, as the engine's own method does.
    """

    library = torch.library.Library("ssmgen", "FRAGMENT")

    def __init__(self, name: str, engine: Callable[[], Engine]):
        self.engine = engine
        self._run: Callable[..., Any] | None = None
        self.library.define(f"{name}(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=torch.Tag.needs_fixed_stride_order)
        for key in ("CUDA", "CPU"):
            self.library.impl(name, self.run, key)
        torch.library.register_fake(f"ssmgen::{name}", _like, lib=self.library)
        self.call = getattr(torch.ops.ssmgen, name).default

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product, by skinny_linear or by PyTorch."""
        if self._run is None:
            self._run = self.engine().with_the_original_behind(Replacement("torch.nn.functional", "linear", served, backward=True), linear)
        found: Tensor = self._run(x, weight, bias)
        return found


def _like(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
