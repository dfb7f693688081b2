"""Calls of decode steps with rows of any length: not a multiple of 4, down to 1."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import combine_cases
import la_cases
import narrow_cases
import norm_cases
import ssu_cases
import ssu_token_cases
from la_cases import RAW
from ssu_cases import BF16, F16, F32
from varying import vary

LINEAR = la_cases.Case("gdn", **RAW, heads=2, batch=4, V=5)
KDA = la_cases.Case("kda", rule="kda", **RAW, heads=2, batch=4, V=7, K=13, tokens=3)
M2 = ssu_cases.Case("m2", heads=4, groups=2, headdim=9, batch=4)
TOKENS = ssu_token_cases.Case("t3", tokens=3, batch=4, headdim=9)


def linear() -> list[la_cases.Case]:
    """States of both layouts; the sizes K of vectors, and with keys first the V of neighbours too."""
    sizes = {f"k{k}_{name}": {"K": k, "state": t} for k, (name, t) in zip((1, 2, 3, 5, 33, 130, 1023), cycle(_TYPES), strict=False)}
    keys_first: dict[str, Any] = {
        f"kv_k{k}v{v}": {"layout": "kv", "K": k, "V": v, "state": t}
        for (k, v), t in zip(((1, 1), (3, 5), (5, 2), (8, 3), (66, 35)), (BF16, F32, F16, BF16, BF16), strict=True)
    }
    ring = {"tokens": 4, "kept": 0, "dst": "token", "K": 6}
    return [
        *vary(LINEAR, **sizes, **keys_first, packed_odd={"packed": 1, "K": 7}),
        *vary(LINEAR, gap={"slot_gap": 1, "head_gap": 3, "K": 3, "dst": "row", "batch": 11}),
        *vary(LINEAR, t4=ring, t4_kv=ring | {"layout": "kv", "state": BF16}, ragged={"lengths": (3, 0, 5, 1), "K": 9, "state": F16}),
        *vary(KDA, vk={}, kv={"layout": "kv", "state": BF16}, one={"tokens": None, "K": 1, "V": 1, "heads": 4}),
        *(la_cases.Case(f"{rule}-k6", rule=rule, heads=2, batch=3, K=6, V=6, group=1) for rule in ("comba", "rwkv7", "rwkv6", "gla")),
    ]  # fmt: skip


_TYPES = (("f32", F32), ("bf16", BF16), ("f16", F16))


def mamba() -> list[ssu_cases.Case]:
    sizes = {f"n{n}_{name}": {"d_state": n, "state": t} for n, (name, t) in zip((1, 3, 5, 33, 130, 1023), cycle(_TYPES), strict=False)}
    return [
        *vary(M2, **sizes, pool={"d_state": 7, "index": la_cases.I32, "slot_gap": 1, "state": BF16}),
        *vary(M2, split={"d_state": 6, "index": la_cases.I64, "split": True}, slices={"d_state": 11, "conv_slices": True}),
        *(ssu_cases.Case(f"m1-n{n}", headdim=11, d_state=n, tied=False, z=BF16, state=t) for n, t in ((1, F32), (5, BF16), (18, F16))),
    ]


def mamba_tokens() -> list[ssu_token_cases.Case]:
    tree = {"kept": F32, "parents": la_cases.I32, "tokens": 5}
    return [
        *vary(TOKENS, n1={"d_state": 1}, n2={"d_state": 2, "state": BF16}, n7={"d_state": 7, "dst": "token", "slot_gap": 1, "state": F16}),
        *vary(TOKENS, tree=tree | {"d_state": 5}, ragged={"lengths": (3, 0, 5, 1), "d_state": 33, "kept": BF16}, n130={"d_state": 130}),
    ]


def narrow() -> list[narrow_cases.Case]:
    shape = {"headdim": 9, "batch": 3}
    return [
        narrow_cases.Case(f"n{n}-{str(t).removeprefix('torch.')}", d_state=n, state=t, tokens=tokens, kept=kept, **shape)
        for n, t, tokens, kept in (
            (1, narrow_cases.I8, 0, None),
            (7, narrow_cases.I16, 0, None),
            (33, narrow_cases.E4M3, 0, None),
            (6, narrow_cases.I8, 3, narrow_cases.I16),
        )
    ]


def norms() -> list[norm_cases.Case]:
    GDN, MAMBA = norm_cases.GDN, norm_cases.MAMBA
    return [
        *norm_cases.vary(GDN, **{f"{n}": {"size": n} for n in (1, 2, 3, 5, 33, 129, 1026, 16383)}),
        *norm_cases.vary(MAMBA, n7={"size": 7, "x": F32}, n35_odd={"size": 35, "layout": "odd", "out_layout": "odd"}, n130={"size": 130}),
        *norm_cases.vary(norm_cases.PLAIN, in_x={"size": 9, "in_place": "x"}, f16={"size": 77, "x": F16, "out": F16, "weight": F16}),
    ]


def splits() -> list[combine_cases.Case]:
    DENSE, PREFIX, PAIR = combine_cases.DENSE, combine_cases.PREFIX, combine_cases.PAIR
    return [
        *combine_cases.vary(DENSE, **{f"d{n}": {"d_v": n} for n in (1, 2, 3, 65, 258, 1023)}, bf16={"d_v": 35, "o": BF16, "splits": 40}),
        *combine_cases.vary(PREFIX, d5={"d_v": 5, "skip_single": True, "mask": True}, d130={"d_v": 130}),
        *combine_cases.vary(PAIR, d7={"d_v": 7}, in_place={"d_v": 515, "in_place": True, "o": F32, "out": F32}),
    ]


CASES = [
    (operator, case)
    for operator, cases in {
        "linear_attention": linear(), "selective_state_update": mamba(), "several_tokens": mamba_tokens(), "fewer_bits": narrow(),
        "gated_rms_norm": norms(), "combine_splits": splits(),
    }.items()
    for case in cases
]  # fmt: skip
IDS = [f"{operator}-{case.id}" for operator, case in CASES]
