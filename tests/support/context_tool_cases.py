"""The cases of `tools.context`, on fewer tokens and heads than it measures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tools import context

SIZES = {
    "mamba2": {"heads": 4, "groups": 2},
    "mamba2-slow": {"heads": 4, "groups": 2},
    "gdn-16-64": {"keys": 1, "heads": 2},
    "gdn-4-16": {"keys": 1, "heads": 2},
    "kda-32": {"heads": 2},
    "conv": {"channels": 24},
}


def agrees(mesh: Any, name: str, device: str, tokens: int) -> None:
    torch.manual_seed(0)
    assert mesh.size() > 1
    context.checked(context.CASES[name](tokens, device, **SIZES[name]))


def an_error_above_the_bound_is_raised(mesh: Any, device: str) -> None:
    torch.manual_seed(0)
    prompt = context.kda(64, device, heads=1)
    try:
        context.checked(prompt._replace(bound=-1.0))
    except AssertionError as e:
        assert "the bound is -1.0" in str(e)
    else:
        raise AssertionError("no bound was looked at")


def cases(device: str, tokens: int = 96) -> dict[str, Callable[[Any], None]]:
    found = {name: partial(agrees, name=name, device=device, tokens=tokens) for name in context.CASES}
    return found | {"bound": partial(an_error_above_the_bound_is_raised, device=device)}
