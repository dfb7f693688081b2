"""The least time of a decode step: its weights, read once, and its recurrent states, read and written, at the speed of a copy.

Not counted: the embedding table (unless the head reads the same weights), activations, and keys and values of attention. Of a layer's
experts those that one token is routed to count, as a batch may choose the same ones.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ssmgen.bench.timing import ceilings_tbs

STATES = ("conv_states", "recurrent_states")  # of a layer of transformers' cache: a tensor, or one for each of several states


def moved(model: torch.nn.Module, cache: Any) -> int:
    """Bytes that a step with this cache has to read and write."""
    return weights(model) + 2 * sum(state.nbytes for layer in getattr(cache, "layers", ()) for state in states(layer))


def weights(model: torch.nn.Module) -> int:
    """Bytes of weights that a token needs."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding = None if table is None or (head is not None and head.weight is table.weight) else table.weight
    per_token, total = getattr(model.config, "num_experts_per_tok", None), 0.0
    for name, weight in model.named_parameters():
        if weight is embedding:
            continue
        routed = per_token is not None and ".experts." in f".{name}." and weight.dim() == 3
        total += weight.nbytes * (min(1.0, per_token / len(weight)) if routed else 1.0)
    return round(total)


def states(layer: Any) -> list[torch.Tensor]:
    """The recurrent states of a layer's cache."""
    kept = [getattr(layer, name, None) for name in STATES]
    several = [list(state.values()) if isinstance(state, dict) else [state] for state in kept]
    return [state for one in several for state in one if isinstance(state, torch.Tensor)]


@functools.cache
def copy_tbs() -> float:
    """TB/s, read plus written, of a copy on this card."""
    return ceilings_tbs()["out_of_place"]


def floor_ms(model: torch.nn.Module, cache: Any) -> float:
    return moved(model, cache) / copy_tbs() / 1e9
