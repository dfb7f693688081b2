"""chunk_linear_attention: the first kernel's images, which the second kernel reads, in float64 and as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from delta_images import ROUNDED, spans_of
from torch import Tensor

from ssmgen.engine.chunks.problem import chunks_of
from ssmgen.engine.recurrences.attention.problem import Beta
from ssmgen.engine.recurrences.attention.reference import log_decay, normalised
from ssmgen.families.chunk_linear_attention.problem import (
    BLOCK,
    PANEL,
    PANELS,
    ROWS,
    ImageProblem,
    Rule,
)

MATRICES, SQUARES = ("E", "Q", "W"), ("T", "P")


@dataclass(frozen=True)
class Images:
    """The first kernel's images by chunk number and head; served: [numbers], tokens in each, 0 for images that belong to no chunk. Rules
    that do not read have E and T here too, but do not keep them."""

    E: Tensor  # [numbers, HV, 64, K]
    Q: Tensor
    W: Tensor
    T: Tensor  # [numbers, HV, 64, 64]
    P: Tensor
    decay: Tensor  # [numbers, HV, K]
    served: Tensor

    @staticmethod
    def kept(rule: Rule) -> list[str]:
        return ["E"] * rule.reads + ["Q", "W"] + ["T"] * rule.reads + ["P"]


def decays_of(views: Mapping[str, Tensor], problem: ImageProblem, lower_bound: float) -> Tensor:
    """[B, T, HV, K] in float64: the factors of the state at each token."""
    A_log, dt_bias = (views[n].double() if n in views else None for n in ("A_log", "dt_bias"))
    form = SimpleNamespace(gate=problem.gate.value)
    if problem.gk is not None:
        log = log_decay(views["gk"].double(), form, None if A_log is None else A_log[:, None], dt_bias, lower_bound)
    elif problem.g is not None:
        log = log_decay(views["g"].double(), form, A_log, dt_bias, lower_bound)[..., None].expand(*views["g"].shape, problem.head_k)
    else:
        return torch.ones(*views["q"].shape[:2], _heads(views), problem.head_k, dtype=torch.float64)
    return log.exp()


def _heads(views: Mapping[str, Tensor]) -> int:
    return next(views[n].shape[2] for n in ("v", "gk", "g", "erase", "beta", "q") if n in views)


def operands_of(views: Mapping[str, Tensor], problem: ImageProblem, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, e, w, second w, weight) of each token and head of v, [B, T, HV, K] and weights [B, T, HV] in float64: the vectors that it reads
    with, and writes with, times its weight. In the low-rank form w belongs to v and the second w to the value read; the second w is zero in
    other forms."""
    heads = _heads(views)
    key = {n: views[n].double() for n in ("q", "k", "read", "write", "alpha") if n in views}
    weight = torch.ones(*views["q"].shape[:2], heads, dtype=torch.float64)
    if problem.l2norm:
        norm = torch.rsqrt(key["k"].square().sum(-1, keepdim=True) + 1e-6)
        whole = norm.log2().floor().exp2() if problem.rule.weighs else norm
        weight = weight * (norm / whole)[..., 0].repeat_interleave(heads // norm.shape[2], 2)
        written = key["k"] * whole
        key |= {n: normalised(key[n]) for n in ("q", "k", "read") if n in key}
        key["w"] = written
    key = {n: t.repeat_interleave(heads // t.shape[2], 2) for n, t in key.items()}
    read = key.get("read", key["k"]) * (views["erase"].double() if "erase" in views else 1)
    second = torch.zeros_like(key["k"])
    if problem.rule is Rule.LOW_RANK:
        second = key["write"] if "write" in key else -(read * key["alpha"])
        read = -read
    if "beta" in views:
        beta = views["beta"].double()
        if problem.beta_form is not Beta.PLAIN:
            beta = torch.sigmoid(beta) * (2 if problem.beta_form is Beta.TWICE_SIGMOID else 1)
        weight = weight * beta
    return scale * key["q"], read, key.get("w", key["k"]), second, weight


def images_of(views: Mapping[str, Tensor], problem: ImageProblem, scale: float = 1.0, lower_bound: float = 0.0) -> Images:
    """Images in float64 from a call's operands by their roles, in token form: q, k, read, write, alpha [B, T, HK, K], gk, erase [B, T, HV,
    K], g, beta [B, T, HV], A_log [HV], dt_bias [HV] or [HV, K], cu_seqlens. Rows without a token are zero, except that T is the identity if
    the rule does not weigh."""
    *operands, weights = operands_of(views, problem, scale)
    a = decays_of(views, problem, lower_bound)
    (batch, length), heads, K, step = views["q"].shape[:2], _heads(views), problem.head_k, problem.rule.tokens
    spans = spans_of(views, "q")
    numbers = chunks_of(batch * length, len(spans), step)
    matrix, square = torch.zeros(numbers, heads, ROWS, K, dtype=torch.float64), torch.zeros(numbers, heads, ROWS, ROWS, dtype=torch.float64)
    served = torch.zeros(numbers, dtype=torch.int64)
    found = Images(matrix, matrix.clone(), matrix.clone(), square, square.clone(), matrix[:, :, 0].clone(), served)
    for s, (row, begin, end) in enumerate(spans):
        for n, start in enumerate(range(begin, end, step)):
            at, count = (begin + row * length) // step + s + n, min(step, end - start)
            own = (row, slice(start, start + count))
            assert not served[at], "two chunks have one number"
            served[at] = count
            for h in range(heads):
                one = [torch.zeros(step, K, dtype=torch.float64).index_copy(0, torch.arange(count), t[own][:, h]) for t in operands]
                decay = torch.ones(step, K, dtype=torch.float64).index_copy(0, torch.arange(count), a[own][:, h])
                weight = torch.zeros(step, dtype=torch.float64).index_copy(0, torch.arange(count), weights[own][:, h])
                for field, value in zip(("E", "Q", "W", "T", "P", "decay"), _image(problem.rule, *one, decay, weight), strict=True):
                    getattr(found, field)[at, h] = value
    return found


def _image(rule: Rule, q: Tensor, e: Tensor, w: Tensor, second: Tensor, a: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """(E, Q, W, T, P, decay) of a chunk's tokens."""
    tokens = torch.arange(ROWS) % rule.tokens
    reading = (torch.arange(ROWS) >= ROWS - rule.tokens).double()[:, None]
    count = len(a)
    behind = torch.ones(count, count).tril(-1).bool()[..., None]
    through = torch.where(behind, a[:, None], 1.0).cumprod(0)  # [i, j]: the part of the state after token j that remains at token i
    since = a.cumprod(0)
    ahead, since_ahead = through, since  # for the operand that e reads
    if rule in (Rule.OLD, Rule.LOW_RANK):
        ahead, since_ahead = torch.cat([through[:1], through[:-1]]), torch.cat([torch.ones_like(a[:1]), since[:-1]])
    E, Q = reading * (e * since_ahead)[tokens], reading * (q * since)[tokens]
    written = torch.cat([w, second]) if rule is Rule.LOW_RANK else w
    W = written * through[-1][tokens]
    later, now = tokens[:, None] > tokens, tokens[:, None] == tokens
    pairs = tokens[:, None].expand(ROWS, ROWS), tokens.expand(ROWS, ROWS)
    A = torch.einsum("ic,jc,ijc->ij", reading * e[tokens], written, ahead[pairs]) * later
    P = torch.einsum("ic,jc,ijc->ij", reading * q[tokens], written, through[pairs]) * (later | now)
    by = weight if rule.weighs else torch.ones(ROWS, dtype=torch.float64)
    T = by[:, None] * torch.linalg.inv(torch.eye(ROWS, dtype=torch.float64) + A * by)
    return E, Q, W, T, P, since[-1]


def _panels(rule: Rule) -> Tensor:
    """[64, 64]: the index of each element of T or P among the 16-bit numbers of its panels; -1 for elements that are not kept."""
    rows, columns = torch.meshgrid(torch.arange(ROWS), torch.arange(ROWS), indexing="ij")
    panel, inner = columns // PANEL, columns % PANEL
    begins = torch.tensor([0, *rule.panel_bytes]).cumsum(0)[:PANELS][panel] // 2
    half, first = (inner // 8) ^ (rows // 4 % 2), (PANEL * panel).clamp(min=rule.silent)
    return torch.where(rows >= first, begins + (rows - first) * PANEL + half * 8 + inner % 8, -1)


def _rest() -> Tensor:
    """[64, 64]: the index of each second term of T among the second terms; -1 for elements that have none."""
    rows, columns = torch.meshgrid(torch.arange(ROWS), torch.arange(ROWS), indexing="ij")
    inner = columns % PANEL
    places = rows * PANEL + ((inner // 8) ^ (rows // 4 % 2)) * 8 + inner % 8
    return torch.where(rows // PANEL == columns // PANEL, places, -1)


def _blocks(head_k: int, first: int) -> Tensor:
    """[64, K]: the index of each element of E, Q or W among the 16-bit numbers of its blocks; -1 in the `first` rows if these are
    not kept."""
    rows, columns = torch.meshgrid(torch.arange(ROWS), torch.arange(head_k), indexing="ij")
    piece = columns % BLOCK // 8 ^ rows % 8
    places = columns // BLOCK * ((ROWS - first) * BLOCK) + (rows - first) * BLOCK + piece * 8 + columns % 8
    return torch.where(rows >= first, places, -1)


def _places(name: str, problem: ImageProblem) -> Tensor:
    rule = problem.rule
    return _panels(rule) if name in SQUARES else _blocks(problem.head_k, 0 if name == "W" else rule.silent)


def _begins(problem: ImageProblem) -> dict[str, int]:
    image = problem.image
    return dict(zip(("E", "Q", "W", "T", "rest", "P"), image[:6], strict=True))


def pack(images: Images, problem: ImageProblem) -> Tensor:
    """The bytes that the first kernel should leave, except roundings; NaN where nothing is written."""
    (numbers, heads, K), x = images.decay.shape, {"bf16": torch.bfloat16, "f16": torch.float16}[problem.x.value]
    image = problem.image
    found = torch.full((numbers, heads, image.bytes), 0xFF, dtype=torch.uint8)
    halves = found.view(torch.int16)
    begins = _begins(problem)
    for name in Images.kept(problem.rule):
        places = _places(name, problem)
        there, values = places >= 0, getattr(images, name)
        halves[..., begins[name] // 2 + places[there]] = values[..., there].to(x).view(torch.int16)
        if name == "T" and problem.rule.weighs:
            there = _rest() >= 0
            rest = (values - values.to(x).double())[..., there]
            halves[..., begins["rest"] // 2 + _rest()[there]] = rest.to(x).view(torch.int16)
    found[..., image.decay : image.decay + 4 * K] = images.decay.float().contiguous().view(torch.uint8)
    found[images.served == 0] = 0xFF
    return found.flatten()


def unpack(workspace: Tensor, images: Images, problem: ImageProblem) -> Images:
    """A workspace's contents as Images, to compare with the images of the same call."""
    (numbers, heads, K), x = images.decay.shape, {"bf16": torch.bfloat16, "f16": torch.float16}[problem.x.value]
    image, begins = problem.image, _begins(problem)
    found = workspace.cpu()[: numbers * heads * image.bytes].view(numbers, heads, image.bytes)
    halves = found.contiguous().view(x)
    read = {name: getattr(images, name) for name in ("E", "T")}
    for name in Images.kept(problem.rule):
        for part, places in ((name, _places(name, problem)), *((("rest", _rest()),) if name == "T" and problem.rule.weighs else ())):
            values = halves[..., begins[part] // 2 + places.clamp(min=0)].double()
            kept = torch.where(places >= 0, values, 0.0)
            read[name] = read[name] + kept if part == "rest" else kept
        if name == "T" and not problem.rule.weighs:
            silent = torch.arange(problem.rule.silent)
            read[name][..., silent, silent] = 1.0  # and is not kept
    decay = found[..., image.decay : image.decay + 4 * K].contiguous().view(torch.float32).double()
    return Images(**read, decay=decay, served=images.served)


def images_are_right(found: Images, wanted: Images, problem: ImageProblem, bound: float | None = None, decay: float = 1e-5) -> None:
    """Matrices agree within `bound` and decays within `decay`, relative L2 by chunk and head. Zeros and the identity are exact. Half more
    is allowed for a few tokens: nothing averages up to three roundings of each."""
    x = {"bf16": torch.bfloat16, "f16": torch.float16}[problem.x.value]
    limit = ROUNDED[x] if bound is None else bound
    for at in torch.nonzero(wanted.served).flatten().tolist():
        few = 1.5 if wanted.served[at] < 16 else 1.0
        for name in (*Images.kept(problem.rule), "decay"):
            ours, theirs = getattr(found, name)[at], getattr(wanted, name)[at]
            assert ours.isfinite().all(), (name, at)
            exact = (theirs == 0) | (theirs == 1)
            if name in SQUARES:
                exact &= torch.ones(ROWS, ROWS).triu().bool() if name == "T" else torch.ones(ROWS, ROWS).triu(1).bool()
            if name != "decay":
                assert torch.equal(ours[exact], theirs[exact]), (name, at)
            apart, allowed = (
                (ours - theirs).flatten(1).norm(dim=1),
                (decay if name == "decay" else few * limit) * theirs.flatten(1).norm(dim=1),
            )
            assert (apart <= allowed + 1e-30).all(), (name, at, (apart / theirs.flatten(1).norm(dim=1)).tolist())
