"""SGLang's option --enable-mamba-cache-stochastic-rounding on GPUs where its Triton kernel lacks it, as in SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..shared import noise
from ..shared.replacing import Engine, Replacement

STEP = "sglang.kernels.ops.mamba.triton_ops.mamba_ssm.selective_state_update"
impossible = noise.impossible
REFUSAL = "requires SM100"


def replacements(engine: Callable[[], Engine]) -> list[Replacement]:
    """engine: the one that they become a part of."""

    def handle_mamba_backend(original: Callable[..., None], server_args: Any) -> None:
        """Accepts stochastic rounding with the Triton backend on every GPU if ssmgen serves the decode steps."""
        noise.permitted(engine(), STEP, REFUSAL, lambda: original(server_args))

    return [Replacement("sglang.srt.arg_groups.mamba_hook", "handle_mamba_backend", handle_mamba_backend, around=True)]
