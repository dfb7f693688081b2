"""Linear attention over prompts: calls of every form, and the laws of their results, on a card or in the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from scan_cases import BF16, BOUNDS, F16, F32, Scan, Sizes, emulated, error, same, starts_of
from torch import Tensor

import ssmgen

__all__ = ["BF16", "F16", "F32", "FORMS", "Scan", "Sizes", "emulated", "make", "same"]

FORMS = ("log", "constant", "none", "slope")
PER_TOKEN = ("q", "k", "v")
DECODE = {"chunk_simple_gla": ssmgen.simple_gla, "chunk_lightning_attn": ssmgen.lightning_attn}


def make(form: str, sizes: Sizes, *lead: int, seed: int = 0) -> tuple[str, dict[str, Any]]:
    """(function, call): q, k, v of […], and a decay of that form."""
    generator = torch.Generator().manual_seed(seed)
    H = sizes.heads

    def randn(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=generator).to(sizes.device, sizes.x)

    call = {"q": randn(sizes.groups, sizes.d_state), "k": randn(sizes.groups, sizes.d_state), "v": randn(H, sizes.headdim)}
    if form == "slope":
        return "chunk_lightning_attn", call | {"slope": torch.rand(H, generator=generator).to(sizes.device) / 8, "scale": 1.0}
    decay = {"log": lambda: -torch.rand(*lead, H, generator=generator), "constant": lambda: -torch.rand(H, generator=generator) / 8}
    return "chunk_simple_gla", call | ({"g": decay[form]().to(sizes.device)} if form in decay else {})


def exact(call: Mapping[str, Any], states: Tensor) -> tuple[Tensor, Tensor]:
    """(out, states) of a batch in float64, with all tokens at once: a formula that neither kernels nor the reference compute."""
    q, k, v = (call[n].cpu().double() for n in PER_TOKEN)
    batch, T, H, _ = v.shape
    q, k = (t.repeat_interleave(H // t.shape[2], 2) for t in (q, k))
    steps = -call["slope"] if "slope" in call else call.get("g", torch.zeros(H))
    total = steps.cpu().double().expand(batch, T, H).cumsum(1)
    weights = torch.exp((total[:, :, None] - total[:, None]).clamp(max=0)) * torch.ones(T, T).double().tril()[None, :, :, None]
    states = states.cpu().double()
    scores = torch.einsum("bihk,bjhk->bijh", q, k) * weights
    out = torch.einsum("bijh,bjhv->bihv", scores, v) + torch.einsum("bihk,bhvk,bih->bihv", q, states, total.exp())
    last = torch.einsum("bjh,bjhv,bjhk->bhvk", torch.exp(total[:, -1:] - total), v, k) + states * total[:, -1].exp()[..., None, None]
    return out * call.get("scale", q.shape[-1] ** -0.5), last


def is_accurate(scan: Scan, call: Mapping[str, Any]) -> None:
    v, q = call["v"], call["q"]
    states = torch.randn(v.shape[0], *v.shape[2:], q.shape[-1], generator=torch.Generator().manual_seed(1))
    out, last = scan(**call, initial_states=states.to(v.device), return_final_states=True)
    for found, wanted in zip((out, last), exact(call, states), strict=True):
        assert error(found, wanted) <= BOUNDS[v.dtype], error(found, wanted)


def of_tokens(call: Mapping[str, Any], span: slice, axis: int) -> dict[str, Any]:
    """The call on some of its tokens."""
    index = (slice(None),) * axis + (span,)
    return {n: t[index] if n in PER_TOKEN or (n == "g" and t.dim() > 1) else t for n, t in call.items()}


def decoding_goes_on(scan: Scan, form: str, sizes: Sizes, tokens: int) -> None:
    """The state that a prompt leaves is the one that the next step reads."""
    name, call = make(form, sizes, 2, tokens + 1)
    wanted, last = exact(call, torch.zeros(2, sizes.heads, sizes.headdim, sizes.d_state))
    _, state = scan(**of_tokens(call, slice(0, tokens), 1), return_final_states=True)
    step = of_tokens(call, slice(tokens, tokens + 1), 1)
    out = DECODE[name](state, **step)
    assert error(out, wanted[:, -1:]) <= BOUNDS[sizes.x] and error(state, last) <= BOUNDS[sizes.x]


def packing_and_cuts_change_no_bit(scan: Scan, form: str, sizes: Sizes, lengths: Sequence[int], cut: int) -> None:
    """Sequences in slots of a pool, by themselves, and in two parts."""
    _, call = make(form, sizes, sum(lengths))
    starts, slots = starts_of(lengths, sizes.device), torch.arange(len(lengths), device=sizes.device).flip(0).int()
    pool = torch.zeros(len(lengths), sizes.heads, sizes.headdim, sizes.d_state, device=sizes.device)
    packed = scan(**call, cu_seqlens=starts, state=pool, state_indices=slots)
    for i, length in enumerate(lengths):
        span = slice(int(starts[i]), int(starts[i + 1]))
        own = of_tokens({n: t[None] if n in PER_TOKEN or (n == "g" and t.dim() > 1) else t for n, t in call.items()}, span, 1)
        if not length:
            assert not pool[slots[i]].any()
            continue
        first, state = scan(**of_tokens(own, slice(0, cut), 1), return_final_states=True)
        parts = [first]
        if length > cut:
            second, state = scan(**of_tokens(own, slice(cut, None), 1), initial_states=state, return_final_states=True)
            parts.append(second)
        assert same(torch.cat(parts, 1)[0], packed[span]) and same(state[0], pool[slots[i]])
