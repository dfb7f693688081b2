"""How a family says what each axis of its functions' tensors is: the heads of a call and its sequences may lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

# Operands that say where sequences lie, which those of every layer share.
CONTROL = dict.fromkeys(("state_indices", "dst_state_indices", "parents"), "batch|batch column") | dict.fromkeys(
    ("num_accepted_tokens", "intermediate_state_indices"), "batch"
)


class Kind(str, Enum):
    """What an axis of the mesh may divide. Each is also the word of such an axis of a tensor."""

    HEAD = "head"
    BATCH = "batch"
    TOKEN = "token"


class Axis(NamedTuple):
    """An axis of a tensor, as a rule's word says it."""

    word: str  # without what stands behind it; KINDS for an axis of several kinds
    together: int = 1  # of its heads, so many go together
    kinds: tuple[tuple[int, int], ...] = ()  # (how many, channels of each) of several kinds, one behind the other

    @classmethod
    def of(cls, word: str) -> Axis:
        """The axis that "head", "head/4" or "group:2x64+head:4x32" says."""
        if "+" in word:
            counts = [kind.partition(":")[2].split("x") for kind in word.split("+")]
            return cls(KINDS, kinds=tuple([(int(count), int(size)) for count, size in counts]))
        plain, _, together = word.partition("/")
        return cls(plain, int(together or 1))


KINDS = "kinds"


class Rule(NamedTuple):
    """The axes of a function's tensors, and what may be done with them.

    axes: by parameter (of the k in a tuple that is called ring "ring.k"), one word per axis. Three of the words mean something: "head" (of
        the state; a channel, where there are no heads), "group" (of heads that share it) and "batch" (also: slot). `*` stands for the axes
        ahead of the heads, of which the first is the batch; `|` separates forms, of which the number of axes picks one. An axis of several
        kinds, one behind the other, has their numbers and channels: "group:2x64+head:4x32". "head/4" is of heads, four of which go together
    """

    axes: Mapping[str, str]
    written: tuple[str, ...]
    like: str = ""  # the parameter whose number of axes says how many `*` stands for; one if there is none
    inner: int = 2  # axes of that one which `*` does not stand for
    anchors: tuple[str, ...] = ("state",)  # the first that is there says what is sharded
    returns: tuple[str, ...] = ("out",)
    asked: Mapping[str, str] = {}  # of what is returned, the parameters without which it is not
    by_sequence: bool = True  # whether sequences may be on several ranks
    layers: bool = False  # whether all but CONTROL may have a layers axis in front
    tuples: Mapping[str, tuple[str, ...]] = {}  # parameters that are several tensors, and what these are called
    variant: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None  # the axes that hang on a call's other arguments

    def of(self, given: Mapping[str, Any]) -> Rule:
        """The rule of a call with these arguments."""
        return self if self.variant is None else self._replace(axes={**self.axes, **self.variant(given)})

    def axes_of(self, name: str, dims: Mapping[str, int], dim: int) -> tuple[str, ...]:
        """A word per axis of a tensor with `dim` of them, in a call whose tensors have `dims`. None where that is no form of the parameter,
        which the call itself will say."""
        layers = 1 if self.layers and dims["state"] == 5 and name not in CONTROL else 0
        lead = max(dims.get(self.like, 1 + self.inner) - self.inner, 1)  # an operand of Mamba-1 has no heads, only channels
        ahead = ("batch", *["token"] * (lead - 1))
        for form in self.axes.get(name, "").split("|"):
            words = form.split()
            found = (*ahead, *words[1:]) if words[:1] == ["*"] else tuple(words)
            if len(found) == dim - layers:
                return ("layers",) * layers + found
        return ()
