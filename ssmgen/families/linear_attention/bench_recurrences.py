"""gated_delta_rule and its relatives as their models call them: operands, weights, options, and the same in flash-linear-attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from ...spec.kernel import DType

# Values of an operand: as in models, so that the state stays bounded.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "unit": lambda x: normalize(x, dim=-1),
    "sigmoid": torch.sigmoid,
    "decay": lambda x: logsigmoid(x) / 16,
    "uniform": torch.rand_like,
    "bias": lambda x: torch.rand_like(x) - 4,
    "slope": lambda x: torch.arange(x.numel(), device=x.device) * (8 / x.numel()),
}


class Operand(NamedTuple):
    """`axes` after batch and tokens: of the key heads (key); or of the heads, one number, one per key channel or one per value channel."""

    axes: str
    values: str = "normal"


def operands(text: str) -> dict[str, Operand]:
    """Parses items written "name=axes" or "name=axes/values"."""
    return {name: Operand(*how.split("/")) for name, how in (item.split("=") for item in text.split())}


@dataclass(frozen=True, slots=True)
class Recurrence:
    """An operator as its models call it. Operands are bf16, weights f32; both have the same names in flash-linear-attention."""

    operands: str
    fla: str  # module and function
    weights: str = ""
    options: Mapping[str, bool] = field(default_factory=dict)
    fla_options: Mapping[str, Any] = field(default_factory=dict)
    fla_groups: bool = False  # it takes fewer key heads than heads
    heads: int = 32
    key_heads: int | None = None  # None: one per head
    state: DType = DType.F32
    batches: tuple[int, ...] = (1, 8, 32, 128)
    groups: bool = True  # it can have fewer key heads than heads


HEAD_GATE, CHANNEL_GATE = "A_log=head/uniform dt_bias=head/bias", "A_log=head/uniform dt_bias=channel/bias"
NORM, NORM_BETA = {"use_qk_l2norm": True}, {"use_qk_l2norm": True, "beta_sigmoid": True}
FLA_NORM = {"use_qk_l2norm_in_kernel": True}
FLA_GATE = FLA_NORM | {"use_gate_in_kernel": True}
FLA_BETA = FLA_GATE | {"use_beta_sigmoid_in_kernel": True}

OPS = {
    "gated_delta_rule": Recurrence(
        "q=key k=key v=value g=head beta=head", "fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule",
        HEAD_GATE, NORM_BETA, FLA_BETA, True, 64, 16, DType.BF16, (1, 2, 4, 8, 16, 32, 64, 128, 256),
    ),
    "kda": Recurrence(
        "q=key k=key v=value g=channel beta=head", "fla.ops.kda.fused_recurrent_kda",
        CHANNEL_GATE, NORM_BETA, FLA_BETA, True,
    ),
    "gdn2": Recurrence(
        "q=key k=key v=value g=channel b=channel/sigmoid w=value/sigmoid", "fla.ops.gdn2.fused_recurrent_gdn2",
        CHANNEL_GATE, NORM, FLA_GATE, True,
    ),
    "comba": Recurrence(
        "q=key k=key v=value p=key g=head/decay beta=head/sigmoid", "fla.ops.comba.fused_recurrent_comba",
        "", NORM, FLA_NORM, True,
    ),
    "delta_rule": Recurrence("q=key k=key/unit v=value beta=head/sigmoid", "fla.ops.delta_rule.fused_recurrent_delta_rule"),
    "gla": Recurrence("q=key k=key/unit v=value gk=channel/decay", "fla.ops.gla.fused_recurrent_gla"),
    "simple_gla": Recurrence("q=key k=key/unit v=value g=head/decay", "fla.ops.simple_gla.fused_recurrent_simple_gla"),
    "lightning_attn": Recurrence(
        "q=key k=key/unit v=value", "fla.ops.lightning_attn.fused_recurrent_lightning_attn",
        "slope=head/slope", fla_options={"slope": None, "layer_idx": 0, "num_layers": 1},  # it computes the same slopes from these
    ),
    "rwkv6": Recurrence(
        "r=key k=key/unit v=value w=channel/decay", "fla.ops.rwkv6.fused_recurrent_rwkv6", "u=channel", groups=False,
    ),
    "rwkv7": Recurrence(
        "r=key w=channel/decay k=key/unit v=value kk=key/unit a=key/sigmoid", "fla.ops.rwkv7.fused_mul_recurrent_rwkv7",
        groups=False,
    ),
}  # fmt: skip
