"""Greedy decoding with a model of transformers after a prompt, one step at a time, also in a CUDA graph."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ssmgen.compat.hf.roles import name_in

PROMPT = 8  # tokens


def prompt(batch: int, vocabulary: int, device: torch.device | str, length: int = PROMPT) -> Tensor:
    """[batch, length]: the same at every call, and without the special tokens 0 … 2."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocabulary, (batch, length), generator=generator).to(device)


class Greedy:
    """A decode step of a model: reads `token` [batch, 1] and overwrites it with the likeliest next one, all on the device.

    Reads the prompt's tokens [batch, length] when it is made. steps: the cache is transformers' StaticCache, whose attention layers have
    space for this number of steps at fixed addresses, so that a step can be captured. Without it, the cache is the one that `generate`
    makes, and grows.
    """

    def __init__(self, model: torch.nn.Module, ids: Tensor, steps: int | None = None):
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self.takes = str(name_in("cache", parameters))
        cache = None if steps is None else _static(model, ids.shape[1] + steps)
        last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}  # as in generate()
        with torch.no_grad():
            out = model(input_ids=ids, use_cache=True, **{self.takes: cache}, **last)
            self.cache = out[self.takes]
            self.token = _likeliest(out.logits)
        # As in generate(): not every family counts the tokens in its cache
        self.position = torch.full_like(self.token, ids.shape[1]) if "position_ids" in parameters else None

    def __call__(self) -> Tensor:
        with torch.no_grad():
            inputs = {"input_ids": self.token, "use_cache": True, self.takes: self.cache}
            if self.position is None:
                logits = self.model(**inputs).logits
            else:
                logits = self.model(**inputs, position_ids=self.position).logits
                self.position.add_(1)
            self.token.copy_(_likeliest(logits))
        return logits

    def tokens(self, count: int) -> Tensor:
        """[batch, count]: the tokens of the next steps."""
        return torch.cat([self._next() for _ in range(count)], dim=1)

    def _next(self) -> Tensor:
        self()
        return self.token.clone()


class Captured:
    """A decode step in a CUDA graph: a call replays it. Each call advances the step's cache, which must have enough space."""

    def __init__(self, step: Greedy):
        self.step = step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # first-time work of libraries and of the allocator
            step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        here = torch.cuda.stream(torch.cuda.current_stream())  # a failed capture may leave its own stream current
        with here, torch.cuda.graph(self.graph):
            step()

    def __call__(self) -> None:
        self.graph.replay()

    def tokens(self, count: int) -> Tensor:
        """[batch, count]: the tokens of the next steps."""
        found = []
        for _ in range(count):
            self()
            found.append(self.step.token.clone())
        return torch.cat(found, dim=1)


def _likeliest(logits: Tensor) -> Tensor:
    """[batch, tokens, vocabulary] -> [batch, 1], for the last token."""
    return logits[:, -1:].argmax(-1)


def _static(model: torch.nn.Module, length: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)
