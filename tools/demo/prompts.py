"""Measurements of prompts for `python -m tools.demo --prompt`: the time to the first token.

Milliseconds: wall-clock time of one pass over a prompt, with the choice of the first token after it and the resulting cache, as at the
start of generate(). The device is synchronised before and after the pass. The ways alternate, in the opposite order every other round; each
gets the median of its rounds. They are transformers with its own PyTorch functions, transformers with kernel packages if installed,
patched, and fused (patch(fuse=True), if it replaces part of a prompt's work). Chunks of transformers' scan have the configuration's default
length.

transformers' own pass is skipped, with the reason, if it would need more memory than is free, or take longer than a limit, 3 s by
default. A pass over an eighth of the prompt predicts this, as both grow at least linearly with its length.

Without: the same for the unpatched model, with recurrent layers that return their input: the time of everything else.

Kernels: all kernels that torch.profiler sees in one pass, without copies and fills by the driver; with --kernels also by name, including
these.

Memory: the peak of a pass minus the memory allocated before it: activations and the cache, not the weights.

Apart: the L2 norm of the difference of the last token's logits, over the norm of the reference's logits. The reference is transformers' own
pass, or the packages' if that is skipped. All are in bf16.

Same tokens: the number of greedy tokens after the prompt that equal the reference's. In bf16 the two likeliest tokens may be closer than
rounding; all tokens after the first difference may then differ.
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

PART, FEWEST = 8, 256  # an eighth of a prompt predicts the whole; at least the tokens to which transformers' own function pads a chunk
UNITS = ("ms", "kernels", "memory")
WITHOUT = "without"  # the recurrent layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A family, a batch size and a length of prompts: milliseconds, kernels and bytes, by way.

    notes: why a number is missing, by way and unit, such as "transformers ms".
    """

    family: str
    like: str
    served: int  # layers with a function of ssmgen
    layers: int
    batch: int
    length: int
    ms: Mapping[str, float]
    kernels: Mapping[str, int]
    memory: Mapping[str, int]
    without: float | None = None  # ms of the model without its recurrent layers
    apart: Mapping[str, float] = field(default_factory=dict)
    same: Mapping[str, int] = field(default_factory=dict)  # equal tokens, out of `tokens`
    tokens: int = 0
    bound: tuple[str, ...] = ()  # functions of packages that transformers calls
    by_kernel: Mapping[str, Mapping[str, Launches]] = field(default_factory=dict)  # if requested
    notes: Mapping[str, str] = field(default_factory=dict)

    def speedup(self, way: str) -> float | None:
        return self.ms[PLAIN] / self.ms[way] if PLAIN in self.ms and way in self.ms else None


def measured(model: torch.nn.Module, batch: int, length: int, options: Options) -> dict[str, Any]:
    """The fields of a PromptRow from `ms` on, for a model on a CUDA device.

    If transformers' own pass is too large or too long, or if it or the packages' pass fails, there is a note. Raises the errors of a
    patched pass, and DemoError if it leaves a call to transformers.
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
    """The model's ways of a pass over a prompt [batch, tokens]."""
    step = partial(Greedy, model, ids)
    ways = {PLAIN: Way(step, partial(own_functions, model))}
    if bound(model):
        ways[PACKAGES] = Way(step)
    ways[PATCHED] = Way(step, partial(served, model))
    if _fuses(model):
        ways[FUSED] = Way(step, partial(served, model, True))
    return ways


def _compared(logits: Mapping[str, Tensor], tokens: Mapping[str, Tensor]) -> dict[str, Any]:
    """apart, same and tokens of a PromptRow, for all ways except the reference way."""
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
    """The way without recurrent layers; None and a note if the model cannot run without them."""
    way = Way(step, partial(bypassed, model))
    try:
        with way.within():
            way.step()
    except Exception as e:  # any error of layers that depend on them
        found["notes"][WITHOUT] = first_line(e)
        return None
    return way


@contextlib.contextmanager
def bypassed(model: torch.nn.Module) -> Iterator[None]:
    """Makes layers with a short convolution return their input unchanged."""
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
    """Why transformers' own pass over a prompt [batch, tokens] is skipped; empty if it is not. Its limit is `longest` seconds."""
    part = ids[:, : max(FEWEST, ids.shape[1] // PART)]
    times, step = ids.shape[1] / part.shape[1], partial(Greedy, model, part)
    try:
        needed = peak_bytes(step) * times
    except torch.OutOfMemoryError as e:
        return f"of {part.shape[1]} tokens: {first_line(e)}"
    if needed > (free := free_bytes()):
        return f"it would need {needed / 2**30:.0f} GiB in addition to the weights, and {free / 2**30:.0f} are free"
    taken = seconds(step) * times
    return f"it would take {taken:.{0 if taken >= 2 else 1}f} s" if taken > longest else ""


def seconds(step: Callable[[], Any]) -> float:
    """The wall-clock time of a call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def free_bytes() -> int:
    """Bytes of device memory available to a pass."""
    release()
    return torch.cuda.mem_get_info()[0]


def _count(name: str, way: Way, found: dict[str, Any]) -> None:
    try:
        found["kernels"][name] = kernels(way.step)
    except DemoError as e:
        found["notes"][f"{name} kernels"] = first_line(e)


def peak_bytes(step: Callable[[], Any]) -> int:
    """Bytes that a call needs on the device in addition to the allocated ones."""
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
