"""The benchmark of chunk_scan: bf16 except A, D and states, which are f32; a bias of dt, softplus, D, no gate.

Inputs and outputs rotate over enough sets to exceed 640 MB; A, D and dt_bias do not rotate. Bytes: x, B, C, dt and the output once, and
the states that are read and written. The ceiling is torch's out-of-place multiplication of dense tensors that moves the same bytes.

Forms. batch: sequences of equal lengths, [batch, T], from zeros, with final states. pool: the same tokens packed as sequences of
different lengths, whose states are read from and written to slots of a pool. simple_gla, lightning: as batch, for chunk_simple_gla with a
log decay per token, bf16, and for chunk_lightning_attn with a slope per head; heads and groups are the heads of v and of q and k, headdim
and d_state are V and K. Packed: as batch, with sequences of equal lengths concatenated, with cu_seqlens.

Peers: mamba-ssm's mamba_chunk_scan_combined with chunks of 256, of batches; of simple_gla and lightning flash-linear-attention's
chunk_simple_gla, with g or g_gamma. They return new tensors; those are kept until the set's next turn, so that their outputs rotate too.
Host times are eager calls, arguments at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import click
import torch

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At
from ...bench.case import GATE, Case, Launch, keeping
from ...bench.engine import Bench, Values
from ...bench.prompts import HEADS, PACKED, PROMPT, ends, normal, packed_words, pool_mistakes, prompt_case, sequences_of, some_heads
from ...select.models import Model

SHAPES = [(128, 8, 1, 2048), (128, 8, 1, 8192), (128, 8, 16, 2048), (16, 1, 1, 8192), (24, 1, 1, 8192)]
PEER_CHUNK = 256


class Form(Enum):
    BATCH = "batch"
    POOL = "pool"
    SIMPLE_GLA = "simple_gla"
    LIGHTNING = "lightning"


FORMS = {"mamba2": Form.BATCH, "lightning_attn": Form.LIGHTNING}  # by the kind of a model


def inputs(at: At, device: torch.device) -> Case:
    H, G, count, length = at.shape
    P, N, pool = at.headdim, at.d_state, at.form is Form.POOL
    state, steps = 4 * H * P * N * (2 if pool else 1), 0 if at.form is Form.LIGHTNING else 2 * H
    moved = count * (length * (4 * H * P + 4 * G * N + steps) + state)
    flat = pool or at.packed
    made = normal(at, moved, flat, device)
    x, B, C, dt = made(H, P), made(G, N), made(G, N), made(H)
    A, D, bias = -torch.rand(H, device=device), torch.rand(H, device=device).exp(), torch.rand(H, device=device) - 2
    rotating, shared, outputs = ends(torch.zeros(len(x), count, H, P, N, device=device), count * length if pool else 0)
    if at.form in (Form.BATCH, Form.POOL):
        function: Any = ssmgen.chunk_scan
        rotating |= {"x": x, "dt": dt, "B": B, "C": C}
        shared |= {"A": A, "D": D, "dt_bias": bias, "dt_softplus": True}
    else:
        function = ssmgen.chunk_simple_gla if at.form is Form.SIMPLE_GLA else ssmgen.chunk_lightning_attn
        rotating |= {"q": C, "k": B, "v": x} | ({"g": -dt.abs()} if at.form is Form.SIMPLE_GLA else {})
        shared |= {"slope": -A} if at.form is Form.LIGHTNING else {}
    heads, by_head = min(HEADS, H // G), ("x", "dt", "A", "D", "dt_bias", "v", "g", "slope", "out")
    return prompt_case(
        at, function, moved, GATE[torch.bfloat16], rotating | {"out": torch.empty_like(x)}, shared,
        lambda call: some_heads(call, heads, 1, by_head, ("B", "C", "q", "k"), flat), outputs,
    )  # fmt: skip


def mamba_ssm(case: Case) -> Launch | None:
    function = reports.imported("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    if function is None or case.at.form is not Form.BATCH:
        return None
    shared = {n: case.shared[n] for n in ("A", "D", "dt_bias", "dt_softplus")} | {"chunk_size": PEER_CHUNK}
    if not case.at.packed:
        shared["return_final_states"] = True
        return keeping(function, [{n: call[n] for n in ("x", "dt", "B", "C")} | shared for call in case.calls])
    starts, (*_, count, length) = case.shared["cu_seqlens"], case.at.shape
    ids = torch.arange(count, device=case.device, dtype=torch.int32).repeat_interleave(length)[None]
    shared |= {"seq_idx": ids, "cu_seqlens": starts, "return_varlen_states": True}
    return keeping(function, [{n: call[n][None] for n in ("x", "dt", "B", "C")} | shared for call in case.calls])


def fla(case: Case) -> Launch | None:
    """chunk_simple_gla, which also takes a decay per head, if q and k have the same number of heads as v."""
    function = reports.imported("fla.ops.simple_gla", "chunk_simple_gla")
    if function is None or case.at.form not in (Form.SIMPLE_GLA, Form.LIGHTNING) or case.at.shape[0] != case.at.shape[1]:
        return None
    how: dict[str, Any] = {"output_final_state": True} | ({"g_gamma": -case.shared["slope"]} if case.at.form is Form.LIGHTNING else {})
    how |= {"cu_seqlens": case.shared["cu_seqlens"]} if case.at.packed else {}
    given = [{n: call[n][None] if case.at.packed else call[n] for n in ("q", "k", "v", "g") if n in call} for call in case.calls]
    return keeping(function, [how | call for call in given])


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    if model.kind not in FORMS:
        return None
    headdim, d_state, groups = model.shape
    shapes = tuple((model.nheads, groups, n, PROMPT) for n in sequences_of(quick))
    return {"shapes": shapes, "forms": (FORMS[model.kind],), "headdim": headdim, "d_state": d_state}


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Prompts of models, or the shapes above."""
    asked = [
        {"form": FORMS[m.kind], "shape": (m.nheads, m.shape[2], batch, PROMPT), "headdim": m.shape[0], "d_state": m.shape[1]}
        for m in given
        for batch in batches
    ]
    return asked or [{"shape": shape} for shape in SHAPES]


BENCH = Bench(
    op="chunk_scan",
    method=__doc__,
    axes=(
        axes.forms(Form, (Form.BATCH,), "batch"),
        axes.several(
            "--shape", "shapes", axes.Shape("H,G,B,T", "128,8,1,8192"), SHAPES,
            "Numbers of heads, groups, sequences and tokens; may repeat. Default: five.",
        ),
        axes.one("--headdim", click.IntRange(16, 256), 64),
        axes.one("--d-state", click.IntRange(16, 256), 128),
        PACKED,
    ),
    inputs=inputs,
    words=lambda row: "{form}, {shape[0]} x {headdim} x {d_state}, groups {shape[1]}".format(**row) + packed_words(row),
    size_of="sequences x tokens",
    size=lambda row: "{2} x {3}".format(*row["shape"]),
    peers={"mamba_ssm.mamba_chunk_scan_combined": mamba_ssm, "fla": fla},
    quick={"shapes": ((128, 8, 1, 2048), (16, 1, 1, 8192))},
    of_model=of_model,
    mistakes=pool_mistakes,
    tuned=tuned,
    label=lambda at: f"scan {at.shape} of {at.headdim} x {at.d_state}",
)  # fmt: skip
