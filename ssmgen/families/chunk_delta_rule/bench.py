"""The benchmark of chunk_delta_rule: bf16 except log decays and states, which are f32; q and k are divided by their norms inside.

Inputs and outputs rotate over enough sets to exceed 640 MB; all sets share one workspace. Bytes: q, k, v, g, beta and the output once,
and the states that are read and written, but not the workspace. The ceiling is torch's out-of-place multiplication of dense tensors that
moves the same bytes.

Forms. batch: sequences of equal lengths, [batch, T], from zeros, with final states. pool: the same tokens packed as sequences of
different lengths, whose states are read from and written to slots of a pool. delta_rule: as batch, without decays. Packed: as batch, with
sequences of equal lengths concatenated, with cu_seqlens.

Peers, for batches: flash-linear-attention's chunk_gated_delta_rule, or chunk_delta_rule; q and k are repeated for its heads of v outside of
the timing. FlashInfer's chunk_gated_delta_rule; linear decays and f32 betas are made outside of the timing. FlashQLA's. Their results are
kept until the set's next turn, so that their outputs rotate too. Host times are eager calls with prepared arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import click
import torch
from torch import Tensor

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At
from ...bench.case import Call, Case, Launch, keeping
from ...bench.engine import Bench, Values
from ...bench.prompts import HEADS, PACKED, PROMPT, ends, normal, packed_words, pool_mistakes, prompt_case, sequences_of, some_heads
from ...select.models import Model
from .spec import workspace_for

SHAPES = [
    *((16, 64, 1, tokens) for tokens in (2048, 8192, 32768)),
    (16, 64, 4, 8192), (16, 64, 16, 2048), (16, 32, 1, 8192), (4, 16, 1, 8192), (4, 16, 1, 32768), (2, 8, 1, 32768),
]  # fmt: skip
LIMIT = 1e-2  # norm error of the output and of states, from bf16 operands of three products, one after the other


class Form(Enum):
    BATCH = "batch"
    POOL = "pool"
    DELTA_RULE = "delta_rule"


def inputs(at: At, device: torch.device) -> Case:
    HK, HV, count, length = at.shape
    K, V, pool, gated = at.head_k, at.head_v, at.form is Form.POOL, at.form is not Form.DELTA_RULE
    state, gates = 4 * HV * V * K * (2 if pool else 1), HV * (6 if gated else 2)
    moved = count * (length * (4 * HK * K + 4 * HV * V + gates) + state)
    flat = pool or at.packed
    made = normal(at, moved, flat, device)
    v, beta = made(HV, V), made(HV).sigmoid()
    rotating, shared, outputs = ends(torch.zeros(len(v), count, HV, V, K, device=device), count * length if pool else 0)
    rotating |= {"q": made(HK, K), "k": made(HK, K), "v": v, "beta": beta, "out": made(HV, V)}
    rotating |= {"g": -0.1 * torch.rand(beta.shape, device=device)} if gated else {}
    size = workspace_for(count * length, count, HV, K, V, None, count * length if flat else length)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    heads, by_head = min(HEADS, HV // HK), ("v", "g", "beta", "out")
    function = ssmgen.chunk_gated_delta_rule if gated else ssmgen.chunk_delta_rule
    shared |= {"workspace": workspace, "use_qk_l2norm": True}
    return prompt_case(
        at, function, moved, LIMIT, rotating, shared, lambda call: some_heads(call, heads, 1, by_head, ("q", "k"), flat), outputs
    )


def fla(case: Case) -> Launch | None:
    gated = case.at.form is Form.BATCH
    module, name = ("gated_delta_rule", "chunk_gated_delta_rule") if gated else ("delta_rule", "chunk_delta_rule")
    function = reports.imported(f"fla.ops.{module}", name)
    if function is None or case.at.form is Form.POOL:
        return None
    each = case.at.shape[1] // case.at.shape[0]
    names, how = ("v", "beta", "g") if gated else ("v", "beta"), {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    calls = [_rows(case, call, ("q", "k", *names)) for call in case.calls]
    return keeping(function, [call | {n: call[n].repeat_interleave(each, 2) for n in ("q", "k")} | _starts(case) | how for call in calls])


def _rows(case: Case, call: Call, names: Sequence[str]) -> dict[str, Tensor]:
    """Operands [batch, T, …], the shape that peers take."""
    return {n: call[n][None] if case.at.packed else call[n] for n in names}


def _starts(case: Case) -> dict[str, Tensor]:
    """cu_seqlens of packed sequences."""
    return {"cu_seqlens": case.shared["cu_seqlens"]} if case.at.packed else {}


def flashinfer(case: Case) -> Launch | None:
    function = reports.imported("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    if function is None or case.at.form is not Form.BATCH:
        return None
    count, length = case.at.shape[2:]
    shared = {"cu_seqlens": torch.arange(count + 1, device=case.device) * length, "max_seqlen": length, "output_final_state": True}
    calls = []
    for call in case.calls:
        rows = {n: t.flatten(0, 1) for n, t in _rows(case, call, ("q", "k", "v", "g", "beta")).items()}
        flat, gates = {n: rows[n] for n in ("q", "k", "v")}, {"g": rows["g"].exp(), "beta": rows["beta"].float()}
        left = {"output": torch.empty_like(flat["v"]), "output_state": torch.empty_like(call["final_states_out"])}
        calls.append(flat | gates | left | shared | {"use_qk_l2norm_in_kernel": True})
    return keeping(function, calls)


def flash_qla(case: Case) -> Launch | None:
    function = reports.imported("flash_qla", "chunk_gated_delta_rule")
    if function is None or case.at.form is not Form.BATCH:
        return None
    names, how = ("q", "k", "v", "g", "beta"), {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "state_v_first": True}
    return keeping(function, [_rows(case, call, names) | _starts(case) | how for call in case.calls])


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    if model.kind != "gated_delta_rule":
        return None
    head_v, head_k, key_heads = model.shape
    return {"shapes": tuple((key_heads, model.nheads, n, PROMPT) for n in sequences_of(quick)), "head_k": head_k, "head_v": head_v}


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Prompts of models, or the shapes above."""
    asked = [{"shape": (m.shape[2], m.nheads, n, PROMPT), "head_k": m.shape[1], "head_v": m.shape[0]} for m in given for n in batches]
    return asked or [{"shape": shape} for shape in SHAPES]


BENCH = Bench(
    op="chunk_delta_rule",
    method=__doc__,
    axes=(
        axes.forms(Form, (Form.BATCH,), "batch"),
        axes.several(
            "--shape", "shapes", axes.Shape("HK,HV,B,T", "16,64,1,8192"), SHAPES,
            "Numbers of heads of k and of v, sequences and tokens; may repeat. Default: nine.",
        ),
        axes.one("--head-k", click.IntRange(16, 256), 128),
        axes.one("--head-v", click.IntRange(16, 256), 128),
        PACKED,
    ),
    inputs=inputs,
    words=lambda row: "{form}, {shape[0]} and {shape[1]} heads, {head_k} x {head_v}".format(**row) + packed_words(row),
    size_of="sequences x tokens",
    size=lambda row: "{2} x {3}".format(*row["shape"]),
    peers={"fla": fla, "flashinfer": flashinfer, "flash_qla": flash_qla},
    quick={"shapes": ((16, 32, 1, 2048), (4, 16, 1, 8192))},
    of_model=of_model,
    mistakes=pool_mistakes,
    tuned=tuned,
    label=lambda at: f"delta {at.shape} of {at.head_k} x {at.head_v}",
)  # fmt: skip
