"""Gated norms of transformers' models: `patch(fuse=True)` replaces their forward, mainly for prompts.

Whole decode layers have the norm in their own kernels. Over a prompt it is a dozen PyTorch operations on f32 copies of the scan's output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...calls.checks import DTYPES
from ...errors import ArgumentError
from ...families.gated_rms_norm import call as native
from . import roles, texts
from .functions import call
from .replacements import Replacement, attempt

SUFFIX = "RMSNormGated"


def classes(modeling: ModuleType) -> tuple[str, ...]:
    """Names of a modeling file's own gated norms. In transformers 5.17 Nemotron-H's layers have Zamba2's, which counts as Zamba2's."""
    return tuple(name for name in texts.own_modules(modeling) if name.endswith(SUFFIX))


def objection(norm: Any) -> str:
    """Why a norm's forward cannot be replaced; empty if it can."""
    return roles.objection(norm, "hidden_states", "gate", more=False) or _difference(norm, norm.forward)


@cache
def _difference(norm: Any, _: Any) -> str:
    """How a class of norms differs from ssmgen's, tried on f32 numbers with every order of norm and gate that its constructor takes."""
    g = torch.Generator("cpu").manual_seed(0)
    x, gate, weight = (torch.randn(shape, generator=g, device="cpu") for shape in ((2, 4, 64), (2, 4, 64), (64,)))
    told, parameters = {"group_size": 16, "n_groups": 4, "eps": 0.125}, inspect.signature(norm.__init__).parameters
    for more in ({"norm_before_gate": True}, {"norm_before_gate": False}):
        given = {name: value for name, value in (told | more).items() if name in parameters}
        try:
            with torch.device("cpu"), torch.no_grad():
                made = norm(64, **given).float()
                made.weight.copy_(weight)
                want, got = made(x, gate), gated_rms_norm(made, x, gate)
        except (AttributeError, RuntimeError, TypeError, ArgumentError) as e:
            return f"a trial call of it fails: {type(e).__name__}: {e}"
        if got.shape != want.shape or not torch.allclose(got, want, rtol=1e-5, atol=1e-5):
            return "its results differ from those of a gated RMSNorm"
    return ""


def gated_rms_norm(norm: Any, hidden_states: Tensor, gate: Tensor | None) -> Tensor:
    """hidden_states, gate [..., channels] -> a new tensor of the same shape and dtype, by the norm's weight and settings."""
    x, gate = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (hidden_states, gate))
    told, channels = norm.__dict__, hidden_states.shape[-1]
    if "activation" in told:  # of delta rules: a head's channels, its norm first
        how = {"norm_before_gate": True, "activation": told["activation"]}
    else:
        groups = told.get("group_size") or channels // told.get("n_groups", 1)
        how = {"norm_before_gate": told.get("norm_before_gate", False), "group_size": groups}
    out: Tensor = call(native.gated_rms_norm, x, gate, norm.weight, norm.variance_epsilon, **how)
    return out


def run(replacement: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a norm's forward. With grad enabled, and in compiled code of other dtypes, it calls the original, uncounted."""

    def run(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Any:
        given = (t.dtype for t in (hidden_states, gate, self.weight) if t is not None)
        if torch.is_grad_enabled() or (is_compiling() and any(dtype not in DTYPES for dtype in given)):
            return original(self, hidden_states, gate)
        result, reason = attempt(replacement, gated_rms_norm, self, hidden_states, gate)
        if reason is None:
            return result
        replacement.keep(reason)
        return original(self, hidden_states, gate)

    return run
