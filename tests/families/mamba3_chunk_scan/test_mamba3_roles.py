"""mamba3_chunk_scan's warps with roles: mistakes in their text, and where they are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import error
from kernel_laws import edited, found
from mamba3_cases import POOLS
from mamba3_prompt_cases import INITIAL, emulated, exact, make, states, variant
from selection import costly
from test_mamba3_chunk_scan import BOUND, CASES, SM90, STATE, chosen

from ssmgen import emulator
from ssmgen.families.mamba3_chunk_scan.roles import Mamba3RolesSpec
from ssmgen.families.mamba3_chunk_scan.spec import Mamba3ScanSpec
from ssmgen.spec.kernel import Arch, Pdl

pytestmark = pytest.mark.usefixtures("one_thread")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")

ROLE_EDITS = {
    "no wait for a chunk": ("wait_for(full, n);", "", "shared memory"),
    "no wait for room": ("wait_for_last(empty, n);", "", "shared memory"),
    "no wait for the rounded state": ("wait_for(rounded, n);", "", "shared memory"),
    "no barrier before angles": ("meet(2, 32 * kMakers);", "", "shared memory"),
    "no barrier before numbers": ("meet(3, 32 * kHolders);", "", "shared memory"),
    "no wait for copies": ("wait_copies<0>();", "", "has not waited for the copy"),
    "rows that the warp has not finished": ("__syncwarp();  // a warp's rows", "//", "shared memory"),
    "numbers of too few chunks": ("kNumbers = 4", "kNumbers = 2", "off|shared memory"),
    "k of too few chunks": ("kKept = 3", "kKept = 1", "off|shared memory"),
    "k of another token": ("t + 1 != count", "t + 2 != count", "off|shared memory"),
    "one norm for both": ("load_weights(norms, is_k * kState", "load_weights(norms, 0", "off"),
    "no pending pair": ("delta = pending[n % kNumbers]", "delta = 0.f", "off"),
    "columns of later tokens": ("block < own_rows)", "block <= own_rows)", "off"),
    "the weight of a neighbour's rows": ("found * diagonal[side].high", "found * other[i][e].high", "off"),
    "angles of other warps": ("w < maker ?", "w < 1 ?", "off"),
    "rows past the end": ("if (count < kChunk) {", "if (false) {", "off"),
    "no upstream": ("  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
}


@costly(6)
@needs_emulator
@pytest.mark.parametrize("name", ROLE_EDITS)
def test_mistakes_of_roles_are_found(name):
    """Five chunks, so that all memory is used again. Rows past the end of the first chunk are 0 rsqrt(0), a NaN, without eps."""
    old, new, words = ROLE_EDITS[name]
    call = make(1, 20, x=torch.bfloat16) | {"eps": 0.0} if name == "rows past the end" else make(1, 290, x=torch.bfloat16)
    call |= dict(zip(INITIAL, states(call, 1), strict=True))
    wanted = exact(call, return_final_states=True)
    spec = variant(Mamba3RolesSpec, pdl=Pdl.TRIGGER_LOADED)
    with found(words):
        results = emulated(**call, return_final_states=True, change=edited(old, new), spec=spec)
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


def test_spec_violations_in_words():
    spec = chosen(CASES["siso"])
    assert "stages is 1; expected 2, with warps of several roles" in replace(spec, stages=1).violations(SM90)
    assert "tiles is 2; expected 1, with warps of several roles" in replace(spec, tiles=2).violations(SM90)
    assert any("expected at most 64, with warps of several roles" in v for v in replace(spec, headdim=80).violations(SM90))
    assert any("expected at most 128, with warps of several roles" in v for v in replace(spec, d_state=144).violations(SM90))
    assert any("on which warps change their numbers of registers" in v for v in spec.violations(Arch(120)))


def test_warps_have_roles_where_registers_suffice():
    kinds = {name: isinstance(chosen(CASES[name]), Mamba3RolesSpec) for name in CASES}
    assert [name for name, roles in kinds.items() if not roles] == ["p80-f16", "p128"]
    assert type(chosen(CASES["siso"], Arch(80))) is Mamba3ScanSpec
