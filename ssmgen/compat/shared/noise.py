"""Stochastic rounding of the engines' 16-bit states in decode steps: who asks for it, the arguments of a call, and the engines' refusals.

An engine's own option asks for it in its Mamba layers. SSMGEN_ENGINE_NOISE asks for it in all layers of Mamba, gated delta rules and KDA,
or in one kind of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
        if written:
            _advise(state, kind)
        return {}
    return {
        "rand_seed": torch.randint(0, 2**32, (1,), device=state.device),  # in a CUDA graph, each replay draws another one
        "philox_rounds": (philox_rounds if asked else rounds(kind)) or 10,
    }


# The engines whose plugins are registered: their logs, and the kinds of layers that were warned about there since.
_watched: dict[str, tuple[logging.Logger, set[str]]] = {}

# Each engine's option for the type of states.
FLAGS = {"vllm": "--mamba-ssm-cache-dtype", "sglang": "--mamba-ssm-dtype"}
# Types that get a warning without noise, and its words, by kind of layers; docs/guides/state_formats.md has the numbers.
ADVICE = {
    "mamba": (
        _ROUNDED,
        "states of Mamba are %s and rounded to nearest, which loses small decays and updates. With decays near 1, KL divergences of small "
        "models were 9 to 43 times those with noise. Set SSMGEN_ENGINE_NOISE=mamba:10, or %s float32 (said once)",
    ),
    "delta": (
        (torch.bfloat16,),
        "states of delta rules are %s and rounded to nearest. With decays near 1, this changed 2 to 7 %% of the likeliest tokens of small "
        "models, and float16 under 1 %%. Set %s float16 if the layers take it, or float32 (said once)",
    ),
}


def watch(package: str, log: logging.Logger | None) -> None:
    """From now on, states that lose accuracy are warned about in this engine's log, once per kind of layers; None: no longer."""
    _watched.pop(package, None)
    if log is not None:
        _watched[package] = log, set()


def _advise(state: Tensor, kind: str) -> None:
    types, words = ADVICE[kind]
    if state.dtype in types:
        for package, (log, told) in _watched.items():  # a process runs one engine
            if kind not in told:
                told.add(kind)
                log.warning(words, str(state.dtype).removeprefix("torch."), FLAGS[package])


def impossible(state: Tensor, *_: Any, enable_stochastic_rounding: bool = False, **__: Any) -> str | None:
    """Why an engine's own selective_state_update cannot run a call: its noise needs an instruction that the GPU lacks."""
    if not enable_stochastic_rounding or not state.is_cuda or major(state.device) >= CVT_RS:
        return None
    return (
        f"the engine's own kernel rounds with an instruction of compute capability {CVT_RS}.0, which this GPU lacks, so it cannot run the "
        "call. Mend the first reason, or leave --enable-mamba-cache-stochastic-rounding out"
    )


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
