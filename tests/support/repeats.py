"""Prompts on a card: whether many launches, by themselves and in graphs, have the bits of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from bits import bits
from scan_cases import NAN
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
