"""Greedy answers of two engines, compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TIE = 0.05  # tokens whose log-probabilities differ by at most this may swap by 16-bit rounding


@dataclass(frozen=True, slots=True)
class Compared:
    """equal: answers with the same tokens, out of `count`   within: the largest difference of the best tokens' log-probabilities before
    tokens differ   gaps: for each other answer, the gap between the two best tokens at the first difference
    """

    count: int
    equal: int
    gaps: list[float]
    within: float

    @property
    def parted(self) -> int:
        """Answers whose first difference is not a tie."""
        return sum(gap > TIE for gap in self.gaps)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        apart = f"; others part where the two best are within {max(self.gaps):.4f}" if self.gaps else ""
        return f"{self.equal} of {self.count} equal{apart}; log-probabilities up to there within {self.within:.4f}"


def compared(own: dict[str, Any], ours: dict[str, Any]) -> Compared:
    """The differences between two results of Server.answers."""
    equal, gaps, within = 0, [], 0.0
    for a, b, best_a, best_b in zip(own["tokens"], ours["tokens"], own["best"], ours["best"], strict=True):
        n = next((j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        within = max([within, *(abs(x[0] - y[0]) for x, y in zip(best_a[:n], best_b[:n], strict=True))])
        if n == len(a):
            equal += 1
        else:
            gaps.append(min(best[0] - best[1] for best in (best_a[n], best_b[n])))
    return Compared(len(own["tokens"]), equal, gaps, within)
