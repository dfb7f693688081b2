"""The worker of the interpreted platform, and functions of Triton that its interpreter lacks for vLLM's kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

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


class InterpretedWorker(CPUWorker):
    """vLLM's for CPUs, without the pools of memory that other platforms can put aside."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        return nullcontext()
