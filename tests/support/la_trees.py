"""Draft trees of the delta rules: cases, and laws of calls of the public functions, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from la_cases import GDN, I32, I64, Case
from ssu_cases import BF16, F16, F32
from torch import Tensor
from varying import vary

import ssmgen

Run = Callable[..., None]  # of a public function and its arguments, to which `out` belongs
TREE = (-1, 0, 0, 1, 1, 2, 5, 0, 3)  # parents: more tokens than are staged at a time


def cases() -> list[Case]:
    gdn = replace(GDN, id="gdn", tokens=4, batch=7, heads=2, K=64, V=32, kept=0, parents=I32)
    kda = replace(gdn, id="kda", rule="kda", gate="bounded")
    ragged = replace(gdn, id="ragged", tokens=None, lengths=(9, 2, 1, 0, 3, 4))
    found = [
        *vary(gdn, f32={}, bf16={"state": BF16, "parents": I64}, rows={"rows": I32, "parents": I64}, t9={"tokens": 9, "update": False}),
        *vary(gdn, each={"dst": "token", "batch": 5}, dst={"dst": "row", "rows": I64, "batch": 11}, no_pool={"index": None, "kept": 2}),
        *vary(gdn, tail={"V": 72, "K": 128, "state": BF16}, odd={"slot_gap": 3, "state": F16, "packed": 1}, one={"tokens": 1}),
        *vary(kda, f32={}, bf16={"state": BF16, "rows": I32, "update": False}),
        replace(gdn, id="delta", rule="delta_rule", gate="log"),
        *vary(ragged, f32={"parents": I64}, few={"kept": -3, "rows": I32, "state": BF16}, kda={"rule": "kda", "kept": 1, "dst": "row"}),
    ]
    found += [
        replace(c, id=f"{c.id}-kv", layout="kv") for c in found if c.id in ("gdn-bf16", "gdn-tail", "gdn-odd", "kda-f32", "ragged-few")
    ]
    by_row = replace(gdn, parents=None)
    return [*found, *vary(by_row, no_tree_rows={"rows": I32}, no_tree_rows_ragged={"rows": I64, "tokens": None, "lengths": ragged.lengths})]


class Draw:
    """Operands of a call whose tokens are chosen from a fixed set."""

    def __init__(self, rule: str, device: str, state: torch.dtype, layout: str = "vk", K: int = 64, V: int = 32, batch: int = 2):
        g = torch.Generator().manual_seed(3)
        T, HV, HK = len(TREE), 4, 2

        def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(*shape, generator=g).to(device, dtype)

        self.function, self.device, self.layout = getattr(ssmgen, rule), device, layout
        self.tokens = {"q": randn(batch, T, HK, K), "k": randn(batch, T, HK, K), "v": randn(batch, T, HV, V), "beta": randn(batch, T, HV)}
        self.weights: dict[str, Any] = {"beta_sigmoid": True, "use_qk_l2norm": True, "state_layout": layout}
        if rule != "delta_rule":
            per_channel = (K,) if rule == "kda" else ()
            self.tokens["g"] = randn(batch, T, HV, *per_channel)
            self.weights |= {"A_log": randn(HV, dtype=F32), "dt_bias": randn(HV, *per_channel, dtype=F32)}
        self.state = randn(batch, HV, *((V, K) if layout == "vk" else (K, V)), dtype=state)

    def call(self, run: Run, order: list[int], parents: list[int] | None) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs, states after each token, the pool) of these tokens, in this order."""
        given = {n: t[:, order].contiguous() for n, t in self.tokens.items()}
        state, (batch, T) = self.state.clone(), given["v"].shape[:2]
        kept = state.new_full((batch, T, *state.shape[1:]), 7.0)
        out = torch.full_like(given["v"], torch.nan, dtype=F32)
        if parents is not None:
            given["parents"] = torch.tensor([parents] * batch, dtype=I32, device=self.device)
        run(self.function, state=state, **given, **self.weights, intermediate_states=kept, out=out)
        return out, kept, state


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) and not x.isnan().any() for x, y in zip(a, b, strict=True))


def a_chain_is_no_tree(run: Run, draw: Draw) -> None:
    """A number that is not an earlier token means the token before, unrounded. With f32 states the token before itself gives the same."""
    order = list(range(len(TREE)))
    want = draw.call(run, order, None)
    chains = [[-1] * len(order), order, [t + 1 for t in order], [-(2**31)] * len(order), [2**31 - 1] * len(order)]
    chains += [[t - 1 for t in order]] if draw.state.dtype is F32 else []
    for parents in chains:
        assert same(draw.call(run, order, parents), want), parents


def each_path_equals_the_path_alone(run: Run, draw: Draw) -> None:
    out, kept, state = draw.call(run, list(range(len(TREE))), list(TREE))
    assert torch.equal(state, kept[:, -1]), "the pool receives the last token's state"
    for t in range(len(TREE)):
        path = [t]
        while path[0] > 0:
            path.insert(0, TREE[path[0]])
        alone, states, _ = draw.call(run, path, [t - 1 for t in range(len(path))])
        assert same((alone[:, -1], states[:, -1]), (out[:, t], kept[:, t])), f"path {path}"


def the_order_of_siblings_changes_nothing(run: Run, draw: Draw) -> None:
    out, kept, _ = draw.call(run, list(range(len(TREE))), list(TREE))
    order = [0, 7, 2, 1, 5, 4, 3, 6, 8]  # the tokens, by their numbers above
    again, states, _ = draw.call(run, order, [-1, *(order.index(TREE[t]) for t in order[1:])])
    assert same((again, states), (out[:, order], kept[:, order]))


LAWS = (a_chain_is_no_tree, each_path_equals_the_path_alone, the_order_of_siblings_changes_nothing)
DRAWS = (
    ("gated_delta_rule", F32, "vk"),
    ("gated_delta_rule", BF16, "kv"),
    ("kda", F32, "kv"),
    ("kda", F16, "vk"),
    ("delta_rule", BF16, "vk"),
)
