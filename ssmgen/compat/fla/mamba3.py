"""A patch of flash-linear-attention's layer `Mamba3`. Import it from `compat.fla`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..shared import mamba3_layers as _layers
from ..shared.layer_patch import LayerPatch, ours

_NAME = "fla's Mamba3"


def patch_mamba3(A_form: str | None = None, module: ModuleType | None = None) -> LayerPatch:
    """Replaces the methods of flash-linear-attention's layer `Mamba3` that call kernels: `forward`, `cuda_kernels_forward` and `step`. All
    layers change, made before or after. SISO and MIMO, forward only.

    A step is `in_proj`, one launch, `out_proj`. Patched layers need neither mamba-ssm nor TileLang nor CuTe, and also serve calls that
    flash-linear-attention does not: several new tokens after cached ones (prompts in pieces), also with a padded attention_mask.

    A_form: "heavy" or "softplus", see ssmgen.mamba3_state_update; None: as the installed flash-linear-attention computes A, softplus in
        0.5.2. Pass "heavy" for weights of state-spaces/mamba3-*
    module: the module that defines Mamba3, for copies of its code; None: fla.layers.mamba3

    Caches keep fla's layout; angles are stored from -pi to pi. Returns the patch: undo() or `with` restores fla's methods.
    Patched layers raise UnsupportedError for gradients, caches of another batch size, and norms of other forms. fla's own code never runs
    instead.
    Raises PatchError if fla is missing, if its methods have other parameters, if A has an unknown form, and for a second patch.
    """
    module, owner = _layers.layer_of(module, "fla.layers.mamba3", "flash-linear-attention 0.5.2")
    form = _layers.form_of(module.__name__, A_form, lambda layer, logits: owner._compute_a(layer, logits))
    return LayerPatch(owner, _methods(form), form)


def _methods(A_form: str) -> dict[str, Callable[..., Any]]:
    """The replacements of Mamba3's methods."""

    @ours
    def step(self: Any, hidden_states: Tensor, angle_state: Tensor, ssm_state: Tensor, k_state: Tensor, v_state: Tensor) -> Tensor:
        states = _layers.States(angle_state, ssm_state, k_state, v_state)
        out = _layers.step(_NAME, self, _layers.one_token(_NAME, hidden_states), states, A_form)
        return out.unsqueeze(1) if hidden_states.dim() == 3 else out

    @ours
    def cuda_kernels_forward(
        self: Any, hidden_states: Tensor, last_state: dict[str, Any] | None = None, use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, _layers.States | None]:  # fmt: skip
        cached = None if last_state is None else last_state["recurrent_state"]
        batch, T, _ = hidden_states.shape
        if cached is not None and T == 1 and cu_seqlens is None:
            return step(self, hidden_states, *cached), _layers.States(*cached)
        states = None if cached is None else _layers.States(*cached)
        if states is None and use_cache:
            sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
            states = _layers.States(*self.allocate_inference_cache(sequences, T))
        out = _layers.prompt(_NAME, self, hidden_states, states, A_form, continued=cached is not None, cu_seqlens=cu_seqlens)
        return out, states

    @ours
    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None,
        use_cache: bool | None = False, output_attentions: bool | None = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:  # fmt: skip
        batch, T, _ = hidden_states.shape
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ArgumentError(_NAME, [f"attention_mask is {list(attention_mask.shape)}; expected [batch, tokens]"])
        if past_key_values is not None and self.layer_idx is None:
            raise ArgumentError(_NAME, ["layer_idx is None and past_key_values is given; expected a layer with its index"])
        known = past_key_values is not None and len(past_key_values) > self.layer_idx
        last_state = past_key_values[self.layer_idx] if known else None
        kept = None
        if cu_seqlens is None and attention_mask is not None and T > 1:
            hidden_states, kept, cu_seqlens = _packed(hidden_states, attention_mask[:, -T:])
        cached = last_state is not None and last_state["recurrent_state"] is not None
        out, states = self.cuda_kernels_forward(hidden_states, last_state, use_cache=bool(use_cache) or cached, cu_seqlens=cu_seqlens)
        if states is not None and past_key_values is not None:
            past_key_values.update(layer_idx=self.layer_idx, recurrent_state=tuple(states), offset=T)
        if kept is not None:
            out = out.new_zeros(batch * T, out.shape[-1]).index_copy_(0, kept, out.squeeze(0)).unflatten(0, (batch, T))
        return out, None, past_key_values

    return {"step": step, "cuda_kernels_forward": cuda_kernels_forward, "forward": forward}


def _packed(hidden_states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the tokens that count, [1, tokens, d_model]; their places; the start of each sequence). mask: [batch, T]"""
    kept = mask.flatten().nonzero().squeeze(1)
    starts = torch.nn.functional.pad(mask.ne(0).sum(1).cumsum(0), (1, 0)).int()
    return hidden_states.flatten(0, 1).index_select(0, kept).unsqueeze(0), kept, starts
