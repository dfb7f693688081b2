"""The output of a Mamba-3 layer's in-projection: its parts and their widths."""

from __future__ import annotations

from typing import Any, NamedTuple

PARTS = ("z", "x", "B", "C", "dt", "A", "trap", "angle")  # in this order


class Sizes(NamedTuple):
    """The sizes of a layer that its states tell."""

    heads: int
    headdim: int
    d_state: int
    rank: int
    angles: int

    # Methods, and no properties or divmod, which Dynamo does not evaluate for sizes that are symbols.

    def fixed(self) -> int:
        """The width of a row without B and C."""
        return 2 * self.heads * self.headdim + 3 * self.heads + self.angles

    def group(self) -> int:
        """The width of B and C of one group."""
        return 2 * self.rank * self.d_state

    def groups(self, width: int) -> int | None:
        """The number of groups that share B and C in a row of this width; None if no number fits."""
        rows, group = width - self.fixed(), self.group()
        return rows // group if group > 0 and rows > 0 and rows % group == 0 else None

    def widths(self, groups: int) -> list[int]:
        """The widths of the parts."""
        inner, rows, H = self.heads * self.headdim, groups * self.rank * self.d_state, self.heads
        return [inner, inner, rows, rows, H, H, H, self.angles]


def sizes_of(state: Any, k_state: Any, angle_state: Any) -> Sizes | None:
    """The sizes that tensors of states tell; None if they have other numbers of axes."""
    dims = [getattr(t, "ndim", 0) for t in (state, k_state, angle_state)]
    if dims[0] != 4 or dims[1] not in (3, 4) or dims[2] != 3:
        return None
    _, H, P, N = state.shape
    return Sizes(H, P, N, k_state.shape[1] if dims[1] == 4 else 1, angle_state.shape[2])
