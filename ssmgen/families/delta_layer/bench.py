"""chain: causal_conv1d_update, gated_delta_rule or kda, gated_rms_norm. Peers of gdn_layer; kda_layer has none. flashinfer: FlashInfer's
state update instead of ours, with a bf16 state of 128 x 128. fla: its recurrence and its norm, after Dao-AILab's convolution if that is
installed, else ours. flash-linear-attention takes contiguous f32 states from the pool's memory, not slots, and returns new states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

import ssmgen

from ...bench import report as reports
from ...bench.case import Launch, kept
from ...bench.layer_case import EPS, Layer, Step, between_ours, convolution
from ...bench.layers import LAYOUT, layer_bench
from ...engine.recurrences.attention.model import AttentionModel
from ...engine.recurrences.attention.problem import Gate

# Options of flash-linear-attention's step: its kernel does the same work as ours, and it returns the state.
FLA_OPTIONS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state")
LOWER_BOUND = -5.0  # Kimi-K3's


class DeltaLayer(Layer):
    """A layer of a delta rule."""

    inputs: ClassVar[str] = "mixed_qkv"
    model: AttentionModel
    norm_first: ClassVar[bool] = True
    gates: ClassVar[tuple[str, str]]  # the layer's names for the recurrence's g and beta
    rule: ClassVar[Callable[..., Any]]

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.at.layout == "vk" else {"state_layout": self.at.layout}

    def update(self, i: int, convolved: Tensor, out: Tensor) -> Step:
        H, (P, N, G) = self.model.nheads, self.model.shape
        given = {name: t[i] for name, t in self.by_head.items()}
        *shared, v = convolved.split([G * N, G * N, self.inner], -1)
        g, beta = self.gates
        tokenwise = {"v": v.unflatten(-1, (H, P)), "g": given[g], "beta": given[beta], "out": out}
        tokenwise |= {name: t.unflatten(-1, (G, N)) for name, t in zip(("q", "k"), shared, strict=True)}
        if self.tokens == 1:  # in the shape that flash-linear-attention takes
            tokenwise = {name: t.unsqueeze(1) for name, t in tokenwise.items()}
        call = tokenwise | {"A_log": given["A_log"], "dt_bias": given["dt_bias"], **self.options}
        call |= {"state": self.state, **self.places(i), "use_qk_l2norm": True, "beta_sigmoid": True}
        return Step(type(self).rule, call)


class GdnLayer(DeltaLayer):
    """A layer of a gated delta rule."""

    gates = ("a", "b")
    rule = staticmethod(ssmgen.gated_delta_rule)

    def made_by_head(self, rand: Callable[..., Tensor]) -> dict[str, Tensor]:
        H = self.model.nheads
        made = {"a": rand(*self.lead, H), "b": rand(*self.lead, H), "dt_bias": rand(H) - 4}
        return made | {"A_log": rand(H).float()}


class KdaLayer(DeltaLayer):
    """A layer of Kimi delta attention."""

    norm_how: ClassVar[dict[str, Any]] = {"activation": "sigmoid"}
    gates = ("g", "beta")
    rule = staticmethod(ssmgen.kda)

    def made_by_head(self, rand: Callable[..., Tensor]) -> dict[str, Tensor]:
        H, keys = self.model.nheads, self.model.shape[1]
        made = {"g": rand(*self.lead, H, keys), "beta": rand(*self.lead, H), "dt_bias": rand(H, keys).float() - 4}
        return made | {"A_log": rand(H).float()}

    @property
    def options(self) -> dict[str, Any]:
        return super().options | ({"lower_bound": LOWER_BOUND} if self.model.gate is Gate.BOUNDED else {})


def flashinfer(case: Any) -> Launch | None:
    """FlashInfer's state update between our convolution and our norm."""
    state, plain = case.state, case.tokens == 1 and case.at.layout == "vk"
    served = plain and state.dtype == torch.bfloat16 and state.shape[2:] == (128, 128)
    function = reports.imported("flashinfer.gdn_kernels.gdn_decode_bf16_state", "gated_delta_rule") if served else None
    if function is None:
        return None
    names = {"g": "a", "beta": "b", "out": "output", "state": "initial_state_source", "state_indices": "initial_state_indices"}
    calls = []
    for i in range(case.sets):
        given = case.chain(i)[1].arguments
        call: dict[str, Any] = {names.get(n, n): t for n, t in given.items() if isinstance(t, Tensor)} | {"use_qk_l2norm_in_kernel": True}
        calls.append(call | {"dt_bias": call["dt_bias"].float()})
    return between_ours(case, lambda i: function(**calls[i]))


def fla(case: Any) -> Launch | None:
    """Triton's recurrence and norm. The first set begins with its states, [batch, heads, K, V] f32, the others use the pool."""
    served = case.tokens == 1 and case.at.layout == "vk"
    update = reports.imported("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule") if served else None
    norm = reports.imported("fla.modules.fused_norm_gate", "rms_norm_gated") if served else None
    if update is None or norm is None:
        return None
    assert case.norm_weight is not None, "every model with such a layer norms by heads"
    convolve, weights = convolution(case, reports.imported("causal_conv1d", "causal_conv1d_update")), case.norm_weight
    _, H, V, K = case.state.shape
    parts = case.state.flatten().view(torch.float32).split(case.batch * H * K * V)
    states = [part.view(case.batch, H, K, V) for part in parts if len(part) == len(parts[0])]
    states[0] = case.state[case.slots[0].long()].float().transpose(2, 3).contiguous()
    biases = case.by_head["dt_bias"].float()
    fixed = dict.fromkeys(FLA_OPTIONS, True)

    def run(i: int) -> Any:
        rows = case.out[i].view(case.batch, H, V)
        given = case.update(i, convolve(i), rows).arguments
        call = {name: given[name] for name in ("q", "k", "v", "g", "beta", "A_log")} | {"dt_bias": biases[i]}
        y, _ = update(**call, **fixed, initial_state=states[i % len(states)])
        gate = case.z[i].view(case.batch, 1, H, V)
        return norm(y, gate, weights[i], None, activation="swish", eps=EPS).view(case.batch, H * V)

    return kept(run)


BENCHES = {
    "gdn_layer": layer_bench(
        "gdn_layer", str(__doc__), ("qwen3.5-35b-a3b", "qwen3.5-397b-a17b"), GdnLayer, {"flashinfer": flashinfer, "fla": fla}, LAYOUT
    ),
    "kda_layer": layer_bench("kda_layer", str(__doc__), ("kimi-linear-48b-a3b", "kimi-k3"), KdaLayer, {}, LAYOUT),
}
