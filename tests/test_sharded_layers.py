"""Decode layers on DTensors: each rank of a mesh, one at a time, computes its heads' part of what one device computes."""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from test_sharded import everywhere, on, piece, rank_of
from torch.distributed.tensor import DTensor, Replicate, Shard

import ssmgen
from ssmgen.errors import ArgumentError

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
    return t.index_select(OF_CHANNELS[name] % t.dim(), torch.tensor(order))


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


@pytest.mark.parametrize("placed", ["sharded", "replicated"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CALLS)
def test_every_rank_computes_its_heads(case, shape, placed):
    function, call = CALLS[case]
    run, mine = getattr(ssmgen, function), {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    wants = [run(**mine).clone() for _ in range(2)]
    groups, parts = call["arrivals"].shape[1], torch.Size(shape).numel()
    for rank in range(parts):
        with rank_of(rank, *shape) as mesh:
            theirs = heads_on(mesh, function, call, placed)
            for want in wants:
                out = run(**theirs)
                over = [Shard(out.ndim - 1)] * mesh.ndim
                assert out.placements == tuple(over) and out.shape == want.shape
                assert torch.equal(out.to_local(), piece(want, mesh, over))
            for name in WRITTEN:
                if name in call:
                    expected = own(name, mine[name], function, groups, parts, rank) if name in OF_CHANNELS else None
                    expected = piece(mine[name], mesh, theirs[name].placements) if expected is None else expected
                    assert torch.equal(theirs[name].to_local(), expected), name


@pytest.mark.parametrize("case", ["mamba2", "gdn"])
def test_sequences_may_be_divided(case):
    function, call = CALLS[case]
    run, mine = getattr(ssmgen, function), {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    want = run(**mine)
    for rank in range(2):
        with rank_of(rank, 2) as mesh:
            theirs = everywhere(mesh, call) | {n: on(mesh, call[n], Shard(0)) for n in ("state", "conv_state")}
            out = run(**theirs)
            assert out.placements == (Shard(0),) and torch.equal(out.to_local(), piece(want, mesh, [Shard(0)]))
            assert torch.equal(theirs["conv_state"].to_local(), piece(mine["conv_state"], mesh, [Shard(0)]))


def refused(call, change=dict, shape=(4,)):
    with rank_of(1, *shape) as mesh:
        theirs = heads_on(mesh, "mamba2_layer", call, "replicated") | change()
        before = theirs["state"].to_local().clone()
        with pytest.raises(ArgumentError) as error:
            ssmgen.mamba2_layer(**theirs)
        assert torch.equal(theirs["state"].to_local(), before)
    return error.value.problems


def test_what_cannot_be_is_said():
    """A norm of channels that are on several ranks; a window that all ranks would write; channels sharded along one axis of two."""
    (problem,) = refused(mamba2(norm_group_size=None))
    assert problem == "norm_weight is given: 8 of the 8 heads go together, and would lie on several of 4 ranks"
    with rank_of(1, 4) as mesh:
        theirs = everywhere(mesh, mamba2()) | {"state": on(mesh, torch.zeros(B, H, ROWS, KEYS), Shard(1))}
        with pytest.raises(ArgumentError, match=r"conv_state is R.* and is written: it must be S"):
            ssmgen.mamba2_layer(**theirs)
    with rank_of(0, 2, 2) as mesh:
        theirs = heads_on(mesh, "mamba2_layer", mamba2(), "replicated")
        theirs["xBC"] = DTensor.from_local(torch.zeros(B, 8), mesh, [Shard(1), Replicate()], run_check=False)
        with pytest.raises(ArgumentError, match=r"xBC is .*its channels are sharded as the heads are, or not at all"):
            ssmgen.mamba2_layer(**theirs)


def test_kernels_serve_a_ranks_heads():
    for function, call in CALLS.values():
        with rank_of(1, 2) as mesh:
            theirs = heads_on(mesh, function, call, "sharded")
            assert ssmgen.supported(getattr(ssmgen, function), **theirs, arch="sm_90a") == (True, [])
