"""selective_state_update: decode steps of Mamba-1 and Mamba-2, one or several tokens per call.

A row of the engine is one of the headdim rows, with d_state elements.
Mamba-1 is one head of `dim` rows; its A and dt differ per row ("untied"). Mamba-2 ties A, dt and dt_bias per head.

Calls with several tokens are Mamba-2 only. A block stages some tokens in shared memory and scans them with its rows in registers, so a
state is read once, and written as often as the call needs. The arithmetic per token is the same as in the single-token kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.recurrences.mamba.kernel import SHARED_BYTES, MambaKernel
from ...engine.recurrences.mamba.problem import SsuProblem
from ...engine.rows import Rule
from ...spec.kernel import Arch, Index, Narrow, Pdl
from ...spec.variants import spec_of

OPERATOR = "selective_state_update"


@dataclass(frozen=True, kw_only=True)
class SsuSpec(MambaKernel):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR

    @property
    def template(self) -> str:
        return f"selective_state_update/{'several_tokens' if self.several else 'one_token'}.cu.j2"


def _spec(problem: SsuProblem, how: dict[str, Any]) -> SsuSpec:
    """A variant that stages the most tokens at a time that fit: 8, or fewer with long rows."""
    if problem.several:
        token = 4 * (2 * problem.d_state + 2 * how["tile"] + 3)
        how = how | {"chunk": next((n for n in (8, 4) if n * token <= SHARED_BYTES), 2)}
    return spec_of(SsuSpec, problem, **how)


def space(problem: SsuProblem, arch: Arch) -> Iterator[SsuSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    return row_engine.legal(lambda how: _spec(problem, how), row_engine.axes(16 if problem.narrow else 8), arch)


WIDE = [  # d_state above 32
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),
]
# States of two bytes, rows of at most 256 bytes; measured on an H100 and an H200.
TWO_BYTES = [Rule("fewest", 0.5, tile_kib=4, pdl=Pdl.TRIGGER_TOP, ilp=1), *WIDE]
# The same rows rounded with noise, which takes more time than the memory: many small blocks took 12 to 14 % less on an H200.
NOISY = [TWO_BYTES[0], WIDE[0], Rule("bandwidth", float("inf"), tile_kib=4, prefetch=264)]
# A lane covers a row of more than 256 bytes in two passes or more, and each pass loads its share of all the lane's rows. Fewer rows at once
# make more blocks, which helps when there are few states. By bytes of an element; measured on an H100 and an H200.
LONG_ROWS = {
    2: [Rule("smallest", 4, tile_kib=4, ilp=1), *WIDE],
    4: [Rule("smallest", 10, tile_kib=8, ilp=2), *WIDE],
}
# 4 bytes, and blocks of four warps do not divide the heads: one warp per block. An H100 gains 3.6 % when the card is full for long, an H200
# neither gains nor loses.
UNEVEN = [*LONG_ROWS[4][:-1], Rule("bandwidth", 1024, tile_kib=16, prefetch=264), Rule("largest", float("inf"), tile_kib=4, prefetch=264)]
ONE_BYTE = [  # states of one byte: several steps have fewer fixed instructions; prefetches the same number of bytes as with two
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=528, steps=2),
]
INT8 = [  # two rows at once leave room for more warps; prefetching 528 tiles was measured to be 1 % slower than 264
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264, steps=4, ilp=2),
]
NARROW = [
    Rule("fewest", 1, tile_kib=2, pdl=Pdl.TRIGGER_SLOT),  # measured on an H100 and an H200
    Rule("latency", 4, tile_kib=8, pdl=Pdl.TRIGGER_SLOT),
    Rule("middle", 20, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),
]
SEVERAL_TOKENS = [  # measured on an H200 with every token's state kept; docs/performance.md
    Rule("few", 1, tile_kib=2, ilp=1),
    Rule("latency", 48, tile_kib=8),
    Rule("bandwidth", float("inf"), tile_kib=8, prefetch=132),
]
SEVERAL_TOKENS_F32 = [SEVERAL_TOKENS[0], Rule("latency", 48, tile_kib=8, ilp=1), SEVERAL_TOKENS[-1]]  # measured on an H100, too


def candidates(problem: SsuProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, SsuSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    size = problem.state.size
    long = LONG_ROWS.get(size, WIDE) if problem.d_state * size > 256 else TWO_BYTES if size == 2 else WIDE
    long = NOISY if long is TWO_BYTES and problem.philox_rounds else long
    long = UNEVEN if size == 4 and long is LONG_ROWS[4] and problem.headdim % 32 else long
    wide = INT8 if problem.state is Narrow.I8 else ONE_BYTE if size == 1 else long
    several = SEVERAL_TOKENS_F32 if size == 4 else SEVERAL_TOKENS
    rules = several if problem.several else NARROW if problem.d_state <= 32 else wide
    for rule, how, reason in row_engine.choices(problem, rules, batch, arch, pdl):
        if how is not None and problem.accepted is not Index.NONE:
            how["prefetch"] = 0
        yield rule, None if how is None else _spec(problem, how), reason
