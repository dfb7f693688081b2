"""A rank's tokens of one sequence, split into parts that kernels process concurrently: first to compute N and M of each, then for outputs.

The parts are the packed sequences of a separate call, each with its own initial state. N and M do not need these states: the call's first
kernel makes chunk images, and the kernel from `ending` computes N and M. The call's last kernel later continues from the images. The number
of parts depends on the heads of v and on the number of tokens on the rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...calls.context import Asked, Ends
from ...calls.kernels import Kernels
from ...spec.kernel import Pdl
from .problem import CHUNK
from .segments import LEAST
from .warpgroups import ROWS, SMS


def parts_of(tokens: int, heads: int, head_v: int, asked: int | None) -> int:
    """The number of parts that fill the card, with at least LEAST chunks each; asked: the call's `segments`, which overrides the rule."""
    chunks = -(-tokens // CHUNK)
    most, least = (SMS // (heads * -(-head_v // ROWS)), LEAST) if asked is None else (asked, 1)
    return max(1, min(most, chunks // least))


class Parts:
    """The call over the parts of some tokens."""

    launcher = Kernels

    def __init__(self, function: Any, given: dict[str, Any]):
        """given: a call's arguments, for a batch of one sequence; or with two starts, for the sequence of the last tokens."""
        v, cut = given["v"], given.get("cu_seqlens")
        (tokens, heads, self.head_v), self.head_k = v.shape[-3:], given["k"].shape[-1]
        self.count = parts_of(tokens, heads, self.head_v, given.get("segments"))
        self.turned = given.get("state_layout") == "kv"
        numbers = torch.arange(self.count + 1, dtype=torch.int32, device=v.device)
        first = 0 if cut is None else cut[:1].int()
        chunks = (tokens - first + CHUNK - 1) // CHUNK
        each = (chunks + self.count - 1) // self.count * CHUNK
        starts = (first + numbers * each).clamp(max=tokens).to(torch.int32)
        state = (self.head_k, self.head_v) if self.turned else (self.head_v, self.head_k)
        self.states = v.new_empty((self.count, heads, *state), dtype=torch.float32)
        own = {"cu_seqlens": starts, "initial_states": self.states, "return_final_states": True, "segments": 1}
        own |= {"workspace": None}  # of more sequences than the call has
        self.call = function.build(**given | own)
        self.made = v.new_empty((self.count, heads, self.head_v + self.head_k, self.head_k), dtype=torch.float32)
        self.kernels = self.launcher(self.call, {"ends": self.made})
        if self.call.before is not None:
            self.call.before()

    def ends(self, start: Tensor | None, asked: Asked) -> Ends:
        """N and M of all tokens, and a function that continues from there."""
        several = self.count > 1
        transitions = several or asked.M or (asked.N and start is not None)
        chain = self.kernels.chosen()
        self.kernels.launch(chain.ahead[0])
        if several or asked.N:
            self.kernels.launch(chain.ending(transitions))
        by: list[Tensor] = []  # M and N from the first part to each
        to: list[Tensor] = []
        for part in range(self.count if several or asked.N else 0):
            N, M = self.made[part].double().split((self.head_v, self.head_k), 1)
            to.append(torch.baddbmm(N, to[-1], M) if part else N)
            by.append(by[-1] @ M if part else M)  # without transitions it has no meaning and is not used
        ahead = (torch.stack(by[:-1]), torch.stack(to[:-1])) if several else None

        def finish(S: Tensor | None, final: bool) -> Tensor | None:
            if S is None:
                S = torch.zeros_like(self.states[:1])
            self.states[:1] = S
            if ahead is not None:
                later = torch.matmul(self._rows(S).double(), ahead[0]) + ahead[1]
                self.states[1:] = self._rows(later)
            self.kernels.launch(replace(chain, pdl=Pdl.OFF))  # the kernels before it are not ssmgen's: nothing may be read early
            states: Tensor = self.call.operands["final_states"]
            return states[-1:] if final else None

        if not asked.N:
            return Ends(None, None, finish)
        N = to[-1] if start is None else self._rows(start[0]).double() @ by[-1] + to[-1]
        M = self._rows(by[-1]).float()[None] if asked.M else None
        return Ends(self._rows(N).float()[None], M, finish)

    def _rows(self, states: Tensor) -> Tensor:
        """Converts states to the layout of N and M, or back."""
        return states.mT if self.turned else states
