"""linear_attention without a GPU: the reference, the errors, the registration, and the kernels through the emulator."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import decode_cases as laws
import la_cases as of
import pytest
import torch
from bits import same as equal
from emulated_calls import SM90, emulate, needs_emulator
from la_cases import BF16, F16, F32, I32, RAW, RULES, Call, Case, expected, kv_matrix, make_call, matrix, usual
from selection import costly, kept

import ssmgen
from ssmgen.engine.recurrences.attention.problem import Beta, Delta, Gate, LinearAttentionProblem, Tokens, Update
from ssmgen.engine.recurrences.attention.reference import reference as reference
from ssmgen.errors import ArgumentError, UnsupportedError
from ssmgen.families.linear_attention.spec import space
from ssmgen.select import registry
from ssmgen.spec.kernel import DType, Index, PoolMode

pytestmark = pytest.mark.usefixtures("one_thread")


# The reference.


@costly(40, 80)
@pytest.mark.parametrize("case", kept(matrix() + kv_matrix(), usual), ids=lambda c: c.id)
def test_reference_is_within_rounding_of_float64(case):
    laws.is_within_rounding(of, case, lambda call: call.run(), any_order=True)


def outer(a, b):
    return a[:, None] * b[None, :]


def less(a, b):
    """I - a b^T"""
    return torch.eye(len(a), dtype=torch.float64) - outer(a, b)


TEXTBOOK = {  # S is [V, K], and every update a product with a matrix
    "gated_delta_rule": lambda S, q, k, v, g, beta: g.exp() * S @ less(beta * k, k) + beta * outer(v, k),
    "kda": lambda S, q, k, v, g, beta: S @ torch.diag(g.exp()) @ less(beta * k, k) + beta * outer(v, k),
    "gdn2": lambda S, q, k, v, g, b, w: S @ torch.diag(g.exp()) @ less(b * k, k) + outer(w * v, k),
    "delta_rule": lambda S, q, k, v, beta: S @ less(beta * k, k) + beta * outer(v, k),
    "comba": lambda S, q, k, v, p, g, beta: g.exp() * S @ less(beta / g.exp() * p, k) + beta * outer(v, k),
    "rwkv6": lambda S, r, k, v, w, u: S @ torch.diag(w.exp()) + outer(v, k),
    "rwkv7": lambda S, r, k, v, w, kk, a: S @ (torch.diag(w.exp()) - outer(kk, kk * a)) + outer(v, k),
    "dplr_delta_rule": lambda S, q, k, v, a, b, gk: S @ (torch.diag(gk.exp()) + outer(a, b)) + outer(v, k),
    "gla": lambda S, q, k, v, gk, gv: torch.diag(gv.exp()) @ S @ torch.diag(gk.exp()) + outer(v, k),
    "simple_gla": lambda S, q, k, v, g: g.exp() * S + outer(v, k),
    "lightning_attn": lambda S, q, k, v, slope: S / slope.exp() + outer(v, k),
}
READ = {"rwkv6": lambda S, r, k, v, w, u: S + outer(v, k) @ torch.diag(u)}  # instead of the new state


@pytest.mark.parametrize("rule", RULES)
def test_reference_is_the_textbook_formula(rule):
    call = make_call(Case(rule, rule=rule, heads=4, K=8, V=5, tokens=3, batch=2, index=None, x=F32, scale=0.3), "cpu")
    views = {n: t.double().clone() if t.is_floating_point() else t for n, t in call.views.items()}
    bounds = expected(call)
    reference(views, call.built.options.form, scale=0.3, dtype=torch.float64)
    for b, head in ((b, head) for b in range(2) for head in range(4)):
        S = call.kwargs["state"][b, head].double()
        for t in range(3):
            x = {n: call.kwargs[n].double() for n in RULES[rule]}
            x = {n: (v if n in ("slope", "u") else v[b, t]) for n, v in x.items()}
            own = {n: v[head // 2 if len(v) == 2 else head] for n, v in x.items()}
            read, S = READ.get(rule, TEXTBOOK[rule])(S, **own), TEXTBOOK[rule](S, **own)
            y = 0.3 * read @ x[next(iter(RULES[rule]))][head // 2]
            assert torch.allclose(views["out"][b, t, head], y, rtol=1e-12, atol=1e-12)
            assert torch.allclose(bounds["out"][b, t].value[head], y, rtol=1e-12, atol=1e-12)
        assert torch.allclose(views["state"][b, head], S, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("raw", [-3.0, 0.5, 200.0])
def test_gates_in_scalars(raw):
    """A value of zero, and a key along the first of four channels, of which the state holds 2 in the first and 3 in the second."""
    along = torch.tensor([[[1.0, 0, 0, 0]]])
    rate, biased, logit = math.exp(0.25), torch.tensor(raw + 0.125).double(), torch.tensor(raw).double()
    step, softplus = float(logit.sigmoid()), float(torch.logaddexp(biased, 0 * biased))

    def state_after(function, g, bias=(1,), **options):
        state = torch.tensor([[[[2.0, 3.0, 0, 0]]]])
        options |= {"A_log": torch.tensor([0.25]), "dt_bias": torch.full(bias, 0.125), "beta_sigmoid": True, "use_qk_l2norm": True}
        function(state, 5 * along, 7 * along, torch.zeros(1, 1, 1), g, torch.tensor([[raw]]), **options)
        return state[0, 0, 0, :2].tolist()

    def near(decay, step):
        return pytest.approx([2 * decay * (1 - step), 3 * decay], rel=1e-5, abs=1e-9)

    per_head, per_channel, decay = torch.tensor([[raw]]), torch.full((1, 1, 4), raw), math.exp(-rate * softplus)
    assert state_after(ssmgen.gated_delta_rule, per_head) == near(decay, step)
    assert state_after(ssmgen.gated_delta_rule, per_head, allow_neg_eigval=True) == near(decay, 2 * step)
    assert state_after(ssmgen.kda, per_channel, (4,)) == near(decay, step)
    bounded = math.exp(-5 * float((rate * biased).sigmoid()))
    assert state_after(ssmgen.kda, per_channel, (1, 4), lower_bound=-5.0) == near(bounded, step)


def test_an_infinite_rate_times_no_step_is_no_decay():
    call = make_call(Case("c", **RAW, heads=2, index=None, batch=1), "cpu")
    call.kwargs["A_log"].fill_(95)
    call.kwargs["g"].fill_(-300)
    plain = make_call(Case("c", **RAW | {"gate": "log"}, heads=2, index=None, batch=1), "cpu")
    plain.kwargs |= {n: t.clone() for n, t in call.kwargs.items() if n in ("q", "k", "v", "beta", "state")} | {"g": torch.zeros(1, 2)}
    assert torch.equal(call.run(), plain.run()) and torch.isfinite(call.kwargs["out"]).all()


@pytest.mark.parametrize(("shape", "edges"), [((0,), None), ((3, 0), None), ((0,), 1), ((0,), 3)])
def test_no_sequences_and_no_tokens(shape, edges):
    state, nothing = torch.ones(3, 2, 8, 8), torch.zeros(*shape, 2, 8)
    edges = None if edges is None else torch.zeros(edges, dtype=I32)
    out = ssmgen.delta_rule(state, nothing, nothing, nothing, nothing[..., 0], cu_seqlens=edges)
    assert out.shape == nothing.shape and (state == 1).all()


# Errors.


def bad(change: dict, **case) -> str:
    return make_call(Case("bad", **{**RAW, "dst": "row", "tokens": 3} | case), "cpu").refused(change)


INT = torch.zeros(5, dtype=I32)
WRONG = [
    ({"q": lambda n: n["q"][:, :, :1]}, "k is [5, 3, 2, 128]; expected [batch, tokens, key heads, K] = [5, 3, 1, 128]"),
    ({"q": lambda n: n["q"][:, 0]}, "v is [5, 3, 4, 64] and q is [5, 2, 128]; expected a tokens axis in both or in neither"),
    ({"k": lambda n: n["k"][..., :96]}, "k is [5, 3, 2, 96]; expected [batch, tokens, key heads, K] = [5, 3, 2, 128]"),
    ({"beta": lambda n: n["beta"][..., None]}, "beta is [5, 3, 4, 1]"), ({"v": lambda n: n["v"].double()}, "v is torch.float64"),
    ({"A_log": lambda n: n["A_log"][:3]}, "A_log is [3]; expected [heads] = [4]"),
    ({"dt_bias": lambda n: n["dt_bias"].expand(2, 4)}, "dt_bias is [2, 4]"),
    ({"k": lambda n: n["k"].float().requires_grad_()}, "k requires grad"),
    ({"k": lambda n: n["k"].to("meta")}, "k is on meta, state is on cpu"),
    ({"state": lambda n: n["state"][0]}, "state is [4, 64, 128]; expected [slots, heads, V, K]"),
    ({"state": lambda n: n["state"][:, :3]}, "state has 3 heads; expected a multiple of the 2 of q and k"),
    ({"state": lambda n: n["state"][:1].expand(5, -1, -1, -1)}, "which overlap"),
    ({"state": lambda n: n["state"].mT.contiguous().mT}, "expected dense last two axes, ["),
    ({"state_layout": "kv"}, "in layout 'kv', of K = 64; expected"),
    ({"state_layout": "vkv"}, "state_layout is 'vkv'; expected 'vk' or 'kv'"), ({"scale": "one"}, "scale is 'one'; expected a number"),
    ({"state_indices": None}, "dst_state_indices is given without state_indices"), ({"q": None}, "q is a NoneType; expected a tensor"),
    ({"state_indices": INT[:4]}, "state_indices is [4]; expected [batch] = [5]"),
    ({"state_indices": INT.float()}, "state_indices is torch.float32; expected int32 or int64"),
    ({"dst_state_indices": INT.long()}, "state_indices is torch.int32 and dst_state_indices is torch.int64"),
    ({"dst_state_indices": INT[:, None].expand(5, 4)}, "dst_state_indices is [5, 4]; expected [batch] = [5] or [batch, tokens] = [5, 3]"),
    ({"num_accepted_tokens": INT}, "state_indices is [5]; expected [batch, columns], of which num_accepted_tokens picks one, = [5, "),
    ({"num_accepted_tokens": INT, "state_indices": INT[:, None].expand(5, 2), "dst_state_indices": None}, "columns of state_indices; "
        "expected a slot to write"),
    ({"state_indices": None, "dst_state_indices": None, "state": lambda n: n["state"][:4]}, "state has 4 slots; expected 5"),
    ({"update_state": False}, "dst_state_indices is given with update_state=False, which writes no state"),
    ({"cu_seqlens": INT}, "q is [5, 3, 2, 128] with cu_seqlens"),
    ({"intermediate_states": torch.zeros(5, 2, 4, 64, 128)}, "intermediate_states is [5, 2, 4, 64, 128]; expected [batch, tokens or more,"),
    ({"intermediate_states": torch.zeros(5, 3, 4, 64, 128, dtype=BF16)}, "intermediate_states is torch.bfloat16; "
        "expected torch.float32, the dtype of state"),
    ({"intermediate_states": torch.zeros(1, 1, 4, 64, 128).expand(5, 3, -1, -1, -1)}, "two of its elements share memory"),
    ({"out": lambda n: n["out"][:1].expand(5, -1, -1, -1)}, "two of its elements share memory"),
    ({"out": lambda n: n["state"].view(-1)[: 5 * 3 * 4 * 64].view(5, 3, 4, 64)}, "out overlaps state in memory"),
    ({"out": lambda n: n["v"]}, "out overlaps v in memory"), ({"pdl": "yes"}, "pdl is 'yes'; expected True, False or None"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_bad_input(change, words):
    assert words in bad(change)


def test_everything_wrong_in_one_message():
    text = bad({"beta": lambda n: n["beta"].double(), "g": lambda n: n["g"][:2], "state_indices": INT[:4].float(), "pdl": 3})
    assert text.count("\n  - ") >= 4


def test_a_bias_without_its_gate_is_refused_on_every_device():
    call = make_call(Case("c", heads=2), "cpu")
    with pytest.raises((ArgumentError, UnsupportedError), match="dt_bias"):
        call.function(**call.kwargs, dt_bias=torch.ones(2))


PROBLEM = LinearAttentionProblem(dim_k=128, dim_v=64, nheads=4, key_heads=2, g=DType.BF16, beta=DType.BF16)
FAULTS = [
    ({"update": Update.EACH, "index": Index.I32, "pool": PoolMode.SPLIT}, "tokens is one with intermediates or update=each; "
        "expected many or ragged"),
    ({"alpha": DType.F32, "read": DType.F32, "delta": Delta.OLD}, "write or alpha is set with beta, w or erase; expected none of those"),
    ({"pool": PoolMode.SPLIT, "index": Index.I32, "update": Update.NONE}, "pool is split and update is none; "
        "expected pool=single, or a state that is written"),
    ({"gate": Gate.SOFTPLUS, "gk": DType.F32, "A_log": DType.F32}, "gate is softplus with g and gk; expected one of them"),
    ({"beta": None, "beta_rows": True, "beta_form": Beta.PLAIN}, "beta_rows is yes and beta is none; "
        "expected beta"), ({"dim_k": 2048}, "dim_k is 2048; expected 1 … 1024"),
    ({"write": DType.F32, "alpha": DType.F32}, "write and alpha are both set"), ({"dim_v": 2**22}, "2^31 elements or more"),
    ({"alpha": DType.F32}, "write or alpha is set; expected delta=old and read with it"), ({"dim_k": 0}, "dim_k is 0; expected 1 … 1024"),
    ({"dim_k": 126}, "loads are by vectors with dim_k 126 and dim_v 64 in layout vk; expected element for both"),
    ({"intermediates": True}, "tokens is one with intermediates or update=each; "
        "expected many or ragged"), ({"dim_v": 0}, "dim_v is 0; expected 1 or more"),
    ({"delta": Delta.NONE}, "beta, read, erase or w is set without a delta rule; expected a delta rule"),
    ({"tokens": Tokens.RAGGED}, "expected tokens=ragged if and only if "
        "cu_seqlens is set"), ({"gate": Gate.SOFTPLUS}, "gate is softplus and A_log is none"),
    ({"accepted": Index.I32}, "accepted is i32 with index=none"), ({"dt_bias": DType.F32}, "A_log or dt_bias is set with gate=log"),
    ({"key_heads": 3}, "nheads is 4; expected a multiple of key_heads 3"), ({"pool": PoolMode.SPLIT}, "pool is split and index is none; "
        "expected a type of state_indices for index"),
    ({"gate": Gate.SOFTPLUS, "g": None}, "gate is softplus and neither g nor gk is set"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), FAULTS)
def test_faults_of_a_problem(change, words):
    assert not PROBLEM.faults() and any(words in f for f in replace(PROBLEM, **change).faults())
    with pytest.raises(UnsupportedError, match=re.escape(words)):
        registry.select("linear_attention", replace(PROBLEM, **change), 4, SM90, True)


# Registration with torch, and calls that are answered without a launch.


@pytest.mark.parametrize("rule", RULES)
def test_public_functions_say_their_shapes(rule):
    text = getattr(ssmgen, rule).__doc__
    assert "S <- " in text and re.search(r"\[(…, )?H[KV]?\b.*\]|Operands as in gated_delta_rule", text)


# The kernels, through the emulator.


@costly(16, 40)
@needs_emulator
@pytest.mark.parametrize("case", kept(matrix() + kv_matrix()[::4], usual), ids=lambda c: c.id)
def test_within_rounding_of_float64(case):
    laws.is_within_rounding(of, case)


@costly(2)
@needs_emulator
@pytest.mark.parametrize("name", ["qwen3", "i64-pad7", "no-pool", "ragged-pool"])
def test_prefetch_stays_within_the_pool(name):
    laws.prefetch_stays_within_the_pool(of, next(c for c in matrix() if c.id == f"gdn-{name}"))


SMALL = {"heads": 2, "K": 64, "V": 32, "index": None, "batch": 2, "out": F32}
VARIED = [
    Case("gdn", **RAW, **SMALL), Case("gdn-bf16-t3", **RAW, **SMALL, state=BF16, tokens=3), Case("gdn-kv", **RAW, **SMALL, layout="kv"),
    Case("kda-kv-bf16-t2", rule="kda", **SMALL, layout="kv", state=BF16, tokens=2), Case("gla-f16", rule="gla", **SMALL, state=F16),
    Case("rwkv7-k96-t2", rule="rwkv7", **SMALL | {"K": 96, "V": 40}, tokens=2),
    Case("frozen", **RAW, **SMALL, state=BF16, update=False, tokens=5),
]  # fmt: skip


@costly(2)
@needs_emulator
@pytest.mark.parametrize("case", VARIED, ids=lambda c: c.id)
def test_variants_are_bit_equal(case):
    laws.variants_are_equal(of, case, laws.lane_maps(space(make_call(case, "cpu").problem, SM90), 6))


def one_token(call: Call, t: int) -> Call:
    """The call that does token t of another one alone, on the same state."""
    of_tokens = [n for n in (*RULES[call.case.rule], "out") if call.kwargs[n].shape[:2] == (call.case.batch, call.case.tokens)]
    kwargs = {n: v[:, t] if n in of_tokens else v for n, v in call.kwargs.items() if n != "intermediate_states"}
    return Call(replace(call.case, tokens=None, kept=None), call.memory, kwargs, call.sequences)


STEPS = [
    Case("gdn", **RAW), Case("kda", rule="kda", **RAW | {"gate": "bounded"}), Case("gdn2-kv", rule="gdn2", layout="kv"),
    Case("comba", rule="comba", **RAW), Case("dplr", rule="dplr_delta_rule"), Case("gla", rule="gla"),
    Case("gdn-no-update", **RAW, update=False),
]  # fmt: skip


@costly(2)
@needs_emulator
@pytest.mark.parametrize("case", STEPS, ids=lambda c: c.id)
def test_token_t_equals_single_steps(case):
    laws.tokens_equal_single_steps(of, replace(case, **SMALL, tokens=9, kept=0 if case.update else None), one_token)


@needs_emulator
@pytest.mark.parametrize("rule", ["gated_delta_rule", "rwkv7"])
def test_a_sequence_in_company_equals_it_alone(rule):
    """A sequence gives equal results in a packed batch and alone, in a call with a tokens axis."""
    case = Case("c", rule=rule, heads=2, K=64, index=None, lengths=(3, 0, 10, 1), out=F32)
    packed, apart = make_call(case, "cpu"), make_call(case, "cpu")
    emulate(packed)
    for b, s in enumerate(apart.sequences):
        span = {n: apart.kwargs[n][None, s.start : s.start + s.tokens] for n in (*RULES[rule], "out")}
        alone = replace(case, lengths=(), batch=1, tokens=s.tokens)
        if s.tokens:
            emulate(Call(alone, apart.memory, span | {"state": apart.kwargs["state"][b : b + 1]}, [s]))
    assert equal(packed.kwargs["out"], apart.kwargs["out"]) and equal(packed.kwargs["state"], apart.kwargs["state"])
