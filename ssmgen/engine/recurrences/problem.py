"""The properties and constraints that the problems of all decode steps share."""

from __future__ import annotations

from ...spec.kernel import Index, Loads, PoolMode, Update, must
from ..rows import RowProblem


class StepProblem(RowProblem):
    """A decode step of one token or several, on states in slots. A family's problem has the attributes declared here as fields."""

    __slots__ = ()
    nheads: int  # of the state
    index: Index  # type of state_indices
    pool: PoolMode
    update: Update
    accepted: Index  # type of num_accepted_tokens, which picks the column of state_indices to start from
    state_loads: Loads
    operand_loads: Loads

    @property
    def heads(self) -> int:
        return self.nheads

    @property
    def row_loads(self) -> Loads:
        return self.state_loads

    @property
    def split(self) -> bool:
        """Whether states go to separate slots."""
        return self.pool is PoolMode.SPLIT

    @property
    def each(self) -> bool:
        """Whether the state after each token has a slot."""
        return self.update is Update.EACH

    @property
    def picks(self) -> bool:
        """Whether num_accepted_tokens picks the column of state_indices to start from."""
        return self.accepted is not Index.NONE

    @property
    def loose(self) -> bool:
        """Whether operands are loaded element by element, at any stride."""
        return self.operand_loads is Loads.ELEMENT

    def slot_faults(self) -> list[str]:
        """Constraints on slots that no variant can meet."""
        return [
            *must(
                self.rows * self.row_elements * self.nheads < 2**31,
                "one slot of the state has 2^31 elements or more; expected fewer, for 32-bit offsets",
            ),
            *must(
                not self.split or self.index is not Index.NONE,
                "pool is split and index is none; expected a type of state_indices for index",
            ),
            *must(
                not self.split or self.update is not Update.NONE,
                "pool is split and update is none; expected pool=single, or a state that is written",
            ),
            *must(not self.each or self.split, "update is each and pool is single; expected pool=split, a slot per token"),
            *must(
                not self.picks or self.index is not Index.NONE,
                f"accepted is {self.accepted.value} with index=none; expected a type of state_indices for index",
            ),
        ]
