"""chunk_scan by warpgroups with persistent blocks, in the emulator: the bits of other blocks, and wrong kernels that must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import attention_cases
import pytest
import scan_cases as laws
import torch
from compiled import compiled
from emulated_calls import needs_emulator
from kernel_laws import edited, found
from scan_cases import BF16, F32, SM90, Sizes, emulated, make, same, starts_of
from selection import costly, few
from test_chunk_scan_warpgroups import SMALL, SPECS, variant

import ssmgen
from ssmgen import emulator
from ssmgen.emulator.check import check
from ssmgen.families.chunk_scan.spec import ScanProblem, ScanSpec
from ssmgen.launch import runtime

pytestmark = needs_emulator

LENGTHS = (65, 0, 3, 130, 64, 1, 200)
HEADS = replace(SMALL, heads=2)  # so that blocks, which are three, begin with another head in each round


def staying(stages: int = 2) -> Callable[[ScanProblem], ScanSpec]:
    def of(problem: ScanProblem) -> ScanSpec:
        spec = replace(variant(1, stages)(problem), stays=True)
        assert not spec.violations(SM90)
        return spec

    return of


def by(stages: int = 2, **more: Any) -> laws.Scan:
    return partial(emulated, spec=staying(stages), **more)


def has_the_bits_of_others(call: dict[str, Any], stages: int = 2, function: Any = None) -> None:
    found = emulated(spec=staying(stages), function=function, **call)
    wanted = emulated(spec=variant(1, stages), function=function, **call)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


@costly(1)
@pytest.mark.parametrize(("tokens", "stages"), [(0, 2), (130, 2), (200, 4)])  # chunks: none, an odd number, an even one
def test_batches(tokens, stages):
    """Each block has three or four heads of sequences."""
    call = make(HEADS, 5, tokens, z=True)
    states = torch.randn(5, 2, 64, 64, generator=torch.Generator().manual_seed(1))
    has_the_bits_of_others(call | {"initial_states": states, "return_final_states": True}, stages)


@costly(1)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS * 5], ids=["7", "35"])  # which are looked at 32 at once
def test_packed_sequences(lengths):
    call = make(HEADS if len(lengths) < 32 else SMALL, sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cpu")}
    has_the_bits_of_others(call | {"return_final_states": True})


@pytest.mark.parametrize("state", few([BF16, F32]))
def test_a_pool_is_touched_where_it_should_be(state):
    laws.a_pool_is_touched_where_it_should_be(by(), HEADS, state)


def test_states_of_a_pool_may_begin_elsewhere():
    laws.states_of_a_pool_may_begin_elsewhere(by(), HEADS, F32, torch.int32)


def test_slots_of_a_batch():
    call = make(HEADS, 4, 70) | {"state_indices": torch.tensor([3, 0, -1, 5])}
    pools = [torch.randn(6, 2, 64, 64, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    more = {"has_initial_state": torch.tensor([True, False, True, True])}
    outs = [emulated(spec=make_spec, **call, **more, state=pool) for make_spec, pool in zip((staying(), variant()), pools, strict=True)]
    assert same(*outs) and same(*pools) and not outs[0][2].any()


def test_rows_and_groups():
    has_the_bits_of_others(make(Sizes(heads=4, groups=2, headdim=128, d_state=128), 2, 70) | {"return_final_states": True})


@costly(1)
@pytest.mark.parametrize("ids", [False, True])
def test_checkpoints(ids):
    call = make(HEADS, sum(LENGTHS), decay=0.1)
    more = {"checkpoint_positions": torch.tensor([1, 64, 65, 66, 130, 198, 200, 400, 463, 464]), "return_checkpoints": True}
    if ids:
        call = {n: t[None] if n in ("x", "dt", "B", "C") else t for n, t in call.items()}
        more["seq_idx"] = (torch.arange(sum(LENGTHS)) // 90).int()[None]
    else:
        more["cu_seqlens"] = starts_of(LENGTHS, "cpu")
    more["checkpoints_out"] = torch.zeros(10, 2, 64, 64)
    has_the_bits_of_others(call | more | {"return_final_states": True})


@pytest.mark.parametrize("form", few(attention_cases.FORMS))
def test_linear_attention(form):
    name, call = attention_cases.make(form, HEADS, 3, 70)
    has_the_bits_of_others(call | {"return_final_states": True}, function=getattr(ssmgen, name))


@costly(1)
@pytest.mark.parametrize("spec", few([replace(s, stays=True) for s in SPECS if s.parts == 1]), ids=lambda s: s.stem)
def test_variants(spec):
    assert check(spec, SM90, 4).passed
    resources = compiled(spec, SM90).resources
    assert not resources.spills and not resources.stack


def test_longest_first():
    """The block with the longest sequence of a round gets the shortest of the next. No block has more than a share plus the longest
    sequence."""
    lengths = torch.tensor([700, 20, 640, 90, 300, 130, 64, 1, 500, 256])
    call = make(replace(SMALL, heads=1), int(lengths.sum())) | {"cu_seqlens": starts_of(lengths.tolist(), "cpu")}
    # The block that worked on a sequence writes its number to the place of the last state.
    mark = "const Item item = item_of(turn);\n      if (item.length == kNone) break;\n      const u32 length"
    tell = "{ float S[kState / 2];\n for (auto& v : S) v = blockIdx.x;\n"
    seen: list[str] = []

    def change(text: str) -> str:
        seen.append(text)
        stores = text[text.index("State* const to = final_states") :]
        stores = stores[: stores.index("arrive_together(taken")]
        return text.replace(stores, tell + stores + "}\n")

    _, states = by(change=change)(**call, return_final_states=True)
    assert mark in seen[0]
    owners = states[:, 0, 0, 0].int().tolist()
    assert all((states[i] == owner).all() for i, owner in enumerate(owners)) and set(owners) == {0, 1, 2}
    loads = [sum(int(n) for n, owner in zip(lengths, owners, strict=True) if owner == block) for block in range(emulator.SMS)]
    assert max(loads) <= sum(loads) / emulator.SMS + int(lengths.max())
    assert owners[0] == 0 and owners[2] == 1 and owners[8] == 2  # the three longest


def test_as_many_blocks_as_sms(monkeypatch):
    monkeypatch.setattr(runtime, "device_sms", lambda device: 132)
    plain = variant()(ScanProblem(headdim=64, d_state=64))

    monkeypatch.setattr(runtime, "Arguments", lambda *given: None)

    def grid(spec: ScanSpec, blocks: int) -> int:
        kernel: Any = SimpleNamespace(spec=spec, allow_shared=lambda device: None)
        return runtime.Launch(kernel, 0, blocks, {}).grid

    assert [grid(replace(plain, stays=stays), n) for stays in (False, True) for n in (100, 2048)] == [100, 2048, 100, 132]


# Mistakes. (text to replace, replacement, words of the finding; off: a result is wrong)
EDITS = {
    "listed before there is room": ("if (turn >= kListed) barrier_wait(taken", "if (turn >= 99) barrier_wait(taken", "of listed[0]"),
    "taken too early": ("barrier_init(taken, i, kThreads / 32 - 1)", "barrier_init(taken, i, 4)", "of taken[0]"),
    "not waited for": ("barrier_wait(listed, turn % kListed, turn / kListed % 2);", "", "list["),
    "steps counted anew": ("return i - done;", "return i;", "outside of every operand"),
    "y of the item before, to the item's own place": ("X* to = to_rows;", "X* to = out;", "writes"),
    "y of the last item, not written": (
        "if (made > 0) {\n      barrier_wait(consumed",
        "if (made > 99) {\n      barrier_wait(consumed",
        "off",
    ),
    "M in the other warpgroup's buffers": ("done + (done + buffer) % 2", "done + buffer", "of consumed["),
}


@pytest.mark.parametrize("edit", few(EDITS))
def test_broken_kernels_are_found(edit):
    old, new, words = EDITS[edit]
    lengths = (65, 3, 70, 64, 1) + (1, 2) * 12  # more than are known at once
    call = make(SMALL, sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cpu"), "return_final_states": True}
    wanted = emulated(spec=variant(), **call)
    with found(words):
        poisoned = torch.full_like(wanted[0], torch.nan)  # new memory may hold an earlier result
        made = by(change=edited(old, new))(**call, out=poisoned)
        assert all(same(a, b) for a, b in zip(made, wanted, strict=True))
