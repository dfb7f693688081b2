"""How a family describes the axes of its functions' tensors: a call's heads, sequences and tokens may be split over several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

# Operands that locate sequences; all layers share them.
CONTROL = dict.fromkeys(("state_indices", "dst_state_indices", "parents"), "batch|batch column") | dict.fromkeys(
    ("num_accepted_tokens", "intermediate_state_indices"), "batch"
)


class Kind(str, Enum):
    """The axes of a call that the mesh may split. Each value is also the word for such an axis of a tensor."""

    HEAD = "head"
    BATCH = "batch"
    TOKEN = "token"


class Axis(NamedTuple):
    """An axis of a tensor, parsed from a rule's word."""

    word: str  # without its suffix; KINDS for an axis of several kinds
    together: int = 1  # number of heads that must stay on one rank
    kinds: tuple[tuple[int, int], ...] = ()  # (count, channels of each) of each kind, in their order

    @classmethod
    def of(cls, word: str) -> Axis:
        """Parses "head", "head/4" or "group:2x64+head:4x32"."""
        if "+" in word:
            counts = [kind.partition(":")[2].split("x") for kind in word.split("+")]
            return cls(KINDS, kinds=tuple([(int(count), int(size)) for count, size in counts]))
        plain, _, together = word.partition("/")
        return cls(plain, int(together or 1))


KINDS = "kinds"


class Rule(NamedTuple):
    """The axes of a function's tensors, and the ways to split them.

    axes: by parameter, one word per axis. Field k of a tuple called ring is "ring.k". Three words have a meaning: "head" (of the state; a
        channel, if there are no heads), "group" (shared by several heads) and "batch" (also for slots). `*` stands for the axes before the
        heads, the first of which is the batch. `|` separates forms; the number of axes selects one. An axis of several consecutive kinds
        gives their counts and channels: "group:2x64+head:4x32". "head/4" is an axis of heads where four consecutive heads stay together.
    """

    axes: Mapping[str, str]
    written: tuple[str, ...]
    like: str = ""  # the parameter whose number of axes determines the length of `*`; one axis if there is none
    inner: int = 2  # axes of that parameter outside of `*`
    anchors: tuple[str, ...] = ("state",)  # the first one that is given decides what is sharded
    returns: tuple[str, ...] = ("out",)
    asked: Mapping[str, str] = {}  # returned tensor -> the parameter that must be set for it to be returned
    by_sequence: bool = True  # whether sequences may be split over ranks
    layers: bool = False  # whether all operands except CONTROL may have a leading axis of layers
    tuples: Mapping[str, tuple[str, ...]] = {}  # parameters that are tuples of tensors, and the names of their fields
    variant: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None  # the axes that depend on a call's other arguments

    def of(self, given: Mapping[str, Any]) -> Rule:
        """The rule for a call with these arguments."""
        return self if self.variant is None else self._replace(axes={**self.axes, **self.variant(given)})

    def axes_of(self, name: str, dims: Mapping[str, int], dim: int) -> tuple[str, ...]:
        """A word per axis of a tensor with `dim` axes, in a call whose tensors have `dims` axes. Empty if the parameter has no such form;
        the call itself reports that."""
        layers = 1 if self.layers and dims["state"] == 5 and name not in CONTROL else 0
        lead = max(dims.get(self.like, 1 + self.inner) - self.inner, 1)  # an operand of Mamba-1 has only channels, no heads
        ahead = ("batch", *["token"] * (lead - 1))
        for form in self.axes.get(name, "").split("|"):
            words = form.split()
            found = (*ahead, *words[1:]) if words[:1] == ["*"] else tuple(words)
            if len(found) == dim - layers:
                return ("layers",) * layers + found
        return ()
