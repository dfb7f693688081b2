"""The calls of mamba3_state_update for the tests that run on every family."""

from __future__ import annotations

from typing import Any

import torch

BATCH, SLOTS, H, P, N, G, R, ANGLES = 4, 6, 4, 16, 32, 2, 2, 8


def call(device: str = "cpu") -> dict[str, Any]:
    """Arguments by name of a small MIMO call: the last row is padding."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    states = {
        "state": rand(SLOTS, H, P, N),
        "k_state": rand(SLOTS, R, H, N),
        "v_state": rand(SLOTS, H, P),
        "angle_state": rand(SLOTS, H, ANGLES),
    }
    tokens = {name: rand(BATCH, H, P) for name in ("x", "z", "out")} | {name: rand(BATCH, R, G, N) for name in ("B", "C")}
    tokens |= {name: rand(BATCH, H) for name in ("dt", "A", "trap")} | {"angle": rand(BATCH, ANGLES)}
    weights = {name: rand(H) for name in ("D", "dt_bias")} | {name: rand(N) for name in ("B_norm", "C_norm")}
    weights |= {name: rand(H, R, N) for name in ("B_bias", "C_bias")} | {name: rand(H, R, P) for name in ("mimo_x", "mimo_z", "mimo_o")}
    slots = torch.tensor([3, 0, 5, -1], dtype=torch.int32, device=device)
    return states | tokens | weights | {"state_indices": slots, "A_form": "heavy", "rotary": "halves"}


def layer(device: str = "cpu") -> dict[str, Any]:
    """The same call, of a layer."""
    given = call(device)
    parts = [given.pop(name).flatten(1) for name in ("z", "x", "B", "C", "dt", "A", "trap", "angle")]
    return given | {"projected": torch.cat(parts, 1), "out": given["out"].flatten(1)}


CALLS = {"mamba3_state_update": call, "mamba3_layer": layer}  # of each public function
BENCH = {"mamba3_state_update": {"names": ("mamba3-siso-187m", "mamba3-mimo-187m"), "batches": (1,)}}  # options of a benchmark's `run`
