"""Accuracy of states with fewer bits: errors of outputs and states in long runs against float64, with the reference on the CPU.

One line per type and rounding, one column per decay per token; `python -m tools.few_bits --steps 10000`. Inputs are the same for all.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from ssmgen.calls.checks import NARROW
from ssmgen.engine.accuracy import norm_error
from ssmgen.engine.recurrences.mamba.reference import reference as reference

DECAYS = (0.9, 0.99, 0.999, 0.9999)  # per token, of a head each
P, N, LAST = 8, 64, 100  # rows, elements of a row, and steps at the end over which outputs are compared
ROUNDINGS = {
    "float32": (torch.float32, 0), "bfloat16": (torch.bfloat16, 0), "bfloat16, noise": (torch.bfloat16, 10), "float16": (torch.float16, 0),
    **{f"{str(t).removeprefix('torch.')}{', noise' if rounds else ''}": (t, rounds) for t in NARROW for rounds in (0, 10)},
}  # fmt: skip


def run(dtype: torch.dtype, rounds: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(outputs of the last steps [LAST, heads, P], state at the end [heads, P, N]) in float64, with a state that is stored as `dtype`."""
    g, H = torch.Generator().manual_seed(seed), len(DECAYS)
    narrow = dtype in NARROW
    state = torch.zeros(1, H, P, N, dtype=dtype)
    views = {"state": state, "out": torch.zeros(1, H, P, dtype=torch.float64)}
    if narrow:
        views["state_scale"] = torch.zeros(1, H, P)
    dt = torch.full((1, H, P), 0.05)
    views |= {"dt": dt, "A": (torch.tensor(DECAYS).double().log() / 0.05)[:, None, None].expand(H, P, N)}
    if rounds:
        views["rand_seed"] = torch.zeros(1, dtype=torch.int64)
    outputs = []
    for step in range(steps):
        views["x"] = torch.randn(1, H, P, generator=g)
        views["B"], views["C"] = (torch.randn(1, 1, N, generator=g) for _ in range(2))
        if rounds:
            views["rand_seed"] = torch.tensor([step])
        reference(**views, philox_rounds=rounds, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        if step >= steps - LAST:
            outputs.append(views["out"][0].clone())
    return torch.stack(outputs), state[0].double() * (views["state_scale"][0].double()[..., None] if narrow else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    exact = run(torch.float64, 0, steps)
    print(f"norm error after {steps} tokens, of outputs / of the state; decay per token: {', '.join(map(str, DECAYS))}")
    for name, (dtype, rounds) in ROUNDINGS.items():
        outputs, state = run(dtype, rounds, steps)
        cells = [f"{norm_error(outputs[:, h], exact[0][:, h]):.1e} / {norm_error(state[h], exact[1][h]):.1e}" for h in range(len(DECAYS))]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
