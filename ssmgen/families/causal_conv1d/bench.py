"""The benchmark of causal_conv1d, with a bias and SiLU.

x and out rotate over enough sets to exceed 640 MB; weight and bias do not rotate. TB/s counts x, read once, and out, written once. The
ceiling is torch's out-of-place multiplication of dense tensors of the same size, on the memory of the same sets.

Forms. odd: an odd number of tokens, a slice that begins one element into a wider tensor. varlen: all tokens packed as 8 sequences of
different lengths, with a pool of states; every second one has an initial state. seq_idx: 8 sequences in each row. states: initial states
are read, final ones written.

Peer: Dao-AILab's causal_conv1d, which takes seq_idx and states only if channels are contiguous, and no packed sequences. It returns a new
tensor, which is kept until the set's next turn, so that its outputs rotate too. Host times are eager calls with prepared arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import product
from typing import Any

import torch
from torch import Tensor

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At
from ...bench.case import EXACT, Call, Case, Launch, cuts_of, keeping
from ...bench.convolutions import DTYPE, WIDTH
from ...bench.engine import Bench, Values
from ...bench.prompts import PROMPT, prompt_sets
from ...calls.checks import TORCH_DTYPES
from ...select.models import Model
from .spec import ConvLayout

SHAPES = [(1, 1536, 2048), (16, 1536, 2048), (4, 4096, 4096), (1, 8192, 8192), (1, 2048, 131072), (2, 12288, 16384)]
HOST_BYTES = 2**25  # host times are measured up to this size
SEQUENCES = 8
CHECKED = 16  # channels that the correctness gate compares


class Form(Enum):
    PLAIN = "plain"
    ODD = "odd"
    VARLEN = "varlen"
    SEQ_IDX = "seq_idx"
    STATES = "states"


def inputs(at: At, device: torch.device) -> Case:
    (B, D, L), dtype, form = at.shape, TORCH_DTYPES[at.dtype], at.form
    first, margin, packed = at.layout is ConvLayout.FIRST, int(form is Form.ODD), form is Form.VARLEN
    B, L = (1, B * L) if packed else (B, (L - 1) | 1 if form is Form.ODD else L)
    numel = B * D * L
    sets = prompt_sets(2 * numel * dtype.itemsize)

    def made(*shape: int, margin: int = 0, fill: Callable[..., Tensor] = torch.randn) -> tuple[Tensor, Tensor]:
        """(the convolved tensor, the memory that it is a view of)"""
        memory = fill(*shape[:-1], shape[-1] + 2 * margin, device=device, dtype=dtype)
        inner = memory[..., margin : shape[-1] + margin]
        return (inner if first else inner.transpose(1, 2)), memory.flatten()

    def states(count: int) -> Tensor:
        return made(count, *((D, at.width - 1) if first else (at.width - 1, D)))[0]

    rows = (B, D, L) if first else (B, L, D)
    x, sources = zip(*[made(*rows, margin=margin) for _ in range(sets)], strict=True)
    out, targets = zip(*[made(*rows, margin=0, fill=torch.empty) for _ in range(sets)], strict=True)
    weight, bias = torch.randn(D, at.width, device=device, dtype=dtype) / at.width**0.5, torch.randn(D, device=device, dtype=dtype)
    shared: dict[str, Any] = {"weight": weight, "bias": bias, "activation": "silu"}
    starts = cuts_of(L, SEQUENCES, device)
    count = len(starts) - 1  # SEQUENCES, or fewer where tokens are fewer
    if packed:
        shared |= {"query_start_loc": starts, "conv_states": states(2 * count)}
        shared |= {"conv_state_indices": torch.randperm(2 * count, device=device)[:count].int()}
        shared |= {"has_initial_state": torch.arange(count, device=device) % 2 == 0}
    elif form is Form.SEQ_IDX:
        ids = torch.arange(count, device=device, dtype=torch.int32).repeat_interleave(starts.diff())
        shared |= {"seq_idx": ids.expand(B, L).contiguous()}
    elif form is Form.STATES:
        shared |= {"initial_states": states(B), "return_final_states": True, "final_states_out": states(B)}
    some = torch.linspace(0, D - 1, min(D, CHECKED), device=device).long()

    def part(call: Call) -> Call:
        chosen = {n: call[n][:, some] for n in ("x", "out", "initial_states", "conv_states", "final_states_out") if n in call}
        chosen |= {"weight": weight[some], "bias": bias[some]}
        if form is not Form.SEQ_IDX:
            return {**call, **chosen}
        # The same as packed sequences: the reference is faster with these.
        chosen |= {n: chosen[n].transpose(0, 1).flatten(1)[None] for n in ("x", "out")}
        cuts = torch.cat([starts[:-1] + row * L for row in range(B)] + [starts[-1:] + (B - 1) * L])
        return {n: t for n, t in call.items() if n != "seq_idx"} | chosen | {"query_start_loc": cuts}

    return Case(
        function=ssmgen.causal_conv1d,
        sets=sets,
        bytes=2 * numel * dtype.itemsize,
        rotating={"x": x, "out": out},
        shared=shared,
        part=part,
        limits=dict.fromkeys(("conv_states", "final_states"), EXACT),
        outputs=("out", "final_states_out"),
        beside={"mul": lambda i: torch.mul(sources[i][:numel], 1.0, out=targets[i])},
        ratios=("mul",),
        host=2 * math.prod(at.shape) * dtype.itemsize <= HOST_BYTES,
    )


def dao(case: Case) -> Launch | None:
    """Dao-AILab's kernels."""
    function = reports.imported("causal_conv1d", "causal_conv1d_fn")
    stateful = case.at.form in (Form.SEQ_IDX, Form.STATES)
    if function is None or case.at.form is Form.VARLEN or (stateful and case.at.layout is ConvLayout.FIRST):
        return None
    return keeping(function, [{n: t for n, t in call.items() if n != "out"} for call in case.calls])


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    if not model.conv_channels:
        return None
    sizes = (1, 4) if quick else (1, 4, 16, 64)
    return {"shapes": tuple((n, model.conv_channels, PROMPT) for n in sizes), "width": model.conv_width}


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Models' prompts, or the shapes above."""
    shapes = [(batch, m.conv_channels, PROMPT) for m in given for batch in batches] or SHAPES
    return [{"layout": layout, "shape": shape} for layout, shape in product(ConvLayout, shapes)]


BENCH = Bench(
    op="causal_conv1d",
    method=__doc__,
    axes=(
        axes.forms(Form, (Form.PLAIN,), "plain"),
        axes.several(
            "--layout", "layouts", axes.Choice(ConvLayout), ConvLayout, "Contiguous axis of x; may repeat. Default: both."
        ),
        axes.several(
            "--shape", "shapes", axes.Shape("B,D,L", "1,1536,2048"), SHAPES,
            "Batch, number of channels and of tokens; may repeat. Default: six, 6 to 800 MB of x.",
        ),
        WIDTH,
        DTYPE,
    ),
    inputs=inputs,
    words=lambda row: f"{row['layout'].replace('_', ' ')}, {row['form']}, width {row['width']}, {row['dtype']}",
    size_of="batch x channels x tokens",
    size=lambda row: " x ".join(map(str, row["shape"])),
    peers={"causal_conv1d": dao},
    quick={"shapes": ((1, 1536, 2048), (4, 4096, 4096))},
    of_model=of_model,
    tuned=tuned,
    label=lambda at: f"convolution, {at.layout.value} {at.shape}",
)  # fmt: skip
