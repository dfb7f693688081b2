"""chunk_delta_rule's chain by warpgroups: the laws of its results in the emulator, and that wrong kernels are found."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import delta_cases
import pytest
import torch
from chain_cases import BF16, BOUND, F16, F32, SM90, Prompt, images, poisoned, prompt, recurrence, walked
from compiled import compiled
from scan_cases import error, same
from selection import few

from ssmgen import emulator
from ssmgen.compile.render import render
from ssmgen.emulator import EmulatorError
from ssmgen.families.chunk_delta_rule.chain import ChainSpec, warpgroup_space
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Loads, Pdl

SMALL = {"K": 64, "V": 64}
LENGTHS = (65, 0, 64, 1, 130)
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")

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
    "f16": (SMALL | {"x": F16}, (130, 63), {"stages": 4}),
    "strong decay": (SMALL | {"decay": 4.0}, (130, 64), {}),
    "wide": ({"K": 128, "V": 128}, (200, 3), {"tile": 128}),
    "heads": ({"K": 64, "V": 256, "HK": 2, "HV": 4}, (70,), {"tile": 128, "stages": 3}),
}


@needs_emulator
@pytest.mark.parametrize("case", few(CASES))
def test_results_are_those_of_float64(case):
    shape, lengths, how = CASES[case]
    p = prompt(*lengths, **shape)
    before = states_of(p)
    found = chain(p, before=before, **how)
    assert accurate(found, p, before)


@needs_emulator
@pytest.mark.parametrize("kind", few(delta_cases.ADVERSARIAL))
def test_hard_data(kind):
    """Behind images as float64 makes them."""

    def variant(problem: DeltaProblem) -> ChainSpec:
        return ChainSpec.by_warpgroups(**{f.name: getattr(problem, f.name) for f in fields(DeltaProblem)}, pdl=Pdl.TRIGGER_LOADED)

    sizes = delta_cases.Sizes(heads=1, head_k=64, head_v=64)
    run = partial(delta_cases.emulated, spec=variant, prepared=True)
    delta_cases.is_accurate(run, sizes, 130, **delta_cases.ADVERSARIAL[kind])


@needs_emulator
def test_stages_and_rows_of_a_block_change_no_bit():
    p = prompt(330, K=64, V=128)
    found = [chain(p, **how) for how in ({"stages": 2}, {"stages": 3}, {"tile": 128}, {"pdl": Pdl.OFF})]
    assert all(same(f[name], found[0][name]) for f in found[1:] for name in ("out", "final_states"))


@needs_emulator
def test_packing_changes_no_bit():
    p = prompt(*LENGTHS, **SMALL)
    packed = chain(p)
    for i, (begin, end) in enumerate(p.spans()):
        alone = chain(p.span(begin, end), batch=end > begin)
        assert same(alone["out"].flatten(0, -3), packed["out"][begin:end]) and same(alone["final_states"][0], packed["final_states"][i])


@needs_emulator
def test_a_batch_is_sequences_of_one_length():
    p = prompt(70, 70, 70, **SMALL, HV=2)
    batch, packed = chain(p, batch=True), chain(p)
    assert same(batch["out"].flatten(0, 1), packed["out"]) and same(batch["final_states"], packed["final_states"])


@needs_emulator
@pytest.mark.parametrize("cut", few([64, 128]))
def test_a_cut_changes_no_bit(cut):
    p = prompt(200, **SMALL)
    whole, first = chain(p), chain(p.span(0, cut))
    second = chain(p.span(cut, 200), before=first["final_states"])
    assert same(torch.cat([first["out"], second["out"]]), whole["out"]) and same(second["final_states"], whole["final_states"])


@needs_emulator
def test_neighbours_do_not_matter():
    """NaN fills the neighbours' tokens and images, and tokens outside every sequence."""
    p = prompt(65, 0, 64, 3, **SMALL)
    good = chain(p)
    for i, (begin, end) in enumerate(p.spans()):
        if begin == end:
            continue
        own = torch.full_like(images(p), 255)
        first = begin // 64 + i
        own[first : first + (end - begin + 63) // 64] = images(p)[first : first + (end - begin + 63) // 64]
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
def test_a_pool_is_touched_where_it_should_be(own):
    """Unused slots and slots of empty sequences stay unchanged; sequences without a slot get zeros."""
    p = prompt(65, 7, 0, 16, 64, **SMALL)
    slots = torch.tensor([3, 20, 7, 0, -1], dtype=torch.int32)
    pool = torch.full((9, 1, 64, 64), torch.nan)
    before = states_of(p)
    started = torch.tensor([True, True, True, False, True])
    given = {"state": pool, "state_indices": slots}
    if own:
        pool[3] = before[0]
        before[3] = 0
        given |= {"has_initial_state": started}
        found = chain(p, pool=given)
    else:
        found = chain(p, pool=given, before=before)
    out, states = recurrence(p, before)
    for sequence, slot in ((0, 3), (3, 0)):
        begin, end = p.spans()[sequence]
        assert error(found["out"][begin:end], out[begin:end]) <= BOUND and error(pool[slot], states[sequence]) <= BOUND
    assert pool[[1, 2, 4, 5, 6, 7, 8]].isnan().all()
    assert not found["out"][65:72].any() and not found["out"][88:].any()


@needs_emulator
@pytest.mark.parametrize("layout", few([Layout.VK, Layout.KV]))
def test_states_at_positions(layout):
    """States at the ends of chunks and sequences equal the final states of shorter prompts. Rows of other positions stay unchanged."""
    p = prompt(200, 64, 0, 70, **SMALL)
    positions = [0, 64, 65, 128, 200, 263, 264, 328, 334, 400]
    plain, found = chain(p, layout=layout), chain(p, layout=layout, positions=positions)
    assert same(found["out"], plain["out"]) and same(found["final_states"], plain["final_states"])
    for position, begin in ((64, 0), (128, 0), (200, 0), (264, 200), (328, 264), (334, 264)):
        own = chain(p.span(begin, position), layout=layout)["final_states"][0]
        assert same(found["checkpoints"][positions.index(position)], own), position
    others = [positions.index(i) for i in (0, 65, 263, 400)]
    assert (found["checkpoints"][others] == 7).all()


@needs_emulator
def test_operands_may_lie_apart():
    """q, k and v are columns of one tensor, and out of a wider one."""
    p = prompt(70, **SMALL, HV=2)
    together = torch.cat([t.flatten(1) for t in (p.q, p.k, p.v)], 1)
    apart = replace(p, q=together[:, None, :64], k=together[:, None, 64:128], v=together[:, 128:].unflatten(1, (2, 64)))
    wide = torch.full((70, 2, 128), 7.0, dtype=BF16)
    found = chain(apart, given={"out": wide[..., :64]})
    assert same(found["out"], chain(p)["out"]) and (wide[..., 64:] == 7).all()


# Choices and texts.

SHAPE: dict[str, Any] = {"head_k": 128, "head_v": 128, "pdl": Pdl.TRIGGER_LOADED}
SPECS = [
    ChainSpec.by_warpgroups(**SHAPE, initial=True, final=True),
    ChainSpec.by_warpgroups(**SHAPE, tile=128, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64, state=DType.BF16),
    ChainSpec.by_warpgroups(**SHAPE, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64, checkpoints=Index.I64),
    ChainSpec.by_warpgroups(**SHAPE | {"head_k": 64}, initial=True, final=True, x=DType.F16, layout=Layout.KV, stages=4),
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
    problem = DeltaProblem(head_k=128, head_v=128)
    assert {(s.tile, s.stages) for s in warpgroup_space(problem, SM90)} == {(64, 2), (64, 3), (128, 2), (128, 3)}
    for other in ({"head_k": 96}, {"head_v": 80}, {"copy": 8}):
        assert not list(warpgroup_space(replace(problem, **other), SM90))
    assert not list(warpgroup_space(problem, Arch.parse("sm_100a")))
    wrong = ChainSpec.by_warpgroups(head_k=128, head_v=128, tile=32, stages=5, min_blocks=2, fetchers=2).violations(SM90)
    found = [next(word for word in ("tile", "stages", "min_blocks", "fetchers", "shared memory") if word in line) for line in wrong]
    assert found == ["tile", "stages", "min_blocks", "fetchers", "shared memory"]


# Mistakes: (text to replace, replacement, words of the finding; off: a result is wrong)

EDITS = {
    "no upstream": ("if (warp == 3) wait_for_upstream();", "", "before the wait for the upstream kernel"),
    "copies: no wait for room": ("if (n >= kStages) barrier_wait", "if (n >= 2 * kStages) barrier_wait", "in shared memory, wh"),
    "copies: fewer bytes than come": ("full, stage, 4 * kAtQ);", "full, stage, 2 * kAtQ);", "nobody ends"),
    "copies: of one chunk only": ("copy_box(tiles, at, k_tiles, token,", "copy_box(tiles, at, k_tiles, 0,", "off"),
    "copies: not waited for": ("barrier_wait(full, stage, phase);", "", "in shared memory, wh"),
    "image: fewer bytes than expected": ("kFactorBytes, full, stage);", "kFactorBytes - 16, full, stage);", "nobody ends"),
    "image: a panel lower": ("kAtT + 3 * (kPanel + 16 * 8)", "kAtT + 3 * kPanel", "which nothing has written"),
    "image: of the chunk before": ("images + ((first_chunk + n)", "images + ((first_chunk + n / 2)", "off"),
    "above the diagonal: not cleared": ("< i / kPanel % 4 * 16)", "< i / kPanel % 3 * 16)", "nothing has written"),
    "state: changed in flight": ("wgmma_wait<1>();\n      wgmma_landed(S);", "", "in flight"),
    "state: not decayed": ("S[e] = S[e] * decay;", "S[e] = S[e];", "off"),
    "state: of the next chunk, rounded late": ("round_state(0);\n      wgmma_fence();", "wgmma_fence();", "off"),
    "X: read in flight": ("      wgmma_wait<0>();\n      wgmma_landed(sum_k);\n    }\n", "    }\n", "in flight"),
    "u: read in flight": ("wgmma_wait<1>();\n      wgmma_landed(fresh);", "wgmma_landed(fresh);", "names as landed what products"),
    "u: not fenced": ("weigh(0);\n      wgmma_fence();", "weigh(0);", "no wgmma_fence"),
    "u: weighed for o": ("wgmma_64<false>(sum_q, own + 4 * c", "wgmma_64<false>(sum_q, x + 4 * c", "off"),
    "o: not scaled": ("sum_q[e] = sum_q[e] * (", "sum_q[e] = sum_q[e] + 0.f * (", "off"),
    "o: read too early": ("barrier_wait(made, walker, n % 2);", "", "in shared memory, wh"),
    "o: made anew too early": ("barrier_wait(written, walker, (n + 1) % 2);", "", "has read, with no barrier between"),
    "o: one arrival too few": ("arrive_together(made, walker, lane);", "if (own_warp) arrive_together(made, walker, lane);", "nobody ends"),
    "o: past the end": ("if (n * kChunk + token + j < length) ", "", "store"),
    "room: given too early": ("barrier_init(empty, i, 4 * kWalkers)", "barrier_init(empty, i, 2 * kWalkers)", "before it looks"),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("edit", few(EDITS))
def test_broken_kernels_are_found(edit):
    old, new, words = EDITS[edit]

    def change(source: str) -> str:
        assert old in source, "the edit no longer applies"
        return source.replace(old, new)

    p = prompt(330, **SMALL, decay=0.02)
    try:
        assert accurate(chain(p, change=change), p), "off"
    except EmulatorError as e:
        assert words in str(e)
    except AssertionError as e:
        assert words == "off" and "no longer applies" not in str(e)
    else:
        pytest.fail("nothing was found")
