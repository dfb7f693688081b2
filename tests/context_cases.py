"""Calls whose tokens lie on several ranks, compared with the same calls on one. Every case is a function of a mesh of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sharded_calls import BF16, F32, H, N, P, Tensors, linear, mamba, normal

import ssmgen
from ssmgen import distributed
from ssmgen.calls.sharding_rules import RULES

PIECES = {2: (61, 39), 4: (33, 40, 0, 27)}  # tokens of each rank, by how many ranks there are
TOKENS = 100
# Sequences begin on an edge, have no tokens, end on the rank where they began, and go over one, two and all edges.
STARTS = {"several": (0, 20, 33, 33, 61, 90, 100), "one": (0, 100), "gaps": (5, 70, 98)}


def inputs(name: str, device: str, dtype: torch.dtype) -> Tensors:
    """A call's arguments, of one batch of TOKENS tokens; for causal_conv1d also."""
    if name == "causal_conv1d":
        return {
            "x": normal(device, 4, 24, TOKENS, dtype=dtype),
            "weight": normal(device, 24, 4),
            "bias": normal(device, 24),
            "activation": "silu",
        }
    call = mamba(device, 2, (TOKENS,)) if name == "chunk_scan" else linear(device, name.removeprefix("chunk_"), 2, (TOKENS,))
    call = {n: t for n, t in call.items() if n not in ("state", "gv")}
    for n, t in call.items():
        if isinstance(t, torch.Tensor) and t.dim() == 4:
            call[n] = t.to(dtype)
    return call


def divided(function: str, call: Tensors, pieces: tuple[int, ...], rank: int) -> Tensors:
    """A rank's tokens."""
    dims = {n: t.dim() for n, t in call.items() if isinstance(t, torch.Tensor)}
    first, found = sum(pieces[:rank]), dict(call)
    for n in dims:
        words = RULES[function].axes_of(n, dims, dims[n])
        if "token" in words:
            found[n] = call[n].narrow(words.index("token"), first, pieces[rank])
    return found


def packed(function: str, call: Tensors, starts: tuple[int, ...]) -> Tensors:
    """Its first row, as packed sequences."""
    dims = {n: t.dim() for n, t in call.items() if isinstance(t, torch.Tensor)}
    rows = {n: call[n][0] if "batch" in RULES[function].axes_of(n, dims, dims[n]) else call[n] for n in dims}
    word = "query_start_loc" if function == "causal_conv1d" else "cu_seqlens"
    device = next(iter(rows.values())).device
    return call | rows | {word: torch.tensor(starts, dtype=torch.int32, device=device)}


def states(function: str, call: Tensors, dtype: torch.dtype = F32) -> torch.Tensor:
    """What its sequences begin in."""
    starts = call.get("cu_seqlens", call.get("query_start_loc"))
    count = 4 if starts is None else len(starts) - 1
    some = next(t for t in call.values() if isinstance(t, torch.Tensor))
    if function == "causal_conv1d":
        return normal(some.device, count, 24, 3, dtype=call["x"].dtype)
    rows = (N, P) if call.get("state_layout") == "kv" else (P, N)
    return normal(some.device, count, H, *rows, dtype=dtype)


def exact(function: str, call: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states of the whole call, by the reference in f64; but outputs are rounded to their dtype."""
    made = getattr(ssmgen, function).build(**{n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in call.items()})
    views = made.caller.checked(made.operands, made.options, None, made.objections)
    views["final_states"] = views["final_states"].to(torch.promote_types(views["final_states"].dtype, torch.float64))
    if made.before is not None:
        made.before()
    made.caller.reference(views, made.options, torch.float64)
    return made.operands["out"], views["final_states"]


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """Relative error in the L2 norm."""
    assert got.shape == want.shape, (got.shape, want.shape)
    error = (got.double().cpu() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= bound, f"{float(error):.2e} above {bound:.2e}"


def agrees(mesh: Any, function: str, call: Tensors, begin: torch.Tensor | None, bounds: tuple[float, float]) -> None:
    """This rank's outputs and all final states, at bounds on each one's error."""
    group, rank, pieces = mesh.get_group(), mesh.get_local_rank(), PIECES[mesh.size()]
    call = call | ({} if begin is None else {"initial_states": begin}) | {"return_final_states": True}
    out, final = exact(function, call)
    mine = divided(function, call, pieces, rank)
    got, ends = getattr(distributed, function)(**mine, group=group)
    if begin is not None:
        assert ends.dtype == begin.dtype
    want = divided(function, {next(n for n in RULES[function].returns): out}, pieces, rank)["out"]
    starts = call.get("cu_seqlens", call.get("query_start_loc"))
    if starts is not None:  # what is of no sequence has no output
        first = sum(pieces[:rank])
        own = [t for t in range(pieces[rank]) if starts[0] <= first + t < starts[-1]]
        axis = -1 if function == "causal_conv1d" else 0
        got, want = got.index_select(axis, torch.tensor(own, device=got.device).long()), want.index_select(axis, torch.tensor(own).long())
    if want.numel():
        close(got, want, bounds[0])
    close(ends, final, bounds[1])
    again = getattr(distributed, function)(**mine, group=group)
    assert torch.equal(again[1], ends)


def cases(device: str) -> dict[str, Callable[[Any], None]]:
    """References on the CPU work in f32: a state is off by some ulps of a sum of 100 tokens, an output of 16 bits by their rounding."""
    found: dict[str, Callable[[Any], None]] = {}
    for function in distributed.functions():
        torch.manual_seed(0)
        dtype = F32 if function in ("chunk_scan", "chunk_simple_gla", "chunk_lightning_attn", "causal_conv1d") else BF16
        call = inputs(function, device, dtype)
        bounds = (2e-6 if dtype is F32 else 2.0**-8, 2e-6)
        kv = {} if "state_layout" not in getattr(ssmgen, function).names else {"state_layout": "kv"}
        forms = {"rows": call, "kv" if kv else "": call | kv} | {how: packed(function, call, STARTS[how]) for how in STARTS}
        for how, form in forms.items():
            if how:
                begin = states(function, form) if how != "one" else None
                found[f"{function}-{how}"] = partial(agrees, function=function, call=form, begin=begin, bounds=bounds)
    return found
