"""The worker of the interpreted platform, and functions of Triton that its interpreter lacks for vLLM's kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from vllm.v1.worker.cpu_worker import CPUWorker


class Executor(interpreter.GridExecutor):
    """Runs a grid. The convolution's function of the grid's size puts tensors among the arguments, after these were converted."""

    def __init__(self, fn: Any, arg_names: Any, grid: Any, *hooks: Any) -> None:
        super().__init__(fn, arg_names, partial(_sized, grid) if callable(grid) else grid, *hooks)


def _sized(grid: Callable[[dict[str, Any]], tuple[int, ...]], arguments: dict[str, Any]) -> tuple[int, ...]:
    size = grid(arguments)
    arguments.update({name: interpreter._implicit_cvt(value) for name, value in arguments.items() if isinstance(value, Tensor)})
    return size


interpreter.GridExecutor = Executor


# The kernels of flash-linear-attention have aliases of Triton's functions, which the interpreter does not replace.
@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def exp2(x):
    return tl.exp2(x)


@triton.jit
def log(x):
    return tl.log(x)


def numbers(*bounds: Any) -> Any:
    """range, with tensors for numbers where a bound is a tensor, as in compiled kernels."""
    found = range(*bounds)
    return map(interpreter.interpreter_semantic.to_tensor, found) if any(isinstance(bound, tl.tensor) for bound in bounds) else found


ALIASES = {"exp": exp, "exp2": exp2, "log": log}
KERNELS = ("vllm.third_party.flash_linear_attention.ops", "vllm.models.kimi_k3.nvidia.ops.third_party.kda")
LAYER = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"


def gather_initial_states(state: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    """vLLM's function, whose own asks for a GPU: the states of slots, zeros for sequences that begin."""
    return torch.where(has_initial_state.reshape(-1, *[1] * (state.dim() - 1)), state[indices], torch.zeros((), dtype=state.dtype))


class NoStream:
    """A CUDA stream that a model makes and does not use."""


def interpret_kimi_delta_attention() -> None:
    """Makes vLLM's kernels of Kimi delta attention run in the interpreter, and its model be built without a GPU."""
    for name in KERNELS:
        import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith(KERNELS):
            vars(module).update({alias: function for alias, function in ALIASES.items() if hasattr(module, alias)}, range=numbers)
    import_module(LAYER).gather_initial_states = gather_initial_states  # type: ignore[attr-defined]
    torch.cuda.Stream = NoStream  # type: ignore[assignment,misc]


class InterpretedWorker(CPUWorker):
    """vLLM's for CPUs, without the pools of memory that other platforms can put aside."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        return nullcontext()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.model_config.hf_config.model_type == "kimi_linear":
            interpret_kimi_delta_attention()
        super().load_model(*args, **kwargs)
