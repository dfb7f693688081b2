"""The arguments of stochastic rounding, for all calls that store states: `rand_seed` and `philox_rounds`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..calls import checks

_ROUNDED = (torch.float16, torch.bfloat16, *checks.NARROW)


def seeded(rand_seed: Tensor | None, philox_rounds: int) -> tuple[Tensor | None, int]:
    """(seed, rounds): both absent if either is."""
    return (None, 0) if rand_seed is None or philox_rounds == 0 else (rand_seed, philox_rounds)


def check_seed(named: Mapping[str, Tensor], update_state: bool, problems: list[str]) -> None:
    """Whether a written state has a type that is rounded with noise. Adds to `problems` if not."""
    stored = [named.get("intermediate_states"), *([named["state"]] if update_state else [])]
    if "rand_seed" in named and not any(isinstance(t, Tensor) and t.dtype in _ROUNDED for t in stored):
        problems.append(
            "rand_seed is given and no written state is rounded; expected one of float16, bfloat16 or fewer bits. Leave out rand_seed."
        )
