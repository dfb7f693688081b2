"""chunk_scan by mma.sync: blocks that divide a sequence, and a warp that only copies, change no bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases
import pytest
import scan_cases as laws
import torch
from compiled import compiled
from emulated_calls import needs_emulator
from kernel_laws import waits_before_any_of
from scan_cases import BF16, F32, SM90, Sizes, emulated, make, same, starts_of, variant
from selection import costly

import ssmgen
from ssmgen.compile.render import render
from ssmgen.emulator.check import check
from ssmgen.families.chunk_scan.call import FAMILY
from ssmgen.families.chunk_scan.rules import space
from ssmgen.families.chunk_scan.spec import OPERATOR, ScanProblem, ScanSpec
from ssmgen.select.registry import explain, select
from ssmgen.spec.kernel import Arch, DType, Index, Pdl

SMALL = Sizes(heads=1)


def by(**how: Any) -> laws.Scan:
    return partial(emulated, spec=variant(**how))


WHOLE = by()
TOKENS = 64 * 11 + 7  # twelve chunks, the last of them not whole


# Laws.


@costly(1)
@needs_emulator
@pytest.mark.parametrize(
    ("how", "sizes", "more"),
    [
        ({"parts": 2}, SMALL, {"z": True}),
        ({"parts": 6, "stages": 4, "copiers": 1}, replace(SMALL, headdim=64), {}),
        ({"parts": 8, "stages": 2}, SMALL, {}),
        ({"parts": 4, "stages": 2, "tile": 16}, replace(SMALL, x=F32, d_state=16), {}),
        ({"copiers": 4, "tile": 16}, SMALL, {"z": True}),
        ({"copiers": 1, "stages": 4, "tile": 80}, Sizes(heads=1, headdim=80, d_state=16), {}),  # rows that no warp copies in equal shares
    ],
    ids=["2", "6-copier", "8-two-stages", "4-f32", "four-copiers", "copier-p80"],
)
def test_parts_and_copiers_change_no_bit(how, sizes, more):
    call = make(sizes, 1, TOKENS, decay=1e-2, **more) | {"return_final_states": True}
    assert all(same(a, b) for a, b in zip(by(**how)(**call), WHOLE(**call), strict=True))


@needs_emulator
@pytest.mark.parametrize("parts", [3, 4])
def test_states_in_place(parts):
    """A cluster knows when all parts have read the state that the last one overwrites."""
    call = make(SMALL, 1, TOKENS, decay=1e-2)
    states = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    wanted = WHOLE(**call, initial_states=states, return_final_states=True)
    own = states.clone()
    found = by(parts=parts, copiers=1)(**call, initial_states=own, return_final_states=True, final_states_out=own)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


@needs_emulator
def test_packed_sequences_in_a_pool():
    laws.a_pool_is_touched_where_it_should_be(by(parts=3), SMALL, BF16)


@needs_emulator
@pytest.mark.parametrize("parts", [4, 8])
def test_sequences_share_the_blocks(parts):
    """Two sequences get half of the parts each. Some lengths leave parts without a chunk."""
    lengths = (64 * 5 + 1, 64 * 3)
    call = make(SMALL, sum(lengths), decay=1e-2) | {"cu_seqlens": starts_of(lengths, "cpu"), "return_final_states": True}
    assert all(same(a, b) for a, b in zip(by(parts=parts)(**call), WHOLE(**call), strict=True))


@costly(1)
@needs_emulator
@pytest.mark.parametrize("ids", [False, True])
def test_checkpoints_are_final_states(ids):
    laws.checkpoints_are_final_states(by(parts=4, copiers=1), SMALL, F32, ids=ids, lengths=(64 * 6 + 3, 0, 70))


@needs_emulator
def test_ids_that_begin_anew():
    call = make(SMALL, 1, TOKENS, decay=1e-2) | {"seq_idx": (torch.arange(TOKENS) // 150).int()[None], "return_final_states": True}
    assert all(same(a, b) for a, b in zip(by(parts=5, copiers=1)(**call), WHOLE(**call), strict=True))


@needs_emulator
@pytest.mark.parametrize("form", ["log", "slope"])
def test_linear_attention(form):
    name, call = attention_cases.make(form, SMALL, 1, 330)
    scan = {"function": getattr(ssmgen, name), "return_final_states": True}
    assert all(same(a, b) for a, b in zip(by(parts=3, copiers=1)(**call, **scan), WHOLE(**call, **scan), strict=True))


# Choices and texts.


def chosen(heads: int, arch: str, **more: Any) -> ScanSpec:
    where = Arch.parse(arch)
    problem = ScanProblem(**{"headdim": 64, "d_state": 128, "final": True, "copy": 8} | more)  # 8 bytes at once: warpgroups take 16
    spec = select(OPERATOR, problem, heads, where, where.number >= 90)
    assert isinstance(spec, ScanSpec) and not spec.violations(where)
    return spec


def test_what_serves_which_heads():
    assert [chosen(heads, "sm_90a").parts for heads in (8, 16, 24, 32, 64, 128)] == [6, 6, 5, 4, 2, 1]
    assert [chosen(heads, "sm_80").parts for heads in (8, 16, 24, 64)] == [6, 6, 4, 1]
    for places in ({"initial": True}, {"final": False, "pool": True, "started": True}):  # states that may be overwritten
        spec = chosen(16, "sm_90a", **places)
        assert (spec.parts, spec.cluster_blocks) == (4, 4) and chosen(16, "sm_80", **places).parts == 1
    assert "; expected 1 before sm_90" in str(
        explain(OPERATOR, ScanProblem(headdim=64, d_state=128, initial=True, final=True), 16, Arch(80), False)
    )
    for free in ({"final": False, "pool": True}, {"final": False, "pool": True, "initial": True}):
        assert (chosen(16, "sm_80", **free).parts, chosen(16, "sm_80", **free).cluster_blocks) == (6, 1)


def test_blocks_of_a_launch():
    """Several sequences get fewer parts each, so that the number of blocks does not grow; in a cluster the number of parts is fixed."""
    views = ssmgen.chunk_scan.build(**make(SMALL, 1, 70), return_final_states=True).operands
    spec = chosen(1, "sm_90a", headdim=32, d_state=32)
    blocks = [FAMILY.grid_of(spec, views | {"x": views["x"].expand(count, -1, -1, -1)}) for count in (1, 2, 3, 5, 100)]
    assert spec.parts == 6 and blocks == [6, 6, 6, 5, 100]
    assert FAMILY.grid_of(replace(spec, parts=4, initial=True), views | {"x": views["x"].expand(5, -1, -1, -1)}) == 20


def test_tuning_may_divide():
    problem = ScanProblem(headdim=64, d_state=128, copy=8)
    assert {(s.parts, s.copiers, s.order) for s in space(problem, SM90)} == {(p, c, (OPERATOR, 1)) for p in (1, 4) for c in (0, 1)}


SPECS = [
    ScanSpec(headdim=32, d_state=16, tile=16, parts=3, copiers=1, initial=True, final=True, dt_bias=DType.F32),
    ScanSpec(headdim=32, d_state=32, tile=32, stages=2, parts=4, z=True, cu_seqlens=Index.I32, pool=True, index=Index.I64, initial=True),
    ScanSpec(headdim=16, d_state=32, tile=16, stages=4, copiers=4, cu_seqlens=Index.I32, pool=True, started=True, parts=2),
]


@costly(1)
@needs_emulator
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_check_of_variants(spec):
    assert check(spec, SM90, 4).passed


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_the_wait_precedes_every_access(spec):
    waits_before_any_of(replace(spec, pdl=Pdl.TRIGGER_LOADED), "load(", "load_u8(", "prefetch(", "copy_rows<", "store_")


def test_what_all_begin_with_is_read_before_it_is_overwritten():
    """Every warp of every part arrives, walkers once they have the state; and the last part's wait before they store theirs."""
    body = render(SPECS[0], SM90).split('extern "C"')[1]
    assert body.count("cluster_arrive();") == 3 and body.count("cluster_wait();") == 1
    walkers = body[body.index("if (warp < kConsumers)") :]
    assert (
        walkers.index("load_vector<State")
        < walkers.index("cluster_arrive();")
        < walkers.index("cluster_wait();")
        < walkers.index("store_vector(")
    )
    assert "cluster" not in render(SPECS[1], SM90).split('extern "C"')[1]


@pytest.mark.matrix  # `ssmgen generate --check` checks the default variants
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_no_variant_spills(arch):
    """All arrays of every variant are in registers."""
    full = {"D": DType.F32, "dt_bias": DType.F32}
    for heads, more in (
        (16, {**full, "z": True}),
        (16, {**full, "seq_idx": True, "checkpoints": Index.I64}),
        (128, {**full, "d_state": 144}),
    ):
        spec, where = chosen(heads, arch, **more), Arch.parse(arch)
        resources = compiled(spec, where).resources
        assert not resources.spills and not resources.stack, f"{spec}: {resources}"
