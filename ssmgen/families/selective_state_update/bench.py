"""The benchmark of selective_state_update.

Intermediates: the state after each token goes to a buffer and the pool is only read, 1 + tokens passes over the state. Otherwise the pool
is read and written, 2 passes, like the slot copy in place. TB/s counts the state. FlashInfer gets the same call; mamba-ssm takes one token
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At, share_of, users
from ...bench.case import COLD, GATE, HOST_BATCH, MAX_SETS, Case, Launch, drawn, normal_pool, scales_of, slots_of, some_of, some_rows
from ...bench.engine import Bench, Values
from ...bench.schema import COUNT
from ...calls.checks import NARROW, STORED_DTYPES
from ...errors import SsmgenError
from ...select.models import Model, find_model
from ...spec.kernel import DType, Narrow, must
from .models import Mamba

DEFAULTS = {"nemotron-h-8b": (DType.BF16, DType.F32), "mamba-130m": (DType.F32,), "falcon-mamba-7b": (DType.F32,)}
LIMIT = 1e-2  # norm error of the output
SCALES = {"state": "state_scale", "intermediate_states": "intermediate_state_scales"}


class Unnamed(str):
    """A default model."""


def states_of(at: At) -> Sequence[Any]:
    """State types, if none is given."""
    return DEFAULTS[at.model] if isinstance(at.model, Unnamed) else (find_model(at.model).state,)


def settle(at: At) -> Iterator[At]:
    """The case with its model's share, if that case exists. Raises SsmgenError for models that other functions decode."""
    model = share_of(at)
    if model.function != "selective_state_update":
        raise SsmgenError(f"{model.name} is not decoded by selective_state_update; expected a Mamba model")
    usual = not isinstance(at.model, Unnamed) or at.state in DEFAULTS[at.model]
    if usual and (at.tokens == 1 or model.kind != "mamba1"):
        kept = at.tokens > 1 and at.intermediates is not False
        yield At(**{**vars(at), "model": model.name, "intermediates": kept, "heads": model.nheads, "share": model})


def inputs(at: At, device: torch.device) -> Case:
    """A, dt, D and dt_bias are stride-0 views, as in models."""
    model, B, T, dtype = at.share, at.batch, at.tokens, STORED_DTYPES[at.state]
    mamba1, H, P, N, G = model.kind == "mamba1", model.nheads, model.headdim, model.d_state, model.ngroups
    row, group = ((P,), (N,)) if mamba1 else ((H, P), (G, N))
    lead = (B,) if T == 1 else (B, T)
    bare = torch.Size((*row, N)).numel() * dtype.itemsize
    slots = slots_of(bare, B)
    state = normal_pool(slots, (*row, N), dtype, device)
    scale = scales_of(state)
    sets = max(1, min(MAX_SETS, slots // B))

    def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    rotating = {
        "x": rand(sets, *lead, *row),
        "out": rand(sets, *lead, *row),
        "B": rand(sets, *lead, *group),
        "C": rand(sets, *lead, *group),
    }
    rotating |= {"state_indices": drawn(slots, sets, B, device)} | ({"z": rand(sets, *lead, *row)} if model.gate else {})
    shared: dict[str, Any] = {"state": state, "dt_softplus": True} | ({} if scale is None else {"state_scale": scale})
    if mamba1:
        rotating["dt"] = rand(sets, B, P)
        shared |= {"A": -torch.rand(P, N, device=device) - 0.1, "D": rand(P), "dt_bias": torch.rand(P, device=device) - 4}
    else:
        rotating["dt"] = rand(sets, *lead, H, 1).expand(sets, *lead, H, P)
        bias = (torch.rand(H, device=device) - 4).bfloat16()
        shared |= {"A": (-torch.rand(H, device=device) - 0.1)[:, None, None].expand(H, P, N)}
        shared |= {"D": rand(H)[:, None].expand(H, P), "dt_bias": bias[:, None].expand(H, P)}
    slot_bytes = bare + (0 if scale is None else scale[0].nbytes)
    if at.intermediates:
        count = max(1, min(sets, int(COLD) // (B * T * slot_bytes)))
        shared["update_state"] = False
        rotating["intermediate_states"] = torch.empty(count, *lead, H, P, N, device=device, dtype=dtype)
        if dtype in NARROW:
            rotating["intermediate_state_scales"] = torch.empty(count, *lead, H, P, device=device)
    passes = 1 + T if at.intermediates else 2
    rows, by_row = some_of(B, 4, device), ("x", "dt", "B", "C", "z", "out", "intermediate_states")
    return Case(
        function=ssmgen.selective_state_update,
        sets=sets,
        bytes=passes * B * slot_bytes,
        rotating=rotating,
        shared=shared,
        part=lambda call: some_rows(call, rows, by_row, scales=SCALES),
        limits={"out": LIMIT},
        slack=(T - 1) * GATE[torch.float32],
        outputs=("out", "intermediate_states"),
        copied=(state, rotating["state_indices"]),
        comparable=not at.intermediates,
        host=B <= HOST_BATCH,
        row={"passes": passes},
    )


def flashinfer(case: Case) -> Launch | None:
    """FlashInfer serves Mamba-2 only."""
    function = None if case.at.share.kind == "mamba1" else reports.imported("flashinfer.mamba", "selective_state_update")
    if function is None:
        return None
    theirs = {"state_indices": "state_batch_indices", "intermediate_states": "intermediate_states_buffer"}
    calls = []
    for ours in case.calls:
        call = {"z": None} | {theirs.get(name, name): value for name, value in ours.items() if name != "update_state"}
        if case.at.tokens > 1:
            call |= {"cache_steps": case.at.tokens, "disable_state_update": case.at.intermediates}
        if case.at.intermediates:  # if no rows are given, FlashInfer uses the slots as rows
            slots = ours["state_indices"]
            call["intermediate_state_indices"] = torch.arange(case.at.batch, device=slots.device, dtype=slots.dtype)
        calls.append(call)
    return lambda i: function(**calls[i])


def mamba_ssm(case: Case) -> Launch | None:
    function = reports.imported("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    if function is None or case.at.tokens > 1 or "state_scale" in case.shared:
        return None
    calls = [{n: t for n, t in call.items() if n not in ("out", "state_indices")} for call in case.calls]
    slots = case.rotating["state_indices"]
    return lambda i: function(**calls[i], state_batch_indices=slots[i])


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    return {"names": (model.name,), "tp": tp} if isinstance(model, Mamba) else None


def mistakes(names: Sequence[str], tokens: Sequence[int] = (), intermediates: bool | None = None, **others: Any) -> list[str]:
    several = max(tokens, default=1) > 1
    mamba1 = [name for name in names if find_model(name).kind == "mamba1"]
    return [
        *must(not intermediates or several, "--intermediates is given for one token; expected --tokens of 2 or more"),
        *must(not (several and mamba1), f"--tokens is given with {', '.join(mamba1)}; expected Mamba-2 models for several tokens"),
    ]


def words(row: Mapping[str, Any]) -> str:
    heads = [f"{row['heads']} heads"] if row["heads"] > 1 else []  # Mamba-1 has one
    several = [f"{row['tokens']} tokens"] if row["tokens"] > 1 else []
    kept = ["every state kept"] if row["intermediates"] else []
    return ", ".join([row["model"], *heads, f"{row['state']} state", *several, *kept])


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Decode steps of models."""
    for model in given or users("selective_state_update"):
        mamba1 = model.kind == "mamba1"
        states, steps = ([model.state], [1]) if mamba1 else (axes.states_of(model), tokens)
        for state, T, batch in product(states, steps, batches):
            yield {"model": model, "state": state, "tokens": T, "batch": batch}


BENCH = Bench(
    op="selective_state_update",
    method=__doc__,
    axes=(
        axes.several(
            "--model", "names", str, tuple(map(Unnamed, DEFAULTS)), "Model; may repeat. Default: the models of docs/performance.md."
        ),
        axes.states(states_of, "the model's or operator's", Narrow),
        axes.tokens(),
        axes.batches(1, 2, 4, 8, 16, 32, 64, 128, 256),
        axes.intermediates((None,)),
        axes.TP,
    ),
    inputs=inputs,
    words=words,
    peers={"flashinfer": flashinfer, "mamba_ssm": mamba_ssm},
    quick={"batches": (1, 16, 128), "names": ("nemotron-h-8b", "mamba-130m")},
    of_model=of_model,
    mistakes=mistakes,
    settle=settle,
    ceiling="in_place",
    copied=True,
    fields={"heads": COUNT},
    nameless=True,
    tuned=tuned,
    label=lambda at: f"{at.model} {at.state.value} T {at.tokens} batch {at.batch}",
)
