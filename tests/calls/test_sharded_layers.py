"""Decode layers on DTensors: each rank of a mesh, one at a time, computes its heads' part of one device's result."""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import layer_tool_cases
from sharded_cases import everywhere, failures, on, piece
from sharded_layer_cases import CALLS, KEYS, OF_CHANNELS, ROWS, WRITTEN, B, H, heads_on, mamba2, own
from test_sharded import rank_of
from torch.distributed.tensor import DTensor, Replicate, Shard

import ssmgen
from ssmgen.errors import ArgumentError


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
    assert problem == "norm_weight groups 8 of the 8 heads; expected whole groups on each of 4 ranks"
    with rank_of(1, 4) as mesh:
        theirs = everywhere(mesh, mamba2()) | {"state": on(mesh, torch.zeros(B, H, ROWS, KEYS), Shard(1))}
        with pytest.raises(ArgumentError, match=r"conv_state is R.* and is written; expected"):
            ssmgen.mamba2_layer(**theirs)
    with rank_of(0, 2, 2) as mesh:
        theirs = heads_on(mesh, "mamba2_layer", mamba2(), "replicated")
        theirs["xBC"] = DTensor.from_local(torch.zeros(B, 8), mesh, [Shard(1), Replicate()], run_check=False)
        with pytest.raises(ArgumentError, match=r"xBC is S\(1\), R; expected its channels sharded like the heads, or not at all"):
            ssmgen.mamba2_layer(**theirs)


def test_kernels_serve_a_ranks_heads():
    for function, call in CALLS.values():
        with rank_of(1, 2) as mesh:
            theirs = heads_on(mesh, function, call, "sharded")
            assert ssmgen.supported(getattr(ssmgen, function), **theirs, arch="sm_90a") == (True, [])


def test_a_layer_with_its_projections_is_divided_by_heads(tmp_path):
    """A step and a prompt, as `tools.parallel` measures them on cards."""
    wrong = failures(2, "cpu", tmp_path, layer_tool_cases.cases, least=2)
    assert not wrong, wrong
