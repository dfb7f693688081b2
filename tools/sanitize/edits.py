"""Control experiments: texts of kernels by warpgroups that change how a warp signals completion, and texts that lack a wait.

A warp's lanes meet by __syncwarp, and one of them arrives at the mbarrier for all. If racecheck reports accesses that such an arrival
orders, `each lane arrives` decides: every lane arrives separately, and the counts of all barriers are 32 times as high, with no other
change. A report that remains is an error of the kernel; a report that disappears was false. The other edits are errors, which must be
reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssmgen.compile.render import render
from ssmgen.spec.kernel import Arch, KernelSpec

ARRIVE = '  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0]{};" ::"r"(barrier_at(barriers, i)){} : "memory");'
EXPECT = '  asm volatile("mbarrier.{}.shared::cta.b64 {}[%0], %1;" ::"r"(barrier_at(barriers, i)), "r"(bytes) : "memory");'
BY_COPIES = "barrier_arrive_with_copies("  # where it is called and not only defined, counts are not of warps
BY_ONE = "  __syncwarp();\n  if (lane == 0) barrier_arrive(barriers, i);"

# Barriers count lanes: one arrival for a warp counts as 32.
COUNTED_BY_LANES = (
    ('"r"(barrier_at(barriers, i)), "r"(count)', '"r"(barrier_at(barriers, i)), "r"(32 * count)'),
    (ARRIVE.format("", ""), ARRIVE.format(", 32", "")),
    (EXPECT.format("arrive.expect_tx", "_, "), EXPECT.format("expect_tx.relaxed.cta", "") + "\n" + ARRIVE.format(", 32", "")),
)


@dataclass(frozen=True)
class Edit:
    """Pairs of a string that occurs once in a text and its replacement. planted: whether the edit plants an error."""

    pairs: tuple[tuple[str, str], ...]
    planted: bool = True

    def changes(self, spec: KernelSpec, arch: Arch) -> bool:
        """Whether it can be made in one of a call's kernels."""
        return any(self._fits(render(part, arch)) for part in spec.kernels)

    def _fits(self, text: str) -> bool:
        return all(text.count(old) == 1 for old, _ in self.pairs) and text.count(BY_COPIES) < 2

    def made(self, text: str) -> str:
        """The text with the edit, or as it is where it cannot be made."""
        if not self._fits(text):
            return text
        for old, new in self.pairs:
            text = text.replace(old, new)
        return text


EDITS = {
    "each lane arrives": Edit((*COUNTED_BY_LANES, (BY_ONE, "  __syncwarp();\n" + ARRIVE.format("", ""))), planted=False),
    "a lane does not arrive": Edit((*COUNTED_BY_LANES, (BY_ONE, "  if (lane != 31)\n  " + ARRIVE.format(", %1", ', "r"(lane ? 1 : 2)')))),
    "one arrives for others that may not be done": Edit(((BY_ONE, "  if (lane == 0) barrier_arrive(barriers, i);"),)),
    "no wait for a chunk": Edit((("      wait_full(i);\n      const Matrix rows_of_C", "      const Matrix rows_of_C"),)),
}
