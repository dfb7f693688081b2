"""Cases of decode layers for the emulator and the card."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from ssu_cases import BF16, F16, F32
from varying import vary

I32, I64 = torch.int32, torch.int64


@dataclass(frozen=True)
class Case:
    """Fields that all layers' cases share. `id` is readable."""

    id: str
    batch: int = 5
    x: torch.dtype = BF16  # of the projection and the windows
    gates: torch.dtype | None = None  # of dt, or of a and b; None: slices of the projection
    state: torch.dtype = BF16
    out: torch.dtype | None = None  # None: the dtype of x
    weights: torch.dtype = F32  # of A, D, dt_bias; of A_log
    bias: bool = True  # whether there is dt_bias
    taps: int = 4
    conv_weight: torch.dtype = BF16
    conv_bias: torch.dtype | None = BF16
    window: str = "runs"  # or channels; any
    extra: int = 0  # inputs that a window holds in addition to the taps before the last
    z: torch.dtype | None = None  # None: a slice of the projection
    norm: torch.dtype | None = BF16  # None: no norm
    norm_first: bool = False
    index: torch.dtype | None = I32
    pad_slot_id: int = -1
    slot_gap: int = 0  # elements between slots of the state
    odd: bool = False  # slices at odd places, weights and out too
    tokens: int = 0  # of a sequence; 0: no axis of them
    update: bool = True
    kept: torch.dtype | None = None  # of intermediate states
    saved: str = ""  # intermediate windows: runs, or any
    rows: torch.dtype | None = None  # of intermediate_state_indices
    columns: int = 0  # of either buffer, beyond the tokens
    accepted: torch.dtype | None = None  # of num_accepted_tokens: a slot per token
    philox: int = 0  # rounds of the noise

    @property
    def slots(self) -> int:
        if self.accepted:
            return 2 * self.batch * self.tokens + 9
        return self.batch if self.index is None else self.batch + min(self.batch, 32) + 9

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes before the channels."""
        return (self.batch, self.tokens) if self.tokens else (self.batch,)

    @property
    def window_len(self) -> int:
        return self.taps - 1 + self.extra + (self.tokens - 1 if self.accepted else 0)


@dataclass(frozen=True)
class Gdn(Case):
    """A call of gdn_layer."""

    heads: int = 4
    key_heads: int = 2
    K: int = 32
    V: int = 16
    norm_first: bool = True
    activation: str = "silu"
    l2norm: bool = True
    twice: bool = False
    scale: float | None = None
    layout: str = "vk"
    headed: bool = False  # z and out have an axis of heads


@dataclass(frozen=True)
class Kda(Gdn):
    """A call of kda_layer."""

    activation: str = "sigmoid"
    lower_bound: float | None = None
    bare_gate: bool = False  # no A_log
    flat: bool = False  # g and dt_bias without an axis of heads


@dataclass(frozen=True)
class Mamba(Case):
    """A call of mamba2_layer."""

    heads: int = 4
    groups: int = 2
    P: int = 16
    N: int = 32
    size: int | None = None  # that is normed together; None: of a row
    ungated: bool = False  # no z
    D: str = "head"  # or row; none
    softplus: bool = True
    limit: tuple[float, float] | None = None


def named(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.id)


GDN = Gdn("gdn")
GDN_MATRIX = [
    GDN,
    *vary(GDN, kv={"layout": "kv"}, f32={"state": F32}, kv_f32={"layout": "kv", "state": F32}, f16={"x": F16, "state": F16}),
    *vary(GDN, all_f32={"x": F32, "state": F32, "conv_weight": F32, "conv_bias": F32, "norm": F32}, out_f32={"out": F32}),
    *vary(
        GDN, channels={"window": "channels"}, any={"window": "any", "extra": 1}, taps2={"taps": 2, "conv_bias": None}, longer={"extra": 1}
    ),
    *vary(GDN, odd={"odd": True}, odd_kv={"odd": True, "layout": "kv", "slot_gap": 1}, slot_gap={"slot_gap": 1, "state": F32}),
    *vary(GDN, bare={"norm": None, "bias": False, "l2norm": False}, twice={"twice": True, "scale": 0.5}, sigmoid={"activation": "sigmoid"}),
    *vary(GDN, gate_first={"norm_first": False}, mixed={"z": F32, "gates": F32, "norm": F32, "weights": F16, "conv_weight": F32}),
    *vary(GDN, no_slots={"index": None, "batch": 3}, pad={"index": I64, "pad_slot_id": 7}, one={"batch": 1}, headed={"headed": True}),
    *vary(GDN, taps3={"taps": 3, "window": "channels", "x": F32}, taps8={"taps": 8}),
    *vary(GDN, noise={"philox": 7}, noise_kv={"philox": 10, "layout": "kv", "state": F16}),
    *vary(GDN, equal={"key_heads": 4}, one_key={"key_heads": 1}, v12={"V": 12, "K": 36}, v20_kv={"V": 20, "layout": "kv"}, v40={"V": 40}),
]
GDN_HEADS = [
    Gdn("heads-128", heads=2, key_heads=1, K=128, V=128, batch=2, index=None),
    Gdn("heads-256", heads=1, key_heads=1, V=256, batch=2),
]

KDA = Kda("kda", key_heads=4)
KDA_MATRIX = [
    KDA,
    *vary(KDA, kv={"layout": "kv"}, f32={"state": F32}, kv_f32={"layout": "kv", "state": F32}, f16={"x": F16, "state": F16}),
    *vary(KDA, all_f32={"x": F32, "state": F32, "conv_weight": F32, "conv_bias": F32, "norm": F32, "gates": F32}),
    *vary(KDA, bounded={"lower_bound": -5.0}, bare_gate={"lower_bound": -3.0, "bare_gate": True, "flat": True}, flat={"flat": True}),
    *vary(KDA, odd={"odd": True}, odd_kv={"odd": True, "layout": "kv", "slot_gap": 1}, slot_gap={"slot_gap": 1, "state": F32}),
    *vary(KDA, bare={"norm": None, "bias": False, "l2norm": False}, twice={"twice": True, "scale": 0.5}, silu={"activation": "silu"}),
    *vary(KDA, any={"window": "any", "extra": 1}, channels={"window": "channels"}, mixed={"z": F32, "gates": F32, "weights": F16}),
    *vary(KDA, no_slots={"index": None, "batch": 3}, pad={"index": I64, "pad_slot_id": 7}, one={"batch": 1}, headed={"headed": True}),
    *vary(KDA, few_keys={"key_heads": 2}, v12={"V": 12, "K": 36}, v20_kv={"V": 20, "layout": "kv"}, v40={"V": 40}),
    *vary(KDA, noise={"philox": 7, "state": F16}, noise_kv={"philox": 4, "layout": "kv"}),
    Kda("kda-128", heads=2, key_heads=2, K=128, V=128, batch=2, index=None),
]

TOKENS: list[dict[str, Any]] = [
    {"id": "t2", "tokens": 2},
    {"id": "t3-f32", "tokens": 3, "state": F32, "x": F32, "batch": 3},
    {"id": "t8-f16", "tokens": 8, "state": F16, "x": F16, "index": I64, "pad_slot_id": 7},
    {"id": "t3-channels", "tokens": 3, "window": "channels", "extra": 1},
    {"id": "t3-odd", "tokens": 3, "window": "any", "odd": True, "slot_gap": 1},
    {"id": "t2-no-slots", "tokens": 2, "index": None, "batch": 2, "extra": 1},
    {"id": "t3-taps2", "tokens": 3, "taps": 2, "conv_bias": None, "norm": None},
    {"id": "t3-verify", "tokens": 3, "update": False, "kept": BF16, "saved": "runs"},
    {"id": "t8-verify-rows", "tokens": 8, "update": False, "kept": BF16, "saved": "runs", "rows": I32, "columns": 2, "batch": 7},
    {"id": "t2-frozen", "tokens": 2, "update": False},
    {"id": "t1-verify", "tokens": 1, "update": False, "kept": F32, "saved": "any", "state": F32},
    {"id": "t3-windows", "tokens": 3, "saved": "any", "rows": I64, "window": "channels"},
    {"id": "t3-states", "tokens": 3, "kept": BF16, "slot_gap": 1},
    {"id": "t4-both", "tokens": 4, "kept": BF16, "saved": "runs", "taps": 3},
    {"id": "t3-accepted", "tokens": 3, "accepted": I32, "batch": 8},
    {"id": "t8-accepted-f32", "tokens": 8, "accepted": I64, "batch": 8, "state": F32, "x": F32, "norm_first": True},
    {"id": "t4-accepted-channels", "tokens": 4, "accepted": I32, "window": "channels", "extra": 2, "index": I64},
    {"id": "t2-accepted-any", "tokens": 2, "accepted": I32, "window": "any", "extra": 1, "odd": True},
    {"id": "t3-accepted-kept", "tokens": 3, "accepted": I32, "batch": 8, "kept": BF16, "saved": "runs", "rows": I32},
    {"id": "t1-accepted", "tokens": 1, "accepted": I64},
    {"id": "t5-accepted-taps2", "tokens": 5, "accepted": I32, "taps": 2, "norm": None},
]  # fmt: skip


def of_tokens(base: Any, *more: dict[str, Any]) -> list[Any]:
    """A layer's cases of several tokens."""
    return [replace(base, **changes | {"id": f"{base.id}-{changes['id']}"}) for changes in (*TOKENS, *more)]


GDN_TOKENS = of_tokens(
    GDN,
    {"id": "t1", "tokens": 1},  # which one token's kernels serve
    {"id": "t3-kv", "tokens": 3, "layout": "kv", "kept": BF16, "rows": I32, "headed": True},
    {"id": "t4-kv-f32-accepted", "tokens": 4, "layout": "kv", "state": F32, "accepted": I32},
    {"id": "t3-mixed", "tokens": 3, "z": F32, "gates": F32, "norm": F32, "weights": F16, "conv_weight": F32, "out": F32},
    {"id": "t3-bare", "tokens": 3, "norm": None, "bias": False, "l2norm": False, "accepted": I32},
    {"id": "t3-v20", "tokens": 3, "V": 20, "K": 36, "kept": BF16, "saved": "runs"},
    {"id": "t2-one-key", "tokens": 2, "key_heads": 1, "V": 40, "twice": True, "scale": 0.5},
    {"id": "t3-noise", "tokens": 3, "philox": 7, "kept": BF16, "rows": I32},
    {"id": "t3-noise-accepted", "tokens": 3, "philox": 7, "accepted": I32, "batch": 8},
    {"id": "t5-heads-128", "tokens": 5, "heads": 2, "key_heads": 1, "K": 128, "V": 128, "batch": 2, "index": None},
)
KDA_TOKENS = of_tokens(
    KDA,
    {"id": "t1", "tokens": 1, "headed": True},
    {"id": "t3-kv", "tokens": 3, "layout": "kv", "kept": BF16, "rows": I32, "headed": True},
    {"id": "t4-bounded-accepted", "tokens": 4, "lower_bound": -5.0, "accepted": I32, "flat": True},
    {"id": "t3-bare", "tokens": 3, "norm": None, "lower_bound": -3.0, "bare_gate": True, "l2norm": False},
    {"id": "t3-v20", "tokens": 3, "V": 20, "K": 36, "kept": BF16, "saved": "runs", "gates": F32},
    {"id": "t2-few-keys", "tokens": 2, "key_heads": 2, "V": 40},
    {"id": "t3-noise", "tokens": 3, "philox": 7, "state": F16, "kept": F16, "update": False},
    {"id": "t3-noise-kv-accepted", "tokens": 3, "philox": 7, "accepted": I32, "batch": 8, "layout": "kv"},
    {"id": "t5-heads-128", "tokens": 5, "heads": 2, "key_heads": 2, "K": 128, "V": 128, "batch": 2, "index": None},
)

MAMBA = Mamba("mamba")
MAMBA_MATRIX = [
    MAMBA,
    *vary(MAMBA, f32={"state": F32}, f16={"x": F16, "state": F16}, out_f32={"out": F32}),
    *vary(MAMBA, all_f32={"x": F32, "state": F32, "conv_weight": F32, "conv_bias": F32, "norm": F32}, slot_gap={"slot_gap": 1}),
    *vary(
        MAMBA, channels={"window": "channels"}, any={"window": "any", "extra": 1}, taps2={"taps": 2, "conv_bias": None}, longer={"extra": 1}
    ),
    *vary(MAMBA, odd={"odd": True}, grouped={"size": 32}, heads={"size": 16}, norm_first={"norm_first": True}, one_group={"groups": 1}),
    *vary(MAMBA, gated={"norm": None, "D": "row"}, bare={"norm": None, "ungated": True, "D": "none", "bias": False, "softplus": False}),
    *vary(MAMBA, mixed={"z": F32, "gates": F32, "norm": F32, "weights": F16, "conv_weight": F32}, limit={"limit": (0.01, 0.1)}),
    *vary(MAMBA, no_slots={"index": None, "batch": 3}, pad={"index": I64, "pad_slot_id": 7}, one={"batch": 1}, p20={"P": 20, "N": 36}),
    *vary(MAMBA, taps3={"taps": 3, "window": "channels", "x": F32}, taps8={"taps": 8}, noise={"philox": 7}),
]
MAMBA_TOKENS = of_tokens(
    MAMBA,
    {"id": "t1", "tokens": 1},  # which one token's kernels serve
    {"id": "t3-mixed", "tokens": 3, "z": F32, "gates": F32, "norm": F32, "weights": F16, "conv_weight": F32, "out": F32, "size": 32},
    {"id": "t3-gated", "tokens": 3, "norm": None, "D": "row", "limit": (0.01, 0.1)},
    {"id": "t3-bare", "tokens": 3, "norm": None, "ungated": True, "D": "none", "bias": False, "softplus": False, "accepted": I32},
    {"id": "t3-p20", "tokens": 3, "P": 20, "N": 36, "kept": F32, "saved": "runs"},
    {"id": "t2-one-group", "tokens": 2, "groups": 1, "P": 40},
    {"id": "t3-noise", "tokens": 3, "philox": 7, "kept": BF16},
    {"id": "t3-noise-accepted", "tokens": 3, "philox": 7, "accepted": I32, "batch": 8},
    {"id": "t2-noise-kept", "tokens": 2, "philox": 7, "kept": F16, "update": False, "state": F32},
)
