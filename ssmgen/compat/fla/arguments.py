"""Arguments that functions of flash-linear-attention share: their meanings, and the errors for arguments without a counterpart here."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError

Result = tuple[Tensor, Tensor | None]
# Arguments of `takes`.
STATES = {"initial_state": "[N, HV, K, V] or, with state_v_first, [N, HV, V, K]", "cu_seqlens": "[N + 1]", "v": "[B, T, HV, V]"}


def v_first(state_v_first: bool, others: dict[str, Any]) -> bool:
    """state_v_first, or the value under its old name. Nothing else may be among the keywords."""
    if "transpose_state_layout" in others:
        if state_v_first or not isinstance(others["transpose_state_layout"], bool):
            problem = (
                "state_v_first and transpose_state_layout are both given; expected one bool: the second is the older name. "
                "Pass state_v_first."
            )
            raise ArgumentError("flash-linear-attention's function", [problem])
        warnings.warn("transpose_state_layout is deprecated. Pass state_v_first.", DeprecationWarning, stacklevel=3)
        state_v_first = others.pop("transpose_state_layout")
    none_of(others)
    return state_v_first


def none_of(others: dict[str, Any]) -> None:
    if others:
        raise NotImplementedError(f"ssmgen does not know {', '.join(others)}, and ignores no argument. Leave it out.")


def forward_only(reverse: bool) -> None:
    if reverse:
        raise NotImplementedError("reverse is True; expected False: decode steps go forward in time")


def gate(
    name: str, use_gate_in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> tuple[Tensor | None, Tensor | None, float | None]:
    """(A_log, dt_bias, lower_bound) of a raw gate, or None three times: without use_gate_in_kernel they do not count.

    A_log may have any shape of HV elements, as there: its layers keep [1, 1, HV, 1].
    """
    if not use_gate_in_kernel:
        return None, None, None
    if A_log is None and lower_bound is None:
        raise ArgumentError(name, ["A_log is None with use_gate_in_kernel=True; expected A_log"])
    if isinstance(A_log, Tensor) and A_log.dim() > 1:
        A_log = A_log.reshape(-1)
    return A_log, dt_bias, lower_bound


def beta_of(name: str, beta: Tensor | None, v: Tensor, sigmoid: bool = False, allow_neg_eigval: bool = False) -> Tensor:
    """beta, or where it is None one for every head."""
    if allow_neg_eigval and not sigmoid:
        raise ArgumentError(name, ["allow_neg_eigval is True and use_beta_sigmoid_in_kernel False; expected both: it doubles the sigmoid"])
    return v.new_ones(()).expand(v.shape[:-1]) if beta is None else beta  # one element, with strides of zero


def decay_of(function: str, g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    """The decay per head of linear attention. function: ssmgen's, in the error for two of them."""
    if g is not None and g_gamma is not None:
        raise NotImplementedError(
            f"g and g_gamma are both given; expected one: ssmgen's {function} has one decay per head. Add g_gamma to g."
        )
    return g_gamma if g is None else g


def slopes(name: str, q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """[H], the decays of a layer of Lightning attention."""
    if not 0 <= layer_idx < num_layers:
        raise ArgumentError(name, [f"layer_idx is {layer_idx}; expected a layer below num_layers {num_layers}"])
    heads = q.shape[-2]
    return (8 / max(heads, 1) * (1 - layer_idx / num_layers)) * torch.arange(heads, dtype=torch.float32, device=q.device)
