"""Context parallel causal_conv1d: a rank passes the last inputs to the next one. M is the number of new inputs among them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...calls.context import Arguments, Asked, Context, Ends
from ...engine.window import reach_of


def _kept(given: Arguments) -> int:
    """Inputs before a sequence that its first token reads."""
    return reach_of(given["weight"].shape[1], given.get("dilation", 1)) - 1


def blank(given: Arguments) -> tuple[Tensor, Tensor]:
    x = given["x"]
    return x.new_zeros((1, x.shape[-2], _kept(given))), x.new_zeros((1, 1))


def ends(function: Any, given: dict[str, Any], start: Tensor | None, asked: Asked) -> Ends:
    if not asked.N:
        return Ends(None)
    x, kept = given["x"], _kept(given)
    if (gate := given.get("input_gate")) is not None:
        x = x * gate  # states hold products
    x = x if x.dim() == 3 else x.unsqueeze(0)
    start = x.new_zeros((len(x), x.shape[1], kept)) if start is None else start
    tokens = x.shape[-1]
    count = torch.full((1,), tokens, device=x.device)
    if given.get("query_start_loc") is not None:
        count = count - given["query_start_loc"][:1]
    new = count.clamp(max=kept).to(x.dtype).expand(len(x), 1)
    latest = torch.nn.functional.pad(x[..., max(tokens - kept, 0) :], (max(kept - tokens, 0), 0))
    return Ends(passed(start, latest, new, given), new)


def passed(S: Tensor, N: Tensor, M: Tensor, given: Arguments) -> Tensor:
    kept, new = S.shape[-1], M.long()[:, :, None]
    places = torch.arange(kept, device=S.device).view(1, 1, kept).expand(S.shape)
    return torch.where(places >= kept - new, N, S.gather(2, (places + new).clamp(max=max(kept - 1, 0))))


RULES = {
    "causal_conv1d": Context(
        "query_start_loc",
        ("x", -1),
        blank,
        ends,
        passed,
        lambda given: True,
        ("seq_idx", "conv_states", "conv_state_indices", "has_initial_state"),
    )
}
