"""Stochastic rounding of the engines' 16-bit states in decode steps: who asks for it, the arguments of a call, and the engines' refusals.

An engine's own option asks for it in its Mamba layers. SSMGEN_ENGINE_NOISE asks for it in all layers of Mamba, gated delta rules and KDA,
or in one kind of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...settings import engine_noise

_ROUNDED = (torch.float16, torch.bfloat16)
CVT_RS = 10  # major compute capability of the GPUs with the instruction that the engines' Triton kernels round with


@cache
def rounds(kind: str) -> int:
    """Rounds of the noise that SSMGEN_ENGINE_NOISE asks for in a kind of layers, read once; 0 for none. Raises ConfigError."""
    return engine_noise()[kind]


def of(state: Tensor, kind: str = "delta", *, asked: bool = False, philox_rounds: int = 0, written: bool = True) -> dict[str, Any]:
    """The arguments of a decode step that round its states with new noise; empty without noise.

    kind: of layers, "mamba" or "delta"; asked: the engine's own option, with its number of rounds (0 is 10)
    written: whether the call writes states of this dtype
    """
    if not asked and not (written and state.dtype in _ROUNDED and rounds(kind)):
        return {}
    return {
        "rand_seed": torch.randint(0, 2**32, (1,), device=state.device),  # in a CUDA graph, each replay draws another one
        "philox_rounds": (philox_rounds if asked else rounds(kind)) or 10,
    }


class Advice:
    """A warning, once in a process, that states of Mamba have 16 bits and are rounded to nearest. flag: the engine's, for f32 states."""

    def __init__(self, package: str, flag: str):
        self.package, self.flag, self.given = package, flag, False

    def __call__(self, state: Tensor, noise: dict[str, Any]) -> dict[str, Any]:
        """noise: the arguments of the call that round with noise, which are returned; empty for none"""
        if self.given or noise or state.dtype not in _ROUNDED:
            return noise
        self.given = True
        words = "states of Mamba are %s and rounded to nearest, which loses small decays and updates. With decays near 1, KL divergences "
        words += "of small models were 9 to 43 times those with noise. Set SSMGEN_ENGINE_NOISE=10, or %s float32 (said once)"
        logging.getLogger(f"{self.package}.ssmgen").warning(words, str(state.dtype).removeprefix("torch."), self.flag)
        return noise


def refused(engine: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps an engine's selective_state_update, for calls that ssmgen refuses: an error if its noise needs an instruction that the GPU
    lacks."""

    def behind(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(state: Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("enable_stochastic_rounding") and state.is_cuda and major(state.device) < CVT_RS:
                problem = f"ssmgen refuses the call, and {engine}'s own kernel rounds with an instruction of compute capability 10.0"
                advice = "The warning before this names the reason. Change it, or leave --enable-mamba-cache-stochastic-rounding out"
                raise UnsupportedError(f"{engine}'s selective_state_update", [f"{problem}; expected a call that ssmgen takes. {advice}."])
            return original(state, *args, **kwargs)

        return call

    return behind


@cache
def major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def permitted(engine: Any, place: str, refusal: str, check: Callable[[], None]) -> None:
    """Runs an engine's check of its options, which raises ValueError.

    engine: an Engine of replacing.py
    refusal: words of its error for GPUs on which its own kernel cannot round with noise. That error is dropped if the function at `place`
    is ssmgen's, which runs on all GPUs; otherwise it says why the function is not.
    """
    try:
        check()
    except ValueError as e:
        if refusal not in str(e):
            raise
        if problems := engine.not_ours([place]):
            raise ValueError(f"{e} ssmgen's kernel would run on this GPU, but {'; '.join(problems)}.") from e
        engine.log.info("ssmgen rounds float16 states of Mamba with noise on this GPU: %s", place)
