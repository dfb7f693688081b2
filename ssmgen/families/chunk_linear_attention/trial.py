"""Trials of chunk_linear_attention: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.chunks.problem import cut_from
from ...engine.chunks.trial import rows, sequences, tokens_of
from ...engine.recurrences.attention.problem import Gate
from ...engine.trial import Trial, randn, trial
from ...spec.kernel import DType, Layout, Loads
from .chain import ChainSpec
from .operands import OPERANDS
from .planning import CALLERS, Options
from .problem import Rule
from .spec import workspace_for

HEADS, KEY_HEADS = 2, 1
LOWER_BOUND = -2.0
# More than one rounding's norm error: E, Q, W, T, P, states and additions to states are each rounded before a product.
SLACK = {DType.BF16: 1e-2, DType.F16: 1.6e-3}


def operands(spec: ChainSpec, batch: int, seed: int, tokens: int = 0) -> dict[str, Tensor]:
    """Sequences longer than a chunk, or long enough to be cut into segments, with at least `tokens` tokens; packed ones also shorter, of
    one token and without tokens."""
    g = torch.Generator().manual_seed(seed)
    chunk = spec.rule.tokens
    length = max((cut_from(spec.segment_chunks) if spec.divided else 1) * chunk + 5, tokens)
    lead, counts = tokens_of(spec, batch, length, chunk)
    made = {name: _rows(spec, lead, name, g) for name in OPERANDS.alike("v")}
    made["out"].fill_(float("nan"))
    made |= _gates(spec, lead, g)
    state = (spec.head_k, spec.head_v) if spec.layout is Layout.KV else (spec.head_v, spec.head_k)
    made |= sequences(spec, batch, lead, counts, (HEADS, *state), chunk, g)
    segments = spec.segments if spec.divided else 1
    size = workspace_for(lead[0] * lead[1], batch, HEADS, spec.head_k, spec.head_v, spec.rule, segments, lead[1])
    made["workspace"] = torch.full((size,), 0xFF, dtype=torch.uint8)
    used = {name for part in spec.kernels for name in part.operands()}
    return {name: made[name] for name in OPERANDS.names if name in used}


def _rows(spec: ChainSpec, lead: tuple[int, ...], name: str, g: Generator) -> Tensor:
    if name in ("v", "out"):
        return rows(spec, lead, HEADS, spec.head_v, g)
    long = name in ("k", "read", "write") and not spec.l2norm  # longer keys than 1 make the state grow
    return rows(spec, lead, KEY_HEADS, spec.head_k, g, spec.head_k**0.5 * (1 if name == "k" else 2) if long else 1.0)


def _gates(spec: ChainSpec, lead: tuple[int, ...], g: Generator) -> dict[str, Tensor]:
    """All operands with a separate dtype: per head, or per channel, and then aligned if the spec requires that."""
    odd, per_channel = spec.loads is Loads.ELEMENT, (HEADS, spec.head_k)
    bias = per_channel if spec.gk is not None else (HEADS,)
    shapes = {
        "g": (*lead, HEADS), "beta": (*lead, HEADS), "gk": (*lead, *per_channel), "erase": (*lead, *per_channel),
        "alpha": (*lead, KEY_HEADS, spec.head_k), "A_log": (HEADS,), "dt_bias": bias,
    }  # fmt: skip
    made = {}
    for name, shape in shapes.items():
        if (dtype := getattr(spec, name)) is not None:
            made[name] = randn(dtype, *shape, odd=odd, g=g) if shape[-2:] == per_channel or name == "alpha" else _dense(dtype, shape, g)
            made[name].abs_().clamp_(max=1)
    for name in ("g", "gk"):
        if name in made and spec.gate is Gate.LOG:
            made[name].mul_(-0.2)
    return {name: t.neg_() if name in ("A_log", "dt_bias") else t for name, t in made.items()}


def _dense(dtype: DType, shape: tuple[int, ...], g: Generator) -> Tensor:
    return torch.randn(shape, generator=g).to(TORCH_DTYPES[dtype])


def chunk_linear_attention(spec: ChainSpec, batch: int, seed: int, tokens: int = 0) -> Trial:
    options = Options(
        spec.rule.value, spec.gate.value, spec.beta_form.value, spec.l2norm, spec.head_k**-0.5, LOWER_BOUND, spec.layout.value,
        segments=spec.segments,
    )  # fmt: skip
    named = operands(spec, batch, seed, tokens)
    slack = dict.fromkeys(OPERANDS.written, SLACK[spec.x])
    return trial(CALLERS[_function(spec)], named, options, slack=slack, between=("workspace",))


def _function(spec: ChainSpec) -> str:
    """The public function whose calls pose such problems."""
    if spec.rule is Rule.LOW_RANK:
        return "chunk_rwkv7" if spec.alpha is not None else "chunk_dplr_delta_rule"
    by_rule = {Rule.PLAIN: "chunk_gla", Rule.OLD: "chunk_comba", Rule.DELTA: "chunk_gdn2" if spec.erase is not None else "chunk_kda"}
    return by_rule[spec.rule]


TRIALS = {ChainSpec: chunk_linear_attention}
