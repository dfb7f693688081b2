"""SGLang's method for Mamba-1's prompts, which ssmgen serves without its loop over sequences, against tokens one by one in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions  # noqa: F401
from test_engine_forms import starts_of
from torch import Tensor
from torch_conv import randn

from ssmgen.compat import sglang as plugin

BF16, F32 = torch.bfloat16, torch.float32
MIXER = "sglang.srt.layers.attention.mamba.mamba1"
D, N, WIDTH, RANK, SLOTS = 24, 8, 4, 3, torch.tensor([5, 2, -1, 7], dtype=torch.int32)
LENGTHS, STARTED = (9, 1, 3, 6), torch.tensor([True, True, True, False])


class Prompts:
    """A layer, and packed prompts of four sequences, the third of which is padding."""

    def __init__(self, dtype: torch.dtype = F32, states: torch.dtype = F32, windows: torch.dtype | None = None, wide: bool = False):
        total, self.dtype = sum(LENGTHS), dtype
        self.layer = SimpleNamespace(
            conv1d=SimpleNamespace(bias=randn(D, seed=1)), activation="silu", D=randn(D, seed=2, dtype=F32), _ssm_params=self.parameters
        )  # fmt: skip
        self.projection = {n: randn(D, size, seed=s).to(dtype) / 4 for s, (n, size) in enumerate((("dt", D), ("B", N), ("C", N)), 3)}
        self.wide = wide
        projected = randn(total, 2 * D, seed=7).to(dtype)
        self.call: dict[str, Any] = {
            "x": projected[:, :D], "gate": projected[:, D:], "out": torch.full((total, D), torch.nan, dtype=dtype),
            "A": -randn(D, N, seed=8, dtype=F32).exp(), "conv_state": pages(9, D, WIDTH - 1, dtype=windows or dtype),
            "ssm_state": pages(9, D, 1, N, dtype=states), "conv_weights": randn(D, WIDTH, seed=9).to(dtype) / 2,
            "state_indices": torch.cat([SLOTS, SLOTS]), "query_start_loc": starts_of(LENGTHS), "use_triton_causal_conv": False,
            "metadata": SimpleNamespace(mixed_metadata=SimpleNamespace(has_initial_states=STARTED)),
        }  # fmt: skip
        self.layer.conv1d.bias = self.layer.conv1d.bias.to(dtype)

    def parameters(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's projections of the convolution's output, each token's by itself."""
        assert convolved.dtype == self.dtype
        dt, B, C = (convolved @ self.projection[n] for n in ("dt", "B", "C"))
        return (dt.float(), B, C) if self.wide else (dt, B, C)

    def run(self) -> Any:
        return import_module(MIXER).MambaMixer1._forward_prefill(self.layer, **self.call)


def expected(p: Prompts) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, windows, states) in float64, from the convolution's output and the projections as the layer rounds them."""
    call = p.call
    window, state = call["conv_state"].clone(), call["ssm_state"].double()
    x = call["x"].to(window.dtype)
    convolved = plugin.causal_conv1d_fn(
        x.t(), call["conv_weights"].to(x.dtype), p.layer.conv1d.bias.to(x.dtype), call["query_start_loc"], SLOTS,
        STARTED if call["metadata"].mixed_metadata else None, window,
    ).t()  # fmt: skip
    u = convolved.to(p.dtype)
    dt, B, C = (t.double() for t in p.parameters(u))
    u, z, A, dt = u.double(), call["gate"].double(), call["A"].double(), dt.exp().log1p()
    out, starts = torch.zeros(u.shape, dtype=torch.float64), call["query_start_loc"].tolist()
    for i, slot in enumerate(SLOTS.tolist()):
        if slot < 0:
            continue
        h = state[slot, :, 0] if call["metadata"].mixed_metadata and STARTED[i] else torch.zeros(D, N, dtype=torch.float64)
        for t in range(starts[i], starts[i + 1]):
            h = (dt[t, :, None] * A).exp() * h + (dt[t] * u[t])[:, None] * B[t]
            out[t] = ((h * C[t]).sum(-1) + p.layer.D.double() * u[t]) * z[t] * z[t].sigmoid()
        state[slot, :, 0] = h
    return out, window, state


def close(got: Tensor, want: Tensor) -> bool:
    bound = (want.abs().max().item() + 1) * (torch.finfo(got.dtype).eps + 1e-5)
    return (got.double() - want).abs().max().item() <= bound


CASES = {
    "f32": {}, "bf16": {"dtype": BF16}, "f32 steps": {"dtype": BF16, "wide": True}, "other windows": {"windows": BF16},
    "bf16 states": {"dtype": BF16, "states": BF16},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_prompts(sglang, case):
    p = Prompts(**CASES[case])
    want, window, state = expected(p)
    assert p.run() is None
    assert close(p.call["out"], want) and torch.equal(p.call["conv_state"], window)
    got = p.call["ssm_state"]
    assert close(got[[5, 2, 7]], state[[5, 2, 7]]) and torch.equal(got[[0, 1, 3, 4, 6, 8]].double(), state[[0, 1, 3, 4, 6, 8]])


def test_prompts_that_all_begin_at_zero(sglang):
    p = Prompts()
    p.call["metadata"].mixed_metadata = None
    want, window, state = expected(p)
    p.run()
    assert close(p.call["out"], want) and torch.equal(p.call["conv_state"], window) and close(p.call["ssm_state"], state)


@pytest.mark.refused
@pytest.mark.parametrize("why", ["states of another size", "a kept function"])
def test_the_windows_are_as_they_were_for_sglang_s_own(sglang, caplog, monkeypatch, why):
    p = Prompts()
    if why == "a kept function":
        monkeypatch.setitem(plugin._ENGINE.outcome, f"{MIXER}.MambaMixer1._selective_scan", "kept")
    else:
        p.call["ssm_state"] = p.call["ssm_state"][:, : D - 1]
    before = [p.call[n].clone() for n in ("conv_state", "ssm_state")]
    assert str(p.run()).startswith("the engine's")
    assert all(map(torch.equal, before, (p.call["conv_state"], p.call["ssm_state"]))) and p.call["out"].isnan().all()
    assert ("_selective_scan is sglang's own" if why == "a kept function" else "state is") in caplog.text
