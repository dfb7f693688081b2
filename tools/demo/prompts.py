"""What `python -m tools.demo --prompt` measures of a model: the time to the first token.

Milliseconds: one pass over a prompt, the choice of the first token behind it and the cache that it leaves, which is what generate() begins
with; on the wall clock, synchronised ahead of the pass and behind it. transformers with its own PyTorch functions, with the packages of
kernels that it calls instead where they are installed, patched and fused (patch(fuse=True), where it replaces something of a prompt's) take
turns, in the opposite order every other round; each gets the median of its rounds. Chunks of transformers' scan are as long as the family's
configuration has them by default.

transformers' own pass is left out, with the reason, where it would need more memory than is free, or take longer than a bound, 3 s by
default: an eighth of the prompt says so, as both grow with its length at least.

Without: the same of the model as it is, but that its recurrent layers give back what they are given: what all else takes.

Kernels: those that torch.profiler sees in one pass, without copies and fills by the driver; with --kernels also by name, these included.

Memory: what a pass needs at its peak beside what was there before it: activations and the cache, not the weights.

Apart: the L2 norm of the difference of the last token's logits, over that of the logits, from transformers' own, or where there are none,
from the packages'. All are of bf16.

Same tokens: how many of the greedy tokens behind the prompt are those of transformers' own pass, or of the packages'. In bf16 two likeliest
tokens may be closer than rounding is, and all tokens behind the first other one may differ.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ssmgen.compat import hf

from . import DemoError
from .decode import Greedy, prompt
from .measure import (
    FUSED,
    PATCHED,
    PLAIN,
    Launches,
    Options,
    Way,
    first_line,
    interleaved_ms,
    kernels,
    kernels_by_name,
    plain_attention,
    release,
    served,
)  # fmt: skip
from .packages import PACKAGES, bound, own_functions

PART, FEWEST = 8, 256  # of a prompt, what tells of all of it: an eighth, and tokens that a chunk of transformers' own is padded to
UNITS = ("ms", "kernels", "memory")
WITHOUT = "without"  # the recurrent layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A family, a batch size and a length of prompts: milliseconds, kernels and bytes, by way.

    notes: why a number is missing, by way and unit, such as "transformers ms".
    """

    family: str
    like: str
    served: int  # layers with something of ours
    layers: int
    batch: int
    length: int
    ms: Mapping[str, float]
    kernels: Mapping[str, int]
    memory: Mapping[str, int]
    without: float | None = None  # ms of the model without its recurrent layers
    apart: Mapping[str, float] = field(default_factory=dict)
    same: Mapping[str, int] = field(default_factory=dict)  # of so many tokens
    tokens: int = 0
    bound: tuple[str, ...] = ()  # functions of packages that transformers calls
    by_kernel: Mapping[str, Mapping[str, Launches]] = field(default_factory=dict)  # where it was asked for
    notes: Mapping[str, str] = field(default_factory=dict)

    def speedup(self, way: str) -> float | None:
        return self.ms[PLAIN] / self.ms[way] if PLAIN in self.ms and way in self.ms else None


def measured(model: torch.nn.Module, batch: int, length: int, options: Options) -> dict[str, Any]:
    """What a PromptRow has from `ms` on, of a model on a CUDA device.

    Where transformers' own pass is too large or too long, or it or the packages' fails, that has a note. Raises what a patched one does,
    and DemoError if a call of it is left to transformers.
    """
    ids = prompt(batch, model.config.vocab_size, next(model.parameters()).device, length)
    step, ways = partial(Greedy, model, ids), ways_of(model, ids)
    found: dict[str, Any] = {"kernels": {}, "memory": {}, "notes": {}, "by_kernel": {}}
    logits: dict[str, Tensor] = {}
    tokens: dict[str, Tensor] = {}
    with plain_attention():
        with ways[PLAIN].within():
            reason = too_much(model, ids, options.longest)
        if reason:
            found["notes"] |= dict.fromkeys((f"{PLAIN} {unit}" for unit in UNITS), reason)
            del ways[PLAIN]
        release()
        for name, way in list(ways.items()):
            try:
                with way.within():
                    logits[name] = _last_logits(model, ids)
                    found["memory"][name] = peak_bytes(way.step)
                    _count(name, way, found)
                    if options.by_kernel and name != PLAIN:  # a profile of its 100 000 launches takes half a minute
                        found["by_kernel"][name] = kernels_by_name(way.step)
                    tokens[name] = Greedy(model, ids).tokens(options.tokens)
            except Exception as e:
                if name not in (PLAIN, PACKAGES):
                    raise
                found["notes"] |= dict.fromkeys((f"{name} {unit}" for unit in UNITS), first_line(e))
                logits.pop(name, None)
                del ways[name]
            release()
        if without := _without(model, step, found):
            ways[WITHOUT] = without
        found["ms"] = interleaved_ms(ways, 1, options.rounds, torch.cuda.synchronize)
        found["without"] = found["ms"].pop(WITHOUT, None)
    found["bound"] = tuple(b.words for b in bound(model))
    return found | _compared(logits, tokens)


def ways_of(model: torch.nn.Module, ids: Tensor) -> dict[str, Way]:
    """The ways of a pass over a prompt [batch, tokens] that the model has."""
    step = partial(Greedy, model, ids)
    ways = {PLAIN: Way(step, partial(own_functions, model))}
    if bound(model):
        ways[PACKAGES] = Way(step)
    ways[PATCHED] = Way(step, partial(served, model))
    if _fuses(model):
        ways[FUSED] = Way(step, partial(served, model, True))
    return ways


def _compared(logits: Mapping[str, Tensor], tokens: Mapping[str, Tensor]) -> dict[str, Any]:
    """apart, same and tokens of a PromptRow: of all others than the one that they are compared with."""
    with_what = next((name for name in (PLAIN, PACKAGES) if name in tokens), None)
    if with_what is None:
        return {}
    others = [name for name in tokens if name != with_what]
    return {
        "apart": {name: _apart(logits[name], logits[with_what]) for name in others},
        "same": {name: int((tokens[name] == tokens[with_what]).sum()) for name in others},
        "tokens": tokens[with_what].numel(),
    }


def _without(model: torch.nn.Module, step: Callable[[], Any], found: dict[str, Any]) -> Way | None:
    """The way without recurrent layers, or none and a note, of a model that cannot do without."""
    way = Way(step, partial(bypassed, model))
    try:
        with way.within():
            way.step()
    except Exception as e:  # whatever the others miss of them
        found["notes"][WITHOUT] = first_line(e)
        return None
    return way


@contextlib.contextmanager
def bypassed(model: torch.nn.Module) -> Iterator[None]:
    """Layers with a short convolution give back what they are given."""
    layers = [m for m in model.modules() if any(isinstance(child, torch.nn.Conv1d) for child in m.children())]
    try:
        for layer in layers:
            layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _fuses(model: torch.nn.Module) -> bool:
    """Whether patch(fuse=True) replaces more of the model than patch() does."""
    with hf.patch(model, fuse=True) as fused, hf.patch(model) as patched:
        return set(fused.replaced) != set(patched.replaced)


def too_much(model: torch.nn.Module, ids: Tensor, longest: float) -> str:
    """Why transformers' own pass over a prompt [batch, tokens] is not made, or nothing; it may take `longest` seconds."""
    part = ids[:, : max(FEWEST, ids.shape[1] // PART)]
    times, step = ids.shape[1] / part.shape[1], partial(Greedy, model, part)
    try:
        needed = peak_bytes(step) * times
    except torch.OutOfMemoryError as e:
        return f"of {part.shape[1]} tokens: {first_line(e)}"
    if needed > (free := free_bytes()):
        return f"it would need {needed / 2**30:.0f} GiB beside the weights, and {free / 2**30:.0f} are free"
    taken = seconds(step) * times
    return f"it would take {taken:.{0 if taken >= 2 else 1}f} s" if taken > longest else ""


def seconds(step: Callable[[], Any]) -> float:
    """What a call takes on the wall clock."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def free_bytes() -> int:
    """Bytes of the device that a pass may have."""
    release()
    return torch.cuda.mem_get_info()[0]


def _count(name: str, way: Way, found: dict[str, Any]) -> None:
    try:
        found["kernels"][name] = kernels(way.step)
    except DemoError as e:
        found["notes"][f"{name} kernels"] = first_line(e)


def peak_bytes(step: Callable[[], Any]) -> int:
    """Bytes that a call needs on the device beside those that are allocated."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _last_logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[:, -1].clone()


def _apart(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
