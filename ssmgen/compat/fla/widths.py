"""Rows of any width: fla.ops' functions for prompts take every K and V, kernels only multiples of 16."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .arguments import Result

STEP, WIDEST = 16, 256


def any_width(run: Callable[..., Result]) -> Callable[..., Result]:
    """A call of a prompt's function whose rows may have any K and V up to 256. Rows of a width without a kernel are copied and padded with
    zeros, which are cut from the results. A zero of q, k or v adds nothing to a product, to a norm or to a state, under any gate.

    values: places of operands whose rows are of V; others of four axes are of K. Operands that do not fit stay, for checks to name.
    """

    @wraps(run)
    def call(
        function: Callable[..., Any], operands: tuple[Tensor | None, ...], initial_state: Tensor | None, output_final_state: bool,
        state_v_first: bool, cu_seqlens: Tensor | None, *, values: tuple[int, ...] = (2,), **options: Any,
    ) -> Result:  # fmt: skip
        q, _, v, *_ = operands
        assert q is not None and v is not None  # looked at before
        K, V = q.shape[-1], v.shape[-1]
        k_zeros, v_zeros = -K % STEP, -V % STEP
        if not (k_zeros or v_zeros) or max(K, V) > WIDEST:
            return run(function, operands, initial_state, output_final_state, state_v_first, cu_seqlens, **options)
        rows = {i: t for i, t in enumerate(operands) if t is not None and t.dim() == 4}
        last = (V, K) if state_v_first else (K, V)
        bias = options.get("dt_bias") if 3 in rows else None  # of a gate per key, [HV * K] or [HV, K]
        fits = all(t.layout is torch.strided for t in (*operands, initial_state, bias) if isinstance(t, Tensor))
        fits &= all(t.shape[-1] == (V if i in values else K) for i, t in rows.items())
        fits &= initial_state is None or initial_state.shape[-2:] == last
        fits &= bias is None or (isinstance(bias, Tensor) and bias.numel() == v.shape[-2] * K)
        if not fits:
            return run(function, operands, initial_state, output_final_state, state_v_first, cu_seqlens, **options)
        wide = [pad(rows[i], (0, v_zeros if i in values else k_zeros)) if i in rows else t for i, t in enumerate(operands)]
        if bias is not None:
            options["dt_bias"] = pad(bias.reshape(-1, K), (0, k_zeros))
        if options.get("scale") is None:
            options["scale"] = K**-0.5
        if initial_state is not None:
            down, across = (v_zeros, k_zeros) if state_v_first else (k_zeros, v_zeros)
            initial_state = pad(initial_state, (0, across, 0, down))
        o, final = run(function, tuple(wide), initial_state, output_final_state, state_v_first, cu_seqlens, **options)
        return o[..., :V].contiguous(), None if final is None else final[..., : last[0], : last[1]].contiguous()

    return call
