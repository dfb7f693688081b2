"""Linear layers of SGLang 0.5.23 without quantisation: up to 16 rows by skinny_linear. Replaced only with SSMGEN_ENGINE_LINEAR=allow."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from ..shared import linears
from ..shared.replacing import Engine, NotReplaced, Replacement

_MODULE = "sglang.srt.layers.quantization.unquant"
_HEAD = "sglang.srt.layers.logits_processor"
_PLAIN = ("auto", "torch")  # --bf16-gemm-backend: the ones that call torch.nn.functional.linear on sm_90


def replacements(engine: Callable[[], Engine]) -> list[Replacement]:
    """The methods of linear layers and of the head. engine: the one that they become a part of."""
    layers = linears.Layers("sglang_linear", engine)

    def traced(original: Callable[..., Tensor], self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if _stays() or getattr(layer, "use_intel_amx_backend", False) or not linears.is_possible(x, layer.weight, bias):
            return original(self, layer, x, bias)
        found: Tensor = layers.call(x, layer.weight, bias)
        return found

    return [
        Replacement(_MODULE, "UnquantizedLinearMethod.apply", linear_apply, traced=True, compiled=traced, asked=True, backward=True),
        Replacement(_HEAD, "LogitsProcessor._compute_lm_head", compute_lm_head, traced=True, asked=True, backward=True),
    ]


def _stays() -> bool:
    """Whether all linear layers stay SGLang's own: deterministic inference, or another backend of products."""
    return linears.stays() or import_module(_MODULE).get_bf16_gemm_backend().value not in _PLAIN


_stays._dynamo_marked_constant = True  # type: ignore[attr-defined]  # like linears.stays


def linear_apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer without quantisation: x weight^T + bias, the method apply of SGLang's UnquantizedLinearMethod.

    layer: its `weight` [N, K] is this rank's part          x: [*rows, K]          bias: [N], or None for 0

    Returns a new tensor [*rows, N]. skinny_linear multiplies up to 16 rows of 16-bit weights on sm_90 and later, and otherwise one row; N
    and K are multiples of 8. SGLang's own method runs, without a warning, for all other calls, for other backends (--bf16-gemm-backend
    cutedsl or gemv), and in deterministic inference. Graphs of torch.compile hold one operator for any number of rows.
    """
    if _stays() or getattr(layer, "use_intel_amx_backend", False):
        raise NotReplaced
    return linears.served(x, layer.weight, bias)


def compute_lm_head(
    self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The head of a model without quantisation: hidden_states weight^T, the method _compute_lm_head of SGLang's LogitsProcessor.

    Returns a new tensor [rows, N] of the weight's dtype. As in SGLang, a plain head has no embedding_bias, and `out` is for f32 logits.
    SGLang's own method runs for heads with LoRA or quantisation, for f32 logits, and as in linear_apply.
    """
    options = (self.use_fp32_lm_head, self.use_fp32_lm_head_output, self.rl_on_policy_target is not None)
    special = any(options) or getattr(lm_head, "use_intel_amx_backend", False) or hasattr(lm_head, "set_lora")
    method = getattr(lm_head, "quant_method", None)
    if special or _stays() or not hasattr(lm_head, "weight"):
        raise NotReplaced
    if import_module(_HEAD).should_apply_lm_head_quant_method(lm_head, method):
        raise NotReplaced
    return linears.served(hidden_states, lm_head.weight, None)
