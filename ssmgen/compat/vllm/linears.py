"""Linear layers of vLLM 0.33 without quantisation: up to 16 rows by skinny_linear. Replaced only with SSMGEN_ENGINE_LINEAR=allow."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from ..shared import linears
from ..shared.replacing import REPLACED, WAITING, Engine, NotReplaced, Replacement

_LAYERS = "vllm.model_executor.layers"
_PLAIN = "default_unquantized_gemm"  # vLLM's function for torch.nn.functional.linear; another backend's has another name


def replacements(engine: Callable[[], Engine]) -> list[Replacement]:
    """The methods of linear layers and of the head. engine: the one that they become a part of."""
    layers = linears.Layers("vllm_linear", engine)

    def traced(original: Callable[..., Tensor], self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if linears.stays() or not _is_plain(self) or not linears.is_possible(x, layer.weight, bias):
            return original(self, layer, x, bias)
        found: Tensor = layers.call(x, layer.weight, bias)
        return found

    how: dict[str, Any] = {"traced": True, "asked": True, "backward": True}
    method = Replacement(f"{_LAYERS}.linear", "UnquantizedLinearMethod.apply", linear_apply, compiled=traced, **how)

    def compile_factors(original: Callable[..., dict[str, object]]) -> dict[str, object]:
        """The settings in the key of vLLM's compiled graphs: graphs with ssmgen's operator must not run without it, nor the other way."""
        ours = engine().outcome.get(method.place) in (REPLACED, WAITING)
        return original() | ({"SSMGEN_ENGINE_LINEAR": "allow"} if ours else {})

    return [
        method,
        Replacement(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.apply", embedding_apply, **how),
        Replacement("vllm.envs", "compile_factors", compile_factors, around=True, asked=True),
    ]


def _is_plain(self: Any) -> bool:
    """Whether vLLM's own method would call torch.nn.functional.linear."""
    return getattr(getattr(self, "_gemm_impl", None), "__name__", "") == _PLAIN


def linear_apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer without quantisation: x weight^T + bias, the method apply of vLLM's UnquantizedLinearMethod.

    layer: its `weight` [N, K] is this rank's part          x: [*rows, K]          bias: [N], or None for 0

    Returns a new tensor [*rows, N]. skinny_linear multiplies up to 16 rows of 16-bit weights on sm_90 and later, and otherwise one row; N
    and K are multiples of 8. vLLM's own method runs, without a warning, for all other calls, for other backends (--linear-backend), and in
    the batch-invariant mode. Graphs of torch.compile hold one operator for any number of rows.
    """
    if linears.stays() or not _is_plain(self):
        raise NotReplaced
    return linears.served(x, layer.weight, bias)


def embedding_apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The head of a model without quantisation: like linear_apply, the method apply of vLLM's UnquantizedEmbeddingMethod."""
    if linears.stays() or import_module(f"{_LAYERS}.utils").dispatch_unquantized_gemm().__name__ != _PLAIN:
        raise NotReplaced
    return linears.served(x, layer.weight, bias)
