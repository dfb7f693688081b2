"""Checks shared by all calls that update a state of Mamba."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ....calls import checks

_ROUNDED = (torch.float16, torch.bfloat16, *checks.NARROW)


def check_seed(named: Mapping[str, Tensor], update_state: bool, problems: list[str]) -> None:
    """Whether a written state has a type that is rounded with noise. Adds to `problems` if not."""
    stored = [named.get("intermediate_states"), *([named["state"]] if update_state else [])]
    if "rand_seed" in named and not any(isinstance(t, Tensor) and t.dtype in _ROUNDED for t in stored):
        problems.append(
            "rand_seed is given and no written state is rounded; expected one of float16, bfloat16 or fewer bits. Leave out rand_seed."
        )
