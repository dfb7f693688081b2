"""The forms of gate, step size and scale, from a call's arguments, for decode steps and prompts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Form(NamedTuple):
    """The recurrence, in the words of problem.py."""

    delta: str = "decayed"
    gate: str = "log"
    beta: str = "plain"
    l2norm: bool = False


def gate_of(A_log: Tensor | None, lower_bound: float | None) -> str:
    return "bounded" if lower_bound is not None else "log" if A_log is None else "softplus"


def gate_objections(A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None) -> tuple[str, ...]:
    if dt_bias is None or A_log is not None or lower_bound is not None:
        return ()
    return ("dt_bias is given without A_log, so that g is a log decay; expected both. Pass A_log, or leave out dt_bias.",)


def beta_of(beta_sigmoid: bool, allow_neg_eigval: bool = False) -> str:
    return "plain" if not beta_sigmoid else "twice_sigmoid" if allow_neg_eigval else "sigmoid"


def beta_objections(beta_sigmoid: bool, allow_neg_eigval: bool) -> tuple[str, ...]:
    return (
        ("allow_neg_eigval is True and beta_sigmoid is False; expected both: it doubles the sigmoid. Pass beta_sigmoid=True.",)
        if allow_neg_eigval and not beta_sigmoid
        else ()
    )


def scale_of(scale: float | None, keys: Tensor) -> float:
    """The factor of the output: K^-0.5 if none is given. keys: […, K]; the checks report other shapes."""
    if scale is not None:
        return scale
    return keys.shape[-1] ** -0.5 if isinstance(keys, Tensor) and keys.dim() and keys.shape[-1] else 1.0
