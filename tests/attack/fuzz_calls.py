"""Small valid calls of every public function, from which the fuzzer starts. fuzz_drop_ins.py has the calls of drop-in functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from family_cases import cases
from torch import Tensor

import ssmgen
from ssmgen.families.causal_conv1d_update.operands import CHILDREN
from ssmgen.families.linear_attention.operands import FUNCTIONS

Arguments = dict[str, Any]
F32, F16, BF16, I32, I64 = torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64
B, T, SLOTS, H, HK, P, N, K, V = 2, 3, 4, 4, 2, 4, 8, 8, 4  # sequences, tokens, slots, heads, key heads, sizes
DIM, WIDTH, TOKENS = 8, 4, 5  # channels and taps of a convolution; tokens of packed sequences


@dataclass(frozen=True)
class Form:
    """One way to call a function: its arguments by name, and which of them it may write ("ring.k" of a ring, "o.0" of a pair)."""

    id: str
    function: Callable[..., Any]
    arguments: Arguments
    written: tuple[str, ...]
    public: bool  # a function of ssmgen itself, which `supported` and `bind` know


_made = torch.Generator()


def rand(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=_made).to(dtype)


def decay(*shape: int) -> Tensor:
    return -rand(*shape).abs() / 4


def ints(*values: Any, dtype: torch.dtype = I32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _conv_update() -> list[Form]:
    def form(id: str, x: Tensor, length: int = WIDTH - 1, **more: Any) -> Form:
        given = {"x": x, "conv_state": rand(SLOTS, DIM, length), "weight": rand(DIM, WIDTH), "bias": rand(DIM), "activation": "silu"}
        return _native(ssmgen.causal_conv1d_update, id, given | more, "out conv_state intermediate_conv_window parents_out")

    slots = {"conv_state_indices": ints(2, 0)}
    windows = {"intermediate_conv_window": rand(B, T, DIM, WIDTH - 1), "intermediate_state_indices": ints(1, 0)}
    tree = ints([1, -1, -1], [1, 2, -1]), ints([-1, 2, -1], [-1, -1, -1]), ints([0] * T, [0] * T)
    return [
        form("one", rand(B, DIM), out=rand(B, DIM), pad_slot_id=-1, **slots),
        form("ring", rand(B, DIM, T), WIDTH + 2, cache_seqlens=ints(0, 5)),
        form("accepted", rand(B, DIM, T), WIDTH + T, num_accepted_tokens=ints(1, 2), **slots, **windows),
        form("packed", rand(TOKENS, DIM), query_start_loc=ints(0, 2, 5), **slots),
        form("parents", rand(B, DIM, T), parents=ints([-1, 0, 0], [-1, 0, 1]), **slots, **windows),
        form("children", rand(B, DIM, T), **dict(zip(CHILDREN, tree, strict=True)), **slots),
    ]


def _conv() -> list[Form]:
    def form(id: str, x: Tensor, **more: Any) -> Form:
        given = {"x": x, "weight": rand(DIM, WIDTH), "bias": rand(DIM), "activation": "silu"}
        return _native(ssmgen.causal_conv1d, id, given | more, "out conv_states final_states_out")

    state = rand(B, DIM, WIDTH - 1)
    pool = {"conv_states": rand(SLOTS, DIM, WIDTH - 1), "conv_state_indices": ints(3, 1), "has_initial_state": torch.tensor([True, False])}
    return [
        form("states", rand(B, DIM, T), initial_states=state, return_final_states=True, final_states_out=rand(B, DIM, WIDTH - 1)),
        form("seq_idx", rand(B, DIM, T), seq_idx=ints([0, 0, 1], [0, 1, 1]), return_final_states=True, out=rand(B, DIM, T)),
        form("packed", rand(DIM, TOKENS), query_start_loc=ints(0, 2, 5), pad_slot_id=-1, **pool),
    ]


def _combine() -> list[Form]:
    def form(id: str, o: Any, lse: Any, **more: Any) -> Form:
        return _native(ssmgen.combine_splits, id, {"o": o, "lse": lse} | more, "out lse_out")

    pair = (rand(B, H, 8), rand(B, H, 8)), (rand(B, H), rand(B, H))
    masked = {"mask": torch.tensor([[True], [False]]), "attn_sink": rand(H), "out": rand(B, H, 8), "lse_out": rand(B, H)}
    return [
        form("splits", rand(T, B, H, 8), rand(T, B, H), return_lse=True, lse_base=2, lse_base_out="e", **masked),
        form("pair", *pair, out=rand(B, H, 8), lse_out=rand(B, H), empty_lse=float("inf")),
        form("indexed", rand(TOKENS, H, 8), rand(TOKENS, H), num_splits=ints(0, 2, 5), skip_single=True, out=rand(2, H, 8)),
    ]


def _norm() -> list[Form]:
    x = {"x": rand(B, T, H, P), "gate": rand(B, T, H, P), "weight": rand(P), "eps": 1e-5}
    sums = {"x": rand(B, H * P, dtype=BF16), "residual": rand(B, H * P), "residual_out": rand(B, H * P), "out": rand(B, H * P)}
    flat = {"x": rand(B, H * P, dtype=BF16), "gate": rand(B, H * P), "weight": rand(H, P), "group_size": P, "out": rand(B, H * P)}
    return [
        _native(ssmgen.gated_rms_norm, "heads", x | {"norm_before_gate": True, "activation": "sigmoid"}, "out"),
        _native(ssmgen.gated_rms_norm, "flat", flat, "out"),
        _native(ssmgen.gated_layer_norm, "heads", x | {"bias": rand(P), "norm_before_gate": True}, "out"),
        _native(ssmgen.rms_norm, "plain", {"x": rand(B, T, P), "weight": rand(P), "eps": 1e-5, "out": rand(B, T, P)}, "out"),
        _native(ssmgen.rms_norm, "sum", sums, "out residual_out"),
    ]


def mamba(lead: tuple[int, ...] = (B,), slots: int = SLOTS, state: torch.dtype = F32) -> Arguments:
    return {
        "state": rand(slots, H, P, N, dtype=state), "x": rand(*lead, H, P), "dt": rand(*lead, H), "A": decay(H),
        "B": rand(*lead, 2, N), "C": rand(*lead, 2, N), "D": rand(H), "z": rand(*lead, H, P), "dt_bias": rand(H), "dt_softplus": True,
    }  # fmt: skip


def _scan() -> list[Form]:
    def form(id: str, *lead: int, **more: Any) -> Form:
        given = {n: t for n, t in mamba(lead).items() if n != "state"}
        return _native(ssmgen.chunk_scan, id, given | more, "out state final_states_out checkpoints_out")

    marks = {"checkpoint_positions": ints(1, 4), "checkpoints_out": rand(2, H, P, N), "return_checkpoints": True}
    pool = {"state": rand(SLOTS, H, P, N), "state_indices": ints(3, 1), "has_initial_state": torch.tensor([True, False])}
    states = {"initial_states": rand(B, H, P, N), "return_final_states": True, "final_states_out": rand(B, H, P, N)}
    return [
        form("states", B, T, out=rand(B, T, H, P), dt_limit=(0.0, 2.0), **states),
        form("ids", B, T, seq_idx=ints([0] * T, [*[1] * (T - 1), 2]), **marks),
        form("packed", TOKENS, cu_seqlens=ints(0, 2, 5), pad_slot_id=-1, **pool),
        form("elsewhere", B, T, state=rand(SLOTS, H, P, N), state_indices=ints(3, 1), initial_states=rand(B, H, P, N)),
    ]


def _attention() -> list[Form]:
    def form(function: Callable[..., Any], id: str, *lead: int, **more: Any) -> Form:
        given = {"q": rand(*lead, HK, K), "k": rand(*lead, HK, K), "v": rand(*lead, H, V), "out": rand(*lead, H, V), "scale": 0.5}
        return _native(function, id, given | more, "out state final_states_out")

    pool = {"state": rand(SLOTS, H, V, K), "state_indices": ints(3, 1), "has_initial_state": torch.tensor([True, False])}
    states = {"initial_states": rand(B, H, V, K), "return_final_states": True, "final_states_out": rand(B, H, V, K)}
    return [
        form(ssmgen.chunk_simple_gla, "states", B, T, g=decay(B, T, H), **states),
        form(ssmgen.chunk_simple_gla, "packed", TOKENS, g=decay(H), cu_seqlens=ints(0, 2, 5), pad_slot_id=-1, **pool),
        form(ssmgen.chunk_lightning_attn, "states", B, T, slope=-decay(H), **states),
    ]


def mamba1() -> Arguments:
    row = {n: rand(B, DIM) for n in ("x", "dt", "z")}
    given = {"state": rand(SLOTS, DIM, N), **row, "A": decay(DIM, N), "B": rand(B, N), "C": rand(B, N), "D": rand(DIM)}
    given |= {"dt_bias": rand(DIM)}
    order = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    return {n: given[n] for n in order} | {"dt_softplus": True}


def accepted() -> Arguments:
    """The operands that give, for two sequences of three tokens, the initial slots and the destinations of states."""
    table = ints([0, 1, 2], [3, -1, 5])
    return {"state_indices": table, "dst_state_indices": table.clone(), "num_accepted_tokens": ints(1, 2)}


def _ssu() -> list[Form]:
    def form(id: str, given: Arguments, **more: Any) -> Form:
        return _native(ssmgen.selective_state_update, id, given | more, "out state intermediate_states")

    slots, kept = {"state_indices": ints(1, 3)}, rand(B, T, H, P, N)
    table = accepted()
    parents = {"parents": ints([-1, 0, 0], [-1, 0, 1]), "intermediate_states": kept, "intermediate_state_indices": ints(1, 0)}
    seed = {"rand_seed": ints(7, dtype=I64), "philox_rounds": 10, "dst_state_indices": ints(0, 2), "pad_slot_id": -1}
    return [
        form("mamba1", mamba1(), dt_limit=(0.0, 8.0), out=rand(B, DIM), **slots),
        form("heads", mamba(state=F16), **slots, **seed),
        form("accepted", mamba((TOKENS,)), cu_seqlens=ints(0, 2, 5), **table),
        form("tree", mamba((B, T)), update_state=False, **slots, **parents),
    ]


def rule(name: str, lead: tuple[int, ...] = (B,)) -> Arguments:
    """Operands of a linear-attention function."""
    keys, values = lambda: rand(*lead, HK, K) / 3, lambda: rand(*lead, H, V)
    given: Arguments = {"state": rand(SLOTS, H, V, K), "q": keys(), "k": keys(), "v": values()}
    more: dict[str, Callable[[], Arguments]] = {
        "gated_delta_rule": lambda: {"g": rand(*lead, H), "beta": rand(*lead, H), "A_log": rand(H), "dt_bias": rand(H)},
        "kda": lambda: {"g": rand(*lead, H, K), "beta": rand(*lead, H), "A_log": rand(H), "dt_bias": rand(H * K), "lower_bound": -5.0},
        "gdn2": lambda: {"g": decay(*lead, H, K), "b": rand(*lead, H, K), "w": values()},
        "delta_rule": lambda: {"beta": rand(*lead, H, V), "beta_sigmoid": True},
        "comba": lambda: {"p": keys(), "g": decay(*lead, H), "beta": rand(*lead, H)},
        "rwkv6": lambda: {"u": rand(H, K)},
        "rwkv7": lambda: {"kk": keys(), "a": keys()},
        "dplr_delta_rule": lambda: {"a": keys(), "b": keys(), "gk": decay(*lead, H, K)},
        "gla": lambda: {"gk": decay(*lead, H, K), "gv": decay(*lead, H, V)},
        "simple_gla": lambda: {"g": decay(*lead, H)},
        "lightning_attn": lambda: {"slope": rand(H).abs()},
    }
    if name.startswith("rwkv"):
        given = {"state": given["state"], "r": given["q"], "w": decay(*lead, H, K), "k": given["k"], "v": given["v"]}
    return given | more[name]()


RULES = tuple(name for name, function in FUNCTIONS.items() if not function.commit)


def ring(per_channel: bool = False) -> Any:
    return ssmgen.Ring(rand(SLOTS, T, HK, K), rand(SLOTS, T, H, V), rand(SLOTS, T, H, *[K] * per_channel), rand(SLOTS, T, H))


def _rules() -> list[Form]:
    written = "out state intermediate_states ring.k ring.v ring.g ring.beta"

    def form(id: str, name: str, lead: tuple[int, ...] = (B,), **more: Any) -> Form:
        return _native(getattr(ssmgen, name), id, rule(name, lead) | more, written)

    slots = {"state_indices": ints(2, 0)}
    table = accepted()
    kept = {"intermediate_states": rand(B, T, H, V, K)}
    forms = [form("one", name, **slots) for name in RULES]
    forms += [form("tokens", name, (B, T), scale=0.5, out=rand(B, T, H, V), **kept) for name in RULES]
    for name, per_channel in (("gated_delta_rule", False), ("kda", True)):
        forms += [
            form("ring", name, (B, T), update_state=False, ring=ring(per_channel), use_qk_l2norm=True, **slots),
            form("packed", name, (TOKENS,), cu_seqlens=ints(0, 2, 5), beta_sigmoid=True, pad_slot_id=-1, **table),
            form("tree", name, (B, T), parents=ints([-1, 0, 0], [-1, 0, 1]), intermediate_state_indices=ints(1, 0), **kept, **slots),
            form("kv", name, state_layout="kv", state=rand(SLOTS, H, K, V), dst_state_indices=ints(1, 3), **slots),
        ]
    gates = {"A_log": rand(H), "dt_bias": rand(H)}
    commit = {"state": rand(SLOTS, H, V, K), "ring": ring(), "num_accepted_tokens": ints(1, 2)}
    layers = {"state": rand(2, SLOTS, H, V, K), "ring": ssmgen.Ring(*[torch.stack((t, t)) for t in ring(True)])}
    layers |= {"num_accepted_tokens": ints(1, 2), "A_log": rand(2, H), "dt_bias": rand(2, H, K), "lower_bound": -4.0}
    forms += [_native(ssmgen.gated_delta_rule_commit, "one", commit | gates | slots, "state")]
    return [*forms, _native(ssmgen.kda_commit, "layers", layers | slots | {"pad_slot_id": -1}, "state")]


def _layers() -> list[Form]:
    written = "out state conv_state arrivals intermediate_states intermediate_conv_window"
    groups, channels, delta = 2, H * P + 2 * 2 * N, 2 * HK * K + H * V
    forms = []
    for lead, id in ((B,), "one"), ((B, T), "tokens"), ((B, T), "accepted"):
        several: Arguments = {}
        if id == "tokens":
            several = {"intermediate_state_indices": ints(1, 0), "update_state": False, "state_indices": ints(1, 3)}
        if id == "accepted":
            several = accepted()

        def window(size: int, id: str = id) -> Arguments:
            kept = {"intermediate_conv_window": rand(B, T, size, WIDTH - 1)} if id == "tokens" else {}
            length = WIDTH - 1 if id != "accepted" else WIDTH + T
            return kept | {"conv_state": rand(SLOTS, size, length), "conv_weight": rand(size, WIDTH), "conv_bias": rand(size)}

        kept = {"intermediate_states": rand(B, T, H, P, N)} if id == "tokens" else {}
        mamba2 = {"xBC": rand(*lead, channels), "dt": rand(*lead, H), "z": rand(*lead, H * P), "state": rand(SLOTS, H, P, N)}
        mamba2 |= {"arrivals": torch.zeros(SLOTS, groups, dtype=I32), "A": decay(H), "D": rand(H), "dt_bias": rand(H), **window(channels)}
        forms += [_native(ssmgen.mamba2_layer, id, mamba2 | {"norm_weight": rand(H * P), "norm_eps": 1e-5} | several | kept, written)]
        both = {"z": rand(*lead, H * V), "state": rand(SLOTS, H, V, K), "arrivals": torch.zeros(SLOTS, HK, dtype=I32), **window(delta)}
        both |= {"mixed_qkv": rand(*lead, delta), "A_log": rand(H), "norm_weight": rand(V), "scale": 0.5, "pad_slot_id": -1} | several
        both |= {"intermediate_states": rand(B, T, H, V, K)} if id == "tokens" else {}
        forms += [_native(ssmgen.gdn_layer, id, both | {"a": rand(*lead, H), "b": rand(*lead, H), "dt_bias": rand(H)}, written)]
        per_channel = {"g": rand(*lead, H, K), "beta": rand(*lead, H), "dt_bias": rand(H * K), "lower_bound": -5.0}
        forms += [_native(ssmgen.kda_layer, id, both | per_channel, written)]
    return forms


REPLAYED = "out state old_x old_B old_dt old_dA_cumsum cache_buf_idx ring_start prev_num_accepted_tokens rand_seed arrivals"


def history() -> Arguments:
    both = {n: rand(SLOTS, 2, H, T).abs() for n in ("old_dt", "old_dA_cumsum")}
    counts = {"cache_buf_idx": ints(0, 1, 0, 1), "prev_num_accepted_tokens": ints(0, 1, 2, 3)}
    return {"old_x": rand(SLOTS, T, H, P), "old_B": rand(SLOTS, 2, T, 2, N)} | both | counts


def ring_history(R: int = 8) -> Arguments:
    counts = {"ring_start": ints(0, 1, 2, 7), "prev_num_accepted_tokens": ints(0, 1, 2, 3)}
    return {"old_x": rand(SLOTS, R, H, P), "old_B": rand(SLOTS, R, 2, N), "old_dt": rand(SLOTS, H, R).abs()} | counts


def _replay() -> list[Form]:
    slots, step = {"state_indices": ints(2, 0)}, ssmgen.replay_selective_state_update
    noisy = {"rand_seed": ints(7, dtype=I64), "arrivals": torch.zeros(SLOTS, dtype=I32), "pad_slot_id": -1, "out": rand(B, T, H, P)}
    packed = {"cu_seqlens": ints(0, 2, 5), "max_tokens": T}
    A, state = {"A": decay(H), "max_tokens": T}, {"state": rand(SLOTS, H, P, N)}
    return [
        _native(step, "noisy", mamba((B, T), state=F16) | history() | slots | noisy, REPLAYED),
        _native(step, "two", mamba((B, T)) | history() | slots | {"two_kernels": True, "precision": "bf16x2"}, REPLAYED),
        _native(ssmgen.checkpoint_selective_state_update, "packed", mamba((TOKENS,)) | ring_history() | slots | packed, REPLAYED),
        _native(ssmgen.materialize_selective_state, "step", state | history() | slots, "out"),
        _native(ssmgen.materialize_selective_state, "ring", state | ring_history() | A | {"out": rand(SLOTS, H, P, N)}, "out"),
    ]


def _native(function: Callable[..., Any], id: str, given: Arguments, written: str) -> Form:
    return Form(f"{function.__name__}-{id}", function, given, tuple(written.split()), True)


def _own() -> list[Form]:
    """Forms of calls of families that bring their cases themselves."""
    forms = []
    for name, call in cases("CALLS").items():
        function, given = getattr(ssmgen, name), call()
        forms.append(_native(function, "own", given, " ".join(function.build(**given).caller.family.written)))
    return forms


def native() -> list[Form]:
    """Calls of ssmgen's own functions, the same every time."""
    _made.manual_seed(0)
    return [*_conv_update(), *_conv(), *_scan(), *_attention(), *_combine(), *_norm(), *_ssu(), *_rules(), *_layers(), *_replay(), *_own()]
