"""gdn_layer, kda_layer: decode steps of a delta rule's layer between its projections, as short convolution, delta rule and gated norm.

linear_attention's row engine convolves q, k and v itself. The gated norm runs in a second kernel, or in the same kernel if a block or a
cluster of blocks holds a whole head. Two kernels spread a head over more SMs; one kernel has less to launch, and convolves the channels of
a key head less often. Clusters take time to be placed, which pays only for few heads. Several tokens are convolved all at once, directly
into the shared memory that linear_attention stages them in, and a second kernel norms their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.layers.problem import with_registers
from ...engine.norm_kernel import FEW
from ...engine.recurrences.attention.kernel import ONE_TOKEN, AttentionKernel
from ...engine.recurrences.attention.problem import Gate
from ...engine.rows import Rule
from ...engine.window import StateLayout
from ...spec.kernel import LATER, SM90, Arch, DType, Index, KernelSpec, Loads, Param, Pdl, Update, is_pow2, must
from ...spec.variants import spec_of
from .operands import FUNCTIONS
from .problem import DeltaLayerProblem

OPERATOR = "delta_layer"
EARLY = 16  # sequences up to which the layer triggers early: the out-projection of the same rows loads its weights at the same time
# Most elements per lane of a warp that norms a block's rows.
NORM_VEC = 8
# Blocks of a cluster that every device with clusters can launch.
MOST_BLOCKS = 8


@dataclass(frozen=True, kw_only=True)
class DeltaLayerSpec(AttentionKernel, DeltaLayerProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR

    norm_inside: bool = False  # this kernel does the norm
    clustered: bool = field(default=False, metadata=LATER)  # the blocks of a head form a thread-block cluster, and norm it together
    norm_threads: int = 32  # threads per block of a separate norm kernel, about
    norm_pdl: Pdl = field(default=Pdl.TRIGGER_LOADED, metadata=LATER)  # where a separate norm lets dependents start, unless pdl is off

    @property
    def template(self) -> str:
        return f"delta_layer/{'several_tokens' if self.several else 'one_token'}.cu.j2"

    def with_early_triggers(self) -> KernelSpec:
        """A separate norm triggers early. The first kernel keeps its trigger: the norm loads its gate before that kernel has ended."""
        alone = self.norm_inside or self.norm.weight is None
        return self if self.pdl is Pdl.OFF or alone else replace(self, norm_pdl=Pdl.TRIGGER_FIRST)

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        first = replace(self, norm_pdl=Pdl.TRIGGER_LOADED)  # it does not depend on the norm's trigger
        return (first,) if self.norm_inside else (first, *self.norm_kernels(self.norm_threads, self.norm_pdl))

    @property
    def norm_vec(self) -> int:
        """Neighbouring elements per lane of the warp that norms a block's rows."""
        return 4 if self.norm_rows <= 32 * 4 else NORM_VEC

    @property
    def norm_rows(self) -> int:
        """Rows that a block norms."""
        return self.tile if self.clustered else self.dim_v

    @property
    def cluster_blocks(self) -> int:
        return self.tiles if self.clustered else 1

    def violations(self, arch: Arch) -> list[str]:
        if found := AttentionKernel.violations(self, arch) or self.conv_violations(self.tile):
            return found
        found = [
            *must(
                not self.several or self.chunk == self.conv.tokens,
                f"chunk is {self.chunk}; expected conv_tokens {self.conv.tokens}, all staged at once",
            ),
            *self.norm_pdl_violations(self.norm_pdl, self.norm.weight is not None and not self.norm_inside),
            *must(self.norm_inside or not self.clustered, "clustered is yes and norm_inside is no; expected both or neither"),
            *must(
                not (self.norm_inside and self.several),
                "norm_inside is yes with several tokens; expected no: a second kernel computes their norm",
            ),
        ]
        if found or not self.norm_inside:
            return found or [problem for kernel in self.kernels[1:] for problem in kernel.violations(arch)]
        return self._violations_inside(arch)

    def _violations_inside(self, arch: Arch) -> list[str]:
        """Broken constraints of a norm in this kernel."""
        rows = self.norm_rows
        found = [
            *must(self.norm.weight is not None, "norm_inside is yes and norm is none; expected a norm"),
            *must(
                rows % self.norm_vec == 0 and rows <= 32 * NORM_VEC,
                f"a warp normalises {rows} rows; expected at most 128, or at most {32 * NORM_VEC} in steps of {NORM_VEC}",
            ),
        ]
        if not self.clustered:
            return [
                *found,
                *must(
                    self.tiles == 1,
                    f"tile is {self.tile} with norm_inside=yes; expected dim_v {self.dim_v}, a whole head, or clustered=yes",
                ),
            ]
        return [
            *found,
            *must(arch >= SM90, f"arch is {arch}; expected sm_90 or later for thread-block clusters"),
            *must(2 <= self.tiles <= MOST_BLOCKS, f"a head has {self.tiles} blocks; expected 2 … {MOST_BLOCKS} with clustered=yes"),
            *must(
                is_pow2(self.tile) and self.dim_v % self.tile == 0,
                f"tile is {self.tile} with clustered=yes; expected a power of two that divides dim_v {self.dim_v}, for the canonical sum",
            ),
        ]

    @property
    def shared_bytes(self) -> int:
        """Bytes of staged tokens, perhaps with a slot each, and of the flag for the last block of a group."""
        slots = 8 * self.chunk if self.update is Update.EACH else 0
        return super().shared_bytes + slots + 16 if self.several else 0

    @property
    def stem(self) -> str:
        shape = f"h{self.nheads}v{self.dim_v}k{self.dim_k}g{self.key_heads}_{self.state.value}"
        if self.several:
            return f"{self.function}_t{self.conv.tokens}_{shape}_{self.update.value}_{self.how()}"
        norm = [*(["norm"] if self.norm_inside else []), *(["cluster"] if self.clustered else [])]
        return "_".join([self.function, shape, self.how(), *norm])

    def operands(self) -> list[str]:
        """Tensor arguments in order, with the call's names."""
        return FUNCTIONS[self.function].of(self)

    def parameters(self) -> list[Param]:
        factors = ["scale", *(["lower_bound"] if self.gate is Gate.BOUNDED else []), *(["eps"] if self.norm_inside else [])]
        return [*self.layer_parameters(FUNCTIONS[self.function]), *map(Param.f32, factors)]

    def constants(self) -> dict[str, Any]:
        lanes = -(-self.norm_rows // self.norm_vec)
        return {
            **AttentionKernel.constants(self),
            **self.conv_constants(),
            "convolved": ("q", "k", "v"),
            # the update uses k unchanged and the output q unchanged, unless the decay is multiplied in
            "in_place": ("write",) if self.gk else ("query", "write"),
            "rows_by_index": self.intermediate_indices is not Index.NONE,
            "norm_vec": self.norm_vec,
            "norm_lanes": 1 << (lanes - 1).bit_length(),
            "vector_norm": self.norm.loads is Loads.VECTOR,
        }


def _spec(problem: DeltaLayerProblem, **how: Any) -> DeltaLayerSpec:
    """A variant; several tokens are staged all at once."""
    return spec_of(DeltaLayerSpec, problem, **how, **({"chunk": problem.conv.tokens} if problem.several else {}))


def space(problem: DeltaLayerProblem, arch: Arch) -> Iterator[DeltaLayerSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    norms: tuple[dict[str, Any], ...] = ({}, {"norm_inside": True}, {"norm_inside": True, "clustered": True})[: 1 if problem.several else 3]
    hows = (how | norm for how in row_engine.axes(ahead=132, interleaved=problem.interleaved) for norm in norms)
    return row_engine.legal(lambda how: _spec(problem, **how), hows, arch)


# Distribution of heads over blocks. Measured on an H200 (132 SMs); docs/performance.md lists all trials.
# Clusters of blocks that norm a head together: (heads of a batch, at most; threads of a block; rows that a thread has in flight, at
# least), by whether the keys of a state come first and bytes of an element. 4 rows in flight, hence 128 blocks, took 3 … 9 % less than 2
# for 32 heads in bf16, on an H100 and an H200.
CLUSTERS = {
    (False, 4): ((47, 128, 2),),
    (False, 2): ((16, 128, 2), (47, 128, 4)),
    (True, 4): ((47, 32, 2), (96, 128, 2)),
    (True, 2): ((47, 64, 2), (96, 128, 2)),
}
# Whole heads per block, which then norms them itself: (heads of a batch, at most; threads of a block; factor on the row engine's lanes per
# row; elements per lane and pass, 0 for the row engine's number), by bytes of an element. Fewer heads than FEW_HEADS leave too many SMs
# idle.
FEW_HEADS = 48
WHOLE = {
    4: ((128, 512, 1, 0), (1024, 512, 2, 0), (float("inf"), 256, 1, 0)),
    2: ((1024, 256, 1, 0), (float("inf"), 128, 1, 0)),
}
# With decays per key channel. 2 bytes: two passes of 8 bytes took 8 … 10 % less than one of 16, for 256 heads on an H100 and an H200, and
# 20 % more for 96 heads on an H200. 4 bytes, on an H200: 512 threads took 12 % more than 256 for 96 heads, and 256 took 7 % more than 128
# for 384 heads, 2 % for 2048.
WHOLE_PER_KEY = {
    4: ((256, 256, 1, 0), (float("inf"), 128, 1, 0)),
    2: ((128, 256, 1, 0), (1024, 256, 1, 4), *WHOLE[2][1:]),
}
# Whole heads whose keys come first, in two steps, so that their rows take half the registers; a second kernel norms: (heads of a batch,
# from and to; threads of a block; lanes of a row), by bytes of an element.
TWO_STEPS = {4: (), 2: ((384, 1024, 128, 16),)}

# Whole heads whose keys come first: two warps read pieces of 128 bytes and hold a row in 8 lanes. For more heads of a batch than this, in
# bf16 with one decay. Measured with 2048 heads: 1.00 x the chain; tiles of 8 warps per row took 1.08 x.
LONG_PIECES = 1024

# Heads in tiles whose keys come first. Without norm and convolution, such tiles take 1.02 … 1.08 x the time of tiles in layout vk. A gdn
# layer of bf16 takes 1.08 x its chain, with 2048 heads.
KEYS_FIRST = [*ONE_TOKEN[:-1], Rule("bandwidth", float("inf"), tile_kib=32, piece=256)]

Choice = tuple[str, DeltaLayerSpec | None, str]


def candidates(problem: DeltaLayerProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[Choice]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    if problem.several:
        yield from _candidates_of_tokens(problem, batch, arch, pdl)
        return
    heads = batch * problem.nheads
    norm: dict[str, Any] = {"norm_threads": 32 if batch * problem.norm_groups <= FEW else 128}
    launch = {"pdl": Pdl.TRIGGER_LOADED if pdl else Pdl.OFF}
    yield _clustered_heads(problem, heads, arch, launch)
    yield _whole_heads(problem, heads, arch, pdl)
    yield _heads_in_two_steps(problem, heads, arch, launch | norm)
    yield _heads_in_long_pieces(problem, heads, arch, launch | norm)
    rules = KEYS_FIRST if problem.interleaved else ONE_TOKEN
    for rule, how, reason in row_engine.choices(problem, rules, batch, arch, pdl):
        yield rule, None if how is None else _spec(problem, **with_registers(how, arch), **norm), reason


def _clustered_heads(problem: DeltaLayerProblem, heads: int, arch: Arch, launch: Mapping[str, Any]) -> Choice:
    """The variant with a cluster of blocks per head, the most blocks that a cluster may have."""
    rule, rows = "clustered heads", CLUSTERS[problem.interleaved, problem.state.size]
    reasons = [
        *must(problem.norm.weight is not None, "the layer has no norm, which a cluster would compute"),
        *must(heads <= rows[-1][0], f"a call has {heads} heads; the rule is for at most {rows[-1][0]}"),
        *must(arch >= SM90, f"{arch} has no thread-block clusters"),
    ]
    if reasons:
        return rule, None, "; ".join(reasons)
    threads, least = next(how for most, *how in rows if heads <= most)
    for ilp in (n for n in (2, 4, 8) if n >= least):
        how = row_engine.layout(problem, ilp)
        how |= {"threads": threads, "tile": threads // how["lanes"] * how["ilp"], **launch}
        spec = _spec(problem, **with_registers(how, arch), norm_inside=True, clustered=True)
        if not spec.violations(arch):
            return rule, spec, ""
    return rule, None, f"no cluster of 2 … {MOST_BLOCKS} blocks with {threads} threads holds the {problem.dim_v} rows of a head"


def _whole_heads(problem: DeltaLayerProblem, heads: int, arch: Arch, pdl: bool) -> Choice:
    reasons = [
        *must(problem.norm.weight is not None, "the layer has no norm, which a block with a whole head would compute"),
        *must(not problem.interleaved, "the layout is kv, in which a whole head takes more registers than a block has"),
        *must(heads >= FEW_HEADS, f"a call has {heads} heads; the rule is for {FEW_HEADS} or more"),
    ]
    _, threads, *lanes = next(row for row in (WHOLE_PER_KEY if problem.gk else WHOLE)[problem.state.size] if heads <= row[0])
    return "whole heads", None if reasons else whole_heads(problem, threads, arch, pdl, *lanes), "; ".join(reasons)


def _heads_in_two_steps(problem: DeltaLayerProblem, heads: int, arch: Arch, more: Mapping[str, Any]) -> Choice:
    rule = "heads in two steps"
    if not problem.interleaved:
        return rule, None, "the layout is vk; the rule is for kv"
    for first, last, threads, lanes in TWO_STEPS[problem.state.size]:
        if first <= heads <= last:
            how = row_engine.layout(problem) | {"threads": threads, "lanes": lanes, "tile": problem.dim_v, **more}
            spec = _spec(problem, **with_registers(how, arch))
            fits = not spec.violations(arch) and spec.tile == 2 * spec.rows_per_step
            return rule, spec if fits else None, "" if fits else f"{threads} threads do not hold half of the {problem.dim_v} rows in flight"
    return rule, None, f"it was measured slower for {heads} heads of {problem.state.value}"


def _heads_in_long_pieces(problem: DeltaLayerProblem, heads: int, arch: Arch, more: Mapping[str, Any]) -> Choice:
    rule = "heads in long pieces"
    reasons = [
        *must(problem.interleaved, "the layout is vk; the rule is for kv"),
        *must(problem.state is DType.BF16 and not problem.gk, "it was measured only for bf16 states with one decay per head"),
        *must(problem.dim_k == problem.dim_v == 128, f"heads are {problem.dim_v} x {problem.dim_k}; it was measured only for 128 x 128"),
        *must(heads > LONG_PIECES, f"a call has {heads} heads; the rule is for more than {LONG_PIECES}"),
    ]
    if reasons:
        return rule, None, "; ".join(reasons)
    how = row_engine.layout(problem) | {"threads": 128, "lanes": 8, "vec": 8, "row_warps": 2, "tile": problem.dim_v, **more}
    spec = _spec(problem, **with_registers(how, arch))
    wrong = spec.violations(arch)
    return rule, None if wrong else spec, "; ".join(wrong)


def whole_heads(problem: DeltaLayerProblem, threads: int, arch: Arch, pdl: bool, wider: int = 1, most_vec: int = 0) -> DeltaLayerSpec:
    """A variant with one head per block, which also norms it. threads: of a block, at most; wider: 2 for twice the lanes per row, if it is
    long enough; most_vec: limit of the elements per lane and pass."""
    how: dict[str, Any] = {**row_engine.layout(problem)}
    how["vec"] = min(how["vec"], most_vec or how["vec"])
    passes = problem.row_elements // (how["lanes"] * how["vec"])
    how["lanes"] *= wider if passes % wider == 0 and how["lanes"] * wider <= 32 else 1
    step = threads // how["lanes"] * how["ilp"]  # rows in flight
    while step >= 2 * problem.dim_v and threads > 32:
        threads, step = threads // 2, step // 2
    how |= {"threads": threads, "tile": -(-problem.dim_v // step) * step, "pdl": Pdl.TRIGGER_LOADED if pdl else Pdl.OFF}
    # The number of blocks per SM that ptxas reaches unasked, but without the 8 bytes that it may spill; gathering takes more registers.
    # A decay per channel adds two vectors of a row's length: 4 blocks would spill up to 60 bytes. Its f32 states were measured unbounded.
    few = 4 if not problem.gk else 3 if problem.state.size == 2 else 0
    how |= {"min_blocks": few if threads == 128 and problem.conv.loads is problem.norm.loads is Loads.VECTOR else 0}
    return _spec(problem, **with_registers(how, arch), norm_inside=True)


# Measured on an H200 with every token's state kept; by bytes of an element. A block has at least one thread per four channels, so that all
# channels convolve at once.
SEVERAL_TOKENS = {
    2: [Rule("latency", 48, tile_kib=8), Rule("bandwidth", float("inf"), tile_kib=16, prefetch=132)],
    4: [Rule("latency", 48, tile_kib=16), Rule("bandwidth", float("inf"), tile_kib=16, ilp=2, prefetch=132)],
}
SEVERAL_INTERLEAVED = [  # a thread holds more of such a state
    Rule("few", 8, tile_kib=16),
    Rule("latency", 48, tile_kib=32),
    Rule("bandwidth", float("inf"), tile_kib=16, piece=128),  # as for one token; not measured
]


def _candidates_of_tokens(problem: DeltaLayerProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[Choice]:
    norm: dict[str, Any] = {"norm_threads": 32 if batch * problem.conv.tokens * problem.norm_groups <= FEW else 128}
    rules = SEVERAL_INTERLEAVED if problem.interleaved else SEVERAL_TOKENS[problem.state.size]
    for rule, how, reason in row_engine.choices(problem, rules, batch, arch, pdl):
        if how is not None and problem.accepted is not Index.NONE:
            how["prefetch"] = 0  # a prefetch does not know which column the sequence starts from
        yield rule, None if how is None else _spec(problem, **_registers_of_tokens(problem, how, arch), **norm), reason


def _registers_of_tokens(problem: DeltaLayerProblem, how: dict[str, Any], arch: Arch) -> dict[str, Any]:
    """`how`, with the registers of a variant of several tokens: 128 per thread, or the number it needs if rows are interleaved or channels
    gathered. On sm_90 ptxas chooses; elsewhere its choice may spill a few bytes.
    """
    gathers = problem.conv.layout is StateLayout.ANY or Loads.ELEMENT in (problem.conv.loads, problem.conv.taps, problem.operand_loads)
    if arch.number == SM90.number or problem.interleaved or gathers:
        return with_registers(how, arch)
    return how | {"min_blocks": max(1, 512 // how["threads"])}
