"""The second kernel of chunk_delta_rule and of chunk_linear_attention, by each warp's products: the laws of its results in the emulator,
and that wrong kernels are found."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import chain_cases as cases
import pytest
import torch
from chain_cases import BF16, F16, F32, HEADS, RULES, SM90, accurate, called, hard, poisoned, prompt, recurrence, states_of, walked
from compiled import compiled
from emulated_calls import SM80, needs_emulator
from kernel_laws import edited, found, waits_before_any_of
from scan_cases import error, same
from selection import costly, few, kept
from ssu_cases import Memory

from ssmgen.engine.chunks.chain import TILES
from ssmgen.engine.chunks.kernels import of_problem
from ssmgen.families.chunk_delta_rule.chain import ChainSpec as DeltaChain
from ssmgen.families.chunk_linear_attention.chain import ChainSpec as LinearChain
from ssmgen.families.chunk_linear_attention.problem import LinearPromptProblem, Rule
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Loads, Pdl

pytestmark = pytest.mark.usefixtures("one_thread")
NAN = float("nan")
LENGTHS = (65, 0, 1, 64, 130, 17)
rules = pytest.mark.parametrize("rule", kept(RULES, lambda rule: rule in (HEADS, Rule.DELTA, Rule.LOW_RANK)), ids=called)
two = pytest.mark.parametrize("rule", [HEADS, Rule.DELTA], ids=called)


# Laws.

CASES: dict[str, Any] = {
    "ragged": (LENGTHS, {"HK": 2, "HV": 4}, {}),
    "long memory": ((200,), {"decay": 1e-3, "x": F16}, {"tile": 32}),
    "k128": ((150,), {"K": 128, "V": 16}, {}),
    "strong decay": ((130,), {"decay": 5.0}, {}),
    "k48": ((130,), {"K": 48, "V": 16}, {"stages": 1}),
    "k16": ((63, 70), {"K": 16, "V": 64}, {"tile": 64}),
    "k144": ((70,), {"K": 144, "V": 16, "x": F16}, {"stages": 1}),
}
ALL = [(rule, case) for case in CASES for rule in RULES] + [(HEADS, "k256")]


@costly(4, 20)
@needs_emulator
@pytest.mark.parametrize("arch", few([SM90, SM80]))
@pytest.mark.parametrize(("rule", "case"), ALL, ids=[f"{called(rule)}: {case}" for rule, case in ALL])
def test_results_are_those_of_float64(rule, case, arch):
    lengths, more, how = (CASES | {"k256": ((70,), {"K": 256, "V": 16, "x": F16}, {})})[case]
    p = prompt(*lengths, rule=rule, **more)
    before = states_of(p)
    assert accurate(walked(p, before=before, arch=arch, **how), p, before, cases.BOUND if p.q.dtype is BF16 else 1e-3)


@needs_emulator
@pytest.mark.parametrize("kind", few(cases.HARD))
@pytest.mark.parametrize("rule", kept(RULES, lambda rule: rule in (HEADS, Rule.DELTA)), ids=called)
def test_hard_data(rule, kind):
    """Behind images as float64 makes them."""
    p = hard(kind, 150, rule=rule)
    assert accurate(walked(p, before=states_of(p)), p, states_of(p), 1.5e-2)


@costly(2)
@needs_emulator
@rules
def test_packing_changes_no_bit(rule):
    """Values of other sequences, and tokens outside every sequence, change no bit either."""
    p = prompt(*LENGTHS[:5], HV=2, rule=rule)
    whole = walked(p)
    for i, (begin, end) in enumerate(p.spans()):
        among = walked(poisoned(p, begin, end))
        assert same(among["out"][begin:end], whole["out"][begin:end]) and same(among["final_states"][i], whole["final_states"][i])
        if end > begin:
            alone = walked(p.span(begin, end), batch=True)
            assert same(alone["out"][0], whole["out"][begin:end]) and same(alone["final_states"][0], whole["final_states"][i])
        else:
            assert not whole["final_states"][i].any()


@needs_emulator
@rules
@pytest.mark.parametrize("x", few([BF16, F16]))
def test_a_cut_changes_no_bit(rule, x):
    p = prompt(150, rule=rule, x=x)
    whole = walked(p)
    for cut in {p.step, 64, 128}:
        first = walked(p.span(0, cut))
        second = walked(p.span(cut, 150), before=first["final_states"])
        assert same(torch.cat([first["out"], second["out"]]), whole["out"]) and same(second["final_states"], whole["final_states"])


@needs_emulator
@two
def test_a_batch_is_its_sequences(rule):
    p = prompt(70, 70, 70, HV=2, rule=rule)
    batch, packed = walked(p, batch=True), walked(p)
    assert same(batch["out"].flatten(0, 1), packed["out"]) and same(batch["final_states"], packed["final_states"])


@costly(2)
@needs_emulator
@rules
def test_choices_change_no_bit(rule):
    p = prompt(130, 5, V=64, rule=rule)
    kept = [walked(p, tile=tile, stages=stages, fetchers=fetchers, arch=arch) for tile, stages, fetchers, arch in (
        (64, 3, 1, SM90), (32, 1, 2, SM90), (16, 2, 1, SM80), (64, 2, 4, SM80), (16, 4, 1, SM90),
    )]  # fmt: skip
    assert all(same(a, b) for found in kept[1:] for a, b in zip(found.values(), kept[0].values(), strict=True))


@costly(4)
@needs_emulator
@two
@pytest.mark.parametrize("state", [BF16, F32, F16])
@pytest.mark.parametrize("layout", [Layout.KV, Layout.VK])
def test_a_pool_is_touched_where_it_should_be(rule, state, layout):
    """NaN fills unused slots, slots of empty sequences, and slots of sequences that start from zeros."""
    p, memory = prompt(65, 7, 0, 16, 64, HV=2, V=16, rule=rule), Memory("cpu")
    slots, started = (3, 20, 7, 0, -5), (True, True, True, False, True)
    before = states_of(p, state, 1)[0]
    pool = memory.fill("state", torch.full((9, *(before if layout is Layout.VK else before.mT).shape), NAN, dtype=state))
    pool[3] = before if layout is Layout.VK else before.mT
    out = memory.fill("out", torch.full_like(p.v, NAN))
    given = {"state": pool, "state_indices": torch.tensor(slots).int(), "has_initial_state": torch.tensor(started)}
    memory.seal()
    walked(p, pool=given, given={"out": out}, state=state, layout=layout)
    assert not memory.untouched({"state": torch.tensor([3, 0]), "out": None})
    for begin, end, slot, start in ((0, 65, 3, before[None]), (72, 88, 0, None)):
        wanted, states = recurrence(p.span(begin, end), start)
        found = pool[slot] if layout is Layout.VK else pool[slot].mT
        assert error(out[begin:end], wanted) <= cases.BOUND and error(found, states[0]) <= cases.BOUND
    assert not out[65:72].any() and not out[88:].any()


@needs_emulator
@two
@pytest.mark.parametrize("pad", [-1, 4])
def test_a_pool_may_begin_elsewhere(rule, pad):
    """Dense states give the bits of the call without a pool. A sequence with the padding slot, or without tokens, changes no slot."""
    p = prompt(65, 7, 0, 16, HV=2, rule=rule)
    before = states_of(p)
    wanted = walked(p, before=before)
    pool = torch.full((9, *before.shape[1:]), 7.0)
    found = walked(p, before=before, pool={"state": pool, "state_indices": torch.tensor([4, 8, 1, 0])}, pad_slot_id=pad)
    served = [(i, slot) for i, slot in ((0, 4), (1, 8), (3, 0)) if slot != pad]
    assert all(same(pool[slot], wanted["final_states"][i]) for i, slot in served)
    assert (pool[[i for i in range(9) if i not in dict(served).values()]] == 7.0).all()
    wanted["out"][: 65 if pad == 4 else 0] = 0
    assert same(found["out"], wanted["out"])


@costly(4)
@needs_emulator
@two
@pytest.mark.parametrize("loads", Loads)
@pytest.mark.parametrize("state", [F32, BF16])
def test_layouts_of_states_hold_the_same(rule, state, loads):
    p = prompt(70, 0, V=48, rule=rule)
    before = states_of(p, state)
    plain = walked(p, before=before, state=state)
    odd = torch.zeros(1 + before.numel(), dtype=state)[1:].view(before.shape).copy_(before)
    moved = walked(p, before=odd if loads is Loads.ELEMENT else before, state=state, state_loads=loads)
    turned = walked(p, before=before.mT.contiguous(), state=state, layout=Layout.KV, state_loads=loads)
    assert same(moved["final_states"], plain["final_states"]) and same(turned["final_states"].mT, plain["final_states"])
    assert same(moved["out"], plain["out"]) and same(turned["out"], plain["out"]) and same(plain["final_states"][1], before[1])


CHECKPOINTS = [
    (HEADS, 32, Layout.VK),
    (HEADS, 32, Layout.KV),
    (HEADS, 144, Layout.VK),
    (Rule.DELTA, 32, Layout.VK),
    (Rule.LOW_RANK, 32, Layout.KV),
    (Rule.PLAIN, 32, Layout.VK),
]


@needs_emulator
@pytest.mark.parametrize(("rule", "K", "layout"), CHECKPOINTS)
def test_checkpoints_are_final_states(rule, K, layout):
    """At multiples of a chunk's tokens and at ends, twice where they are listed twice; rows of others are left alone."""
    p = prompt(5, 0, 64, 195, K=K, V=16, rule=rule)
    lists = (0, 3, 5, 69, 69, 100, 101, 133, 197, 200, 261, 264, 300)
    found = walked(p, positions=lists, layout=layout)
    wanted = {5: (0, 5), 69: (5, 69), 133: (69, 133), 197: (69, 197), 261: (69, 261), 264: (69, 264)}
    wanted |= {101: (69, 101)} if rule is Rule.LOW_RANK else {}
    for at, row in zip(lists, found["checkpoints"], strict=True):
        if at in wanted:
            assert same(row, walked(p.span(*wanted[at]), layout=layout)["final_states"][0]), at
        else:
            assert (row == 7.0).all(), at


@needs_emulator
@two
@pytest.mark.parametrize(("copy", "K", "fetchers"), [(16, 48, 1), (8, 32, 2), (4, 96, 1)])
def test_operands_may_be_slices(rule, copy, K, fetchers):
    """They are parts of one tensor, as a convolution leaves them, and out is part of a wider one."""
    p = prompt(70, 7, HK=1, HV=2, K=K, V=16, rule=rule)
    wanted, offset = walked(p), copy // 2
    parts = [t.flatten(1) for t in (p.q, p.k, p.v)]
    wide = torch.cat([torch.full_like(parts[0], NAN)[:, :offset], *parts, torch.full_like(parts[0], NAN)[:, : 8 - offset % 8]], 1)
    q, k, v = wide[:, offset : offset + 2 * K + 32].split([K, K, 32], 1)
    given = {"q": q.unflatten(1, (1, K)), "k": k.unflatten(1, (1, K)), "v": v.unflatten(1, (2, 16))}
    given["out"] = torch.full((77, 2, 16 + offset), NAN, dtype=BF16)[..., :16]
    found = walked(p, given=given, copy=copy, fetchers=fetchers)
    assert same(found["out"], wanted["out"]) and same(found["final_states"], wanted["final_states"])


@needs_emulator
@two
def test_boundaries_that_make_no_sense_are_sequences_without_tokens(rule):
    p = prompt(20, rule=rule)
    starts = torch.tensor([5, 3, 21, -4, 2])
    given = {"cu_seqlens": starts, "final_states": torch.full((4, 1, 32, 32), 7.0)}
    found = walked(replace(p, lengths=(5, 5, 5, 5)), given=given)
    assert (found["out"] == 7.0).all() and not found["final_states"].any()


# Choices and texts.

SPECS = {  # per lane, the code of 64 rows
    HEADS: DeltaChain(head_k=128, head_v=128, initial=True, final=True, cu_seqlens=Index.I32, tile=32),
    Rule.DELTA: LinearChain(head_k=128, head_v=128, initial=True, final=True, cu_seqlens=Index.I32, tile=32),
}
LOW_RANK: dict[str, Any] = {"rule": Rule.LOW_RANK, "read": True, "write": True}
POOL: dict[str, Any] = {"initial": False, "final": False, "pool": True, "started": True, "index": Index.I64, "checkpoints": Index.I64}
KV: dict[str, Any] = {"layout": Layout.KV, "state": DType.BF16, "x": DType.F16, "copy": 4}
FILLED: dict[str, Any] = {"tile": 16, "stages": 1}
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "delta dense": (HEADS, {}),
    "delta pool": (HEADS, POOL),
    "delta kv": (HEADS, KV),
    "delta k256": (HEADS, FILLED | {"head_k": 256, "checkpoints": Index.I32}),
    "delta k144": (HEADS, FILLED | {"head_k": 144}),
    "dense": (Rule.DELTA, {"stages": 1}),
    "pool": (Rule.DELTA, POOL | {"stages": 1}),
    "kv": (Rule.DELTA, KV | {"rule": Rule.PLAIN}),
    "low rank": (Rule.DELTA, LOW_RANK | {"stages": 1}),
    "k128": (Rule.DELTA, FILLED | {"head_k": 128, "checkpoints": Index.I32}),  # above, registers are too few
    "k256": (Rule.DELTA, FILLED | {"head_k": 256, "checkpoints": Index.I32, "rule": Rule.PLAIN}),
}


@costly(2, 11)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_variant_spills(shape, arch):
    """The lock has the default variants on every architecture."""
    rule, fields = SHAPES[shape]
    spec = replace(SPECS[rule], **fields)
    resources = compiled(spec, Arch.parse(arch)).resources
    assert not resources.spills and not resources.stack, f"{spec}: {resources}"


@pytest.mark.parametrize(("rule", "early"), [(HEADS, ["q", "k", "v"]), (Rule.DELTA, ["v"])], ids=["delta", "linear"])
def test_the_wait_precedes_every_access(rule, early):
    """Except accesses to tensors that the upstream kernel only reads: it has itself waited before this one starts."""
    spec = SPECS[rule]
    body = waits_before_any_of(replace(spec, pdl=Pdl.TRIGGER_TOP), "load(", "load_u8(", "prefetch_tokens(", "copy_tokens<", "store_")
    assert body.count("wait_for_upstream();") == 1
    loaded = replace(spec, pdl=Pdl.TRIGGER_LOADED)
    assert loaded.early_operands() == [*early, "cu_seqlens", "initial_states"] and not spec.early_operands()


@pytest.mark.parametrize("rule", Rule, ids=called)
def test_an_image_is_what_is_read(rule):
    """Every byte of it but decays goes to one place, which nothing else has; zeros above T's and P's diagonal, and rows that read nothing,
    are not kept."""
    more = {"read": True, "write": True} if rule is Rule.LOW_RANK else {}
    for make, head_k, tile in (
        (LinearChain, 64, 64),
        (LinearChain, 80, 16),
        (LinearChain, 256, 16),
        (LinearChain.by_warpgroups, 64, 128),
        (LinearChain.by_warpgroups, 128, 64),
    ):
        spec = make(**of_problem(replace(SPECS[Rule.DELTA], head_k=head_k, rule=rule, **more), LinearPromptProblem), tile=tile)
        bytes_of = sorted((begin, begin + count) for begin, count, _ in spec.pieces)
        words_of = sorted((word, word + count // 4) for _, count, word in spec.pieces)
        words_of.append((spec.stage.v, spec.stage.v + rule.tokens * spec.v_words))
        assert all(a[1] == b[0] for a, b in pairwise(bytes_of)) and bytes_of[0][0] == 0 and bytes_of[-1][1] == spec.image.decay
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(words_of))) and max(words_of)[1] <= spec.stage.words
        blocks = -(-head_k // 64) * 8192
        wanted = {Rule.PLAIN: 2 * blocks + 5120, Rule.LOW_RANK: 2 * blocks + 2 * 3584}.get(rule, 3 * blocks + 2 * 5120 + 2048)
        assert spec.image.decay == wanted and all(begin % 16 == count % 16 == word % 4 == 0 for begin, count, word in spec.pieces)


def test_every_machine_has_a_variant():
    """Unless the matrices of a chunk are more than its shared memory: 256 columns that are read, with 99 KiB."""
    for rule in Rule:
        for head_k in (16, 64, 96, 128, 192, 256):
            for arch in map(Arch.parse, ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")):
                spec = replace(SPECS[Rule.DELTA], **LOW_RANK if rule is Rule.LOW_RANK else {"rule": rule})
                spec = replace(spec, head_k=head_k, tile=TILES[0], stages=1, fetchers=2)
                small = arch.number in (86, 89, 120) and head_k == 256 and rule in (Rule.DELTA, Rule.OLD)
                assert bool(spec.violations(arch)) == small, (rule, head_k, arch)


EDITS = {
    "no wait for copies": ("wait_copies<kStages - 2>();", "", "has not waited for the copy"),
    "a meeting too few": ("meet(1, kThreads);\n    scan_chunk(n);", "scan_chunk(n);", "shared memory|waits at barrier 1"),
    "each role by itself": (
        "meet(1, kThreads);\n    scan_chunk(n);",
        "meet(2, 32 * kConsumers);\n    scan_chunk(n);",
        "shared memory|waits at barrier",
    ),
    "asked for too early": ("prefetch_tokens(n + kStages - 1);", "prefetch_tokens(n + kStages);", "shared memory|copy"),
    "another warp's v": ("2 * warp + lane / 8 % 2", "2 * (warp ^ 1) + lane / 8 % 2", "shared memory|off"),
    "o before v is read": ("c * (16 * kVWords));\n      __syncwarp();", "c * (16 * kVWords));", "shared memory"),
    "o before it is there": ("    }\n    __syncwarp();\n  };\n  const auto send", "    }\n  };\n  const auto send", "shared memory"),
    "no upstream": ("    wait_for_upstream();\n", "", "before the wait for the upstream kernel"),
    "walkers need not wait": ("\n  wait_for_upstream();", "", "before the wait for the upstream kernel"),
    "the image of another head": ("* heads + head) * kImage", "* heads) * kImage", "off"),
    "the chunk before": ("((first_chunk + n) *", "((first_chunk + (n ? n - 1 : 0)) *", "off"),
    "tokens past the end": ("there ? source : from, there ? kCopy : 0", "source, kCopy", "off|outside"),
    "a chunk too few": ("(length + kChunk - 1) / kChunk", "length / kChunk", "off"),
    "the last rows": ("send(at, u64(n) * kChunk, length - n * kChunk);", "send(at, u64(n) * kChunk, kChunk);", "also writes"),
}
OF_HEADS = {
    "one stage for two chunks": ("const u32 at = n % kStages * kStageWords, rows", "const u32 at = 0, rows", "shared memory|copy"),
    "no decay": ("const float decay = __uint_as_float(u32(tiles[at + kAtFactors + 3 * kChunk]));", "const float decay = 1.f;", "off"),
    "another panel": ("512 * c - 64 * c * (c - 1)", "512 * c", "off|shared memory"),
}
OF_CHANNELS = {
    "an image too early": ("prefetch_image(n + kStages - 1);", "prefetch_image(n + kStages);", "shared memory|copy"),
    "one stage for two chunks": ("const u32 at = n % kStages * kStageWords, at_decay", "const u32 at = 0, at_decay", "shared memory|copy"),
    "decays of another chunk": ("kAtDecay + n % kStages * kHeadK + 2", "kAtDecay + (n + 1) % kStages * kHeadK + 2", "shared memory|off"),
    "a decay for all columns": ("load_shared_2xu32(tiles, at_decay + 8 * i, decay);", "load_shared_2xu32(tiles, at_decay, decay);", "off"),
    "another block's rows": ("(2 * c + lane / 16) ^ lane % 8", "(2 * c + lane / 16) ^ lane % 4", "off"),
}
MISTAKES = {
    f"{called(rule)}: {name}": (rule, edit)
    for rule, own in ((HEADS, OF_HEADS), (Rule.DELTA, OF_CHANNELS), (Rule.LOW_RANK, OF_CHANNELS))
    for name, edit in (EDITS | own).items()
}


@costly(4)
@needs_emulator
@pytest.mark.parametrize("mistake", MISTAKES)
def test_broken_kernels_are_found(mistake):
    rule, (old, new, words) = MISTAKES[mistake]
    p = prompt(70, 150, 70, V=32, HV=2, rule=rule)
    with found(words):
        got = walked(poisoned(p, 70, 220), tile=32, stages=3, change=edited(old, new))
        out, states = recurrence(p)
        assert max(error(got["out"][70:220], out[70:220]), error(got["final_states"][1], states[1])) <= cases.BOUND
