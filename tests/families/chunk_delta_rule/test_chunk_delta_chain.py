"""chunk_delta_rule's second kernel, by each warp's products: the laws of its results in the emulator, and that wrong kernels are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chain_cases as cases
import pytest
import torch
from chain_cases import SM80, SM90, poisoned, prompt, recurrence, walked
from compiled import compiled
from scan_cases import error, same
from selection import costly, few
from ssu_cases import BF16, F16, F32, Memory

from ssmgen import emulator
from ssmgen.compile.render import render
from ssmgen.emulator import EmulatorError
from ssmgen.families.chunk_delta_rule.chain import ChainSpec
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Loads, Pdl

pytestmark = pytest.mark.usefixtures("one_thread")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")
NAN = float("nan")
LENGTHS = (65, 0, 1, 64, 130, 17)


def states_of(p: cases.Prompt, dtype: torch.dtype = F32, count: int | None = None) -> torch.Tensor:
    shape = len(p.lengths) if count is None else count, p.v.shape[1], p.v.shape[2], p.q.shape[2]
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


# Laws.


@needs_emulator
@pytest.mark.parametrize("arch", few([SM90, SM80]))
@pytest.mark.parametrize(
    ("lengths", "more"),
    [
        (LENGTHS, {"HK": 2, "HV": 4}),
        ((200,), {"decay": 0.01, "x": F16}),  # long memory
        ((130,), {"decay": 10.0}),
        ((150,), {"K": 128, "V": 16}),
        ((130,), {"K": 48, "V": 16}),
        ((70,), {"K": 256, "V": 16, "x": F16}),
        ((70,), {"K": 16, "V": 64}),
    ],
    ids=["ragged", "long-memory", "strong-decay", "k128", "k48", "k256", "k16"],
)
def test_results_are_those_of_float64(lengths, more, arch):
    p = prompt(*lengths, **more)
    before = states_of(p)
    found = walked(p, before=before, arch=arch)
    out, states = recurrence(p, before)
    bound = cases.BOUND if p.q.dtype is BF16 else 1e-3
    assert error(found["out"], out) <= bound and error(found["final_states"], torch.stack(states)) <= bound


@needs_emulator
@pytest.mark.parametrize(("spread", "beta"), [(0.1, 0.995), (1.0, 1.99)], ids=["near-keys", "beta-2"])
def test_little_decay(spread, beta):
    """T amplifies errors if keys are nearly equal and if steps overshoot."""
    p = prompt(200, decay=0.001)
    k = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(2)) * (spread < 1) + spread * p.k.float()
    p = replace(p, k=k.bfloat16(), beta=torch.full_like(p.beta, beta))
    found, (out, states) = walked(p, before=states_of(p)), recurrence(p, states_of(p))
    assert error(found["out"], out) <= 1.5e-2 and error(found["final_states"], torch.stack(states)) <= 1.5e-2


@needs_emulator
def test_packing_changes_no_bit():
    """Values of other sequences, and tokens outside every sequence, change no bit either."""
    p = prompt(*LENGTHS, HV=2)
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
@pytest.mark.parametrize("x", [BF16, F16])
def test_a_cut_changes_no_bit(x):
    p = prompt(150, x=x)
    whole = walked(p)
    for cut in (64, 128):
        first = walked(p.span(0, cut))
        second = walked(p.span(cut, 150), before=first["final_states"])
        assert same(torch.cat([first["out"], second["out"]]), whole["out"]) and same(second["final_states"], whole["final_states"])


@needs_emulator
def test_a_batch_is_its_sequences():
    p = prompt(70, 70, 70, HV=2)
    found, packed = walked(p, batch=True), walked(p)
    assert same(found["out"].flatten(0, 1), packed["out"]) and same(found["final_states"], packed["final_states"])


@needs_emulator
def test_choices_change_no_bit():
    p = prompt(130, 5, V=64)
    kept = [walked(p, tile=tile, stages=stages, fetchers=fetchers, arch=arch) for tile, stages, fetchers, arch in (
        (64, 3, 1, SM90), (32, 1, 2, SM90), (16, 2, 1, SM80), (64, 2, 4, SM80), (16, 4, 1, SM90),
    )]  # fmt: skip
    assert all(same(a, b) for found in kept[1:] for a, b in zip(found.values(), kept[0].values(), strict=True))


@needs_emulator
@pytest.mark.parametrize(("state", "layout"), [(F32, Layout.VK), (BF16, Layout.KV), (F16, Layout.VK), (F32, Layout.KV)])
def test_a_pool_is_touched_where_it_should_be(state, layout):
    """NaN fills unused slots, slots of empty sequences, and slots of sequences that start from zeros."""
    p, memory = prompt(65, 7, 0, 16, 64, HV=2, V=16), Memory("cpu")
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
@pytest.mark.parametrize("pad", [-1, 4])
def test_a_pool_may_begin_elsewhere(pad):
    """Dense states give the bits of the call without a pool. A sequence with the padding slot, or without tokens, changes no slot."""
    p = prompt(65, 7, 0, 16, HV=2)
    before = states_of(p)
    wanted = walked(p, before=before)
    pool = torch.full((9, *before.shape[1:]), 7.0)
    found = walked(p, before=before, pool={"state": pool, "state_indices": torch.tensor([4, 8, 1, 0])}, pad_slot_id=pad)
    served = [(i, slot) for i, slot in ((0, 4), (1, 8), (3, 0)) if slot != pad]
    assert all(same(pool[slot], wanted["final_states"][i]) for i, slot in served)
    assert (pool[[i for i in range(9) if i not in dict(served).values()]] == 7.0).all()
    wanted["out"][: 65 if pad == 4 else 0] = 0
    assert same(found["out"], wanted["out"])


@costly(1)
@needs_emulator
@pytest.mark.parametrize("loads", Loads)
@pytest.mark.parametrize("state", [F32, BF16])
def test_layouts_of_states_hold_the_same(state, loads):
    p = prompt(70, 0, V=48)
    before = states_of(p, state)
    plain = walked(p, before=before, state=state)
    odd = torch.zeros(1 + before.numel(), dtype=state)[1:].view(before.shape).copy_(before)
    moved = walked(p, before=odd if loads is Loads.ELEMENT else before, state=state, state_loads=loads)
    turned = walked(p, before=before.mT.contiguous(), state=state, layout=Layout.KV, state_loads=loads)
    assert same(moved["final_states"], plain["final_states"]) and same(turned["final_states"].mT, plain["final_states"])
    assert same(moved["out"], plain["out"]) and same(turned["out"], plain["out"]) and same(plain["final_states"][1], before[1])


@needs_emulator
@pytest.mark.parametrize(("K", "layout"), [(32, Layout.VK), (32, Layout.KV), (144, Layout.VK)])
def test_checkpoints_are_final_states(K, layout):
    """At multiples of 64 tokens and at ends, twice where they are listed twice; rows of others are left alone."""
    p = prompt(5, 0, 64, 195, K=K, V=16)
    lists = (0, 3, 5, 69, 69, 100, 133, 197, 200, 261, 264, 300)
    found = walked(p, positions=lists, layout=layout)
    wanted = {5: (0, 5), 69: (5, 69), 133: (69, 133), 197: (69, 197), 261: (69, 261), 264: (69, 264)}
    for at, row in zip(lists, found["checkpoints"], strict=True):
        if at in wanted:
            assert same(row, walked(p.span(*wanted[at]), layout=layout)["final_states"][0]), at
        else:
            assert (row == 7.0).all(), at


@needs_emulator
@pytest.mark.parametrize(("copy", "K", "fetchers"), [(16, 48, 1), (8, 32, 2), (4, 96, 1)])
def test_operands_may_be_slices(copy, K, fetchers):
    """They are parts of one tensor, as a convolution leaves them."""
    p = prompt(70, 7, HK=1, HV=2, K=K, V=16)
    wanted, offset = walked(p), copy // 2
    parts = [t.flatten(1) for t in (p.q, p.k, p.v)]
    wide = torch.cat([torch.full_like(parts[0], NAN)[:, :offset], *parts, torch.full_like(parts[0], NAN)[:, : 8 - offset % 8]], 1)
    q, k, v = wide[:, offset : offset + 2 * K + 32].split([K, K, 32], 1)
    given = {"q": q.unflatten(1, (1, K)), "k": k.unflatten(1, (1, K)), "v": v.unflatten(1, (2, 16))}
    given["out"] = torch.full((77, 2, 16 + offset), NAN, dtype=BF16)[..., :16]
    found = walked(p, given=given, copy=copy, fetchers=fetchers)
    assert same(found["out"], wanted["out"]) and same(found["final_states"], wanted["final_states"])


@needs_emulator
def test_boundaries_that_make_no_sense_are_sequences_without_tokens():
    p = prompt(20)
    starts = torch.tensor([5, 3, 21, -4, 2])
    given = {"cu_seqlens": starts, "final_states": torch.full((4, 1, 32, 32), 7.0)}
    found = walked(replace(p, lengths=(5, 5, 5, 5)), given=given)
    assert (found["out"] == 7.0).all() and not found["final_states"].any()


# Choices and texts.

SPEC = ChainSpec(head_k=128, head_v=128, initial=True, final=True, cu_seqlens=Index.I32, tile=32)  # per lane, the code of 64 rows
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "pool": {"initial": False, "final": False, "pool": True, "started": True, "index": Index.I64, "checkpoints": Index.I64},
    "kv": {"layout": Layout.KV, "state": DType.BF16, "x": DType.F16, "copy": 4},
    "k256": {"head_k": 256, "tile": 16, "stages": 1, "checkpoints": Index.I32},
    "k144": {"head_k": 144, "tile": 16, "stages": 1},
}


@pytest.mark.parametrize("where", few((f"{shape} {arch}" for shape in SHAPES for arch in ("sm_80", "sm_90a", "sm_120")), 1))
def test_no_variant_spills(where):
    shape, arch = where.split()
    spec, arch = replace(SPEC, **SHAPES[shape]), Arch.parse(arch)
    resources = compiled(spec, arch).resources
    assert not resources.spills and not resources.stack, f"{spec}: {resources}"


def test_the_wait_precedes_every_access():
    """Except accesses to tensors that the upstream kernel only reads: it has itself waited before this one starts."""
    text = render(replace(SPEC, pdl=Pdl.TRIGGER_TOP), SM90)
    body = text[text.index('extern "C"') :]
    wait = body.index("wait_for_upstream();")
    assert not [word for word in ("load(", "load_u8(", "ask_for", "copy_tokens<", "store_") if word in body[:wait]]
    assert "__restrict__" not in body and body.count("wait_for_upstream();") == 1
    early = replace(SPEC, pdl=Pdl.TRIGGER_LOADED)
    assert early.early_operands() == ["q", "k", "v", "cu_seqlens", "initial_states"] and not SPEC.early_operands()


EDITS = {
    "no wait for copies": ("wait_copies<kStages - 2>();", "", "has not waited for the copy"),
    "a meeting too few": ("meet(1, kThreads);\n    walk(n);", "walk(n);", "shared memory|waits at barrier 1"),
    "each role by itself": ("meet(1, kThreads);\n    walk(n);", "meet(2, 32 * kWalkers);\n    walk(n);", "shared memory|waits at barrier"),
    "asked for too early": ("ask_for_tokens(n + kStages - 1);", "ask_for_tokens(n + kStages);", "shared memory|copy"),
    "one stage for two chunks": ("const u32 at = n % kStages * kStageWords, rows", "const u32 at = 0, rows", "shared memory|copy"),
    "another warp's v": ("2 * warp + lane / 8 % 2", "2 * (warp ^ 1) + lane / 8 % 2", "shared memory|off"),
    "o before v is read": ("c * (16 * kVWords));\n      __syncwarp();", "c * (16 * kVWords));", "shared memory"),
    "o before it is there": ("    }\n    __syncwarp();\n  };\n  const auto send", "    }\n  };\n  const auto send", "shared memory"),
    "no upstream": ("    wait_for_upstream();\n", "", "before the wait for the upstream kernel"),
    "walkers need not wait": ("\n  wait_for_upstream();", "", "before the wait for the upstream kernel"),
    "no decay": ("const float decay = __uint_as_float(u32(tiles[at + kAtFactors + 3 * kChunk]));", "const float decay = 1.f;", "off"),
    "another panel": ("512 * c - 64 * c * (c - 1)", "512 * c", "off|shared memory"),
    "the image of another head": ("* heads + head) * kImage", "* heads) * kImage", "off"),
    "the chunk before": ("((first_chunk + n) *", "((first_chunk + (n ? n - 1 : 0)) *", "off"),
    "tokens past the end": (
        "there ? source : from, there ? kCopy : 0",
        "source, kCopy",
        "off|outside",
    ),
    "a chunk too few": ("(length + kChunk - 1) / kChunk", "length / kChunk", "off"),
    "the last rows": ("send(at, u64(n) * kChunk, length - n * kChunk);", "send(at, u64(n) * kChunk, kChunk);", "also writes"),
}


@costly(1)
@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_kernels_are_found(edit):
    old, new, words = EDITS[edit]

    def change(source: str) -> str:
        assert old in source, "the edit no longer applies"
        return source.replace(old, new)

    p = prompt(70, 150, 70, V=32, HV=2)
    try:
        found = walked(poisoned(p, 70, 220), tile=32, stages=3, change=change)
        out, states = recurrence(p)
        wrong = error(found["out"][70:220], out[70:220]), error(found["final_states"][1], states[1])
        assert max(wrong) <= cases.BOUND, "off"
    except EmulatorError as e:
        assert any(word in str(e) for word in words.split("|")), str(e)
    except AssertionError as e:
        assert "off" in words and str(e).startswith("off"), str(e)
    else:
        pytest.fail("nothing was found")
