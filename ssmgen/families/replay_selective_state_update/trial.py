"""Trials of the replay functions: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.trial import INTEGERS, Trial, boundaries, cycled, fill, randn, scales, states, trial
from ...errors import SsmgenError
from ...spec.kernel import Index, Loads
from .planning import CALLERS, PRECISIONS, Options
from .spec import OPERATOR, History, Part, ReplaySpec

BETWEEN = ("mix", "sums")  # written by the first of two kernels for the second


def operands(spec: ReplaySpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Histories of all lengths, with arbitrary data after their end."""
    g = torch.Generator().manual_seed(seed)
    H, P, N, G = spec.nheads, spec.headdim, spec.d_state, spec.ngroups
    step, cached, ragged = spec.history is History.STEP, spec.history is History.CACHE, spec.cu_seqlens is not Index.NONE
    slots = batch if spec.index is Index.NONE else 3 * batch
    most = 1 if cached else spec.tokens if step and spec.tokens < spec.window else spec.tokens - 1
    room = spec.window if step or cached else spec.window + most
    counts = cycled((3, most, 1, 0), batch) if ragged else [most] * batch
    lead = (sum(counts),) if ragged else (batch, most)

    def like_x(*shape: int) -> Tensor:
        return randn(spec.x, *shape, odd=odd, g=g)

    odd = spec.operand_loads is Loads.ELEMENT
    state = states(spec.state, (slots,), (H, P, N), 1 if spec.state_loads is Loads.ELEMENT else 16)
    both = (2,) if step else ()
    rate = -(torch.rand(H, generator=g) + 0.1).to(TORCH_DTYPES[spec.A])
    valid = torch.tensor(cycled((2, 0, spec.window, 1), slots), dtype=torch.int32)
    if cached:
        valid = torch.tensor(cycled((2, 0, spec.window - 1, spec.window - 1, 1, 0), batch), dtype=torch.int32)
    made = {
        "state": fill(state, g),
        "old_x": like_x(slots, room, H, P),
        "old_B": like_x(slots, *both, room, G, N),
        "old_dt": torch.rand(slots, *both, H, room, generator=g),
        "old_dA_cumsum": -torch.rand(slots, *both, H, room, generator=g).cumsum(-1),
        "cache_buf_idx": torch.randint(0, 2, (slots,), generator=g, dtype=torch.int32),
        "ring_start": torch.randint(0, room, (slots,), generator=g, dtype=torch.int32),
        "prev_num_accepted_tokens": valid,
        "x": like_x(*lead, H, P),
        "dt": torch.randn(*lead, H, generator=g).to(TORCH_DTYPES[spec.dt]),
        "A": rate,
        "B": like_x(*lead, G, N),
        "C": like_x(*lead, G, N),
        "out": torch.full((*lead, H, P), float("nan"), dtype=TORCH_DTYPES[spec.out]),
        "arrivals": torch.zeros(slots, dtype=torch.int32),
        "flush": torch.tensor(cycled((False, True, True, False, True, False), batch)),
        "rand_seed": torch.randint(0, 2**62, (slots,), generator=g),
        "mix": torch.full((batch, H, spec.tokens, spec.entries), float("nan")),
        "sums": torch.full((batch, H, spec.tokens), float("nan")),
    }
    if spec.D:
        made["D"] = torch.randn(H, P, generator=g).to(TORCH_DTYPES[spec.D])
    if spec.z:
        made["z"] = randn(spec.z, *lead, H, P, odd=odd, g=g)
    if spec.dt_bias:
        made["dt_bias"] = torch.randn(H, generator=g).to(TORCH_DTYPES[spec.dt_bias])
    if spec.materialize:
        made["out"] = torch.full((batch, H, P, N), float("nan"), dtype=TORCH_DTYPES[spec.out] if spec.scaled else state.dtype)
    if spec.scaled:
        made["state_scale"] = scales(state, g)
    if spec.index is not Index.NONE:
        made["state_indices"] = torch.randperm(slots, generator=g)[:batch].to(INTEGERS[spec.index])
        made["state_indices"][1:2] = -1
    if ragged:
        made["cu_seqlens"] = boundaries(counts, spec.cu_seqlens)
    if cached:
        where = made.get("state_indices", torch.arange(batch)).tolist()
        entries = {slot: int(valid[i]) for i, slot in enumerate(where) if slot >= 0}
        for slot in range(slots):
            _poison(made, slot, entries.get(slot, 0), 0, ())
    else:
        for slot in range(slots):
            first = 0 if step else int(made["ring_start"][slot])
            _poison(made, slot, int(valid[slot]), first, (int(made["cache_buf_idx"][slot]),) if step else ())
    used = {name for part in spec.kernels for name in part.operands()}
    return {name: t for name, t in made.items() if name in used}


def _poison(made: dict[str, Tensor], slot: int, valid: int, first: int, buffer: tuple[int, ...]) -> None:
    """Writes NaN to all entries of a slot's history that are not read. first: the entry at which it begins; buffer: of a step's history."""
    room = made["old_x"].shape[1]
    dead = [(first + k) % room for k in range(valid, room)]
    made["old_x"][slot, dead] = float("nan")
    made["old_B"][slot][buffer][dead] = float("nan")
    for name in ("old_dt", "old_dA_cumsum"):
        made[name][slot][buffer][:, dead] = float("nan")
    if buffer:
        for name in ("old_B", "old_dt", "old_dA_cumsum"):
            made[name][slot][1 - buffer[0]] = float("nan")


def replay(spec: ReplaySpec, batch: int, seed: int) -> Trial:
    """Raises SsmgenError for the first of two kernels alone."""
    if spec.part is Part.PRECOMPUTE:
        raise SsmgenError(
            f"{spec.name} is the first of two kernels, which are checked together. Pass the spec of the second one, of part=main."
        )
    named = operands(spec, batch, seed)
    precision = {terms: name for name, terms in PRECISIONS.items()}[spec.terms]
    room = None if spec.caches else named["old_x"].shape[1] - spec.window
    options = Options(
        spec.dt_softplus, -1, spec.philox_rounds, precision, spec.after_conv, room, spec.two_kernels, materialize=spec.materialize,
        zero_padding=spec.zero_padding,
    )  # fmt: skip
    written = tuple(dict.fromkeys(name for part in spec.kernels if isinstance(part, ReplaySpec) for name in part.written()))
    exact = tuple(n for n in written if n not in ("state", "state_scale", "out", "old_dt", "old_dA_cumsum", *BETWEEN))
    tokens = spec.window + spec.tokens
    scaled = {"state": "state_scale"} if spec.scaled else {}
    return trial(CALLERS[OPERATOR], named, options, written=written, between=BETWEEN, exact=exact, tokens=tokens, scales=scaled)


TRIALS = {ReplaySpec: replay}
