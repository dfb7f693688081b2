"""Mamba-3 layers of mamba-ssm and flash-linear-attention, which have the same parameters and states: a step and a prompt of a layer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ArgumentError, PatchError, UnsupportedError
from ...families.mamba3_chunk_scan.call import mamba3_chunk_scan
from ...families.mamba3_state_update.layer import mamba3_layer, parts_of
from ...families.mamba3_state_update.row import Sizes
from .operands import rows_of

FORMS = ("heavy", "softplus")
_LOGITS = (-1e5, -40.0, -2.0, -0.5, 0.0, 0.5, 3.0)
_FLOOR = 1e-4


class States(NamedTuple):
    """A layer's cache, in the order of both packages."""

    angle: Tensor  # [batch, H, n] f32
    ssm: Tensor  # [batch, H, P, N]
    k: Tensor  # [batch, R, H, N]
    v: Tensor  # [batch, H, P]


def layer_of(module: ModuleType | None, path: str, release: str) -> tuple[ModuleType, Any]:
    """(the module of a package's layer, its class Mamba3). path: of the module, which is imported if it is not given; release: the package
    and its first version that has the class, in words.

    Raises PatchError without either.
    """
    if module is None:
        try:
            module = importlib.import_module(path)
        except Exception as e:  # its imports ask for Triton and for a GPU
            raise PatchError(f"cannot import {path} ({type(e).__name__}: {e}). Install {release} or later.") from e
    owner = vars(module).get("Mamba3")
    if not isinstance(owner, type):
        raise PatchError(f"{module.__name__} has no class Mamba3; expected {path} of {release} or later")
    return module, owner


def form_of(where: str, A_form: str | None, A_of: Callable[[SimpleNamespace, Tensor], Tensor]) -> str:
    """The activation of A: as asked for, or as the installed package computes it. No config says it, and releases differ.

    A_of: the package's own A, from a layer with an A_floor and logits. Raises PatchError if it has neither form.
    """
    if A_form is not None:
        if A_form not in FORMS:
            raise PatchError(f"A_form is {A_form!r}; expected 'heavy', 'softplus' or None")
        return A_form
    logits = torch.tensor(_LOGITS)
    forms = {"heavy": logits.clamp(min=0) + 1 / (1 - logits.clamp(max=0)), "softplus": torch.nn.functional.softplus(logits)}
    try:
        found = A_of(SimpleNamespace(A_floor=_FLOOR), logits)
        for name, rate in forms.items():
            if torch.allclose(found, -rate.clamp(min=_FLOOR), rtol=1e-5, atol=0):
                return name
        said = f"A is {[round(a, 4) for a in found.tolist()]} for logits {list(_LOGITS)}"
    except Exception as e:  # another release: its code may fail in any way
        said = f"{type(e).__name__}: {e}"
    raise PatchError(f"{where} computes A in a form that ssmgen does not know ({said}). Pass A_form, and check it against the checkpoint.")


def step(name: str, layer: Any, u: Tensor, states: States, A_form: str) -> Tensor:
    """One token of each sequence, u [batch, d_model]; the states are updated in place. name: of the layer, in errors."""
    problems = _faults(layer)
    problems += _of_other_batch(states, u.shape[0])
    projected = _projected(name, layer, u, problems)
    norm = {"norm_weight": layer.norm.weight} if layer.is_outproj_norm else {}
    y = mamba3_layer(projected, states.ssm, states.k, states.v, states.angle, A_form, _rotary(layer), **_weights(layer), **norm)
    out: Tensor = layer.out_proj(y)
    return out


def prompt(
    name: str, layer: Any, u: Tensor, states: States | None, A_form: str, *, continued: bool = False, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Whole sequences, u [batch, T, d_model], or packed ones of one row.

    states: receive the states after each sequence, and if `continued` also hold those before it; None for none
    """
    problems = _faults(layer)
    sequences = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    problems += [] if states is None else _of_other_batch(states, sequences)
    projected = _projected(name, layer, u, problems)
    parts = parts_of(projected, _sizes(layer))
    if parts is None:
        raise UnsupportedError(name, [f"in_proj has {projected.shape[-1]} outputs, which no number of groups gives"])
    more: dict[str, Any] = parts | {name: _rows(parts[name]) for name in ("x", "z", "B", "C")}
    if states is not None:
        more |= {"state": states.ssm, "k_state": states.k, "v_state": states.v, "angle_state": states.angle}
        if continued:
            more["has_initial_state"] = torch.ones(sequences, dtype=torch.bool, device=u.device)
        elif cu_seqlens is not None or not u.shape[1]:  # a sequence without tokens leaves its states unchanged, and they may be old
            for t in states:
                t.zero_()
    if layer.is_outproj_norm:
        more["norm_weight"] = layer.norm.weight.view(layer.B_bias.shape[0], -1)
    y = mamba3_chunk_scan(A_form=A_form, rotary=_rotary(layer), **_weights(layer), cu_seqlens=cu_seqlens, **more)
    assert isinstance(y, Tensor)  # no states are asked for
    out: Tensor = layer.out_proj(y.flatten(-2).to(projected.dtype))
    return out


def _rows(t: Tensor) -> Tensor:
    """Rows as kernels of prompts take them: copied if a 16-bit row has an odd length, and on a GPU in bf16 if they are f32, as in both
    packages."""
    return rows_of(t.bfloat16() if t.is_cuda and t.dtype == torch.float32 else t)


def _projected(name: str, layer: Any, u: Tensor, problems: list[str]) -> Tensor:
    """The in-projection's output. Raises UnsupportedError for layers and inputs that ssmgen does not serve."""
    if problems:
        raise UnsupportedError(name, problems)
    projected: Tensor = layer.in_proj(u)
    if torch.is_grad_enabled() and (projected.requires_grad or layer.dt_bias.requires_grad):
        said = "a gradient is asked for; expected inference: ssmgen has no backward. Use torch.no_grad(), or undo the patch to train."
        raise UnsupportedError(name, [said])
    return projected


def _sizes(layer: Any) -> Sizes:
    H, R, N = layer.B_bias.shape
    return Sizes(H, layer.out_proj.in_features // H, N, R, layer.num_rope_angles)


def _rotary(layer: Any) -> str:
    return "halves" if layer.is_mimo else "pairs"


def _weights(layer: Any) -> dict[str, Any]:
    """The layer's parameters, as both functions take them."""
    found = {"D": layer.D, "dt_bias": layer.dt_bias, "B_bias": layer.B_bias, "C_bias": layer.C_bias, "A_floor": layer.A_floor}
    found |= {"B_norm": layer.B_norm.weight, "C_norm": layer.C_norm.weight, "eps": layer.B_norm.eps}
    return found | ({"mimo_x": layer.mimo_x, "mimo_z": layer.mimo_z, "mimo_o": layer.mimo_o} if layer.is_mimo else {})


def _of_other_batch(states: States, sequences: int) -> list[str]:
    have = states.ssm.shape[0]
    return [] if have == sequences else [f"the cache holds {have} sequences; expected {sequences}, as many as the call has"]


def _faults(layer: Any) -> list[str]:
    """The differences between a layer and ssmgen's functions, in words."""
    problems, eps = [], layer.B_norm.eps
    if layer.C_norm.eps != eps:
        problems.append(f"C_norm has eps {layer.C_norm.eps}; expected {eps}, as B_norm has")
    if layer.is_outproj_norm:
        norm, P = layer.norm, layer.out_proj.in_features // layer.B_bias.shape[0]
        if norm.eps != eps:
            problems.append(f"norm has eps {norm.eps}; expected {eps}, as B_norm has")
        if norm.group_size != P or not norm.norm_before_gate:
            problems.append(
                f"norm has group_size {norm.group_size} and norm_before_gate {norm.norm_before_gate}; expected {P} and True: a norm of "
                "each head, before the gate"
            )
    return problems


def one_token(name: str, u: Tensor) -> Tensor:
    """u [batch, d_model] of a step's input, which may have an axis of one token."""
    if u.dim() == 3 and u.shape[1] == 1:
        return u.squeeze(1)
    if u.dim() != 2:
        raise ArgumentError(
            name, [f"u is {list(u.shape)}; expected [batch, d_model] or [batch, 1, d_model]. Use forward for several tokens."]
        )
    return u
