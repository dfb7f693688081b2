"""Random small models of Mamba-2, gated delta rule and KDA layers with real head widths, decoded token by token.

Layers have a short convolution with SiLU, so that inputs of the recurrence have a mean, as in trained models. All but the recurrence runs
over the whole sequence at once. The first axis of all tensors is the decay per token, of which `DECAYS` has several.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from .formats import Format, Noise

DECAYS = (0.9, 0.99, 0.999, 0.9999)  # per token, about
VOCABULARY, WIDTH, LAYERS, TAPS = 1024, 256, 2, 4
SHARPNESS = 3.0  # standard deviation of logits
EPSILON = 1e-5
MAMBA_HEADS, HEADDIM, D_STATE = 4, 64, 128  # Mamba-2, Nemotron-H
DELTA_HEADS, CHANNELS = 2, 128  # Qwen3.5, Kimi-Linear: K = V = 128


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON)


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def raw_of(step: Tensor) -> Tensor:
    """softplus of this is step, which is positive."""
    return torch.log(torch.expm1(step))


class Weights:
    """Random matrices in the order in which a model asks for them; the same for each format."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        """[rows, columns], whose products with numbers of size 1 have size `scale`."""
        return (torch.randn(rows, columns, generator=self.generator, dtype=torch.float64) * (scale * rows**-0.5)).to(self.dtype)

    def uniform(self, count: int, low: float, high: float) -> Tensor:
        return (torch.rand(count, generator=self.generator, dtype=torch.float64) * (high - low) + low).to(self.dtype)


Layer = Callable[[Tensor, Weights, "Run"], Tensor]


def rates(count: int, weights: Weights) -> Tensor:
    """[decays, count]: minus the log decays of heads or channels, up to e times and 1/e of their mean."""
    mean = -torch.log(torch.tensor(DECAYS, dtype=torch.float64)).to(weights.dtype)
    return mean[:, None] * torch.exp(weights.uniform(count, -1.0, 1.0))


class Run:
    """How a run computes: the format of its states, and its types."""

    def __init__(self, form: Format | None, seed: int, token: int = 0):
        """form: None for float64, without any rounding; token: after which a state is rounded that is rounded once"""
        self.dtype = torch.float64 if form is None else torch.float32
        self.form, self.noise, self.token = form, Noise(seed), token

    def stored(self, state: Tensor, token: int) -> Tensor:
        """The state after a token."""
        if self.form is None or self.form.rounded is None or (self.form.once and token != self.token):
            return state
        return self.form.rounded(state, self.noise.like(state))

    def given(self, x: Tensor) -> Tensor:
        """An input of the recurrence."""
        return x.bfloat16().to(self.dtype) if self.form is not None and self.form.inputs else x


def convolved(x: Tensor, weights: Weights) -> Tensor:
    """[decays, T, channels] -> the same: a causal convolution of each channel, and SiLU."""
    channels = x.shape[-1]
    taps = weights(TAPS, channels).t()[:, None]
    padded = torch.nn.functional.pad(x.transpose(1, 2), (TAPS - 1, 0))
    return silu(conv1d(padded, taps, groups=channels)).transpose(1, 2)


def mamba2(x: Tensor, weights: Weights, run: Run) -> Tensor:
    """h <- exp(dt A) h + dt x B;  y = C h, gated by silu(z), then normed. There is no D x, so that all of y comes from the state."""
    inner = MAMBA_HEADS * HEADDIM
    z, xBC = x @ weights(WIDTH, inner), convolved(x @ weights(WIDTH, inner + 2 * D_STATE), weights)
    A = -weights.uniform(MAMBA_HEADS, 1.0, 16.0)
    dt = softplus(x @ weights(WIDTH, MAMBA_HEADS, 0.5) + raw_of(rates(MAMBA_HEADS, weights) / -A)[:, None])
    u, b, c = xBC.split([inner, D_STATE, D_STATE], -1)
    u = run.given(u).unflatten(-1, (MAMBA_HEADS, HEADDIM))
    y = mamba2_steps(u * dt[..., None], run.given(b), run.given(c), torch.exp(dt * A), run)
    return norm(y * silu(z)) @ weights(inner, WIDTH)


def mamba2_steps(du: Tensor, b: Tensor, c: Tensor, decay: Tensor, run: Run) -> Tensor:
    """[B, T, H P], from du [B, T, H, P], b, c [B, T, N] and decay [B, T, H]."""
    B, T, H, P = du.shape
    N, inner = b.shape[-1], H * P
    h, out = du.new_zeros(B, inner, N), du.new_empty(B, T, inner)
    for t in range(T):
        h.view(B, H, -1).mul_(decay[:, t, :, None])
        h.baddbmm_(du[:, t].reshape(B, inner, 1), b[:, t, None])
        out[:, t] = torch.bmm(h, c[:, t, :, None]).squeeze(2)
        h = run.stored(h, t)
    return out


def delta(x: Tensor, weights: Weights, run: Run, by_channel: bool, beta_mean: float = 0.5) -> Tensor:
    """S <- S D + beta (v - S D k) k^T;  o = K^-0.5 S q, normed by head and gated. D is a decay per head, or per key channel."""
    H, K = DELTA_HEADS, CHANNELS
    inner = H * K
    z, qkv = x @ weights(WIDTH, inner), convolved(x @ weights(WIDTH, 3 * inner), weights)
    q, k, v = (t.unflatten(-1, (H, K)) for t in qkv.split(inner, -1))
    beta = torch.sigmoid(x @ weights(WIDTH, H) + math.log(beta_mean / (1 - beta_mean)))
    gates = inner if by_channel else H
    decay = torch.exp(-softplus(x @ weights(WIDTH, gates, 0.5) + raw_of(rates(gates, weights))[:, None]))
    q, k, v = (run.given(t) for t in (unit(q) * K**-0.5, unit(k), v))
    out = delta_steps(q, k, v, decay.unflatten(-1, (H, -1)), beta, run)
    gate = torch.sigmoid(z) if by_channel else silu(z)
    return (norm(out).flatten(2) * gate) @ weights(inner, WIDTH)


def delta_steps(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, run: Run) -> Tensor:
    """[B, T, H, V], from q, k [B, T, H, K], v [B, T, H, V], decay [B, T, H, 1 or K] and beta [B, T, H]."""
    B, T, H, K = k.shape
    V = v.shape[-1]
    S, out = v.new_zeros(B * H, V, K), torch.empty_like(v)
    for t in range(T):
        key = k[:, t].reshape(B * H, K, 1)
        S.mul_(decay[:, t].reshape(B * H, 1, -1))
        error = (v[:, t].reshape(B * H, V, 1) - torch.bmm(S, key)).mul_(beta[:, t].reshape(B * H, 1, 1))
        S.baddbmm_(error, key.transpose(1, 2))
        out[:, t] = torch.bmm(S, q[:, t].reshape(B * H, K, 1)).view(B, H, V)
        S = run.stored(S, t)
    return out


LAYERS_OF: dict[str, Layer] = {
    "Mamba-2": mamba2,
    "gated delta rule": lambda x, weights, run: delta(x, weights, run, by_channel=False),
    "gated delta rule, beta 0.02": lambda x, weights, run: delta(x, weights, run, by_channel=False, beta_mean=0.02),
    "KDA": lambda x, weights, run: delta(x, weights, run, by_channel=True),
}


def last_hidden(kind: str, tokens: int, run: Run, seed: int) -> Tensor:
    """[decays, tokens, WIDTH]: the normed residual stream after the last layer, for random tokens."""
    weights = Weights(seed, run.dtype)
    words = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed + 1))
    embedding = weights(VOCABULARY, WIDTH, math.sqrt(VOCABULARY))
    x = embedding[words].expand(len(DECAYS), tokens, WIDTH)
    for _ in range(LAYERS):
        x = x + LAYERS_OF[kind](norm(x), weights, run)
    return norm(x)


def head(seed: int) -> Tensor:
    """[WIDTH, VOCABULARY] float64: the logits are the normed hidden state times this."""
    return Weights(seed + 2, torch.float64)(WIDTH, VOCABULARY, SHARPNESS)
