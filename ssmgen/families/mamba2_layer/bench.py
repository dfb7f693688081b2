"""chain: causal_conv1d_update, selective_state_update, gated_rms_norm. Peers: flashinfer, FlashInfer's state update instead of ours;
mamba_ssm, its state update and its norm, after Dao-AILab's convolution if that is installed, else ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

import ssmgen

from ...bench import report as reports
from ...bench.case import Launch, kept
from ...bench.layer_case import EPS, Layer, Step, between_ours, convolution
from ...bench.layers import layer_bench
from ...engine.recurrences.mamba.model import MambaModel


class Mamba2Layer(Layer):
    """A layer of Mamba-2."""

    inputs: ClassVar[str] = "xBC"
    model: MambaModel

    def made_by_head(self, rand: Callable[..., Tensor]) -> dict[str, Tensor]:
        H = self.model.nheads
        return {"dt": rand(*self.lead, H), "A": -rand(H).float().abs() - 0.1, "D": rand(H), "dt_bias": rand(H) - 4}

    @property
    def options(self) -> dict[str, Any]:
        return {"norm_group_size": self.model.norm_shape[1]} if self.model.norm_shape else {}

    @property
    def gate_alone(self) -> bool:
        return self.model.gate

    @property
    def norm_weights(self) -> tuple[int, ...]:
        return (self.inner,)

    def update(self, i: int, convolved: Tensor, out: Tensor) -> Step:
        H, (P, N, G) = self.model.nheads, self.model.shape
        given = {name: t[i] for name, t in self.by_head.items()}
        x, *shared = convolved.split([self.inner, G * N, G * N], -1)
        heads = (x.unflatten(-1, (H, P)), *(t.unflatten(-1, (G, N)) for t in shared))
        call = dict(zip(("x", "B", "C"), heads, strict=True))
        call |= {name: given[name][..., None].expand(*given[name].shape, P) for name in ("dt", "D", "dt_bias")}
        call |= {"state": self.state, "A": given["A"][:, None, None].expand(H, P, N), "dt_softplus": True}
        call |= {"z": self.z[i].unflatten(-1, (H, P))} if self.model.gate else {}
        return Step(ssmgen.selective_state_update, call | self.places(i) | {"out": out})


def flashinfer(case: Any) -> Launch | None:
    """FlashInfer's state update between our convolution and our norm."""
    function = reports.imported("flashinfer.mamba", "selective_state_update") if case.tokens == 1 else None
    if function is None:
        return None
    calls = []
    for i in range(case.sets):
        given = case.chain(i)[1].arguments
        call = {n: t for n, t in given.items() if isinstance(t, Tensor) or n == "dt_softplus"}
        calls.append(call | {"state_batch_indices": call.pop("state_indices")})
    return between_ours(case, lambda i: function(**calls[i]))


def mamba_ssm(case: Any) -> Launch | None:
    """Triton's state update and norm."""
    update = reports.imported("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    norm = reports.imported("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    if update is None or norm is None or case.tokens > 1:
        return None
    convolve = convolution(case, reports.imported("causal_conv1d", "causal_conv1d_update"))
    names = ("state", "x", "dt", "A", "B", "C", "D")

    def run(i: int) -> Any:
        given = case.update(i, convolve(i), case.out[i].view(case.batch, case.model.nheads, -1)).arguments
        how = {"z": given.get("z"), "dt_bias": given["dt_bias"], "dt_softplus": True, "state_batch_indices": given["state_indices"]}
        y = update(*(given[name] for name in names), **how).flatten(1)
        if case.norm_weight is None:
            return y
        size = case.options["norm_group_size"]
        return norm(y, case.norm_weight[i], None, z=case.z[i], eps=EPS, group_size=size, norm_before_gate=False)

    return kept(run)


PEERS = {"flashinfer": flashinfer, "mamba_ssm": mamba_ssm}
BENCH = layer_bench("mamba2_layer", __doc__, ("nemotron-h-8b", "mamba2-2.7b"), Mamba2Layer, PEERS)
