"""The benchmark of selective_scan: bf16 except A, D, the bias and states, which are f32; softplus, D, a gate; N 16, one group.

Inputs and outputs rotate over enough sets to exceed 640 MB; A, D and delta_bias do not rotate. Bytes: u, delta, z, B, C and the output
once, and the states that are written. The ceiling is torch's out-of-place multiplication of dense tensors that moves the same bytes.

Forms. first: [batch, dim, T], tokens contiguous, as in mamba-ssm. last: [batch, T, dim], channels contiguous. Sequences of equal
lengths, from zeros, which leave their final states. Packed: the sequences are concatenated, with cu_seqlens.

Peer: mamba-ssm's selective_scan_fn, for channels first, not packed. It returns new tensors, which are kept until the set's next turn,
so that its outputs rotate too. Host times are eager calls with prepared arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import product
from typing import Any

import click
import torch
from torch import Tensor

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At
from ...bench.case import GATE, Call, Case, Launch, keeping
from ...bench.engine import Bench, Values
from ...bench.prompts import PACKED, PROMPT, packed_words, prompt_case, prompt_sets, sequences_of
from ...select.models import Model

SHAPES = [(8192, 1, 2048), (8192, 1, 8192), (8192, 1, 32768), (8192, 8, 2048)]
CHECKED = 64  # channels that are compared with float64: neighbours in one block, and channels of other blocks


class Form(Enum):
    FIRST = "first"
    LAST = "last"


def inputs(at: At, device: torch.device) -> Case:
    dim, count, length = at.shape
    N, first = at.d_state, at.form is Form.FIRST
    moved = count * (length * (8 * dim + 4 * N) + 4 * dim * N)
    sets, lead = prompt_sets(moved), () if at.packed else (count,)

    def made(inner: int) -> Tensor:
        tokens = count * length if at.packed else length
        axes_of = (inner, tokens) if first else (tokens, inner)
        return torch.randn(sets, *lead, *axes_of, device=device, dtype=torch.bfloat16)

    rotating = {"u": made(dim), "delta": made(dim), "z": made(dim), "B": made(N), "C": made(N), "out": made(dim)}
    # Log-uniform, similar to trained values; steps of 0.001 … 0.1.
    A = -torch.exp(torch.rand(dim, N, device=device) * math.log(N))
    bias = torch.rand(dim, device=device) * 4.6 - 6.9
    some = torch.arange(0, dim, max(1, dim // CHECKED), device=device)[:CHECKED]

    def part(call: Call) -> Call:
        chosen = {n: call[n].index_select(len(lead) + (not first), some) for n in ("u", "delta", "z", "out")}
        chosen |= {n: call[n][some] for n in ("A", "D", "delta_bias")}
        return {**call, **chosen, "final_states_out": call["final_states_out"][:, some]}

    rotating |= {"final_states_out": torch.zeros(sets, count, dim, N, device=device)}
    shared = {"A": A, "D": torch.ones(dim, device=device), "delta_bias": bias, "delta_softplus": True, "channels_first": first}
    return prompt_case(at, ssmgen.selective_scan, moved, GATE[torch.bfloat16], rotating, shared | {"return_final_states": True}, part)


def mamba_ssm(case: Case) -> Launch | None:
    function = reports.imported("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    if function is None or case.at.form is not Form.FIRST or case.at.packed:
        return None
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus")
    return keeping(function, [{n: call[n] for n in names} | {"return_last_state": True} for call in case.calls])


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    if model.kind != "mamba1":
        return None
    dim, d_state, _ = model.shape
    return {"shapes": tuple((dim, n, PROMPT) for n in sequences_of(quick)), "d_state": d_state}


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Prompts of models, or the shapes above."""
    asked = [((m.shape[0], batch, PROMPT), m.shape[1]) for m in given for batch in batches] or [(shape, 16) for shape in SHAPES]
    return [{"shape": shape, "d_state": d_state, "form": form} for (shape, d_state), form in product(asked, Form)]


BENCH = Bench(
    op="selective_scan",
    method=__doc__,
    axes=(
        axes.forms(Form, Form, "both"),
        axes.several(
            "--shape",
            "shapes",
            axes.Shape("D,B,T", "8192,1,8192"),
            SHAPES,
            "Numbers of channels, sequences and tokens; may repeat. Default: four.",
        ),
        axes.one("--d-state", click.IntRange(1, 256), 16),
        PACKED,
    ),
    inputs=inputs,
    words=lambda row: f"channels {row['form']}, {row['shape'][0]} x {row['d_state']}{packed_words(row)}",
    size_of="sequences x tokens",
    size=lambda row: "{1} x {2}".format(*row["shape"]),
    peers={"mamba_ssm.selective_scan_fn": mamba_ssm},
    quick={"shapes": ((8192, 1, 2048),)},
    of_model=of_model,
    tuned=tuned,
    label=lambda at: f"selective scan, {at.form.value} {at.shape} of {at.d_state} states",
)
