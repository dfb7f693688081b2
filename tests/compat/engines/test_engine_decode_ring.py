"""SGLang's ring of decode steps (--enable-linear-replayssm): its function under both names, against plain steps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions  # noqa: F401
from torch import Tensor
from torch_conv import BF16, F32, randn

import ssmgen

KERNELS = "sglang.srt.layers.attention.linear.kernels"
PLACES = {"gdn": (f"{KERNELS}.gdn_triton", "fused_recurrent_gdn_replayssm_decode")}
PLACES["kda"] = (f"{KERNELS}.kda_triton", "fused_recurrent_linear_replayssm_decode")
B, SLOTS, H, HV, K, V, LENGTH = 3, 6, 2, 4, 16, 20, 4
SLOT = torch.tensor([4, -1, 2, 0], dtype=torch.int32)  # with a row too many


class Model:
    """A layer's pool and rings, of ssm_dtype, and the tokens of steps."""

    def __init__(self, kind: str, dtype: torch.dtype):
        self.kda, (module, name) = kind == "kda", PLACES[kind]
        self.function = getattr(import_module(module), name)
        gate = (HV, K) if self.kda else (HV,)
        self.state = pages(SLOTS, HV, V, K, dtype=dtype)
        self.d, self.k = (torch.full((SLOTS, h, LENGTH, n), torch.nan, dtype=dtype) for h, n in ((HV, V), (H, K)))
        self.g = torch.full((SLOTS, gate[0], LENGTH, *gate[1:]), torch.nan)
        self.weights = {"A_log": randn(HV, seed=1) / 4, "dt_bias": randn(*gate, seed=2)}

    def token(self, t: int) -> dict[str, Tensor]:
        gate = (HV, K) if self.kda else (HV,)
        mixed = randn(B, 2 * H * K + HV * V + 8, seed=3 + t, dtype=BF16)[:, : 2 * H * K + HV * V]
        return {"mixed_qkv": mixed, "a": randn(B, *gate, seed=50 + t, dtype=BF16), "b": randn(B, HV, seed=90 + t, dtype=BF16)}

    def step(self, x: dict[str, Tensor], position: Tensor, flush: Tensor | None = None) -> Any:
        out = torch.full((B, 1, HV, V), torch.nan, dtype=BF16)
        found = self.function(
            **x, **self.weights, scale=K**-0.5, initial_state=self.state, d_cache=self.d, k_cache=self.k, g_cache=self.g, out=out,
            ssm_state_indices=SLOT[:B], write_pos=position, force_flush=flush, use_qk_l2norm_in_kernel=True, is_kda=self.kda,
        )  # fmt: skip
        if not isinstance(found, str):
            assert found[0] is out and found[1] is self.state
            return out[:, 0]
        return found

    def plain(self, state: Tensor, x: dict[str, Tensor]) -> Tensor:
        q, k, v = x["mixed_qkv"].split([H * K, H * K, HV * V], 1)
        function = ssmgen.kda if self.kda else ssmgen.gated_delta_rule
        return function(
            state, q.view(B, H, K), k.view(B, H, K), v.view(B, HV, V), x["a"], x["b"], **self.weights, use_qk_l2norm=True,
            beta_sigmoid=True, state_indices=SLOT[:B],
        )  # fmt: skip


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("flush", [False, True])
def test_steps_with_a_ring_are_plain_steps(sglang, kind, flush):
    """The pool is written when the ring is full, or earlier if asked; padded rows and other slots never."""
    model = Model(kind, F32)
    plain, position, before = model.state.clone(), torch.tensor([0, 0, 0], dtype=torch.int32), model.state.clone()
    for t in range(2 * LENGTH + 1):
        x, asked = model.token(t), torch.tensor([int(t == 1), 1, 0], dtype=torch.int32) if flush else None
        out, want = model.step(x, position, asked), model.plain(plain, x)
        assert torch.allclose(out[[0, 2]].float(), want[[0, 2]].float(), rtol=2**-7, atol=1e-5) and not out[1].any()
        written = (position == LENGTH - 1) | (asked.bool() if asked is not None else False)
        for b in (0, 2):
            slot = int(SLOT[b])
            if written[b]:
                assert torch.allclose(model.state[slot], plain[slot], rtol=1e-4, atol=1e-5)
                before[slot] = model.state[slot]
        assert torch.equal(model.state, before)
        position = torch.where(written, 0, position + 1).int()
        position[1] = 0


@pytest.mark.parametrize("kind", PLACES)
def test_an_empty_ring_has_the_bits_of_a_plain_step(sglang, kind):
    model = Model(kind, BF16)
    x, plain = model.token(0), model.state.clone()
    position, asked = torch.zeros(B, dtype=torch.int32), torch.ones(B, dtype=torch.int32)
    assert torch.equal(model.step(x, position, asked), model.plain(plain, x)) and torch.equal(model.state, plain)
    assert model.d.isnan().all() and model.k.isnan().all() and model.g.isnan().all()


@pytest.mark.refused
def test_rings_of_two_dtypes(sglang, caplog):
    model = Model("gdn", F32)
    model.d = model.d.bfloat16()
    before = model.state.clone()
    assert model.step(model.token(0), torch.zeros(B, dtype=torch.int32)).startswith("the engine's")
    assert "ring.v is torch.bfloat16; expected torch.float32" in caplog.text and torch.equal(model.state, before)
