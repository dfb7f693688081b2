"""checkpoint_selective_state_update with flush: the caller says how many entries count, and which states are written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernel_laws as laws
import pytest
import torch
from bits import same
from emulated_calls import SM90, needs_emulator
from selection import costly
from test_replay_kernels import SMALL, broken
from torch import Tensor

import ssmgen
from ssmgen.compile.render import render
from ssmgen.emulator import EmulatorError, run
from ssmgen.emulator.check import check
from ssmgen.errors import ArgumentError
from ssmgen.families.replay_selective_state_update.spec import BY_GROUP, History, ReplayProblem, candidates
from ssmgen.families.replay_selective_state_update.trial import replay
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import DType, Index, Loads, Narrow, Pdl

F32, BF, I32 = DType.F32, DType.BF16, torch.int32
CACHE = replace(SMALL, history=History.CACHE, window=16)
MATRIX = {
    "f32": replace(CACHE, pdl=Pdl.TRIGGER_LOADED),
    "f16-helpers-tail": replace(
        CACHE, state=DType.F16, headdim=40, warps=2, helpers=2, D=F32, dt_bias=F32, nheads=4, ngroups=2, pdl=Pdl.WAIT
    ),
    "noise": replace(CACHE, state=BF, philox_rounds=7, z=BF, prefetch=1),
    "elements": replace(
        CACHE, x=F32, z=F32, dt=F32, index=Index.NONE, operand_loads=Loads.ELEMENT, state_loads=Loads.ELEMENT, zero_padding=False
    ),
    "int8-w32": replace(CACHE, state=Narrow.I8, window=32, index=Index.I64, helpers=1, dt_softplus=False),
}  # fmt: skip


@costly(3)
@needs_emulator
@pytest.mark.parametrize("name", MATRIX)
def test_kernels_are_within_rounding_of_float64(name):
    """Sequences with and without flags, counts from none to all but one, and NaN in every entry that does not count."""
    outcome = check(MATRIX[name], SM90, batch=6)
    assert outcome.passed, outcome


@needs_emulator
def test_variants_are_bit_equal():
    """Warps, helpers, and when dependents may start."""
    results = []
    wide = replace(CACHE, headdim=32, state=DType.F16, D=F32)
    for how in ({"warps": 1}, {"warps": 2, "prefetch": 264, "pdl": Pdl.WAIT}, {"warps": 2, "helpers": 2, "pdl": Pdl.TRIGGER_LOADED}):
        spec = replace(wide, **how)
        made = replay(spec, 6, 0)
        values, grid = made.launch_of(spec)
        named = {name: made.named[name] for name in spec.operands()}
        run(spec, SM90, grid, Arguments(spec, values).at([t.data_ptr() for t in named.values()]), named, made.written)
        results.append([made.named[name] for name in made.written])
    assert all(same(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


EDITS = {
    "a token too many": (CACHE, "valid = held + (empties ? 1 : 0)", "valid = held + 1", "outside"),
    "no token": (CACHE, "valid = held + (empties ? 1 : 0)", "valid = held", "out"),
    "counted twice": (CACHE, "lane < tokens && !empties ? delta", "lane < tokens ? delta", "out"),
    "an entry that does not count": (CACHE, "if (row < held)", "if (row <= held)", "out"),
    "stored all the same": (CACHE, "if (row < tokens && !empties)", "if (row < tokens)", "state"),
    "the slot's flag": (CACHE, "load_u8(flush + batch)", "load_u8(flush + slot)", "outside"),
    "no wait": (replace(CACHE, pdl=Pdl.WAIT), "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
}


@costly(3)
@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit, monkeypatch):
    spec, old, new, words = EDITS[edit]
    if words not in ("out", "state"):
        with pytest.raises(EmulatorError, match=words):
            broken(monkeypatch, spec, laws.edited(old, new))
        return
    outcome = broken(monkeypatch, spec, laws.edited(old, new))
    assert not outcome.passed, outcome


@pytest.mark.parametrize("spec", MATRIX.values(), ids=MATRIX)
def test_layout_of_the_text(spec):
    laws.is_well_formed(spec)
    assert "ring" not in [p.name for p in spec.parameters()] and "flush" in spec.operands() and "ring_start" not in spec.operands()


def test_other_histories_know_nothing_of_it():
    for history in (History.STEP, History.RING):
        spec = replace(SMALL, history=history)
        assert "flush" not in spec.operands() and "empties ?" not in render(spec, SM90) and "u8" not in render(spec, SM90)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advance": True}, "history is cache with materialize, advance, after_conv, two_kernels or cu_seqlens; expected none of them"),
        ({"cu_seqlens": Index.I32}, "or cu_seqlens; expected none of them"),
        ({"tokens": 16}, "tokens is 16 with a cache; expected 8, room for one"),
        ({"prefetch": 1, "prefetch_inputs": True}, "history is cache with by_group or prefetch_inputs; expected neither of them"),
    ],
)
def test_violations_in_words(change, words):
    laws.says_its_violation(CACHE, change, words)


def test_no_choice_loops_over_heads():
    assert not any(history is History.CACHE for _, history, _ in BY_GROUP)
    problem = ReplayProblem(d_state=128, headdim=64, nheads=64, ngroups=8, history=History.CACHE, window=16, index=Index.I32)
    for batch in (1, 8, 64, 256):
        for _, spec, _ in candidates(problem, batch, SM90, True):
            assert spec is not None and not spec.violations(SM90)
            break


# The call, on CPU tensors.


def call(flush: Any = (True, False, True, False), **change: Any) -> dict[str, Any]:
    """Arguments of a call whose rows have 3, 0, 1 and 2 entries of 4."""
    g = torch.Generator().manual_seed(0)
    made = replay(replace(CACHE, index=Index.I32, D=F32), 4, 0).named
    given = {n: t for n, t in made.items() if n != "out"} | {"ring_start": None, "state_indices": torch.tensor([3, 0, 7, 5], dtype=I32)}
    for name in ("old_x", "old_B", "old_dt"):
        given[name] = torch.rand(given[name].shape, generator=g).to(given[name].dtype)
    given |= {"prev_num_accepted_tokens": torch.tensor([3, 0, 1, 2], dtype=I32), "flush": torch.tensor(flush), "dt_softplus": True}
    return given | change


def test_flagged_states_include_the_new_token():
    """A flagged sequence has the output of an unflagged one, and the state of the ring's kernel after the same entries and one more."""
    kept, written = call((False,) * 4), call((True,) * 4)
    want = ssmgen.checkpoint_selective_state_update(**kept)
    got = ssmgen.checkpoint_selective_state_update(**written)
    assert torch.allclose(got.float(), want.float(), rtol=1e-5, atol=1e-5)
    assert same(kept["state"], call()["state"]) and all(same(written[n], call()[n]) for n in ("old_x", "old_B", "old_dt"))
    names = ("state", "old_x", "old_B", "old_dt", "A")
    counts = torch.zeros(len(kept["state"]), dtype=I32)
    counts[kept["state_indices"].long()] = kept["prev_num_accepted_tokens"] + 1
    ring = {"ring_start": torch.zeros_like(counts), "prev_num_accepted_tokens": counts}
    after = ssmgen.materialize_selective_state(**{n: kept[n] for n in names}, **ring)
    rows = kept["state_indices"].long()
    assert torch.allclose(written["state"][rows], after[rows], rtol=1e-5, atol=1e-5)


def test_counts_out_of_range_are_none():
    outs = []
    for count in (0, -1, 16, 2**31 - 1):
        given = call(prev_num_accepted_tokens=torch.full((4,), count, dtype=I32))
        outs.append((ssmgen.checkpoint_selective_state_update(**given), given["state"]))
    assert all(same(o, outs[0][0]) and same(s, outs[0][1]) for o, s in outs[1:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"flush": torch.zeros(4)}, "flush is float32; expected bool"),
        ({"flush": torch.zeros(3, dtype=torch.bool)}, "flush is [3]; expected [batch] = [4]"),
        ({"prev_num_accepted_tokens": torch.zeros(12, dtype=I32)}, "prev_num_accepted_tokens is [12]; expected [batch] = [4]"),
        ({"ring_start": torch.zeros(12, dtype=I32)}, "ring_start is given with flush; expected one of them. Leave out ring_start."),
        ({"arrivals": torch.zeros(12, dtype=I32)}, "arrivals is given with flush; expected one of them. Leave out arrivals."),
        ({"max_tokens": 3}, "max_tokens is given with flush; expected one of them. Leave out max_tokens."),
        ({"two_kernels": True}, "two_kernels is given with flush; expected one of them. Leave out two_kernels."),
        ({n: lambda t: t.expand(-1, 2, *t.shape[2:]) for n in ("x", "dt", "B", "C")}, "x has 2 tokens; expected 1 with flush"),
        ({n: lambda t: t.repeat(1, 3, *[1] * (t.dim() - 2)) for n in ("old_x", "old_B")}, "the window has 48 entries; expected at most 32"),
    ],
)  # fmt: skip
def test_bad_input(change, words):
    given = call()
    given |= {n: c(given[n]) if callable(c) and not isinstance(c, Tensor) else c for n, c in change.items()}
    before = given["state"].clone()
    with pytest.raises(ArgumentError) as error:
        ssmgen.checkpoint_selective_state_update(**given)
    assert words in str(error.value) and same(given["state"], before)
