"""The replay kernels on a CPU: emulated ones against float64, variants bit for bit, wrong ones found; text and machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernel_laws as laws
import pytest
import torch
from bits import same
from emulated_calls import SM80, SM90, emulate, needs_emulator
from replay_cases import BF16, F16, RAGGED, RING, STEP, Call, assert_matches, expected, make
from selection import costly

from ssmgen.compile.render import render, uses_pdl
from ssmgen.emulator import EmulatorError, run_source
from ssmgen.emulator import check as checking
from ssmgen.emulator.check import Outcome, check
from ssmgen.errors import SsmgenError
from ssmgen.families.replay_selective_state_update.spec import History, Part, ReplaySpec
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Narrow, Pdl
from ssmgen.spec.variants import spec_of

F32, BF = DType.F32, DType.BF16
SMALL = ReplaySpec(d_state=32, headdim=16, nheads=2, ngroups=1, warps=1, index=Index.I32, out=F32, state=F32)
BY_GROUP = replace(SMALL, headdim=32, warps=2, by_group=True, group_heads=2, out=BF)
EARLY = {"pdl": Pdl.TRIGGER_LOADED, "after_conv": True}
TWO = {"two_kernels": True, "part": Part.MAIN}
NOISE = {"philox_rounds": 10}
EDGES = {"pdl": Pdl.TRIGGER_LOADED, "ahead_pdl": Pdl.TRIGGER_LOADED}
RUNG = {"history": History.RING}
ALL_F16 = {"x": DType.F16, "out": DType.F16, "z": DType.F16, "dt": DType.F16, "D": DType.BF16}

# Emulated kernels: histories of all lengths followed by NaN, padding, histories in a ring.

MATRIX = {
    "step": SMALL,
    "step-helpers-tail-bf16-early": replace(
        SMALL, state=DType.BF16, headdim=40, warps=2, helpers=1, nheads=4, ngroups=2, D=F32, dt_bias=F32, **EARLY
    ),
    "step-two-kernels-z-ragged-advance": replace(SMALL, **TWO, z=DType.BF16, D=F32, cu_seqlens=Index.I32, advance=True, nheads=4, **EDGES),
    "step-two-kernels-after-conv": replace(SMALL, **TWO, state=DType.F16, window=24, tokens=16, after_conv=True, **EDGES),
    "step-f16-philox-elements": replace(
        SMALL, **ALL_F16, state=DType.F16, philox_rounds=10, state_loads=Loads.ELEMENT, operand_loads=Loads.ELEMENT, advance=True
    ),
    "step-f32-t16": replace(SMALL, x=F32, dt=F32, tokens=16, window=16, helpers=2, headdim=32, warps=2, dt_softplus=False),
    "step-bf16-t32": replace(SMALL, state=DType.BF16, tokens=32, window=32, index=Index.NONE, prefetch=1),
    "step-inputs-ahead": replace(
        SMALL, state=BF, nheads=4, ngroups=2, headdim=32, prefetch=3, prefetch_inputs=True, pdl=Pdl.TRIGGER_LOADED
    ),
    "step-inputs-ahead-t16": replace(SMALL, headdim=48, tokens=16, window=24, index=Index.I64, prefetch=1, prefetch_inputs=True),
    "ring": replace(SMALL, **RUNG, window=16, pdl=Pdl.WAIT),
    "ring-inputs-ahead": replace(SMALL, **RUNG, state=BF, window=16, nheads=4, ngroups=2, prefetch=2, prefetch_inputs=True),
    "ring-philox-advance-ragged": replace(
        SMALL, **RUNG, state=DType.BF16, philox_rounds=7, advance=True, cu_seqlens=Index.I64, index=Index.I64, helpers=1
    ),
    "ring-two-kernels-elements": replace(SMALL, **RUNG, **TWO, state=DType.F16, operand_loads=Loads.ELEMENT, dt_bias=DType.BF16),
    "by-group-early-advance": replace(
        BY_GROUP, state=BF, nheads=8, ngroups=2, group_heads=4, D=F32, z=DType.F16, prefetch=1, advance=True, **EARLY
    ),
    "by-group-ragged-t16-f16": replace(
        BY_GROUP, state=DType.F16, warps=4, headdim=64, nheads=3, group_heads=3, tokens=16, window=16, cu_seqlens=Index.I32, D=BF
    ),
    "by-group-f32": replace(BY_GROUP, group_heads=1, dt_bias=BF, prefetch=1, warps=3, headdim=48),
    "by-group-ring": replace(BY_GROUP, **RUNG, state=BF, warps=4, headdim=64, window=16, out=DType.F16, D=BF, pdl=Pdl.WAIT, prefetch=2),
    "by-group-ring-philox": replace(
        BY_GROUP, **RUNG, state=BF, warps=2, headdim=32, nheads=4, philox_rounds=7, advance=True, prefetch=1, zero_padding=False
    ),
    "materialize-step": replace(SMALL, materialize=True, pdl=Pdl.WAIT, headdim=24, warps=2),
    "materialize-ring-f16": replace(SMALL, **RUNG, materialize=True, state=DType.F16, x=DType.F16, window=24, state_loads=Loads.ELEMENT),
}


@costly(6)
@needs_emulator
@pytest.mark.parametrize("name", MATRIX)
def test_kernels_are_within_rounding_of_float64(name):
    outcome = check(MATRIX[name], SM90, batch=4)
    assert outcome.passed, outcome


@needs_emulator
@pytest.mark.parametrize(("terms", "bound"), [(2, 2e-5), (1, 5e-3)], ids=["bf16x2", "bf16"])
def test_fewer_terms_are_as_exact_as_they_say(terms, bound):
    """2^-16 and 2^-8 a product; and not as exact as three, which they are compared with."""
    outcome = check(replace(SMALL, state=F32, x=DType.F16, terms=terms), SM90, batch=6)
    exact = 2e-6
    assert exact < outcome.out_error <= bound and exact < outcome.state_error <= bound, outcome


def emulated(call: Call, spec: ReplaySpec) -> dict[str, torch.Tensor]:
    """The results of a variant, be it of one kernel or two."""
    emulate(call, spec)
    return call.results()


VARIED = {
    "step-bf16": replace(STEP, state=BF16, headdim=32, heads=2, groups=1, batch=4, z=BF16),
    "ring-philox": replace(RING, state=F16, headdim=32, heads=2, groups=1, arrivals=True, seeds="slots", **RAGGED),
}


@costly(1)
@needs_emulator
@pytest.mark.parametrize("name", VARIED)
def test_variants_are_bit_equal(name):
    """Warps, helpers, registers, prefetch, when dependents may start, the early form; one kernel and two."""
    how = {
        "plain": {"warps": 1},
        "wide": {"warps": 2, "prefetch": 264, "pdl": Pdl.WAIT},
        "helped": {"warps": 2, "helpers": 2, "min_blocks": 2, **EARLY},
        "two": {"warps": 1, **TWO},
    }
    results = {}
    for variant, choices in how.items():
        options = {k: v for k, v in choices.items() if k in ("two_kernels", "after_conv")}
        call = make(replace(VARIED[name], **options), "cpu")
        want = expected(call)
        spec = spec_of(ReplaySpec, call.problem, **{k: v for k, v in choices.items() if k not in options})
        assert not spec.violations(SM90)
        results[variant] = emulated(call, spec)
        assert_matches(call, want)
    first = results["plain"]
    for variant, found in results.items():
        assert not [n for n, t in found.items() if not same(t, first[n])], f"{variant} differs"


OWN = {
    "step-bf16-D-z": replace(STEP, state=BF16, out=BF16, headdim=64, heads=4, groups=2, batch=4, z=BF16),
    "ring-f16-philox": replace(RING, state=F16, out=F16, headdim=64, heads=2, groups=1, window=16, tokens=12, seeds="one"),
    "step-bf16-philox": replace(STEP, state=BF16, out=BF16, headdim=64, heads=2, groups=1, batch=4, seeds="slots"),
}
EXTREMES = torch.tensor([3.3895e38, -3.3895e38, 3.3762e38, float("inf"), float("-inf"), float("nan"), 1e-40, 0.0], dtype=BF16)


@needs_emulator
@pytest.mark.parametrize("name", OWN)
def test_blocks_of_several_heads_are_bit_equal(name):
    """Blocks of several heads have the bits of blocks of one head."""
    results = []
    by_group = {"warps": 4, "by_group": True, "group_heads": 2, "prefetch": 1}
    for how in ({"warps": 2}, by_group):
        call = make(OWN[name], "cpu")
        if call.kwargs["state"].dtype == BF16:
            call.kwargs["state"][..., ::5, :8] = EXTREMES
            call.kwargs["A"].zero_()  # they then stay, and additions to them have the size of their last place
            call.kwargs["old_dA_cumsum"].mul_(0)
            for operand in ("old_x", "old_B"):
                call.kwargs[operand].mul_(1e18)
        spec = spec_of(ReplaySpec, call.problem, **how)
        assert not spec.violations(SM90)
        results.append(emulated(call, spec))
    for found in results[1:]:
        assert not [n for n, t in found.items() if not same(t, results[0][n])]


@needs_emulator
def test_emulated_noise_has_the_bits_of_the_reference():
    """Checks the places of the noise, not only its size. The sum added to a 16-bit state, here of eight entries, is exact to 2^-17 each.
    That changes some roundings: measured, 0.02 of them. Another seed's noise would change 0.40."""
    card, host = make(VARIED["ring-philox"], "cpu"), make(VARIED["ring-philox"], "cpu")
    emulated(card, spec_of(ReplaySpec, card.problem, warps=1))
    host.run()
    before = make(VARIED["ring-philox"], "cpu").kwargs["state"]
    written = [s for s in range(len(before)) if not same(before[s], host.kwargs["state"][s])]
    assert written
    assert (card.kwargs["state"][written] != host.kwargs["state"][written]).float().mean() < 2.0**-4


# Errors that the emulator and the check find in wrong kernels: (spec, text to replace, replacement, words of the error or the wrong
# result).

LATE = replace(SMALL, pdl=Pdl.WAIT)
TAKEN = replace(SMALL, **EARLY)
MOVED = replace(SMALL, **RUNG, advance=True)
EDITS = {
    "no wait": (LATE, "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "x before the wait": (TAKEN, "  wait_for_upstream();\n  load_tokens();", "  load_tokens();\n  wait_for_upstream();", "before the wait"),
    "entries that do not count": (SMALL, "if (row < valid", "if (row < window", "out"),
    "a size that does not count": (SMALL, "lane < valid ? load(old_dt_here", "lane < window ? load(old_dt_here", "state"),
    "a later token seen": (SMALL, "j <= t", "j <= t + 1", "out"),
    "mix read too early": (
        replace(SMALL, headdim=32, warps=2),
        "  __syncthreads();  // `mix` is complete",
        "",
        "in shared memory, which nothing has written",
    ),
    "padding served": (SMALL, "if (u64(slot) >= u64(slots) || slot == pad_slot_id)", "if (false)", "outside"),
    "the buffer that is read": (SMALL, "(read_buffer ^ 1)", "read_buffer", "state"),
    "past the ring": (MOVED, "ring_first + k < ring ?", "true ?", "state"),
    "state written too early": (MOVED, "valid + tokens > window", "valid + tokens >= window", "state"),
    "by group: entries that do not count": (BY_GROUP, "k < valid ?", "k < window ?", "out"),
    "by group: the last head's rows": (BY_GROUP, "from += kHeadDim * kDState", "from += 0", "state"),
    "by group: a block too many": (replace(BY_GROUP, advance=True), "== kBlocks - 1", "== kBlocks", "state"),
    "by group: of what is shared nothing is there yet": (BY_GROUP, "__syncthreads();", "__syncwarp();", "with no barrier between"),
    "a block too many": (MOVED, "== kTiles * kHeads - 1", "== kTiles * kHeads", "state"),
}


def broken(monkeypatch: Any, spec: ReplaySpec, change: Callable[[str], str]) -> Outcome:
    """The check of a spec whose text was changed."""

    def run(part, arch, grid, packed, operands, writable):
        text, early = change(render(part, arch)), part.early_operands()
        run_source(text, part.name, grid, part.threads_per_block, packed, operands, writable, early=early)

    monkeypatch.setattr(checking, "run", run)
    return check(spec, SM90, batch=4)


@costly(3)
@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit, monkeypatch):
    spec, old, new, words = EDITS[edit]

    change = laws.edited(old, new)
    if words not in ("out", "state"):
        with pytest.raises(EmulatorError, match=words):
            broken(monkeypatch, spec, change)
        return
    outcome = broken(monkeypatch, spec, change)
    assert not outcome.passed and (outcome.out_error if words == "out" else outcome.state_error) > 1e-4, outcome


def test_the_first_of_two_kernels_is_checked_with_the_second():
    """Alone it has neither outputs nor a state."""
    first, second = replace(SMALL, **TWO).kernels
    with pytest.raises(SsmgenError, match=f"{first.name} is the first of two kernels, which are checked together"):
        check(first, SM90)
    assert second.part is Part.MAIN


# Specs and text.


@pytest.mark.parametrize(
    ("spec", "change", "words"),
    [
        pytest.param(
            SMALL,
            {"warps": 0},
            "warps is 0; expected 1 … 16",
        ),
        (SMALL, {"warps": 17}, "warps is 17; expected 1 … 16"),
        (SMALL, {"warps": 2}, "warps is 2, of 16 rows each; expected at most the 16 rows of a head"),
        (SMALL, {"part": Part.MAIN}, "part is main; expected fused unless two_kernels"),
        (SMALL, {"two_kernels": True}, "part is fused; expected fused unless two_kernels"),
        (SMALL, {"group_heads": 2}, "group_heads is 2; expected a divisor of the heads of a group"),
        (SMALL, {"helpers": 9}, "helpers is 9; expected 0 … 8"),
        (SMALL, {"ahead_pdl": Pdl.WAIT}, "ahead_pdl is wait; expected off, or part=main"),
        (SMALL, {"d_state": 256, "x": F32, "tokens": 32, "window": 32}, "bytes of shared memory; expected at most 49152"),
        (SMALL, {"prefetch": 264, "state_loads": Loads.ELEMENT}, "and the state is not loaded as whole, aligned tiles; expected 0"),
        (SMALL, {"headdim": 24, "warps": 1, "prefetch": 264}, "and the state is not loaded as whole, aligned tiles; expected 0"),
        (BY_GROUP, {"headdim": 48}, "by_group is yes with warps for 32 rows; expected headdim 48"),
        (BY_GROUP, {"group_heads": 4}, "group_heads is 4; expected a divisor of the heads of a group"),
        (BY_GROUP, {"window": 16}, "entries are 24; expected at most 8 for each of 2 warps with by_group"),
        (BY_GROUP, {"state": Narrow.I8}, "by_group is yes with scaled states; expected f32, f16 or bf16"),
        (BY_GROUP, {"prefetch": 264, "prefetch_inputs": True}, "prefetch_inputs is yes with by_group=yes; expected one of them"),
        (BY_GROUP, {"materialize": True}, "by_group is yes; expected part=fused and materialize=no"),
        (BY_GROUP, {"helpers": 1}, "with by_group=yes; expected 0"),
        (BY_GROUP, {"window": 24}, "tokens is 8, window 24; expected at most 16 with by_group"),
        (BY_GROUP, {"x": DType.F16}, "by_group is yes with x=f16; expected bf16"),
        (BY_GROUP, {"out": F32}, "by_group is yes with a 32-bit z or out; expected 16 bits"),
        (BY_GROUP, {"z": F32}, "by_group is yes with a 32-bit z or out; expected 16 bits"),
        (BY_GROUP, {"operand_loads": Loads.ELEMENT}, "by_group is yes with loads by elements; expected vectors"),
    ],
)
def test_violations_in_words(spec, change, words):
    laws.says_its_violation(spec, change, words)


def test_violations_of_architectures():
    assert not SMALL.violations(SM80) and "arch is sm_75; expected sm_80 or later for bf16 arithmetic" in SMALL.violations(
        Arch.parse("sm_75")
    )
    assert "arch is sm_80; expected sm_90 or later, or pdl=off" in replace(SMALL, pdl=Pdl.WAIT).violations(SM80)
    assert "arch is sm_80; expected sm_90 or later, or prefetch=0" in replace(SMALL, prefetch=264).violations(SM80)


TEXTS = [part for spec in MATRIX.values() for part in spec.kernels]


@pytest.mark.parametrize("pdl", Pdl, ids=lambda p: p.value)
@pytest.mark.parametrize("spec", TEXTS, ids=lambda s: s.name)
def test_the_wait_precedes_what_another_kernel_writes(spec, pdl):
    """All accesses except weights come after the wait. If the text allows early loads, only stores and the upstream kernel's outputs do."""
    spec = replace(spec, pdl=pdl)
    text = render(spec, SM90)
    body = text[text.index('extern "C"') :]
    assert uses_pdl(text) == (pdl is not Pdl.OFF) and "__restrict__" not in body and "__ldg" not in body
    if pdl is Pdl.OFF:
        assert "wait_for_upstream" not in text
        return
    wait = body.rindex("wait_for_upstream();")
    assert ("allow_dependents();" in body) == (pdl is not Pdl.WAIT)
    if pdl is not Pdl.WAIT:
        assert body.index("allow_dependents();") > wait
    if not spec.early:
        assert all(m.start() > wait for m in re.finditer(r"\bload\w*[(<]|\bstore\w*\(", body))
        return
    assert "can be read before this kernel's wait" in body or "lets this one start only after its own wait" in body
    assert set(spec.early_operands()).isdisjoint({"x", "B", "C", "mix", "sums", "out"})


@pytest.mark.parametrize("spec", TEXTS, ids=lambda s: s.name)
def test_layout_of_the_text(spec):
    laws.is_well_formed(spec)


def test_what_is_switched_off_is_not_in_the_text():
    text = render(replace(SMALL, index=Index.NONE, dt_softplus=False), SM90).split("#define DEVICE")[1]
    absent = ("softplus", "silu", "dt_bias", "pad_slot_id", "state_indices", "cu_seqlens", "philox", "arrivals", "helps", "ring_first")
    for word in (*absent, "griddepcontrol.wait", "prefetch", "sums +", "struct f16"):
        assert word not in text, word
