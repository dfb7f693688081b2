"""The benchmark of mamba3_chunk_scan: prompts of models from zeros, with final states; projections in bf16, weights in f32.

Inputs, outputs and states rotate over enough sets to exceed 640 MB; weights do not. Bytes: x, z, B, C, dt, A, trap, the logits of angles
and the output once, and the states that are written. The ceiling is torch's out-of-place multiplication of dense tensors that moves the
same bytes. Packed: sequences of equal lengths concatenated, with cu_seqlens. Logits of angles are small, so that angles stay below a turn:
the gate compares them as numbers. Host times are eager calls, arguments at hand.

Peers: mamba-ssm's mamba3_siso_combined and mamba3_mimo, which take normed rows, A dt and dt after its softplus, all made beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
import torch
from torch import Tensor

import ssmgen

from ...bench import axes
from ...bench.axes import At, share_of
from ...bench.case import GATE, Case
from ...bench.engine import Bench, Values
from ...bench.prompts import HEADS, HOST_TOKENS, PACKED, PROMPT, even_cuts, moving, packed_words, prompt_sets, sequences_of
from ...bench.schema import COUNT
from ...engine.recurrences.mamba3.model import Mamba3Model
from ...errors import SsmgenError
from ...select.models import Model, find_model
from .bench_peers import mamba_ssm
from .operands import OPERANDS, POOLS
from .problem import MOST, ROWS
from .times import estimated

DEFAULTS = ("mamba3-siso-1.5b", "mamba3-mimo-1.5b")
SHAPES = [(1, 2048), (1, 8192), (16, 2048)]
SMS = 132  # of an H200
LIMITS = {"out": 1.2e-2, "state": 8e-3, "k_state": GATE[torch.bfloat16], "angle_state": 1e-4}  # norm errors


def settle(at: At) -> tuple[At, ...]:
    """The case with its model's share. Raises SsmgenError for models of another recurrence."""
    model = share_of(at)
    if not isinstance(model, Mamba3Model):
        raise SsmgenError(f"no Mamba-3 model: {model.name}")
    return (At(**{**vars(at), "model": model.name, "heads": model.nheads, "rank": model.rank, "share": model}),)


def inputs(at: At, device: torch.device) -> Case:
    model, (count, length), io = at.share, at.shape, torch.bfloat16
    H, P, N, G, R, n = model.nheads, model.headdim, model.d_state, model.ngroups, model.rank, model.angles
    moved = count * (2 * length * (3 * H * P + 2 * R * G * N + 3 * H + n) + 4 * H * (P * N + n) + 2 * H * (R * N + P))
    sets = prompt_sets(moved)
    lead = (count * length,) if at.packed else (count, length)

    def rand(*shape: int, dtype: torch.dtype = io) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    ranks, f32 = (R,) if R > 1 else (), torch.float32
    rotating = {name: rand(sets, *lead, H, P) for name in ("x", "z", "out")} | {
        name: rand(sets, *lead, *ranks, G, N) for name in ("B", "C")
    }
    rotating |= {name: rand(sets, *lead, H) for name in ("dt", "A", "trap")} | {"angle": rand(sets, *lead, n) / 64}
    shapes = {"state": ((H, P, N), f32), "k_state": ((*ranks, H, N), io), "v_state": ((H, P), io), "angle_state": ((H, n), f32)}
    rotating |= {name: torch.zeros(sets, count, *shape, device=device, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    shared: dict[str, Any] = {"D": rand(H, dtype=f32), "dt_bias": rand(H, dtype=f32) - 4}
    shared |= {name: 1 + rand(N) / 8 for name in ("B_norm", "C_norm")} | {
        name: 1 + rand(H, R, N, dtype=f32) for name in ("B_bias", "C_bias")
    }
    if R > 1:
        shared |= {name: (1 + rand(H, R, P, dtype=f32) / 8) / R for name in ("mimo_x", "mimo_o")}
        shared["mimo_z"] = 1 + rand(H, R, P, dtype=f32) / 8
    shared |= {"A_form": model.rate.value, "rotary": model.rotary.value}
    shared |= {"cu_seqlens": even_cuts(count, length, device)} if at.packed else {}
    shared |= {"segments": at.segments} if at.segments > 1 else {}
    heads = min(HEADS, H // G)
    return Case(
        function=ssmgen.mamba3_chunk_scan,
        sets=sets,
        bytes=moved,
        rotating=rotating,
        shared=shared,
        part=lambda call: _first_heads(call, heads, len(lead)),
        limits=LIMITS,
        outputs=("out", *POOLS),
        beside={"mul": moving(moved, sets, device)},
        ratios=("mul",),
        host=count * length <= HOST_TOKENS,
    )


def _first_heads(call: Mapping[str, Any], heads: int, lead: int) -> dict[str, Any]:
    """The call of the first heads, which share a group of B and C. lead: axes of tokens."""
    found = dict(call)
    for name, t in call.items():
        if not isinstance(t, Tensor) or name not in OPERANDS.names:
            continue
        words, extra = OPERANDS[name].forms, lead - 1
        form = next(f for f in words if len(f) + (extra if f[0] == "token" else 0) == t.dim())
        for word, size in (("head", heads), ("group", 1)):
            if word in form:
                found[name] = t.narrow(form.index(word) + (extra if form[0] == "token" else 0), 0, size)
    return found


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    if not isinstance(model, Mamba3Model):
        return None
    return {"names": (model.name,), "tp": tp, "shapes": tuple((n, PROMPT) for n in sequences_of(quick))}


def words(row: Mapping[str, Any]) -> str:
    more = [f"rank {row['rank']}"] if row["rank"] > 1 else []
    more += [f"{segments} segments"] if (segments := row.get("segments", 1)) > 1 else []
    return ", ".join([row["model"], f"{row['heads']} heads", *more]) + packed_words(row)


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Prompts of models; single ones also in the parts that are expected to take the least time."""
    found: list[dict[str, Any]] = []
    for model in given or map(find_model, DEFAULTS):
        for batch in batches:
            found.append({"model": model, "shape": (batch, PROMPT)})
            if batch == 1 and isinstance(model, Mamba3Model):
                found.append({**found[-1], "segments": parts_for(model, PROMPT)})
    return found


def parts_for(model: Mamba3Model, tokens: int) -> int:
    """Parts of one sequence, two or more, that are expected to take the least time on an H200."""
    return next(way.parts for way in estimated(model.nheads, 1, tokens * model.rank // ROWS, SMS, MOST) if way.parts > 1)


BENCH = Bench(
    op="mamba3_chunk_scan",
    method=__doc__,
    axes=(
        axes.several("--model", "names", str, DEFAULTS, "May repeat. Default: the SISO and the MIMO model of 1.5B parameters."),
        axes.several(
            "--shape", "shapes", axes.Shape("B,T", "1,2048"), SHAPES, "Numbers of sequences and tokens; may repeat. Default: three."
        ),
        axes.several(
            "--segments",
            "segments",
            click.IntRange(1, MOST),
            (1,),
            "Parts of a sequence; may repeat. Default: 1, the whole one.",
            later=True,
        ),
        PACKED,
        axes.TP,
    ),
    inputs=inputs,
    words=words,
    size_of="sequences x tokens",
    size=lambda row: "{} x {}".format(*row["shape"]),
    peers={"mamba_ssm": mamba_ssm},
    quick={"names": DEFAULTS[:1], "shapes": ((1, 2048),)},
    of_model=of_model,
    settle=settle,
    tuned=tuned,
    label=lambda at: "{} {} x {}".format(at.model, *at.shape) + (f" in {at.segments} segments" if at.segments > 1 else ""),
    fields={"heads": COUNT, "rank": COUNT},
)
