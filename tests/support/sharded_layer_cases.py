"""Decode layers on DTensors: their calls, and how each rank's heads lie. Processes on cards run the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sharded_cases import everywhere, on, piece
from torch.distributed.tensor import DTensor, Shard

import ssmgen

B, H, GROUPS, ROWS, KEYS, WIDTH = 3, 8, 2, 16, 32, 4
WRITTEN = ("state", "conv_state", "intermediate_states", "intermediate_conv_window")
OF_CHANNELS = {"xBC": -1, "mixed_qkv": -1, "conv_state": -2, "conv_weight": 0, "conv_bias": 0, "intermediate_conv_window": -2}


def mamba2(groups=GROUPS, tokens=(), **more):
    inner, channels = H * ROWS, H * ROWS + 2 * groups * KEYS
    call = common(channels, groups, tokens, state=(B, H, ROWS, KEYS)) | {"xBC": torch.randn(B, *tokens, channels)}
    call |= {"dt": torch.randn(B, *tokens, H), "A": -torch.rand(H), "D": torch.randn(H, ROWS), "dt_bias": torch.randn(H)}
    norm = {"norm_weight": torch.rand(inner), "norm_group_size": inner // 4} if groups > 1 else {}
    return call | norm | more


def delta(name, groups=GROUPS, tokens=(), layout="vk", **more):
    channels = 2 * groups * KEYS + H * ROWS
    shape = (B, H, ROWS, KEYS) if layout == "vk" else (B, H, KEYS, ROWS)
    call = common(channels, groups, tokens, state=shape) | {"mixed_qkv": torch.randn(B, *tokens, channels), "state_layout": layout}
    call |= {"A_log": torch.rand(H), "norm_weight": torch.rand(ROWS)}
    gates = {"g": torch.randn(B, *tokens, H * KEYS), "beta": torch.randn(B, *tokens, H), "dt_bias": torch.randn(H, KEYS)}
    if name == "gdn_layer":
        gates = {"a": torch.randn(B, *tokens, H), "b": torch.randn(B, *tokens, H), "dt_bias": torch.randn(H)}
    return call | gates | more


def common(channels, groups, tokens, state):
    torch.manual_seed(0)
    call = {"conv_state": torch.randn(B, channels, WIDTH - 1), "state": torch.randn(state), "z": torch.randn(B, *tokens, H * ROWS)}
    call |= {"arrivals": torch.zeros(B, groups, dtype=torch.int32), "conv_weight": torch.randn(channels, WIDTH)}
    if tokens:
        call |= {"intermediate_states": torch.zeros(B, *tokens, *state[1:])}
        call |= {"intermediate_conv_window": torch.zeros(B, *tokens, channels, WIDTH - 1), "update_state": False}
    return call | {"conv_bias": torch.randn(channels)}


CALLS = {
    "mamba2": ("mamba2_layer", mamba2()),
    "mamba2-one-group": ("mamba2_layer", mamba2(1)),
    "mamba2-shared-norm-weight": ("mamba2_layer", mamba2(norm_weight=torch.rand(2 * ROWS), norm_group_size=2 * ROWS)),
    "mamba2-tokens": ("mamba2_layer", mamba2(tokens=(3,))),
    "gdn": ("gdn_layer", delta("gdn_layer")),
    "gdn-keys-first": ("gdn_layer", delta("gdn_layer", layout="kv")),
    "gdn-tokens": ("gdn_layer", delta("gdn_layer", 4, (3,))),
    "kda": ("kda_layer", delta("kda_layer", 8)),
    "kda-slots": ("kda_layer", delta("kda_layer", state_indices=torch.tensor([2, 0, -1]))),
}


def own(name, t, function, groups, parts, part):
    """The channels of a part of the heads, in the order that the function takes; of a group which parts share, each has a copy."""
    share = H // parts
    first = range(part * groups // parts, max((part + 1) * groups // parts, part * groups // parts + 1))
    keyed = [[(at + i) * KEYS + k for i in first for k in range(KEYS)] for at in (0, groups)]
    rows = list(range(part * share * ROWS, (part + 1) * share * ROWS))
    if function == "mamba2_layer":
        order = rows + [H * ROWS + c for one in keyed for c in one]
    else:
        order = [c for one in keyed for c in one] + [2 * groups * KEYS + c for c in rows]
    return t.index_select(OF_CHANNELS[name] % t.dim(), torch.tensor(order, device=t.device))


def heads_on(mesh, function, call, placed):
    """The call's tensors with states over the heads, and channels as each rank has its own; others "sharded", or "replicated"."""
    parts, part, groups = mesh.size(), mesh.get_rank(), call["arrivals"].shape[1]
    over = [Shard(0)] * mesh.ndim

    def local(name, t):
        dim = OF_CHANNELS[name] % t.dim()
        return DTensor.from_local(own(name, t, function, groups, parts, part), mesh, [Shard(dim)] * mesh.ndim, run_check=False)

    theirs = everywhere(mesh, call) | {n: t for n, t in call.items() if n == "state_indices"}
    lasting = {"state": 1, "intermediate_states": 2}
    theirs |= {n: on(mesh, call[n], *[Shard(d)] * mesh.ndim) for n, d in lasting.items() if n in call}
    channelled = OF_CHANNELS if placed == "sharded" else WRITTEN
    theirs |= {n: local(n, call[n]) for n in channelled if n in OF_CHANNELS and n in call}
    if placed == "sharded":
        by_head = ("A", "D", "dt_bias", "A_log")
        theirs |= {n: on(mesh, call[n], *over) for n in by_head if n in call}
    return theirs


def agrees(mesh: Any, device: str, case: str, placed: str) -> None:
    """Two steps of a layer: outputs and all that is written."""
    function, call = CALLS[case]
    run = getattr(ssmgen, function)
    mine = {n: t.to(device, copy=True) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    theirs = heads_on(mesh, function, mine, placed)
    groups, parts, rank = call["arrivals"].shape[1], mesh.size(), mesh.get_rank()
    for _ in range(2):
        want, out = run(**mine), run(**theirs)
        assert torch.equal(out.to_local(), piece(want, mesh, [Shard(out.ndim - 1)]))
    for name in WRITTEN:
        if name in call:
            channels = own(name, mine[name], function, groups, parts, rank) if name in OF_CHANNELS else None
            expected = piece(mine[name], mesh, theirs[name].placements) if channels is None else channels
            assert torch.equal(theirs[name].to_local(), expected), name


def cases(device: str) -> dict[str, Callable[[Any], None]]:
    every = [(case, placed) for case in CALLS for placed in ("sharded", "replicated")]
    return {f"{case}-{placed}": lambda mesh, c=case, p=placed: agrees(mesh, device, c, p) for case, placed in every}
