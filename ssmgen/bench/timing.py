"""How times are taken.

Device time: one CUDA graph holds a launch per input set; the sets rotate over several times the L2 cache, so the state is cold. A
replay is queued ahead of the timed one, so that no launch gap of the host is in the time. Contenders are replayed in turn, and each
gets the median of its rounds, divided by the launches in its graph. Gaps between launches inside the graph are included for all.

The SM clock (MHz) is read when the last replay of a case has ended.

Host time: the eager Python call, wall clock, with a synchronisation every 100 calls.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")
Launch = Callable[[int], object]  # of the i-th input set


def capture(launch: Launch, sets: int, least: int = 24) -> tuple[torch.cuda.CUDAGraph, int]:
    """(graph, launches in it): every set once, and all of them again until there are `least` launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(sets, 3)):
            launch(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    repeats = -(-least // sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for i in range(sets):
                launch(i)
    return graph, repeats * sets


def device_us(contenders: Mapping[Key, Launch], sets: int, rounds: int = 7, captures: int = 2, least: int = 24) -> dict[Key, float]:
    """Microseconds per launch of each contender: the least, over `captures` graphs of at least `least` launches, of the median of `rounds`
    replays."""
    best: dict[Key, float] = {}
    for _ in range(captures):
        graphs = {name: capture(launch, sets, least) for name, launch in contenders.items()}
        times: dict[Key, list[float]] = {name: [] for name in graphs}
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(rounds):
            for name, (graph, launches) in graphs.items():
                graph.replay()
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / launches)
        for name, samples in times.items():
            best[name] = min(best.get(name, float("inf")), statistics.median(samples))
        del graphs
    return best


def host_us(call: Callable[[], object], blocks: int = 40, calls: int = 100) -> float:
    """Median wall-clock microseconds of one eager call."""
    for _ in range(20):
        call()
    samples = []
    for _ in range(blocks):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter_ns() - start) / 1e3 / calls)
    torch.cuda.synchronize()
    return statistics.median(samples)


def sm_mhz() -> int | None:
    """The current device's SM clock as NVML reads it, in MHz; None where it cannot: without these bindings, or on a part of a card.

    A card near its power limit lowers it by up to a fifth within 0.1 s. Read directly after replays, it is their last clock.
    """
    with contextlib.suppress(Exception):  # whatever a driver without NVML, or torch without a device, raises
        from cuda.bindings import nvml

        return int(nvml.device_get_clock_info(_handle(torch.cuda.current_device()), nvml.ClockType.SM))
    return None


@functools.cache
def _handle(device: int) -> int:
    from cuda.bindings import nvml

    nvml.init_v2()
    return int(nvml.device_get_handle_by_uuid(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))


def ceilings_tbs() -> dict[str, float]:
    """TB/s, read plus written, of torch's multiplication out of place and in place, on buffers of 4 GiB, far larger than the cache.

    Not of `copy_`: a graph makes that a memcpy node, which reaches 2.8 TB/s where kernels reach 4.2.
    """
    n = 2**32
    a, b = torch.randn(n // 4, device="cuda"), torch.empty(n // 4, device="cuda")
    us = device_us({"out_of_place": lambda i: torch.mul(a, 1.0, out=b), "in_place": lambda i: a.mul_(1.0)}, 1, captures=1)
    return {name: 2 * n / t / 1e6 for name, t in us.items()}
