"""vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT=1) for recurrent models, as in vLLM 0.33: the promise of their backends, where the
scheduler cuts prompts, and the settings that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import lcm
from typing import Any

import torch

from ...errors import BatchInvarianceError
from ...settings import vllm_is_batch_invariant
from ..shared import invariance
from ..shared.replacing import Engine, Replacement

on = invariance.Mode(vllm_is_batch_invariant)

_BACKENDS, _SCHEDULER = "vllm.v1.attention.backends", "vllm.v1.core.sched.scheduler"
_LAYERS, _FLA = "vllm.model_executor.layers.mamba", "vllm.third_party.flash_linear_attention.ops"
_MODELS, _LIGHTNING = "vllm.models", "vllm.model_executor.layers.lightning_attn"
_KIMI, _GLM = f"{_MODELS}.kimi_k3.nvidia", f"{_MODELS}.glm5next"
_SAID = "supports_batch_invariance"

_CONV = (f"{_LAYERS}.ops.causal_conv1d.causal_conv1d_update", f"{_LAYERS}.ops.causal_conv1d.causal_conv1d_fn")
_STEP = f"{_LAYERS}.ops.mamba_ssm.selective_state_update"
_NORMS = tuple(f"{_FLA}.{name}" for name in ("layernorm_guard.layer_norm_fwd", "kda.rms_norm_gated", "fused_norm_gate.rms_norm_gated"))
_KIMI_DELTA = (
    f"{_KIMI}.ops.third_party.kda.chunk.chunk_kda_with_fused_gate", f"{_KIMI}.ops.third_party.kda.fused_recurrent.fused_recurrent_kda",
    f"{_KIMI}.ops.third_party.kda.fused_recurrent.fused_recurrent_kda_packed_decode",
)  # fmt: skip
_GATED_DELTA = tuple(
    f"{_FLA}.{name}"
    for name in (
        "fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode", "fused_recurrent.fused_recurrent_gated_delta_rule",
        "fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update", "chunk.chunk_gated_delta_rule", "kda.chunk_kda",
        "kda.fused_recurrent_kda",
    )
)  # fmt: skip
_ALIGNMENT = f"{_LAYERS}.kda_checkpoint.kda_prefill_checkpoint_alignment"
_LINEAR = (f"{_LIGHTNING}.lightning_attention", f"{_LIGHTNING}.linear_decode_forward_triton", _NORMS[0])

# The functions of the layers of each backend's class, except for drafts, which the mode refuses. A subclass that is not here promises
# nothing: its kernels are not ours.
FUNCTIONS: Mapping[str, Sequence[str]] = {
    f"{_BACKENDS}.mamba1_attn.Mamba1AttentionBackend": (*_CONV, _STEP, f"{_LAYERS}.ops.mamba_ssm.selective_scan_fn"),
    f"{_BACKENDS}.mamba2_attn.Mamba2AttentionBackend": (
        *_CONV, _STEP, f"{_LAYERS}.ops.ssd_combined.mamba_chunk_scan_combined_varlen", f"{_LAYERS}.ops.layernorm_gated.rms_norm_gated",
    ),
    f"{_BACKENDS}.short_conv_attn.ShortConvAttentionBackend": _CONV,
    f"{_BACKENDS}.linear_attn.LinearAttentionBackend": _LINEAR,
    f"{_BACKENDS}.linear_attn.BailingLinearAttentionBackend": _LINEAR,
    f"{_BACKENDS}.gdn_attn.GDNAttentionBackend": (
        *_CONV, *_GATED_DELTA, *_KIMI_DELTA, *_NORMS, _ALIGNMENT, f"{_LAYERS}.gdn.qwen_gdn_linear_attn.fi_chunk_gated_delta_rule",
        f"{_LAYERS}.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention._forward_core",
        f"{_GLM}.nvidia.ops.third_party.kda.kernels.chunk_kda_with_fused_gate",
        f"{_GLM}.nvidia.ops.third_party.kda.kernels.fused_recurrent_kda", f"{_GLM}.common.kda.Glm5NextLinearAttention._flashkda_prefill",
    ),
    f"{_KIMI}.kda_metadata.KimiK3KDAAttentionBackend": (
        *_CONV, *_KIMI_DELTA, *_NORMS, _ALIGNMENT, f"{_KIMI}.kda._flashkda_prefill", "vllm._custom_ops.fused_kda_decode",
    ),
}  # fmt: skip

# {kind of states: tokens}: prompts may be cut at multiples of them, a convolution's anywhere. Other kinds: 64.
GRIDS = {"MAMBA1": invariance.MAMBA1, "SHORT_CONV": 1}
_BACKEND_FLAGS = {"gdn_prefill_backend": ("triton", "flashinfer"), "kda_prefill_backend": ("triton", "flashkda")}
_BACKEND_FLAGS |= {"kda_decode_backend": ("triton", "native")}


def replacements(engine: Callable[[], Engine]) -> list[Replacement]:
    """The mode's replacements. engine: the one that they become a part of."""

    def promising(place: str, functions: Sequence[str]) -> Callable[..., bool]:
        def supports_batch_invariance(original: Callable[..., bool], cls: type) -> bool:
            """Whether every function of this class's layers is ours; a subclass has other functions, and says so by itself."""
            if f"{cls.__module__}.{cls.__qualname__}" != place:
                return False
            needed = [*functions, *AROUND]
            if problems := engine().not_ours(needed):
                engine().log.warning("%s cannot promise batch invariance: %s", place, "; ".join(problems))
                return False
            engine().promise(needed)
            return True

        return supports_batch_invariance

    said = [Replacement(*_split(f"{place}.{_SAID}"), promising(place, functions), around=True) for place, functions in FUNCTIONS.items()]
    return [*said, *(Replacement(*_split(place), function, around=True) for place, function in AROUND.items())]


def _split(place: str) -> tuple[str, str]:
    """(module, Class.method)."""
    module, owner, method = place.rsplit(".", 2)
    return module, f"{owner}.{method}"


# The scheduler


def scheduler(
    original: Callable[..., None],
    self: Any,
    vllm_config: Any,
    kv_cache_config: Any,
    structured_output_manager: Any,
    block_size: int,
    hash_block_size: int | None = None,
    mm_registry: Any = ...,
    include_finished_set: bool = False,
    log_stats: bool = False,
) -> None:
    """Scheduler.__init__: in the mode, refuses settings that change bits, and prompts are cut at multiples of a grid.

    Raises BatchInvarianceError, which lists all settings.
    """
    given = (vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size)
    more = {} if mm_registry is ... else {"mm_registry": mm_registry}
    original(self, *given, include_finished_set=include_finished_set, log_stats=log_stats, **more)
    self.ssmgen_grid = 0
    if not on() or not (states := _states(kv_cache_config)):
        return
    grid = max(GRIDS.get(_kind(spec), invariance.CHUNK) for spec in states)
    if problems := _objections(self, vllm_config, states, grid):
        raise BatchInvarianceError("vLLM with VLLM_BATCH_INVARIANT=1", problems, "Nothing was served. Change these, or leave the mode.")
    # With prefix caching, vLLM's own split is called first, and all cuts lie at ends of blocks.
    self.ssmgen_aligned, self.need_mamba_block_aligned_split = self.need_mamba_block_aligned_split, True
    self.ssmgen_grid = self.cache_config.block_size if self.ssmgen_aligned else grid
    self.ssmgen_apart, self.ssmgen_prompts = any(_kind(spec) == "GDN_ATTN" for spec in states), False


def _states(kv_cache_config: Any) -> list[Any]:
    """The states of recurrent layers: vLLM's MambaSpec of each group, or of each layer in it."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    inner = [each for spec in specs for each in (getattr(spec, "kv_cache_specs", None) or {"": spec}).values()]
    return [spec for spec in inner if hasattr(spec, "mamba_type")]


def _kind(spec: Any) -> str:
    name: str = spec.mamba_type.name
    return name


def _objections(self: Any, config: Any, states: Sequence[Any], grid: int) -> list[str]:
    """The settings under which bits would depend on other requests, with the flag that changes each."""
    cache, more = config.cache_config, config.additional_config if isinstance(config.additional_config, dict) else {}
    found = []
    for spec in states:
        recurrent = [] if _kind(spec) == "SHORT_CONV" else [spec.dtypes[-1]]
        if narrow := [str(d).removeprefix("torch.") for d in recurrent if d != torch.float32]:
            found.append(
                f"recurrent states are {narrow[0]}, which rounds them wherever a prompt is cut: --mamba-ssm-cache-dtype float32"
                " (and --mamba-cache-dtype float32 for models without the former)"
            )
    if config.speculative_config is not None:
        found.append("drafts: whether a token is one depends on the step, and so do its functions: leave --speculative-config out")
    if config.kv_transfer_config is not None:
        found.append("states from another engine end at other places of a prompt: leave --kv-transfer-config out")
    if cache.use_replayssm:
        found.append("ReplaySSM's sums depend on when a state was last written: leave --use-replayssm out")
    if (backend := config.mamba_config.backend.value) != "triton":
        found.append(f"Mamba's backend is {backend}, whose kernels are not replaced: --mamba-backend triton")
    for name, ours in _BACKEND_FLAGS.items():
        if (chosen := str(more.get(name, "auto")).strip().lower()) not in ("auto", *ours):
            found.append(f"{name} is {chosen}, whose kernels are not replaced: --{name.replace('_', '-')} {' or '.join(ours)}")
    if self.need_mamba_block_aligned_split and cache.block_size % grid:
        found.append(
            f"cached prefixes end at multiples of {cache.block_size} tokens, not of {grid}: a --block-size that is one, or"
            " --no-enable-prefix-caching"
        )
    if self.mamba_partial_cache_hit:
        found.append(f"cached prefixes end inside blocks, at multiples of {self.hash_block_size}: leave --prefix-match-unit out")
    least, most = (cache.block_size if self.need_mamba_block_aligned_split else grid) + 1, self.max_num_scheduled_tokens
    if 0 < (threshold := self.scheduler_config.long_prefill_token_threshold) < least:
        found.append(f"--long-prefill-token-threshold is {threshold}; a piece of a prompt can need {least} tokens, so at least that, or 0")
    if most < least:
        found.append(f"a step has {most} tokens; a piece of a prompt can need {least}: --max-num-batched-tokens {least} or more")
    return list(dict.fromkeys(found))


def schedule(original: Callable[..., Any], self: Any, throttle_prefills: bool = False) -> Any:
    """Scheduler.schedule: with gated delta rules or KDA, a step of the mode has prompts or decode steps, never both, and they alternate.

    vLLM's layers of this kind (all but Qwen's) run all rows of a step with prompts through the prompts' kernel, which has other bits.
    """
    if getattr(self, "ssmgen_grid", 0) and self.ssmgen_apart:
        prompts = sum(r.num_computed_tokens < r.num_prompt_tokens for r in self.running)
        room = len(self.running) < self.max_num_active_reqs
        waiting = room and bool(self.waiting or self.kv_holding_waiting or self.deferred_waiting)
        steps = len(self.running) > prompts
        self.ssmgen_prompts = bool(prompts or waiting) and not (steps and self.ssmgen_prompts)
    return original(self, throttle_prefills)


def split(
    original: Callable[..., int],
    self: Any,
    request: Any,
    num_new_tokens: int,
    num_new_local_computed_tokens: int = 0,
    num_external_computed_tokens: int = 0,
) -> int:
    """Scheduler._mamba_block_aligned_split: how many tokens of a request come in this step, 0 for none.

    A piece of a prompt ends on the grid in the mode. Outputs that are computed again after a preemption come one by one, as they did the
    first time.
    """
    given = (num_new_local_computed_tokens, num_external_computed_tokens)
    if not getattr(self, "ssmgen_grid", 0):
        return original(self, request, num_new_tokens, *given)
    start = request.num_computed_tokens + sum(given)
    of_prompt = self.ssmgen_aligned and start < request.num_prompt_tokens
    return _piece(self, request, start, num_new_tokens, original(self, request, num_new_tokens, *given) if of_prompt else None)


def _piece(self: Any, request: Any, start: int, budget: int, chosen: int | None) -> int:
    """Tokens of a request in this step. start: tokens before them; budget: the most there can be; chosen: by vLLM, or None."""
    prompt, grid = request.num_prompt_tokens, self.ssmgen_grid
    if self.ssmgen_apart and (start < prompt) != self.ssmgen_prompts:
        return 0
    if start < prompt and start % grid:
        problem = f"a prompt goes on after {start} tokens, which is no multiple of {grid}"
        raise BatchInvarianceError("vLLM with VLLM_BATCH_INVARIANT=1", [problem], "This is a fault of ssmgen's: please report it.")
    return invariance.piece_end(start, start + (budget if chosen is None else chosen), start + budget, prompt, grid) - start


def encoder_inputs(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    num_computed_tokens: int,
    num_new_tokens: int,
    encoder_compute_budget: int,
    shift_computed_tokens: int = 0,
) -> Any:
    """Scheduler._try_schedule_encoder_inputs: in the mode, a piece of a prompt before an image that has to wait ends on the grid."""
    found = original(self, request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens)
    if not getattr(self, "ssmgen_grid", 0) or found[1] in (0, num_new_tokens):
        return found
    return (found[0], _piece(self, request, num_computed_tokens, found[1], None), *found[2:])


def prefix_hit(original: Callable[..., Any], self: Any, request: Any, max_cache_hit_length: int | None = None) -> Any:
    """Scheduler._get_local_prefix_cache_hit: in the mode, a cached prefix leaves two tokens of the prompt, because one alone would run as a
    decode step."""
    if getattr(self, "ssmgen_grid", 0):
        most = max(request.num_prompt_tokens - 2, 0)
        max_cache_hit_length = most if max_cache_hit_length is None else min(most, max_cache_hit_length)
    return original(self, request, max_cache_hit_length)


def cache_blocks(original: Callable[..., None], self: Any, request: Any, num_computed_tokens: int) -> None:
    """KVCacheCoordinator.cache_blocks: in the mode, blocks of a recurrent model that hold outputs are not kept for other requests.

    Decode steps computed the states of outputs. In another request's prompt, the prompt's kernel computes them, with other bits.
    """
    if on() and any(hasattr(manager, "mamba_cache_mode") for manager in self.single_type_managers):
        num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
    original(self, request, num_computed_tokens)


def block_size(original: Callable[..., None], cls: Any, vllm_config: Any, backend_cls: Any) -> None:
    """Platform._align_hybrid_block_size: in the mode, blocks of hybrid models, at whose ends cached prefixes end, have a multiple of 64
    tokens. vLLM makes the size a multiple of the one that it finds."""
    cache = vllm_config.cache_config
    if on() and cache.mamba_cache_mode == "align":
        cache.block_size = lcm(cache.block_size, invariance.CHUNK)
    original(cls, vllm_config, backend_cls)


# Whose calls ssmgen changes in the mode; all of them are needed for the promise.
AROUND: dict[str, Callable[..., Any]] = {
    f"{_SCHEDULER}.Scheduler.__init__": scheduler,
    f"{_SCHEDULER}.Scheduler.schedule": schedule,
    f"{_SCHEDULER}.Scheduler._mamba_block_aligned_split": split,
    f"{_SCHEDULER}.Scheduler._try_schedule_encoder_inputs": encoder_inputs,
    f"{_SCHEDULER}.Scheduler._get_local_prefix_cache_hit": prefix_hit,
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.cache_blocks": cache_blocks,
    "vllm.platforms.interface.Platform._align_hybrid_block_size": block_size,
}
