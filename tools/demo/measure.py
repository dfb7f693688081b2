"""Measurements of decode steps for `python -m tools.demo`.

Milliseconds per token: wall-clock time of a loop of greedy decode steps after a short prompt, synchronised before and after the loop but
not inside it. The ways of decoding alternate, in the opposite order every other round; each gets the median of its rounds. There are four
ways
with eager steps: transformers with its own PyTorch functions, transformers with kernel packages if installed, patched, and fused
(patch(fuse=True), for families with such layers). They use the growing cache that generate() makes. A graph replays one captured step on
transformers' StaticCache; its first tokens equal eager steps on such a cache. generate() itself adds host time per token. accelerate is the
generate of ssmgen.accelerate(model), which replays such a graph of the fused model. Its time is per token after the first: the difference
between many tokens and one token, measured after the other ways; "× floor" is this time over the least one (tools/demo/floor.py). cuDNN
attention is off: it plans again for each length of the cache, some
20 ms, which would count for the way that reaches a length first.

Kernels: all kernels that torch.profiler sees in one step, without copies and fills by the driver.

Same tokens: tokens of generate() in f32 without TF32, patched and fused, compared with transformers' own functions. Batches of one and two
sequences, with the fewest layers that include one of each kind.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ssmgen import accelerate
from ssmgen.compat import hf

from . import DemoError
from .decode import PROMPT, Captured, Greedy, prompt
from .floor import floor_ms
from .packages import PACKAGES, bound, own_functions
from .presets import Preset

PLAIN, PATCHED, FUSED, GRAPH, FUSED_GRAPH = "transformers", "patched", "fused", "graph", "fused graph"
ACCELERATED = "accelerate"
WARM_STEPS, CHECKED = 3, 4
SPARE = 16  # steps of a static cache for everything that is not timed
FEWEST = 2  # layers of the model in f32


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    layers: int = 8
    tokens: int = 16
    rounds: int = 5
    prompts: tuple[int, ...] = ()  # lengths; without any, decode steps are measured
    by_kernel: bool = False  # the kernels of a prompt are listed by name
    longest: float = 3.0  # seconds of transformers' own pass over a prompt


class Way(NamedTuple):
    """A way to take the next step, and the context for it."""

    step: Callable[[], Any]
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A family at a batch size: milliseconds and kernels per token, by way of decoding.

    notes: why a number is missing, by way and unit, such as "graph ms"   floor_ms: the least time of a step
    """

    family: str
    like: str
    served: int  # layers with a function of ssmgen
    layers: int
    batch: int
    ms: Mapping[str, float]
    kernels: Mapping[str, int]
    same: int
    tokens: int  # the number compared for `same`
    notes: Mapping[str, str] = field(default_factory=dict)
    floor_ms: float | None = None

    def speedup(self, way: str) -> float | None:
        return self.ms[PLAIN] / self.ms[way] if way in self.ms else None

    def over_floor(self, way: str) -> float | None:
        return self.ms[way] / self.floor_ms if way in self.ms and self.floor_ms else None


@contextlib.contextmanager
def served(model: torch.nn.Module, fuse: bool = False) -> Iterator[None]:
    """The model patched. Raises DemoError at the end if a call was left to transformers' own function, or if no call used ssmgen.

    A prompt's scan may be left to transformers if there is no kernel for the model's dtype on a GPU.
    """
    with hf.patch(model, fuse=fuse) as patch:
        yield
    calls = patch.calls()
    kept = [f"{label} ({count.original} calls)" for label, count in calls.items() if count.original and not _unscanned(label, model)]
    if kept:
        raise DemoError(f"transformers' own functions computed {', '.join(kept)}; the warnings say why")
    if not calls:
        raise DemoError("no layer called a function of ssmgen's")


def _unscanned(label: str, model: torch.nn.Module) -> bool:
    """Delta rules have no kernel for f32, and Mamba-2's long rows take more shared memory than some GPUs have."""
    weight = next(model.parameters())
    scan = label.partition(".")[2] in ("mamba2_chunk_scan", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
    return scan and weight.is_cuda and weight.dtype == torch.float32


def interleaved_ms(ways: Mapping[str, Way], tokens: int, rounds: int, synchronize: Callable[[], None]) -> dict[str, float]:
    """Median milliseconds per step of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        for name in list(ways)[:: 1 if i % 2 == 0 else -1]:
            step, within = ways[name]
            with within():
                synchronize()
                start = time.perf_counter()
                for _ in range(tokens):
                    step()
                synchronize()
                times[name].append((time.perf_counter() - start) * 1e3 / tokens)
    return {name: statistics.median(samples) for name, samples in times.items()}


def kernels(step: Callable[[], Any]) -> int:
    """The number of kernels that a call launches, directly or in a graph. Raises DemoError if the profiler sees none."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    found = kernel_names(profile.events())
    if not found:
        raise DemoError("torch.profiler saw no kernel: CUPTI is missing, or another profiler has it")
    return len(found)


@dataclass(frozen=True, slots=True)
class Launches:
    """The number of a kernel's launches in one call, and their total time in microseconds."""

    count: int
    us: float


def kernels_by_name(step: Callable[[], Any]) -> dict[str, Launches]:
    """The kernels that a call launches, including copies and fills, in decreasing order of total time."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return summed((event.name, event.time_range.elapsed_us()) for event in profile.events() if on_device(event))


def summed(times: Iterable[tuple[str, float]]) -> dict[str, Launches]:
    """Launches by name, from names and microseconds, in decreasing order of total time."""
    found: dict[str, Launches] = {}
    for name, us in times:
        before = found.get(name, Launches(0, 0.0))
        found[name] = Launches(before.count + 1, before.us + us)
    return dict(sorted(found.items(), key=lambda item: -item[1].us))


def on_device(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA


def kernel_names(events: Any) -> list[str]:
    """The names of the kernels in a profile's events, without copies and fills."""
    names = [event.name for event in events if on_device(event)]
    return [name for name in names if not name.startswith(("Memcpy", "Memset"))]


def captured(model: torch.nn.Module, ids: torch.Tensor, room: int, fuse: bool) -> Captured:
    """A decode step of the patched model in a CUDA graph, with space for `room` steps.

    Raises DemoError if its tokens differ from the tokens of eager steps, and any error of a step that cannot be captured.
    """
    with served(model, fuse):
        want = Greedy(model, ids, room).tokens(CHECKED)
        graph = Captured(Greedy(model, ids, room))
    got = graph.tokens(CHECKED - 1)  # the first one is taken before the capture
    if not torch.equal(got, want[:, 1:]):
        raise DemoError(f"{(got != want[:, 1:]).sum().item()} of {got.numel()} tokens differ from those of eager steps")
    return graph


def decoded(model: torch.nn.Module, batch: int, options: Options) -> dict[str, Any]:
    """ms, kernels and notes of a Row, for a model on a CUDA device. A note explains each step that cannot be captured or counted."""
    ids = prompt(batch, model.config.vocab_size, next(model.parameters()).device)
    with plain_attention():
        ways, notes = _ways(model, ids, options)
        counts: dict[str, int] = {}
        for name, way in ways.items():
            with way.within():
                for _ in range(WARM_STEPS):
                    way.step()
                try:
                    counts[name] = kernels(way.step)
                except DemoError as e:
                    notes[f"{name} kernels"] = first_line(e)
        ms = interleaved_ms(ways, options.tokens, options.rounds, torch.cuda.synchronize)
        try:
            ms[ACCELERATED] = accelerated_ms(model, ids, options, torch.cuda.synchronize)
        except Exception as e:  # any error of a step with its own cache
            notes[f"{ACCELERATED} ms"] = first_line(e)
    least = floor_ms(model, ways[PLAIN].step.cache) if ids.is_cuda else None
    return {"ms": ms, "kernels": counts, "notes": notes, "floor_ms": least}


def accelerated_ms(model: torch.nn.Module, ids: torch.Tensor, options: Options, synchronize: Callable[[], None]) -> float:
    """Median milliseconds of generate's tokens after the first; no sequence ends early. Raises DemoError if no step is captured."""

    def seconds(count: int) -> float:
        synchronize()
        start = time.perf_counter()
        fast.generate(ids, count)
        synchronize()
        return time.perf_counter() - start

    told, more = model.generation_config, options.tokens
    ends, told.eos_token_id = told.eos_token_id, None
    try:
        with accelerate(model, (len(ids),), prompt_length=ids.shape[1]) as fast:
            fast.generate(ids, more + 1)  # captures
            eager = [words for words in fast.left if "not captured" in words or "generate is" in words]
            if eager and ids.is_cuda:
                raise DemoError("; ".join(eager))
            return statistics.median(seconds(more + 1) - seconds(1) for _ in range(options.rounds)) * 1e3 / more
    finally:
        told.eos_token_id = ends


def _ways(model: torch.nn.Module, ids: torch.Tensor, options: Options) -> tuple[dict[str, Way], dict[str, str]]:
    """(ways of decoding, reasons for missing ways)"""
    own = partial(own_functions, model)
    with own():
        ways = {PLAIN: Way(Greedy(model, ids), own)}
    if bound(model):
        ways[PACKAGES] = Way(Greedy(model, ids))
    notes: dict[str, str] = {}
    for eager, graph, fuse in ((PATCHED, GRAPH, False), (FUSED, FUSED_GRAPH, True)):
        if fuse and not hf.fusible(model):
            continue
        with served(model, fuse):
            ways[eager] = Way(Greedy(model, ids), partial(served, model, fuse))
            ways[eager].step()
        try:
            ways[graph] = Way(captured(model, ids, options.rounds * options.tokens + SPARE, fuse))
        except Exception as e:  # any error of a step that cannot be captured
            notes[f"{graph} ms"] = first_line(e) + (f"; behind {first_line(e.__context__)}" if e.__context__ else "")
    return ways, notes


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Switches cuDNN's attention off inside the block."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def same_tokens(preset: Preset, count: int, device: torch.device | str) -> tuple[int, int]:
    """(equal tokens, tokens): greedy generation in f32, patched compared with unpatched."""
    model = preset.build(FEWEST, torch.float32, device)
    same = total = 0
    with exact_f32():
        for batch in (1, 2):
            with own_functions(model):
                want = generated(model, batch, count)
            for fuse in (False, True)[: 1 + hf.fusible(model)]:
                with served(model, fuse):
                    got = generated(model, batch, count)
                same, total = same + int((got == want).sum()), total + want.numel()
    return same, total


def generated(model: torch.nn.Module, batch: int, count: int) -> torch.Tensor:
    """[batch, count]: the tokens after the prompt."""
    ids = prompt(batch, model.config.vocab_size, next(model.parameters()).device)
    how = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "num_beams": 1}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)[:, ids.shape[1] :]


@contextlib.contextmanager
def exact_f32() -> Iterator[None]:
    """Switches TF32 off."""
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def prepared(preset: Preset, batches: tuple[int, ...], options: Options, device: torch.device | str) -> torch.nn.Module:
    """The family's model in bf16, with its kernels loaded."""
    model = preset.build(options.layers, torch.bfloat16, device)
    hf.warm(model, batches, PROMPT)
    if hf.fusible(model):
        hf.warm(model, batches, PROMPT, fuse=True)
    return model


def release() -> None:
    """Frees the memory of deleted models. An error that made the device unusable is reported by the next family's measurement."""
    gc.collect()
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
