"""chunk_linear_attention's chain by warpgroups: the laws of its results in the emulator, and that wrong kernels are found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from compiled import compiled
from linear_chain_cases import BF16, BOUND, F16, F32, HARD, SM90, Prompt, hard, images, poisoned, prompt, recurrence, walked
from scan_cases import error, same
from selection import costly, few, kept

from ssmgen import emulator
from ssmgen.compile.render import render
from ssmgen.emulator import EmulatorError
from ssmgen.families.chunk_linear_attention.chain import ChainSpec, candidates, warpgroup_space
from ssmgen.families.chunk_linear_attention.problem import LinearPromptProblem, Rule
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Loads, Pdl

SMALL = {"K": 64, "V": 64}
LENGTHS = (65, 0, 64, 1, 130)
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")
rules = pytest.mark.parametrize("rule", kept(Rule, lambda rule: rule is not Rule.OLD), ids=lambda rule: rule.value)  # its text is DELTA's

chain = partial(walked, make=ChainSpec.by_warpgroups, tile=64, stages=2, pdl=Pdl.TRIGGER_LOADED)


def states_of(p: Prompt, seed: int = 1) -> torch.Tensor:
    return torch.randn(len(p.lengths), p.v.shape[1], p.v.shape[2], p.q.shape[2], generator=torch.Generator().manual_seed(seed))


def accurate(found: dict[str, torch.Tensor], p: Prompt, before: torch.Tensor | None = None, bound: float = BOUND) -> bool:
    out, states = recurrence(p, before)
    return error(found["out"], out) <= bound and error(found["final_states"], torch.stack(states)) <= bound


# Laws.

CASES: dict[str, Any] = {
    "k128": ({"K": 128, "V": 128, "HV": 2}, LENGTHS, {"stages": 3}),
    "long memory": (SMALL | {"decay": 1e-3}, (330,), {"stages": 3}),
    "wide": ({"K": 64, "V": 128}, (200, 3), {"tile": 128}),
    "strong decay": (SMALL | {"decay": 5.0}, (130, 63), {"stages": 4}),
    "heads, f16": ({"K": 64, "V": 256, "HK": 2, "HV": 4, "x": F16}, (70,), {"tile": 128, "stages": 3}),
}
ALL = [f"{rule.value}: {case}" for case in CASES for rule in Rule]


@costly(3)
@needs_emulator
@pytest.mark.parametrize("case", kept(ALL, lambda case: ALL.index(case) % 4 == ALL.index(case) // 4 % 4))
def test_results_are_those_of_float64(case):
    rule, of = case.split(": ")
    shape, lengths, how = CASES[of]
    p = prompt(*lengths, rule=Rule(rule), **shape)
    before = states_of(p)
    found = chain(p, before=before, **how)
    assert accurate(found, p, before)


@needs_emulator
@pytest.mark.parametrize("kind", few(HARD))
@pytest.mark.parametrize("rule", kept(Rule, lambda rule: rule is Rule.DELTA), ids=lambda rule: rule.value)
def test_hard_data(rule, kind):
    """Behind images as float64 makes them."""
    p = hard(kind, 130, rule=rule, **SMALL)
    assert accurate(chain(p, before=states_of(p)), p, states_of(p), 1.5e-2)


@costly(1)
@needs_emulator
@rules
def test_stages_and_rows_of_a_block_change_no_bit(rule):
    p = prompt(330, K=64, V=128, rule=rule)
    found = [chain(p, **how) for how in ({"stages": 2}, {"stages": 3}, {"tile": 128}, {"pdl": Pdl.OFF})]
    assert all(same(f[name], found[0][name]) for f in found[1:] for name in ("out", "final_states"))


@costly(1)
@needs_emulator
@rules
def test_packing_changes_no_bit(rule):
    p = prompt(*LENGTHS, **SMALL, rule=rule)
    packed = chain(p)
    for i, (begin, end) in enumerate(p.spans()):
        alone = chain(p.span(begin, end), batch=end > begin)
        assert same(alone["out"].flatten(0, -3), packed["out"][begin:end]) and same(alone["final_states"][0], packed["final_states"][i])


@needs_emulator
def test_a_batch_is_sequences_of_one_length():
    p = prompt(70, 70, 70, **SMALL, HV=2)
    batch, packed = chain(p, batch=True), chain(p)
    assert same(batch["out"].flatten(0, 1), packed["out"]) and same(batch["final_states"], packed["final_states"])


@costly(1)
@needs_emulator
@rules
def test_a_cut_changes_no_bit(rule):
    p = prompt(200, **SMALL, rule=rule)
    whole = chain(p)
    for cut in (rule.tokens, 128):
        first = chain(p.span(0, cut))
        second = chain(p.span(cut, 200), before=first["final_states"])
        assert same(torch.cat([first["out"], second["out"]]), whole["out"]) and same(second["final_states"], whole["final_states"])


@needs_emulator
@pytest.mark.parametrize("rule", few([Rule.LOW_RANK, Rule.DELTA]), ids=lambda rule: rule.value)
def test_neighbours_do_not_matter(rule):
    """NaN fills the neighbours' tokens and images, and tokens outside every sequence."""
    p, step = prompt(65, 0, 64, 3, **SMALL, rule=rule), rule.tokens
    good, made = chain(p), images(p)
    for i, (begin, end) in enumerate(p.spans()):
        if begin == end:
            continue
        own = torch.full_like(made, 255)
        first, count = begin // step + i, -(-(end - begin) // step)
        own[first : first + count] = made[first : first + count]
        found = chain(poisoned(p, begin, end), given={"images": own})
        assert same(found["out"][begin:end], good["out"][begin:end]) and same(found["final_states"][i], good["final_states"][i])


@needs_emulator
@pytest.mark.parametrize("state", few([BF16, F32, F16]))
@pytest.mark.parametrize("layout", few([Layout.KV, Layout.VK]))
def test_states_of_other_types_and_layouts(state, layout):
    """They equal f32 states, rounded once, in the given layout."""
    p = prompt(70, 64, **SMALL)
    before = states_of(p).to(state)
    wanted = chain(p, before=before.float())["final_states"].to(state)
    stored = before.transpose(2, 3).contiguous() if layout is Layout.KV else before
    found = chain(p, before=stored, state=state, layout=layout)["final_states"]
    assert same(found.transpose(2, 3) if layout is Layout.KV else found, wanted)


@needs_emulator
def test_states_begin_at_any_element():
    p = prompt(70, **SMALL)
    before, buffer = states_of(p).to(BF16), torch.zeros(2 * 64 * 64 + 1, dtype=BF16)
    odd = buffer[1 : 1 + 64 * 64].view(1, 1, 64, 64)
    odd.copy_(before)
    found = chain(p, before=odd, state=BF16, state_loads=Loads.ELEMENT, given={"final_states": odd})["final_states"]
    assert same(found, chain(p, before=before, state=BF16)["final_states"]) and not buffer[1 + 64 * 64 :].any() and not buffer[0]


@needs_emulator
@pytest.mark.parametrize("own", [True, False], ids=["where-they-end", "elsewhere"])
@pytest.mark.parametrize("rule", few([Rule.DELTA, Rule.PLAIN]), ids=lambda rule: rule.value)
def test_a_pool_is_touched_where_it_should_be(rule, own):
    """Unused slots and slots of empty sequences stay unchanged; sequences without a slot get zeros."""
    p = prompt(65, 7, 0, 16, 64, **SMALL, rule=rule)
    slots = torch.tensor([3, 20, 7, 0, -1], dtype=torch.int32)
    pool = torch.full((9, 1, 64, 64), torch.nan)
    before = states_of(p)
    given = {"state": pool, "state_indices": slots}
    if own:
        pool[3] = before[0]
        before[3] = 0
        given |= {"has_initial_state": torch.tensor([True, True, True, False, True])}
        found = chain(p, pool=given)
    else:
        found = chain(p, pool=given, before=before)
    out, states = recurrence(p, before)
    for sequence, slot in ((0, 3), (3, 0)):
        begin, end = p.spans()[sequence]
        assert error(found["out"][begin:end], out[begin:end]) <= BOUND and error(pool[slot], states[sequence]) <= BOUND
    assert pool[[1, 2, 4, 5, 6, 7, 8]].isnan().all()
    assert not found["out"][65:72].any() and not found["out"][88:].any()


@costly(1)
@needs_emulator
@pytest.mark.parametrize(("rule", "layout"), [(Rule.DELTA, Layout.VK), (Rule.LOW_RANK, Layout.KV), (Rule.PLAIN, Layout.VK)])
def test_states_at_positions(rule, layout):
    """States at the ends of chunks and sequences equal the final states of shorter prompts. Rows of other positions stay unchanged."""
    p = prompt(200, 64, 0, 70, **SMALL, rule=rule)
    positions = [0, 64, 65, 128, 200, 263, 264, 296, 328, 334, 400]
    plain, found = chain(p, layout=layout), chain(p, layout=layout, positions=positions)
    assert same(found["out"], plain["out"]) and same(found["final_states"], plain["final_states"])
    kept = {64: 0, 128: 0, 200: 0, 264: 200, 328: 264, 334: 264} | ({296: 264} if rule is Rule.LOW_RANK else {})
    for position, row in zip(positions, found["checkpoints"], strict=True):
        if position in kept:
            own = chain(p.span(kept[position], position), layout=layout)["final_states"][0]
            assert same(row, own), position
        else:
            assert (row == 7).all(), position


@needs_emulator
def test_operands_may_lie_apart():
    """v is columns of a wider tensor, and so is out. Their last tokens belong to a batch of two."""
    p = prompt(70, 70, **SMALL, HV=2)
    together = torch.cat([torch.full((140, 64), torch.nan, dtype=BF16), p.v.flatten(1)], 1)
    wide = torch.full((140, 2, 128), 7.0, dtype=BF16)
    given = {"v": together[:, 64:].unflatten(1, (2, 64)).unflatten(0, (2, 70)), "out": wide[..., :64].unflatten(0, (2, 70))}
    found = chain(p, batch=True, given=given)
    assert same(found["out"].flatten(0, 1), chain(p)["out"]) and (wide[..., 64:] == 7).all()


# Choices and texts.

SHAPE: dict[str, Any] = {"head_k": 128, "head_v": 128, "pdl": Pdl.TRIGGER_LOADED}
POOL: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True, "index": Index.I64}
LOW_RANK: dict[str, Any] = {"rule": Rule.LOW_RANK, "read": True, "write": True}
SPECS = [
    ChainSpec.by_warpgroups(**SHAPE, initial=True, final=True),
    ChainSpec.by_warpgroups(**SHAPE | POOL | {"head_k": 64}, tile=128, state=DType.BF16, stages=2),
    ChainSpec.by_warpgroups(**SHAPE | POOL, checkpoints=Index.I64),
    ChainSpec.by_warpgroups(**SHAPE | {"head_k": 64}, initial=True, final=True, x=DType.F16, layout=Layout.KV, stages=4),
    ChainSpec.by_warpgroups(**SHAPE | POOL, rule=Rule.PLAIN, checkpoints=Index.I64),
    ChainSpec.by_warpgroups(**SHAPE | POOL, rule=Rule.PLAIN, tile=128, layout=Layout.KV),
    ChainSpec.by_warpgroups(**SHAPE | POOL | LOW_RANK | {"head_k": 64, "head_v": 64}, checkpoints=Index.I64),
    ChainSpec.by_warpgroups(**SHAPE | POOL | LOW_RANK, tile=128, stages=2),
]


@pytest.mark.matrix  # `ssmgen generate --check` checks the default variants
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_no_variant_spills(spec):
    resources = compiled(spec, SM90).resources
    assert not resources.spills and not resources.stack


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_the_wait_precedes_every_access(spec):
    """Accesses to images, which the upstream kernel writes, come after the wait; all others too, if the wait is at the top."""
    text = render(spec, SM90)
    body = text[text.index('extern "C"') :]
    wait = body.index("wait_for_upstream();")
    assert "images + " not in body[:wait] and "copy_bulk(" in body[wait:]
    early = render(replace(spec, pdl=Pdl.TRIGGER_TOP), SM90)
    early = early[early.index('extern "C"') : early.index("wait_for_upstream();")]
    assert not [word for word in ("load(", "load_u8(", "copy_tile<", "load_vector<", "store_") if word in early]
    assert "__restrict__" not in body and "allow_dependents();" in body


def test_what_is_legal():
    problem = LinearPromptProblem(head_k=128, head_v=128)
    assert {(s.tile, s.stages) for s in warpgroup_space(problem, SM90)} == {(64, 2), (64, 3)}
    plain = {(s.tile, s.stages) for s in warpgroup_space(replace(problem, rule=Rule.PLAIN), SM90)}
    assert plain == {(64, 2), (64, 3), (64, 4), (128, 2), (128, 3)}
    for other in ({"head_k": 96}, {"head_v": 80}, {"copy": 8}):
        assert not list(warpgroup_space(replace(problem, **other), SM90))
    assert not list(warpgroup_space(problem, Arch.parse("sm_100a")))
    wrong = ChainSpec.by_warpgroups(head_k=128, head_v=128, tile=32, stages=5, min_blocks=2, fetchers=2).violations(SM90)
    found = [next(word for word in ("tile", "stages", "min_blocks", "fetchers", "shared memory") if word in line) for line in wrong]
    assert found == ["tile", "stages", "min_blocks", "fetchers", "shared memory"]


@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.value)
def test_what_is_chosen(rule):
    """Warpgroups where they can serve, with the most stages that fit; the other chain elsewhere."""
    more = LOW_RANK if rule is Rule.LOW_RANK else {"rule": rule}

    def first(heads: int, arch: Arch = SM90, **shape: Any) -> ChainSpec:
        problem = LinearPromptProblem(**{"head_k": 128, "head_v": 128} | more | shape)
        return next(s for _, s, _ in candidates(problem, heads, arch, arch >= SM90) if s and not s.violations(arch))

    assert [(s.kind, s.tile, s.stages) for s in (first(32), first(96))] == [
        ("chunk_linear_attention_warpgroups", 64, 3),
        ("chunk_linear_attention_warpgroups", 64 if rule in (Rule.DELTA, Rule.OLD) else 128, 3),
    ]
    for spec in (first(32, Arch.parse("sm_80")), first(32, head_k=96), first(32, copy=4)):
        assert spec.kind == "chunk_linear_attention"


# Mistakes: (text to replace, replacement, words of the finding; off: a result is wrong)

EDITS = {
    "no upstream": ("if (warp == 0) wait_for_upstream();", "", "before the wait for the upstream kernel"),
    "copies: no wait for room": ("if (n >= kStages) barrier_wait", "if (n >= 2 * kStages) barrier_wait", "in shared memory, wh"),
    "copies: fewer bytes than come": ("4 * kWalkers * kBlock);\n", "2 * kWalkers * kBlock);\n", "nobody ends"),
    "copies: of one chunk only": ("v_tiles, n * kChunk,", "v_tiles, 0,", "off"),
    "copies: not waited for": ("barrier_wait(full, stage, phase);", "", "in shared memory, wh"),
    "image: fewer bytes than expected": ("image + 61440, 4 * kHeadK, full", "image + 59392, 4 * kHeadK - 16, full", "nobody ends"),
    "image: of the chunk before": ("images + ((first_chunk + n)", "images + ((first_chunk + n / 2)", "off"),
    "above the diagonal of P: not cleared": ("< i / kPanel % 4 * 16)", "< i / kPanel % 3 * 16)", "nothing has written"),
    "above the diagonal of T: not cleared": ("kAtT + 1280 + i % 128", "kAtT + 1152 + i % 128", "nothing has written|has read"),
    "decay: of another stage": ("kAtDecay + stage * kHeadK + 8", "kAtDecay + (stage ^ 1) * kHeadK + 8", "in shared memory, wh|off"),
    "decay: of other columns": ("+ 8 * i + 2 * part, decay", "+ 8 * i, decay", "off"),
    "state: changed in flight": ("wgmma_wait<1>();\n      wgmma_landed(S);", "", "in flight"),
    "state: not decayed": ("S[r] = S[r] * __uint", "S[r] = S[r] + 0.f * __uint", "off"),
    "state: of the next chunk, rounded late": ("round_state(0);\n      wgmma_fence();", "wgmma_fence();", "off"),
    "X: read in flight": ("      wgmma_wait<0>();\n      wgmma_landed(sum_e);\n    }\n", "    }\n", "in flight"),
    "u: read in flight": ("wgmma_wait<1>();\n      landed_u();", "landed_u();", "names as landed what products"),
    "u: not fenced": ("      if (c > 0) round_u(c);\n        wgmma_fence();", "      if (c > 0) round_u(c);", "changed since the last"),
    "u: of X": ("      round_u(0);\n", "", "off"),
    "o: read too early": ("barrier_wait(made, walker, n % 2);", "", "in shared memory, wh"),
    "o: made anew too early": ("barrier_wait(written, walker, (n + 1) % 2);", "", "has read, with no barrier between"),
    "o: one arrival too few": ("arrive_together(made, walker, lane);", "if (own_warp) arrive_together(made, walker, lane);", "nobody ends"),
    "o: past the end": ("if (n * kChunk + token + j < length) ", "", "store"),
    "room: given too early": ("barrier_init(empty, i, 4 * kWalkers)", "barrier_init(empty, i, 2 * kWalkers)", "before it looks"),
}
OTHERS = {
    "plain: state changed in flight": (Rule.PLAIN, "wgmma_wait<1>();\n      wgmma_landed(S);", "", "in flight"),
    "plain: o read in flight": (Rule.PLAIN, "wgmma_wait<1>();\n      wgmma_landed(sum_q);", "", "in flight"),
    "plain: v of the chunk before": (Rule.PLAIN, "ask_for_v(at, x);\n      wgmma_fence();", "wgmma_fence();", "off|changed"),
    "plain: room given too early": (
        Rule.PLAIN,
        "arrive_together(made, walker, lane);\n",
        "arrive_together(made, walker, lane);\n arrive_together(empty, stage, lane);\n",
        "in shared memory|have arrived|before it looks",
    ),
    "low rank: a row of v too many": (
        Rule.LOW_RANK,
        "for (u32 c = 2; c < kRows / 16; ++c) {",
        "for (u32 c = 3; c < kRows / 16; ++c) {",
        "off",
    ),
    "low rank: half of P": (Rule.LOW_RANK, "add(0), add(1);", "add(0);", "off"),
    "low rank: above the diagonal": (Rule.LOW_RANK, "i % kPanel / 8 + kRows - kChunk <", "i % kPanel / 8 + kRows <", "nothing has written"),
}


def _found(rule: Rule, old: str, new: str, words: str) -> None:
    def change(source: str) -> str:
        assert old in source, "the edit no longer applies"
        return source.replace(old, new)

    p = prompt(330, K=128 if "61440" in old else 64, V=64, decay=0.02, rule=rule)
    try:
        assert accurate(chain(p, change=change, batch="v_tiles" in old), p), "off"
    except EmulatorError as e:
        assert any(word in str(e) for word in words.split("|")), str(e)
    except AssertionError as e:
        assert "off" in words.split("|") and "no longer applies" not in str(e), str(e)
    else:
        pytest.fail("nothing was found")


@needs_emulator
@pytest.mark.parametrize("edit", few(EDITS))
def test_broken_kernels_are_found(edit):
    _found(Rule.DELTA, *EDITS[edit])


@needs_emulator
@pytest.mark.parametrize("edit", few(OTHERS))
def test_broken_kernels_of_other_rules_are_found(edit):
    _found(*OTHERS[edit])
