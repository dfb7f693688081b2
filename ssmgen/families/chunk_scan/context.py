"""Context parallel calls of chunk_scan's functions: the state passes from rank to rank. M is one number per head, its decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from ...calls.context import Arguments, Asked, Context, Ends
from ...calls.kernels import Kernels
from .ends import EndsSpec
from .spec import CHUNK
from .warpgroups import WarpgroupScanSpec

MOST, LEAST = 8, 16  # most parts, and least chunks of a part: heads that do not forget are then on many SMs


class Parts:
    """Some tokens of one sequence, in parts of whole chunks, except the first part, which begins with the sequence, and the last one."""

    launcher = Kernels

    def __init__(self, function: Any, given: dict[str, Any], name: str):
        """name: of x. given: a call's arguments, of a batch of one sequence, or with two starts."""
        x, d_state, cut = given[name], given["B" if name == "x" else "k"].shape[-1], given.get("cu_seqlens")
        self.tokens, heads, rows = x.shape[-3:]
        self.chunks = -(-self.tokens // CHUNK)
        self.count = max(1, min(MOST, self.chunks // LEAST))
        self.each = -(-self.chunks // self.count)
        starts = torch.arange(self.count + 1, device=x.device).mul(self.each * CHUNK).clamp(max=self.tokens)
        self.starts = starts if cut is None else torch.maximum(starts, cut[:1])
        self.call = function.build(**given | {"cu_seqlens": self.starts.int(), "segments": None})
        self.since = torch.empty((self.count, heads), dtype=torch.int32, device=x.device)
        self.made = x.new_empty((self.count, heads, rows, d_state), dtype=torch.float32)
        self.kernels = self.launcher(self.call, {"since": self.since, "ends": self.made})

    def served(self) -> EndsSpec | None:
        """The variant for these tokens, if there is one."""
        spec = self.kernels.chosen()
        found = EndsSpec.of(spec) if isinstance(spec, WarpgroupScanSpec) else None
        return None if found is None or found.violations(self.kernels.arch) else found

    def added(self, spec: EndsSpec, remaining: Tensor, first: Tensor) -> Tensor:
        """[1, H, P, N] f64, the state that they make from zeros. remaining: [chunks + 1, H] f64, log decays from each chunk to the end;
        first: [H], the first chunk that counts at the end."""
        self.since.copy_((first * CHUNK - self.starts[:-1, None]).clamp(min=0) // CHUNK)
        self.kernels.launch(spec)
        decays = remaining[self.each :: self.each]
        decays = torch.nn.functional.pad(decays, (0, 0, 0, self.count - len(decays))).exp()  # no decay follows the last part
        scaled = self.made.mul_(decays.float()[:, :, None, None])  # in f64 this would be 0.1 ms of copies for 128 heads
        added: Tensor = scaled.sum(0, keepdim=True, dtype=torch.float64)
        return added


# Natural logarithm of a decay that takes every finite f32 to zero: 2^-300.
NOTHING = -208.0


def steps_of(given: Arguments, name: str) -> tuple[Tensor, Tensor]:
    """[batch, T, H] f32 and [H] f32, whose products are the tokens' log decays."""
    x = given[name]
    one = x.new_ones(x.shape[-2], dtype=torch.float32)
    g, slope = given.get("g"), given.get("slope")
    if "dt" in given:
        bias = given.get("dt_bias")
        d = given["dt"].float() if bias is None else torch.add(given["dt"], bias.float())
        d = softplus(d) if given.get("dt_softplus") else d
        d = d if given.get("dt_limit") is None else d.clamp(*given["dt_limit"])
        steps, rate = d, given["A"].float()
    elif g is not None and g.dim() > 1:
        steps, rate = g.float(), one
    else:
        rate = -slope.float() if slope is not None else 0 * one if g is None else g.float()
        steps = one.expand(x.shape[:-1])
    return steps if steps.dim() == 3 else steps.unsqueeze(0), rate


def sums_of(given: Arguments, name: str) -> tuple[Tensor, Tensor]:
    """Sums of log decays over chunks of tokens [batch, chunks, H] f64; and the largest possible growth of a state by positive log decays
    [batch, 1, H] f64."""
    steps, rate = steps_of(given, name)
    tokens = steps.shape[1]
    if given.get("cu_seqlens") is not None:
        there = torch.arange(tokens, device=steps.device) >= given["cu_seqlens"][0]
        steps = torch.where(there[:, None], steps, 0)
    steps = pad(steps, (0, 0, 0, -tokens % CHUNK)) if tokens % CHUNK else steps  # with zeros, which add no growth
    chunks = steps.unflatten(1, (-1, CHUNK))
    sums = chunks.sum(2).double() * rate.double()
    if _never_negative(given):  # a head's steps have one sign; extremes would take two more passes, 0.1 ms for 131072 tokens
        return sums, sums.sum(1, keepdim=True).clamp(min=0)
    least, most = (t.double() for t in (chunks.amin(2).amin(1, keepdim=True), chunks.amax(2).amax(1, keepdim=True)))
    return sums, torch.maximum(least * rate, most * rate).clamp(min=0) * tokens


def _never_negative(given: Arguments) -> bool:
    """Whether steps are never below zero, for any input."""
    limit = given.get("dt_limit")
    return "dt" in given and (bool(given.get("dt_softplus")) if limit is None else limit[0] >= 0)


def to_end(sums: Tensor) -> Tensor:
    """[chunks + 1, H], log decays from each chunk's first token to the last chunk's end. sums: [chunks, H]

    It sums along rows, because torch adds columns one row after the other, 0.5 ms for 2048 chunks."""
    return pad(sums.mT.contiguous().flip(1).cumsum(1).flip(1), (0, 1)).mT


def seen_from(remaining: Tensor, growth: Tensor) -> Tensor:
    """[H], the first chunk that may still count after the last one. remaining: from `to_end`; growth: [1, H]."""
    behind = remaining[1:]  # a chunk's addition decays at least by the decays of all later chunks
    numbers = torch.arange(len(behind), device=behind.device)[:, None]
    return torch.where(behind + growth <= NOTHING, len(behind), numbers).amin(0)


def ends(function: Any, given: dict[str, Any], start: Tensor | None, asked: Asked) -> Ends:
    """N, from the tokens that still count if there is one sequence; and M."""
    if not asked.N:
        return Ends(None)
    name = "x" if "x" in given else "v"
    sums, growth = sums_of(given, name)
    M = sums.sum(1).exp() if asked.M or start is not None else None
    if len(sums) > 1:
        _, N = function(**given, initial_states=start, return_final_states=True)
        return Ends(N, None if M is None else M.float())
    remaining = to_end(sums[0])
    first, parts = seen_from(remaining, growth[0]), Parts(function, given, name)
    spec = parts.served() if given[name].is_cuda else None
    if spec is None:
        return Ends(last_tokens(function, given, name, first.min(), start), None if M is None else M.float())
    N = parts.added(spec, remaining, first)
    if M is None:
        return Ends(N.float())
    return Ends((N if start is None else passed(start, N, M, given)).float(), M.float())


def last_tokens(function: Any, given: dict[str, Any], name: str, first: Tensor, start: Tensor | None) -> Tensor:
    """N by the function itself, over the tokens from chunk `first` on."""
    cut, begin = given.get("cu_seqlens"), first.view(1) * CHUNK
    own = torch.zeros_like(begin) if cut is None else cut[:1].long()
    start = None if start is None else torch.where((begin > own).view(1, 1, 1, 1), 0, start)
    tokens = torch.full_like(begin, given[name].shape[-3])
    starts = torch.cat([torch.maximum(begin, own), tokens]).to(torch.int32 if cut is None else cut.dtype)
    _, N = function(**given | {"cu_seqlens": starts}, initial_states=start, return_final_states=True)
    assert isinstance(N, Tensor)
    return N


def blank(given: Arguments) -> tuple[Tensor, Tensor]:
    x, B = (given["x"], given["B"]) if "x" in given else (given["v"], given["k"])
    heads, rows = x.shape[-2:]
    return x.new_zeros((1, heads, rows, B.shape[-1]), dtype=torch.float32), x.new_ones((1, heads), dtype=torch.float32)


def passed(S: Tensor, N: Tensor, M: Tensor, given: Arguments) -> Tensor:
    return S * M.double()[:, :, None, None] + N.double()


def _rule(name: str, *refused: str) -> Context:
    def cheap(given: Arguments) -> bool:
        return given[name].dim() == 3 or len(given[name]) == 1

    return Context("cu_seqlens", (name, -3), blank, ends, passed, cheap, ("state", "state_indices", "has_initial_state", *refused))


RULES = {
    "chunk_scan": _rule("x", "seq_idx", "checkpoint_positions", "checkpoints_out", "return_checkpoints"),
    "chunk_simple_gla": _rule("v"),
    "chunk_lightning_attn": _rule("v"),
}
