"""Drop-in signatures of other packages, against each recurrence as a loop in float64 (states are [K, V])."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ssmgen.compat import fla, flashinfer
from ssmgen.errors import ArgumentError

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
K, V, H = 12, 20, 2


def bag(B: int = 2, T: int = 3, HV: int = H) -> dict[str, Tensor]:
    """Operands of all functions. Operands used as keys have length about one."""
    made = torch.Generator().manual_seed(B + 10 * T)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    x = {n: randn(B, T, H, K) / K**0.5 for n in ("k", "p", "kk", "kb")} | {"q": randn(B, T, H, K), "v": randn(B, T, HV, V)}
    x |= {"g": -randn(B, T, HV).abs(), "gk": -randn(B, T, HV, K).abs(), "gv": -randn(B, T, HV, V).abs(), "gamma": -randn(HV).abs()}
    x |= {"raw": randn(B, T, HV), "rawk": randn(B, T, HV, K), "A": randn(HV), "bias": randn(HV), "biask": randn(HV * K)}
    x |= {"beta": randn(B, T, HV).sigmoid(), "betav": randn(B, T, HV, V).sigmoid(), "logit": 2 * randn(B, T, HV)}
    return x | {"a": randn(B, T, H, K).sigmoid(), "erase": randn(B, T, HV, K).sigmoid(), "w": randn(B, T, HV, V)}


def with_derived(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The bag in float64, with the values that the functions derive from raw operands."""
    x = {n: t.double() for n, t in x.items()}
    A, biased = x["A"].exp(), x["rawk"] + x["biask"].unflatten(0, (-1, K))
    x |= {n + "_unit": x[n] / (x[n].square().sum(-1, keepdim=True) + 1e-6).sqrt() for n in "qkp"}
    x |= {"zero": 0 * x["g"], "one": 0 * x["g"] + 1, "each_gamma": x["gamma"].expand(x["g"].shape)}
    x |= {"gate": -A * (x["raw"] + x["bias"]).exp().log1p(), "gatek": -A[:, None] * biased.exp().log1p()}
    x |= {"bounded": -5 * (A[:, None] * biased).sigmoid(), "bounded_bare": -5 * x["rawk"].sigmoid()}
    x |= {"sigmoid": x["logit"].sigmoid(), "twice": 2 * x["logit"].sigmoid(), "sigmoid_one": (0 * x["g"] + 1).sigmoid()}
    slope = 8 / H * (1 - 1 / 4) * torch.arange(x["g"].shape[2], dtype=torch.float64)
    return x | {"minus_slope": -slope.expand(x["g"].shape), "minus_kk": -x["kk"], "kk_a": x["kk"] * x["a"]}


# The recurrences: the new state of one head, from the old one and its operands of one token.


def delta(S, k, v, g, beta, **_):
    S = g.exp().reshape(-1, 1) * S
    return S + torch.outer(k, beta * (v - k @ S))


def gdn2(S, k, v, g, b, w, **_):
    S = g.exp()[:, None] * S
    return S + torch.outer(k, w * v - (b * k) @ S)


def comba(S, k, v, p, g, beta, **_):
    return g.exp() * S + torch.outer(k, beta * (v - p @ S))


def low_rank(S, k, v, a, b, g, **_):
    return g.exp()[:, None] * S + torch.outer(b, a @ S) + torch.outer(k, v)


def linear(S, k, v, g, gv=None, **_):
    return g.exp().reshape(-1, 1) * (S if gv is None else S * gv.exp()) + torch.outer(k, v)


def expected(
    step, x: dict[str, Tensor], start: Tensor, scale: float = K**-0.5, cu: list[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, final states, states after each token) of operands [B, T, heads, …]; start [N, HV, K, V]."""
    B, T, HV = x["v"].shape[:3]
    sequences = [(n, range(T)) for n in range(B)] if cu is None else [(0, range(*ends)) for ends in pairwise(cu)]
    out, final, each = x["v"].new_zeros(B, T, HV, V), start.double().clone(), x["v"].new_zeros(B, T, HV, K, V)
    for n, (row, tokens) in enumerate(sequences):
        for h in range(HV):
            for t in tokens:
                at = {name: operand[row, t, h // (HV // operand.shape[2])] for name, operand in x.items()}
                final[n, h] = each[row, t, h] = step(final[n, h], **at)
                out[row, t, h] = scale * at["q"] @ final[n, h]
    return out, final, each


def close(got: Tensor, want: Tensor) -> bool:
    """Within a rounding to the dtype, and the roundings of a few f32 sums of K terms per token."""
    size = want.abs().max().item() + 1
    bound = size * (torch.finfo(got.dtype).eps / 2 + 8 * (K + 8) * torch.finfo(F32).eps)
    return got.shape == want.shape and (got.double() - want).abs().max().item() <= bound


NORM, GATE = {"use_qk_l2norm_in_kernel": True}, {"use_gate_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
UNIT = "q=q_unit k=k_unit "
# id -> (function after "fused_", positional arguments in the bag ("-": None), keywords, recurrence, its operands in the derived bag)
CASES = {
    "gdn": ("recurrent_gated_delta_rule", "q k v g - - beta", {"scale": 0.3}, delta, "g=g beta=beta"),
    "gdn-bare": ("recurrent_gated_delta_rule", "q k v", {}, delta, "g=zero beta=one"),
    "gdn-gk-betav": ("recurrent_gated_delta_rule", "q k v - gk - betav", {}, delta, "g=gk beta=betav"),
    "gdn-raw": (
        "recurrent_gated_delta_rule", "q k v raw - - logit",
        NORM | GATE | SIGMOID | {"allow_neg_eigval": True, "A_log": "A", "dt_bias": "bias"}, delta, UNIT + "g=gate beta=twice",
    ),
    "gdn-gate-off": ("recurrent_gated_delta_rule", "q k v g", SIGMOID | {"A_log": "A", "dt_bias": "bias"}, delta, "g=g beta=sigmoid_one"),
    "kda": ("recurrent_kda", "q k v gk betav", {}, delta, "g=gk beta=betav"),
    "kda-raw": ("recurrent_kda", "q k v rawk logit A biask", NORM | GATE | SIGMOID, delta, UNIT + "g=gatek beta=sigmoid"),
    "kda-bounded": ("recurrent_kda", "q k v rawk beta A biask", GATE | {"lower_bound": -5.0}, delta, "g=bounded beta=beta"),
    "kda-bounded-no-A": ("recurrent_kda", "q k v rawk beta", GATE | {"lower_bound": -5.0}, delta, "g=bounded_bare beta=beta"),
    "gdn2": ("recurrent_gdn2", "q k v gk erase w", {}, gdn2, "g=gk b=erase w=w"),
    "gdn2-raw": ("recurrent_gdn2", "q k v rawk erase w A biask", NORM | GATE, gdn2, UNIT + "g=gatek b=erase w=w"),
    "delta_rule": ("recurrent_delta_rule", "q k v beta", NORM, delta, UNIT + "g=zero beta=beta"),
    "delta_rule-bare": ("recurrent_delta_rule", "q k v", {}, delta, "g=zero beta=one"),
    "comba": ("recurrent_comba", "q k p v g beta", NORM, comba, UNIT + "p=p_unit g=g beta=beta"),
    "comba-bare": ("recurrent_comba", "q k - v g", {}, comba, "p=k g=g beta=one"),
    "gla": ("recurrent_gla", "q k v gk gv", {}, linear, "g=gk gv=gv"),
    "simple_gla": ("recurrent_simple_gla", "q k v g", {}, linear, "g=g"),
    "simple_gla-gamma": ("recurrent_simple_gla", "q k v - gamma", {"scale": 2.0}, linear, "g=each_gamma"),
    "lightning": ("recurrent_lightning_attn", "q k v", {"layer_idx": 1, "num_layers": 4}, linear, "g=minus_slope"),
    "dplr": ("recurrent_dplr_delta_rule", "q k v p kb gk", {}, low_rank, "a=p b=kb g=gk"),
    "rwkv7": ("recurrent_rwkv7", "q gk k v p kb", {}, low_rank, "a=p b=kb g=gk"),
    "rwkv7-mul": ("mul_recurrent_rwkv7", "q gk k v kk a", {}, low_rank, "a=minus_kk b=kk_a g=gk"),
}  # fmt: skip
OF_V_DTYPE = ("gdn", "kda", "gdn2", "dplr", "rwkv7")  # o has the dtype of v here; the others' has the dtype of q
MORE_VALUE_HEADS = ("gdn", "kda", "gdn2", "comba")
HAVE_V_FIRST = ("gdn", "kda", "gdn2", "gla", "simple_gla")
RUNS = ["t1", "t3-initial", "t3-initial-bf16", "packed", "packed-initial", "v_first-initial", "no_final-initial"]


@pytest.mark.parametrize(("case", "run"), [(c, r) for c in CASES for r in RUNS if "v_first" not in r or c.split("-")[0] in HAVE_V_FIRST])
def test_fla_against_the_recurrence(case, run):
    name, positional, keywords, step, names = CASES[case]
    function, family = getattr(fla, "fused_" + name), case.split("-")[0]
    cu = [0, 2, 2, 5] if "packed" in run else None
    x = bag(1 if cu else 2, 5 if cu else 1 if "t1" in run else 3, 2 * H if family in MORE_VALUE_HEADS else H)
    if "bf16" in run:
        x |= {n: t.bfloat16() for n, t in x.items() if n != "v"}
    start = torch.randn(3 if cu else 2, x["v"].shape[2], K, V, generator=torch.Generator().manual_seed(1)) * ("initial" in run)
    scale = 1.0 if name == "mul_recurrent_rwkv7" else keywords.get("scale", K**-0.5)
    X = with_derived(x)
    want_o, want, _ = expected(step, {n: X[t] for n, t in (p.split("=") for p in f"q=q k=k v=v {names}".split())}, start, scale, cu)
    initial = (start.mT if "v_first" in run else start).contiguous()
    options = {k: x[v] if isinstance(v, str) else v for k, v in keywords.items()}
    options |= ({"initial_state": initial.clone()} if "initial" in run else {}) | ({"cu_seqlens": torch.tensor(cu)} if cu else {})
    options |= {"state_v_first": True} if "v_first" in run else {}
    o, final = function(*(x.get(n) for n in positional.split()), **options, output_final_state="no_final" not in run)
    assert o.dtype == (x["v"] if family in OF_V_DTYPE else x["q"]).dtype and o.is_contiguous() and close(o, want_o)
    assert "initial" not in run or torch.equal(options["initial_state"], initial), "initial_state was written"
    if "no_final" in run:
        assert final is None
    else:
        assert final.dtype == F32 and final.is_contiguous() and close(final.mT if "v_first" in run else final, want)


def fla_call(name: str = "recurrent_gated_delta_rule", **change):
    function, x = getattr(fla, "fused_" + name), bag()
    return function(**({n: x[n] for n in ("q", "k", "v", "g", "beta") if n in inspect.signature(function).parameters} | change))


def test_fla_initial_state_of_other_dtype_and_strides():
    start = torch.randn(2, 2 * V, H, K).bfloat16().permute(0, 2, 3, 1)[..., ::2]
    before = start.clone()
    o, final = fla_call(initial_state=start, output_final_state=True)
    again, want = fla_call(initial_state=start.float().contiguous(), output_final_state=True)
    assert torch.equal(o, again) and torch.equal(final, want) and torch.equal(start, before)
    assert torch.equal(fla_call(initial_state=start)[0], o) and torch.equal(start, before)


def test_fla_a_log_has_any_shape_of_hv_elements():
    x = bag()
    raw = {"g": x["raw"], "use_gate_in_kernel": True, "dt_bias": x["bias"]}
    assert torch.equal(fla_call(**raw, A_log=x["A"].reshape(1, 1, H, 1))[0], fla_call(**raw, A_log=x["A"])[0])


def test_fla_old_names_and_defaults():
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, final = fla_call(transpose_state_layout=True, output_final_state=True)
    assert torch.equal(final, fla_call(state_v_first=True, output_final_state=True)[1]) and final.shape == (2, H, V, K)
    assert fla.fused_recurrent_gdn is fla.fused_recurrent_gated_delta_rule
    assert fla.fused_recurrent_rwkv7(*(bag()[n] for n in ("q", "gk", "k", "v", "p", "kb")))[1] is not None, "alone, it returns its state"


X = bag()
RWKV = {"r": X["q"], "w": X["gk"], "kk": X["kk"], "a": X["a"]}


@pytest.mark.parametrize(
    ("error", "name", "change", "words"),
    [
        (NotImplementedError, "recurrent_gated_delta_rule", {"gk": X["gk"]}, "g and gk are both given; expected one"),
        (NotImplementedError, "recurrent_gated_delta_rule", {"gv": X["gv"]}, "no decay per value channel"),
        (
            NotImplementedError,
            "recurrent_gated_delta_rule",
            {"head_first": False},
            "ssmgen does not know head_first, and ignores no argument",
        ),
        (
            NotImplementedError,
            "recurrent_kda",
            {"ssm_state_indices": None, "out": None},
            "ssmgen does not know ssm_state_indices, out, and ignores no argument",
        ),
        (
            NotImplementedError,
            "recurrent_gdn2",
            {"b": X["erase"], "w": X["w"], "out": None},
            "ssmgen does not know out, and ignores no argument",
        ),
        (
            NotImplementedError,
            "recurrent_simple_gla",
            {"g_gamma": X["gamma"]},
            "g and g_gamma are both given; expected one: ssmgen's simple_gla has one decay per head",
        ),
        (NotImplementedError, "recurrent_simple_gla", {"head_first": True}, "ssmgen does not know head_first, and ignores no argument"),
        (NotImplementedError, "recurrent_simple_gla", {"reverse": True}, "reverse"),
        (NotImplementedError, "recurrent_gla", {"head_first": True}, "ssmgen does not know head_first, and ignores no argument"),
        (NotImplementedError, "recurrent_gla", {"reverse": True}, "reverse"),
        (NotImplementedError, "recurrent_lightning_attn", {"layer_idx": 0, "num_layers": 2, "reverse": True}, "reverse"),
        (NotImplementedError, "recurrent_dplr_delta_rule", {"a": X["p"], "b": X["kb"], "gk": X["gk"], "reverse": True}, "reverse"),
        (NotImplementedError, "mul_recurrent_rwkv7", RWKV | {"reverse": True}, "reverse"),
        (ArgumentError, "recurrent_gated_delta_rule", {"use_gate_in_kernel": True}, "A_log is None"),
        (ArgumentError, "recurrent_kda", {"g": X["gk"], "use_gate_in_kernel": True}, "A_log is None"),
        (ArgumentError, "recurrent_gated_delta_rule", {"use_gate_in_kernel": True, "g": None, "A_log": X["A"]}, "g is None"),
        (
            ArgumentError,
            "recurrent_gated_delta_rule",
            {"allow_neg_eigval": True},
            "allow_neg_eigval is True and use_beta_sigmoid_in_kernel False; expected both",
        ),
        (ArgumentError, "recurrent_gated_delta_rule", {"initial_state": torch.zeros(3, H, K, V)}, "states; expected 2, one per sequence"),
        (ArgumentError, "recurrent_gated_delta_rule", {"initial_state": torch.zeros(2, H, V, K)}, "in layout 'kv', of K ="),
        (ArgumentError, "recurrent_gated_delta_rule", {"initial_state": torch.zeros(2, H, K, V).requires_grad_()}, "state requires grad"),
        (ArgumentError, "recurrent_gated_delta_rule", {"q": X["q"].clone().requires_grad_()}, "q requires grad"),
        (
            ArgumentError,
            "recurrent_gated_delta_rule",
            {"cu_seqlens": torch.tensor([0, 6])},
            r"q is \[2, 3, 2, 12\] with cu_seqlens; expected packed sequences, \[tokens, …\] or \[1, tokens",
        ),
    ],
)
def test_fla_says_why_not(error, name, change, words):
    with pytest.raises(error, match=words):
        fla_call(name, **change)


# FlashInfer.

B, HV, SLOTS = 4, 2 * H, 8
READ = torch.tensor([3, 1, 0, 6], dtype=torch.int32)


def operands(T: int) -> dict[str, Tensor]:
    x = bag(B, T, HV)
    return x | {"q": x["q"].half()}


def flashinfer_call(which: str, state: Tensor | None, *slots: Tensor, T: int = 3, **change):
    x = operands(T)
    function = getattr(flashinfer, "gated_delta_rule_" + which)
    return function(x["q"], x["k"], x["v"], state, *slots, x["A"], x["raw"], x["bias"], x["logit"], **change)


def recurrence(start: Tensor, T: int = 3, scale: float = K**-0.5, unit: str = "_unit") -> list[Tensor]:
    """(outputs, final states, states after each token) from start [B, HV, V, K], all states so."""
    X = with_derived(operands(T))
    X = {"q": X["q" + unit], "k": X["k" + unit], "v": X["v"], "g": X["gate"], "beta": X["sigmoid"]}
    out, *found = expected(delta, X, start.mT, scale)
    return [out, *(s.mT for s in found)]


def states(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, HV, V, K, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize(("which", "T", "dtype"), [("decode", 1, F32), ("decode_pretranspose", 1, F32), ("decode_pretranspose", 3, BF16)])
def test_flashinfer_updates_a_state_per_sequence(which, T, dtype):
    start = states(B, dtype=dtype)
    state = start.mT.contiguous() if which == "decode" else start.clone()
    output = torch.empty(B, T, HV, V, dtype=F16)
    want_o, want, _ = recurrence(start, T, 0.5, unit="")
    got = flashinfer_call(which, state, T=T, scale=0.5, output=output, use_qk_l2norm=False, backend="flashinfer")
    assert got[0] is output and got[1] is state and close(output, want_o)
    assert close(state.mT if which == "decode" else state, want)


def test_flashinfer_pool_with_slots_that_are_none():
    """Negative or beyond the pool: read, a zero output; written, nothing. Index types may differ, the buffer may be larger."""
    pool = states(SLOTS, dtype=BF16)
    before, kept = pool.clone(), torch.zeros(B + 1, 5, HV, V, K, dtype=BF16)
    read, write = torch.tensor([6, -1, SLOTS, 0]), torch.tensor([2, 3, 4, -1], dtype=torch.int32)
    more = {"initial_state": pool, "initial_state_indices": read, "output_state_indices": write, "intermediate_states_buffer": kept}
    out, returned = flashinfer_call("decode_pretranspose", None, **more)
    want_o, want, each = recurrence(before[[6, 0, 0, 0]])
    assert returned is pool and out.dtype == F16 and close(out[[0, 3]], want_o[[0, 3]]) and not out[1:3].any()
    assert close(pool[2], want[0]) and torch.equal(pool[[0, 1, 3, 4, 5, 6, 7]], before[[0, 1, 3, 4, 5, 6, 7]])
    assert close(kept[[0, 3], :3], each[[0, 3]]) and not kept[1:3].any() and not kept[:, 3:].any() and not kept[4].any()


def test_flashinfer_mtp_does_not_update_unless_told():
    pool, kept = states(SLOTS), torch.zeros(B, 3, HV, V, K)
    want_o, want, each = recurrence(pool[READ.long()])
    before = pool.clone()
    with pytest.warns(FutureWarning, match="disable_state_update is None"):
        out, returned = flashinfer_call("mtp", pool, READ, intermediate_states_buffer=kept, output_state_indices=READ + 1)
    assert returned is pool and torch.equal(pool, before) and close(out, want_o) and close(kept, each)
    flashinfer_call("mtp", pool, READ, disable_state_update=False)
    assert close(pool[READ.long()], want) and torch.equal(pool[[2, 4, 5, 7]], before[[2, 4, 5, 7]])


def test_flashinfer_mtp_takes_an_integer_for_its_flag():
    pools = [states(SLOTS) for _ in range(4)]
    said = [flashinfer_call("mtp", pool, READ, disable_state_update=off)[0] for pool, off in zip(pools, (False, 0, True, 1), strict=True)]
    assert all(torch.equal(o, said[0]) for o in said) and torch.equal(pools[0], pools[1]) and torch.equal(pools[2], pools[3])
    assert not torch.equal(pools[0], pools[2]) and torch.equal(pools[2], states(SLOTS))
    with pytest.raises(ArgumentError, match="disable_state_update is a str; expected True or False or an integer or None"):
        flashinfer_call("mtp", states(SLOTS), READ, disable_state_update="no")


def test_flashinfer_mtp_gives_each_token_a_slot():
    pool = states(16 + SLOTS)
    before, slots = pool.clone(), torch.arange(SLOTS, SLOTS + B * 3).reshape(B, 3).int()
    slots[1, 2] = -1
    out, _ = flashinfer_call("mtp", pool, READ.long(), ssm_state_indices=slots, disable_state_update=False)
    want_o, _, each = recurrence(before[READ.long()])
    written = slots[slots >= 0].long()
    assert close(out, want_o) and close(pool[written], each[slots >= 0])
    pool[written] = before[written]
    assert torch.equal(pool, before), "another slot was written"


def test_flashinfer_mtp_gives_the_last_state_a_slot_of_its_own_too():
    """It also writes each token's state, and writes the last state even if the last token has no slot. Padded sequences and invalid slots
    get none."""
    pool = states(16 + SLOTS)
    before, slots = pool.clone(), torch.arange(SLOTS, SLOTS + B * 3).reshape(B, 3).int()
    slots[1, 2] = -1
    read, last = torch.tensor([6, 1, -1, 3]), torch.tensor([0, 2, 4, -1])
    out, _ = flashinfer_call("mtp", pool, read, ssm_state_indices=slots, output_state_indices=last, disable_state_update=False)
    want_o, want, each = recurrence(before[read.clamp(min=0)])
    assert close(out[[0, 1, 3]], want_o[[0, 1, 3]]) and not out[2].any()
    assert close(pool[[0, 2]], want[:2])
    written = slots[[0, 1, 3]][slots[[0, 1, 3]] >= 0].tolist()
    assert close(pool[written], each[[0, 1, 3]][slots[[0, 1, 3]] >= 0])
    pool[[*written, 0, 2]] = before[[*written, 0, 2]]
    assert torch.equal(pool, before), "another slot was written"
    flashinfer_call("mtp", pool, read, ssm_state_indices=slots, output_state_indices=torch.full((B,), -1), disable_state_update=False)
    assert torch.equal(pool[0], before[0]), "nothing to copy"
    pool.copy_(before)
    flashinfer_call("mtp", pool, READ, ssm_state_indices=slots, output_state_indices=READ, disable_state_update=False)
    assert torch.equal(pool[:SLOTS], before[:SLOTS]), "the slots that were read, named again, are not written"


POOL = {"initial_state": torch.zeros(8, HV, V, K), "initial_state_indices": READ}
ON = {"disable_state_update": False}


@pytest.mark.parametrize(
    ("error", "which", "change", "words"),
    [
        *((NotImplementedError, which, {"backend": "cake_gdn"}, "'cake_gdn'") for which in ("decode", "decode_pretranspose")),
        (NotImplementedError, "decode_pretranspose", {"backend": "rubin"}, "'rubin'"),
        (NotImplementedError, "decode_pretranspose", POOL | {"initial_state": torch.zeros(8, HV, 2, V // 2, K)}, "two dies"),
        (NotImplementedError, "mtp", {"cache_replayssm": True}, "replay"),
        *((NotImplementedError, "mtp", {f"replayssm_{n}": torch.zeros(1)}, "replay") for n in ("rawv", "rawk", "g", "beta")),
        (ArgumentError, "decode_pretranspose", {"initial_state_indices": READ}, "is None; expected both or neither"),
        (ArgumentError, "decode_pretranspose", {"output_state_indices": READ}, "without initial_state"),
        (ArgumentError, "decode_pretranspose", POOL, "state and initial_state are both given; expected one of them"),
        (ArgumentError, "mtp", {"ssm_state_indices": READ[:, None], "disable_state_update": True}, "is not False"),
        (ArgumentError, "mtp", {"ssm_state_indices": READ} | ON, r"; expected \[batch, tokens\]"),
        (
            ArgumentError,
            "mtp",
            {"ssm_state_indices": READ[:, None], "output_state_indices": READ[:2]} | ON,
            r"; expected \[batch\], as ssm_state_indices is",
        ),
        (ArgumentError, "decode", {}, "in layout 'kv', of K ="),
    ],
)
def test_flashinfer_says_why_not(error, which, change, words):
    with pytest.raises(error, match=words):
        flashinfer_call(which, states(B), *([READ] if which == "mtp" else []), **change)


def test_flashinfer_misses_the_state():
    with pytest.raises(ArgumentError, match="state and initial_state are None; expected one of them"):
        flashinfer_call("decode_pretranspose", None)
