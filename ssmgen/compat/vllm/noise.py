"""vLLM's option --enable-mamba-cache-stochastic-rounding on GPUs where its Triton kernel lacks it, as in vLLM 0.33."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..shared import noise
from ..shared.replacing import Engine, Replacement

STEP = "vllm.model_executor.layers.mamba.ops.mamba_ssm.selective_state_update"
impossible = noise.impossible
REFUSAL = "requires compute capability 10.0"


def replacements(engine: Callable[[], Engine]) -> list[Replacement]:
    """engine: the one that they become a part of."""

    def post_init(original: Callable[..., None], self: Any) -> None:
        """MambaConfig.__post_init__: accepts stochastic rounding with the Triton backend on every GPU if ssmgen serves the decode steps."""
        noise.permitted(engine(), STEP, REFUSAL, lambda: original(self))

    return [Replacement("vllm.config.mamba", "MambaConfig.__post_init__", post_init, around=True)]
