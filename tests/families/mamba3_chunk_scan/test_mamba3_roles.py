"""mamba3_chunk_scan's warps with roles: mistakes in their text, and where they are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import all_same, error
from kernel_laws import edited, found
from mamba3_cases import POOLS
from mamba3_prompt_cases import INITIAL, emulated, exact, make, states, variant
from selection import costly
from test_mamba3_chunk_scan import BOUND, CASES, SM90, STATE, chosen

import ssmgen
from ssmgen import emulator
from ssmgen.errors import ArgumentError
from ssmgen.families.mamba3_chunk_scan.roles import Mamba3RolesSpec
from ssmgen.families.mamba3_chunk_scan.spec import OPERATOR, Mamba3ScanSpec
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, Pdl, changed

pytestmark = pytest.mark.usefixtures("one_thread")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")

ROLE_EDITS = {
    "no wait for a chunk": ("wait_for(full, n);", "", "shared memory"),
    "no wait for room": ("wait_for_last(empty, n);", "", "shared memory"),
    "no wait for the rounded state": ("wait_for(rounded, n);", "", "shared memory"),
    "no barrier before numbers": ("meet(3, 32 * kHolders);", "", "shared memory"),
    "no wait for copies": ("wait_copies<0>();", "", "has not waited for the copy"),
    "numbers of too few chunks": ("kNumbers = 4", "kNumbers = 2", "off|shared memory"),
    "k of too few chunks": ("kKept = 3", "kKept = 1", "off|shared memory"),
    "k of another token": ("t + 1 != count", "t + 2 != count", "off|shared memory"),
    "one norm for both": ("load_weights(norms, is_k * kState", "load_weights(norms, 0", "off"),
    "no pending pair": ("delta = pending[n % kNumbers]", "delta = 0.f", "off"),
    "columns of later tokens": ("block < own_rows)", "block <= own_rows)", "off"),
    "the weight of a neighbour's rows": ("found * diagonal[side].high", "found * other[i][e].high", "off"),
    "angles of another token": ("u64(here) * kTurnWords", "u64(here + 1) * kTurnWords", "off|out of bounds|nothing has written|outside"),
    "the norm of q for k": ("scale[i].word[is_k]", "scale[i].word[0]", "off"),
    "no upstream": ("  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
}


@costly(6)
@needs_emulator
@pytest.mark.parametrize("name", ROLE_EDITS)
def test_mistakes_of_roles_are_found(name):
    """Five chunks, so that all memory is used again."""
    old, new, words = ROLE_EDITS[name]
    call = make(1, 290, x=torch.bfloat16)
    call |= dict(zip(INITIAL, states(call, 1), strict=True))
    wanted = exact(call, return_final_states=True)
    spec = variant(Mamba3RolesSpec, pdl=Pdl.TRIGGER_LOADED)
    with found(words):
        results = emulated(**call, return_final_states=True, change=edited(old, new, "kHolders"), spec=spec)
        bounds = (BOUND, STATE, STATE, STATE, 1e-5)
        for t, n, bound in zip(results, ("out", *POOLS), bounds, strict=True):
            assert error(t, wanted[n]) < bound, n


@needs_emulator
@pytest.mark.parametrize("T", [20, 290])
def test_correct_roles_pass_the_same(T):
    call = make(1, T, x=torch.bfloat16) | ({"eps": 0.0} if T == 20 else {})
    call |= dict(zip(INITIAL, states(call, 1), strict=True))
    wanted = exact(call, return_final_states=True)
    out, S, *_ = emulated(**call, return_final_states=True, spec=variant(Mamba3RolesSpec))
    assert error(out, wanted["out"]) < BOUND and error(S, wanted["state"]) < STATE


PREPARE_EDITS = {
    "a barrier too few before sums": ("__syncthreads();  // the sums of all warps", "//", "shared memory"),
    "a barrier too few before starts": ("__syncthreads();  // the angles before the block's chunks", "//", "shared memory"),
    "starts that are still read": ("__syncthreads();  // and have been read", "//", "shared memory"),
    "sums of other blocks": (
        "cluster_arrive(), cluster_wait();  // the cluster's",
        "__syncthreads();  //",
        "off|race|cluster|nothing has written",
    ),
    "angles of other warps": ("w < member ?", "w < 1 ?", "off"),
    "dt of another head": ("8 * j + i)", "i)", "off"),
    "the sum of another chunk": ("load(sums + (from + c) * each_chunk", "load(sums + from * each_chunk", "off"),
    "no angle before": ("    whole = load(", "    load(", "off"),
    "an angle that is not wrapped": ("whole = turned(whole, radians(by[c]))", "whole = whole + radians(by[c])", "off"),
    "one row for both norms": ("is_k ? row_B : row_C", "row_B", "off"),
    "no upstream": ("  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
}


@costly(4)
@needs_emulator
@pytest.mark.parametrize("name", PREPARE_EDITS)
def test_mistakes_of_angles_and_norms_are_found(name):
    """More chunks than the cluster has at once, in place."""
    old, new, words = PREPARE_EDITS[name]
    call = make(1, 16 * 64 + 70, H=5, G=5, x=torch.bfloat16)
    pools = dict(zip(POOLS, states(call, 1, k=torch.bfloat16), strict=True)) | {"has_initial_state": torch.tensor([True])}
    wanted = exact(call | pools)
    with found(words):
        out = emulated(**call, **pools, change=edited(old, new, "kTeams"), spec=variant(Mamba3RolesSpec, pdl=Pdl.TRIGGER_LOADED))
        for t, n, bound in zip((out, *map(pools.get, POOLS)), ("out", *POOLS), (BOUND, STATE, STATE, STATE, 1e-4), strict=True):
            assert error(t, wanted[n]) < bound, n


@needs_emulator
@pytest.mark.parametrize("blocks", [8, 1])
def test_correct_angles_and_norms_pass_the_same(blocks):
    """Also an own angle for each head, which the block's heads do not share."""
    for per_head in (False, True):
        call = make(1, 16 * 64 + 70, H=5, G=5, x=torch.bfloat16)
        call |= {"angle": torch.randn(1, 16 * 64 + 70, 5, 8, generator=torch.Generator().manual_seed(8))} if per_head else {}
        pools = dict(zip(POOLS, states(call, 1, k=torch.bfloat16), strict=True)) | {"has_initial_state": torch.tensor([True])}
        kept = {n: t.clone() for n, t in pools.items()}
        out = emulated(**call, **pools, spec=variant(Mamba3RolesSpec, ahead_blocks=blocks))
        assert all_same((out, *pools.values()), (emulated(**call, **kept, spec=variant()), *kept.values()))


def test_calls_that_neither_rotate_nor_norm_have_one_kernel():
    spec = chosen(CASES["siso"])
    assert [part.family for part in spec.kernels] == ["mamba3_chunk_scan_prepare", "mamba3_chunk_scan_roles"]
    bare = chosen(changed(CASES["siso"], angles=0, angle=None, row_norm=None))
    assert bare.kernels == (bare,) and "workspace" not in bare.operands()
    assert variant()(CASES["siso"]).kernels == (variant()(CASES["siso"]),)


def test_many_sequences_have_one_block_each():
    blocks = {size: select(OPERATOR, CASES["siso"], size, SM90, True).ahead_blocks for size in (1, 256, 257)}
    assert blocks == {1: 8, 256: 8, 257: 1}


def test_a_workspace_may_be_given():
    """The function returns its size; the emulator allows no access after it."""
    call = make(2, 70, R=4, x=torch.bfloat16)
    numbers = ssmgen.mamba3_chunk_scan_workspace(140, 2, 2, 8, rank=4)
    assert numbers == 140 * 2 * 8 + 140 * 4 * 2 + 2 * 8 * (140 // 16 + 2)
    assert ssmgen.mamba3_chunk_scan.build(**call).operands["workspace"].numel() == numbers
    built = ssmgen.mamba3_chunk_scan.build(**call, workspace=torch.empty(numbers))
    assert built.operands["workspace"].numel() == numbers
    assert "workspace" not in ssmgen.mamba3_chunk_scan.build(**call | {"angle": None, "B_norm": None, "C_norm": None}).operands
    for wrong, words in (
        (torch.empty(numbers - 1), r"workspace is \[3519\] with strides \[1\]; expected \[3520 or more\], dense"),
        (torch.empty(numbers, dtype=torch.uint8), "workspace is uint8; expected float32"),
    ):
        with pytest.raises(ArgumentError, match=words):
            ssmgen.mamba3_chunk_scan(**call, workspace=wrong)


def test_spec_violations_in_words():
    spec = chosen(CASES["siso"])
    assert "ahead_blocks is 4; expected 1 or 8" in replace(spec, ahead_blocks=4).violations(SM90)
    assert "stages is 1; expected 2, with warps of several roles" in replace(spec, stages=1).violations(SM90)
    assert "tiles is 2; expected 1, with warps of several roles" in replace(spec, tiles=2).violations(SM90)
    assert any("expected at most 64, with warps of several roles" in v for v in replace(spec, headdim=80).violations(SM90))
    assert any("expected at most 128, with warps of several roles" in v for v in replace(spec, d_state=144).violations(SM90))
    assert any("on which warps change their numbers of registers" in v for v in spec.violations(Arch(120)))


def test_warps_have_roles_where_registers_suffice():
    kinds = {name: type(chosen(CASES[name])) is Mamba3RolesSpec for name in CASES}
    assert [name for name, roles in kinds.items() if not roles] == ["p80-f16", "p128"]
    assert type(chosen(CASES["siso"], Arch(80))) is Mamba3ScanSpec
