"""mamba_ssm's Mamba-3: the rotation of a decode step, and a patch of the layer `Mamba3`. Import both from `compat.mamba_ssm`."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...calls import checks
from ...errors import ArgumentError, UnsupportedError
from ...spec.operands import Operand, table
from ..shared import mamba3_layers as _layers
from ..shared.layer_patch import LayerPatch, ours
from ..shared.operands import takes as _takes
from .mamba3_prompts import mamba3_mimo

_ROTARY = table(
    Operand("q", "batch rank head n"),
    Operand("k", "like q"),
    Operand("angle_state", "batch head angle"),
    Operand("angle_proj", "like angle_state"),
    Operand("dt", "batch head"),
    Operand("bias_q", "rank head n", optional=True),
    Operand("bias_k", "like bias_q", optional=True),
    head="heads", n="d_state", angle="angles",
)  # fmt: skip


@_takes("inplace conjugate rotate_pairwise", q="[batch, R, H, N]", angle_state="[batch, H, angles]")
def apply_rotary_qk_inference_fwd(
    q: Tensor,
    k: Tensor,
    angle_state: Tensor,
    angle_proj: Tensor,
    dt: Tensor,
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    inplace: bool = False,
    conjugate: bool = False,
    rotate_pairwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rotation of a decode step of Mamba-3: q + bias_q and k + bias_k turn by angle_state + pi tanh(angle_proj) dt.

    H heads, N = d_state, R ranks, n angles of a head, up to N / 2.

    q, k: [batch, R, H, N]          bias_q, bias_k: [R, H, N]; None for none
    angle_state, angle_proj: [batch, H, n], radians and logits          dt: [batch, H], after its softplus
    inplace: q, k and angle_state receive the results          conjugate: turn by the negative angle
    rotate_pairwise: angle i turns the elements 2i and 2i + 1; if False, i and i + N / 2

    Every tensor is f32, f16 or bf16. Returns (q, k, angle), like q, k and angle_state. Angles are computed in f64, rotations in f32.
    Unlike in mamba_ssm.ops.triton, the returned angle lies from -pi to pi, so that it keeps its precision over long sequences.
    This function is a sequence of torch's operators, without a kernel. ssmgen.mamba3_state_update and patched layers do not call it: they
    rotate in the launch that makes the whole step.
    Raises ArgumentError (a ValueError) for operands that do not fit, or that require grad while grad is enabled.
    """
    given = {"q": q, "k": k, "angle_state": angle_state, "angle_proj": angle_proj, "dt": dt, "bias_q": bias_q, "bias_k": bias_k}
    named = {name: t for name, t in given.items() if t is not None}
    problems: list[str] = []
    if checks.check_tensors(named, problems):
        checks.check_types(_ROTARY, named, "q", problems)
        sizes = dict(zip(("batch", "rank", "head", "n"), q.shape, strict=True)) | {"angle": angle_state.shape[-1]}
        checks.check_shapes(_ROTARY, named, sizes, problems)
        if 2 * sizes["angle"] > sizes["n"]:
            problems.append(f"angle_state is {list(angle_state.shape)}; expected up to {sizes['n'] // 2} angles, half of q's elements")
        written = ("q", "k", "angle_state") if inplace else ()
        problems += [
            f"{name} has strides {list(named[name].stride())}, and two of its elements share memory; expected inplace=False"
            for name in written
            if checks.overlaps_itself(named[name])
        ]
    if problems:
        raise ArgumentError("mamba_ssm's apply_rotary_qk_inference_fwd", problems)
    turned = angle_state.double() + math.pi * angle_proj.double().tanh() * dt.double()[..., None]
    turned = turned - 2 * math.pi * torch.round(turned / (2 * math.pi))
    cos, sin = turned.cos().float()[:, None], turned.sin().float()[:, None]
    results = [_rotated(rows, bias, cos, -sin if conjugate else sin, rotate_pairwise) for rows, bias in ((q, bias_q), (k, bias_k))]
    results.append(turned.to(angle_state.dtype))
    if inplace:
        results = [into.copy_(t) for into, t in zip((q, k, angle_state), results, strict=True)]
    new_q, new_k, angle = results
    return new_q, new_k, angle


def _rotated(rows: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """rows [batch, R, H, N] with their bias, of which the first pairs turn by an angle; cos, sin [batch, 1, H, n]."""
    whole = rows.float() if bias is None else rows.float() + bias.float()
    n, half = cos.shape[-1], rows.shape[-1] // 2
    u, w = (whole[..., 0 : 2 * n : 2], whole[..., 1 : 2 * n : 2]) if pairs else (whole[..., :n], whole[..., half : half + n])
    first, second = u * cos - w * sin, u * sin + w * cos
    if pairs:
        out = torch.cat([torch.stack([first, second], -1).flatten(-2), whole[..., 2 * n :]], -1)
    else:
        out = torch.cat([first, whole[..., n:half], second, whole[..., half + n :]], -1)
    return out.to(rows.dtype)


def patch_mamba3(A_form: str | None = None, module: ModuleType | None = None) -> LayerPatch:
    """Replaces `step` and `forward` of mamba-ssm's layer `Mamba3`, for all layers, made before or after. SISO and MIMO, forward only.

    A step is `in_proj`, one launch, `out_proj`. Patched layers also serve calls that mamba-ssm 2.3 does not:
    - `step` and generation with inputs [batch, 1, d_model], as MambaLMHeadModel.generate passes them
    - prompts in pieces: with inference_params and seqlen_offset above 0, `forward` continues from the cached states, any number of tokens
    - packed sequences (cu_seqlens) of MIMO layers with a cache, and sequences without tokens
    - MIMO layers without TileLang, CuTe and quack; heads that are a multiple of ngroups

    A_form: "heavy" or "softplus", see ssmgen.mamba3_state_update; None: as the installed mamba-ssm computes A. Releases up to 2.3.2 have
        softplus, later code has heavy. Pass "heavy" to run the published checkpoints with an older release
    module: the module that defines Mamba3, for copies of mamba-ssm's code; None: mamba_ssm.modules.mamba3

    Caches keep mamba-ssm's layout; angles are stored from -pi to pi. dt, trap and angles stay f32, where mamba-ssm rounds some to bf16.
    Returns the patch: undo() or `with` restores mamba-ssm's methods.
    Patched layers raise UnsupportedError for seq_idx (which mamba-ssm ignores), gradients, caches of another batch size, and norms of other
    forms. mamba-ssm's own code never runs instead.
    Raises PatchError if mamba-ssm is missing, if its methods have other parameters, if A has an unknown form, and for a second patch.
    """
    module, owner = _layers.layer_of(module, "mamba_ssm.modules.mamba3", "mamba-ssm 2.3.2")
    form = _layers.form_of(module.__name__, A_form, lambda layer, logits: _a_of(owner, layer, logits))
    # Without TileLang this name is None, and mamba-ssm makes no MIMO layer.
    names = {(module, "mamba3_mimo_combined"): mamba3_mimo} if vars(module).get("mamba3_mimo_combined", ours) is None else {}
    return LayerPatch(owner, _methods(form), form, names)


def _a_of(owner: Any, layer: SimpleNamespace, logits: Tensor) -> Tensor:
    """A as the class computes it, of a layer with one head and headdim 1."""
    one, rows = torch.zeros(len(logits), 1), torch.zeros(len(logits), 4)
    vars(layer).update(dt_bias=torch.zeros(1), is_mimo=False, mimo_rank=1, num_bc_heads=1, nheads=1, headdim=1)
    vars(layer).update(B_norm=lambda t: t, C_norm=lambda t: t)
    A: Tensor = owner._preprocess(layer, logits[:, None], one, rows, rows, one, one, one, one)[6]
    return A[:, 0]


def _methods(A_form: str) -> dict[str, Callable[..., Any]]:
    """The replacements of Mamba3's methods."""
    name = "mamba_ssm's Mamba3"

    @ours
    def step(self: Any, u: Tensor, angle_state: Tensor, ssm_state: Tensor, k_state: Tensor, v_state: Tensor, **kwargs: Any) -> Any:
        states = _layers.States(angle_state, ssm_state, k_state, v_state)
        out = _layers.step(name, self, _layers.one_token(name, u), states, A_form)
        return (out.unsqueeze(1) if u.dim() == 3 else out, *states)

    @ours
    def forward(
        self: Any, u: Tensor, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, inference_params: Any = None
    ) -> Tensor:
        if seq_idx is not None:
            raise UnsupportedError(name, ["seq_idx is given, which mamba-ssm ignores; expected cu_seqlens for packed sequences"])
        states, continued = None, False
        if inference_params is not None:
            sequences = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            states = _layers.States(*self._get_states_from_cache(inference_params, sequences))
            continued = inference_params.seqlen_offset > 0
            if continued and cu_seqlens is None and u.shape[1] == 1:
                return _layers.step(name, self, u.squeeze(1), states, A_form).unsqueeze(1)
        return _layers.prompt(name, self, u, states, A_form, continued=continued, cu_seqlens=cu_seqlens)

    return {"step": step, "forward": forward}
