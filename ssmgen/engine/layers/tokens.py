"""Checks of decode layers for calls with several tokens per sequence, for any recurrence."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...calls import checks
from ...select.models import Role, operators_of
from ..short_conv import MAX_COLUMNS, MAX_TOKENS

# Optional operands of such calls only.
OPTIONAL = (
    "dst_state_indices", "num_accepted_tokens", "intermediate_states", "intermediate_conv_window", "intermediate_state_indices",
)  # fmt: skip


def asked_for(named: Mapping[str, Tensor], inputs: str, update_state: bool) -> bool:
    """Whether a call has several tokens: its inputs have a token axis longer than one, or it has an argument of such calls."""
    given = named[inputs]
    return (given.dim() == 3 and given.shape[1] != 1) or not update_state or any(name in named for name in OPTIONAL)


def check_axis(named: Mapping[str, Tensor], inputs: str, update_state: bool, problems: list[str]) -> bool:
    """Whether named[inputs] is [batch, tokens, channels], which a call with arguments for several tokens needs."""
    if named[inputs].dim() == 3:
        return True
    asked = [name for name in OPTIONAL if name in named]
    asked += [] if update_state else ["update_state=False"]
    wanted = "expected [batch, tokens, channels] for a call of several tokens"
    problems.append(f"{inputs} is {list(named[inputs].shape)} with {' and '.join(asked)}; {wanted}")
    return False


def check_tokens(named: Mapping[str, Tensor], inputs: str, separate: str, update_state: bool, problems: list[str]) -> bool:
    """Checks the arguments for several tokens. named[inputs] is [batch, tokens, channels]; `separate`: the recurrence's operator."""
    given = named[inputs]
    batch, T, channels = given.shape
    row = named["state"].shape[1:]
    width = named["conv_weight"].shape[-1]
    per_sequence: dict[str, tuple[int, ...]] = {"[batch]": (batch,)}
    if not 1 <= T <= MAX_TOKENS:
        chain = f"{operators_of(Role.CONVOLUTION)}, {separate} and {operators_of(Role.NORM)}"
        problems.append(
            f"{inputs} is {list(given.shape)}, {T} tokens per sequence; expected 1 … {MAX_TOKENS}. For more tokens, call {chain}."
        )
        return False
    columns = named["state_indices"].shape[-1] if "state_indices" in named and named["state_indices"].dim() else 0
    words = "heads, headdim, d_state" if inputs == "xBC" else "heads, V, K"
    allowed: dict[str, dict[str, tuple[int, ...]]] = {
        **dict.fromkeys(("num_accepted_tokens", "intermediate_state_indices"), per_sequence),
        "dst_state_indices": {"[batch, tokens]": (batch, T)},
        "intermediate_states": _kept(named, "intermediate_states", words, tuple(row)),
        "intermediate_conv_window": _kept(named, "intermediate_conv_window", "channels, width - 1", (channels, width - 1)),
    }
    if "num_accepted_tokens" in named:
        allowed["state_indices"] = {"[batch, columns], of which num_accepted_tokens picks one,": (batch, columns)}
    fits = [checks.check_shape(n, named[n], shapes, problems) for n, shapes in allowed.items() if n in named]
    if not all(fits):
        return False
    _check_forms(named, update_state, problems)
    _check_memory(named, inputs, problems)
    return True


def _kept(named: Mapping[str, Tensor], name: str, words: str, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes allowed for a buffer with an entry after each token: it may have more rows and columns than needed."""
    by_index = "intermediate_state_indices" in named
    batch, T = named["out"].shape[:2]
    have = tuple(named[name].shape[:2]) if name in named and named[name].dim() == 2 + len(sizes) else (0, 0)
    rows = have[0] if by_index or have[0] >= batch else batch
    return {f"[{'rows' if by_index else 'batch or more'}, tokens or more, {words}]": (rows, max(have[1], T), *sizes)}


def _check_forms(named: Mapping[str, Tensor], update_state: bool, problems: list[str]) -> None:
    by_slot = ("num_accepted_tokens", "dst_state_indices", "state_indices")
    if "num_accepted_tokens" in named or "dst_state_indices" in named:
        if absent := [name for name in by_slot if name not in named]:
            problems.append(
                f"{' and '.join(absent)} is missing; expected num_accepted_tokens, dst_state_indices and state_indices together"
            )
        elif named["state_indices"].dtype != named["dst_state_indices"].dtype:
            dtypes = [named[name].dtype for name in ("state_indices", "dst_state_indices")]
            problems.append(f"state_indices is {dtypes[0]} and dst_state_indices is {dtypes[1]}; expected one dtype for both")
        if not update_state:
            problems.append(
                "num_accepted_tokens and dst_state_indices are given with update_state=False, which writes no state. "
                "Leave them out, or update."
            )
    columns = named["state_indices"].shape[1] if "num_accepted_tokens" in named and "state_indices" in named else 1
    if not 1 <= columns <= MAX_COLUMNS:
        problems.append(f"state_indices is {list(named['state_indices'].shape)}; expected 1 … {MAX_COLUMNS} columns")
    if "intermediate_state_indices" in named and not {"intermediate_states", "intermediate_conv_window"} & named.keys():
        problems.append("intermediate_state_indices is given without a buffer. Pass intermediate_states or intermediate_conv_window.")


def _check_memory(named: Mapping[str, Tensor], inputs: str, problems: list[str]) -> None:
    windows, kept = named.get("intermediate_conv_window"), named.get("intermediate_states")
    if windows is not None and windows.dtype != named[inputs].dtype:
        problems.append(f"intermediate_conv_window is {windows.dtype}; expected {named[inputs].dtype}, the dtype of {inputs}")
    checks.check_distinct(named, ("intermediate_conv_window", "intermediate_states"), problems)
    if kept is not None:
        checks.check_dense("intermediate_states", kept, problems)
