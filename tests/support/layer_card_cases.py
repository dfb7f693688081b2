"""Cases of decode layers at the sizes of models, for a card."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from layer_cases import BF16, F16, F32, I32, I64, Gdn, Kda, Mamba, of_tokens, vary

NEMOTRON = Mamba("nemotron-h-8b", heads=128, P=64, N=128, groups=8, size=1024, extra=1)
MAMBA2 = Mamba("mamba2-2.7b", heads=80, P=64, N=128, groups=1)
FALCON = Mamba("falcon-h1-7b", heads=24, P=128, N=256, groups=1, norm=None, tokens=3)
QWEN35_35B = Gdn("qwen3.5-35b", heads=32, key_heads=16, K=128, V=128)
QWEN35_397B = replace(QWEN35_35B, id="qwen3.5-397b", heads=64)
QWEN3_NEXT = replace(QWEN35_35B, id="qwen3-next", taps=4, conv_bias=None, state=F32, norm=F32)
KIMI = Kda("kimi-linear", heads=32, key_heads=32, K=128, V=128, conv_bias=None)
KIMI_K3 = replace(KIMI, id="kimi-k3", heads=12, key_heads=12, lower_bound=-5.0)  # of eight ranks
SMALL = Mamba("small-mamba", heads=8, P=64, N=64, groups=2, batch=7)
SMALL_GDN = Gdn("small-gdn", heads=8, key_heads=2, K=64, V=64, batch=7)
SMALL_KDA = Kda("small-kda", heads=8, key_heads=2, K=64, V=64, batch=7)
ODD: dict[str, dict[str, Any]] = {"odd": {"odd": True}, "no_slots": {"index": None}, "pad": {"index": I64, "pad_slot_id": 3}}
KV: dict[str, Any] = {"layout": "kv"}


def named_of(base: Any, **changes: Any) -> Any:
    """The case with these changes, which its id lists."""
    words = [f"{n}{'f32' if v is F32 else 'bf16' if v is BF16 else v}" for n, v in changes.items()]
    return replace(base, id="-".join([base.id, *words]), **changes)


def each(base: Any, **axes: Iterable[Any]) -> list[Any]:
    """The case with all combinations of values."""
    found = [base]
    for name, values in axes.items():
        found = [named_of(case, **{name: value}) for case in found for value in values]
    return found


# One token: state of either type and layout, and batches on either side of the rules.

STATES = (BF16, F32)
MODELS = [
    *[case for model in (NEMOTRON, MAMBA2) for case in each(model, state=STATES, batch=(1, 2, 5, 8, 33, 300))],
    *[
        replace(case, extra=case.batch % 2)
        for model, batches in (
            (QWEN35_35B, (1, 2, 5, 8, 9, 33, 300)),
            (QWEN35_397B, (1, 2, 5, 8, 9, 33, 300)),
            (KIMI, (1, 2, 5, 9, 33, 300)),
            (KIMI_K3, (1, 2, 5, 9, 33, 300)),
        )
        for case in each(model, layout=("vk", "kv"), state=STATES, batch=batches)
    ],
]
ROWS = ((96, 64), (256, 128), (64, 256), (128, 40), (64, 512))
SHAPES = [
    Mamba("mamba2-130m", heads=24, P=64, N=128, groups=1, batch=3, extra=1),
    Mamba("p80", heads=112, P=80, N=128, groups=8, size=1120, state=F32, batch=7),
    Mamba("granite", heads=48, P=64, N=128, groups=1, batch=9),
    *[named_of(SMALL, heads=h, groups=g) for h, g in ((1, 1), (4, 4), (6, 2), (16, 2), (12, 1))],
    *[named_of(SMALL, P=p, N=n) for p, n in ((64, 16), (40, 96), (128, 256), (20, 36))],
    *vary(SMALL, **ODD, gap={"slot_gap": 1}, gated={"norm": None, "D": "row"}, noise={"philox": 10}),
    *vary(SMALL, channels={"window": "channels"}, first={"norm_first": True}),
    *vary(QWEN3_NEXT, one={"batch": 1}, several={"batch": 17}, kv={"batch": 17, "layout": "kv"}, channels={"window": "channels"}),
    *[named_of(SMALL_GDN, heads=h, key_heads=g) for h, g in ((1, 1), (4, 4), (6, 2), (16, 2), (12, 1))],
    *vary(KIMI, channels={"window": "channels", "batch": 17}, odd={"odd": True, "batch": 3}, flat={"flat": True}),
    *[case for base in (SMALL_GDN, SMALL_KDA) for k, v in ROWS for case in each(named_of(base, K=k, V=v), layout=("vk", "kv"))],
    *[case for base in (SMALL_GDN, SMALL_KDA) for case in vary(base, **ODD, odd_kv={"odd": True, "slot_gap": 1} | KV)],
    *vary(SMALL_KDA, bare={"lower_bound": -5.0, "bare_gate": True}, noise={"philox": 10, "state": F16}),
    *vary(SMALL_GDN, noise={"philox": 10}, noise_kv={"philox": 10} | KV),
]
VARIED = [
    *[named_of(NEMOTRON, batch=3), named_of(MAMBA2, batch=3, state=F32), *vary(SMALL, noise={"philox": 10})],
    *[*each(named_of(QWEN35_35B, batch=3), state=STATES), *each(named_of(QWEN35_397B, batch=3, layout="kv"), state=STATES)],
    *[*each(named_of(KIMI, batch=3), state=STATES), named_of(KIMI, batch=3, layout="kv")],
    *vary(SMALL, tail={"P": 40, "N": 96, "window": "any", "extra": 1}),
    *[case for base in (SMALL_GDN, SMALL_KDA) for case in vary(base, tail={"V": 40, "K": 96, "window": "any", "extra": 1})],
    *[case for base in (SMALL, SMALL_GDN, SMALL_KDA) for case in vary(base, odd={"odd": True, "slot_gap": 1})],
]

# Several tokens: the engines' uses of a call's states and windows. Kept states have the state's type.


def forms(base: Any, **more: Any) -> list[Any]:
    base = named_of(base, **more) if more else base
    kept = {"update": False, "kept": base.state, "saved": "runs"}
    return vary(base, final={}, verify=kept, rows=kept | {"rows": I32}, accepted={"accepted": I32})


def at(model: Any, *sizes: tuple[int, int]) -> list[Any]:
    """Its forms at these (tokens, batch), of either state."""
    return [case for state in STATES for tokens, batch in sizes for case in forms(model, state=state, tokens=tokens, batch=batch)]


WINDOWED = replace(NEMOTRON, extra=0)  # accepted tokens lengthen the window
MODELS_OF_TOKENS = [
    *[case for model, tokens in ((WINDOWED, 4), (MAMBA2, 2), (FALCON, 3)) for case in at(model, (tokens, 1), (tokens, 8), (tokens, 33))],
    *[
        case
        for model in (replace(QWEN35_35B, conv_bias=None), KIMI, KIMI_K3)
        for turned in each(model, layout=("vk", "kv"))
        for case in at(turned, (2, 1), (4, 8), (8, 2), (4, 33))
    ],
]
SHAPES_OF_TOKENS = [
    *[case for tokens in (1, 2, 6, 7, 8) for case in forms(SMALL, tokens=tokens)],
    *[case for h, g in ((1, 1), (6, 2), (12, 1)) for case in forms(SMALL, tokens=5, heads=h, groups=g)],
    *[case for p, n in ((64, 16), (40, 96), (128, 256), (20, 36)) for case in forms(SMALL, tokens=5, P=p, N=n)],
    *forms(SMALL, tokens=5, odd=True, window="any", slot_gap=1),
    *forms(SMALL, tokens=5, window="channels", extra=1, index=I64, pad_slot_id=3),
    *[case for how in ({"philox": 10}, {"norm": None, "D": "row"}) for case in forms(SMALL, tokens=5, **how)],
    *[
        case
        for base in (SMALL_GDN, replace(SMALL_KDA, key_heads=4))
        for k, v in ROWS[:4]
        for case in each(named_of(base, K=k, V=v, tokens=3), layout=("vk", "kv"))
    ],
    *of_tokens(SMALL_GDN),
    *of_tokens(replace(SMALL_KDA, key_heads=4)),
    *each(replace(QWEN35_35B, batch=3, conv_bias=None), tokens=range(1, 9)),
]
VARIED_OF_TOKENS = [
    *[*forms(WINDOWED, tokens=4, batch=3), named_of(MAMBA2, tokens=2, batch=3, state=F32, kept=F32)],
    *[*forms(SMALL, tokens=5, P=40, N=96, window="any", extra=1), named_of(SMALL, tokens=5, philox=10, kept=BF16)],
    named_of(SMALL, tokens=5, odd=True, slot_gap=1, accepted=I32),
    *[*forms(QWEN35_35B, tokens=4, batch=3), named_of(QWEN35_35B, tokens=4, batch=3, layout="kv", state=F32, kept=F32)],
    *forms(KIMI, tokens=8, batch=3, state=F32),
    named_of(SMALL_GDN, tokens=3, V=40, K=96, window="any", extra=1),
    named_of(replace(SMALL_KDA, key_heads=4), tokens=2, odd=True, slot_gap=1),
]
