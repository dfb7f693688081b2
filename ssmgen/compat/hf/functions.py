"""ssmgen's versions of the functions that transformers' modeling files call, and the wrapper that `patch` puts into a modeling file.

Each function has the name, the arguments and the results of transformers' own function; the state is updated in place. `**kwargs` takes
further arguments that models pass, which transformers' own functions ignore too.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...calls.checks import DTYPES
from ...errors import ArgumentError
from ...families.causal_conv1d import call as native_conv
from ...families.causal_conv1d_update import call as native_update
from ...families.chunk_delta_rule import call as native_delta
from ...families.chunk_delta_rule.problem import DeltaProblem
from ...families.chunk_linear_attention import call as native_linear
from ...families.chunk_linear_attention.problem import LinearPromptProblem, Rule
from ...families.chunk_scan import call as native_scan
from ...families.chunk_scan.spec import ScanProblem
from ...families.linear_attention import call as linear_attention
from ...families.selective_scan import call as native_selective_scan
from ...families.selective_state_update import call as selective_state_update
from ...spec.kernel import DType
from ..shared import mamba1_prompts
from ..shared.operands import rows_of
from .replacements import Replacement, Tally, attempt

NO_BACKWARD = "    - an operand requires grad; expected none, since ssmgen has no backward. Call it under torch.no_grad()."
_recording = threading.local()  # .calls: a list while this thread records


class Recorded(NamedTuple):
    """A call of a function of ssmgen."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """The calls that the functions here make of ssmgen's, in this thread. Holds their tensors."""
    calls: list[Recorded] = []
    before, _recording.calls = getattr(_recording, "calls", None), calls
    try:
        yield calls
    finally:
        _recording.calls = before


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), which `recording` sees unless it raises."""
    result = function(*args, **kwargs)
    if not is_compiling() and (calls := getattr(_recording, "calls", None)) is not None:
        calls.append(Recorded(function, args, kwargs))
    return result


def causal_conv1d_update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """hidden_states [batch, dim, T] -> a new tensor like it; conv_state [batch, dim, state_len] in place; weight [dim, width]."""
    out: Tensor = call(native_update.causal_conv1d_update, hidden_states, conv_state, weight, bias, activation)
    return out


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """hidden_states [batch, dim, length] -> a new tensor like it. seq_idx [batch, length] int32 separates packed sequences."""
    out: Tensor = call(native_conv.causal_conv1d, hidden_states, weight, bias, activation=activation, seq_idx=seq_idx)
    return out


def mamba_selective_state_update(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """state [batch, dim, N] or [batch, heads, headdim, N] in place; the others as in ssmgen.selective_state_update."""
    out: Tensor = call(selective_state_update.selective_state_update, state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
    return out


def mamba_selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False, use_mambapy: bool = False,
    use_associative_scan: bool = False, **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """hidden_states, dt, z [batch, channels, T]; A [channels, N]; B, C [batch, N, T] -> a new tensor like hidden_states, or with
    return_last_state (that, states [batch, channels, N] f32).

    use_mambapy and use_associative_scan choose among transformers' own scans: they are not looked at.
    """
    if given := [name for name in ("seq_idx", "cu_seqlens") if kwargs.get(name) is not None]:
        raise ArgumentError(
            "mamba_selective_scan", [f"{' and '.join(given)} is given; expected None: this function does not separate packed sequences"]
        )
    operands = mamba1_prompts.Operands(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus)
    run = partial(call, native_selective_scan.selective_scan)
    found: Tensor | tuple[Tensor, Tensor] = mamba1_prompts.scan(
        "mamba_selective_scan", operands, run, return_final_states=return_last_state
    )
    return found


def mamba2_chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False, seq_idx: Tensor | None = None, **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """hidden_states [batch, T, heads, headdim]; dt [batch, T, heads]; B, C [batch, T, groups, N] -> a new tensor like hidden_states, or
    with return_final_states (that, states [batch, heads, headdim, N] of initial_states' dtype or f32).

    chunk_size is not looked at: ssmgen's chunks have 64 tokens. seq_idx [batch, T] int32 separates packed sequences.
    """
    if kwargs.get("cu_seqlens") is not None:
        raise ArgumentError("mamba2_chunk_scan", ["cu_seqlens is given; expected seq_idx for packed sequences"])
    x, B, C = (rows_of(t) for t in (hidden_states, B, C))  # they do not follow a window of the cache
    z = rows_of(kwargs.get("z"))
    out: Tensor | tuple[Tensor, Tensor] = call(
        native_scan.chunk_scan, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit=limits(dt_softplus, dt_limit),
        seq_idx=seq_idx, initial_states=initial_states, return_final_states=return_final_states,
    )  # fmt: skip
    return out


def limits(softplus: bool, dt_limit: tuple[float, float]) -> tuple[float, float] | None:
    """dt_limit, or None if a softplus is always within it: limits need a different kernel."""
    low, high = dt_limit
    return None if softplus and low <= 0 and high == math.inf else (low, high)


def scan_faults(headdim: int, d_state: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Why no kernel scans prompts of such heads on any GPU, or nothing. Asked where a call is traced: an eager one says it itself."""
    return tuple(ScanProblem(headdim=headdim, d_state=d_state, x=DTYPES[dtype]).faults())


def torch_chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query, key [batch, T, HK, K]; value [batch, T, HV, V]; g, beta [batch, T, HV]; initial_state [batch, HV, K, V].

    With output_final_state the state is updated in place and returned itself, or made, in f32, where there is none; without, it is only
    read. chunk_size is not looked at: ssmgen's chunks have 64 tokens. cu_seqlens [sequences + 1] separates packed sequences.
    """
    operands = (query, key, value, g, beta)
    return _chunked(
        native_delta.chunk_gated_delta_rule, operands, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, kwargs
    )


def chunk_kimi_delta_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same as torch_chunk_gated_delta_rule, with g [batch, T, HV, K]. Layers pass cu_seqlens on as they are given it, cu_seq_lens_q."""
    operands = (query, key, value, g, beta)
    cu_seqlens = kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
    return _chunked(native_linear.chunk_kda, operands, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, kwargs)


def _chunked(
    function: Callable[..., Any], operands: tuple[Tensor, ...], state: Tensor | None, keep: bool, l2norm: bool, cu_seqlens: Tensor | None,
    others: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A prompt's output and, if keep, its final state: the given state, written in place, or a new one."""
    if cu_seqlens is None and others.get("seq_idx") is not None:
        raise ArgumentError(function.__name__, ["seq_idx is given; expected cu_seqlens for packed sequences"])
    rows = (t if t.dim() < 4 else rows_of(t) for t in operands)  # they do not follow a window of the cache
    found = call(
        function, *rows, use_qk_l2norm=l2norm, state_layout="kv", cu_seqlens=cu_seqlens, initial_states=state,
        return_final_states=bool(keep), final_states_out=state if keep else None,
    )  # fmt: skip
    return found if keep else (found, None)


def delta_faults(head_k: int, head_v: int, dtype: torch.dtype) -> tuple[str, ...]:
    """The same as scan_faults, of heads of a delta rule."""
    return tuple(DeltaProblem(head_k=head_k, head_v=head_v, x=DTYPES[dtype]).faults())


def kda_faults(head_k: int, head_v: int, dtype: torch.dtype) -> tuple[str, ...]:
    """The same, of heads of Kimi delta attention."""
    return tuple(LinearPromptProblem(head_k=head_k, head_v=head_v, rule=Rule.DELTA, x=DTYPES[dtype], gk=DType.F32).faults())


def torch_recurrent_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query, key [batch, T, HK, K]; value [batch, T, HV, V]; g, beta [batch, T, HV]; initial_state [batch, HV, K, V].

    With output_final_state the state is updated in place and returned itself; without, it is only read.
    """
    operands = (query, key, value, g, beta)
    return _recurrent(linear_attention.gated_delta_rule, operands, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def recurrent_kimi_delta_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same as torch_recurrent_gated_delta_rule, with g [batch, T, HV, K]."""
    operands = (query, key, value, g, beta)
    return _recurrent(linear_attention.kda, operands, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def _recurrent(
    function: Callable[..., Tensor], operands: tuple[Tensor, ...], state: Tensor | None, keep: bool, l2norm: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if state is None:
        raise ArgumentError(function.__name__, ["initial_state is None; expected a state: the prompt makes the first one"])
    query, _, value, *_ = operands
    if query.dtype != value.dtype:
        raise ArgumentError(
            function.__name__, [f"value is {value.dtype}; expected {query.dtype}, the dtype of query".replace("torch.", "")]
        )
    o = call(
        function, state, *operands, use_qk_l2norm=l2norm, state_layout="kv", cu_seqlens=cu_seqlens, update_state=bool(keep),
    )  # fmt: skip
    return o, state if keep else None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": causal_conv1d_update,
    "causal_conv1d_fn": causal_conv1d_fn,
    "mamba_selective_state_update": mamba_selective_state_update,
    "mamba_selective_scan": mamba_selective_scan,
    "mamba2_selective_state_update": mamba_selective_state_update,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "torch_chunk_gated_delta_rule": torch_chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": torch_recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_kimi_delta_attention,
    "recurrent_kimi_delta_attention": recurrent_kimi_delta_attention,
}
PAIRS = (
    ("causal_conv1d_update", "causal_conv1d_fn"),
    ("mamba_selective_state_update", "mamba_selective_scan"),
    ("mamba2_selective_state_update", "mamba2_chunk_scan"),
    ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"),
    ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"),
)
"""(function of a decode step, function of a prompt): a modeling file with one of a pair has the other."""


def expected(held: Mapping[str, Any], more: Iterable[str] = ()) -> list[str]:
    """Functions that a modeling file has or ought to have, in the order of PAIRS. more: other functions that its layers call."""
    wanted = {name for name in (*held, *more) if name in FUNCTIONS}
    return [name for pair in PAIRS if wanted & set(pair) for name in pair]


_FAULTS = {torch_chunk_gated_delta_rule: delta_faults, chunk_kimi_delta_attention: kda_faults}  # arguments: query, key, value, ...


def unknown_parameters(ours: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """Parameters by which transformers' function differs from the one that ours was written for: names, and where they stand."""

    def parameters(f: Callable[..., Any]) -> list[str]:
        found = inspect.signature(getattr(f, "forward", f)).parameters  # with `kernels` installed a function is a module
        return [p.name for p in found.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in ("self", *_KEYWORDS)]

    expected, found = parameters(ours), parameters(theirs)
    return [] if found == expected else sorted(set(found) ^ set(expected)) or ["their order"]


_KEYWORDS = ("seq_idx", "cu_seqlens")  # which models only pass by name


def run_function(replacement: Replacement, original: Callable[..., Any], ours: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The function that `patch` puts into a modeling file; ours: None for the function of FUNCTIONS with its name."""
    ours = FUNCTIONS[replacement.name] if ours is None else ours

    def run(*args: Any, **kwargs: Any) -> Any:
        return serve(replacement, ours, original, args, kwargs)

    run.__doc__ = ours.__doc__
    return run


def serve(tally: Tally, ours: Callable[..., Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ssmgen's function, or of the original if ssmgen refuses the call."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args, kwargs)):
        reason: str | None = NO_BACKWARD
    elif is_compiling() and _ends_a_trace(ours, args, kwargs):
        reason = ""  # is not said: code that is compiled warns of nothing
    else:
        result, reason = attempt(tally, ours, *args, **kwargs)
        if reason is None:
            return result
    if not is_compiling() and reason is not None:
        tally.keep(reason)
    return original(*args, **kwargs)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]


def _ends_a_trace(ours: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operators would refuse a dtype, an activation or a scan: of their errors torch.compile knows no way back."""
    named = [a for a in (*args, kwargs.get("activation")) if isinstance(a, str)]  # nothing else is a text
    dtypes = [t.dtype for t in _tensors(args, kwargs) if t.is_floating_point()]
    if any(a not in native_conv.ACTIVATIONS for a in named) or any(d not in DTYPES for d in dtypes):
        return True
    if ours is mamba2_chunk_scan and args[0].is_cuda:
        x, _, _, B, *_ = args
        return bool(scan_faults(x.shape[-1], B.shape[-1], x.dtype))
    if (faults := _FAULTS.get(ours)) is None or not args[0].is_cuda:
        return False
    query, _, value, *_ = args
    return bool(faults(query.shape[-1], value.shape[-1], query.dtype))
