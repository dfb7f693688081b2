"""Gated norms of transformers' models: what `patch(fuse=True)` puts in the place of their forward, for prompts above all.

Whole decode layers have the norm in their own kernels. Over a prompt it is a dozen PyTorch operations on f32 copies of the scan's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..calls.checks import DTYPES
from ..families.gated_rms_norm import call as native
from .hf_functions import Replacement, attempt, call, other_forward

NORMS = {
    "mamba2": "MambaRMSNormGated",
    "bamba": "BambaRMSNormGated",
    "falcon_h1": "FalconH1RMSNormGated",
    "granitemoehybrid": "GraniteMoeHybridRMSNormGated",
    "nemotron_h": "NemotronHRMSNormGated",
    "zamba2": "Zamba2RMSNormGated",
    "qwen3_next": "Qwen3NextRMSNormGated",
    "qwen3_5": "Qwen3_5RMSNormGated",
    "qwen3_5_moe": "Qwen3_5MoeRMSNormGated",
    "qwen4_exp": "Qwen4ExpTextRMSNormGated",
    "olmo_hybrid": "OlmoHybridRMSNormGated",
    "kimi_linear": "KimiLinearRMSNormGated",
    "glm5_next": "Glm5NextTextRMSNormGated",
    "bailing_hybrid": "BailingHybridRMSNormGated",
}
"""Classes of modeling files, by the name of transformers' model folder."""


def has(modeling: Any, model: str) -> bool:
    """Whether the modeling file has the norm: in transformers 5.17, Nemotron-H's layers have Zamba2's, which is that model's to replace."""
    return model in NORMS and hasattr(modeling, NORMS[model])


def objection(norm: Any) -> str:
    """What keeps a norm's forward from being replaced, or nothing."""
    return other_forward(norm, "self", "hidden_states", "gate", more=False)


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
    """What stands for a norm's forward: the original one, without a count, with grad enabled, and in compiled code of other dtypes."""

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
