"""Prompts on a card: whether many launches, by themselves and in graphs, have the bits of one; and laws of their launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from bits import bits, same
from sequence_laws import NAN, Run, Sequences, starts_of
from torch import Tensor


def are_alike(launch: Callable[[], tuple[Tensor, Tensor]], launches: int) -> bool:
    """Whether the outputs and states of all launches have the same bits. Each launch waits for the one before."""
    out, state = launch()
    wanted = bits(out).clone(), bits(state).clone()
    return all(torch.equal(bits(t), w) for _ in range(launches) for t, w in zip(launch(), wanted, strict=True))


def others_in_graphs(function: Callable[..., Any], call: Mapping[str, Any], launches: int = 10_000) -> int:
    """How many numbers of `launches` launches differ from a single launch. A graph has 100 launches. Ten launches at a time follow each
    other directly; each writes its own output, poisoned before."""
    wanted = function(**call, return_final_states=True)
    others = torch.zeros((), dtype=torch.int64, device=wanted[0].device)
    ten = ten_behind_each_other(function, call, wanted, others)
    ten()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            ten()
    for _ in range(launches // 100):
        graph.replay()
    return int(others)


def ten_behind_each_other(
    function: Callable[..., Any], call: Mapping[str, Any], wanted: tuple[Tensor, Tensor], others: Tensor
) -> Callable[[], None]:
    """A function that runs ten calls and adds to `others` the count of numbers that differ from `wanted`."""
    outputs = [torch.empty(10, *t.shape, dtype=t.dtype, device=t.device) for t in wanted]

    def run() -> None:
        for t in outputs:
            t.fill_(NAN)
        for out, last in zip(*outputs, strict=True):
            function(**call, out=out, final_states_out=last, return_final_states=True)
        for t, one in zip(outputs, wanted, strict=True):
            others.add_((bits(t) != bits(one)).sum())

    return run


# Laws of launches of prompts.


def programmatic_launches_change_no_bit(run: Run, case: Sequences, tokens: int) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs sm_90")
    call, run = case.made(2, tokens), case.of(run)
    assert same(run(**call, pdl=True), run(**call, pdl=False))


def a_graph_follows_its_lengths(run: Run, case: Sequences) -> None:
    """A graph serves other lengths of its sequences, in many consecutive replays."""
    call, run = case.made(300), case.of(run)
    call |= {"cu_seqlens": starts_of((100, 200), "cuda"), "out": torch.empty_like(call[case.rows])}
    state = torch.zeros(2, *case.state, device="cuda")
    wanted = run(**call, state=state).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(**call, state=state)
    for lengths in ((100, 200), (64, 236), (0, 300)):
        call["out"].zero_()
        call["cu_seqlens"].copy_(starts_of(lengths, "cuda"))
        for _ in range(20):
            graph.replay()
        found, last = call["out"].clone(), state.clone()
        again = torch.full_like(state, NAN)
        assert same(found, run(**call | {"out": torch.empty_like(found)}, state=again))
        served = [i for i, n in enumerate(lengths) if n]
        assert same(last[served], again[served])
        assert lengths != (100, 200) or same(found, wanted)


def far_tokens(t: Tensor) -> Tensor:
    """The same 70 tokens, of which the last is 2^31 elements from the first."""
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of the card's memory")
    apart = 2**31 // 69 // 8 * 8 + 8
    strides = (apart, *torch.empty(t.shape[1:], device="meta").stride())
    return torch.empty(70 * apart, dtype=t.dtype, device="cuda").as_strided(t.shape, strides).copy_(t)


def offsets_may_exceed_32_bits(run: Run, case: Sequences) -> None:
    """Offsets of tokens, and of a slot."""
    call, run = case.made(70) | {"cu_seqlens": starts_of((70,), "cuda")}, case.of(run)
    slot = 2**31 // math.prod(case.state) + 1
    far = far_tokens(call[case.rows])
    pool = torch.empty(slot + 1, *case.state, dtype=torch.bfloat16, device="cuda")
    wanted, state = run(**call, return_final_states=True)
    found = run(**call | {case.rows: far}, state=pool, state_indices=torch.tensor([slot], device="cuda"))
    assert same(found, wanted) and same(pool[slot], state[0].to(pool.dtype))
