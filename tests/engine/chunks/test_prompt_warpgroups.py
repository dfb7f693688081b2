"""The chains of chunk_delta_rule and of chunk_linear_attention by warpgroups: the laws of their results in the emulator, and that wrong
kernels are found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from chain_cases import (
    BF16,
    F16,
    F32,
    HARD,
    HEADS,
    RULES,
    SM90,
    accurate,
    called,
    hard,
    images,
    poisoned,
    prompt,
    recurrence,
    states_of,
    walked,
)
from compiled import compiled
from emulated_calls import needs_emulator
from kernel_laws import edited, found
from prompt_cases import BOUNDS, CHAINS, candidates, error, same
from selection import costly, few, kept

from ssmgen.compile.render import render
from ssmgen.engine.chunks.chain import Backend
from ssmgen.families.chunk_delta_rule.chain import ChainSpec as DeltaChain
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.families.chunk_linear_attention.chain import ChainSpec as LinearChain
from ssmgen.families.chunk_linear_attention.problem import LinearPromptProblem, Rule
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Loads, Pdl

SMALL = {"K": 64, "V": 64}
LENGTHS = (65, 0, 64, 1, 130)
BOUND = BOUNDS[BF16]
rules = pytest.mark.parametrize("rule", kept(RULES, lambda rule: rule is not Rule.OLD), ids=called)  # its text is DELTA's
two = pytest.mark.parametrize("rule", [HEADS, Rule.DELTA], ids=called)

chain = partial(walked, backend=Backend.WARPGROUPS, tile=64, stages=2, pdl=Pdl.TRIGGER_LOADED)


# Laws.

CASES: dict[str, Any] = {
    "k128": ({"K": 128, "V": 128, "HV": 2}, LENGTHS, {"stages": 3}),
    "long memory": (SMALL | {"decay": 1e-3}, (330,), {"stages": 3}),
    "wide": ({"K": 64, "V": 128}, (200, 3), {"tile": 128}),
    "strong decay": (SMALL | {"decay": 5.0}, (130, 63), {"stages": 4}),
    "heads, f16": ({"K": 64, "V": 256, "HK": 2, "HV": 4, "x": F16}, (70,), {"tile": 128, "stages": 3}),
}


@costly(6, 10)
@needs_emulator
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES, ids=called)
def test_results_are_those_of_float64(rule, case):
    shape, lengths, how = CASES[case]
    p = prompt(*lengths, rule=rule, **shape)
    before = states_of(p)
    found = chain(p, before=before, **how)
    assert accurate(found, p, before)


@needs_emulator
@pytest.mark.parametrize("kind", few(HARD))
@pytest.mark.parametrize("rule", kept(RULES, lambda rule: rule in (HEADS, Rule.DELTA)), ids=called)
def test_hard_data(rule, kind):
    """Behind images as float64 makes them."""
    p = hard(kind, 130, rule=rule, **SMALL)
    assert accurate(chain(p, before=states_of(p)), p, states_of(p), 1.5e-2)


@costly(2)
@needs_emulator
@rules
def test_stages_and_rows_of_a_block_change_no_bit(rule):
    p = prompt(330, K=64, V=128, rule=rule)
    found = [chain(p, **how) for how in ({"stages": 2}, {"stages": 3}, {"tile": 128}, {"pdl": Pdl.OFF})]
    assert all(same(f[name], found[0][name]) for f in found[1:] for name in ("out", "final_states"))


@costly(2)
@needs_emulator
@rules
def test_packing_changes_no_bit(rule):
    p = prompt(*LENGTHS, **SMALL, rule=rule)
    packed = chain(p)
    for i, (begin, end) in enumerate(p.spans()):
        alone = chain(p.span(begin, end), batch=end > begin)
        assert same(alone["out"].flatten(0, -3), packed["out"][begin:end]) and same(alone["final_states"][0], packed["final_states"][i])


@needs_emulator
@two
def test_a_batch_is_sequences_of_one_length(rule):
    p = prompt(70, 70, 70, **SMALL, HV=2, rule=rule)
    batch, packed = chain(p, batch=True), chain(p)
    assert same(batch["out"].flatten(0, 1), packed["out"]) and same(batch["final_states"], packed["final_states"])


@costly(2)
@needs_emulator
@rules
def test_a_cut_changes_no_bit(rule):
    p = prompt(200, **SMALL, rule=rule)
    whole = chain(p)
    for cut in {p.step, 64, 128}:
        first = chain(p.span(0, cut))
        second = chain(p.span(cut, 200), before=first["final_states"])
        assert same(torch.cat([first["out"], second["out"]]), whole["out"]) and same(second["final_states"], whole["final_states"])


@needs_emulator
@pytest.mark.parametrize("rule", kept([HEADS, Rule.LOW_RANK, Rule.DELTA], lambda rule: rule is not Rule.DELTA), ids=called)
def test_neighbours_do_not_matter(rule):
    """NaN fills the neighbours' tokens and images, and tokens outside every sequence."""
    p = prompt(65, 0, 64, 3, **SMALL, rule=rule)
    step, good, made = p.step, chain(p), images(p)
    for i, (begin, end) in enumerate(p.spans()):
        if begin == end:
            continue
        own = torch.full_like(made, 255)
        first, count = begin // step + i, -(-(end - begin) // step)
        own[first : first + count] = made[first : first + count]
        found = chain(poisoned(p, begin, end), given={"images": own})
        assert same(found["out"][begin:end], good["out"][begin:end]) and same(found["final_states"][i], good["final_states"][i])


@costly(4)
@needs_emulator
@two
@pytest.mark.parametrize("state", [BF16, F32, F16])
@pytest.mark.parametrize("layout", [Layout.KV, Layout.VK])
def test_states_of_other_types_and_layouts(rule, state, layout):
    """They equal f32 states, rounded once, in the given layout."""
    p = prompt(70, 64, **SMALL, rule=rule)
    before = states_of(p).to(state)
    wanted = chain(p, before=before.float())["final_states"].to(state)
    stored = before.transpose(2, 3).contiguous() if layout is Layout.KV else before
    found = chain(p, before=stored, state=state, layout=layout)["final_states"]
    assert same(found.transpose(2, 3) if layout is Layout.KV else found, wanted)


@needs_emulator
@two
def test_states_begin_at_any_element(rule):
    p = prompt(70, **SMALL, rule=rule)
    before, buffer = states_of(p).to(BF16), torch.zeros(2 * 64 * 64 + 1, dtype=BF16)
    odd = buffer[1 : 1 + 64 * 64].view(1, 1, 64, 64)
    odd.copy_(before)
    found = chain(p, before=odd, state=BF16, state_loads=Loads.ELEMENT, given={"final_states": odd})["final_states"]
    assert same(found, chain(p, before=before, state=BF16)["final_states"]) and not buffer[1 + 64 * 64 :].any() and not buffer[0]


@needs_emulator
@pytest.mark.parametrize("own", [True, False], ids=["where-they-end", "elsewhere"])
@pytest.mark.parametrize("rule", kept([HEADS, Rule.DELTA, Rule.PLAIN], lambda rule: rule is not Rule.PLAIN), ids=called)
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


@costly(3)
@needs_emulator
@pytest.mark.parametrize("rule", kept([HEADS, Rule.DELTA, Rule.LOW_RANK, Rule.PLAIN], lambda rule: rule is not Rule.PLAIN), ids=called)
@pytest.mark.parametrize("layout", [Layout.VK, Layout.KV])
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
@two
def test_operands_may_lie_apart(rule):
    """q, k and v are columns of one tensor, and out of a wider one. Their last tokens belong to a batch of two."""
    p = prompt(70, 70, **SMALL, HV=2, rule=rule)
    together = torch.cat([t.flatten(1) for t in (p.q, p.k, p.v)], 1).unflatten(0, (2, 70))
    wide = torch.full((140, 2, 128), 7.0, dtype=BF16)
    given = {"q": together[:, :, None, :64], "k": together[:, :, None, 64:128], "v": together[:, :, 128:].unflatten(2, (2, 64))}
    given["out"] = wide[..., :64].unflatten(0, (2, 70))
    got = chain(p, batch=True, given=given)
    assert same(got["out"].flatten(0, 1), chain(p)["out"]) and (wide[..., 64:] == 7).all()


# Choices and texts.

SHAPE: dict[str, Any] = {"head_k": 128, "head_v": 128, "pdl": Pdl.TRIGGER_LOADED}
POOL: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True, "index": Index.I64}
NARROW: dict[str, Any] = {"head_k": 64, "initial": True, "final": True, "x": DType.F16, "layout": Layout.KV, "stages": 4}
LOW_RANK: dict[str, Any] = {"rule": Rule.LOW_RANK, "read": True, "write": True}
SPECS = [
    DeltaChain.by_warpgroups(**SHAPE, initial=True, final=True),
    DeltaChain.by_warpgroups(**SHAPE | POOL, tile=128, state=DType.BF16),
    DeltaChain.by_warpgroups(**SHAPE | POOL, checkpoints=Index.I64),
    DeltaChain.by_warpgroups(**SHAPE | NARROW),
    LinearChain.by_warpgroups(**SHAPE, initial=True, final=True),
    LinearChain.by_warpgroups(**SHAPE | POOL | {"head_k": 64}, tile=128, state=DType.BF16, stages=2),
    LinearChain.by_warpgroups(**SHAPE | POOL, checkpoints=Index.I64),
    LinearChain.by_warpgroups(**SHAPE | NARROW),
    LinearChain.by_warpgroups(**SHAPE | POOL, rule=Rule.PLAIN, checkpoints=Index.I64),
    LinearChain.by_warpgroups(**SHAPE | POOL, rule=Rule.PLAIN, tile=128, layout=Layout.KV),
    LinearChain.by_warpgroups(**SHAPE | POOL | LOW_RANK | {"head_k": 64, "head_v": 64}, checkpoints=Index.I64),
    LinearChain.by_warpgroups(**SHAPE | POOL | LOW_RANK, tile=128, stages=2),
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


NARROW_TILES, WIDE_TILES = {(64, 2), (64, 3)}, {(128, 2), (128, 3)}
LEGAL = [  # (problem, the tiles and stages of its variants)
    (DeltaProblem(head_k=128, head_v=128), NARROW_TILES | WIDE_TILES),
    (LinearPromptProblem(head_k=128, head_v=128), NARROW_TILES),
    (LinearPromptProblem(head_k=128, head_v=128, rule=Rule.PLAIN), NARROW_TILES | {(64, 4)} | WIDE_TILES),
]


@pytest.mark.parametrize(("problem", "legal"), LEGAL, ids=["head decay", "delta", "plain"])
def test_what_is_legal(problem, legal):
    space = CHAINS[type(problem)].warpgroup_space
    assert {(s.tile, s.stages) for s in space(problem, SM90)} == legal
    for other in ({"head_k": 96}, {"head_v": 80}, {"copy": 8}):
        assert not list(space(replace(problem, **other), SM90))
    assert not list(space(problem, Arch.parse("sm_100a")))


@pytest.mark.parametrize("spec", [DeltaChain, LinearChain], ids=["delta", "linear"])
def test_what_is_not_legal_in_words(spec):
    wrong = spec.by_warpgroups(head_k=128, head_v=128, tile=32, stages=5, min_blocks=2, fetchers=2).violations(SM90)
    words = [next(word for word in ("tile", "stages", "min_blocks", "fetchers", "shared memory") if word in line) for line in wrong]
    assert words == ["tile", "stages", "min_blocks", "fetchers", "shared memory"]


@pytest.mark.parametrize("rule", Rule, ids=called)
def test_what_is_chosen(rule):
    """Warpgroups where they can serve, with the most stages that fit; the other chain elsewhere."""
    more = LOW_RANK if rule is Rule.LOW_RANK else {"rule": rule}

    def first(heads: int, arch: Arch = SM90, **shape: Any) -> LinearChain:
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
    "copies: no wait for room": ("if (n >= kStages) barrier_wait", "if (n >= 2 * kStages) barrier_wait", "in shared memory, wh"),
    "copies: not waited for": ("barrier_wait(full, stage, phase);", "", "in shared memory, wh"),
    "image: of the chunk before": ("images + ((first_chunk + n)", "images + ((first_chunk + n / 2)", "off"),
    "state: changed in flight": ("wgmma_wait<1>();\n      wgmma_landed(S);", "", "in flight"),
    "state: of the next chunk, rounded late": ("round_state(0);\n      wgmma_fence();", "wgmma_fence();", "off"),
    "o: read too early": ("barrier_wait(made, consumer, n % 2);", "", "in shared memory, wh"),
    "o: made anew too early": ("barrier_wait(written, consumer, (n + 1) % 2);", "", "has read, with no barrier between"),
    "o: one arrival too few": (
        "arrive_together(made, consumer, lane);",
        "if (own_warp) arrive_together(made, consumer, lane);",
        "nobody ends",
    ),
    "o: past the end": ("if (n * kChunk + token + j < length) ", "", "store"),
    "room: given too early": ("barrier_init(empty, i, 4 * kConsumers)", "barrier_init(empty, i, 2 * kConsumers)", "before it looks"),
}
OF_HEADS = {
    "no upstream": ("if (warp == 3) wait_for_upstream();", "", "before the wait for the upstream kernel"),
    "copies: fewer bytes than come": ("full, stage, 4 * kAtQ);", "full, stage, 2 * kAtQ);", "nobody ends"),
    "copies: of one chunk only": ("copy_box(tiles, at, k_tiles, token,", "copy_box(tiles, at, k_tiles, 0,", "off"),
    "image: fewer bytes than expected": ("kFactorBytes, full, stage);", "kFactorBytes - 16, full, stage);", "nobody ends"),
    "image: a panel lower": ("kAtT + 3 * (kPanel + 16 * 8)", "kAtT + 3 * kPanel", "which nothing has written"),
    "above the diagonal: not cleared": ("< i / kPanel % 4 * 16)", "< i / kPanel % 3 * 16)", "nothing has written"),
    "state: not decayed": ("S[e] = S[e] * decay;", "S[e] = S[e];", "off"),
    "X: read in flight": ("      wgmma_wait<0>();\n      wgmma_landed(sum_k);\n    }\n", "    }\n", "in flight"),
    "u: read in flight": ("wgmma_wait<1>();\n      wgmma_landed(fresh);", "wgmma_landed(fresh);", "names as landed what products"),
    "u: not fenced": ("weigh(0);\n      wgmma_fence();", "weigh(0);", "no wgmma_fence"),
    "u: weighed for o": ("wgmma_64<false>(sum_q, own + 4 * c", "wgmma_64<false>(sum_q, x + 4 * c", "off"),
    "o: not scaled": ("sum_q[e] = sum_q[e] * (", "sum_q[e] = sum_q[e] + 0.f * (", "off"),
}
OF_CHANNELS = {
    "no upstream": ("if (warp == 0) wait_for_upstream();", "", "before the wait for the upstream kernel"),
    "copies: fewer bytes than come": ("4 * kConsumers * kBlock);\n", "2 * kConsumers * kBlock);\n", "nobody ends"),
    "copies: of one chunk only": ("v_tiles, n * kChunk,", "v_tiles, 0,", "off"),
    "image: fewer bytes than expected": ("image + 61440, 4 * kHeadK, full", "image + 59392, 4 * kHeadK - 16, full", "nobody ends"),
    "above the diagonal of P: not cleared": ("< i / kPanel % 4 * 16)", "< i / kPanel % 3 * 16)", "nothing has written"),
    "above the diagonal of T: not cleared": ("kAtT + 1280 + i % 128", "kAtT + 1152 + i % 128", "nothing has written|has read"),
    "decay: of another stage": ("kAtDecay + stage * kHeadK + 8", "kAtDecay + (stage ^ 1) * kHeadK + 8", "in shared memory, wh|off"),
    "decay: of other columns": ("+ 8 * i + 2 * part, decay", "+ 8 * i, decay", "off"),
    "state: not decayed": ("S[r] = S[r] * __uint", "S[r] = S[r] + 0.f * __uint", "off"),
    "X: read in flight": ("      wgmma_wait<0>();\n      wgmma_landed(sum_e);\n    }\n", "    }\n", "in flight"),
    "u: read in flight": ("wgmma_wait<1>();\n      landed_u();", "landed_u();", "names as landed what products"),
    "u: not fenced": ("      if (c > 0) round_u(c);\n        wgmma_fence();", "      if (c > 0) round_u(c);", "changed since the last"),
    "u: of X": ("      round_u(0);\n", "", "off"),
}
OF_PLAIN = {
    "state changed in flight": ("wgmma_wait<1>();\n      wgmma_landed(S);", "", "in flight"),
    "o read in flight": ("wgmma_wait<1>();\n      wgmma_landed(sum_q);", "", "in flight"),
    "v of the chunk before": ("load_v(at, x);\n      wgmma_fence();", "wgmma_fence();", "off|changed"),
    "room given too early": (
        "arrive_together(made, consumer, lane);\n",
        "arrive_together(made, consumer, lane);\n arrive_together(empty, stage, lane);\n",
        "in shared memory|have arrived|before it looks",
    ),
}
OF_LOW_RANK = {
    "a row of v too many": ("for (u32 c = 2; c < kRows / 16; ++c) {", "for (u32 c = 3; c < kRows / 16; ++c) {", "off"),
    "half of P": ("add(0), add(1);", "add(0);", "off"),
    "above the diagonal": ("i % kPanel / 8 + kRows - kChunk <", "i % kPanel / 8 + kRows <", "nothing has written"),
}
MISTAKES = {
    f"{called(rule)}: {name}": (rule, edit)
    for rule, own in ((HEADS, EDITS | OF_HEADS), (Rule.DELTA, EDITS | OF_CHANNELS), (Rule.PLAIN, OF_PLAIN), (Rule.LOW_RANK, OF_LOW_RANK))
    for name, edit in own.items()
}


@costly(9)
@needs_emulator
@pytest.mark.parametrize("mistake", MISTAKES)
def test_broken_kernels_are_found(mistake):
    rule, (old, new, words) = MISTAKES[mistake]
    p = prompt(330, K=128 if "61440" in old else 64, V=64, decay=0.02, rule=rule)
    with found(words):
        assert accurate(chain(p, change=edited(old, new), batch="v_tiles" in old), p)
