"""Public functions on sequences that are split along their tokens over several ranks: context parallelism.

A run of tokens takes the state S to S M + N, exactly. N is the final state for zeros as the initial state, and M does not depend on S.
Every rank except the last computes N of the sequence that continues on the next rank, and M if that sequence began on an earlier rank.
All ranks exchange N and M once. Each rank combines the results of earlier ranks in order, and runs the function over its own tokens
from that state. The last inputs of a convolution are passed on in the same way; only the rule that combines them differs.

Nothing here reads device memory on the host. The device computes which sequences a rank has, from the starts of packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import planning

Arguments = Mapping[str, Any]
STATES = ("initial_states", "return_final_states", "final_states_out")


class Asked(NamedTuple):
    """The results that a rank must compute from its tokens before the exchange."""

    N: bool
    M: bool


class Ends(NamedTuple):
    """The effect of a rank's tokens on the state of the sequences that continue on the next rank. Each field is set if it was requested."""

    N: Tensor | None  # from the state that they begin with
    M: Tensor | None = None
    # (their initial state, whether final states are requested) -> final states; writes out. None: the function does that
    finish: Callable[[Tensor | None, bool], Tensor | None] | None = None


class Context(NamedTuple):
    """How the state of a function's sequences is passed from one rank's tokens to the next rank's."""

    starts: str  # the parameter that says where packed sequences start
    tokens: tuple[str, int]  # an operand with all tokens, and its token axis, counted from the last axis
    blank: Callable[[Arguments], tuple[Tensor, Tensor]]  # N and M of one sequence without tokens; N has the dtype that is exchanged
    # (function, its arguments, the initial states or None for zeros, the requested results)
    ends: Callable[[Any, dict[str, Any], Tensor | None, Asked], Ends]
    passed: Callable[[Tensor, Tensor, Tensor, Arguments], Tensor]  # (S, N, M, arguments) -> the state after their tokens
    cheap: Callable[[Arguments], bool]  # whether `ends` takes less time than the function, which also computes N
    refused: tuple[str, ...] = ()  # parameters that have no meaning here


def run(function: Callable[..., Any], rule: Context, given: dict[str, Any], group: Any) -> Any:
    """The function's result for this rank's tokens: out, or out and the final states of all sequences. All ranks get all final states.

    Raises ArgumentError before anything is launched or communicated.
    """
    out = _checked(function, rule, given)
    ranks = Ranks(function.__name__, group)
    starts = given.get(rule.starts)
    if ranks.count == 1 or (starts is not None and starts.numel() == 1):
        return function(**given)
    asked = {name: given.pop(name, None) for name in (*STATES, rule.starts)}
    initial, final_out = asked["initial_states"], asked["final_states_out"]
    returned = bool(asked["return_final_states"])
    wanted = returned or final_out is not None  # final_states_out is written, whether or not it is returned
    given["out"] = out  # every pass over the tokens may write it
    place = Rows(rule, given, ranks, initial) if starts is None else Packed(rule, given, ranks, initial, starts)
    if not place.blank[0].numel():  # no state or no sequence: there is nothing to pass on
        return function(**given, **asked | {"return_final_states": returned} | place.all)
    first, last = ranks.rank == 0, ranks.rank + 1 == ranks.count

    def whole(states: Tensor | None, final: bool) -> Tensor | None:
        """The function over all of this rank's tokens; its final states, if requested."""
        if not place.tokens:
            return (place.zeros if states is None else states) if final else None
        found = function(**given, **place.all, initial_states=states, return_final_states=final)
        return found[1] if final else None

    final, (N, M), begun = None, place.blank, Ends(place.start)
    cheap = place.tokens > 0 and rule.cheap(given | place.all)
    at_once = first and not cheap  # there is nothing to wait for, and the function computes N too
    if at_once:
        final = whole(place.initial, True)
        begun = Ends(None if final is None else place.ending(final))
    elif place.tokens and (not last or (cheap and place.goes_on)):
        begun = rule.ends(function, given | place.tail, place.start, Asked(not last, not (first or last)))
    N, M = N if begun.N is None else begun.N, M if begun.M is None else begun.M
    S = _joined(rule, given, place, ranks, N, M)
    if not at_once:
        states = place.initial if S is None else place.going_on(S)
        final = (begun.finish if place.goes_on and begun.finish else whole)(states, wanted)
    if not wanted or final is None:
        return out
    states = ranks.summed(place.own(final)).to(place.returned if final_out is None else final_out.dtype)
    states = states if final_out is None else final_out.copy_(states)
    return (out, states) if returned else out


def _checked(function: Any, rule: Context, given: Arguments) -> Tensor:
    """The tensor that the call writes its output to, given or new. Raises ArgumentError listing everything that is wrong with the call."""
    call = function.build(**given)
    refused = [
        f"{name} is given; expected None, since a pool is on one device. Use initial_states and return_final_states."
        for name in rule.refused
        if given.get(name) is not None and given[name] is not False
    ]
    views = call.caller.checked(call.operands, call.options, call.pdl, (*call.objections, *refused))
    planning.check_overlap(call.caller.family, function.__name__, views, {n: t.data_ptr() for n, t in call.operands.items()})
    out: Tensor = call.operands["out"]
    return out


def _joined(rule: Context, given: Arguments, place: Place, ranks: Ranks, N: Tensor, M: Tensor) -> Tensor | None:
    """The initial state on this rank of each sequence that crosses the rank's first edge; None for the first rank."""
    parts = [N, M] if ranks.count > 2 else [N]  # with two ranks M is not used
    received = ranks.gathered(torch.cat([t.to(N.dtype).flatten() for t in parts]))
    S = None
    for rank in range(ranks.rank):
        own = received[rank, : N.numel()].view(N.shape)
        if S is None:
            S = own.double() if own.dtype is torch.float32 else own
        else:
            later = rule.passed(S, own, received[rank, N.numel() :].view(M.shape), given)
            S = later if place.begun is None else torch.where(place.begun[rank], own, later)
    return None if S is None else S.to(N.dtype)


class Place:
    """A rank's share of a call's sequences."""

    goes_on: bool = False  # whether every token here belongs to such a sequence
    begun: Tensor | None = None  # [ranks - 1], whether the sequence that continues after a rank began there; None: on the first rank
    start: Tensor | None  # the initial states of those sequences on this rank, as far as known; None for zeros

    def __init__(self, rule: Context, given: Arguments, ranks: Ranks, initial: Tensor | None, sequences: int, crossing: int):
        """crossing: the number of sequences that may continue on the next rank."""
        name, axis = rule.tokens
        self.tokens: int = given[name].shape[axis]
        self.rank, self.last = ranks.rank, ranks.rank + 1 == ranks.count
        N, M = rule.blank(given)
        self.blank = N.expand(crossing, *N.shape[1:]), M.expand(crossing, *M.shape[1:])
        self.zeros = N.expand(sequences, *N.shape[1:])
        self.returned = N.dtype if initial is None else initial.dtype
        self.initial = None if initial is None else initial.to(N.dtype)
        self.all: dict[str, Any] = {}  # arguments of a call over all tokens
        self.tail: dict[str, Any] = {}  # arguments of a call over the tokens of sequences that continue on the next rank


class Rows(Place):
    """A batch: each rank has some tokens of every sequence."""

    def __init__(self, rule: Context, given: Arguments, ranks: Ranks, initial: Tensor | None):
        count = given[rule.tokens[0]].shape[0]
        super().__init__(rule, given, ranks, initial, count, count)
        self.start, self.goes_on = None if self.rank else self.initial, True

    def ending(self, final: Tensor) -> Tensor:
        """The final states of the sequences that continue, taken from all final states."""
        return final

    def going_on(self, S: Tensor) -> Tensor:
        """The initial states of all sequences on this rank. S: initial states of the sequences that continue here."""
        return S

    def own(self, final: Tensor) -> Tensor:
        """The final states; zeros for sequences that end on another rank."""
        return final if self.last else torch.zeros_like(final)


class Packed(Place):
    """Packed sequences, split at any token: at most one sequence continues from a rank to the next."""

    def __init__(self, rule: Context, given: Arguments, ranks: Ranks, initial: Tensor | None, starts: Tensor):
        super().__init__(rule, given, ranks, initial, starts.numel() - 1, 1)
        each = torch.full((1,), self.tokens, dtype=torch.int64, device=starts.device)
        ends = ranks.gathered(each)[:, 0].cumsum(0)  # of the ranks' tokens
        begin, self.edges, whole = ends[self.rank] - self.tokens, ends[:-1], starts.long()
        self.all = {rule.starts: (whole - begin).clamp(0, self.tokens).to(starts.dtype)}
        self.crossing = (torch.searchsorted(whole, self.edges) - 1).clamp(0, len(whole) - 2)  # the sequence that may cross each edge
        first, self.crosses = whole[self.crossing], (whole[self.crossing] < self.edges) & (whole[self.crossing + 1] > self.edges)
        self.begun = first >= torch.cat([ends.new_zeros(1), ends[:-2]])
        there = (whole[1:] > whole[:-1]) & (whole[1:] <= ends[-1])
        self.owned = there & (whole[1:] > begin) & (whole[1:] <= ends[self.rank])
        if self.rank == 0:
            self.owned = self.owned | ~there  # the first rank returns the initial states of sequences without tokens
        self.start = None
        if not self.last:
            own = slice(self.rank, self.rank + 1)
            cut = torch.where(self.crosses[own], first[own] - begin, self.tokens).clamp(min=0)
            self.tail = {rule.starts: torch.cat([cut, each]).to(starts.dtype)}
            if self.initial is not None:
                begins_in = self.initial[self.crossing[own]]
                self.start = torch.where(_beside(self.begun[own], begins_in), begins_in, 0)

    def ending(self, final: Tensor) -> Tensor:
        return final[self.crossing[:1]]  # the first rank's

    def going_on(self, S: Tensor) -> Tensor:
        edge = slice(self.rank - 1, self.rank)
        states = self.zeros if self.initial is None else self.initial
        begins_in = torch.where(_beside(self.crosses[edge], S), S, states[self.crossing[edge]])
        return states.index_copy(0, self.crossing[edge], begins_in)

    def own(self, final: Tensor) -> Tensor:
        return torch.where(_beside(self.owned, final), final, 0)


def _beside(flags: Tensor, states: Tensor) -> Tensor:
    """One flag per sequence, broadcast over its state."""
    return flags.view(-1, *[1] * (states.dim() - 1))


class Ranks:
    """The processes of a group, in the order of their tokens."""

    def __init__(self, function: str, group: Any):
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            why = "there is no process group; expected one. Call torch.distributed.init_process_group on every process first."
            raise ArgumentError(f"distributed.{function}", [why])
        self.group, self.rank, self.count = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ArgumentError(
                f"distributed.{function}",
                ["this process is not a rank of the group; expected a rank. Call it on the ranks of the group only."],
            )
        self.on_host = dist.get_backend(group) == "gloo"  # gloo lacks some collectives for devices

    def gathered(self, t: Tensor) -> Tensor:
        """[ranks, …]: the tensor of each rank."""
        import torch.distributed as dist

        own = (t.cpu() if self.on_host else t).contiguous()
        found = own.new_empty((self.count, *own.shape))
        # The first name is the newer one of the same function.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(found.flatten(0, 1), own, group=self.group)
        return found.to(t.device)

    def summed(self, t: Tensor) -> Tensor:
        """The sum over the ranks. It is exact where all ranks except one have zeros."""
        import torch.distributed as dist

        own = (t.cpu() if self.on_host else t).contiguous()
        own = own.float() if own.element_size() == 2 else own.clone() if own is t else own
        dist.all_reduce(own, group=self.group)
        return own.to(t)
