"""Public functions on sequences whose tokens lie on several ranks, one rank's behind the other's.

Over some tokens of a sequence its state goes from S to S M + N, exactly: N is what they make of zeros, and M does not hang on S. Each rank
but the last one makes N of the sequence that goes on behind its tokens, and M if that sequence began before them. These are exchanged,
once; each rank joins those before it, in their order, and runs the function over its own tokens from there. A convolution's last inputs go
on the same way, but for how they are joined.

Nothing here reads a device's memory: which sequences a rank has part of is worked out on the device, from where packed sequences start.
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
    """What is asked of a rank's tokens ahead of the exchange."""

    N: bool
    M: bool


class Ends(NamedTuple):
    """What a rank's tokens do to the state of the sequences that go on behind them, where that was asked for."""

    N: Tensor | None  # from what they begin in
    M: Tensor | None = None
    # (the state that they begin in, whether final ones are asked for) -> those; writes out. None: the function does that
    finish: Callable[[Tensor | None, bool], Tensor | None] | None = None


class Context(NamedTuple):
    """How the sequences of a function go on from one rank's tokens to the next one's."""

    starts: str  # the parameter that says where packed sequences start
    tokens: tuple[str, int]  # an operand of every token, and which of its axes, counted from the last, these are
    blank: Callable[[Arguments], tuple[Tensor, Tensor]]  # N and M of one sequence over no tokens, N of the dtype that is exchanged
    # (function, its arguments, what the sequences begin in or None for zeros, what is asked for)
    ends: Callable[[Any, dict[str, Any], Tensor | None, Asked], Ends]
    passed: Callable[[Tensor, Tensor, Tensor, Arguments], Tensor]  # (S, N, M, arguments) -> the state behind their tokens
    cheap: Callable[[Arguments], bool]  # whether `ends` takes less time than the function, which makes N too
    refused: tuple[str, ...] = ()  # parameters that have no meaning here


def run(function: Callable[..., Any], rule: Context, given: dict[str, Any], group: Any) -> Any:
    """What the function returns, of this rank's tokens: out, or out and the final states of all sequences, which all ranks get.

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
    wanted = returned or final_out is not None  # which is written, returned or not
    given["out"] = out  # which every pass over tokens may write
    place = Rows(rule, given, ranks, initial) if starts is None else Packed(rule, given, ranks, initial, starts)
    if not place.blank[0].numel():  # no state, or no sequence: nothing goes on
        return function(**given, **asked | {"return_final_states": returned} | place.all)
    first, last = ranks.rank == 0, ranks.rank + 1 == ranks.count

    def whole(states: Tensor | None, final: bool) -> Tensor | None:
        """The function over all of this rank's tokens; its final states, if asked for."""
        if not place.tokens:
            return (place.zeros if states is None else states) if final else None
        found = function(**given, **place.all, initial_states=states, return_final_states=final)
        return found[1] if final else None

    final, (N, M), begun = None, place.blank, Ends(place.start)
    cheap = place.tokens > 0 and rule.cheap(given | place.all)
    at_once = first and not cheap  # nothing is waited for, and N is among what the function makes
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
    """What the call writes its output to, given or new. Raises ArgumentError listing all that is wrong with it."""
    call = function.build(**given)
    refused = [
        f"{name} is given, which belongs to one device: states go in by initial_states, and come out by return_final_states"
        for name in rule.refused
        if given.get(name) is not None and given[name] is not False
    ]
    views = call.caller.checked(call.operands, call.options, call.pdl, (*call.objections, *refused))
    planning.check_overlap(call.caller.family, function.__name__, views, {n: t.data_ptr() for n, t in call.operands.items()})
    out: Tensor = call.operands["out"]
    return out


def _joined(rule: Context, given: Arguments, place: Place, ranks: Ranks, N: Tensor, M: Tensor) -> Tensor | None:
    """The state that the tokens of this rank begin in, of each sequence that crosses its first edge; None for the first rank."""
    parts = [N, M] if ranks.count > 2 else [N]  # of two ranks, nobody asks for M
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
    """What a rank has of a call's sequences."""

    goes_on: bool = False  # whether all tokens are of those sequences
    begun: Tensor | None = None  # [ranks - 1], whether the sequence that goes on behind a rank began on it; None: the first rank's did
    start: Tensor | None  # what those sequences begin in here, as far as it is known; None for zeros

    def __init__(self, rule: Context, given: Arguments, ranks: Ranks, initial: Tensor | None, sequences: int, crossing: int):
        """crossing: sequences that may go on on the next rank."""
        name, axis = rule.tokens
        self.tokens: int = given[name].shape[axis]
        self.rank, self.last = ranks.rank, ranks.rank + 1 == ranks.count
        N, M = rule.blank(given)
        self.blank = N.expand(crossing, *N.shape[1:]), M.expand(crossing, *M.shape[1:])
        self.zeros = N.expand(sequences, *N.shape[1:])
        self.returned = N.dtype if initial is None else initial.dtype
        self.initial = None if initial is None else initial.to(N.dtype)
        self.all: dict[str, Any] = {}  # arguments of a call over all tokens
        self.tail: dict[str, Any] = {}  # and over those of sequences that go on on the next rank


class Rows(Place):
    """A batch: each rank has some tokens of every sequence."""

    def __init__(self, rule: Context, given: Arguments, ranks: Ranks, initial: Tensor | None):
        count = given[rule.tokens[0]].shape[0]
        super().__init__(rule, given, ranks, initial, count, count)
        self.start, self.goes_on = None if self.rank else self.initial, True

    def ending(self, final: Tensor) -> Tensor:
        """Final states of the sequences that go on, of those of all."""
        return final

    def going_on(self, S: Tensor) -> Tensor:
        """What all sequences begin in here; S: those that go on."""
        return S

    def own(self, final: Tensor) -> Tensor:
        """Final states, in whose place sequences that end elsewhere have zeros."""
        return final if self.last else torch.zeros_like(final)


class Packed(Place):
    """Packed sequences, cut anywhere: one at most goes on from a rank to the next."""

    def __init__(self, rule: Context, given: Arguments, ranks: Ranks, initial: Tensor | None, starts: Tensor):
        super().__init__(rule, given, ranks, initial, starts.numel() - 1, 1)
        each = torch.full((1,), self.tokens, dtype=torch.int64, device=starts.device)
        ends = ranks.gathered(each)[:, 0].cumsum(0)  # of the ranks' tokens
        begin, self.edges, whole = ends[self.rank] - self.tokens, ends[:-1], starts.long()
        self.all = {rule.starts: (whole - begin).clamp(0, self.tokens).to(starts.dtype)}
        self.crossing = (torch.searchsorted(whole, self.edges) - 1).clamp(0, len(whole) - 2)  # which sequence may cross an edge
        first, self.crosses = whole[self.crossing], (whole[self.crossing] < self.edges) & (whole[self.crossing + 1] > self.edges)
        self.begun = first >= torch.cat([ends.new_zeros(1), ends[:-2]])
        there = (whole[1:] > whole[:-1]) & (whole[1:] <= ends[-1])
        self.owned = there & (whole[1:] > begin) & (whole[1:] <= ends[self.rank])
        if self.rank == 0:
            self.owned = self.owned | ~there  # of sequences without tokens the first rank has what they begin in
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
    """One flag per sequence, for all of its state."""
    return flags.view(-1, *[1] * (states.dim() - 1))


class Ranks:
    """The processes of a group, in the order in which they have tokens."""

    def __init__(self, function: str, group: Any):
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            why = "there is no process group: call torch.distributed.init_process_group on every process first"
            raise ArgumentError(f"distributed.{function}", [why])
        self.group, self.rank, self.count = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ArgumentError(f"distributed.{function}", ["this process is no rank of the group: do not call it here"])
        self.on_host = dist.get_backend(group) == "gloo"  # which has no collectives of every kind for devices

    def gathered(self, t: Tensor) -> Tensor:
        """[ranks, …], what each has."""
        import torch.distributed as dist

        own = (t.cpu() if self.on_host else t).contiguous()
        found = own.new_empty((self.count, *own.shape))
        # The first name is the newer one, of the same.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(found.flatten(0, 1), own, group=self.group)
        return found.to(t.device)

    def summed(self, t: Tensor) -> Tensor:
        """The sum of what all have: of any number, which all but one have zero for, that number."""
        import torch.distributed as dist

        own = (t.cpu() if self.on_host else t).contiguous()
        own = own.float() if own.element_size() == 2 else own.clone() if own is t else own
        dist.all_reduce(own, group=self.group)
        return own.to(t)
