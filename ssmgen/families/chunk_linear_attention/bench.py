"""The benchmark of chunk_linear_attention: bf16, except KDA's and GLA's log decays and states, which are f32; q and k of KDA are
divided by their norms inside.

Inputs and outputs rotate over enough sets to exceed 640 MB; all sets share one workspace. Bytes: operands and the output once, and the
states that are written, but not the workspace. The ceiling is torch's out-of-place multiplication of dense tensors that moves the same
bytes.

Forms, all of batches of sequences of equal lengths, from zeros, with final states. kda, gla: log decays between 0 and -0.2.
kda_slow: between 0 and -0.0002, so that old tokens still count at the end. rwkv7: log decays between 0 and -0.6. Packed: sequences of equal
lengths concatenated, with cu_seqlens.

Peer: flash-linear-attention's chunk_kda, chunk_gla or chunk_rwkv7. It returns new tensors, which are kept until the set's next turn,
so that its outputs rotate too. Host times are eager calls with prepared arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.functional import normalize

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At
from ...bench.case import Case, Launch, keeping
from ...bench.engine import Bench, Values
from ...bench.prompts import HEADS, PACKED, PROMPT, normal, packed_words, prompt_case, sequences_of, some_heads
from ...select.models import Model
from .problem import Rule
from .spec import workspace_for

LIMIT = 1e-2  # norm error of the output and of states, from bf16 operands of several products, one after the other


class Form(Enum):
    KDA = "kda"
    KDA_SLOW = "kda_slow"
    GLA = "gla"
    RWKV7 = "rwkv7"

    @property
    def stem(self) -> str:
        """The names of our function and of fla's end with it."""
        return self.value.removesuffix("_slow")


RULES = {Form.GLA: Rule.PLAIN, Form.RWKV7: Rule.LOW_RANK}  # others have a delta rule
CASES = [  # (form, shape) if neither is given
    *((Form.KDA, shape) for shape in ((32, 32, 1, 8192), (32, 32, 1, 32768), (32, 32, 16, 2048))),
    (Form.KDA_SLOW, (16, 16, 1, 8192)), (Form.GLA, (32, 32, 1, 8192)), (Form.RWKV7, (32, 32, 1, 8192)),
]  # fmt: skip


def settle(at: At) -> Iterator[At]:
    """Fills in key and value channels of a head. Without any option, yields the forms and shapes of CASES."""
    given = at.form or at.shape or at.head_k or at.head_v or at.packed
    for form, shape in [(at.form or Form.KDA, at.shape or (32, 32, 1, 8192))] if given else CASES:
        head_k = at.head_k or (64 if form is Form.RWKV7 else 128)
        yield At(form=form, shape=shape, head_k=head_k, head_v=at.head_v or head_k, packed=at.packed)


def inputs(at: At, device: torch.device) -> Case:
    HK, HV, count, length = at.shape
    form, K, V = at.form, at.head_k, at.head_v
    keys, log, beta = {Form.RWKV7: (4, 2, 0), Form.GLA: (2, 4, 0)}.get(form, (2, 4, 2))
    moved = count * (length * (2 * keys * HK * K + HV * (4 * V + log * K + beta)) + 4 * HV * V * K)
    made = normal(at, moved, at.packed, device)
    v = made(HV, V)

    def logs(least: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(*v.shape[:-1], K, device=device, dtype=dtype).mul_(least)

    rotating = {"v": v, "k": made(HK, K), "r" if form is Form.RWKV7 else "q": made(HK, K), "out": made(HV, V)}
    shared: dict[str, Any] = {"return_final_states": True}
    if form is Form.RWKV7:
        rotating |= {"w": logs(-0.6, torch.bfloat16), "kk": normalize(made(HK, K), dim=-1), "a": made(HK, K).sigmoid_()}
    elif form is Form.GLA:
        rotating |= {"gk": logs(-0.2)}
    else:
        rotating |= {"g": logs(-2e-4 if form is Form.KDA_SLOW else -0.2), "beta": made(HV).sigmoid_()}
        shared |= {"use_qk_l2norm": True}
    if "use_qk_l2norm" not in shared:
        rotating["k"] /= K**0.5
    size = workspace_for(count * length, count, HV, K, V, RULES.get(form, Rule.DELTA), None, v.shape[-3])
    groups = min(HK, max(1, HEADS * HK // HV))
    by_group = ("q", "k", "r", "kk", "a")
    rotating |= {"final_states_out": torch.zeros(len(v), count, HV, V, K, device=device)}
    shared |= {"workspace": torch.empty(size, dtype=torch.uint8, device=device)}
    return prompt_case(
        at, getattr(ssmgen, f"chunk_{form.stem}"), moved, LIMIT, rotating, shared,
        lambda call: some_heads(call, groups * HV // HK, groups, ("v", "w", "g", "gk", "beta", "out"), by_group, at.packed),
    )  # fmt: skip


def fla(case: Case) -> Launch | None:
    stem = case.at.form.stem
    function = reports.imported(f"fla.ops.{stem}", f"chunk_{stem}")
    if function is None or case.at.shape[0] != case.at.shape[1]:
        return None
    ours, calls = ("out", "final_states_out", "workspace", "return_final_states", "use_qk_l2norm"), []
    how = {"output_final_state": True} | ({"use_qk_l2norm_in_kernel": True} if "use_qk_l2norm" in case.shared else {})
    for call in case.calls:
        given = {n: t for n, t in call.items() if n not in ours}
        given |= {n: t[None] for n, t in given.items() if n != "cu_seqlens"} if case.at.packed else {}
        if case.at.form is Form.RWKV7:
            given |= {"a": -given["kk"], "b": given.pop("kk") * given["a"]}
        elif case.at.form is Form.GLA:
            given["g"] = given.pop("gk")
        calls.append(given | how)
    return keeping(function, calls)


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    if model.kind not in (form.value for form in Form):
        return None
    head_v, head_k, key_heads = model.shape
    shapes = tuple((key_heads, model.nheads, n, PROMPT) for n in sequences_of(quick))
    return {"shapes": shapes, "forms": (Form(model.kind),), "head_k": head_k, "head_v": head_v}


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Prompts of models, or the cases above."""
    asked: list[dict[str, Any]] = [
        {"form": Form(m.kind), "shape": (m.shape[2], m.nheads, batch, PROMPT), "head_k": m.shape[1], "head_v": m.shape[0]}
        for m in given
        for batch in batches
    ]
    return asked or [{"form": form, "shape": shape} for form, shape in CASES]


BENCH = Bench(
    op="chunk_linear_attention",
    method=__doc__,
    axes=(
        axes.forms(Form, (None,), "six cases, where neither forms nor shapes are given"),
        axes.several(
            "--shape",
            "shapes",
            axes.Shape("HK,HV,B,T", "32,32,1,8192"),
            (None,),
            "Numbers of heads of k and of v, sequences and tokens; may repeat.",
        ),
        axes.one("--head-k", click.IntRange(16, 256), help="Key channels per head. Default: 128; 64 for rwkv7."),
        axes.one("--head-v", click.IntRange(16, 256), help="Value channels per head. Default: as --head-k."),
        PACKED,
    ),
    inputs=inputs,
    words=lambda row: "{form}, {shape[0]} and {shape[1]} heads, {head_k} x {head_v}".format(**row) + packed_words(row),
    size_of="sequences x tokens",
    size=lambda row: "{2} x {3}".format(*row["shape"]),
    peers={"fla": fla},
    quick={"shapes": ((16, 16, 1, 2048),), "forms": (Form.KDA, Form.GLA, Form.RWKV7)},
    of_model=of_model,
    settle=settle,
    tuned=tuned,
    label=lambda at: f"{at.form.value} {at.shape} of {at.head_k} x {at.head_v}",
)
