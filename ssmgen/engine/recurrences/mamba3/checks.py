"""Checks of operands that steps and prompts of Mamba-3 share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

# Operands that go together, or have one type.
_TOGETHER = (("B_norm", "C_norm"), ("B_bias", "C_bias"))
_ALIKE = (("B", "C"), ("B_norm", "C_norm"), ("B_bias", "C_bias"), ("mimo_x", "mimo_z"), ("mimo_x", "mimo_o"))


def by_rank(named: Mapping[str, Tensor]) -> bool:
    """Whether there is one output for each rank."""
    return "mimo_x" in named and "mimo_o" not in named


def check_pairs(named: Mapping[str, Tensor], pairs: tuple[tuple[str, str], ...], problems: list[str]) -> None:
    """Reports each operand that is given without its partner."""
    for one, other in pairs:
        if (one in named) != (other in named):
            given, missing = (one, other) if one in named else (other, one)
            problems.append(f"{given} is given without {missing}; expected both or neither")


def check_company(named: Mapping[str, Tensor], problems: list[str], pairs: tuple[tuple[str, str], ...] = ()) -> None:
    """Checks operands that need others, or have their type. pairs: further operands that go together."""
    check_pairs(named, (*pairs, *_TOGETHER), problems)
    for one, other in _ALIKE:
        if one in named and other in named and named[one].dtype != named[other].dtype:
            problems.append(f"{other} is {named[other].dtype}; expected {named[one].dtype}, the dtype of {one}".replace("torch.", ""))
    problems += [
        f"{name} is given without mimo_x; expected mimo_x too" for name in ("mimo_z", "mimo_o") if name in named and "mimo_x" not in named
    ]
    if "mimo_x" in named and ("mimo_z" in named) != ("z" in named):
        problems.append(
            "mimo_z is given without z; expected both"
            if "mimo_z" in named
            else "z is given without mimo_z; expected its factors for each rank"
        )
