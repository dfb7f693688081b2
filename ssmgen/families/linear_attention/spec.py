"""linear_attention: decode steps of gated delta rules and their relatives, one or several tokens per call.

A row of the engine is one value channel v of a head: the K elements S[v, :] of the state. Per token, row by row,

    p = <S or D∘S, read>          the state's value for this key, before or after its decay
    e = beta (w v - p)            its error
    S = D∘S + e write             (low rank: S = D∘S + p write + v k)
    o = <S, q> scale

and each model selects some of these terms. DeltaNet omits the decay D, gated DeltaNet has one D per head, KDA one per key channel. GLA and
its simpler forms omit the read. Comba reads before the decay with a separate key. RWKV-7 is the low-rank form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ...engine import rows as row_engine
from ...engine.recurrences.attention.kernel import MAX_SHARED, ONE_TOKEN, AttentionKernel
from ...engine.recurrences.attention.problem import Delta, LinearAttentionProblem
from ...engine.rows import Rule
from ...spec.kernel import Arch, Index, Pdl
from ...spec.variants import spec_of

OPERATOR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec(AttentionKernel):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR

    @property
    def template(self) -> str:
        return "linear_attention/linear_attention.cu.j2"


def space(problem: LinearAttentionProblem, arch: Arch) -> Iterator[LinearAttentionSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    axes = row_engine.axes(16 if problem.scaled else 8, interleaved=problem.interleaved)
    return row_engine.legal(lambda how: spec_of(LinearAttentionSpec, problem, **how), axes, arch)


# States of two bytes; measured on an H100 and an H200. 32 heads of 128 rows are 128 blocks of 32 rows, one per SM, and dependents may
# start at once. Smaller blocks are faster with fewer or more heads.
FEWEST = Rule("fewest", 4, tile_kib=2, ilp=2)
TWO_BYTES = [
    replace(FEWEST, max_mib=1),
    Rule("a-block-each", 2, tile_kib=8, ilp=2, pdl=Pdl.TRIGGER_TOP),
    replace(FEWEST, name="few"),
    *ONE_TOKEN,
]
TWO_BYTES_PER_KEY = [FEWEST, ONE_TOKEN[0], Rule("latency", 48, tile_kib=16, steps=2), ONE_TOKEN[-1]]  # rows of a block share decays
# Rounded with noise, which takes more time than the memory: blocks of 64 threads took 9 to 19 % less on an H200, with states in bf16.
NOISY = Rule("bandwidth", float("inf"), tile_kib=16, steps=4)
# Four bytes, 16 KiB prefetched per SM: an H100 takes 3 % less than with twice as much (and as long as without), an H200 0.1 … 0.8 % less.
FOUR_BYTES = [*ONE_TOKEN[:-1], replace(ONE_TOKEN[-1], prefetch=132)]
NO_DELTA = [Rule("fewest", 4, tile_kib=8), *FOUR_BYTES]  # no state is prefetched; one decay per head; measured on both
READ_BEFORE_DECAY = [FEWEST, *FOUR_BYTES]  # with one decay per head: one-warp blocks took 8 and 9 % less, for an unknown reason
ONE_BYTE = [  # states of one byte; counted, not measured: a sixth fewer instructions in two steps
    Rule("latency", 48, tile_kib=8),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264, steps=2),
]
# Keys-first states, by bytes of an element. Measured with traffic of 512 and 1024 MiB; smaller calls use the other rules.
KEYS_FIRST = {
    2: [*ONE_TOKEN[:-1], Rule("bandwidth", float("inf"), tile_kib=16, piece=128, prefetch=264)],
    4: [*ONE_TOKEN[:-1], Rule("bandwidth", float("inf"), tile_kib=32, piece=128, prefetch=132)],
}
FROZEN = [
    Rule("latency", 32, tile_kib=8, ilp=2),
    Rule("bandwidth", float("inf"), tile_kib=16),
]
SEVERAL_TOKENS = [
    Rule("latency", 48, tile_kib=8),
    Rule("bandwidth", float("inf"), tile_kib=8, prefetch=132),
]
SEVERAL_TOKENS_F32 = [Rule("latency", 48, tile_kib=8, ilp=1), SEVERAL_TOKENS[-1]]  # measured on an H100, too
SEVERAL_KEYS_FIRST = [
    SEVERAL_TOKENS[0],
    Rule("bandwidth", float("inf"), tile_kib=16, piece=128, prefetch=132),
]  # as one token; not measured


def candidates(problem: LinearAttentionProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, LinearAttentionSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    size = problem.state.size
    four = FOUR_BYTES if problem.gk else {Delta.NONE: NO_DELTA, Delta.OLD: READ_BEFORE_DECAY}.get(problem.delta, FOUR_BYTES)
    by_size = {1: ONE_BYTE, 2: TWO_BYTES_PER_KEY if problem.gk else TWO_BYTES, 4: four}
    one = KEYS_FIRST[size] if problem.interleaved else by_size[size]
    if problem.philox_rounds and size == 2 and not problem.interleaved:
        one = [*one[:-1], NOISY]
    several = SEVERAL_KEYS_FIRST if problem.interleaved else SEVERAL_TOKENS_F32 if size == 4 else SEVERAL_TOKENS
    rules = FROZEN if problem.frozen else several if problem.several else one
    for rule, how, reason in row_engine.choices(problem, rules, batch, arch, pdl):
        if how is not None and (problem.accepted is not Index.NONE or problem.heads_apart):
            how["prefetch"] = 0
        yield rule, None if how is None else _fitting(spec_of(LinearAttentionSpec, problem, **how)), reason


def _fitting(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    """The variant with `chunk` halved until the staged tokens fit in shared memory."""
    while spec.shared_bytes > MAX_SHARED and spec.chunk > 1:
        spec = replace(spec, chunk=spec.chunk // 2)
    return spec
