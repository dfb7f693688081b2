"""Small random models of Mamba-3 with stand-in layers, and their greedy generation: with caches, and in float64 without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from mamba3_stand_ins import Cache, Layer, OfFla
from torch import Tensor, nn

WORDS = 48
MODELS: dict[str, dict[str, Any]] = {
    "siso": {},
    "siso-norm": {"norm": True},
    "mimo": {"rank": 4, "groups": 2},
    "mimo-norm": {"rank": 2, "norm": True, "rope_fraction": 1.0},
}


class Model(nn.Module):
    """Pre-norm layers with residuals."""

    def __init__(self, of: type[Layer], layers: int = 2, d_model: int = 32, **options: Any):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, d_model)
        self.layers = nn.ModuleList([of(d_model, d_state=32, headdim=16, layer_idx=i, **options) for i in range(layers)])
        self.norms = nn.ModuleList([nn.RMSNorm(d_model, eps=1e-5) for _ in range(layers + 1)])
        self.head = nn.Linear(d_model, WORDS, bias=False)

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Logits [batch, T, words]. cache: mamba-ssm's inference_params, or fla's cache."""
        rows = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            if isinstance(layer, OfFla):
                found, *_ = layer(norm(rows), past_key_values=cache, use_cache=cache is not None)
            else:
                found = layer(norm(rows), inference_params=cache)
            rows = rows + found
        return self.head(self.norms[-1](rows))

    def cache(self) -> Any:
        return Cache() if isinstance(self.layers[0], OfFla) else SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)


def made(of: type[Layer], dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> tuple[Model, Model]:
    """(a model with layers of this class, which a patch may have changed; the same parameters in float64, with layers that stay)"""
    torch.manual_seed(seed)
    model = Model(of, **options).to(dtype).eval()
    torch.manual_seed(seed)
    exact = Model(of.__mro__[1], **options).eval()
    exact.load_state_dict(model.state_dict())
    return model, exact.double()


def prompts(batch: int = 2, tokens: int = 7) -> Tensor:
    return torch.randint(WORDS, (batch, tokens), generator=torch.Generator().manual_seed(1))


def exactly(exact: Model, sequence: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(the best next tokens [batch, count], their logits) before each of a sequence's last tokens, in one pass without a cache. A model
    whose tokens these are generates the same sequence. Fails for near ties."""
    logits = exact(sequence[:, :-1])[:, -count:]
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 1e-4 * first.abs().max(), "a near tie: take another seed"
    return logits.argmax(-1), logits


def generated(model: Model, prompt: Tensor, count: int, cuts: tuple[int, ...] = (), forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(tokens, logits before each), with a cache and the prompt in pieces. forced: tokens to go on with instead of the model's own."""
    cache, logits = model.cache(), []

    def run(tokens: Tensor) -> Tensor:
        found = model(tokens, cache)[:, -1]
        if isinstance(cache, SimpleNamespace):
            cache.seqlen_offset += tokens.shape[1]
        return found

    for piece in prompt.split([*cuts, prompt.shape[1] - sum(cuts)], 1):
        last = run(piece)
    tokens: list[Tensor] = []
    for i in range(count):
        logits.append(last)
        tokens.append(last.argmax(-1))
        if i + 1 < count:
            last = run((tokens[-1] if forced is None else forced[:, i])[:, None])
    return torch.stack(tokens, 1), torch.stack(logits, 1)
