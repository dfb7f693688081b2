"""chunk_delta_rule: the first kernel's images, which the second kernel reads, in float64 and as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ssmgen.engine.chunks.problem import CHUNK, chunks_of
from ssmgen.families.chunk_delta_rule.problem import COEFFICIENTS_AT, IMAGE, P_AT, PANEL, PANEL_BYTES, PANELS, T_AT
from ssmgen.families.chunk_delta_rule.reference import beta_of, decays_of

# Relative L2 error of T and P, which are rounded once; their products are not exact.
ROUNDED = {torch.bfloat16: 3e-3, torch.float16: 7.5e-4}


@dataclass(frozen=True)
class Images:
    """The first kernel's images by chunk number and head; served: [numbers], tokens in each, 0 for images that belong to no chunk."""

    T: Tensor  # [numbers, HV, 64, 64]
    P: Tensor
    c_x: Tensor  # [numbers, HV, 64]
    c_u: Tensor
    c_o: Tensor
    decay: Tensor  # [numbers, HV]
    served: Tensor


def images_of(views: Mapping[str, Tensor], options: Any) -> Images:
    """Images in float64 from a call's views. In rows without a token T is the identity, c_x and c_o have the size of 1 / |k| for zeros, and
    all else is zero."""
    q, k, beta = views["q"].double(), views["k"].double(), beta_of(views["beta"], options.beta, torch.float64)
    a = decays_of(views.get("g"), options.gate, views.get("A_log"), views.get("dt_bias"), views["beta"], torch.float64)
    heads = beta.shape[2]
    rk, rq = (torch.rsqrt((t * t).sum(-1) + 1e-6) if options.l2norm else torch.ones(t.shape[:3], dtype=torch.float64) for t in (k, q))
    each = heads // q.shape[2]
    q, k, rk, rq = (t.repeat_interleave(each, 2) for t in (q, k, rk, options.scale * rq))
    spans = spans_of(views)
    numbers = chunks_of(views["v"].shape[0] * views["v"].shape[1], len(spans), CHUNK)
    square, row = torch.zeros(numbers, heads, CHUNK, CHUNK, dtype=torch.float64), torch.zeros(numbers, heads, CHUNK, dtype=torch.float64)
    large = torch.full_like(row, 1e3)
    found = Images(square, square.clone(), large, row, large.clone(), row[..., 0].clone(), torch.zeros(numbers, dtype=torch.int64))
    for s, (batch, begin, end) in enumerate(spans):
        first = begin + batch * views["v"].shape[1]
        for n, start in enumerate(range(begin, end, CHUNK)):
            at, count = first // CHUNK + s + n, min(CHUNK, end - start)
            own = (batch, slice(start, start + count))
            assert not found.served[at], "two chunks have one number"
            found.served[at] = count
            found.T[at, :, range(count, CHUNK), range(count, CHUNK)] = 1
            for h in range(heads):
                one = (t[own][:, h] for t in (q, k, rq, rk, beta, a))
                for field, value in zip(("T", "P", "c_x", "c_u", "c_o", "decay"), _image(*one), strict=True):
                    getattr(found, field)[(at, h, *[slice(0, size) for size in value.shape])] = value
    return found


def spans_of(views: Mapping[str, Tensor], rows: str = "v") -> list[tuple[int, int, int]]:
    """(row of the batch, first token, one past the last token) of each sequence. rows: an operand with all tokens."""
    batch, length = views[rows].shape[:2]
    if "cu_seqlens" not in views:
        return [(b, 0, length) for b in range(batch)]
    starts = views["cu_seqlens"].tolist()
    return [(0, a, b) if 0 <= a < b <= length else (0, 0, 0) for a, b in pairwise(starts)]


def _image(q: Tensor, k: Tensor, rq: Tensor, rk: Tensor, beta: Tensor, a: Tensor) -> tuple[Tensor, ...]:
    """(T, P, c_x, c_u, c_o, decay) of a chunk's tokens."""
    count = len(a)
    behind = torch.ones(count, count, dtype=torch.float64).tril(-1).bool()
    through = torch.where(behind, a[:, None], 1.0).cumprod(0).tril()  # the part of the state after token j that remains at token i
    A = rk[:, None] * (beta * rk) * through * (k @ k.T)
    T = torch.linalg.inv(torch.eye(count, dtype=torch.float64) + A.tril(-1))
    P = (rq[:, None] * (beta * rk) * through * (q @ k.T)).tril()
    since = a.cumprod(0)
    return T, P, -since * rk, through[-1] * beta * rk, since * rq, since[-1]


def _places() -> Tensor:
    """[64, 64]: the index of each element of T or P among the 16-bit numbers of its panels; -1 for elements that are not kept."""
    rows, columns = torch.meshgrid(torch.arange(CHUNK), torch.arange(CHUNK), indexing="ij")
    panel, inner = columns // PANEL, columns % PANEL
    begins = torch.tensor([0, *PANEL_BYTES]).cumsum(0)[:PANELS][panel] // 2
    half = (inner // 8) ^ (rows // 4 % 2)
    return torch.where(rows >= PANEL * panel, begins + (rows - PANEL * panel) * PANEL + half * 8 + inner % 8, -1)


def pack(images: Images, x: torch.dtype) -> Tensor:
    """The bytes that the first kernel should leave, except roundings; NaN where there is no chunk."""
    numbers, heads = images.decay.shape
    found = torch.full((numbers, heads, IMAGE), 0xFF, dtype=torch.uint8)
    places = _places()
    kept = places >= 0
    for at, values in ((T_AT, images.T), (P_AT, images.P)):
        panels = torch.zeros(numbers, heads, sum(PANEL_BYTES) // 2, dtype=x)
        panels[..., places[kept]] = values[..., kept].to(x)
        found[..., at : at + sum(PANEL_BYTES)] = panels.view(torch.uint8)
    decay = images.decay[..., None].expand(-1, -1, 4)
    coefficients = torch.cat([images.c_x, images.c_u, images.c_o, decay], -1).float().contiguous()
    found[..., COEFFICIENTS_AT : COEFFICIENTS_AT + 4 * coefficients.shape[-1]] = coefficients.view(torch.uint8)
    found[images.served == 0] = 0xFF
    return found.flatten()


def unpack(workspace: Tensor, images: Images, x: torch.dtype) -> Images:
    """A workspace's contents as Images, to compare with the images of the same call."""
    numbers, heads = images.decay.shape
    found = workspace.cpu()[: numbers * heads * IMAGE].view(numbers, heads, IMAGE)
    places = _places()

    def square(at: int) -> Tensor:
        panels = found[..., at : at + sum(PANEL_BYTES)].contiguous().view(x).double()
        return torch.where(places >= 0, panels[..., places.clamp(min=0)], 0.0)

    row = found[..., COEFFICIENTS_AT : COEFFICIENTS_AT + 4 * (3 * CHUNK + 4)].contiguous().view(torch.float32).double()
    c_x, c_u, c_o = (row[..., CHUNK * i : CHUNK * (i + 1)] for i in range(3))
    assert (row[..., -4:].nan_to_num() == row[..., -1:].nan_to_num()).all(), "the decay is there four times"
    return Images(square(T_AT), square(P_AT), c_x, c_u, c_o, row[..., -1], images.served)


def images_are_right(found: Images, wanted: Images, x: torch.dtype, bound: float | None = None, coefficients: float = 1e-5) -> None:
    """Chunks with tokens agree within `bound`, or `coefficients`, relative L2 by chunk and head. T and P are exact after the last token."""
    limit = ROUNDED[x] if bound is None else bound
    for at, count in enumerate(wanted.served.tolist()):
        for name in ("T", "P", "c_x", "c_u", "c_o", "decay") if count else ():
            ours, theirs = getattr(found, name)[at], getattr(wanted, name)[at]
            assert ours.isfinite().all(), (name, at)
            if name in ("T", "P"):
                assert torch.equal(ours[:, count:], theirs[:, count:]) and torch.equal(ours[:, :, count:], theirs[:, :, count:]), (name, at)
            elif name == "c_u":
                assert not ours[:, count:].any(), (name, at)
            if name.startswith("c_"):
                ours, theirs = ours[:, :count], theirs[:, :count]
            for h in range(ours.shape[0]):
                allowed = limit if name in ("T", "P") else coefficients
                apart = (ours[h] - theirs[h]).norm()
                assert apart <= allowed * theirs[h].norm() + 1e-30, (name, at, h, float(apart / theirs[h].norm()))
