"""chunk_delta_rule's chain by warpgroups on a card: the laws of its results, with 64 and with 128 rows of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any

import prompt_laws as laws
import pytest
import torch
from prompt_cases import ADVERSARIAL, OF_HEADS, Case, launched, make, problem_of
from repeats import are_alike
from scan_cases import SM90, same
from ssu_cases import BF16, F16, F32

from ssmgen.families.chunk_delta_rule.chain import ChainSpec, warpgroup_space
from ssmgen.families.chunk_delta_rule.problem import OPERATOR, DeltaProblem
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Pdl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]

SIZES = Case("chunk_gated_delta_rule", heads=4, key_heads=2, head_k=128, head_v=128, device="cuda")
LENGTHS = (0, 1, 15, 63, 64, 65, 127, 129, 300, 511, 512, 513, 700, 1025)
of_rows = pytest.mark.parametrize("rows", [64, 128])


def variant(rows: int, problem: DeltaProblem) -> ChainSpec:
    given = {f.name: getattr(problem, f.name) for f in fields(DeltaProblem)}
    tile = 64 if problem.marked or problem.head_v % rows else rows
    return ChainSpec.by_warpgroups(**given, tile=tile, stages=3, pdl=Pdl.TRIGGER_LOADED, ahead_pdl=Pdl.TRIGGER_LOADED)


def by(rows: int) -> Any:
    return partial(launched, spec=partial(variant, rows))


LAWS: dict[str, Callable[[Any, Case], None]] = {
    "lengths": partial(laws.lengths_are_accurate, lengths=LENGTHS),
    **{kind: partial(laws.is_accurate, tokens=700, **ADVERSARIAL[kind]) for kind in OF_HEADS},
    "packing": partial(laws.packing_changes_no_bit, lengths=LENGTHS),
    "neighbours": partial(laws.neighbours_do_not_matter, lengths=(65, 700, 1, 64)),
    **{f"cut-{at}": partial(laws.a_cut_changes_no_bit, tokens=1000, at=at) for at in (64, 640, 960)},
    **{
        f"pool-{state}-{layout}": partial(laws.a_pool_is_touched_where_it_should_be, state=state, layout=layout)
        for state, layout in product((F32, BF16, F16), ("vk", "kv"))
    },
    "elsewhere-i32": partial(laws.states_of_a_pool_may_begin_elsewhere, state=F32, index=torch.int32),
    "elsewhere-bf16-i64": partial(laws.states_of_a_pool_may_begin_elsewhere, state=BF16, index=torch.int64),
    "elsewhere-in-order": partial(laws.states_of_a_pool_may_begin_elsewhere, state=F32, index=None),
    "layout": partial(laws.layout_changes_no_bit, offset=8),
    "order-of-states": partial(laws.order_of_states_changes_no_bit, state=BF16),
    "gates": laws.gates_agree,
    "linear-gates": laws.linear_gates_agree,
    "decoding": partial(laws.decoding_goes_on, tokens=300),
}


@of_rows
@pytest.mark.parametrize("law", LAWS)
def test_laws(rows, law):
    LAWS[law](by(rows), SIZES)


@of_rows
@pytest.mark.parametrize("x", [BF16, F16])
@pytest.mark.parametrize(("head_k", "head_v"), [(64, 64), (64, 128), (128, 64), (128, 192), (128, 256)])
def test_other_sizes(rows, x, head_k, head_v):
    laws.is_accurate(by(rows), replace(SIZES, x=x, head_k=head_k, head_v=head_v), 300)


@pytest.mark.parametrize("state", [F32, BF16])
def test_checkpoints(state):
    laws.checkpoints_are_final_states(by(64), SIZES, state, LENGTHS)
    laws.batches_change_no_bit(by(64), SIZES)


def test_rows_stages_and_launches_change_no_bit():
    call = make(SIZES, 2, 700) | {"return_final_states": True}
    wanted = by(64)(SIZES, **call)
    specs = list(warpgroup_space(problem_of(SIZES, **call), SM90))
    assert {s.tile for s in specs} == {64, 128} and len(specs) > 2 * len(Pdl)
    for spec in specs:
        assert all(same(a, b) for a, b in zip(launched(SIZES, spec=spec, **call), wanted, strict=True)), spec


@of_rows
def test_the_same_bits_every_time(rows):
    """Calls of more blocks than the card holds at once."""
    case = replace(SIZES, heads=32)
    assert are_alike(partial(by(rows), case, **make(case, 8, 700), return_final_states=True), 200)


@of_rows
def test_place_in_the_batch_changes_no_bit(rows):
    call, run = make(SIZES, 5, 300), by(rows)
    whole, states = run(SIZES, **call, return_final_states=True)
    for i in (0, 4):
        own = laws.cut(SIZES, call, slice(i, i + 1))
        out, last = run(SIZES, **own, return_final_states=True)
        assert same(out[0], whole[i]) and same(last[0], states[i])


def test_what_is_chosen():
    problem = problem_of(SIZES, **make(SIZES, 1, 64))
    chosen = {heads: select(OPERATOR, problem, heads, SM90, True) for heads in (4, 64, 128)}
    assert all(spec.grouped for spec in chosen.values())
    assert [spec.tile for spec in chosen.values()] == [64, 64, 128]
