"""Operators on DTensors and on shards. Two processes agree with one; meshes of more ranks are gone through one rank at a time."""

from __future__ import annotations

import itertools
import re
from contextlib import contextmanager

import pytest
import torch
from programs import succeeds

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from sharded_calls import BATCH, N, P, calls, linear, mamba, normal
from sharded_cases import cases, distribute, everywhere, failures, on, piece
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ssmgen
from ssmgen.calls import api
from ssmgen.calls.sharding_rules import RULES
from ssmgen.errors import ArgumentError


@pytest.mark.matrix
@pytest.mark.processes
def test_two_ranks_agree_with_one(tmp_path):
    wrong = failures(2, "cpu", tmp_path, cases)
    assert not wrong, wrong


# One rank of many, without communication: operands lie on the ranks that need them, or everywhere.

HEADS = 8


@contextmanager
def rank_of(rank: int, *shape: int):
    """The mesh as that rank sees it."""
    size = torch.Size(shape).numel()
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        torch.distributed.destroy_process_group()


def widened(call, groups=None):
    """The call with HEADS heads and `groups` groups."""
    torch.manual_seed(0)
    wide = {"A": (HEADS,), "D": (HEADS,), "dt_bias": (HEADS,), "dt": (BATCH, HEADS), "state": (BATCH, HEADS, P, N)}
    wide |= dict.fromkeys(("x", "z"), (BATCH, HEADS, P)) | dict.fromkeys(("B", "C"), (BATCH, groups or 1, N))
    return {n: normal("cpu", *wide[n], dtype=t.dtype) if n in wide else t for n, t in call.items()}


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((4,), [Shard(1)]),
        ((8,), [Shard(1)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 4), [Shard(1), Shard(1)]),
        ((3, 2), [Replicate(), Shard(1)]),
        ((3,), [Shard(0)]),
    ],
    ids=str,
)
def test_every_rank_of_a_mesh_computes_its_part(shape, placements, groups):
    call = widened(mamba("cpu", groups), groups)
    whole_state = call["state"].clone()
    want = ssmgen.selective_state_update(**call | {"state": whole_state})
    for rank in range(torch.Size(shape).numel()):
        with rank_of(rank, *shape) as mesh:
            theirs = everywhere(mesh, call) | {"state": on(mesh, call["state"], *placements)}
            y = ssmgen.selective_state_update(**theirs)
            assert y.placements == tuple(placements) and y.shape == want.shape and y.stride() == want.stride()
            assert torch.equal(y.to_local(), piece(want, mesh, placements))
            assert torch.equal(theirs["state"].to_local(), piece(whole_state, mesh, placements))


def test_nothing_is_copied_that_lies_everywhere(monkeypatch):
    def redistribute(*args, **kwargs):
        raise AssertionError("communicates")

    monkeypatch.setattr(DTensor, "redistribute", redistribute)
    with rank_of(1, 4) as mesh:
        call = widened(mamba("cpu", 2), 2)
        theirs = everywhere(mesh, call) | {"state": on(mesh, call["state"], Shard(1))}
        local = api.sharded.local_arguments(ssmgen.selective_state_update, ssmgen.selective_state_update.names, (), theirs)
    for name in ("x", "A", "B"):
        assert local[name].untyped_storage().data_ptr() == theirs[name].to_local().untyped_storage().data_ptr()
    assert local["A"].shape == (2,) and local["B"].shape == (BATCH, 1, N) and local["dt_softplus"] is True


# Impossible calls.


def refusal(change, mesh_shape=(4,), function="selective_state_update", call=None):
    """The problems of a call whose state's heads are sharded, after `change(mesh, arguments)`."""
    call = widened(mamba("cpu", 4), 4) if call is None else call
    with rank_of(0, *mesh_shape) as mesh:
        theirs = everywhere(mesh, call) | {"state": on(mesh, call["state"], *[Replicate()] * (mesh.ndim - 1), Shard(1))}
        theirs |= change(mesh, theirs)
        before = theirs["state"].to_local().clone()
        with pytest.raises(ArgumentError) as refused:
            getattr(ssmgen, function)(**theirs)
        assert torch.equal(theirs["state"].to_local(), before)
    return refused.value.problems


def states(placement):
    return lambda mesh, a: {"state": on(mesh, torch.zeros(BATCH, HEADS, P, N), placement)}


REFUSED = {
    "d_state": (states(Shard(3)), [r"state is S.*3.* on axis 0 .*expected Shard\(1\) \(head\), Shard\(0\) \(batch\) or Replicate\(\)"]),
    "headdim": (states(Shard(2)), ["state is S"]),
    "partial": (
        lambda mesh, a: {"state": DTensor.from_local(torch.zeros(BATCH, HEADS, P, N), mesh, [Partial()], run_check=False)},
        ["state is P.*updated in place"],
    ),
    "out": (
        lambda mesh, a: {"out": on(mesh, torch.zeros(BATCH, HEADS, P), Replicate())},
        ["out is R.* and is written; expected S.*1.*, as state is sharded"],
    ),
    "plain": (
        lambda mesh, a: {"x": torch.zeros(BATCH, 2, P), "dt": torch.zeros(BATCH, 2)},
        ["x is a plain tensor; expected a DTensor, like the other operands", "dt is a plain tensor; expected a DTensor, like the "
            "other operands"],
    ),
    "seed": (lambda mesh, a: {"rand_seed": torch.zeros(1, dtype=torch.int64)}, ["rand_seed is given with sharded states; expected None"]),
    "slots": (
        lambda mesh, a: states(Shard(0))(mesh, a) | {"state_indices": torch.zeros(BATCH, dtype=torch.int32)},
        ["state is sharded over its first axis, into which state_indices points"],
    ),
    "pool": (
        lambda mesh, a: {"state": on(mesh, torch.zeros(BATCH + 4, HEADS, P, N), Shard(0))},
        ["with .*'state': 8.*; expected as many slots as sequences"],
    ),
    "groups": (
        lambda mesh, a: {n: on(mesh, torch.zeros(BATCH, 3, N), Replicate()) for n in ("B", "C")},
        ["B has 3 groups .* for 4 parts of the heads; expected a multiple or a divisor", "C has 3 groups"],
    ),
    "heads": (
        lambda mesh, a: {"state": on(mesh, torch.zeros(BATCH, 6, P, N), Shard(1))},
        [r"state has 6 heads \(or channels\); expected a multiple of the 4 parts"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_said_before_anything_is_communicated(what):
    change, wanted = REFUSED[what]
    problems = refusal(change)
    assert len(problems) == len(wanted) and all(re.search(w, p) for w, p in zip(wanted, problems, strict=True)), problems


def test_several_meshes_are_refused():
    def change(mesh, arguments):
        other = torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(2).view(1, 2))
        return {"x": on(other, torch.zeros(BATCH, HEADS, P), Replicate(), Replicate())}

    assert any("x is on" in p for p in refusal(change))


def test_a_process_that_is_no_rank_of_the_mesh_is_told_so():
    torch.distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
        call = mamba("cpu", 2)
        with pytest.raises(ArgumentError, match="this process is not a rank of DeviceMesh"):
            ssmgen.selective_state_update(
                **{n: DTensor.from_local(t, mesh, [Replicate()]) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
            )
    finally:
        torch.distributed.destroy_process_group()


def test_a_history_whose_groups_are_shared_is_refused():
    """Each rank would write its group alone, and no rank would have all of them."""
    call = linear("cpu", "gated_delta_rule", 2, (2,))
    call |= {"state_indices": torch.arange(BATCH).int()}

    def change(mesh, arguments):
        ring = [on(mesh, torch.zeros(BATCH, 2, *call[n].shape[2:], dtype=call[n].dtype), Replicate()) for n in ("k", "v", "g", "beta")]
        return {"ring": [ring[0], *[on(mesh, t.to_local(), Shard(2)) for t in ring[1:]]]}

    assert refusal(change, function="gated_delta_rule", call=call) == [
        "ring.k is written, and 4 parts of the heads share its 2 groups; expected a group for each part"
    ]


def test_functions_without_a_rule_and_bind_are_refused(monkeypatch):
    monkeypatch.delitem(RULES, "combine_splits")
    with rank_of(0, 2) as mesh:
        o, lse = (on(mesh, torch.zeros(shape), Replicate()) for shape in ((4, 2, 16), (4, 2)))
        with pytest.raises(ArgumentError, match=r"an argument is a DTensor; expected this rank's tensors\. Pass DTensor\.to_local\(\)\."):
            ssmgen.combine_splits(o, lse)
        with pytest.raises(ArgumentError, match="an argument is a DTensor; expected this rank's tensors"):
            ssmgen.bind(ssmgen.combine_splits, o, lse)


def test_every_parameter_that_may_be_a_tensor_has_a_rule():
    """A parameter without a rule would be taken for replicated."""
    for function in api.FUNCTIONS:
        if (rule := RULES.get(function.__name__)) is None:
            continue
        annotations = function.build.__annotations__
        tensors = {n for n, kind in annotations.items() if n != "return" and "Tensor" in str(kind)}
        assert tensors - set(rule.axes) <= {"cu_seqlens", "query_start_loc"}, function.__name__
        assert set(rule.written) <= set(rule.axes), function.__name__


# Asking and preparing.


def test_a_sharded_call_can_be_asked_about():
    with rank_of(3, 4) as mesh:
        call = widened(mamba("cpu", 4), 4)
        theirs = everywhere(mesh, call) | {"state": on(mesh, call["state"], Shard(1))}
        explained = ssmgen.explain(ssmgen.selective_state_update, **theirs, arch="sm_90a")
        assert explained.problem.nheads == 2 and explained.problem.ngroups == 1
        with pytest.raises(ArgumentError, match="; expected a CUDA device, where kernels are loaded"):
            ssmgen.warm(ssmgen.selective_state_update, **theirs)


@pytest.mark.parametrize("case", calls("cpu"))
def test_kernels_serve_every_case(case):
    """The reference computes on the CPU; the registry says whether whole tensors and shards have kernels."""
    function, call = calls("cpu")[case]
    assert ssmgen.supported(getattr(ssmgen, function), **call, arch="sm_90a") == (True, [])
    with rank_of(1, 2) as mesh:
        theirs = distribute(mesh, function, call, "head", "replicated")
        assert ssmgen.supported(getattr(ssmgen, function), **theirs, arch="sm_90a") == (True, [])


def test_positions_and_keywords():
    with rank_of(1, 2) as mesh:
        call = widened(mamba("cpu", 2), 2)
        results = []
        for count in (0, 3, 9):
            theirs = everywhere(mesh, call) | {"state": on(mesh, call["state"], Shard(1))}
            names = itertools.islice(ssmgen.selective_state_update.names, count)
            args = [theirs.pop(n) for n in names]
            results.append(ssmgen.selective_state_update(*args, **theirs).to_local())
    assert all(torch.equal(r, results[0]) for r in results)


def test_plain_calls_do_not_import_what_dtensors_need():
    program = (
        "import sys, torch, ssmgen\n"
        "x = torch.zeros(2, 8)\n"
        "ssmgen.causal_conv1d_update(x, torch.zeros(2, 8, 3), torch.zeros(8, 4))\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    succeeds(program)
