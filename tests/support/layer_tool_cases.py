"""The layer of `tools.parallel`, on fewer heads than it measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tools import parallel


def cases(device: str) -> dict[str, Callable[[Any], None]]:
    def layer() -> Any:
        torch.manual_seed(0)
        return parallel.Layer(device, hidden=64, heads=4, headdim=64, groups=2)

    def step(mesh: Any) -> None:
        one = layer()
        parallel.checked(one, torch.randn(3, 64, device=device).bfloat16(), lambda part: part.states(3))

    def prompt(mesh: Any) -> None:
        parallel.checked(layer(), torch.randn(1, 70, 64, device=device).bfloat16())

    return {"step": step, "prompt": prompt}
