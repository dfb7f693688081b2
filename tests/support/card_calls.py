"""Kernels on a card: loading many of them, launching given variants, tensors with distant elements, and producers that write late."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from bits import all_same, bits, error, same
from torch import Tensor

from ssmgen.cache.entry import Entry
from ssmgen.compile import nvrtc
from ssmgen.compile.render import render
from ssmgen.launch import runtime
from ssmgen.spec.kernel import Arch, KernelSpec

needs_pdl = pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9", reason="needs sm_90")


def arch() -> Arch:
    return runtime.device_arch(torch.cuda.current_device())


def prepare(specs: Iterable[KernelSpec]) -> None:
    """Compiles and loads kernels in parallel. Failures are left to the calls that need the kernels."""
    device, parts = torch.cuda.current_device(), dict.fromkeys(part for spec in specs for part in spec.kernels)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        wait([pool.submit(runtime.load, part, device, "test") for part in parts])


def launch(
    spec: Any, family: Any, views: Mapping[str, Tensor], options: Any, operands: Mapping[str, Tensor], hasty: Collection[Any] = ()
) -> Callable[[], None]:
    """One given variant, independent of the registry's choice, ready to run. hasty: its kernels that must not wait."""
    device, launches, places = torch.cuda.current_device(), [], []
    names = [n for n in operands if any(n in part.operands() for part in spec.kernels)]  # a variant may have no use for a workspace
    for part in spec.kernels:
        kernel = without_wait(part) if part in hasty else runtime.load(part, device, "test")
        launches.append(runtime.Launch(kernel, device, family.grid_of(part, views), family.values_of(part, views, options)))
        places.append([names.index(n) for n in part.operands()])
    pointers = [operands[n].data_ptr() for n in names]
    return launches[0].at(pointers) if len(launches) == 1 else runtime.Chain(launches, places).at(pointers)


def without_wait(spec: Any) -> runtime.Kernel:
    """A kernel that does not wait for the upstream kernel, launched as one that does."""
    source = render(spec, arch())
    hasty = source.replace("  wait_for_upstream();", "  ")
    assert hasty != source
    done = nvrtc.compile_cubin(hasty, arch(), str(spec))
    kernel = runtime.Kernel(spec, arch(), Entry("", "", spec.name, str(arch()), "", (), done.resources, 0.0, hasty, done.cubin))
    assert kernel.pdl
    return kernel


def far(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Zeros whose elements are far from each other in memory."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert extent > 2**31
    return torch.zeros(extent, dtype=dtype, device="cuda").as_strided(shape, strides)


# A producer that writes late.

PRODUCER = r"""
extern "C" __global__ void produce(const unsigned short* from, unsigned short* to, int n) {
  asm volatile("griddepcontrol.launch_dependents;");  // the consumer may start now; what it reads comes much later
  for (int i = 0; i < 40; ++i) __nanosleep(1000);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""


def after_a_producer(written: Tensor, state: Tensor, out: Tensor, kept: Tensor, run: Callable[[], Any]) -> list[tuple[Tensor, Tensor]]:
    """(out, state) bits of `run()` launched directly after a kernel that triggers at once and fills `written`, which `run` reads, 40 us
    later. kept: the state before each run."""
    done = nvrtc.compile_cubin(PRODUCER, arch(), "the test's producer")
    producer = runtime.Kernel(None, arch(), Entry("", "", "produce", str(arch()), "", (), done.resources, 0.0, PRODUCER, done.cubin))
    assert not producer.pdl
    driver, results = runtime.driver(), []
    for seed in range(6):
        torch.manual_seed(seed)
        fresh = torch.randn(written.shape, device="cuda").to(written.dtype)
        written.fill_(float("nan"))
        state.copy_(kept)
        torch.cuda.synchronize()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ = 4, 1, 1, 256, 1, 1
        config.hStream = runtime.current_raw_stream(torch.cuda.current_device())
        values = (fresh.data_ptr(), written.data_ptr(), written.numel()), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        (code,) = driver.cuLaunchKernelEx(config, producer.handle, values, 0)
        assert not code
        run()
        torch.cuda.synchronize()
        results.append((bits(out).clone(), bits(state).clone()))
    return results


def pairs_equal(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return all(all_same(x, y) for x, y in zip(a, b, strict=True))


def waits_for_its_producer(
    run: Callable[[bool], Any], hasty: Callable[[], Any] | None, written: Tensor, state: Tensor, out: Tensor, kept: Tensor | None = None
) -> None:
    """The upstream kernel still fills `written` when this one starts. run: with programmatic dependent launch or without. hasty: the same
    kernels without a wait, which read too early; None to leave that out. kept: the state before each run, if it is not the present one."""
    kept = state.clone() if kept is None else kept

    def produced(launched: Callable[[], Any]) -> list[tuple[Tensor, Tensor]]:
        return after_a_producer(written, state, out, kept, launched)

    right = produced(lambda: run(False))
    assert pairs_equal(right, produced(lambda: run(True))) and out.isfinite().all()
    assert hasty is None or not pairs_equal(right, produced(hasty))


# Drop-ins on a card.


def on_card(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call's tensors there, with the strides they have; one tensor stays one."""
    moved: dict[int, Tensor] = {}
    for t in (t for t in call.values() if isinstance(t, Tensor)):
        moved.setdefault(id(t), torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t))
    return {n: moved[id(t)] if isinstance(t, Tensor) else t for n, t in call.items()}


def serves_as_on_the_host(
    function: Callable[..., Any], make: Callable[[], Mapping[str, Any]], results: Callable[[Any, Mapping[str, Any]], Iterable[Tensor]],
    bound: float,
) -> None:  # fmt: skip
    """A drop-in has the results of CPU tensors within `bound`, the same bits in a graph, and does not synchronise. results: all tensors
    that a call returns or writes."""
    here, there = make(), on_card(make())
    with torch.inference_mode():
        wanted = [t.clone() for t in results(function(**here), here)]
        function(**there)  # compiles
        there, again, captured = (on_card(make()) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = list(results(function(**there), there))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(found) == len(wanted)
        assert all(error(f, w.double()) <= bound for f, w in zip(found, wanted, strict=True))
        repeated = list(results(function(**again), again))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = function(**captured)
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(a, b) and same(a, c) for a, b, c in zip(found, repeated, results(got, captured), strict=True))
