"""The calls of mamba3_chunk_scan for the tests that run on every family."""

from __future__ import annotations

from typing import Any

import torch

BATCH, TOKENS, H, P, N, G, R, ANGLES = 4, 5, 4, 16, 32, 2, 2, 8


def call(device: str = "cpu") -> dict[str, Any]:
    """Arguments by name of a small MIMO call: it starts from separate states and ends in pools."""

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    shapes = ((H, P, N), (R, H, N), (H, P), (H, ANGLES))
    names = (("initial_states", "initial_k", "initial_v", "initial_angles"), ("state", "k_state", "v_state", "angle_state"))
    states = {name: rand(BATCH, *shape) for group in names for name, shape in zip(group, shapes, strict=True)}
    lead, bf16 = (BATCH, TOKENS), torch.bfloat16
    tokens = {name: rand(*lead, H, P, dtype=bf16) for name in ("x", "z", "out")} | {
        name: rand(*lead, R, G, N, dtype=bf16) for name in ("B", "C")
    }
    tokens |= {name: rand(*lead, H) for name in ("dt", "A", "trap")} | {"angle": rand(*lead, ANGLES)}
    weights = {name: rand(H) for name in ("D", "dt_bias")} | {name: rand(N) for name in ("B_norm", "C_norm")}
    weights |= {name: rand(H, R, N) for name in ("B_bias", "C_bias")} | {name: rand(H, R, P) for name in ("mimo_x", "mimo_z", "mimo_o")}
    return tokens | weights | states | {"A_form": "heavy", "rotary": "halves"}


CALLS = {"mamba3_chunk_scan": call}  # of each public function
BENCH = {  # options of a benchmark's `run`: two cases or more
    "mamba3_chunk_scan": {"names": ("mamba3-siso-187m", "mamba3-mimo-187m"), "shapes": ((1, 20),)}
}
