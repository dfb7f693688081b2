"""Positions of decode steps on a StaticCache, which transformers recomputes in every layer: the place of a key, the mask, cos and sin.

All counters lie in one tensor, which a launch advances. A mask is one comparison, and cos and sin are looked up in a table that the model's
own rotary embedding has made. Both are compared with the model's own at the first step; where they differ, the model's own stay.
"""

from __future__ import annotations

import inspect
import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .roles import name_in, plain

LAYERS = ("StaticLayer", "LinearAttentionAndStaticFullAttentionLayer")
"""Classes of layers of a cache that append keys and values at `cumulative_length`."""
FIXED = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotary embeddings whose frequencies do not depend on the length."""
ADDED = ("falcon_h1", "nemotron_h", "qwen3_5_text")
"""Models whose attention adds a mask to its scores. It is given as 0 and -inf: of booleans, attention makes these in every layer."""


class _Now(threading.local):
    positions: Positions | None = None  # of the step that this thread runs


_now = _Now()


def is_step() -> bool:
    """Whether this thread runs a step that has Positions."""
    return _now.positions is not None


def current() -> Positions | None:
    """The positions of the step that this thread runs."""
    return _now.positions


class Positions:
    """The positions of the next token, one per sequence, and how many keys each layer of the cache has."""

    def __init__(self, model: Any, kv: Any, batch: int, room: int, device: torch.device):
        layers = [layer for layer in kv.layers if _appends(layer)]
        self.memory = torch.zeros(batch + len(layers), dtype=torch.long, device=device)
        self.ids = self.memory[:batch].view(batch, 1)
        self.columns = torch.arange(room, device=device)
        self.counts = {id(layer): self.memory[batch + i] for i, layer in enumerate(layers)}
        self.tables: dict[Any, Tensor | None] = {}
        self.masks: dict[str, Tensor | None] | None = None
        self.attends: dict[Any, bool] = {}  # (attention layer, layer of the cache): whether its steps are ours (`attentions.py`)
        self._model, self._cache, self._looked = model, kv, False
        self._filled = False
        self._updated: list[int] = []
        for layer in layers:
            layer.cumulative_length = self.counts[id(layer)]
            layer.update, layer.get_seq_length = MethodType(_update, layer), MethodType(_length, layer)

    @contextmanager
    def step(self) -> Iterator[dict[str, Any]]:
        """One token's step: gives the model's argument for masks, if any, and advances all positions at the end."""
        self._updated.clear()
        before, _now.positions = _now.positions, self
        try:
            if not self._looked and not captured(self.memory):
                self._looked, self.masks = True, self._made_masks()
            self._filled = False
            if not self._needs_no_mask():
                self.fill()
            yield {} if self.masks is None else {"attention_mask": self.masks}
        finally:
            _now.positions = before
        if sorted(self._updated) == sorted(self.counts):
            self.memory.add_(1)
        else:
            self.ids.add_(1)
            for one in self._updated:
                self.counts[one].add_(1)

    def _needs_no_mask(self) -> bool:
        """Whether decode_attention has all layers of the cache. A layer that needs the mask nevertheless calls `fill`."""
        ours = {layer for (_, layer) in self.attends} if all(self.attends.values()) else set()
        return bool(ours) and ours == {id(layer) for layer in self._cache.layers if isinstance(getattr(layer, "keys", None), Tensor)}

    def fill(self) -> None:
        """Computes the masks of the step, once."""
        if self._filled or self.masks is None:
            return
        self._filled = True
        mask = next((mask for mask in self.masks.values() if mask is not None), None)  # all kinds have the same one
        if mask is None:
            return
        if mask.dtype == torch.bool:
            torch.le(self.columns, self.ids[:, :, None, None], out=mask)
        else:
            torch.where(self.columns <= self.ids[:, :, None, None], self._seen, self._hidden, out=mask)

    def update(self, layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Writes a token's keys and values. The count follows at the end of the step."""
        self.fill()  # the attention that follows is not ours
        count = self.counts.get(id(layer))
        if count is None or layer.cumulative_length is not count or not layer.is_initialized or keys.shape[-2] != 1:
            return type(layer).update(layer, keys, values, *args, **kwargs)
        if id(layer) in self._updated:  # a second token of this step
            self._updated.remove(id(layer))
            count.add_(1)
            return type(layer).update(layer, keys, values, *args, **kwargs)
        self._updated.append(id(layer))
        layer.keys.index_copy_(2, count.view(1), keys)
        layer.values.index_copy_(2, count.view(1), values)
        return layer.keys, layer.values

    def takes(self, layer: Any) -> bool:
        """Whether a layer's next key is the step's first one, and belongs at `ids`."""
        count = self.counts.get(id(layer))
        return count is not None and layer.cumulative_length is count and layer.is_initialized and id(layer) not in self._updated

    def appended(self, layer: Any) -> None:
        """Notes that a layer has its key and value. The count follows at the end of the step."""
        self._updated.append(id(layer))

    def counts_are_positions(self, layer: Any) -> bool:
        count = self.counts[id(layer)]
        return count.is_meta or bool((self.ids == count).all())

    def may_be_causal(self, mask: Any) -> bool:
        """Whether a mask shows a token all keys before it; of a mask that the model has made, only its shape is looked at."""
        if self.masks is not None:
            return mask is None or any(mask is ours for ours in self.masks.values())
        return mask is None or (isinstance(mask, Tensor) and mask.shape[-1] == len(self.columns))

    def length(self, layer: Any) -> Any:
        found = type(layer).get_seq_length(layer)
        return found + 1 if id(layer) in self._updated else found

    def _made_masks(self) -> dict[str, Tensor | None] | None:
        """The masks of the step, by kind of layer, if the model takes such a dict and its own masks are plain causal ones."""
        kinds: set[Any] = {type(m) for m in self._model.modules()}
        if not any(map(_takes_masks, kinds)):
            return None
        from transformers import masking_utils

        weight = self._model.get_input_embeddings().weight
        inputs = weight.new_empty((len(self.ids), 1, weight.shape[1]))
        maker: Any = getattr(self._model, "create_masks_for_generate", masking_utils.create_masks_for_generate)
        given = {name_in("cache", inspect.signature(plain(maker)).parameters) or "cache": self._cache, "position_ids": self.ids}
        try:
            made = maker(config=self._model.config, inputs_embeds=inputs, attention_mask=None, **given)
        except (TypeError, ValueError, AttributeError) as e:  # another transformers has other parameters
            own = f"{type(self._model).__name__} computes its own masks in every token"
            warnings.warn(f"{own}: ssmgen's call of their maker raised {e!r}", RuntimeWarning, stacklevel=2)
            return None
        if not isinstance(made, dict):
            return None
        want = self.columns <= self.ids[:, :, None, None]
        if any(mask is not None and not _equal(mask, want) for mask in made.values()):
            return None
        added = getattr(self._model.config, "model_type", "") in ADDED and self._model.config._attn_implementation == "sdpa"
        dtype = weight.dtype if added else torch.bool
        if added:
            self._seen, self._hidden = (torch.tensor(v, dtype=dtype, device=weight.device) for v in (0.0, -math.inf))
        ours = torch.empty_like(want, dtype=dtype)
        return {kind: None if mask is None else ours for kind, mask in made.items()}

    def rotary(self, module: Any, x: Tensor, position_ids: Tensor) -> Any:
        """cos and sin of the step's positions, [batch, 1, channels] each; as the module computes them where it gets other positions."""
        known = (id(module), x.dtype)
        if not self._are_ours(position_ids) or (known not in self.tables and captured(x)):
            return type(module).forward(module, x, position_ids)
        if known not in self.tables:
            self.tables[known] = self._table(module, x, position_ids)
        table = self.tables[known]
        if table is None:
            return type(module).forward(module, x, position_ids)
        cos, sin = table.index_select(0, self.ids.view(-1)).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin

    def _are_ours(self, position_ids: Tensor) -> bool:
        alike = position_ids.storage_offset() == self.ids.storage_offset() and position_ids.shape[-2:] == self.ids.shape
        return alike and position_ids.untyped_storage()._cdata == self.ids.untyped_storage()._cdata

    def _table(self, module: Any, x: Tensor, position_ids: Tensor) -> Tensor | None:
        """[positions, 2 channels]: cos and sin of every position; None if the module's own for this step differ."""
        room, batch = len(self.columns), len(self.ids)
        cos, sin = type(module).forward(module, x[:1], self.columns.expand(*position_ids.shape[:-2], 1, room))
        if cos.shape != sin.shape or cos.shape[:2] != (1, room) or cos.dim() != 3:
            return None
        table = torch.cat((cos, sin), dim=-1)[0]
        want = torch.cat([t.expand(batch, -1, -1) for t in type(module).forward(module, x, position_ids)], dim=-1)
        return table if _equal(table.index_select(0, self.ids.view(-1)).unsqueeze(1), want) else None


def captured(tensor: Tensor) -> bool:
    """Whether a graph is being captured where a tensor is."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether values are equal; of tensors without memory, shapes and types."""
    return a.shape == b.shape and a.dtype == b.dtype and (a.is_meta or torch.equal(a, b))


def _update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`update` of a layer of the cache."""
    now = _now.positions
    if now is None or is_compiling():
        return type(self).update(self, key_states, value_states, *args, **kwargs)
    return now.update(self, key_states, value_states, *args, **kwargs)


def _length(self: Any) -> Any:
    """`get_seq_length` of a layer of the cache."""
    now = _now.positions
    return type(self).get_seq_length(self) if now is None else now.length(self)


def _appends(layer: Any) -> bool:
    kind: Any = type(layer)
    return kind.__name__ in LAYERS and appends(kind)


@cache
def appends(kind: Any) -> bool:
    """Whether a layer of the cache appends at its count and returns all of its keys, tried on numbers."""
    try:
        layer, given = kind(max_cache_len=4), torch.arange(1.0, 13.0).view(1, 1, 3, 4)
        layer.update(given[:, :, :2], -given[:, :, :2])
        keys, values = layer.update(given[:, :, 2:], -given[:, :, 2:])
    except (AttributeError, RuntimeError, TypeError):
        return False
    count = layer.cumulative_length
    alone = torch.nn.functional.pad(given, (0, 0, 0, 1))
    return isinstance(count, Tensor) and count.dim() == 0 and int(count) == 3 and torch.equal(keys, alone) and torch.equal(values, -alone)


@cache
def _takes_masks(kind: Any) -> bool:
    """Whether a class's forward takes masks by kind of layer, as transformers' own generate gives them."""
    try:
        return kind.__name__.endswith("Model") and "attention_mask, dict)" in inspect.getsource(plain(kind.forward))
    except (OSError, TypeError, ValueError):
        return False


class Rotary:
    """The rotary embeddings of a model, whose cos and sin of decode steps come from tables. `undo` puts the model's own back."""

    def __init__(self, model: torch.nn.Module):
        self.modules = [m for m in model.modules() if _is_fixed(m)]
        for module in self.modules:
            module.__dict__["forward"] = MethodType(rotary, module)

    def undo(self) -> None:
        for module in self.modules:
            if getattr(module.__dict__.get("forward"), "__func__", None) is rotary:
                del module.__dict__["forward"]
        self.modules = []


def _is_fixed(module: Any) -> bool:
    if not type(module).__name__.endswith("RotaryEmbedding") or "forward" in module.__dict__:
        return False
    kind: Any = type(module)
    return getattr(module, "rope_type", None) in FIXED and [*inspect.signature(plain(kind.forward)).parameters] == [
        "self",
        "x",
        "position_ids",
    ]


def rotary(self: Any, x: Tensor, position_ids: Tensor) -> Any:
    """The forward of a rotary embedding."""
    now = _now.positions
    if now is None or is_compiling():
        return type(self).forward(self, x, position_ids)
    return now.rotary(self, x, position_ids)
