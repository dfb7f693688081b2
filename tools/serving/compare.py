"""Greedy answers of two engines, compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TIE = 0.05  # two tokens whose log-probabilities are no further apart may change places by roundings of 16 bits


@dataclass(frozen=True, slots=True)
class Compared:
    """equal: answers with the same tokens, of `count`   within: what log-probabilities of best tokens differ by at most while these are
    the same   gaps: of each other answer, how far apart the two best tokens are at the first that differs
    """

    count: int
    equal: int
    gaps: list[float]
    within: float

    @property
    def parted(self) -> int:
        """Answers that differ at a place which is no tie."""
        return sum(gap > TIE for gap in self.gaps)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        apart = f"; others part where the two best are within {max(self.gaps):.4f}" if self.gaps else ""
        return f"{self.equal} of {self.count} equal{apart}; log-probabilities up to there within {self.within:.4f}"


def compared(own: dict[str, Any], ours: dict[str, Any]) -> Compared:
    """What differs between two results of Server.answers."""
    equal, gaps, within = 0, [], 0.0
    for a, b, best_a, best_b in zip(own["tokens"], ours["tokens"], own["best"], ours["best"], strict=True):
        n = next((j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        within = max([within, *(abs(x[0] - y[0]) for x, y in zip(best_a[:n], best_b[:n], strict=True))])
        if n == len(a):
            equal += 1
        else:
            gaps.append(min(best[0] - best[1] for best in (best_a[n], best_b[n])))
    return Compared(len(own["tokens"]), equal, gaps, within)
