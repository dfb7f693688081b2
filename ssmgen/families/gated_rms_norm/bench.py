"""The benchmark of gated_rms_norm: x, gate, weight and output of one dtype.

Each form is the norm of a layer. mamba2: the gate's SiLU multiplies x, then each group is normalised; every group has its own weight. gdn
and kda: heads are normalised with one weight for all, then multiplied by the gate's SiLU or sigmoid. A shape is groups in a row x their
size.

x, gate and output rotate over enough sets to exceed 640 MB; the weight does not rotate. Hot: one set, if it fits into 30 MB, so that the
inputs are in the L2 cache, as right after the kernel that wrote them. TB/s counts x and gate, read once, and the output, written once. The
ceiling is torch.mul(x, gate, out=out), which moves the same bytes.

Peers: flash-linear-attention's rms_norm_gated (gdn, kda), mamba-ssm's rmsnorm_fn (mamba2, gdn), both Triton, and torch, the chain of
elementwise kernels that transformers' modules run. They return new tensors, which are kept until the set's next turn. Host times are eager
calls with prepared arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import product
from typing import Any

import click
import torch

import ssmgen

from ...bench import axes
from ...bench import report as reports
from ...bench.axes import At
from ...bench.case import GATE, HOT, Call, Case, Launch, keeping, sets_of
from ...bench.engine import Bench, Values
from ...calls.checks import TORCH_DTYPES
from ...select.models import Model
from ...spec.kernel import DType

HOST_ROWS = 8  # host times are measured up to this size
CHECKED = 64  # rows that the correctness gate compares
EPS = 1e-5


class Form(Enum):
    MAMBA2 = "mamba2"
    GDN = "gdn"
    KDA = "kda"


FORMS = {"mamba2": Form.MAMBA2, "gated_delta_rule": Form.GDN, "kda": Form.KDA}  # of models, by kind
SHAPES = {Form.MAMBA2: [(1, 5120), (8, 1024)], Form.GDN: [(32, 128)], Form.KDA: [(32, 128)]}


def settle(at: At) -> Iterator[At]:
    """The case, if it is cold or fits into the cache."""
    if not (at.hot and 3 * at.rows * math.prod(at.shape) * at.dtype.size > HOT):
        yield at


def inputs(at: At, device: torch.device) -> Case:
    (groups, size), dtype, inner = at.shape, TORCH_DTYPES[at.dtype], at.form is Form.MAMBA2
    moved = 3 * at.rows * groups * size * dtype.itemsize
    sets = 1 if at.hot else sets_of(moved)
    x, gate = (torch.randn(sets, at.rows, groups, size, device=device, dtype=dtype) for _ in range(2))
    out, weight = torch.empty_like(x), torch.randn(groups * size if inner else size, device=device, dtype=dtype)
    some = slice(min(CHECKED, at.rows))

    def part(call: Call) -> Call:
        return {**call, **{name: call[name][some] for name in ("x", "gate", "out")}}

    return Case(
        function=ssmgen.gated_rms_norm,
        sets=sets,
        bytes=moved,
        rotating={"x": x, "gate": gate, "out": out},
        shared={"weight": weight, "eps": EPS, "norm_before_gate": not inner} | {"activation": "sigmoid" if at.form is Form.KDA else "silu"},
        part=part,
        beside={"mul": lambda i: torch.mul(x[i], gate[i], out=out[i])},
        ratios=("mul",),
        peer_limits={"out": 2 * GATE[dtype]},
        host=at.rows <= HOST_ROWS,
    )


def fla(case: Case) -> Launch | None:
    function = reports.imported("fla.modules.fused_norm_gate", "rms_norm_gated")
    if function is None or case.at.form is Form.MAMBA2:
        return None
    how = {"bias": None, "activation": "sigmoid" if case.at.form is Form.KDA else "swish", "eps": EPS}
    return keeping(function, [{"x": call["x"], "g": call["gate"], "weight": call["weight"], **how} for call in case.calls])


def mamba_ssm(case: Case) -> Launch | None:
    function = reports.imported("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    if function is None or case.at.form is Form.KDA:
        return None
    inner = case.at.form is Form.MAMBA2  # groups in one axis
    how = {"bias": None, "eps": EPS, "group_size": case.at.shape[1] if inner else None, "norm_before_gate": not inner}
    rows = [{n: call[n].flatten(-2) if inner else call[n] for n in ("x", "gate")} for call in case.calls]
    return keeping(function, [{"x": row["x"], "z": row["gate"], "weight": case.shared["weight"], **how} for row in rows])


def chain(case: Case) -> Launch:
    """The kernels of transformers' modules, one after the other."""
    first = case.at.form is Form.MAMBA2  # the gate
    activation = torch.sigmoid if case.at.form is Form.KDA else torch.nn.functional.silu

    def norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
        y, factor = x.float(), activation(gate.float())
        y = y * factor if first else y
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        y = weight.view(-1, x.shape[-1]) * y.to(x.dtype)
        return y if first else (y * factor).to(x.dtype)

    return keeping(norm, case.calls)


def of_model(model: Model, tp: int, quick: bool) -> Mapping[str, Any] | None:
    return {"forms": (FORMS[model.kind],), "shapes": (model.norm_shape,)} if model.norm_shape else None


def words(row: Mapping[str, Any]) -> str:
    return f"{row['form']}, {' x '.join(map(str, row['shape']))}, {row['dtype']}, {'hot: in the L2 cache' if row['hot'] else 'cold'}"


def tuned(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int]) -> Values:
    """Norms of models, or the shapes above."""
    shapes = [(FORMS[m.kind], m.norm_shape) for m in given] or [(form, shape) for form in Form for shape in SHAPES[form]]
    return [{"form": form, "shape": at, "rows": rows, "hot": False} for (form, at), rows in product(dict.fromkeys(shapes), batches)]


BENCH = Bench(
    op="gated_rms_norm",
    method=__doc__,
    axes=(
        axes.several("--form", "forms", axes.Choice(Form), Form, "Kind of layer; may repeat. Default: all."),
        axes.several(
            "--shape", "shapes", axes.Shape("G,N", "32,128"), lambda at: SHAPES[at.form],
            "Number of groups in a row and their size; may repeat. Default: one or two of a form.",
        ),
        axes.several("--dtype", "dtypes", axes.Choice(DType), (DType.BF16,), "Dtype; may repeat. Default: bf16."),
        axes.HOT,
        axes.several("--rows", "rows", click.IntRange(1), (1, 8, 32, 128, 512, 4096), "Number of rows; may repeat. Default: 1 … 4096."),
    ),
    inputs=inputs,
    words=words,
    size_of="rows",
    size=lambda row: str(row["rows"]),
    peers={"fla.rms_norm_gated": fla, "mamba_ssm.rmsnorm_fn": mamba_ssm, "torch.chain": chain},
    quick={"rows": (1, 128), "hot": False},
    of_model=of_model,
    settle=settle,
    tuned=tuned,
    label=lambda at: f"norm, {at.form.value} {at.rows} x {at.shape}",
)  # fmt: skip
