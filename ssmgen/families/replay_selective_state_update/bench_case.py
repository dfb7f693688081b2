"""Rotating inputs of replay's steps, how they are launched, and what they are checked against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ssmgen

from ...accuracy import norm_error
from ...bench import report as reports
from ...bench import timing
from ...bench.report import GATE, MIN_SETS
from ...errors import SsmgenError
from ...spec import SM90, Arch
from . import planning as replay_call

SHAPE = (16, 64, 128, 1)  # heads, headdim, d_state, groups
TOKENS, ACCEPTED = 6, 3
STATE_BYTES, MAX_SETS = 200e6, 200
WIDTH = 4  # of the convolution
CHECKED = 4  # rows that the gate looks at
STATE_GATE = GATE | {torch.float32: 4e-6}  # an exponential and a sum of a step's tokens, in f32
PRECISION_GATE = {"f32": 0.0, "bf16x2": 2.0**-15, "bf16": 2.0**-7}


class Form(NamedTuple):
    """How a call is launched."""

    two_kernels: bool = False
    external: bool = True
    internal: bool = False

    @property
    def name(self) -> str:
        parts = ["two_kernels" if self.two_kernels else "ssmgen", "pdl" if self.external else "", "internal" if self.internal else ""]
        return "_".join(filter(None, parts))


PLAIN = Form()


def forms(two_kernels: bool | None, external: bool | None, internal: bool | None, arch: Arch) -> list[Form]:
    """What None leaves open is all of it; the first is what a plain call gets, if it is among them."""
    capable = arch >= SM90

    def flags(chosen: bool | None) -> list[bool]:
        return [f for f in ((True, False) if chosen is None else (chosen,)) if capable or not f] or [False]

    several = (False, True) if two_kernels is None else (two_kernels,)
    return [Form(two, e, i) for two in several for e in flags(external) for i in (flags(internal) if two else [False])]


@dataclass
class Case:
    """Rotating inputs. `window` 0 is the history of one step."""

    batch: int
    tokens: int = TOKENS
    accepted: int = ACCEPTED
    window: int = 0
    writing: float = 0.0  # the share of sequences whose state is written, of a ring
    shape: tuple[int, int, int, int] = SHAPE
    dtype: torch.dtype = torch.bfloat16
    rounding: bool = False
    precision: str = "f32"
    conv: bool = False
    device: torch.device | str = "cuda"

    def __post_init__(self) -> None:
        H, P, N, G = self.shape
        B, T, device = self.batch, self.tokens, torch.device(self.device)
        bytes_per_set = B * H * P * N * self.dtype.itemsize
        self.sets = max(MIN_SETS, min(MAX_SETS, math.ceil(STATE_BYTES / bytes_per_set)))
        slots = self.sets * B
        R, both = (self.window + T, ()) if self.window else (T, (2,))

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, device=device).bfloat16()

        self.state = reports.normal_pool(slots, (H, P, N), self.dtype, device)
        self.scale = reports.scales_of(self.state)
        self.slots = torch.randperm(slots, device=device).view(self.sets, B).int()
        self.history = {"old_x": randn(slots, R, H, P), "old_B": randn(slots, *both, R, G, N)}
        self.history["old_dt"] = torch.rand(slots, *both, H, R, device=device) / 8
        self.history["prev_num_accepted_tokens"] = self._counts().int()
        if self.window:
            self.history["ring_start"] = torch.randint(R, (slots,), device=device, dtype=torch.int32)
        else:
            self.history["old_dA_cumsum"] = -self.history["old_dt"].cumsum(-1)
            self.history["cache_buf_idx"] = torch.randint(2, (slots,), device=device, dtype=torch.int32)
        self.dt, self.out = randn(self.sets, B, T, H), torch.empty(self.sets, B, T, H, P, device=device, dtype=torch.bfloat16)
        self.A = -torch.rand(H, device=device) - 0.1
        self.D, self.dt_bias = randn(H), (torch.rand(H, device=device) - 4).bfloat16()
        self.seed = torch.tensor([1], device=device)
        sizes = (H * P, G * N, G * N)
        joined = randn(self.sets, B, T, sum(sizes))  # of the convolution: in and out
        if self.conv:
            self.conv_x, joined = joined, torch.zeros_like(joined)
            self.conv_out = joined
            self.conv_state = randn(slots, sum(sizes), WIDTH - 2 + T)
            self.conv_weight, self.conv_bias = randn(sum(sizes), WIDTH) / 2, randn(sum(sizes))
            self.conv_accepted = torch.full((B,), max(1, self.accepted), device=device, dtype=torch.int32)
        x, self.B, self.C = (t.unflatten(-1, s) for t, s in zip(joined.split(sizes, -1), ((H, P), (G, N), (G, N)), strict=True))
        self.x = x
        if not self.conv:  # each by itself, as projections without a convolution would give them
            self.x, self.B, self.C = (t.contiguous() for t in (x, self.B, self.C))

    def _counts(self) -> Tensor:
        """Entries of each slot's history that count."""
        full = max(self.accepted, self.window - self.tokens + 1) if self.window else self.accepted
        part = torch.arange(self.batch + 1, device=self.slots.device).double() * self.writing
        writes = part.floor().diff() > 0  # spread evenly over the batch
        counts = torch.full((self.slots.numel(),), self.accepted, device=self.slots.device)
        counts[self.slots.long()] = torch.where(writes, full, self.accepted).expand_as(self.slots)
        return counts

    @property
    def function(self) -> Callable[..., Tensor]:
        return ssmgen.checkpoint_selective_state_update if self.window else ssmgen.replay_selective_state_update

    @property
    def written(self) -> float:
        """The share of states that a call writes."""
        counts = self.history["prev_num_accepted_tokens"][self.slots[0].long()]
        return float(((counts + self.tokens > self.window) if self.window else (counts > 0)).double().mean())

    @property
    def bytes_moved(self) -> float:
        return self.batch * self.state[0].numel() * self.state.element_size() * (1 + self.written)

    def arguments(self, i: int, form: Form = PLAIN) -> dict[str, Any]:
        """Keywords of the i-th call, in the layout in which models call: A, dt, D and dt_bias as stride-0 views."""
        H, P, N, _ = self.shape
        call = {"state": self.state, **self.history, "x": self.x[i], "B": self.B[i], "C": self.C[i], "state_indices": self.slots[i]}
        call |= {"dt": self.dt[i][..., None].expand(-1, -1, -1, P), "A": self.A[:, None, None].expand(H, P, N), "out": self.out[i]}
        call |= {"D": self.D[:, None].expand(H, P), "dt_bias": self.dt_bias[:, None].expand(H, P), "dt_softplus": True}
        call |= {"precision": self.precision, "after_conv": self.conv, "two_kernels": form.two_kernels}
        call |= {"internal_pdl": form.internal} if form.two_kernels else {}
        call |= {} if self.scale is None else {"state_scale": self.scale}
        return call | ({"rand_seed": self.seed} if self.rounding else {})

    def conv_arguments(self, i: int) -> dict[str, Any]:
        """The same of the convolution."""
        call: dict[str, Any] = {"x": self.conv_x[i].transpose(1, 2), "conv_state": self.conv_state, "weight": self.conv_weight}
        call |= {"bias": self.conv_bias, "conv_state_indices": self.slots[i], "num_accepted_tokens": self.conv_accepted}
        return call | {"activation": "silu", "out": self.conv_out[i].transpose(1, 2)}

    def bound(self, form: Form) -> timing.Launch:
        """Our kernels, with the host's part of every call done beforehand."""
        calls = [ssmgen.bind(self.function, **self.arguments(i, form), pdl=form.external) for i in range(self.sets)]
        if not self.conv:
            return lambda i: calls[i]()
        ahead = self.bound_conv(form.external)
        return lambda i: (ahead(i), calls[i]())

    def bound_conv(self, pdl: bool) -> timing.Launch:
        calls = [ssmgen.bind(ssmgen.causal_conv1d_update, **self.conv_arguments(i), pdl=pdl) for i in range(self.sets)]
        return lambda i: calls[i]()

    def gate(self, form: Form) -> tuple[float, float]:
        """Norm errors of state and output of one call against float64, on a few rows. Raises SsmgenError when they are more than
        rounding, or the history is not what it should be."""
        call = self.arguments(0, form)
        rows = torch.linspace(0, self.batch - 1, min(self.batch, CHECKED), device=self.slots.device).long()
        touched = self.slots[0][rows].long()
        small = {n: t[touched] for n, t in self.history.items()} | {"state": reports.numbers(self.state, self.scale, touched)}
        call["out"].fill_(float("nan"))
        if self.conv:
            ssmgen.causal_conv1d_update(**self.conv_arguments(0), pdl=form.external)
        self.function(**call, pdl=form.external)
        small |= {n: call[n][rows] for n in ("x", "B", "C", "out")} | {n: call[n] for n in ("A", "D", "dt_bias")} | {"dt": self.dt[0][rows]}
        options = replay_call.Options(dt_softplus=True)
        views = replay_call.views_of(small, options, [])  # the call itself was checked
        views |= {"state": small["state"].double(), "out": torch.zeros_like(small["out"], dtype=torch.float64)}
        replay_call.run_reference(views, options, torch.float64)
        state_error, out_error = (
            norm_error(reports.numbers(self.state, self.scale, touched), views["state"]),
            norm_error(call["out"][rows], views["out"]),
        )
        kept = all(torch.equal(self.history[n][touched], views[n]) for n in ("old_x", "old_B"))
        kept = kept and norm_error(self.history["old_dt"][touched], views["old_dt"]) < 1e-5
        slack = PRECISION_GATE[self.precision]
        if not (state_error < STATE_GATE[self.dtype] + slack and out_error < GATE[torch.bfloat16] + slack and kept):
            errors = f"state error {state_error:.1e}, output error {out_error:.1e}, history {'as it should be' if kept else 'wrong'}"
            raise SsmgenError(f"{form.name} of {self.function.__name__}, batch {self.batch}: {errors}; not timed")
        return state_error, out_error
