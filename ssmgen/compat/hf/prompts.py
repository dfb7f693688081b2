"""Prompts of whole layers of transformers' models: `patch(fuse=True)` replaces a mixer's forward over several tokens with them.

Between the layer's projections there are the convolution, the scan and the gated norm, one call of ssmgen's each. A cache that has tokens
hands its windows and states to these calls, and gets new ones once all of them have been made: one that refuses has changed nothing.

A batch with padding is read as packed sequences: the tokens of all rows come first, row by row, then the padding; the calls get the start
of each row. A row then has the same states as in a batch of one, whatever projections make of zeros and wherever its padding is. Packing
never synchronises with the host: all shapes are the shapes of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import linear, pad

from ...families.causal_conv1d import call as native_conv
from ...families.chunk_delta_rule import call as native_delta
from ...families.chunk_linear_attention import call as native_linear
from ...families.chunk_scan import call as native_scan
from ...families.selective_scan import call as native_selective_scan
from ..shared.operands import rows_of
from . import projections, scaled
from .elsewhere import is_elsewhere
from .functions import call, limits
from .norms import gated_rms_norm

_ATTRIBUTE = "_ssmgen_packing"  # of a mask, with its version: all layers of a forward have the same mask
_PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")  # sequences that the caller has packed, which the functions of the layer are told of


class Packing(NamedTuple):
    """How a batch [batch, T] with padding is read as packed sequences [1, batch * T], and back."""

    place: Tensor  # [batch * T], of each token among the packed ones
    order: Tensor  # [batch * T], the token at each place
    starts: Tensor  # [batch + 1] int32, the place of each row's first token, and of the padding
    padding: Tensor  # [1, batch * T, 1] bool, places after all rows

    def pack(self, tokens: Tensor) -> Tensor:
        """[batch, T, channels] -> [1, batch * T, channels]"""
        packed: Tensor = tokens.flatten(0, 1).index_select(0, self.order)[None]
        return packed

    def unpack(self, packed: Tensor, batch: int) -> Tensor:
        """[1, batch * T, channels] -> [batch, T, channels]"""
        rows: Tensor = packed[0].index_select(0, self.place).unflatten(0, (batch, -1))
        return rows

    def window(self, packed: Tensor, width: int, before: Tensor | None) -> Tensor:
        """The last `width` inputs of each row, `before` followed by packed [1, batch * T, channels]: [batch, channels, width]."""
        first, end = self.starts[:-1, None], self.starts[1:, None]
        places = end + torch.arange(-width, 0, device=packed.device)
        own = (places >= first)[:, None]
        found: Tensor = packed[0].index_select(0, places.clamp(min=0).flatten()).unflatten(0, places.shape).transpose(1, 2)
        if before is None:
            return found.masked_fill(~own, 0)
        columns = (places - first + width).clamp(max=width - 1)[:, None].expand(-1, before.shape[1], -1)
        return torch.where(own, found, before.gather(2, columns))


def packing_of(mask: Tensor) -> Packing:
    """mask [batch, T]: 0 where a token is padding. Cached on the mask, unless the mask keeps no version counter that shows changes."""
    version = None if mask.is_inference() else mask._version
    known = getattr(mask, _ATTRIBUTE, None)
    if known is not None and known[0] == version:
        same: Packing = known[1]
        return same
    real = mask != 0
    counts, flat = real.sum(1), real.flatten()
    starts = pad(counts.cumsum(0), (1, 0))
    everyone = torch.arange(flat.numel(), device=mask.device)
    ahead = flat.cumsum(0)  # tokens up to this one, itself too
    place = torch.where(flat, ahead - 1, starts[-1] + everyone - ahead)
    order = torch.empty_like(everyone).scatter_(0, place, everyone)
    packing = Packing(place, order, starts.int(), (everyone >= starts[-1])[None, :, None])
    if version is not None:
        setattr(mask, _ATTRIBUTE, (version, packing))
    return packing


class Prompt(NamedTuple):
    """A layer's operands in addition to its tokens, [batch, T, ·] or packed [1, batch * T, ·]."""

    packing: Packing | None
    window: Tensor | None  # [batch, channels, width], inputs of the convolution from before
    state: Tensor | None
    keep: bool  # whether a state is asked for

    @property
    def starts(self) -> Tensor | None:
        return None if self.packing is None else self.packing.starts

    @property
    def scanned(self) -> dict[str, Any]:
        """The scans' arguments for sequences and states."""
        return {"cu_seqlens": self.starts, "initial_states": self.state, "return_final_states": self.keep}

    def of(self, scanned: Any) -> tuple[Tensor, Tensor | None]:
        """(a scan's output, the states)"""
        return scanned if self.keep else (scanned, None)

    def without_padding(self, tokens: Tensor) -> Tensor:
        """Zeros the padding in place: kernels do not write it, and projections may read it."""
        return tokens if self.packing is None else tokens.masked_fill_(self.packing.padding, 0)


Layer = Callable[[Any, Tensor, Prompt], tuple[Tensor, Tensor, Tensor | None]]
"""(mixer, hidden states, prompt) -> (the layer's output, its convolution's input [batch, T, channels], the states)"""


def convolved(mixer: Any, mixed: Tensor, prompt: Prompt) -> Tensor:
    """mixed [batch, T, channels] -> a new tensor like it"""
    conv = mixer.conv1d
    before = None if prompt.window is None else prompt.window[..., 1:]
    out: Tensor = call(
        native_conv.causal_conv1d, mixed.transpose(1, 2), conv.weight.squeeze(1), conv.bias, activation="silu", initial_states=before,
        query_start_loc=prompt.starts,
    )  # fmt: skip
    return out.transpose(1, 2)


def mamba2(project: Callable[[Any, Tensor], Tensor], mixer: Any, hidden_states: Tensor, prompt: Prompt) -> Any:
    """A Layer, of Mamba2Mixer and its kin; project: the in-projection."""
    heads, inner, width = mixer.num_heads, mixer.num_heads * mixer.head_dim, mixer.n_groups * mixer.ssm_state_size
    z, mixed, dt = project(mixer, hidden_states).split([inner, inner + 2 * width, heads], dim=-1)
    x, B, C = convolved(mixer, mixed, prompt).split([inner, width, width], dim=-1)
    normed = mixer.__dict__.get("mamba_rms_norm", True)  # Falcon-H1 may have a gate by itself
    scanned = call(
        native_scan.chunk_scan, x.unflatten(-1, (heads, -1)), dt, -torch.exp(mixer.A_log.float()), B.unflatten(-1, (mixer.n_groups, -1)),
        C.unflatten(-1, (mixer.n_groups, -1)), mixer.D, None if normed else rows_of(z.unflatten(-1, (heads, -1))), mixer.dt_bias, True,
        dt_limit=limits(True, mixer.time_step_limit), **prompt.scanned,
    )  # fmt: skip
    y, state = prompt.of(scanned)
    y = y.flatten(-2)
    y = prompt.without_padding(gated_rms_norm(mixer.norm, y, z) if normed else y)
    return mixer.out_proj(y.to(hidden_states.dtype)), mixed, state


def mamba(mixer: Any, hidden_states: Tensor, prompt: Prompt) -> Any:
    """A Layer, of MambaMixer and its kin, whose own forward begins every prompt from a state of zeros."""
    mixed, z = mixer.in_proj(hidden_states).chunk(2, dim=-1)
    u = prompt.without_padding(convolved(mixer, mixed, prompt))
    dt, B, C = mixer.x_proj(u).split([mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size], dim=-1)
    if hasattr(mixer, "dt_layernorm"):
        dt, B, C = mixer.dt_layernorm(dt), mixer.b_layernorm(B), mixer.c_layernorm(C)
    rates, bias = mixer.dt_proj.weight, mixer.dt_proj.bias
    scanned = call(
        native_selective_scan.selective_scan, u, linear(dt, rates), -torch.exp(mixer.A_log.float()), B, C, mixer.D, z, bias,
        delta_softplus=True, **prompt.scanned,
    )  # fmt: skip
    y, state = prompt.of(scanned)
    return mixer.out_proj(prompt.without_padding(y)), mixed, state


def gated_delta_net(project: Callable[[Any, Tensor], tuple[Tensor, ...]], mixer: Any, hidden_states: Tensor, prompt: Prompt) -> Any:
    """A Layer, of Qwen3NextGatedDeltaNet and its kin; project: the in-projections."""
    mixed, z, b, a = project(mixer, hidden_states)
    q, k, v = convolved(mixer, mixed, prompt).split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    keys, values = (-1, mixer.head_k_dim), (-1, mixer.head_v_dim)
    scanned = call(
        native_delta.chunk_gated_delta_rule, q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values), a, b, mixer.A_log,
        mixer.dt_bias, use_qk_l2norm=True, beta_sigmoid=True, state_layout="kv", **prompt.scanned,
    )  # fmt: skip
    y, state = prompt.of(scanned)
    y = gated_rms_norm(mixer.norm, y, z.unflatten(-1, values)).flatten(-2)
    return mixer.out_proj(prompt.without_padding(y)), mixed, state


def kimi_delta_attention(
    project: Callable[[Any, Tensor], tuple[Tensor, Tensor]], bound_of: Callable[[Any], float | None], mixer: Any, hidden_states: Tensor,
    prompt: Prompt,
) -> Any:  # fmt: skip
    """A Layer, of KimiLinearDeltaAttention and its kin; project: makes the gates; bound_of: their lower bound."""
    mixed = projections.qkv(mixer, hidden_states)
    gate, z = project(mixer, hidden_states)
    q, k, v = (t.unflatten(-1, (mixer.num_heads, -1)) for t in convolved(mixer, mixed, prompt).chunk(3, dim=-1))
    forget, norm = mixer.forget_gate, mixer.o_norm
    scanned = call(
        native_linear.chunk_kda, q, k, v, gate.unflatten(-1, (mixer.num_heads, -1)), mixer.b_proj(hidden_states), forget.A_log.flatten(),
        forget.dt_bias, lower_bound=bound_of(forget), use_qk_l2norm=True, beta_sigmoid=True, state_layout="kv", **prompt.scanned,
    )  # fmt: skip
    y, state = prompt.of(scanned)
    y = gated_rms_norm(norm, y, z.unflatten(-1, (mixer.num_heads, -1))).flatten(-2)
    return mixer.o_proj(prompt.without_padding(y)), mixed, state


def is_prompt(mixer: Any, hidden_states: Tensor, cache: Any, mask: Tensor | None, others: dict[str, Any]) -> bool:
    """Whether a forward runs over a prompt and may be fused. others: its further arguments."""
    if is_compiling() or torch.is_grad_enabled() or mixer.activation not in ("silu", "swish"):
        return False
    if any(others.get(name) is not None for name in _PACKED) or (mask is not None and mask.shape != hidden_states.shape[:2]):
        return False
    if any(is_elsewhere(getattr(mixer, name)) for name in ("conv1d", "dt_proj") if hasattr(mixer, name)):
        return False
    if hasattr(mixer, "dt_proj") and hasattr(getattr(mixer, "config", None), "_is_quantized"):  # its weight is not all that it does
        return False
    if cache is None:
        return True
    layer = cache.layers[mixer.layer_idx]
    going_on = cache.has_previous_state(mixer.layer_idx, state_idx=0)
    return not getattr(layer, "record_past", False) and (hidden_states.shape[1] > 1 or not going_on)


def run(layer: Layer, mixer: Any, hidden_states: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    """A layer's forward over a prompt, hidden_states [batch, T, hidden], of a cache or none."""
    window = state = None
    if cache is not None and cache.has_previous_state(mixer.layer_idx, state_idx=0):
        known = cache.layers[mixer.layer_idx]
        window, state = known.conv_states[0], known.recurrent_states[0]
    packing = None if mask is None else packing_of(mask)
    prompt = Prompt(packing, window, state, cache is not None)
    if packing is None:
        out, mixed, state = layer(mixer, hidden_states, prompt)
    else:
        with scaled.nothing_after():  # out is not yet the layer's result
            out, mixed, state = layer(mixer, packing.pack(hidden_states), prompt)
    if cache is not None:
        width = mixer.conv_kernel_size
        last = mixed[:, -width:].transpose(1, 2) if packing is None else packing.window(mixed, width, window)
        cache.update_conv_state(last, mixer.layer_idx, conv_kernel_size=width)
        cache.update_recurrent_state(state, mixer.layer_idx)
    return out if packing is None else packing.unpack(out, hidden_states.shape[0])
