"""chunk_scan on a card: whether many launches in graphs have the bits of one by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from scan_cases import NAN, Scan, bits


def others_in_graphs(scan: Scan, call: Mapping[str, Any], launches: int = 10_000) -> int:
    """How many numbers of so many launches are others than those of one by itself. A graph has 100 of them. Of these ten at a time follow
    each other with nothing between, to outputs of their own, poisoned before."""
    wanted = scan(**call, return_final_states=True)
    outputs = [torch.empty(10, *t.shape, dtype=t.dtype, device=t.device) for t in wanted]
    others = torch.zeros((), dtype=torch.int64, device=wanted[0].device)

    def ten() -> None:
        for t in outputs:
            t.fill_(NAN)
        for out, last in zip(*outputs, strict=True):
            scan(**call, out=out, final_states_out=last, return_final_states=True)
        for t, one in zip(outputs, wanted, strict=True):
            others.add_((bits(t) != bits(one)).sum())

    ten()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            ten()
    for _ in range(launches // 100):
        graph.replay()
    return int(others)
