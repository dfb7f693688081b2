"""combine_splits: merges partial attention outputs of split-KV decoding and of cascades."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, INDEX
from ...calls.dispatch import callers
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...calls.scalars import one_of
from ...spec.arguments import divisor
from ...spec.kernel import Loads
from .operands import OPERANDS
from .reference import combine_splits as reference
from .spec import AXES, OPERATOR, CombineProblem, CombineSpec, bound_of

NATURAL = {2: False, "2": False, "e": True}
BASE = one_of("2 or 'e'", *NATURAL)


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    lse_base: str = "e"
    lse_base_out: str | None = None
    empty_lse: float = -math.inf
    skip_single: bool = False

    @property
    def natural(self) -> bool:
        return NATURAL[self.lse_base]

    @property
    def natural_out(self) -> bool:
        return NATURAL[self.lse_base if self.lse_base_out is None else self.lse_base_out]


@operator(like="o", lse_base=BASE, lse_base_out=BASE, empty_lse=one_of("inf or -inf", math.inf, -math.inf))
def combine_splits(
    o: Tensor | Sequence[Tensor],
    lse: Tensor | Sequence[Tensor],
    num_splits: Tensor | None = None,
    *,
    lse_base: int | str = "e",
    lse_base_out: int | str | None = None,
    empty_lse: float = -math.inf,
    attn_sink: Tensor | None = None,
    mask: Tensor | None = None,
    skip_single: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
    lse_out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """out = sum_s exp(lse[s]) o[s] / (sum_s exp(lse[s]) + exp(attn_sink)); lse_out = log(sum_s exp(lse[s])), without the sink.

    o: [splits, *rows, d_v] f32, f16 or bf16, normalised; d_v 1 … 1024, element by element if not a multiple of 4; any number of splits
    lse: [splits, *rows] f32. A split whose LSE is +inf, -inf or NaN is empty. A split that is empty, or weighs less than 2^-126 of the
        largest, is not in the sum: it may hold any values
    o, lse as pairs of tensors, [*rows, d_v] and [*rows]: the two splits, at any addresses
    out: [*rows, d_v] f32, f16 or bf16, or [batch, *rows, d_v]; may be one of a pair of o; None for a new one of o's dtype
    return_lse: also return lse_out, a new one if none is given
    lse_out: f32, out's shape without d_v; may be one of a pair of lse
    lse_base, lse_base_out: 2 or "e", the logarithms' base; None for the same
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Numbers of splits by entry, sinks and masks:
    num_splits: [batch + 1] int32 or int64, ascending: entry b of the batch has splits num_splits[b] … num_splits[b + 1] - 1, where
        out is [batch, *rows, d_v]. Read on the device, never beyond the existing splits. None: every row has all splits
    skip_single: also leaves the rows of an entry with a single split unchanged: the attention kernel has written them
    empty_lse: lse_out of rows whose splits are all left out of the sum, inf or -inf; their output is 0
    attn_sink: f32, f16 or bf16, natural logarithms, expandable to out's shape without d_v ([heads] if heads are the last of these axes);
        -inf for none
    mask: bool, expandable likewise: where it is false, out and lse_out are unchanged

    Layout and precision:

    Splits come first, and rows have any axes: pass a view of the engine's layout (`v.transpose(0, 1)` of [n, splits, heads, d_v], `lse.t()`
    of [heads, n]). Strides are arbitrary, except that d_v is contiguous. Arithmetic is f32, in one order of summation; neither the variant
    nor the batch size changes a bit. Weights are relative to the largest weight of their row.

    Returns out, or (out, lse_out). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Milakov & Gimelshein 2018 (arXiv 1805.02867); the forms follow FlashMLA, FlashInfer and vLLM.
    """
    o_other = lse_other = None
    if isinstance(o, (tuple, list)) and len(o) == 2:
        o, o_other = o
    if isinstance(lse, (tuple, list)) and len(lse) == 2:
        lse, lse_other = lse
    if out is None and isinstance(o, Tensor):
        count = [] if not isinstance(num_splits, Tensor) else [max(num_splits.numel() - 1, 0)]
        out = o.new_empty(o.shape if o_other is not None else [*count, *o.shape[1:]])
    if return_lse and lse_out is None and isinstance(out, Tensor):
        lse_out = out.new_empty(out.shape[:-1], dtype=torch.float32)
    tensors = OPERANDS.Tensors(o, lse, o_other, lse_other, num_splits, attn_sink, mask, out, lse_out)
    options = Options(str(lse_base), None if lse_base_out is None else str(lse_base_out), empty_lse, skip_single)
    return run(CALLER, tensors, options, pdl, returns=("out", "lse_out") if return_lse else ("out",))


def _check_forms(named: Mapping[str, Any], options: Options, problems: list[str]) -> None:
    if options.skip_single and "num_splits" not in named:
        problems.append("skip_single is True without num_splits; expected both. Pass num_splits.")
    if ("o_other" in named) != ("lse_other" in named):
        problems.append("one of o and lse is a pair; expected both or neither")
    if "o_other" in named and "num_splits" in named:
        problems.append("num_splits is given with a pair, whose rows have two splits each; expected None. Leave out num_splits.")


def _shapes_fit(named: Mapping[str, Tensor], problems: list[str]) -> bool:
    o, pair, indexed = named["o"], "o_other" in named, "num_splits" in named
    if o.dim() < (1 if pair else 2):
        problems.append(f"o is {list(o.shape)}; expected {'[*rows, d_v]' if pair else '[splits, *rows, d_v]'}")
        return False
    if indexed and (named["num_splits"].dim() != 1 or not named["num_splits"].numel()):
        problems.append(f"num_splits is {list(named['num_splits'].shape)}; expected [batch + 1]")
        return False
    d_v = o.shape[-1]
    if not 1 <= d_v <= 1024:
        problems.append(f"o is {list(o.shape)}, of d_v {d_v}; expected a d_v of 1 … 1024")
    rows = o.shape[:-1] if pair else (*([named["num_splits"].numel() - 1] if indexed else []), *o.shape[1:-1])
    words, of_rows = ("[batch, *rows", "[batch, *rows]") if indexed else ("[*rows", "[*rows]")
    allowed = {
        "lse": {"o's shape without d_v": tuple(o.shape[:-1])},
        "o_other": {"the shape of the first split": tuple(o.shape)},
        "lse_other": {"the shape of the first split": tuple(o.shape[:-1])},
        "out": {f"{words}, d_v]": (*rows, d_v)},
        "lse_out": {of_rows: tuple(rows)},
    }
    fits = [checks.check_shape(name, t, allowed[name], problems) for name, t in named.items() if name in allowed]
    for name in ("attn_sink", "mask"):
        if name in named and not _expands(named[name].shape, rows):
            problems.append(f"{name} is {list(named[name].shape)}; expected a shape that expands to {of_rows} = {list(rows)}")
            fits.append(False)
    return all(fits)


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands, with their row axes merged as far as strides allow, the batch first. Adds errors to `problems`; the result is usable
    only if there are none."""
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "o", problems, "the merging of splits")
    _check_forms(named, options, problems)
    if not _shapes_fit(named, problems):
        return {}
    if "o_other" in named and named["o_other"].dtype != named["o"].dtype:
        problems.append(f"o_other is {named['o_other'].dtype}; expected {named['o'].dtype}, the dtype of o".replace("torch.", ""))
    for name in ("o", "o_other", "out"):
        if name in named and named[name].stride(-1) != 1:
            problems.append(
                f"{name} has strides {list(named[name].stride())}; expected 1 for its last axis, d_v. Pass a contiguous tensor."
            )
    checks.check_distinct(named, OPERANDS.written, problems)
    for name, t in named.items():
        if any(s >= 2**32 for s in t.stride()):
            problems.append(f"{name} has strides {list(t.stride())}; expected strides below 2^32 elements")
    rows = named["out"].shape[:-1]
    if math.prod(rows) >= 2**31 or ("o_other" not in named and named["o"].shape[0] >= 2**31):
        problems.append(f"out is {list(named['out'].shape)}, o is {list(named['o'].shape)}; expected rows and splits below 2^31")
    wide = {n: t.expand(rows) if n in ("attn_sink", "mask") else t for n, t in named.items()}
    views = _merged(wide, len(rows))
    axes = views["out"].dim() - 1
    if axes > len(AXES):
        problems.append(
            f"out is {list(named['out'].shape)}, whose strides keep {axes} axes of rows apart; expected at most {len(AXES)}. "
            "Pass a contiguous tensor."
        )
    return views


def _merged(named: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """The operands with their `count` row axes merged where all operands are dense across the axes; axes of size 1 are removed."""
    indexed, pair = "num_splits" in named, "o_other" in named
    first = int(indexed)  # the batch stays, because o lacks this axis
    before = {n: 1 if n in ("o", "lse") and not pair else first for n in named}  # axes before the mergeable ones
    after = {n: int(n in ("o", "o_other", "out")) for n in named}
    ours = [n for n in named if n != "num_splits"]
    sizes: list[int] = []
    strides: dict[str, list[int]] = {n: [] for n in ours}
    for i in range(count - first):
        size = named["out"].shape[first + i]
        new = {n: named[n].stride(before[n] + i) for n in ours}
        if size == 1:
            continue
        if sizes and all(strides[n][-1] == new[n] * size for n in ours):
            sizes[-1] *= size
            for n in ours:
                strides[n][-1] = new[n]
            continue
        sizes.append(size)
        for n in ours:
            strides[n].append(new[n])
    if not sizes and not indexed:  # a single row
        sizes, strides = [1], {n: [0] for n in ours}
    views = dict(named)
    for n in ours:
        t, last = named[n], named[n].dim() - after[n]
        shape = (*t.shape[: before[n]], *sizes, *t.shape[last:])
        views[n] = t.as_strided(shape, (*t.stride()[: before[n]], *strides[n], *t.stride()[last:]))
    return views


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> CombineProblem:
    """The problem of checked operands and their addresses."""
    o, out, pair = views["o"], views["out"], "o_other" in views
    problem: dict[str, Any] = {
        "d_v": o.shape[-1],
        "o": DTYPES[o.dtype],
        "out": DTYPES[out.dtype],
        "max_splits": 2 if pair else bound_of(o.shape[0]),
        "axes": out.dim() - 1,
        "pair": pair,
        "num_splits": INDEX[views["num_splits"].dtype if "num_splits" in views else None],
        "sink": DTYPES[views["attn_sink"].dtype] if "attn_sink" in views else None,
        "mask": "mask" in views,
        "lse_out": "lse_out" in views,
        "skip_single": options.skip_single,
        "in_place": pointers.get("lse_out") in (pointers["lse"], pointers.get("lse_other", 0)),
    }
    plain = CombineProblem(**problem)
    wide = [n for n in ("o", "o_other", "out") if n in views]
    aligned = not plain.partial and all(checks.aligned(views[n], pointers[n], plain.widest) for n in wide)
    return CombineProblem(**problem, loads=Loads.VECTOR if aligned else Loads.ELEMENT)


def grid_of(spec: CombineSpec, views: Mapping[str, Tensor]) -> int:
    units = size_of(views) * spec.tiles
    return -(-units // (spec.threads // spec.unit)) if units + spec.threads < 2**31 else 2**31


def kernel_values(spec: CombineSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    axes = spec.row_axes()
    # factor that converts a logarithm to base 2
    unit, unit_out = (math.log2(math.e) if n else 1.0 for n in (options.natural, options.natural_out))
    values = {"rows": size_of(views), "splits": views["o"].shape[0], "empty_lse": options.empty_lse}
    values |= {"to_log2": unit, "sink_to_base": math.log2(math.e) / unit, "max_to_out": unit / unit_out, "log2_to_out": 1 / unit_out}
    for axis, size in zip(axes, views["out"].shape, strict=False):
        values |= divisor(f"{axis}_size", size)
    for operand, axis in spec.strides():
        t = views[operand]
        missing = int(spec.indexed and operand in ("o", "lse"))  # they have a splits axis instead
        lead = 1 if operand in ("o", "lse") and not spec.pair else 0
        values[f"{operand}_{axis}"] = t.stride(0 if axis == "split" else lead + axes.index(axis) - missing)
    return values


def size_of(views: Mapping[str, Tensor]) -> int:
    """Rows of the output."""
    return math.prod(views["out"].shape[:-1])


FAMILY = Family(OPERATOR, OPERANDS.written, problem_of, size_of, grid_of, kernel_values, OPERANDS.in_place)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    how: dict[str, Any] = {"natural": options.natural, "natural_out": options.natural_out, "empty_lse": options.empty_lse}
    reference(**{**views, **how}, skip_single=options.skip_single, dtype=dtype)


WORDS = {"o_other": "o[1]", "lse_other": "lse[1]"}
(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, run_reference, words={OPERATOR: WORDS}).values()
