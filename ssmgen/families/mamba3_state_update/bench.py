"""The benchmark of mamba3_state_update.

The four states of a slot share a page, as engines keep them, and the ceiling copies the same number of pages in place. TB/s counts a
slot's bytes, read and written. Inputs and slots rotate over more bytes than the L2 cache has; weights stay in it.

mamba_ssm is the official step without its norms of B and C and without the activations, which are ready: the rotation (Triton), the step
(CuTe) and the copies of k, v and the angles, on dense states without slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At, share_of, users
from ...bench.case import HOST_BATCH, MAX_SETS, Case, Launch, drawn, slots_of, some_of, some_rows
from ...bench.engine import Bench, Values
from ...bench.schema import COUNT
from ...calls.checks import TORCH_DTYPES
from ...errors import SsmgenError
from ...select.models import Model
from ...spec.kernel import DType
from .models import Mamba3
from .operands import POOLS

DEFAULTS = ("mamba3-siso-1.5b", "mamba3-mimo-1.5b")
LIMITS = {"out": 1e-2, "angle_state": 2e-6}  # norm errors


def settle(at: At) -> tuple[At, ...]:
    """The case with its model's share. Raises SsmgenError for models that other functions decode."""
    model = share_of(at)
    if not isinstance(model, Mamba3):
        raise SsmgenError(f"not decoded by mamba3_state_update: {model.name}")
    return (At(**{**vars(at), "model": model.name, "heads": model.nheads, "rank": model.rank, "share": model}),)


def pages(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], batch: int, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """(pages [slots, bytes / 2] of bf16, the states in them)"""
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    page = sum(sizes.values())
    slots = slots_of(page, batch)
    whole = torch.empty(slots, page // 2, dtype=torch.bfloat16, device=device)
    found, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        found[name] = whole[:, start // 2 : (start + sizes[name]) // 2].view(dtype).unflatten(1, shape)
        for part in found[name].split(max(1, slots // 16)):
            part.normal_()
        start += sizes[name]
    return whole, found


def inputs(at: At, device: torch.device) -> Case:
    """The calls of one case: raw projections in bf16, biases and factors in f32."""
    model, B, state = at.share, at.batch, TORCH_DTYPES[at.state]
    H, P, N, G, R, n = model.nheads, model.headdim, model.d_state, model.ngroups, model.rank, model.angles
    io = torch.bfloat16
    shapes = {"state": ((H, P, N), state), "k_state": ((R, H, N), io), "v_state": ((H, P), io), "angle_state": ((H, n), torch.float32)}
    whole, pools = pages(shapes, B, device)
    slots, page = whole.shape[0], whole.shape[1] * 2
    sets = max(1, min(MAX_SETS, slots // B))
    lead = (B,) if at.tokens == 1 else (B, at.tokens)

    def rand(*shape: int, dtype: torch.dtype = io) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    rotating = {name: rand(sets, *lead, H, P) for name in ("x", "z", "out")} | {name: rand(sets, *lead, R, G, N) for name in ("B", "C")}
    rotating |= {name: rand(sets, *lead, H) for name in ("dt", "A", "trap")} | {"angle": rand(sets, *lead, n)}
    rotating["state_indices"] = drawn(slots, sets, B, device)
    f32 = torch.float32
    shared: dict[str, Any] = pools | {"D": rand(H, dtype=f32), "dt_bias": rand(H, dtype=f32) - 4}
    shared |= {name: 1 + rand(N) / 8 for name in ("B_norm", "C_norm")} | {
        name: 1 + rand(H, R, N, dtype=f32) for name in ("B_bias", "C_bias")
    }
    if R > 1:
        shared |= {name: (1 + rand(H, R, P, dtype=f32) / 8) / R for name in ("mimo_x", "mimo_o")}
        shared["mimo_z"] = 1 + rand(H, R, P, dtype=f32) / 8
    shared |= {"A_form": model.rate.value, "rotary": model.rotary.value}
    rows, by_row = some_of(B, 4, device), ("x", "z", "out", "B", "C", "dt", "A", "trap", "angle")
    return Case(
        function=ssmgen.mamba3_state_update,
        sets=sets,
        bytes=2 * B * page,
        rotating=rotating,
        shared=shared,
        part=lambda call: some_rows(call, rows, by_row, pools=POOLS),
        limits=LIMITS,
        copied=(whole, rotating["state_indices"]),
        host=B <= HOST_BATCH,
    )


def mamba_ssm(case: Case) -> Launch | None:
    """Its step is for one token, and for dense states of a batch: the first slots of the pools, which rotate as ours do."""
    rotate = reports.imported("mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step", "apply_rotary_qk_inference_fwd")
    step = reports.imported("mamba_ssm.ops.cute.mamba3.mamba3_step_fn", "mamba3_step_fn")
    if rotate is None or step is None or case.at.tokens > 1:
        return None
    model, B = case.at.share, case.at.batch
    H, P, R, n = model.nheads, model.headdim, model.rank, model.angles
    states = [{name: case.shared[name][i * B : (i + 1) * B].clone() for name in POOLS} for i in range(case.sets)]
    own = {name: case.shared[name].transpose(0, 1).contiguous() for name in ("B_bias", "C_bias")}
    ones = torch.ones(R, H, P, device=case.device, dtype=torch.bfloat16)
    factors = [case.shared[name].transpose(0, 1).contiguous() if R > 1 else ones for name in ("mimo_x", "mimo_o", "mimo_z")]
    ready = [
        {
            "A": -torch.nn.functional.softplus(call["A"].float()),
            "dt": torch.nn.functional.softplus(call["dt"] + call["dt_bias"]),
            "trap": call["trap"].sigmoid(),
            "angle": call["angle"][:, None].expand(B, H, n),
            "B": call["B"].expand(B, R, H, model.d_state),
            "C": call["C"].expand(B, R, H, model.d_state),
        }
        for call in case.calls
    ]

    def launch(i: int) -> None:
        call, r, of = case.arguments(i), ready[i], states[i]
        q, k, angle = rotate(
            q=r["C"], k=r["B"], angle_state=of["angle_state"], angle_proj=r["angle"], dt=r["dt"], bias_q=own["C_bias"],
            bias_k=own["B_bias"], inplace=False, conjugate=False, rotate_pairwise=R == 1,
        )  # fmt: skip
        step(
            of["state"], of["k_state"], of["v_state"], r["A"], k, q, call["D"], call["x"], r["dt"], r["trap"], factors[0],
            outproj=factors[1], out=call["out"], z=call["z"], zproj=factors[2], tile_D=64, num_warps=4,
        )  # fmt: skip
        for name, new in (("angle_state", angle), ("k_state", k), ("v_state", call["x"])):
            of[name].copy_(new)

    return launch


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    return {"names": (model.name,), "tp": tp} if isinstance(model, Mamba3) else None


def words(row: Mapping[str, Any]) -> str:
    several = [f"{row['tokens']} tokens"] if row["tokens"] > 1 else []
    return ", ".join(
        [row["model"], f"{row['heads']} heads", *([f"rank {row['rank']}"] if row["rank"] > 1 else []), f"{row['state']} state", *several]
    )


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Decode steps of models."""
    for model in given or users("mamba3_state_update"):
        for state, T, batch in product(axes.states_of(model), tokens, batches):
            yield {"model": model, "state": state, "tokens": T, "batch": batch}


BENCH = Bench(
    op="mamba3_state_update",
    method=__doc__,
    axes=(
        axes.several("--model", "names", str, DEFAULTS, "May repeat. Default: the SISO and the MIMO model of 1.5B parameters."),
        axes.states((DType.BF16, DType.F32), "bf16 and f32"),
        axes.tokens(),
        axes.batches(1, 8, 64, 256),
        axes.TP,
    ),
    inputs=inputs,
    words=words,
    peers={"mamba_ssm": mamba_ssm},
    quick={"batches": (1, 64), "names": DEFAULTS[:1]},
    of_model=of_model,
    settle=settle,
    ceiling="in_place",
    copied=True,
    fields={"heads": COUNT, "rank": COUNT},
    tuned=tuned,
    label=lambda at: f"{at.model} {at.state.value} T {at.tokens} batch {at.batch}",
)
