"""What gdn_layer and kda_layer share: a decode step of a delta rule's layer between its projections, as short convolution, delta rule and
gated norm.

linear_attention's row engine, which convolves q, k and v itself, and the gated norm: of a kernel behind it, or of its own, where a block
holds a whole head, or a cluster of blocks does. Two kernels spread a head over more SMs; one has less to launch, and convolves the channels
of a key head less often. Clusters take their time to be placed, which few of them are worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.short_conv import ShortConv, pointers, with_registers
from ...spec import LATER, SM90, Arch, DType, Index, KernelSpec, Loads, Param, Pdl, PoolMode, is_pow2, must
from ..gated_rms_norm.layer_spec import LayerGatedNorm
from ..gated_rms_norm.spec import FEW
from ..linear_attention.problem import Beta, Delta, Gate, LinearAttentionProblem, Ring, Tokens, Update
from ..linear_attention.spec import ONE_TOKEN, LinearAttentionSpec

CONVOLVED = ("q", "k", "v")
# Of a warp that norms a block's rows: elements per lane, at most.
NORM_VEC = 8
# Of a cluster, that every device with clusters can launch.
MOST_BLOCKS = 8


class DeltaRule:
    """Of a layer's problem, with one token per sequence or several. q, k and v are channels of mixed_qkv, whose dtype is theirs; the
    decay's gate is raw, beta a logit per head."""

    @property
    def conv_dtype(self) -> DType:
        return self.q

    @property
    def conv_input(self) -> str:
        return "mixed_qkv"

    @property
    def norm_groups(self) -> int:
        """Of a row."""
        return self.nheads if self.norm else 0

    @property
    def shared_channels(self) -> int:
        return 2 * self.dim_k

    def rule_faults(self) -> list[str]:
        read = self.delta is Delta.DECAYED and not (self.read or self.erase or self.w or self.write or self.alpha)
        bare = not (self.gv or self.beta_rows)
        return [
            *LinearAttentionProblem.faults(self),
            *self.conv_faults(self.dim_v),
            *self.norm_faults(self.nheads * self.dim_v, self.out),
            *must(
                bool(read and bare and self.beta),
                "a layer's delta rule reads the decayed state with k, and has a beta per head and no other operands",
            ),
            *must(self.gate in (Gate.SOFTPLUS, Gate.BOUNDED), "a layer's gate is raw"),
            *must(self.beta_form is not Beta.PLAIN, "a layer's beta is a logit"),
            *must(self.q == self.k == self.v, "q, k and v are of one dtype: they are one tensor"),
            *must(self.norm is None or self.norm_size == self.dim_v, f"groups of {self.norm_size} are not heads of {self.dim_v}"),
            *must(self.ring is Ring.NONE and not (self.layers or self.frozen), "a layer keeps no ring, and has no ring to replay"),
        ]


@dataclass(frozen=True, kw_only=True)
class DeltaLayerProblem(DeltaRule, ShortConv, LayerGatedNorm, LinearAttentionProblem):
    """What a call with one token per sequence fixes."""

    def faults(self) -> list[str]:
        one = self.tokens is Tokens.ONE and self.update is Update.FINAL and self.accepted is Index.NONE and not self.intermediates
        return [
            *self.rule_faults(),
            *must(one, "a layer's call has one token, and updates the state"),
            *must(self.pool is PoolMode.SINGLE, "the window and the state of a layer are updated in place"),
        ]


@dataclass(frozen=True, kw_only=True)
class DeltaLayerSpec(LinearAttentionSpec, DeltaLayerProblem):
    """A problem, and how one variant computes it."""

    template: ClassVar[str] = "delta_layer/one_token.cu.j2"
    call_names: ClassVar[Mapping[str, str]]  # of operands that the call names otherwise than the recurrence

    norm_inside: bool = False  # the norm is this kernel's
    clustered: bool = field(default=False, metadata=LATER)  # the blocks of a head are a thread-block cluster, and norm it together
    norm_threads: int = 32  # of a block of the norm's own kernel, about

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return (self,) if self.norm_inside else (self, *self.norm_kernels(self.out, self.index, self.norm_threads, self.pdl))

    @property
    def norm_vec(self) -> int:
        """Neighbours in a lane of the warp that norms a block's rows."""
        return 4 if self.norm_rows <= 32 * 4 else NORM_VEC

    @property
    def norm_rows(self) -> int:
        """Rows that a block norms."""
        return self.tile if self.clustered else self.dim_v

    @property
    def cluster_blocks(self) -> int:
        return self.tiles if self.clustered else 1

    def violations(self, arch: Arch) -> list[str]:
        if found := LinearAttentionSpec.violations(self, arch) or self.conv_violations(self.tile):
            return found
        if not self.norm_inside:
            found = must(not self.clustered, "clusters are for a norm that is this kernel's")
            return found or [problem for kernel in self.kernels[1:] for problem in kernel.violations(arch)]
        rows = self.norm_rows
        found = [
            *must(self.norm is not None, "norm_inside is of a norm, and there is none"),
            *must(
                rows % self.norm_vec == 0 and rows <= 32 * NORM_VEC,
                f"a warp norms up to 128 rows, or up to {32 * NORM_VEC} in steps of {NORM_VEC}, not {rows}",
            ),
        ]
        if not self.clustered:
            return [*found, *must(self.tiles == 1, f"a block of {self.tile} rows does not hold a head of {self.dim_v}, to norm it")]
        return [
            *found,
            *must(arch >= SM90, f"thread-block clusters need sm_90, not {arch}"),
            *must(2 <= self.tiles <= MOST_BLOCKS, f"a head of {self.tiles} blocks is no cluster of 2 … {MOST_BLOCKS}"),
            *must(
                is_pow2(self.tile) and self.dim_v % self.tile == 0,
                f"the sum of a head of {self.dim_v} rows has no part that is the sum of blocks of {self.tile}",
            ),
        ]

    @property
    def stem(self) -> str:
        shape = f"h{self.nheads}v{self.dim_v}k{self.dim_k}g{self.key_heads}_{self.state.value}"
        return "_".join([self.family, shape, self.how(), *(["norm"] if self.norm_inside else []), *(["cluster"] if self.clustered else [])])

    def _roles(self) -> list[str]:
        """Tensor arguments in order, as the template names them."""
        gates = [name for name in ("g", "gk", "beta", "A_log", "dt_bias") if getattr(self, name) is not None]
        pooled = [] if self.index is Index.NONE else ["state_indices"]
        norm = ["z", "norm_weight"] if self.norm_inside else []
        return ["state", *self.conv_operands(), *gates, *norm, "out", *pooled, "arrivals"]

    def operands(self) -> list[str]:
        """The same as the call names them."""
        return [self.call_names.get(role, role) for role in self._roles()]

    def strides(self) -> list[tuple[str, str, str]]:
        """(role, axis, width) of every stride the kernel takes, in elements. Only the distance between slots is 64-bit."""
        element = ["n"] if self.operand_loads is Loads.ELEMENT else []
        axes = self.conv_strides() | {
            "state": ["slot"],
            **dict.fromkeys(("g", "beta", "z"), ["batch", "head"]),
            "gk": ["batch", "head", *element],
            "A_log": ["head"],
            "dt_bias": ["head", *(element if self.gk else [])],
            "norm_weight": [],
            "out": ["batch", "head", "row"],
            "state_indices": ["batch"],
        }
        return [(role, axis, "i64" if axis == "slot" else "u32") for role in self._roles() for axis in axes[role]]

    def parameters(self) -> list[Param]:
        given = {n: getattr(self, n) for n in ("state", "g", "gk", "beta", "A_log", "dt_bias", "out")}
        element: dict[str, Any] = {n: dtype.value for n, dtype in given.items() if dtype}
        element |= self.conv_elements() | {"state_indices": "int" if self.index is Index.I32 else "i64"}
        element |= {"z": self.norm_gate.value, "norm_weight": self.norm and self.norm.value}
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{role}_{axis}") for role, axis, width in self.strides()]
        strides.sort(key=lambda p: p.code != "q")  # 8-byte arguments first: no padding anywhere in the buffer
        pad = [] if self.index is Index.NONE else [Param.i64("slots"), Param.i64("pad_slot_id")]
        factors = ["scale", *(["lower_bound"] if self.gate is Gate.BOUNDED else []), *(["eps"] if self.norm_inside else [])]
        written = ("state", "conv_state", "out", "arrivals")
        return [*pointers(self._roles(), element, written), *pad, *strides, *map(Param.f32, factors)]

    def constants(self) -> dict[str, Any]:
        lanes = -(-self.norm_rows // self.norm_vec)
        return {
            **LinearAttentionSpec.constants(self),
            **self.conv_constants(),
            "convolved": CONVOLVED,
            "norm_vec": self.norm_vec,
            "norm_lanes": 1 << (lanes - 1).bit_length(),
            "vector_norm": self.norm_loads is Loads.VECTOR,
        }


def _given(problem: DeltaLayerProblem) -> dict[str, Any]:
    return {f.name: getattr(problem, f.name) for f in fields(DeltaLayerProblem)}


def space(kind: type[DeltaLayerSpec], problem: DeltaLayerProblem, arch: Arch) -> Iterator[DeltaLayerSpec]:
    """Every legal variant of a problem within the axes worth trying; kind: the layer's."""
    given = _given(problem)
    norms = ({}, {"norm_inside": True}, {"norm_inside": True, "clustered": True})
    specs = (kind(**given, **how, **norm) for how in row_engine.axes() for norm in norms)
    return (spec for spec in specs if not spec.violations(arch))


# How heads lie on blocks. Measured on an H200 (132 SMs); docs/performance.md holds what was tried.
# Clusters of blocks that norm a head together: (heads of a batch, at most; threads of a block), by whether the keys of a state come first
# and bytes of an element.
CLUSTERS = {
    (False, 4): ((47, 128),),
    (False, 2): ((47, 128),),
    (True, 4): ((47, 32), (96, 128)),
    (True, 2): ((47, 64), (96, 128)),
}
# Whole heads to a block, which then norms them itself: (heads of a batch, at most; threads of a block; times the lanes of a row that the
# row engine takes), by bytes of an element. Fewer heads than these leave too many SMs idle.
FEW_HEADS = 48
WHOLE = {
    4: ((128, 512, 1), (1024, 512, 2), (float("inf"), 256, 1)),
    2: ((1024, 256, 1), (float("inf"), 128, 1)),
}
# Whole heads whose keys come first, in two steps, by which their rows take half the registers; normed by a kernel behind: (heads of a
# batch, from and to; threads of a block; lanes of a row), by bytes of an element.
TWO_STEPS = {4: (), 2: ((384, 1024, 128, 16),)}

Choice = tuple[str, DeltaLayerSpec | None, str]


def candidates(kind: type[DeltaLayerSpec], problem: DeltaLayerProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[Choice]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    heads = batch * problem.nheads
    norm = {"norm_threads": 32 if batch * problem.norm_groups <= FEW else 128}
    launch = {"pdl": Pdl.TRIGGER_LOADED if pdl else Pdl.OFF}
    yield _clustered_heads(kind, problem, heads, arch, launch)
    yield _whole_heads(kind, problem, heads, arch, pdl)
    yield _heads_in_two_steps(kind, problem, heads, arch, launch | norm)
    for rule, how, reason in row_engine.choices(problem, ONE_TOKEN, batch, arch, pdl):
        yield rule, None if how is None else kind(**_given(problem), **with_registers(how, arch), **norm), reason


def _clustered_heads(kind: type[DeltaLayerSpec], problem: DeltaLayerProblem, heads: int, arch: Arch, launch: Mapping[str, Any]) -> Choice:
    """Of as many blocks as there may be."""
    rule, rows = "clustered heads", CLUSTERS[problem.interleaved, problem.state.size]
    reasons = [
        *must(problem.norm is not None, "there is no norm that blocks could do together"),
        *must(heads <= rows[-1][0], f"{heads} heads are above {rows[-1][0]}"),
        *must(arch >= SM90, f"{arch} has no clusters"),
    ]
    if reasons:
        return rule, None, "; ".join(reasons)
    threads = next(threads for most, threads in rows if heads <= most)
    for ilp in (2, 4, 8):
        how = row_engine.layout(problem, ilp)
        how |= {"threads": threads, "tile": threads // how["lanes"] * how["ilp"], **launch}
        spec = kind(**_given(problem), **with_registers(how, arch), norm_inside=True, clustered=True)
        if not spec.violations(arch):
            return rule, spec, ""
    return rule, None, f"no 2 … {MOST_BLOCKS} blocks of {threads} threads have the {problem.dim_v} rows of a head"


def _whole_heads(kind: type[DeltaLayerSpec], problem: DeltaLayerProblem, heads: int, arch: Arch, pdl: bool) -> Choice:
    reasons = [
        *must(problem.norm is not None, "there is no norm that a block with a whole head could do"),
        *must(not problem.interleaved, "keys come first: a whole head takes more registers than a block has"),
        *must(heads >= FEW_HEADS, f"{heads} heads are below {FEW_HEADS}"),
    ]
    _, threads, wider = next(row for row in WHOLE[problem.state.size] if heads <= row[0])
    return "whole heads", None if reasons else whole_heads(kind, problem, threads, arch, pdl, wider), "; ".join(reasons)


def _heads_in_two_steps(kind: type[DeltaLayerSpec], problem: DeltaLayerProblem, heads: int, arch: Arch, more: Mapping[str, Any]) -> Choice:
    rule = "heads in two steps"
    if not problem.interleaved:
        return rule, None, "keys come last"
    for first, last, threads, lanes in TWO_STEPS[problem.state.size]:
        if first <= heads <= last:
            how = row_engine.layout(problem) | {"threads": threads, "lanes": lanes, "tile": problem.dim_v, **more}
            spec = kind(**_given(problem), **with_registers(how, arch))
            fits = not spec.violations(arch) and spec.tile == 2 * spec.rows_per_step
            return rule, spec if fits else None, "" if fits else f"{threads} threads do not hold half of {problem.dim_v} rows"
    return rule, None, f"measured to be slower for {heads} heads of {problem.state.value}"


def whole_heads(
    kind: type[DeltaLayerSpec], problem: DeltaLayerProblem, threads: int, arch: Arch, pdl: bool, wider: int = 1
) -> DeltaLayerSpec:
    """A variant with a head to a block of at most so many threads, and its norm in it; wider: 2 for twice the lanes to a row, if it is that
    long."""
    how = row_engine.layout(problem)
    passes = problem.row_elements // (how["lanes"] * how["vec"])
    how["lanes"] *= wider if passes % wider == 0 and how["lanes"] * wider <= 32 else 1
    step = threads // how["lanes"] * how["ilp"]  # rows in flight
    while step >= 2 * problem.dim_v and threads > 32:
        threads, step = threads // 2, step // 2
    how |= {"threads": threads, "tile": -(-problem.dim_v // step) * step, "pdl": Pdl.TRIGGER_LOADED if pdl else Pdl.OFF}
    # As many blocks as ptxas leaves room for by itself, without the 8 bytes that it may spill; gathering takes more registers.
    # A decay per channel makes two more vectors of a row's length: 4 blocks would spill up to 60 bytes.
    few = 3 if problem.gk else 4
    how |= {"min_blocks": few if threads == 128 and problem.conv_loads is problem.norm_loads is Loads.VECTOR else 0}
    return kind(**_given(problem), **with_registers(how, arch), norm_inside=True)
