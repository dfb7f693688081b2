"""vLLM's gated norms, as in vLLM 0.33: of Mamba-2's layers, of gated delta rules' and of Kimi delta attention's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..shared import engine_norms as _norms
from ..shared.engine_norms import rms_norm_gated as rms_norm_gated
from ..shared.gated_delta import shaped as _shaped
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement


@_takes("norm_before_gate is_rms_norm", x="[rows, channels]", z="[rows, channels]")
def layer_norm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    z: Tensor | None = None,
    out: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> tuple[Tensor, None, None]:
    """Gated layer norm or RMS norm: out = norm(x) weight + bias, times act(z). With norm_before_gate=False, x is multiplied by act(z)
    before it.

    x, z, out: [rows, channels]; z None for no gate; out may be x, None for a new one          weight, bias: [channels]; bias None for none
    group_size: channels of a group, over which the norm is; None for all          activation: "swish", "silu" or "sigmoid"
    is_rms_norm: does not subtract the mean

    Returns (out, None, None). vLLM's function returns the means and deviations there, and its layers do not read them.
    Raises UnsupportedError for a bias of an RMS norm, and ArgumentError (a ValueError) for operands that do not fit.
    """
    found = _norms.normed(
        "vllm's layer_norm_fwd", x, z, weight, bias, eps, group_size=group_size, norm_before_gate=norm_before_gate, activation=activation,
        is_rms_norm=is_rms_norm, out=out,
    )  # fmt: skip
    return found, None, None


@_takes("norm_before_gate")
def mixer2_rms_norm_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """The norm of Mamba-2's layers: x rsqrt(mean(x^2) + eps) weight silu(z); with norm_before_gate=False, x is multiplied by silu(z) first.

    x, z: [*rows, channels]; z None for no gate          weight: [channels]          bias: None
    group_size: channels of a group, over which the mean is; None for all

    Returns a new tensor like x. Arithmetic is f32.
    Raises UnsupportedError for a bias, and ArgumentError (a ValueError) for operands that do not fit.
    """
    name = "vllm's rms_norm_gated"
    return _norms.normed(name, x, z, weight, bias, eps, group_size=group_size, norm_before_gate=norm_before_gate)


# The methods that layers call outside of torch.compile, where PyTorch would run one operation after the other. Traced calls stay vLLM's.


@_takes("")
def native_rms_norm(self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    """The gated RMS norm of delta rules' and Bailing's layers: the method forward_native of vLLM's RMSNormGated.

    x, z: [*rows, channels]; z None for no gate. The module has weight [channels], eps, group_size, norm_before_gate and activation.

    Returns a new tensor like x. Arithmetic is f32, as in vLLM.
    Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    return _norms.normed(
        "vllm's RMSNormGated", x, z, self.weight, None, self.eps, group_size=self.group_size, norm_before_gate=self.norm_before_gate,
        activation=self.activation,
    )  # fmt: skip


@_takes("prenorm")
def native_fused_rms_norm(
    self: Any, x: Tensor, g: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
) -> Tensor:
    """The gated RMS norm of Kimi delta attention's layers: the method forward_native of vLLM's FusedRMSNormGated.

    x, g: [*rows, size]. The module has weight [size] or None, eps and activation. A residual and prenorm stay vLLM's, without a warning.

    Returns a new tensor like x. Arithmetic is f32, as in vLLM.
    Raises ArgumentError (a ValueError) for operands that do not fit.

    Ignored arguments:
    residual_in_fp32: only counts with a residual
    """
    if residual is not None or prenorm:
        raise NotReplaced
    gate = _shaped(g, tuple(x.shape))
    return _norms.normed("vllm's FusedRMSNormGated", x, gate, self.weight, None, self.eps, activation=self.activation)


@_takes("")
def native_mixer2_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """The gated RMS norm of Mamba-2's layers, over groups of channels: the method forward_native of vLLM's Mixer2RMSNormGated.

    x, gate: [*rows, channels], the channels of this rank. Groups that several ranks share, layers without a norm, and a weight of another
    dtype than x stay vLLM's, without a warning.

    Returns a new tensor like x, rounded once; vLLM also rounds before it multiplies by the weight.
    Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    shared = self.tp_size > 1 if self.n_groups == 1 else self.n_groups % self.tp_size != 0
    if not self.use_rms_norm or shared or self.weight.dtype is not x.dtype:
        raise NotReplaced
    group_size = None if self.n_groups == 1 else self.group_size
    return _norms.normed(
        "vllm's Mixer2RMSNormGated", x, gate, self.weight, None, self.variance_epsilon, group_size=group_size, norm_before_gate=False
    )


_FLA = "vllm.third_party.flash_linear_attention.ops"
REPLACEMENTS = [
    Replacement(f"{_FLA}.layernorm_guard", "layer_norm_fwd", layer_norm_fwd, traced=True),
    Replacement(f"{_FLA}.kda", "rms_norm_gated", rms_norm_gated, traced=True),
    Replacement(f"{_FLA}.fused_norm_gate", "rms_norm_gated", rms_norm_gated, traced=True),
    Replacement("vllm.model_executor.layers.mamba.ops.layernorm_gated", "rms_norm_gated", mixer2_rms_norm_gated, traced=True),
    Replacement("vllm.model_executor.layers.layernorm", "RMSNormGated.forward_native", native_rms_norm, traced=True),
    Replacement(f"{_FLA}.kda", "FusedRMSNormGated.forward_native", native_fused_rms_norm, traced=True),
    Replacement("vllm.model_executor.layers.mamba.mamba_mixer2", "Mixer2RMSNormGated.forward_native", native_mixer2_norm, traced=True),
]
