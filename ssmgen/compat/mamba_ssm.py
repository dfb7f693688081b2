"""mamba_ssm.ops.triton.selective_state_update's function."""

from __future__ import annotations

from torch import Tensor

from ..families.selective_state_update.call import selective_state_update as _native


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """As in mamba-ssm 2.3: state [slots, dim, N] or [slots, H, P, N] in place; returns a new tensor like x.

    A row whose index is negative gets a zero output. Unlike there, D and dt_bias may be None, and softplus is accurate for very
    negative arguments. Raises ssmgen.errors.ArgumentError.
    """
    return _native(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_indices=state_batch_indices)
