"""Prepares kernels before a CUDA graph or the first token: for one operator's call, or for all calls of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch  # whole, before parts of it: another thread may be importing it

from ..calls import api


def warm(operator: Callable[..., Any] | torch.nn.Module, *args: Any, batches: Iterable[int] = (), **kwargs: Any) -> int:
    """Compiles (in parallel) and loads what a call needs, without launching it, so that it can be captured in a CUDA graph.

    args, kwargs: the call's; tensors are looked at, not read or written. batches: further batch sizes that the same call
    will be made with. Returns the number of kernels that were not loaded before.
    Raises what the call would raise.

    A model of transformers instead of the operator is warmed by ssmgen.compat.hf.warm, which generates two tokens with it: batches are
    those it will decode with, by default 1; its other arguments may follow. Raises what that does.
    """
    if isinstance(operator, torch.nn.Module):
        from . import hf  # which needs transformers

        return hf.warm(operator, *args, **(kwargs | {"batches": batches} if batches else kwargs))
    return api.warm(operator, *args, batches=batches, **kwargs)
