"""linear_attention on a card: the numerical contract, graphs, dependent launches, and the emulator's agreement."""

from __future__ import annotations

import random
from dataclasses import replace

import launch_laws
import pytest
import torch
from bits import bits, same
from card_calls import arch, launch, needs_pdl, waits_for_its_producer
from emulated_calls import needs_emulator
from la_cases import BF16, F16, F32, GDN, I32, I64, RAW, RULES, Call, Case, make_call
from varying import named

import ssmgen
from ssmgen import emulator
from ssmgen.errors import ArgumentError
from ssmgen.families.linear_attention import planning as op
from ssmgen.families.linear_attention.spec import space
from ssmgen.select import registry
from ssmgen.spec.arguments import Arguments

pytestmark = pytest.mark.gpu

POOL = replace(GDN, state=BF16, heads=8, batch=6)
STEPS = replace(POOL, id="gdn-t4-each", tokens=4, dst="token", kept=0)


@pytest.mark.parametrize("tokens", [None, 3])
def test_arguments_by_position_and_without_out(tokens):
    """Found by its arguments as they came, or not: the same call."""
    case = replace(GDN, tokens=tokens, update=False)
    call = make_call(case, "cuda")
    want = call.run().clone()
    first = [call.kwargs[n] for n in ("state", "q", "k", "v", "g", "beta", "A_log", "dt_bias")]
    rest = {n: v for n, v in call.kwargs.items() if n not in ("state", "out", "A_log", "dt_bias", *RULES[case.rule])}
    for _ in range(3):
        out = call.function(*first, **rest)
        assert same(out, want) and out.is_contiguous() and out.dtype == call.kwargs["v"].dtype
        assert same(call.function(*first[:4], g=first[4], beta=first[5], A_log=first[6], dt_bias=first[7], **rest), want)


SMALL = {"heads": 4, "index": None, "batch": 3, "out": F32}
VARIED = [
    Case("gdn-f32", **RAW, **SMALL),
    Case("gdn-bf16-v72", **RAW, **SMALL, state=BF16, V=72),
    Case("gdn-f16-k96", **RAW, **SMALL, state=F16, K=96),
    Case("gdn-k256-t3", **RAW, **SMALL, K=256, tokens=3),
    Case("gdn-bf16-t9", **RAW, **SMALL, state=BF16, tokens=9),
    Case("gdn-kv-bf16", **RAW, **SMALL, state=BF16, layout="kv"),
    Case("gdn-kv-t3", **RAW, **SMALL, tokens=3, layout="kv"),
    Case("gdn-frozen", **RAW, **SMALL, state=BF16, update=False, tokens=6),
    Case("kda-t3", rule="kda", **RAW | {"gate": "bounded"}, **SMALL, tokens=3),
    Case("gdn2", rule="gdn2", **SMALL),
    Case("comba-bf16", rule="comba", **RAW, **SMALL, state=BF16),
    Case("rwkv7-k64-t3", rule="rwkv7", **SMALL, K=64, tokens=3),
    Case("gla", rule="gla", **SMALL),
]


@named(*VARIED)
def test_variants_are_bit_equal(case):
    specs = list(space(make_call(case, "cuda").problem, arch()))
    random.Random(0).shuffle(specs)
    launch_laws.variants_are_bit_equal("linear_attention", case, [*{(s.lanes, s.vec): s for s in specs}.values(), *specs[:8]])


def tokens_of(call: Call, which: int | slice) -> Call:
    """The call that does some of the tokens of another one, on the same state."""
    several = isinstance(which, slice)
    of_tokens = [n for n in (*RULES[call.case.rule], "out") if call.kwargs[n].shape[:2] == (call.case.batch, call.case.tokens)]
    kwargs = {n: v[:, which] if n in of_tokens else v for n, v in call.kwargs.items() if several or n != "intermediate_states"}
    return Call(replace(call.case, tokens=which.stop if several else None), call.memory, kwargs, call.sequences)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_token_t_equals_single_steps(rule, layout):
    """Bit for bit, in calls of 1 to 16 tokens; so do the states in between, and the outputs of a call that writes none."""
    raw = RAW if rule in ("gated_delta_rule", "kda", "comba") else {}
    case = Case(rule, rule=rule, **raw, heads=2, index=None, batch=3, out=F32, tokens=16, kept=0, layout=layout)
    single, states = make_call(case, "cuda"), []
    for t in range(16):
        tokens_of(single, t).run()
        states.append(single.kwargs["state"].clone())
    for tokens in range(1, 17):
        many, fixed = make_call(case, "cuda"), make_call(replace(case, update=False, kept=None), "cuda")
        for call in (many, fixed):
            tokens_of(call, slice(0, tokens)).run()
            assert same(call.kwargs["out"][:, :tokens], single.kwargs["out"][:, :tokens])
        assert same(many.kwargs["state"], states[tokens - 1])
        assert same(fixed.kwargs["state"], make_call(case, "cuda").kwargs["state"])
        kept = many.kwargs["intermediate_states"]
        assert all(same(kept[:, t], states[t][: case.batch]) for t in range(tokens)), f"states of {tokens} tokens"


@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_batch_size_and_position_change_nothing(tokens, layout):
    """The last of a batch of 70, and the same sequence alone."""
    case = Case("c", **RAW, index=None, state=BF16, tokens=tokens, layout=layout)
    large, small = make_call(replace(case, batch=70), "cuda"), make_call(replace(case, batch=1), "cuda", seed=1)
    for name in ("state", *RULES[case.rule]):
        small.kwargs[name][0].copy_(large.kwargs[name][69])
    for name in ("A_log", "dt_bias"):
        small.kwargs[name].copy_(large.kwargs[name])
    assert same(large.run()[69], small.run()[0]) and same(large.kwargs["state"][69], small.kwargs["state"][0])


def test_a_sequence_in_company_equals_it_alone():
    case = Case("c", **RAW, index=None, lengths=(3, 0, 17, 1), out=F32)
    packed, apart = make_call(case, "cuda"), make_call(case, "cuda")
    packed.run()
    for b, s in enumerate(apart.sequences):
        span = {n: apart.kwargs[n][None, s.start : s.start + s.tokens] for n in (*RULES[case.rule], "out")}
        others = {n: v for n, v in apart.kwargs.items() if n != "cu_seqlens"}
        apart.function(**others | span | {"state": apart.kwargs["state"][b : b + 1]})
    assert same(packed.kwargs["out"], apart.kwargs["out"]) and same(packed.kwargs["state"], apart.kwargs["state"])


@pytest.mark.parametrize("case", [POOL, STEPS], ids=lambda c: c.id)
def test_all_rows_padded(case):
    call = make_call(case, "cuda")
    call.kwargs["state_indices"].fill_(-1)
    before = [bits(call.kwargs[n]).clone() for n in ("state", "intermediate_states") if n in call.kwargs]
    assert not call.run().any()
    assert all(torch.equal(bits(call.kwargs[n]), b) for n, b in zip(("state", "intermediate_states"), before, strict=False))


@pytest.mark.parametrize(("shape", "edges"), [((0,), None), ((3, 0), None), ((0,), 1), ((0,), 3)])
def test_no_sequences_and_no_tokens(shape, edges):
    state, nothing = torch.ones(3, 2, 64, 64, device="cuda"), torch.zeros(*shape, 2, 64, device="cuda")
    edges = None if edges is None else torch.zeros(edges, dtype=I32, device="cuda")
    out = ssmgen.delta_rule(state, nothing, nothing, nothing, nothing[..., 0], cu_seqlens=edges)
    assert out.shape == nothing.shape and (state == 1).all()


def test_pool_above_2_32_elements():
    """The last slots of a pool, in place, split and with a slot per token."""
    case = Case("small", **RAW, heads=32, V=128, state=BF16, index=None, batch=1, tokens=2)
    per_slot = 32 * 128 * 128
    slots = 2**32 // per_slot + 4
    pool = torch.zeros(slots, 32, 128, 128, dtype=BF16, device="cuda")
    call, want = make_call(case, "cuda"), make_call(replace(case, kept=0), "cuda")
    start = call.kwargs["state"][0].clone()
    want.run()
    states = want.kwargs["intermediate_states"][0]
    others = {n: v for n, v in call.kwargs.items() if n != "state"}
    last, before = (torch.tensor([slots - n], device="cuda") for n in (1, 2))
    zero = torch.zeros_like(start)
    for dst, left in (
        (None, (zero, zero, states[1])),
        (before, (zero, states[1], start)),
        (torch.stack([before - 1, before], 1), (states[0], states[1], start)),
    ):
        pool[-3:] = 0
        pool[-1] = start
        out = call.function(pool, **others, state_indices=last, dst_state_indices=dst)
        assert same(out, want.kwargs["out"])
        assert all(same(slot, expect) for slot, expect in zip(pool[-3:], left, strict=True))
    assert not any(part.any() for part in pool[:-3].split(512))


# Launches.


def test_a_call_like_one_before_is_looked_at_again():
    launch_laws.a_call_like_one_before_is_looked_at_again("linear_attention", POOL, shifted="k")
    call = make_call(POOL, "cuda")
    with pytest.raises(ArgumentError, match="out overlaps v"):
        call.function(**call.kwargs | {"out": call.kwargs["v"]})


def test_changed_metadata_of_the_same_object_is_noticed():
    call = make_call(POOL, "cuda")
    call.run()
    call.kwargs["beta"].resize_(2, POOL.heads)
    with pytest.raises(ArgumentError, match="beta is"):
        call.run()


@named(replace(POOL, V=88), replace(STEPS, V=88))
def test_the_first_launch_may_be_in_a_graph(case):
    launch_laws.the_first_launch_may_be_in_a_graph("linear_attention", case)


def test_1000_launches_write_the_same_bits():
    cases = replace(POOL, dst="row", batch=70), replace(STEPS, batch=70)
    launch_laws.launches_write_the_same_bits([make_call(case, "cuda") for case in cases], 1000)


# Programmatic dependent launch.


CHAINS = [POOL, replace(POOL, id="t3", tokens=3), replace(POOL, id="kv", layout="kv"), replace(POOL, id="ragged", lengths=(3, 1, 9, 2))]


@needs_pdl
@named(*CHAINS)
def test_pdl_on_and_off_are_bit_equal_on_a_chain(case):
    launch_laws.pdl_changes_no_bit(lambda pdl: launch_laws.decode_chain(make_call(case, "cuda"), pdl))


@needs_pdl
@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_pdl_waits_for_a_producer_that_triggers_early(tokens, layout):
    """q, k and v are slices of a tensor that the kernel ahead still writes when this one starts; without its wait it reads too early."""
    call = make_call(replace(POOL, packed=8, index=None, tokens=tokens, layout=layout), "cuda")
    spec = registry.select("linear_attention", call.problem, call.case.batch, arch(), True)
    hasty = launch(spec, op.FAMILY, call.views, call.built.options, call.operands, hasty=spec.kernels)
    state, out, written = call.kwargs["state"], call.kwargs["out"], call.memory.buffers["q+k+v"][0]
    kept = make_call(call.case, "cuda").kwargs["state"]
    waits_for_its_producer(lambda pdl: call.function(**call.kwargs, pdl=pdl), hasty, written, state, out, kept)


# The emulator.

EXACT = {"out": F32, "index": I64}
AGREE = [
    *[Case(rule, rule=rule, **EXACT, state=s) for rule, s in zip(RULES, 4 * (F32, BF16, F16), strict=False)],
    *[Case(f"{rule}-t3", rule=rule, **EXACT, state=s, tokens=3, kept=0) for rule, s in zip(RULES, 4 * (BF16, F32, F32), strict=False)],
    *[Case(f"{rule}-kv", rule=rule, **EXACT, layout="kv", state=BF16, K=96, V=72) for rule in ("gated_delta_rule", "rwkv7", "simple_gla")],
    Case("delta-packed-odd", rule="delta_rule", **EXACT, packed=1, dst="row", batch=11),
    Case("delta-ragged", rule="delta_rule", **EXACT, lengths=(9, 2, 1, 0, 3, 4)),
]


@needs_emulator
@pytest.mark.parametrize("case", AGREE, ids=lambda c: c.id)
def test_emulator_agrees_bit_for_bit_without_exponentials(case):
    """Gates of 0: the decay is 2^0 on both sides, and everything else is sums, products, fused multiply-adds and roundings."""
    card, host = make_call(case, "cuda"), make_call(case, "cpu")
    for call in (card, host):
        for n, kind in RULES[case.rule].items():
            if kind.endswith("gate") or kind == "slope":
                call.kwargs[n].zero_()
    card.run()
    spec = ssmgen.explain(card.function, **card.kwargs).chosen.spec
    packed = Arguments(spec, op.kernel_values(spec, host.views, host.built.options)).at([t.data_ptr() for t in host.operands.values()])
    written = ("state", "out", "intermediate_states")
    emulator.run(spec, arch(), op.grid_of(spec, host.views), packed, host.operands, written)
    torch.cuda.synchronize()
    slots = sorted({slot for s in host.sequences for slot in s.targets.values()})
    assert same(card.kwargs["state"][slots].cpu(), host.kwargs["state"][slots])
    assert all(same(card.kwargs[n].cpu(), host.kwargs[n]) for n in written[1:] if n in host.kwargs)
