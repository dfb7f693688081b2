"""A rank's tokens of one sequence, in parts that blocks scan in parallel, to compute their contribution to its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
