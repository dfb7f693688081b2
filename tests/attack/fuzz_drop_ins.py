"""Small valid calls of every drop-in function, from which the fuzzer starts."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_calls import (
    DIM,
    HK,
    I64,
    REPLAYED,
    SLOTS,
    TOKENS,
    WIDTH,
    Arguments,
    B,
    Form,
    H,
    K,
    N,
    P,
    T,
    V,
    decay,
    history,
    ints,
    mamba,
    mamba1,
    rand,
    ring_history,
)
from torch import Tensor

from ssmgen.compat import causal_conv1d, fla, flashinfer, mamba_ssm, sglang, trtllm, vllm
from ssmgen.compat.sglang import delta as sglang_delta


def _theirs(module: Any, name: str, given: Arguments, written: str = "", id: str = "") -> Form:
    package = module.__name__.rpartition(".")[2]
    return Form(f"{package}.{name}{'-' if id else ''}{id}", getattr(module, name), given, tuple(written.split()), False)


def _dao() -> list[Form]:
    x, states = {"x": rand(B, DIM, T), "weight": rand(DIM, WIDTH), "bias": rand(DIM)}, rand(B, DIM, WIDTH - 1)
    final = {"initial_states": states, "return_final_states": True, "final_states_out": rand(B, DIM, WIDTH - 1), "activation": "swish"}
    update = x | {"conv_state": rand(SLOTS, DIM, WIDTH), "conv_state_indices": ints(2, 0), "cache_seqlens": ints(0, 5)}
    ssu = mamba1() | {"state_batch_indices": ints(1, 3)}
    rotation = {"q": rand(B, 2, H, N), "k": rand(B, 2, H, N), "angle_state": rand(B, H, 3), "angle_proj": rand(B, H, 3), "dt": rand(B, H)}
    rotation |= {"bias_q": rand(2, H, N), "bias_k": rand(2, H, N)}
    return [
        _theirs(mamba_ssm, "apply_rotary_qk_inference_fwd", rotation),
        _theirs(mamba_ssm, "apply_rotary_qk_inference_fwd", rotation | {"inplace": True}, "q k angle_state", "in-place"),
        _theirs(mamba_ssm, "selective_state_update", ssu, "state"),
        _theirs(causal_conv1d, "causal_conv1d_fn", x | final, "final_states_out"),
        _theirs(causal_conv1d, "causal_conv1d_update", update, "conv_state"),
        _theirs(causal_conv1d, "causal_conv1d_varlen_states", {"x": rand(TOKENS, DIM), "cu_seqlens": ints(0, 2, 5), "state_len": WIDTH}),
    ]


def _fla() -> list[Form]:
    def operands(lead: tuple[int, int]) -> Arguments:
        keys = {n: rand(*lead, H, K) / 3 for n in ("q", "k", "p", "kk", "kb", "r")}
        gates = {"g": decay(*lead, H), "gk": decay(*lead, H, K), "w": decay(*lead, H, K), "gv": decay(*lead, H, V)}
        return keys | gates | {"v": rand(*lead, H, V), "beta": rand(*lead, H), "write": rand(*lead, H, V)}

    raw = {"use_gate_in_kernel": True, "A_log": rand(H), "dt_bias": rand(H)}
    cases = {
        "recurrent_gated_delta_rule": ("q k v g beta", raw | {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}),
        "recurrent_kda": ("q k v g=gk beta", raw | {"dt_bias": rand(H * K), "lower_bound": -5.0}),
        "recurrent_gdn2": ("q k v g=gk b=gk w=write", {}),
        "recurrent_delta_rule": ("q k v beta", {}),
        "recurrent_comba": ("q k p v g beta", {}),
        "recurrent_gla": ("q k v gk gv", {}),
        "recurrent_simple_gla": ("q k v g", {}),
        "recurrent_lightning_attn": ("q k v", {"layer_idx": 1, "num_layers": 4}),
        "mul_recurrent_rwkv7": ("r w k v kk a=kb", {}),
        "recurrent_rwkv7": ("r w k v a=p b=kb", {}),
        "recurrent_dplr_delta_rule": ("q k v a=p b=kb gk", {}),
    }
    forms = []
    for name, (takes, more) in cases.items():
        for lead, id, pool in ((B, T), "padded", B), ((1, TOKENS), "packed", 2):
            bag = operands(lead)
            given = {n: bag[m or n].clone() for n, _, m in (word.partition("=") for word in takes.split())} | dict(more)
            given |= {"scale": 0.5, "initial_state": rand(pool, H, K, V), "output_final_state": True}
            given |= {"cu_seqlens": ints(0, 2, 5, dtype=I64)} if id == "packed" else {}
            forms.append(_theirs(fla, f"fused_{name}", given, "", id))
    return forms


def gdn(lead: tuple[int, ...] = (B, T)) -> Arguments:
    """The operands of a gated delta rule whose gate is raw and whose beta is a logit."""
    given = {"q": rand(*lead, HK, K), "k": rand(*lead, HK, K), "v": rand(*lead, H, V), "a": rand(*lead, H), "b": rand(*lead, H)}
    return given | {"A_log": rand(H), "dt_bias": rand(H)}


def _flashinfer() -> list[Form]:
    pool, index = rand(SLOTS, H, V, K), ints(1, 3)
    pre = {"state": None, "initial_state": pool, "initial_state_indices": index, "output_state_indices": ints(0, 2)}
    kept = {"intermediate_states_buffer": rand(B, T, H, V, K), "output": rand(B, T, H, V)}
    mtp = {"initial_state": pool.clone(), "initial_state_indices": ints(1, 3, dtype=I64), "ssm_state_indices": ints([0, 1, 2], [3, 0, -1])}
    buffer = {"intermediate_states_buffer": rand(SLOTS, T, H, P, N), "cache_steps": T, "state_batch_indices": ints(1, 3)}
    tree = {"disable_state_update": True, "intermediate_state_indices": ints(0, 2), "algorithm": "simple", "out": rand(B, T, H, P)}
    table = {"state_batch_indices": ints([0, 1, 2], [3, -1, 5]), "num_accepted_tokens": ints(0, 2), "cu_seqlens": ints(0, 2, 5)}
    table |= {"dst_state_batch_indices": ints([0, 1, 2], [3, -1, 5])}
    a, s = rand(B, H, 8), rand(B, H)
    pair = {"v": a, "s": s, "v_other": rand(B, H, 8), "s_other": rand(B, H), "mask": torch.tensor([True, False])}
    merge = {"v_a": a.clone(), "s_a": s.clone(), "v_b": rand(B, H, 8), "s_b": rand(B, H)}
    ragged = {"v": rand(TOKENS, H, 8), "s": rand(TOKENS, H), "indptr": ints(0, 2, 5)}
    old = ring_history()
    cache = {"x_cache": rand(SLOTS, H, 8, P), "B_cache": rand(SLOTS, 2, 8, N), "dt_cache": old["old_dt"], "ring_start": old["ring_start"]}
    cache |= {"prev_num_accepted_tokens": old["prev_num_accepted_tokens"], "state_batch_indices": ints(2, 0)}
    written = "state initial_state intermediate_states_buffer output out"
    return [
        _theirs(flashinfer, "gated_delta_rule_decode_pretranspose", gdn() | pre | kept, written, "pool"),
        _theirs(flashinfer, "gated_delta_rule_decode_pretranspose", gdn() | {"state": rand(B, H, V, K)}, written, "state"),
        _theirs(flashinfer, "gated_delta_rule_decode", gdn((B, 1)) | {"state": rand(B, H, K, V), "scale": 0.5}, written),
        _theirs(flashinfer, "gated_delta_rule_mtp", gdn() | mtp | {"disable_state_update": False}, written),
        _theirs(flashinfer, "selective_state_update", mamba() | {"state_batch_indices": ints([1], [3])}, written, "one"),
        _theirs(flashinfer, "selective_state_update", mamba((B, T)) | buffer | tree, written, "tokens"),
        _theirs(flashinfer, "selective_state_update", mamba((TOKENS,)) | table, written, "accepted"),
        _theirs(flashinfer, "merge_state", merge),
        _theirs(flashinfer, "merge_state_in_place", pair, "v s"),
        _theirs(flashinfer, "merge_states", {"v": rand(B, T, H, 8), "s": rand(B, T, H)}),
        _theirs(flashinfer, "variable_length_merge_states", ragged),
        _theirs(flashinfer, "checkpointing_ssu", expanded(mamba((B, T))) | cache | {"out": rand(B, T, H, P)}, CHECKPOINTED),
        _theirs(
            flashinfer, "checkpointing_ssu",
            expanded(mamba((1, TOKENS))) | cache | {"out": rand(1, TOKENS, H, P), "cu_seqlens": ints(0, 2, 5), "max_seqlen": T},
            CHECKPOINTED, "packed",
        ),
        _theirs(trtllm, "replay_selective_state_update", expanded(mamba((B, T))) | history() | slots_of("state_batch_indices"), REPLAYED),
    ]  # fmt: skip


CHECKPOINTED = "out state x_cache B_cache dt_cache ring_start prev_num_accepted_tokens"


def slots_of(name: str) -> Arguments:
    return {name: ints(2, 0), "out": rand(B, T, H, P)}


def expanded(given: Arguments) -> Arguments:
    """As those pass them who have one value per head."""
    A, D, bias, dt = given["A"], given["D"], given["dt_bias"], given["dt"]
    rows = {"D": D[:, None].expand(H, P).clone(), "dt_bias": bias[:, None].expand(H, P), "dt": dt[..., None].expand(*dt.shape, P)}
    return given | rows | {"A": A[:, None, None].expand(H, P, N)}


def _engines() -> list[Form]:
    """vLLM's and SGLang's."""
    heads = {n: t for n, t in expanded(mamba()).items() if n != "z"}
    table = {"state_batch_indices": ints([1, 0, 0], [3, 1, 1], [0, 0, 0]), "out": rand(B, H, P)}
    drafts = {"cu_seqlens": ints(0, 2, 5), "num_accepted_tokens": ints(0, 2), "out": rand(TOKENS, H, P)}
    kept = {"intermediate_states_buffer": rand(SLOTS, T, H, P, N), "cache_steps": T, "retrieve_parent_token": ints([-1, 0, 0], [-1, 0, 1])}
    kept |= {"disable_state_update": True, "intermediate_state_indices": ints(0, 2, 1), "out": rand(B, T, H, P)}
    x = {"x": rand(B, DIM), "conv_state": rand(SLOTS, DIM, WIDTH), "weight": rand(DIM, WIDTH), "bias": rand(DIM), "activation": "silu"}
    tokens = x | {"x": rand(B, DIM, T), "conv_state": rand(SLOTS, DIM, WIDTH + T)}
    slots = {"conv_state_indices": ints(2, 1, 3)}
    packed = {"x": rand(TOKENS, DIM), "query_start_loc": ints(0, 2, 5), "conv_state_indices": ints([2, 0], [1, 0])}
    prompts = {"x": rand(DIM, TOKENS), "weight": rand(DIM, WIDTH), "bias": rand(DIM), "conv_states": rand(SLOTS, DIM, WIDTH)}
    prompts |= {"query_start_loc": ints(0, 2, 5), "cache_indices": ints(2, 1), "has_initial_state": torch.tensor([True, False])}
    windows = {"intermediate_conv_window": rand(B, T, DIM, WIDTH - 1), "intermediate_state_indices": ints(1, 0, 0)}
    qkv = {"mixed_qkv": rand(B, 2 * HK * K + H * V), "a": rand(B, H), "b": rand(B, H), "A_log": rand(H), "dt_bias": rand(H), "scale": 0.5}
    qkv |= {"initial_state": rand(SLOTS, H, V, K), "out": rand(B, 1, H, V), "ssm_state_indices": ints(2, 1, 3)}
    gates = {"g": decay(B, T, H), "beta": rand(B, T, H)} | {n: t for n, t in gdn().items() if n in "qkv"}
    by_token = {"initial_state": rand(SLOTS, H, V, K), "ssm_state_indices": ints([1, 2, 3], [3, 0, 1]), "num_accepted_tokens": ints(1, 2)}
    logits = gdn((1, TOKENS)) | by_token | {"cu_seqlens": ints(0, 2, 5), "use_qk_l2norm_in_kernel": True}
    source = {"softplus_beta": 1.0, "softplus_threshold": 20.0, "initial_state_source": rand(SLOTS, H, V, K)}
    source |= {"initial_state_indices": ints(2, 1, 0)}
    steps = {"intermediate_states_buffer": rand(SLOTS, T, H, V, K), "cache_steps": T, "intermediate_state_indices": ints(2, 1, 0)}
    steps |= {"retrieve_parent_token": ints([0, 0, 0], [0, 0, 1])}
    tree = {"retrieve_next_token": ints([1, -1, -1], [1, 2, -1]), "retrieve_next_sibling": ints([-1, 2, -1], [-1, -1, -1])}
    tree |= {"retrieve_parent_token": ints([0] * T, [0] * T)}
    channels = {"a": rand(B, T, H, K), "dt_bias": rand(H * K), "is_kda": True, "lower_bound": -5.0}
    out = {"prefix_output": rand(T, H, 8), "suffix_output": rand(T, H, 8), "output": rand(T, H, 8)}
    lse = {"prefix_lse": rand(H, T), "suffix_lse": rand(H, T), "output_lse": rand(H, T)}
    merged = {n: t.clone() for n, t in out.items()} | {n: rand(T, H) for n in lse}
    ssu, update, rule = "selective_state_update", "causal_conv1d_update", "fused_sigmoid_gating_delta_rule_update"
    written = "out state conv_state conv_states initial_state initial_state_source intermediate_states_buffer intermediate_conv_window"

    def v(name: str, given: Arguments, id: str = "", more: str = "") -> Form:
        return _theirs(vllm, name, given, f"{written} {more}", id)

    def s(name: str, given: Arguments, id: str = "", more: str = "") -> Form:
        return _theirs(sglang, name, given, f"{written} {more}", id)

    return [
        v(ssu, heads | table, "step"),
        v(ssu, mamba((TOKENS,)) | table | drafts, "drafts"),
        v(update, x | slots, "one", "x"),
        v(update, tokens | slots | {"num_accepted_tokens": ints(1, 2, 1), "out": rand(B, DIM, T)}, "drafts", "x"),
        v(update, x | packed, "packed", "x"),
        v("causal_conv1d_fn", prompts),
        v("fused_recurrent_gated_delta_rule_packed_decode", qkv),
        v("fused_recurrent_gated_delta_rule", gates | by_token),
        v(rule, logits),
        v("merge_attn_states", out | lse, "", "output output_lse"),
        v("merge_attn_states", out | lse | {"prefill_tokens_with_context": 2}, "context", "output output_lse"),
        s(ssu, mamba() | slots_of("state_batch_indices") | {"out": rand(B, H, P)}, "step"),
        s(ssu, mamba((B, T)) | slots_of("state_batch_indices") | kept, "tree"),
        s(update, x | slots | {"cache_seqlens": ints(0, 5, 1)}, "ring", "x"),
        s("causal_conv1d_update_triton", tokens | slots | windows | {"num_accept_tokens": ints(1, 2, 1)}, "drafts"),
        s("causal_conv1d_update_triton", x | slots, "one"),
        s("causal_conv1d_update_triton", tokens | slots | tree, "tree", "retrieve_parent_token"),
        s("causal_conv1d_fn", prompts),
        s("fused_recurrent_gated_delta_rule_packed_decode", {n: t if t is None else _again(t) for n, t in qkv.items()}),
        s(rule, gdn() | source | {"disable_state_update": True}, "verify"),
        s(rule, gdn() | source | steps, "tree"),
        s(rule, gdn() | source | channels, "kda"),
        s("merge_state", merged, "", "output output_lse"),
    ]


def _again(t: Any) -> Any:
    return t.clone() if isinstance(t, Tensor) else t


def _prompts() -> list[Form]:
    """Mamba-2's, of all that have them."""

    def row(*lead: int) -> Arguments:
        return {n: t for n, t in mamba(lead).items() if n != "state"} | {"chunk_size": 2, "dt_limit": (0.0, 2.0)}

    name, starts, ids = "mamba_chunk_scan_combined", ints(0, 2, 5), ints([0, 0, 1, 1, 1])
    packed = {"cu_seqlens": starts, "seq_idx": ids, "return_varlen_states": True, "return_final_states": True}
    out, before = {"out": rand(1, TOKENS, H, P)}, {"initial_states": rand(2, H, P, N), "state_dtype": torch.float32}
    tracked = {"return_track_states": True, "track_seq_idx": ints(0, 1, dtype=I64), "track_end_locs": ints(1, 4)}
    varlen = row(TOKENS) | {"cu_seqlens": starts, "cu_chunk_seqlens": ints(0, 2, 4, 5), "last_chunk_indices": ints(0, 2)}
    varlen |= {"seq_idx": ints(0, 1, 1), "out": rand(TOKENS, H, P)}
    pool = {"final_states_out": rand(SLOTS, H, P, N), "final_state_indices": ints(3, 1)}
    return [
        _theirs(mamba_ssm, name, row(B, T) | {"initial_states": rand(B, H, P, N), "return_final_states": True}, "", "rows"),
        _theirs(mamba_ssm, name, row(1, TOKENS) | packed, "", "packed"),
        _theirs(vllm, f"{name}_varlen", varlen | before | {"return_intermediate_states": True}, "out", "chunks"),
        _theirs(vllm, f"{name}_varlen", varlen | before | pool, "out final_states_out", "states"),
        _theirs(vllm, f"{name}_varlen", {n: _again(t) for n, t in (varlen | pool).items()}, "out final_states_out", "pool"),
        _theirs(sglang, name, row(1, TOKENS) | packed | out | before | tracked, "out", "tracked"),
        _theirs(sglang, name, row(B, T) | {"out": rand(B, T, H, P), "return_intermediate_states": True}, "out", "rows"),
        _theirs(trtllm, name, row(1, TOKENS) | packed | {n: _again(t) for n, t in (out | before).items()}, "out"),
    ]


def _delta_prompts() -> list[Form]:
    """Those of delta rules, of all that have them."""
    name, starts, slots = "chunk_gated_delta_rule", ints(0, 2, 5), ints(3, 1)

    def row(*lead: int) -> Arguments:
        given = {n: t.to(torch.bfloat16) for n, t in gdn(lead).items() if n in "qkv"}
        return given | {"g": decay(*lead, H), "beta": rand(*lead, H).sigmoid()}

    packed = {"cu_seqlens": starts, "output_final_state": True, "initial_state": rand(2, H, V, K)}
    raw = {"use_gate_in_kernel": True, "A_log": rand(H), "dt_bias": rand(H), "use_beta_sigmoid_in_kernel": True, "scale": 0.5}
    pool = {"initial_state": rand(SLOTS, H, V, K), "state_indices": slots, "output_state": rand(SLOTS, H, V, K)}
    kept = {"state_checkpoints": rand(2, H, V, K), "checkpoint_cu_starts": ints(0, 1, 2), "checkpoint_every_n_tokens": 64}
    sixteen = {"initial_state": rand(SLOTS, H, V, K), "initial_state_indices": slots, "cu_seqlens": starts}
    kept_too = {n: _again(t) for n, t in (packed | kept).items()}
    kept_too |= {"output_state": rand(2, H, V, K).to(torch.bfloat16)}  # states of two dtypes
    tracked: Arguments = {"self": None, "cache_indices": slots, "query_start_loc": starts}
    tracked |= {"track_state": rand(2, H, V, K), "track_chunk_idx": ints(0, -1), "ssm_states": rand(SLOTS, H, V, K).to(torch.bfloat16)}
    return [
        _theirs(fla, name, row(1, TOKENS) | packed | raw | {"state_v_first": True}, "", "packed"),
        _theirs(fla, "chunk_delta_rule", {n: t for n, t in row(B, T).items() if n != "g"} | {"output_final_state": True}),
        _theirs(flashinfer, name, row(TOKENS) | {n: _again(t) for n, t in (packed | kept).items()}, "state_checkpoints", "states"),
        _theirs(flashinfer, name, row(TOKENS) | packed | pool, "output_state", "pool"),
        _theirs(flashinfer, name, row(TOKENS) | kept_too, "state_checkpoints output_state", "two"),
        _theirs(vllm, name, row(1, TOKENS) | packed | {"core_attn_out": rand(TOKENS * H * V).to(torch.bfloat16)}, "core_attn_out"),
        _theirs(vllm, f"fi_{name}", row(1, TOKENS) | {n: _again(t) for n, t in (packed | kept).items()}, "state_checkpoints"),
        _theirs(sglang, name, row(1, TOKENS) | sixteen, "initial_state"),
        _theirs(sglang_delta, "extend", row(1, TOKENS) | tracked, "ssm_states track_state"),
    ]


def _linear_prompts() -> list[Form]:
    """Those of linear attentions."""

    def row(names: str, *lead: int) -> Arguments:
        made = {n: rand(*lead, H, K) / 3 for n in ("q", "k", "p", "r", "erase")} | {"v": rand(*lead, H, V), "write": rand(*lead, H, V)}
        sixteen = {n: t.to(torch.bfloat16) for n, t in made.items()}
        given = sixteen | {"g": decay(*lead, H, K), "head": decay(*lead, H), "beta": rand(*lead, H).sigmoid()}
        return {n: given[m or n] for n, _, m in (word.partition("=") for word in names.split())}

    packed = {"cu_seqlens": ints(0, 2, 5), "output_final_state": True, "initial_state": rand(2, H, K, V)}
    turned, gate = packed | {"initial_state": rand(2, H, V, K)}, {"A_log": rand(H), "dt_bias": rand(H * K)}
    raw = gate | {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
    pool = {"initial_state": rand(SLOTS, H, V, K), "initial_state_indices": ints(3, 1), "cu_seqlens": ints(0, 2, 5)}
    tracked = {"track_state": rand(2, H, V, K), "track_chunk_idx": ints(0, -1), "output_intermediate_states": True}
    rows = {n: rand(B, H, 1, w) for n, w in (("q", K), ("k", K), ("v", V))}
    kimi = {"A_log": rand(H), "g_bias": rand(H * K), "lower_bound": -5.0, "out": rand(1, TOKENS, H, V).to(torch.bfloat16)}
    return [
        _theirs(fla, "chunk_kda", row("q k v g beta", 1, TOKENS) | packed | raw | {"use_beta_sigmoid_in_kernel": True}, "", "packed"),
        _theirs(fla, "chunk_kda", row("q k v g beta", B, T) | {"state_v_first": True, "output_final_state": True}, "", "rows"),
        _theirs(fla, "chunk_gdn2", row("q k v g b=erase w=write", 1, TOKENS) | {n: _again(t) for n, t in packed.items()}),
        _theirs(fla, "chunk_comba", row("q k v p g=head beta", 1, TOKENS) | packed),
        _theirs(fla, "chunk_gla", row("q k v g", 1, TOKENS) | packed),
        _theirs(fla, "chunk_rwkv7", row("r w=g k v a=p b=erase", 1, TOKENS) | packed),
        _theirs(fla, "chunk_dplr_delta_rule", row("q k v a=p b=erase gk=g", B, T) | {"output_final_state": True, "lower_bound": -9.0}),
        _theirs(fla, "chunk_simple_gla", row("q k v g=head", 1, TOKENS) | packed),
        _theirs(fla, "chunk_lightning_attn", row("q k v", B, T) | {"layer_idx": 1, "num_layers": 4, "output_final_state": True}),
        _theirs(vllm, "chunk_kda", row("q k v g beta", 1, TOKENS) | turned),
        _theirs(vllm, "chunk_kda_with_fused_gate", row("q k v raw_g=g raw_beta=beta", 1, TOKENS) | turned | kimi, "out"),
        _theirs(vllm, "chunk_kda_with_safe_gate", row("q k v raw_g=g beta", 1, TOKENS) | turned | {"A_log": rand(H), "g_bias": None}),
        _theirs(sglang, "chunk_kda", row("q k v g beta", 1, TOKENS) | pool | gate, "initial_state", "raw"),
        _theirs(sglang, "chunk_kda", row("q k v g beta", 1, TOKENS) | pool | tracked, "initial_state track_state", "tracked"),
        _theirs(sglang, "lightning_attention", rows | {"ed": rand(H).abs(), "kv_history": rand(B, H, K, V)}),
        _theirs(
            sglang, "linear_decode_forward_triton",
            rows | {"kv_caches": rand(SLOTS, H, K, V), "slope_rate": rand(H).abs(), "slot_idx": ints(3, 1)}, "kv_caches",
        ),
    ]  # fmt: skip


def drop_ins() -> list[Form]:
    """Calls with other packages' signatures, the same after every `native()`."""
    return [*_dao(), *_fla(), *_flashinfer(), *_engines(), *_prompts(), *_delta_prompts(), *_linear_prompts()]
