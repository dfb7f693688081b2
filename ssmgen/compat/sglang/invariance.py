"""SGLang's deterministic inference (--enable-deterministic-inference) for recurrent models, as in SGLang 0.5.23: where the scheduler cuts
prompts, requests that lost their place, and the settings that are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from http import HTTPStatus
from importlib import import_module
from math import lcm
from typing import Any

import torch

from ...errors import BatchInvarianceError
from ..shared import invariance
from ..shared.replacing import Engine, Replacement

_CONTEXT, _SCHEDULER, _BATCH = "sglang.srt.runtime_context", "sglang.srt.managers.scheduler", "sglang.srt.managers.schedule_batch"
_POLICY = "sglang.srt.managers.schedule_policy"
# Functions that work row by row, or choose a backend: SGLang's own change no bit with the batch.
FREE = ("merge_state", "merge_state_v2", "flashinfer_gdn_prefill_default", "fused_qkv_split_gdn_prefill")
RETRACTED = "There was no memory for this request's states, and its outputs computed again would have other bits. Send it again."
MODE = "SGLang with --enable-deterministic-inference"
ADVICE = "Nothing was served. Change these, or leave the mode."


class _Served:
    """Prompts are cut at multiples of `grid` tokens if this process's scheduler serves a recurrent model in the mode; otherwise it is 0."""

    grid = 0


def is_deterministic() -> bool | None:
    """Whether the server of this process was started in the mode; None until SGLang publishes its settings, before it loads the model."""
    context = sys.modules.get(_CONTEXT)
    if context is None:
        return None
    try:
        return bool(context.get_exec().deterministic.enable_deterministic_inference)
    except ValueError:  # not published yet
        return None


on = invariance.Mode(is_deterministic)


def replacements(engine: Callable[[], Engine]) -> list[Replacement]:
    """The mode's replacements. engine: the one that they become a part of."""

    def init_mamba_truncation_align(original: Callable[..., None], self: Any) -> None:
        """Scheduler.init_mamba_truncation_align: in the mode, prompts of recurrent models are cut at multiples of 64.

        Raises BatchInvarianceError for functions that are SGLang's own and for settings, and lists all.
        """
        original(self)
        _Served.grid = 0
        if not on() or not self.is_hybrid_ssm:
            return
        needed = [r.place for r in engine().replacements if r.name not in FREE and not r.asked]
        if problems := engine().not_ours(needed) + _objections(self):
            raise BatchInvarianceError(MODE, problems, ADVICE)
        engine().promise(needed)
        _Served.grid = lcm(invariance.CHUNK, self.page_size)
        self.truncation_align_size = lcm(self.truncation_align_size or 1, _Served.grid)

    return [
        Replacement(_SCHEDULER, "Scheduler.init_mamba_truncation_align", init_mamba_truncation_align, around=True),
        Replacement(_POLICY, "PrefillAdder.floor_chunked_tokens", floor_chunked_tokens, around=True),
        Replacement(_POLICY, "PrefillAdder.add_one_req_ignore_eos", add_one_req_ignore_eos, around=True),
        Replacement(_BATCH, "ScheduleBatch.retract_decode", retract_decode, around=True),
    ]


def _objections(self: Any) -> list[str]:
    """The settings under which bits would depend on other requests, with the flag that changes each."""
    found, state = [], self.req_to_token_pool.mamba_pool.mamba_cache.temporal
    if state.numel() and state.dtype != torch.float32:
        dtype = str(state.dtype).removeprefix("torch.")
        found.append(f"recurrent states are {dtype}, which rounds them wherever a prompt is cut: --mamba-ssm-dtype float32")
    if not self.disable_radix_cache:
        found.append("the radix cache keeps states of other requests' outputs, which come from decode steps: --disable-radix-cache")
    if self.is_mixed_chunk:
        found.append("decode steps run in the prompts' kernels if a prompt is in the same step: leave --enable-mixed-chunk out")
    if self.spec_algorithm is not None and not self.spec_algorithm.is_none():
        found.append("drafts: whether a token is one depends on the step: leave --speculative-algorithm out")
    return found


def floor_chunked_tokens(original: Callable[..., int], self: Any, trunc_len: int, remaining: int) -> int:
    """PrefillAdder.floor_chunked_tokens: how many of the tokens that remain of a prompt come in this step, where there is room for
    trunc_len. SGLang's alignment of truncated prompts does not reach the pieces after the first one.

    Raises BatchInvarianceError if there is room for fewer tokens than a piece needs.
    """
    tokens = original(self, trunc_len, remaining)
    if not _Served.grid or tokens >= remaining:
        return tokens
    if tokens < _Served.grid:
        problem = f"there is memory for {tokens} tokens of a prompt, and a piece of it needs {_Served.grid}"
        raise BatchInvarianceError(MODE, [problem], "Lower --max-running-requests or raise --mem-fraction-static.")
    return tokens - tokens % _Served.grid


def add_one_req_ignore_eos(original: Callable[..., Any], self: Any, req: Any) -> Any:
    """PrefillAdder.add_one_req_ignore_eos: in the mode, a prompt waits for a step with room for a piece of it."""
    room = self.rem_chunk_tokens
    if room is not None and room < min(_Served.grid, len(req.full_untruncated_fill_ids) - req.prefix_len):
        return import_module(_POLICY).AddReqResult.OTHER
    return original(self, req)


def retract_decode(original: Callable[..., Any], self: Any) -> tuple[list[Any], float, list[Any]]:
    """ScheduleBatch.retract_decode: (requests to compute again later, a ratio, requests to abort).

    Requests of a recurrent model end with status 503 in the mode and are not computed again: decode steps computed their outputs' states.
    """
    retracted, ratio, aborted = original(self)
    if not _Served.grid:
        return retracted, ratio, aborted
    for request in retracted:
        request.to_finish = import_module(_BATCH).FINISH_ABORT(RETRACTED, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return [], ratio, [*aborted, *retracted]
