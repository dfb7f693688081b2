"""mamba-ssm's scans of Mamba-3's prompts, which are timed against mamba3_chunk_scan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ...bench import report as reports
from ...bench.case import Case, Launch, keeping

OPS, ROWS = "mamba_ssm.ops", 64  # of their chunks


def mamba_ssm(case: Case) -> Launch | None:
    """mamba3_siso_combined (Triton) or mamba3_mimo (TileLang), with final states. Norms of Q and K and all activations are ready."""
    mimo = case.at.share.rank > 1
    name = "mamba3_mimo" if mimo else "mamba3_siso_combined"
    function = reports.imported(f"{OPS}.{'tilelang' if mimo else 'triton'}.mamba3.{name}", name)
    return None if function is None else keeping(function, [_ready(case, call) for call in case.calls])


def _ready(case: Case, call: Mapping[str, Any]) -> dict[str, Any]:
    model = case.at.share
    flat = call["x"].dim() == 3
    of = {name: t[None] if flat else t for name, t in call.items() if name in ("x", "z", "B", "C", "dt", "A", "trap", "angle")}
    dt, raw = softplus(of["dt"].float() + call["dt_bias"]), of["A"].float()
    rate = softplus(raw) if model.rate.value == "softplus" else raw.clamp(min=0) + 1 / (1 - raw.clamp(max=0))
    steps = {"ADT": -rate.clamp(min=1e-4) * dt, "DT": dt, "Trap": of["trap"]}

    def normed(name: str) -> Tensor:
        rows = of[name].float()
        made: Tensor = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * call[f"{name}_norm"]
        return made.to(of[name].dtype)

    given = {"Q": normed("C"), "K": normed("B"), "V": of["x"], "Z": of["z"], "D": call["D"]}
    given |= {name: t.transpose(1, 2).contiguous() for name, t in steps.items()}
    given["Angles"] = of["angle"][:, :, None].expand(*of["angle"].shape[:2], model.nheads, -1).contiguous()
    if flat:
        given["cu_seqlens"] = call["cu_seqlens"]
    if model.rank == 1:
        biases = {"Q_bias": call["C_bias"][:, 0], "K_bias": call["B_bias"][:, 0]}
        return given | biases | {"Input_States": None, "chunk_size": ROWS, "return_final_states": True}
    given |= {"Q_bias": call["C_bias"], "K_bias": call["B_bias"]}
    given |= {"MIMO_V": call["mimo_x"], "MIMO_Z": call["mimo_z"], "MIMO_Out": call["mimo_o"]}
    return given | {
        "chunk_size": ROWS // model.rank,
        "rotary_dim_divisor": model.d_state // model.angles,
        "dtype": call["x"].dtype,
        "return_state": True,
    }
