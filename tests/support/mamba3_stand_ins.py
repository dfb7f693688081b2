"""Stand-ins for mamba-ssm's and flash-linear-attention's layers of Mamba-3, which need a GPU to be imported.

They have the same parameters, attributes, methods and caches, and compute token by token in the parameters' dtype, without ssmgen.
SIGNATURES: the parameters of the published methods, of mamba-ssm at commit e9594ce and flash-linear-attention at bc3b101d.
"""

from __future__ import annotations

import copy
import math
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

SIGNATURES = {
    "mamba_ssm.modules.mamba3": {
        "forward": "self, u, seq_idx=None, cu_seqlens=None, inference_params=None",
        "step": "self, u, angle_state, ssm_state, k_state, v_state, **kwargs",
        "_preprocess": "self, A_proj, dd_dt, B, C, x, z, trap_proj, angle_proj",
    },
    "fla.layers.mamba3": {
        "forward": (
            "self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False, cu_seqlens=None, "
            "**kwargs"
        ),
        "cuda_kernels_forward": "self, hidden_states, last_state=None, use_cache=False, cu_seqlens=None",
        "step": "self, hidden_states, angle_state, ssm_state, k_state, v_state",
        "_compute_a": "self, dd_A",
    },
}


def heavy(u: Tensor) -> Tensor:
    return torch.where(u >= 0, 1 + u, 1 / (1 - u.clamp(max=0)))


class Norm(nn.Module):
    """RMS norm of groups, then the gate."""

    def __init__(self, size: int, group_size: int | None = None, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps, self.group_size, self.norm_before_gate = nn.Parameter(torch.ones(size)), eps, group_size, True

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (-1, self.group_size or x.shape[-1]))
        return (grouped / (grouped.square().mean(-1, keepdim=True) + self.eps).sqrt()).flatten(-2) * self.weight


class Layer(nn.Module):
    """The parameters of both packages, at random, and the recurrence. Its angles are the plain sum, in the parameters' dtype."""

    rate = staticmethod(heavy)

    def __init__(
        self, d_model: int = 24, d_state: int = 16, headdim: int = 8, groups: int = 1, rope_fraction: float = 0.5, norm: bool = False,
        rank: int | None = None, layer_idx: int | None = None, bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.A_floor, self.is_outproj_norm, self.is_mimo, self.mimo_rank = 1e-4, norm, rank is not None, rank or 1
        self.layer_idx, self.num_rope_angles = layer_idx, int(d_state * rope_fraction) // 2
        inner = 2 * d_model
        H, R, N = inner // headdim, self.mimo_rank, d_state
        self.sizes = H, headdim, N, R, groups
        self.in_proj = nn.Linear(d_model, 2 * inner + 2 * N * groups * R + 3 * H + self.num_rope_angles, bias=bias)
        self.dt_bias, self.D = nn.Parameter(torch.rand(H) - 1), nn.Parameter(torch.randn(H))
        self.B_bias, self.C_bias = (nn.Parameter(1 + torch.randn(H, R, N) / 4) for _ in range(2))
        self.B_norm, self.C_norm = Norm(N), Norm(N)
        if rank is not None:
            self.mimo_x, self.mimo_z, self.mimo_o = (nn.Parameter((1 + torch.randn(H, R, headdim) / 4) / s) for s in (R, 1, R))
        if norm:
            self.norm = Norm(inner, headdim)
        self.out_proj = nn.Linear(inner, d_model, bias=bias)
        for weight in (m.weight for m in (self.B_norm, self.C_norm, *([self.norm] if norm else []))):
            nn.init.uniform_(weight, 0.5, 1.5)
        nn.init.normal_(self.in_proj.weight, std=1.5 / math.sqrt(d_model))

    def fresh(self, batch: int) -> tuple[Tensor, ...]:
        """(angle, ssm, k, v): angle and ssm are f32, or f64 in layers of f64."""
        H, P, N, R, _ = self.sizes
        dtype, wide = self.out_proj.weight.dtype, torch.promote_types(self.out_proj.weight.dtype, torch.float32)
        shapes = ((H, self.num_rope_angles), wide), ((H, P, N), wide), ((R, H, N), dtype), ((H, P), dtype)
        return tuple([torch.zeros(batch, *shape, dtype=kind, device=self.D.device) for shape, kind in shapes])

    def turned(self, rows: Tensor, angle: Tensor) -> Tensor:
        """rows [batch, R, H, N] as complex numbers: neighbours, or of MIMO layers i and i + N / 2."""
        N, n = rows.shape[-1], angle.shape[-1]
        real, imaginary = (rows[..., : N // 2], rows[..., N // 2 :]) if self.is_mimo else (rows[..., ::2], rows[..., 1::2])
        full = nn.functional.pad(angle, (0, N // 2 - n))[:, None]
        z = torch.complex(real, imaginary) * torch.polar(torch.ones_like(full), full)
        return torch.cat([z.real, z.imag], -1) if self.is_mimo else torch.stack([z.real, z.imag], -1).flatten(-2)

    def token(self, u: Tensor, states: tuple[Tensor, ...]) -> Tensor:
        """One token, u [batch, d_model]; the states are written."""
        H, P, N, R, G = self.sizes
        angle, ssm, k, v = states
        z, x, B, C, dt, A, trap, a = self.in_proj(u).split([H * P, H * P, R * G * N, R * G * N, H, H, H, self.num_rope_angles], -1)
        x, z = x.unflatten(-1, (H, P)), z.unflatten(-1, (H, P))
        dt, trap = softplus(dt + self.dt_bias), trap.sigmoid()
        alpha = (-self.rate(A).clamp(min=self.A_floor) * dt).exp()
        theta = angle + math.pi * a.tanh()[:, None] * dt[..., None]

        def ready(rows: Tensor, norm: nn.Module, bias: Tensor) -> Tensor:
            rows = norm(rows.unflatten(-1, (R, G, N))).repeat_interleave(H // G, 2)
            return self.turned(rows + bias.transpose(0, 1), theta)

        new_k, q = ready(B, self.B_norm, self.B_bias), ready(C, self.C_norm, self.C_bias)
        ones = torch.ones(H, R, P, dtype=x.dtype, device=x.device)
        of_x, of_z, of_o = (self.mimo_x, self.mimo_z, self.mimo_o) if self.is_mimo else (ones, ones, ones)
        xs, vs = (t[:, :, None] * of_x for t in (x, v))  # [batch, H, R, P]
        before = ((1 - trap) * dt * alpha)[..., None, None] * (vs.mT @ k.transpose(1, 2))
        S = alpha[..., None, None] * ssm + before + (trap * dt)[..., None, None] * (xs.mT @ new_k.transpose(1, 2))
        y = q.transpose(1, 2) @ S.mT + self.D[:, None, None] * xs  # [batch, H, R, P]
        if self.is_outproj_norm:
            y = self.norm(y.transpose(1, 2).flatten(-2)).unflatten(-1, (H, P)).transpose(1, 2)
        out = (y * silu(z[:, :, None] * of_z) * of_o).sum(2)
        for state, new in zip(states, (theta, S, new_k, x), strict=True):
            state.copy_(new)
        return self.out_proj(out.flatten(-2))

    def prompt(self, u: Tensor, states: tuple[Tensor, ...], cu_seqlens: Tensor | None = None) -> Tensor:
        """u [batch, T, d_model], or packed sequences."""
        if cu_seqlens is None:
            tokens = [self.token(u[:, t], states) for t in range(u.shape[1])]
            return torch.stack(tokens, 1) if tokens else u
        pieces = []
        for i, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
            pieces.append(self.prompt(u[:, start:end], tuple(t[i : i + 1] for t in states)))
        return torch.cat(pieces, 1)


class OfMambaSsm(Layer):
    """Its `forward` and `step` have the meaning that the package's documentation gives them, also where its code fails."""

    def forward(self, u, seq_idx=None, cu_seqlens=None, inference_params=None):
        sequences = u.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        states = self.fresh(sequences) if inference_params is None else self._get_states_from_cache(inference_params, sequences)
        if inference_params is not None and inference_params.seqlen_offset == 0:
            for t in states:
                t.zero_()
        return self.prompt(u, states, cu_seqlens)

    def step(self, u, angle_state, ssm_state, k_state, v_state, **kwargs):
        states = angle_state, ssm_state, k_state, v_state
        return (self.token(u, states), *states)

    def allocate_inference_cache(self, batch_size, max_seqlen, device=None, dtype=None, inplace_state=None, **kwargs):
        return self.fresh(batch_size)

    def _get_states_from_cache(self, inference_params, batch_size, initialize_states=False):
        return inference_params.key_value_memory_dict.setdefault(self.layer_idx, self.fresh(batch_size))

    def _preprocess(self, A_proj, dd_dt, B, C, x, z, trap_proj, angle_proj):
        A = -heavy(A_proj.float()).clamp(min=self.A_floor)
        return softplus(dd_dt + self.dt_bias), self.B_norm(B), self.C_norm(C), x, z, trap_proj.sigmoid(), A, angle_proj


class OfRelease(OfMambaSsm):
    """mamba-ssm 2.3.2."""

    rate = staticmethod(softplus)

    def _preprocess(self, A_proj, dd_dt, B, C, x, z, trap_proj, angle_proj):
        A = -softplus(A_proj.float()).clamp(min=self.A_floor)
        return softplus(dd_dt + self.dt_bias), self.B_norm(B), self.C_norm(C), x, z, trap_proj.sigmoid(), A, angle_proj


class OfFla(Layer):
    rate = staticmethod(softplus)

    def forward(
        self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False, cu_seqlens=None, **kwargs
    ):
        batch, T, _ = hidden_states.shape
        known = past_key_values is not None and len(past_key_values) > self.layer_idx
        states = past_key_values[self.layer_idx]["recurrent_state"] if known else self.fresh(batch)
        mask = torch.ones(batch, T) if attention_mask is None else attention_mask[:, -T:]
        out = torch.zeros_like(hidden_states)
        for b in range(batch):
            kept = mask[b].nonzero().squeeze(1)
            out[b, kept] = self.prompt(hidden_states[b : b + 1, kept], tuple(t[b : b + 1] for t in states))[0]
        if past_key_values is not None:
            past_key_values.update(layer_idx=self.layer_idx, recurrent_state=states, offset=T)
        return out, None, past_key_values

    def cuda_kernels_forward(self, hidden_states, last_state=None, use_cache=False, cu_seqlens=None):
        raise AssertionError("fla's own kernels run")

    def step(self, hidden_states, angle_state, ssm_state, k_state, v_state):
        return self.token(hidden_states.squeeze(1), (angle_state, ssm_state, k_state, v_state)).unsqueeze(1)

    def allocate_inference_cache(self, batch_size, max_seqlen, device=None, dtype=None):
        return self.fresh(batch_size)

    def _compute_a(self, dd_A):
        return -softplus(dd_A.float()).clamp(min=self.A_floor)


class Cache:
    """fla's cache, as far as a layer sees it."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = []
        self.seen = 0

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.layers[layer_idx]

    def update(self, *, layer_idx: int, recurrent_state: Any, offset: int) -> None:
        self.layers += [{"recurrent_state": None} for _ in range(layer_idx + 1 - len(self.layers))]
        self.layers[layer_idx]["recurrent_state"] = recurrent_state
        self.seen += offset


def module_of(name: str, of: type[Layer], **more: Any) -> types.ModuleType:
    """A module that defines the class, a new one, as its package does."""
    made = types.ModuleType(name)
    made.Mamba3 = type("Mamba3", (of,), {n: v for n, v in vars(of).items() if callable(v)} | {"__module__": name})
    vars(made).update(more)
    return made


def twins(layer: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """(the layer or model with parameters rounded to dtype, the same in float64)"""
    rounded = copy.deepcopy(layer).to(dtype)
    return rounded, copy.deepcopy(rounded).double()
