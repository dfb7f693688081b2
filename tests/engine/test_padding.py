"""Padded rows whose output stays unchanged, by the reference and by the emulated kernels; and a slot that no sequence owns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_calls import run_as_emulated
from torch import Tensor

import ssmgen
from ssmgen import emulator
from ssmgen.compat import flashinfer
from ssmgen.errors import ArgumentError
from ssmgen.spec.kernel import Arch

SM90 = Arch.parse("sm_90a")
SLOTS, HEADS, K, V, KEPT = 6, 2, 32, 16, 9.0
SLOT = torch.tensor([4, 0, -1, 2, SLOTS]).int()  # the first and fourth rows have a slot; so has the second, unless slot 0 is null
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["reference", "emulator"])
def run(request, monkeypatch):
    """Whether a call on the CPU runs the reference or its kernel's text."""
    if request.param == "reference":
        return
    if not emulator.available():
        pytest.skip("needs g++")
    run_as_emulated(monkeypatch)


def delta(*tokens: int, ragged: bool = False, **more: Any) -> dict[str, Any]:
    """A gated delta rule's call on five sequences."""
    g, lead = torch.Generator().manual_seed(0), (7,) if ragged else (5, *tokens)
    call: dict[str, Any] = {n: torch.randn(*lead, HEADS, V if n == "v" else K, generator=g) for n in ("q", "k", "v")}
    call |= {"g": -torch.rand(*lead, HEADS, generator=g), "beta": torch.rand(*lead, HEADS, generator=g)}
    call |= {"state": torch.randn(SLOTS, HEADS, V, K, generator=g), "state_indices": SLOT, "use_qk_l2norm": True, **more}
    if call.get("state_layout") == "kv":
        call["state"] = call["state"].mT.contiguous()
    return call | ({"cu_seqlens": torch.tensor([0, 2, 3, 5, 6, 7])} if ragged else {}) | {"out": torch.full((*lead, HEADS, V), KEPT)}


def mamba(*tokens: int, ragged: bool = False, **more: Any) -> dict[str, Any]:
    g, lead = torch.Generator().manual_seed(0), (7,) if ragged else (5, *tokens)
    call: dict[str, Any] = {"x": torch.randn(*lead, HEADS, V, generator=g), "dt": torch.rand(*lead, HEADS, generator=g), **more}
    call |= {n: torch.randn(*lead, 1, K, generator=g) for n in ("B", "C")} | {"A": -torch.rand(HEADS, generator=g)}
    call |= {"state": torch.randn(SLOTS, HEADS, V, K, generator=g), "state_indices": SLOT}
    return call | ({"cu_seqlens": torch.tensor([0, 2, 3, 5, 6, 7])} if ragged else {}) | {"out": torch.full((*lead, HEADS, V), KEPT)}


def replay(**more: Any) -> dict[str, Any]:
    call = mamba(3) | {n: torch.zeros(SLOTS, 8, *of) for n, of in (("old_x", (HEADS, V)), ("old_B", (1, K)))}
    whole = {n: torch.zeros(SLOTS).int() for n in ("ring_start", "prev_num_accepted_tokens")}
    return call | whole | {"old_dt": torch.zeros(SLOTS, HEADS, 8), **more}


CALLS = {
    "gdn": (ssmgen.gated_delta_rule, delta),
    "gdn-kv": (ssmgen.gated_delta_rule, lambda **how: delta(state_layout="kv", **how)),
    "gdn-several": (ssmgen.gated_delta_rule, lambda **how: delta(3, **how)),
    "gdn-packed": (ssmgen.gated_delta_rule, lambda **how: delta(ragged=True, **how)),
    "mamba": (ssmgen.selective_state_update, mamba),
    "mamba-several": (ssmgen.selective_state_update, lambda **how: mamba(3, **how)),
    "mamba-packed": (ssmgen.selective_state_update, lambda **how: mamba(ragged=True, **how)),
    "replay": (ssmgen.checkpoint_selective_state_update, replay),
}


def padded(call: dict[str, Any], slots: set[int]) -> Tensor:
    """Which rows of out no sequence is there of."""
    there = torch.tensor([int(s) in slots for s in SLOT])
    return ~(there.repeat_interleave(call["cu_seqlens"].diff()) if "cu_seqlens" in call else there)


@pytest.mark.parametrize("null", [-1, 0])
@pytest.mark.parametrize("name", CALLS)
def test_the_output_of_padded_rows_stays(name, null, run):
    """All other results equal, bit for bit, the results with zeroed rows. Slot 0 belongs to no sequence if pad_slot_id says so."""
    function, make = CALLS[name]
    usual, left = make(pad_slot_id=null), make(pad_slot_id=null)
    function(**usual)
    function(**left, zero_padding=False)
    rows = padded(usual, {2, 4} | ({0} if null else set()))
    assert rows.any() and not usual["out"][rows].any() and left["out"][rows].eq(KEPT).all()
    assert torch.equal(usual["out"][~rows], left["out"][~rows]) and usual["out"][~rows].ne(KEPT).all()
    assert torch.equal(usual["state"], left["state"])


@pytest.mark.parametrize("name", CALLS)
def test_there_must_be_an_output(name):
    function, make = CALLS[name]
    call = make() | {"out": None}
    before = call["state"].clone()
    with pytest.raises(ArgumentError, match="zero_padding is False and out is None; expected out: it keeps its rows that are padding"):
        function(**call, zero_padding=False)
    assert torch.equal(call["state"], before)


@pytest.mark.parametrize("each", [False, True], ids=["last", "each"])
def test_flashinfers_null_slot(each):
    """Whose state is in slot 0 is padding, and nothing is written there; without null_slot it is a sequence like others."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 2, HEADS, d, generator=g) for d in (K, K, V))
    a, b = (torch.randn(5, 2, HEADS, generator=g) for _ in range(2))
    pool = torch.randn(SLOTS, HEADS, V, K, generator=g)
    where = {"output_state_indices": torch.tensor([3, 5, 0, 0, 1]).int()}  # of the sequence in slot 2 in slot 0
    where |= {"ssm_state_indices": torch.tensor([[1, 3], [5, 5], [0, 0], [5, 0], [0, 0]]).int()} if each else {}
    outs, pools = [], []
    for more in ({}, {"null_slot": 0, "zero_padding": False}):
        outs.append(torch.full_like(v, KEPT))
        pools.append(pool.clone())
        flashinfer.gated_delta_rule_mtp(
            q, k, v, pools[-1], SLOT, torch.zeros(HEADS), a, torch.zeros(HEADS), b, output=outs[-1], disable_state_update=False,
            **where, **more,
        )  # fmt: skip
    assert torch.equal(outs[0][[0, 3]], outs[1][[0, 3]]) and outs[1][[1, 2, 4]].eq(KEPT).all() and not outs[0][[2, 4]].any()
    assert torch.equal(pools[1][0], pool[0]) and not torch.equal(pools[0][0], pool[0]) and torch.equal(pools[0][3], pools[1][3])
