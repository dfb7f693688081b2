"""mamba3_chunk_scan's warps with roles where blocks share a sequence: spans have the bits of a whole one, parts those of other parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import all_same, error, same
from compiled import compiled
from emulated_calls import needs_emulator
from kernel_laws import edited, found
from mamba3_cases import POOLS
from mamba3_prompt_cases import BF16, NAN, cut, emulated, exact, make, starts_of, states, variant
from selection import costly
from test_mamba3_chunk_scan import BOUND, CASES, SM90, chosen
from test_mamba3_segments import BOUNDS, initial, is_exact, remembering

import ssmgen
from ssmgen.compile.render import code_digest
from ssmgen.emulator.check import check
from ssmgen.errors import SpecError
from ssmgen.families.mamba3_chunk_scan import times
from ssmgen.families.mamba3_chunk_scan.roles import Mamba3RolesSpec
from ssmgen.families.mamba3_chunk_scan.rules import joined, space, spanned
from ssmgen.families.mamba3_chunk_scan.spec import OPERATOR
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Pdl

pytestmark = pytest.mark.usefixtures("one_thread")
ROLES = [name for name in CASES if isinstance(chosen(CASES[name]), Mamba3RolesSpec)]


def by_roles(**how):
    return variant(Mamba3RolesSpec, **how)


@costly(4)
@needs_emulator
@pytest.mark.parametrize("name", ROLES)
@pytest.mark.parametrize("how", [{"spans": 2}, {"spans": 4}, {"parts": 3}], ids=lambda how: "-".join(f"{k}{n}" for k, n in how.items()))
def test_within_rounding_of_float64(name, how):
    """Packed sequences are long and short; the second one is padding if there are slots. All memory that is not written stays."""
    spec = by_roles(**how)(replace(CASES[name], segments=how.get("parts", 1)))
    outcome = check(spec, SM90, batch=5)
    assert outcome.passed, outcome.wrong


@costly(2)
@needs_emulator
@pytest.mark.parametrize("rotary", ["pairs", "halves"])
@pytest.mark.parametrize(("R", "T", "segments"), [(1, 130, 2), (1, 200, 3), (1, 520, 8), (4, 100, 5), (3, 150, 4), (8, 24, 3)])
def test_parts_have_the_bits_of_parts_without_roles(rotary, R, T, segments):
    call = remembering(2, T, R=R, rotary=rotary)
    first = initial(call, 2)
    results = [
        emulated(**call, **first, return_final_states=True, segments=segments, spec=spec)
        for spec in (by_roles(parts=segments), variant(stages=2, parts=segments))
    ]
    assert all_same(*results)
    is_exact(results[0], exact(call | first, return_final_states=True))


@costly(2)
@needs_emulator
@pytest.mark.parametrize(
    ("R", "how"),
    [(1, {}), (4, {}), (3, {"angle": None}), (1, {"angle": None}), (1, {"B_norm": None, "C_norm": None}), (2, {"B_bias": None})],
)
def test_spans_change_no_bit(R, how):
    """Also the second part of two has the bits of a whole sequence."""
    call = remembering(1, 340 // R, R=R) | how | ({"C_bias": None} if "B_bias" in how else {})
    whole = emulated(**call, return_final_states=True, segments=1)
    for spans in range(2, times.MOST_SPANS + 1):
        assert all_same(emulated(**call, return_final_states=True, spec=by_roles(spans=spans)), whole), spans
    assert all_same(emulated(**call, return_final_states=True, segments=2, spec=by_roles(parts=2)), whole), "two parts change bits"


@costly(2)
@needs_emulator
@pytest.mark.parametrize(("R", "rotary"), [(1, "pairs"), (4, "halves"), (7, "halves")])
@pytest.mark.parametrize("how", [{"spans": 2}, {"spans": 4}, {"parts": 2}])
def test_states_are_replaced_in_place(R, rotary, how):
    """Every block reads its slot before the last one replaces it."""
    call, results = make(2, 300 // R, R=R, x=BF16) | {"rotary": rotary}, []
    for of in ({}, how):
        pools = dict(zip(POOLS, states(call, 2, k=BF16), strict=True))
        started = torch.tensor([True, False])
        out = emulated(**call, **pools, has_initial_state=started, segments=of.get("parts", 1), spec=by_roles(**of))
        results.append((out, *pools.values()))
    assert all_same(*results)


@costly(2)
@needs_emulator
@pytest.mark.parametrize("how", [{"spans": 2}, {"spans": 3}, {"parts": 3}])
@pytest.mark.parametrize("R", [1, 4])
def test_packing_and_cuts_change_no_bit(R, how):
    """Sequences of several chunks, of one and without tokens, packed and alone; and in spans, cut at a chunk."""
    lengths = (200 // R, 0, 5, 64 // R, 64 // R + 1)
    call = remembering(sum(lengths), R=R)
    starts, segments = starts_of(*lengths), how.get("parts", 1)
    packed, *last = emulated(**call, cu_seqlens=starts, return_final_states=True, segments=segments, spec=by_roles(**how))
    for i, length in enumerate(lengths):
        span = slice(int(starts[i]), int(starts[i + 1]))
        if length:
            alone = cut(cut(call, span), None)
            out, *own = emulated(**alone, return_final_states=True, segments=segments)
            if segments == 1 or length <= 64 // R:
                assert same(out[0], packed[span]) and all_same((t[0] for t in own), (t[i] for t in last)), length
            out, *own = (
                emulated(**alone, return_final_states=True, segments=segments, spec=by_roles(**how)) if length > 64 // R else (out, *own)
            )
            assert same(out[0], packed[span]) and all_same((t[0] for t in own), (t[i] for t in last)), length
        else:
            assert not any(t[i].any() for t in last)
    if segments == 1:
        at, started = 128 // R, torch.tensor([True])
        whole = dict(zip(POOLS, states(call, 1, k=BF16), strict=True))
        pieces = {name: t.clone() for name, t in whole.items()}
        sequence = cut(cut(call, slice(0, lengths[0])), None)
        y = emulated(**sequence, **whole, has_initial_state=started, spec=by_roles(**how))
        found = [
            emulated(**cut(sequence, slice(None), span), **pieces, has_initial_state=started, spec=by_roles(**how))
            for span in (slice(0, at), slice(at, None))
        ]
        assert same(torch.cat(found, 1), y) and all(same(whole[n], pieces[n]) for n in POOLS)


@costly(2)
@needs_emulator
@pytest.mark.parametrize("how", [{"spans": 3}, {"parts": 3}])
@pytest.mark.parametrize("R", [1, 4])
def test_a_pool_is_touched_where_it_should_be(R, how):
    """States are replaced in place. NaN in unused slots, in slots that start from zeros, and after the last token; padding is zeroed."""
    lengths, slots = (200 // R, 150 // R, 9, 0, 130 // R), torch.tensor([4, 0, 5, 1, -1])
    call = remembering(sum(lengths) + 2, R=R)
    for name in ("x", "B", "C", "dt", "angle"):
        call[name][-2:] = NAN
    begin = states(call, 6, k=BF16)
    pools = {name: torch.full_like(t, NAN) for name, t in zip(POOLS, begin, strict=True)}
    for name, t in zip(POOLS, begin, strict=True):
        pools[name][4], pools[name][5] = t[4], t[5]
    call |= {"cu_seqlens": starts_of(*lengths), "state_indices": slots, "has_initial_state": (slots == 4) | (slots == 5)}
    before, out = {name: t.clone() for name, t in pools.items()}, torch.full_like(call["x"], NAN)
    wanted = exact(call | pools)
    emulated(**call, **pools, out=out, segments=how.get("parts", 1), spec=by_roles(**how))
    end = sum(lengths)
    assert error(out[: end - lengths[-1]], wanted["out"][: end - lengths[-1]]) < BOUND
    for name in POOLS:
        assert error(pools[name][[0, 4, 5]], wanted[name][[0, 4, 5]]) < BOUNDS[name], name
        assert same(pools[name][1:4], before[name][1:4])
    assert not out[end - lengths[-1] : end].any() and out[end:].isnan().all()


PART_MISTAKES = {
    "too early": (
        "cluster_arrive(), cluster_wait();  // the ends of all parts are there, and stay",
        "//",
        "cluster|shared memory|deadlock|barrier|wait",
    ),
    "no pair of the part before": ("if (share && share + 1 < parts) make_token_before", "if (false) make_token_before", "off"),
    "no pair at the start": ("    if (share) make_token_before", "    if (false) make_token_before", "off"),
    "angles of one part": ("= from ? turned(start, __uint_as_float(by[e])) :", "=", "off"),
    "decay": ("__float_as_uint(__uint_as_float(tiles[kAtLog]) + Pair", "__float_as_uint(Pair", "off"),
    "an end that is not rotated": ("totals[a + e] = from ? sin_approx(start)", "totals[a + e] = from ? 0.f", "off"),
    "one part's end": ("load_4_from_peer(tiles, place_of(block), from, word)", "load_4_from_peer(tiles, place_of(block), 0, word)", "off"),
    "every part's state": ("  if (share + 1 < tiles[kAtParts]) return;  // the last", "  //", "also writes|off"),
    "the first state in every part": ("const bool has_state = share == 0 && ", "const bool has_state = ", "off"),
    "S before it is joined": ("cluster_arrive(), cluster_wait();  // this part's start is there", "//", "cluster|shared memory|wait"),
    "barriers of one pass": (
        "barrier_wait(barriers, n % 2 + 2 * pass, n / 2 % 2)",
        "barrier_wait(barriers, n % 2, n / 2 % 2)",
        "shared memory",
    ),
}


@costly(4)
@needs_emulator
@pytest.mark.parametrize("name", PART_MISTAKES)
def test_mistakes_of_parts_are_found(name):
    old, new, words = PART_MISTAKES[name]
    call = remembering(1, 300)
    pools = dict(zip(POOLS, states(call, 1, k=BF16), strict=True))
    call |= {"has_initial_state": torch.tensor([True])}
    wanted = exact(call | pools)
    with found(words):
        out = emulated(**call, **pools, segments=4, spec=by_roles(parts=4), change=edited(old, new))
        is_exact((out, *pools.values()), wanted)


SPAN_MISTAKES = {
    "no q in a span": ("if (!is_k && n < lead) continue;  // only", "if (!is_k && n <= lead) continue;  // only", "off|shared memory"),
    "no rounded state in a span": ("if (holds && n >= lead) {  // rounds", "if (holds && n > lead) {  // rounds", "off|shared memory"),
    "a barrier that is not counted": ("for (u32 n = 0; n < lead; ++n) leave_chunk(n);", "", "shared memory"),
    "a wait that is skipped": (
        "wait_for(rounded, n), wait_for(full, n), arrive",
        "wait_for(full, n), arrive",
        "by the parity it would not wait",
    ),
    "every span's state": ("  if (share + 1 < kSpans) return;  // the last", "  //", "also writes|off|races"),
}


@costly(4)
@needs_emulator
@pytest.mark.parametrize("name", SPAN_MISTAKES)
def test_mistakes_of_spans_are_found(name):
    old, new, words = SPAN_MISTAKES[name]
    call = remembering(1, 300)
    pools = dict(zip(POOLS, states(call, 1, k=BF16), strict=True))
    call |= {"has_initial_state": torch.tensor([True])}
    wanted = exact(call | pools)
    with found(words):
        out = emulated(**call, **pools, spec=by_roles(spans=2), change=edited(old, new))
        is_exact((out, *pools.values()), wanted)


@pytest.mark.matrix  # `ssmgen generate --check` checks the default variants
@pytest.mark.parametrize("name", ["published-siso", "published-mimo"])
@pytest.mark.parametrize("how", [{"spans": 2}, {"spans": 4}, {"parts": 5}, {"parts": 8}])
def test_published_shapes_fit_in_registers(name, how):
    spec = by_roles(**how, pdl=Pdl.TRIGGER_LOADED)(replace(CASES[name], segments=how.get("parts", 1)))
    resources = compiled(spec, SM90).resources
    assert not resources.spills and not resources.stack


def test_rules_choose_shares_by_heads():
    """A span of each head has a block on a card of 132 SMs; a larger batch stays whole. Calls choose their parts."""
    spans = {size: select(OPERATOR, CASES["siso"], size, SM90, True).spans for size in (1, 44, 45, 66, 67, 1024)}
    assert spans == {1: 3, 44: 3, 45: 2, 66: 2, 67: 1, 1024: 1}
    for size in (1, 1024):
        parts = select(OPERATOR, replace(CASES["siso"], segments=5), size, SM90, True)
        assert isinstance(parts, Mamba3RolesSpec) and (parts.spans, parts.parts) == (1, 5)
    for segments in (1, 5):
        tried = [spec for spec in space(replace(CASES["siso"], segments=segments), SM90) if isinstance(spec, Mamba3RolesSpec)]
        assert {spec.parts for spec in tried} == {segments}
        assert {spec.spans for spec in tried} == ({1, 2, 3, 4} if segments == 1 else {1})
    whole = chosen(CASES["siso"])
    assert "spans" not in str(whole) and code_digest(replace(whole, spans=2), SM90) != code_digest(whole, SM90)


def test_spec_violations_in_words():
    problem = CASES["siso"]
    for spec, words in (
        (spanned(problem, 5), "spans is 5; expected 1 … 4"),
        (replace(spanned(replace(problem, segments=2), 2), parts=2), "spans is 2 with parts 2; expected 1 of either"),
        (replace(joined(replace(problem, segments=3)), parts=2), "parts is 2; expected 1 or the problem's segments 3"),
    ):
        with pytest.raises(SpecError, match=words):
            spec.check(SM90)


@pytest.mark.parametrize(("headdim", "rank"), [(16, 1), (64, 8), (64, 1)])
def test_a_part_s_states_fit_in_their_places(headdim, rank):
    """Its end in the place of its chunks, and its start in the place of rounded states."""
    for d_state in (16, 64, 128):
        for mimo, z in ((None, False), (CASES["mimo"].mimo, True)):
            problem = replace(
                CASES["siso"], headdim=headdim, d_state=d_state, angles=d_state // 2, mimo=mimo, rank=rank if mimo else 1, z=z
            )
            words = joined(replace(problem, segments=3)).words
            assert headdim * d_state + 4 + d_state // 2 <= words["stages"] and headdim * d_state <= words["state"]


# The estimates.


@pytest.mark.parametrize("spans", range(1, times.MOST_SPANS + 1))
def test_spans_take_as_long(spans):
    begin = [*times.span_starts(spans), 1.0]
    took = [times.LEAD * begin[i] + begin[i + 1] - begin[i] for i in range(spans)]
    assert max(took) - min(took) < 1e-12 and took[0] == pytest.approx(times.spans_us(1, spans) / times.CHUNK_US)


@needs_emulator
def test_a_span_of_no_chunk_is_left_to_the_last_block():
    call = remembering(1, 40)
    assert all_same(*(emulated(**call, return_final_states=True, spec=by_roles(spans=n)) for n in (1, 4)))


def test_estimates_prefer_a_full_card():
    """64 heads: two blocks of each fill 132 SMs. A batch that fills the card stays whole."""
    best = times.estimated(64, 1, 32, 132)[0]
    assert (best.spans, best.parts) == (2, 1) and best.us < 32 * times.CHUNK_US
    assert times.estimated(24, 1, 64, 132, most_parts=8)[0].parts == 5
    assert times.estimated(64, 16, 32, 132, most_parts=8)[0][:2] == (1, 1)
    assert times.spans_us(32, 1) == pytest.approx(32 * times.CHUNK_US) == times.parts_us(32, 1)


def test_the_size_of_a_call_counts_all_sequences():
    """One sequence may have spans where a batch has none."""
    for batch in (1, 3):
        call = make(batch, 70, x=BF16)
        assert ssmgen.mamba3_chunk_scan.build(**call).problem()[1] == 2 * batch
