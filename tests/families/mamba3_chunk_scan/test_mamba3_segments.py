"""mamba3_chunk_scan in segments: the laws of its results in the emulator, which sequences are cut, and that wrong kernels are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mamba3_prompt_cases as laws
import pytest
import torch
from bits import all_same, error, same
from compiled import compiled
from emulated_calls import needs_emulator
from kernel_laws import edited, found
from mamba3_cases import POOLS
from mamba3_prompt_cases import BF16, INITIAL, NAN, Call, emulated, exact, make, starts_of, states, variant
from selection import costly
from test_mamba3_chunk_scan import BOUND, CASES, SM90, STATE, chosen

import ssmgen
from ssmgen.compile.render import code_digest
from ssmgen.emulator.check import check
from ssmgen.errors import ArgumentError, SpecError
from ssmgen.families.mamba3_chunk_scan.problem import MOST, Mamba3PromptProblem
from ssmgen.families.mamba3_chunk_scan.rules import space
from ssmgen.families.mamba3_chunk_scan.spec import OPERATOR
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, Pdl

pytestmark = pytest.mark.usefixtures("one_thread")
BOUNDS = dict(zip(("out", *POOLS), (BOUND, STATE, STATE, STATE, 1e-5), strict=True))


def remembering(*lead: int, rotary: str = "pairs", **how: Any) -> Call:
    """A call whose states hardly decay: errors of a part's first state, or of its angles, are in all outputs and states after it."""
    call = make(*lead, x=BF16, **how) | {"rotary": rotary, "dt_softplus": False, "dt_bias": None, "D": None}
    call["A"][:], call["dt"] = -30.0, torch.rand(*lead, call["x"].shape[-2], generator=torch.Generator().manual_seed(9)) / 10
    return call


def initial(call: Call, count: int) -> dict[str, torch.Tensor]:
    return dict(zip(INITIAL, states(call, count), strict=True))


def is_exact(results: Any, wanted: dict[str, torch.Tensor]) -> None:
    for t, (n, bound) in zip(results, BOUNDS.items(), strict=True):
        assert error(t, wanted[n]) < bound, n


@costly(2)
@needs_emulator
@pytest.mark.parametrize("rotary", ["pairs", "halves"])
@pytest.mark.parametrize(("R", "T", "segments"), [(1, 130, 2), (1, 200, 3), (1, 520, 8), (4, 100, 5), (3, 150, 4), (8, 24, 3)])
def test_results_are_those_of_float64(rotary, R, T, segments):
    call = remembering(2, T, R=R, rotary=rotary)
    first = initial(call, 2)
    spec = variant(stages=2, parts=segments)
    is_exact(
        emulated(**call, **first, return_final_states=True, segments=segments, spec=spec), exact(call | first, return_final_states=True)
    )


@costly(8)
@needs_emulator
@pytest.mark.parametrize("name", CASES)
def test_within_rounding_of_float64(name):
    """Packed sequences are long and short; the second one is padding if there are slots. All memory that is not written stays."""
    specs = [variant(stages=stages, parts=3, pdl=Pdl.TRIGGER_LOADED)(replace(CASES[name], segments=3)) for stages in (2, 1)]
    spec = next(spec for spec in specs if not spec.violations(SM90))
    assert spec.cluster_blocks == 3
    outcome = check(spec, SM90, batch=5)
    assert outcome.passed, outcome.wrong


@costly(2)
@needs_emulator
@pytest.mark.parametrize(
    ("R", "how"),
    [(1, {}), (4, {}), (3, {"angle": None}), (1, {"angle": None}), (1, {"B_norm": None, "C_norm": None}), (2, {"B_bias": None})],
)
def test_variants_are_bit_equal(R, how):
    call = remembering(1, 340 // R, R=R) | how | ({"C_bias": None} if "B_bias" in how else {})
    whole, wanted = (emulated(**call, return_final_states=True, segments=n) for n in (1, 3))
    assert not same(whole[1], wanted[1]), "nothing was cut"
    assert all_same(emulated(**call, return_final_states=True, segments=2, spec=variant(parts=2)), whole), "two parts change bits"
    for stages in (1, 2):
        assert all_same(emulated(**call, return_final_states=True, segments=3, spec=variant(stages=stages, parts=3)), wanted)


@costly(2)
@needs_emulator
@pytest.mark.parametrize("R", [1, 4])
def test_packing_changes_no_bit(R):
    """Sequences with three parts, two parts and one, and without tokens."""
    lengths = (200 // R, 0, 5, 64 // R, 64 // R + 1)
    laws.packing_changes_no_bit(remembering(sum(lengths), R=R), lengths, segments=3)


@costly(3)
@needs_emulator
@pytest.mark.parametrize(("R", "rotary"), [(1, "pairs"), (1, "halves"), (4, "pairs"), (4, "halves"), (7, "halves")])
@pytest.mark.parametrize("k", [torch.bfloat16, torch.float32])
def test_two_parts_change_no_bit(R, rotary, k):
    """The second part begins with the state that the first one leaves, in place."""
    call, found = make(2, 300 // R, R=R, x=BF16) | {"rotary": rotary}, []
    for segments in (1, 2):
        spec = variant(parts=segments)
        pools = dict(zip(POOLS, states(call, 2, k=k), strict=True))
        out = emulated(**call, **pools, has_initial_state=torch.tensor([True, False]), segments=segments, spec=spec)
        found.append((out, *pools.values()))
    assert all_same(*found)


@needs_emulator
def test_a_short_sequence_has_the_bits_of_a_whole_one():
    call = remembering(1, 64)
    assert all_same(*(emulated(**call, return_final_states=True, segments=n) for n in (1, 3)))


@costly(2)
@needs_emulator
@pytest.mark.parametrize("R", [1, 4])
def test_a_pool_is_touched_where_it_should_be(R):
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
    emulated(**call, **pools, out=out, segments=3)
    end = sum(lengths)
    assert error(out[: end - lengths[-1]], wanted["out"][: end - lengths[-1]]) < BOUND
    for name in POOLS:
        assert error(pools[name][[0, 4, 5]], wanted[name][[0, 4, 5]]) < BOUNDS[name], name
        assert same(pools[name][1:4], before[name][1:4])
    assert not out[end - lengths[-1] : end].any() and out[end:].isnan().all()


@needs_emulator
def test_all_may_be_forgotten():
    """A part's decay is 0."""
    call = make(1, 200, x=BF16) | {"dt_softplus": False, "dt_bias": None}
    call["A"][:], call["dt"] = 50.0, torch.full((1, 200, 2), 3.0)
    first = initial(call, 1)
    wanted = exact(call | first, return_final_states=True)
    out, S, *_ = emulated(**call, **first, return_final_states=True, segments=3)
    assert error(out, wanted["out"]) < 2 * BOUND and error(S, wanted["state"]) < 2 * STATE


MISTAKES = {
    "too early": ("    cluster_wait();  // the ends of all parts", "    //", "cluster|shared memory"),
    "room too early": ("    cluster_wait();  // no block reads", "    //", "cluster|shared memory|has ended"),
    "no pair of the part before": ("      if (place) make_token_before(kWarps);\n", "", "off"),
    "no pair at the start": ("    if (place) make_token_before(kWarps);\n    load_steps", "    load_steps", "off"),
    "angles of one part": ("= from ? turned(start, __uint_as_float(by[e])) :", "=", "off"),
    "decay": ("log2_of_part = log2_of_part + sums", "log2_of_part = sums", "off"),
    "an end that is not rotated": ("totals[a + e] = from ? sin_approx(start)", "totals[a + e] = from ? 0.f", "off"),
    "one part's end": ("load_4_from_peer(tiles, place_of(block), from, word)", "load_4_from_peer(tiles, place_of(block), 0, word)", "off"),
    "every part's state": ("  if (place + 1 < parts) return;  // the last", "  //", "also writes|off"),
    "the first state in every part": ("const bool has_state = place == 0 && ", "const bool has_state = ", "off"),
    "a barrier too few before rows": ("__syncthreads();  // rows are there, and the next", "//", "shared memory"),
    "a barrier too few before sines": ("__syncthreads();  // before sines", "//", "shared memory"),
}


@needs_emulator
def test_a_barrier_too_few_is_found_without_angles():
    call = remembering(1, 300, P=64) | {"angle": None}  # a state with more words than C
    with found("shared memory"):
        emulated(
            **call, segments=4, spec=variant(stages=1, parts=4), change=edited("__syncthreads();  // all have left the last chunk", "//")
        )


@costly(4)
@needs_emulator
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name):
    old, new, words = MISTAKES[name]
    call = remembering(1, 300)
    pools = dict(zip(POOLS, states(call, 1, k=BF16), strict=True))
    call |= {"has_initial_state": torch.tensor([True])}
    wanted = exact(call | pools)
    with found(words):
        out = emulated(**call, **pools, segments=4, spec=variant(parts=4), change=edited(old, new))
        is_exact((out, *pools.values()), wanted)


# Which sequences are cut.


def posed(H: int, tokens: int, segments: int | None = None, R: int = 1, batch: int = 1) -> Mamba3PromptProblem:
    call = make(1, 1, H=H, R=R, x=BF16)
    call = {
        n: t.expand(batch, tokens, *t.shape[2:]) if n in ("x", "z", "B", "C", "dt", "A", "trap", "angle") else t for n, t in call.items()
    }
    call["out"] = torch.empty(batch, tokens, H, 16, dtype=BF16)
    problem: Mamba3PromptProblem = ssmgen.mamba3_chunk_scan.build(**call, segments=segments).problem()[0]
    return problem


def test_a_call_asks_for_parts():
    """None and 1: whole sequences. A larger number: that many, up to a cluster's blocks, also for a prompt of one chunk, whose bits may
    not depend on other prompts in the call."""
    for heads, batch in ((8, 1), (64, 9)):
        assert posed(heads, 2048, batch=batch).segments == posed(heads, 2048, 1, batch=batch).segments == 1
        assert posed(heads, 2048, 5, batch=batch).segments == 5
    assert posed(64, 64, 3).segments == posed(8, 16, 3, R=4).segments == 3
    assert posed(64, 512, 1024).segments == MOST


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_parts_cover_a_sequence(rank):
    for most in (2, 5, 8):
        problem = replace(CASES["mimo"], rank=rank, segments=most)
        for tokens in range(0, 3000, 37):
            parts, each = problem.cut(tokens)
            assert 1 <= parts <= most and each % problem.chunk == 0, (most, tokens)
            assert tokens <= parts * each and (parts == 1 or (parts - 1) * each < tokens), (most, tokens)


def test_a_whole_sequence_has_the_text_of_a_call_without_segments():
    """segments=1 keeps the kernel, and so the bits, that sequences had before segments."""
    whole = chosen(CASES["siso"])
    assert whole.parts == 1 and "segments" not in str(whole) and "parts" not in str(whole)
    assert code_digest(replace(whole, segments=3), SM90) == code_digest(whole, SM90)


def test_cards_without_clusters_leave_sequences_whole():
    problem = replace(CASES["siso"], segments=5)
    assert select(OPERATOR, problem, 24, SM90, True).cluster_blocks == 5
    assert select(OPERATOR, problem, 24, Arch(80), False).cluster_blocks == 1
    assert {spec.parts for spec in space(problem, SM90)} == {5} and {spec.parts for spec in space(problem, Arch(80))} == {1}
    spec = variant(parts=5)(problem)
    for how, words in (({"parts": 4}, "parts is 4; expected 1 or the problem's segments 5"), ({"tiles": 2}, "parts is 5 with tiles 2")):
        with pytest.raises(SpecError, match=words):
            replace(spec, **how).check(SM90)


@pytest.mark.parametrize(("headdim", "rank"), [(16, 1), (64, 8), (128, 1), (128, 8)])
def test_a_part_s_state_fits_in_the_place_of_its_chunks(headdim, rank):
    """With the place of M and y: angles and biases come after it."""
    for d_state in (16, 64, 128, 256):
        for mimo, z in ((None, False), (CASES["mimo"].mimo, True)):
            angles = d_state // 2
            problem = replace(CASES["siso"], headdim=headdim, d_state=d_state, angles=angles, mimo=mimo, rank=rank if mimo else 1, z=z)
            words = variant(stages=1)(problem).words
            assert headdim * d_state + 4 + angles <= sum(words[name] for name in ("stages", "V", "M", "state"))


@pytest.mark.matrix  # `ssmgen generate --check` checks the default variants
@pytest.mark.parametrize("name", ["published-siso", "published-mimo"])
def test_published_shapes_fit_in_registers(name):
    resources = compiled(variant(parts=5, pdl=Pdl.TRIGGER_LOADED)(replace(CASES[name], segments=5)), SM90).resources
    assert not resources.spills and not resources.stack and resources.registers * 256 <= 65536


def test_what_segments_may_be():
    call = make(1, 130, x=BF16)
    assert same(ssmgen.mamba3_chunk_scan(**call, segments=2), ssmgen.mamba3_chunk_scan(**call)), "the reference has none"
    for wrong in (0, 1025, "4", True):
        with pytest.raises(ArgumentError, match="an integer from 1 to 1024"):
            ssmgen.mamba3_chunk_scan(**call, segments=wrong)
