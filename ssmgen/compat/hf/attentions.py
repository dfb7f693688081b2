"""Attention layers of accelerated models: after the products of q, k and v, a decode step is one launch of decode_attention.

A layer is replaced where its forward uses known parts alone, and only in steps that have Positions. Its first step is transformers' own,
which ours is compared with; where they differ, the layer's own stays.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...calls.checks import DTYPES
from ...errors import ArgumentError, NotBuiltError
from ...families.decode_attention.call import decode_attention
from . import found, positions, rotations, scaled
from .elsewhere import is_elsewhere
from .norm_styles import Style, style_of
from .roles import Roles, name_in, plain

PRODUCTS = ("q_proj", "k_proj", "v_proj")
OUTS = ("o_proj", "out_proj")
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
KNOWN = frozenset(
    [
        "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb", "attention_dropout", "chunk", "config",
        "contiguous", "eager_attention_forward", "get_interface", "head_dim", "is_causal", "k_layernorm", "k_norm", "k_proj",
        "key_multiplier", "layer_dic", "layer_idx", "linear_k_adapter_list", "linear_q_adapter_list", "linear_v_adapter_list",
        "num_heads", "num_key_value_groups", "num_key_value_heads", "o_proj", "out_proj", "q_layernorm", "q_norm", "q_proj",
        "reshape", "scaling", "shape", "sigmoid", "torch", "training", "transpose", "update", "use_mem_rope",
        "use_shared_attention_adapter", "v_proj", "view",
    ]
)  # fmt: skip
"""Names in the code of a forward that this module knows the meaning of. Windows, sinks and soft caps have others."""
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Norm error of a layer's step against its own, which rounds after every operation."""
IMPLEMENTATIONS = ("sdpa", "eager")

_roles = cache(lambda kind: Roles(kind.forward, "hidden_states", "position_embeddings", "attention_mask", "cache", "layer_idx"))
_refused: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()  # layers whose first step differed, and how


class Parts(NamedTuple):
    """The parts in which attention layers differ. norms: of q and k; of each head, or of all heads together"""

    out: Any
    norms: tuple[Any, ...]
    style: Style | None
    of_heads: bool
    gated: bool
    rotated: tuple[bool, bool]  # whether its rotation may turn all channels, whether it may turn the first ones
    key_scale: float


class Step(NamedTuple):
    """One token's call of a layer. layer: of the cache"""

    hidden_states: Tensor
    angles: tuple[Tensor, Tensor] | None
    layer: Any


def parts_of(module: Any) -> Parts | None:
    """The parts of an attention layer; None for a layer that decode_attention does not compute."""
    kind = type(module)
    if not kind.__name__.endswith("Attention") or not found.is_modeling(kind.__module__) or "forward" in module.__dict__:
        return None
    layers = {name: m for name, m in module.named_children() if not (isinstance(m, torch.nn.ModuleList) and not len(m))}
    out = next((name for name in OUTS if name in layers), "")
    norms = next((pair for pair in NORMS if pair[0] in layers), ())
    names = frozenset(getattr(getattr(plain(kind.forward), "__code__", None), "co_names", ("unknown",)))
    if layers.keys() != {*PRODUCTS, out, *norms} or names - KNOWN or any(True for _ in module.parameters(recurse=False)):
        return None
    if not all(isinstance(layers[name], torch.nn.Linear) for name in (*PRODUCTS, out)) or name_in("cache", _parameters(kind)) is None:
        return None
    d, scaling = getattr(module, "head_dim", None), getattr(module, "scaling", None)
    if not isinstance(d, int) or not isinstance(scaling, (int, float)) or d % 8 or not 8 <= d <= 256:
        return None
    q, k, v = (layers[name].out_features for name in PRODUCTS)
    channels, key_scale = layers[out].in_features, getattr(module, "key_multiplier", 1.0) if "key_multiplier" in names else 1.0
    gated = q == 2 * channels
    fits = q in (channels, 2 * channels) and k == v and k % d == 0 and channels % k == 0 and gated == ("sigmoid" in names)
    if not fits or not isinstance(key_scale, (int, float)):
        return None
    both = tuple(layers[name] for name in norms)
    style = style_of(type(both[0])) if both else None
    sizes = [norm.weight.numel() if isinstance(getattr(norm, "weight", None), Tensor) else 0 for norm in both]
    of_heads = sizes == [d, d]
    if both and (style is None or style != style_of(type(both[1])) or not style.weighted or style.grouped or any(map(is_elsewhere, both))):
        return None
    if both and not of_heads and sizes != [channels, k]:
        return None
    turns = "apply_rotary_pos_emb" in names and getattr(module.config, "use_mem_rope", True)
    function = getattr(sys.modules[kind.__module__], rotations.NAME, None) if turns else None
    rotated = (False, False) if function is None else rotations.kinds(getattr(function, "original", function))
    if turns and not any(rotated):
        return None
    return Parts(layers[out], both, style, of_heads, gated, rotated, float(key_scale))


def _parameters(kind: Any) -> dict[str, Any]:
    return dict.fromkeys(plain(kind.forward).__code__.co_varnames)


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention layer."""
    now = positions.current()
    kind: Any = type(self)
    if now is None or is_compiling():
        return kind.forward(self, *args, **kwargs)
    parts: Parts = self.__dict__["_ssmgen_parts"]
    step = _step(self, parts, now, args, kwargs)
    place = None if step is None else (id(self), id(step.layer))
    known = False if place is None else now.attends.get(place)
    if step is not None and known:
        now.appended(step.layer)
        return attention(self, parts, step, now.ids), None
    if step is None or known is not None or positions.captured(step.hidden_states):
        return kind.forward(self, *args, **kwargs)
    with scaled.nothing_after():  # of two outputs that are compared
        own = kind.forward(self, *args, **kwargs)
        scaled.prepare_again(self.q_proj, step.hidden_states)
        why = _difference(self, parts, step, now, own)
        now.attends[place] = not why
        if why:
            _refused[self] = why
    return own


def _step(self: Any, parts: Parts, now: Any, args: Any, kwargs: Any) -> Step | None:
    """The call, if it is a step of one token per sequence that decode_attention can compute."""
    kind: Any = type(self)
    roles = _roles(kind)
    x, angles, mask, cache_, index, others = roles(args, kwargs)
    if roles.unknown(others) or others.get("output_attentions") or self.training or torch.is_grad_enabled():
        return None
    if getattr(self.config, "_attn_implementation", None) not in IMPLEMENTATIONS or not now.may_be_causal(mask):
        return None
    index = getattr(self, "layer_idx", None) if index is None else index
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[:2] != now.ids.shape or cache_ is None or not isinstance(index, int):
        return None
    layer = cache_.layers[index] if index < len(cache_.layers) else None
    if layer is None or not now.takes(layer) or {x.dtype, layer.keys.dtype} - DTYPES.keys():
        return None
    if not x.device == now.ids.device == layer.keys.device:
        return None
    if not any(parts.rotated) or angles is None:  # layers without a rotation may be given cos and sin
        return Step(x, None, layer)
    cos, sin = angles
    whole, part = parts.rotated
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[1] != 1 or cos.shape[0] not in (1, x.shape[0]):
        return None
    return Step(x, (cos[:, 0], sin[:, 0]), layer) if (whole if cos.shape[-1] == self.head_dim else part) else None


def attention(self: Any, parts: Parts, step: Step, ids: Tensor) -> Tensor:
    """The layer's output [batch, 1, channels]; the cache gets the new key and value. ids: [batch, 1], the number of keys before them."""
    x, d = step.hidden_states, self.head_dim
    q, k, v = (layer(x)[:, 0] for layer in (self.q_proj, self.k_proj, self.v_proj))
    gate = None
    if parts.gated:
        q, gate = q.unflatten(-1, (-1, 2 * d)).split(d, dim=-1)
        q = q.flatten(-2) if parts.norms and not parts.of_heads else q
    if parts.norms and not parts.of_heads:
        q, k = (norm(t) for norm, t in zip(parts.norms, (q, k), strict=True))
    more: dict[str, Any] = {}
    if parts.of_heads and parts.style is not None:
        q_norm, k_norm = parts.norms
        eps = getattr(q_norm, parts.style.eps)
        more = {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": eps, "unit_offset": parts.style.unit_offset}
    if step.angles is not None:
        more["cos"], more["sin"] = step.angles
    q, k, v = (t if t.dim() == 3 else t.unflatten(-1, (-1, d)) for t in (q, k, v))
    out = decode_attention(
        q, k, v, step.layer.keys, step.layer.values, ids.view(-1), gate=gate, key_scale=parts.key_scale, scale=float(self.scaling), **more
    )
    result: Tensor = parts.out(out.flatten(1)[:, None])
    return result


def _difference(self: Any, parts: Parts, step: Step, now: Any, own: Any) -> str:
    """How the layer's own step, which has just been made, differs from ours, in words; empty if it does not."""
    layer, ids = step.layer, now.ids.view(-1)
    rows = (torch.arange(len(ids), device=ids.device), slice(None), ids)
    before = layer.keys[rows], layer.values[rows]
    if not now.counts_are_positions(layer):
        return "its cache is not as long as its positions say"
    try:
        got = attention(self, parts, step, now.ids)
    except (ArgumentError, NotBuiltError) as e:
        return f"decode_attention does not compute it: {e}"
    after = layer.keys[rows], layer.values[rows]
    same = isinstance(own, tuple) and all(_agree(a, b) for a, b in zip((got, *after), (own[0], *before), strict=True))
    layer.keys[rows], layer.values[rows] = before
    return "" if same else "its results differ from those of decode_attention"


def _agree(got: Tensor, want: Tensor) -> bool:
    """Whether values are equal up to rounding; of tensors without memory, shapes and types."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return got.is_meta or bool((got.float() - want.float()).norm() <= LIMITS[got.dtype] * want.float().norm())


class Attentions:
    """The attention layers of a model whose decode steps are ours. `undo` puts transformers' own back."""

    def __init__(self, model: torch.nn.Module):
        self.modules: list[Any] = []
        for module in model.modules():
            if (parts := parts_of(module)) is not None:
                self.modules.append(module)
                module.__dict__["_ssmgen_parts"], module.__dict__["forward"] = parts, MethodType(forward, module)

    @property
    def words(self) -> tuple[list[str], list[str]]:
        """(the replaced layers, the others), for a report after a first step."""
        refused = Counter(_refused[m] for m in self.modules if m in _refused)
        count = len(self.modules) - refused.total()
        done = f"{count} attention layers take decode steps by decode_attention: rotation, cache and attention are one launch"
        return [done] * (count > 0), [f"{n} attention layers stay transformers': {why}" for why, n in refused.items()]

    def undo(self) -> None:
        """A second time: nothing."""
        for module in self.modules:
            if getattr(module.__dict__.get("forward"), "__func__", None) is forward:
                del module.__dict__["forward"], module.__dict__["_ssmgen_parts"]
            _refused.pop(module, None)
        self.modules = []
