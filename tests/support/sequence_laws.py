"""Laws of all functions over sequences, packed or in a batch, with states: on a card or in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from bits import error, same
from ssu_cases import F32, Memory
from torch import Tensor

NAN = float("nan")
Run = Callable[..., Any]  # the function of a case, as users call it


class Sequences:
    """A function and the sizes of its calls, as these laws need them."""

    x: torch.dtype
    device: str
    per_token: tuple[str, ...]  # operands with a token's numbers; tokens are their first axis, after a batch
    rows = "v"  # the operand whose shape is out's
    room = (65, 7, 0, 16, 64)  # tokens of sequences that share a pool: with and without slots, and none

    @property
    def state(self) -> tuple[int, ...]:
        raise NotImplementedError

    def made(self, *lead: int, slow: bool = False) -> dict[str, Any]:
        """A call on random operands. slow: old tokens still count at the end."""
        raise NotImplementedError

    def exact(self, call: Mapping[str, Any], **more: Any) -> dict[str, Tensor]:
        """The tensors that the call must write, in float64, token by token."""
        raise NotImplementedError

    def step(self, state: Tensor, call: dict[str, Any]) -> Tensor:
        """The output of one token's decode step, which updates the state."""
        raise NotImplementedError

    def of(self, run: Run) -> Run:
        """`run`, which takes keywords only."""
        return run

    def bound(self) -> float:
        """Relative L2 error of outputs."""
        raise NotImplementedError

    def state_bound(self, dtype: torch.dtype) -> float:
        return self.bound()

    def step_bound(self) -> float:
        return self.bound()

    def states(self, count: int, dtype: torch.dtype = F32, seed: int = 1) -> Tensor:
        return torch.randn(count, *self.state, generator=torch.Generator().manual_seed(seed)).to(self.device, dtype)

    def cut(self, call: Mapping[str, Any], *at: Any) -> dict[str, Any]:
        """The call with this index into the operands per token."""
        return {n: t[at] if n in self.per_token and t is not None else t for n, t in call.items()}


def starts_of(lengths: Sequence[int], device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)


def packing_changes_no_bit(run: Run, case: Sequences, lengths: Sequence[int]) -> None:
    call, run = case.made(sum(lengths)), case.of(run)
    starts = starts_of(lengths, case.device)
    packed, last = run(**call, cu_seqlens=starts, return_final_states=True)
    for i, length in enumerate(lengths):
        span = slice(int(starts[i]), int(starts[i + 1]))
        if length:
            out, own = run(**case.cut(case.cut(call, span), None), return_final_states=True)
            assert same(out[0], packed[span]) and same(own[0], last[i]), length
        else:
            assert not last[i].any()


def a_cut_changes_no_bit(run: Run, case: Sequences, tokens: int, at: int) -> None:
    """at: a multiple of a chunk's tokens."""
    call, run = case.made(1, tokens, slow=True), case.of(run)
    whole, last = run(**call, return_final_states=True)
    first, state = run(**case.cut(call, slice(None), slice(0, at)), return_final_states=True)
    rest = case.cut(call, slice(None), slice(at, None))
    second, end = run(**rest, initial_states=state, return_final_states=True, final_states_out=state)
    assert same(torch.cat([first, second], 1), whole) and same(end, last) and end is state


def a_pool_is_touched_where_it_should_be(run: Run, case: Sequences, state: torch.dtype, layout: str = "vk") -> None:
    """NaN fills unused slots, slots of empty sequences, slots of sequences that start from zeros, and tokens outside every sequence."""
    lengths, slots, started = case.room, (3, 20, 7, 0, -1), (True, True, True, False, True)
    memory, tokens, run = Memory(case.device), sum(lengths) + 9, case.of(run)
    call = case.made(tokens)
    for name in set(case.per_token) & set(call):
        call[name][-9:] = NAN
        call[name] = memory.fill(name, call[name])
    shape = (*case.state[:-2], *reversed(case.state[-2:])) if layout == "kv" else case.state
    pool = memory.fill("state", torch.full((9, *shape), NAN, dtype=state, device=case.device))
    pool[3] = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(case.device, state)
    out = memory.fill("out", torch.full_like(call[case.rows], NAN))
    call |= {"cu_seqlens": starts_of(lengths, case.device, torch.int64), "state": pool, "out": out}
    call |= {"state_layout": layout} if layout != "vk" else {}
    call |= {"state_indices": torch.tensor(slots).int().to(case.device), "has_initial_state": torch.tensor(started).to(case.device)}
    wanted = case.exact(call)
    memory.seal()
    run(**call)
    assert not memory.untouched({"state": torch.tensor([3, 0], device=case.device), "out": torch.arange(tokens - 9, device=case.device)})
    starts = starts_of(lengths, "cpu").tolist()
    for i, slot in ((0, 3), (3, 0)):
        span = slice(starts[i], starts[i + 1])
        assert error(out[span], wanted["out"][0, span]) <= case.bound()
        assert error(pool[slot], wanted["state"][slot]) <= case.state_bound(state)
    assert not out[starts[1] : starts[2]].any() and not out[starts[4] : starts[5]].any()


def neighbours_do_not_matter(run: Run, case: Sequences, lengths: Sequence[int]) -> None:
    """NaN in all other sequences, and in tokens outside every sequence, changes no bit of a sequence or of its state."""
    call, run = case.made(sum(lengths) + 9), case.of(run)
    starts = starts_of((4, *lengths), case.device)[1:]
    plain, last = run(**call, cu_seqlens=starts, return_final_states=True)
    for i, length in enumerate(lengths):
        span = slice(int(starts[i]), int(starts[i]) + length)
        poisoned = {n: torch.full_like(t, NAN) for n, t in call.items() if n in case.per_token}
        for name, t in poisoned.items():
            t[span] = call[name][span]
        out, own = run(**call | poisoned, cu_seqlens=starts, return_final_states=True)
        assert same(out[span], plain[span]) and same(own[i], last[i]), length


def states_of_a_pool_may_begin_elsewhere(run: Run, case: Sequences, state: torch.dtype, index: torch.dtype | None) -> None:
    """Dense states into a pool give the bits of a call without a pool. A sequence without a slot or without tokens changes no slot."""
    lengths, run = (65, 7, 0, 16), case.of(run)
    memory, call = Memory(case.device), case.made(sum(lengths), slow=True)
    call |= {"cu_seqlens": starts_of(lengths, case.device), "initial_states": case.states(len(lengths), state)}
    wanted, last = run(**call, return_final_states=True)
    slots = [0, 1, 2, 3] if index is None else [4, 9, 1, 0]
    pool = memory.fill("state", torch.full((9, *case.state), NAN, dtype=state, device=case.device))
    given = {} if index is None else {"state_indices": torch.tensor(slots, dtype=index, device=case.device)}
    memory.seal()
    out = run(**call, state=pool, **given)
    served = [i for i in range(4) if lengths[i] and slots[i] < 9]
    assert not memory.untouched({"state": torch.tensor([slots[i] for i in served], device=case.device)})
    assert all(same(pool[slots[i]], last[i]) for i in served)
    if index is not None:
        assert not out[65:72].any()
        wanted[65:72] = 0
    assert same(out, wanted)


def decoding_goes_on(run: Run, case: Sequences, tokens: int) -> None:
    """The state that a prompt leaves is the one that the next step reads."""
    call = case.made(2, tokens + 1)
    wanted = case.exact(call, return_final_states=True)
    _, state = case.of(run)(**case.cut(call, slice(None), slice(0, -1)), return_final_states=True)
    out = case.step(state, case.cut(call, slice(None), -1))
    assert error(out, wanted["out"][:, -1]) <= case.step_bound() and error(state, wanted["final_states"]) <= case.state_bound(F32)


def sequences_without_tokens_keep_states(run: Run, case: Sequences, state: torch.dtype) -> None:
    """Dense states pass through; states in a pool stay unchanged."""
    call, before, run = case.made(0), case.states(2, state), case.of(run)
    starts = torch.zeros(3, dtype=torch.int32)
    _, after = run(**call, cu_seqlens=starts, initial_states=before, return_final_states=True)
    pool = before.clone()
    run(**call, cu_seqlens=starts, state=pool, has_initial_state=torch.tensor([True, False]))
    assert same(after, before) and same(pool, before)


def boundaries_that_make_no_sense_are_sequences_without_tokens(run: Run, case: Sequences) -> None:
    call, run = case.made(20), case.of(run)
    out = torch.full_like(call[case.rows], -7.0)
    run(**call, cu_seqlens=torch.tensor([5, 3, 21, -4, 2]), out=out)
    assert (out == -7.0).all()
    assert not run(**call, cu_seqlens=torch.tensor([3]), return_final_states=True)[1].numel(), "no sequences at all"
