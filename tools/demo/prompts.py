"""What `python -m tools.demo --prompt` measures of a model: the time to the first token.

Milliseconds: one pass over a prompt, the choice of the first token behind it and the cache that it leaves, which is what generate() begins
with; on the wall clock, synchronised ahead of the pass and behind it. transformers and patched take turns, in the opposite order every
other round; each gets the median of its rounds. patch(fuse=True) does not change prompts. Chunks of transformers' own scan are as long as
the family's configuration has them by default.

Kernels: those that torch.profiler sees in one pass, without copies and fills by the driver.

Memory: what a pass needs at its peak beside what was there before it: activations and the cache, not the weights.

Apart: the L2 norm of the difference of the last token's logits, patched and not, over that of the logits. Both are of bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import DemoError
from .decode import Greedy, prompt
from .measure import PATCHED, PLAIN, Options, Way, first_line, interleaved_ms, kernels, plain_attention, release, served


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
    apart: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    def speedup(self, way: str) -> float | None:
        return self.ms[PLAIN] / self.ms[way] if PLAIN in self.ms else None  # patched is always there


def measured(model: torch.nn.Module, batch: int, length: int, options: Options) -> dict[str, Any]:
    """ms, kernels, memory, apart and notes of a PromptRow, of a model on a CUDA device.

    Where transformers' own pass needs more memory than there is, that has a note. Raises what the patched one does, and DemoError if a call
    of it was left to transformers.
    """
    ids = prompt(batch, model.config.vocab_size, next(model.parameters()).device, length)
    ways = {PLAIN: Way(partial(Greedy, model, ids)), PATCHED: Way(partial(Greedy, model, ids), partial(served, model))}
    found: dict[str, Any] = {"kernels": {}, "memory": {}, "notes": {}}
    logits: dict[str, Tensor] = {}
    with plain_attention():
        for name, way in list(ways.items()):
            try:
                with way.within():
                    logits[name] = _last_logits(model, ids)
                    found["memory"][name] = peak_bytes(way.step)
                    _count(name, way, found)
            except torch.OutOfMemoryError as e:
                if name == PATCHED:
                    raise
                found["notes"] |= dict.fromkeys((f"{name} {unit}" for unit in ("ms", "kernels", "memory")), first_line(e))
                del ways[name]
            release()
        found["ms"] = interleaved_ms(ways, 1, options.rounds, torch.cuda.synchronize)
    return found | {"apart": _apart(logits[PATCHED], logits[PLAIN]) if PLAIN in logits else None}


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
