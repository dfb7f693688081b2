"""chunk_delta_rule and chunk_linear_attention on a card: the laws of their results at sizes of models, offsets beyond 32 bits, and the
same bits every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import prompt_laws as laws
import pytest
import repeats
import torch
from prompt_cases import (
    ADVERSARIAL,
    BF16,
    BOUNDS,
    F16,
    F32,
    FUNCTIONS,
    NAN,
    OF_HEADS,
    OF_LINEAR_ATTENTION,
    Case,
    by_warps,
    error,
    launched,
    make,
    problem_of,
    public,
    same,
    starts_of,
    states,
)
from ssu_cases import Memory

import ssmgen

pytestmark = pytest.mark.gpu

KDA = Case(heads=4, key_heads=2, head_k=128, head_v=128, device="cuda")
DELTA = replace(KDA, function="chunk_gated_delta_rule")
OLMO = replace(DELTA, key_heads=4, head_k=96, head_v=192)
RWKV7 = replace(KDA, function="chunk_rwkv7", key_heads=4, head_k=64, head_v=64)
GLA = replace(KDA, function="chunk_gla")
FOUR = {"delta": DELTA, "kda": KDA, "gla": GLA, "rwkv7": RWKV7}
HARD = ("near keys, steps of 1", "no decay", "-5", "one channel never")
RAGGED = (0, 1, 31, 32, 65, 300)
LONGER = (0, 1, 63, 64, 65, 700, 1155)  # of chunk_delta_rule, whose reference is fast

BY_WARPS = partial(launched, spec=by_warps)
by_both = pytest.mark.parametrize("run", [public, BY_WARPS], ids=["served", "warps"])
each = pytest.mark.parametrize("case", [replace(KDA, function=name) for name in FUNCTIONS], ids=FUNCTIONS)
four = pytest.mark.parametrize("case", FOUR.values(), ids=FOUR)


def ragged(case: Case) -> tuple[int, ...]:
    return LONGER if case.per_head else RAGGED


@by_both
@pytest.mark.parametrize("function", OF_LINEAR_ATTENTION)
@pytest.mark.parametrize("kind", ["random", *HARD])
def test_results_are_those_of_float64(function, run, kind):
    laws.is_accurate(run, replace(KDA, function=function), 200, **ADVERSARIAL.get(kind, {}))


SIZES = {
    "k128": {},
    "f16": {"x": F16},
    "k64": {"head_k": 64, "head_v": 64},
    "k96v192": {"head_k": 96, "head_v": 192, "key_heads": 4},
    "k256v64": {"head_k": 256, "head_v": 64},
}


@by_both
@pytest.mark.parametrize("kind", ["random", *OF_HEADS])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_results_of_chunk_delta_rule(run, sizes, kind):
    laws.is_accurate(run, replace(DELTA, **sizes), 700, **ADVERSARIAL.get(kind, {}))


@by_both
@pytest.mark.parametrize("function", ["chunk_kda", "chunk_gla", "chunk_rwkv7"])
@pytest.mark.parametrize("sizes", [n for n in SIZES if n != "k128"])
def test_results_of_other_sizes(function, run, sizes):
    laws.is_accurate(run, replace(KDA, function=function, **SIZES[sizes]), 200)


@by_both
@pytest.mark.parametrize("heads", [1, 4])
def test_keys_that_are_nearly_one_from_zeros(run, heads):
    laws.is_accurate_from_zeros(run, replace(KDA, head_k=64, head_v=64, heads=heads, key_heads=heads), 260)


@by_both
@pytest.mark.parametrize("function", ["chunk_kda", "chunk_comba", "chunk_gdn2"])
def test_segments(function, run):
    """The rule cuts a prompt, whatever the others in the batch are. The result equals one segment's, except roundings."""
    case, lengths = replace(KDA, function=function, heads=4, key_heads=2), (3500, 0, 64, 5000)
    call = make(case, sum(lengths), gate=0.05) | {"cu_seqlens": starts_of(lengths, "cuda"), "return_final_states": True}
    assert problem_of(case, **call).segments > 2
    (cut, last), (whole, states) = run(case, **call), run(case, **call, segments=1)
    assert error(cut, whole.double().cpu()) <= BOUNDS[BF16] and error(last, states.double().cpu()) <= BOUNDS[BF16]
    assert same(cut[3500:3564], whole[3500:3564]) and same(last[2], states[2])
    alone, own = run(case, **laws.tokens_of(case, {n: t for n, t in call.items() if n != "cu_seqlens"}, slice(3564, 8564)))
    assert same(alone[0], cut[3564:]) and same(own[0], last[3])


@by_both
def test_a_longer_prompt_of_a_model(run):
    laws.is_accurate(run, replace(DELTA, heads=32, key_heads=16), 1155)
    laws.is_accurate(run, replace(KDA, heads=32, key_heads=32), 600, **ADVERSARIAL["slow"])


@by_both
@each
def test_packing_changes_no_bit(case, run):
    laws.packing_changes_no_bit(run, case, ragged(case))


def of_ragged(law: Callable[..., None], **more: Any) -> Callable[[Any, Case], None]:
    return lambda run, case: law(run, case, lengths=ragged(case), **more)


LAWS: dict[str, Callable[[Any, Case], None]] = {
    "lengths": of_ragged(laws.lengths_are_accurate),
    **{f"cut-{at}": partial(laws.a_cut_changes_no_bit, tokens=2048, at=at) for at in (64, 640, 1984)},
    **{
        f"pool-{state}-{layout}": partial(laws.a_pool_is_touched_where_it_should_be, state=state, layout=layout)
        for state, layout in product((F32, BF16, F16), ("vk", "kv"))
    },
    "neighbours": of_ragged(laws.neighbours_do_not_matter),
    "checkpoints-f32": of_ragged(laws.checkpoints_are_final_states, state=F32),
    "checkpoints-bf16": of_ragged(laws.checkpoints_are_final_states, state=BF16),
    "batches": laws.batches_change_no_bit,
}


@by_both
@four
@pytest.mark.parametrize("law", LAWS)
def test_laws(case, run, law):
    LAWS[law](run, case)


def test_a_cut_within_64_tokens_changes_no_bit():
    laws.a_cut_changes_no_bit(public, RWKV7, 200, 96)


@by_both
@pytest.mark.parametrize(("state", "index"), [(F32, torch.int32), (BF16, torch.int64), (F32, None)])
@pytest.mark.parametrize("case", [DELTA, KDA], ids=["delta", "kda"])
def test_states_of_a_pool_may_begin_elsewhere(case, run, state, index):
    laws.states_of_a_pool_may_begin_elsewhere(run, case, state, index)


@pytest.mark.parametrize(("run", "offset"), [(public, 8), (BY_WARPS, 8), (BY_WARPS, 4), (BY_WARPS, 2)])
@four
def test_layout_changes_no_bit(case, run, offset):
    laws.layout_changes_no_bit(run, case, offset)


@by_both
@pytest.mark.parametrize("case", [OLMO, KDA, GLA, RWKV7], ids=["olmo", "kda", "gla", "rwkv7"])
@pytest.mark.parametrize("state", [F32, BF16, F16])
def test_order_of_states_changes_no_bit(case, run, state):
    laws.order_of_states_changes_no_bit(run, case, state)


@each
def test_gates_agree(case):
    laws.gates_agree(public, case)


@by_both
def test_gates_of_chunk_delta_rule_agree(run):
    laws.gates_agree(run, DELTA)
    laws.linear_gates_agree(run, DELTA)


@by_both
@each
@pytest.mark.parametrize("tokens", [100, 128])
def test_decoding_goes_on(case, run, tokens):
    laws.decoding_goes_on(run, case, tokens)


def test_nothing_is_written_beyond_what_is_said():
    """All buffers are guarded and poisoned; the workspace has exactly its stated size."""
    lengths = (65, 0, 130, 1)
    for case in FOUR.values():
        memory = Memory("cuda")
        call = make(case, sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cuda")}
        wanted, last = public(case, **call, return_final_states=True)
        for name in case.per_token:
            call[name] = memory.fill(name, call[name])
        out = memory.fill("out", torch.full_like(wanted, NAN))
        final = memory.fill("final_states", torch.full_like(last, NAN))
        size = case.workspace(sum(lengths), len(lengths))
        room = memory.fill("workspace", torch.full((size // 4,), NAN, device="cuda"))
        memory.seal()
        public(case, **call, out=out, return_final_states=True, final_states_out=final, workspace=room.view(torch.uint8))
        assert not memory.untouched(dict.fromkeys(("out", "final_states", "workspace"))) and same(out, wanted) and same(final, last)


def test_what_a_workspace_held_does_not_matter():
    call = make(DELTA, 2, 300)
    wanted = public(DELTA, **call)
    room = torch.full((2 * DELTA.workspace(600, 2),), 0xFF, dtype=torch.uint8, device="cuda")
    assert same(public(DELTA, **call, workspace=room), wanted)
    public(DELTA, **make(DELTA, 3, 100, seed=1), workspace=room)
    assert same(public(DELTA, **call, workspace=room), wanted)


@by_both
@four
def test_the_same_bits_every_time(case, run):
    """Consecutive calls share one workspace. Each call's first kernel may then overlap the last kernel of the call before."""
    call = make(case, 4, 300) | {"workspace": torch.full((2 * 10**7,), 0xFF, dtype=torch.uint8, device="cuda")}
    assert repeats.are_alike(partial(run, case, **call, return_final_states=True), 1000 if case.per_head else 300)


@four
def test_programmatic_launches_change_no_bit(case):
    repeats.programmatic_launches_change_no_bit(public, case, 300)


@four
def test_in_a_graph(case):
    repeats.a_graph_follows_its_lengths(public, case)


@pytest.mark.parametrize("case", [DELTA, KDA], ids=["delta", "kda"])
@torch.no_grad()
def test_compiled_by_torch(case):
    call, before = make(case, 2, 130), states(case, 2)

    def layer(before: torch.Tensor, **call: Any) -> Any:
        out, state = getattr(ssmgen, case.function)(**call, initial_states=before, return_final_states=True)
        return out * 2, state + 1

    wanted = layer(before, **call)
    compiled = torch.compile(layer, fullgraph=True)
    assert all(same(a, b) for _ in range(2) for a, b in zip(compiled(before, **call), wanted, strict=True))


def test_a_bound_call_of_gdn2_weighs_what_it_is_given():
    case = replace(KDA, function="chunk_gdn2")
    call = make(case, 1, 70)
    bound = ssmgen.bind(ssmgen.chunk_gdn2, **call)
    first = bound().clone()
    call["w"].mul_(0.5)
    assert same(bound(), public(case, **call)) and not same(first, bound.out)


@by_both
@four
def test_a_prompt_in_pieces_and_then_steps(case, run):
    """The same tokens in one call; in pieces of whole chunks; and in two pieces followed by single steps."""
    call, pieces = make(case, 1, 700), (256, 192, 252)
    whole, last = run(case, **call, return_final_states=True)
    state, outs, begin = torch.zeros(1, *case.state, device="cuda"), [], 0
    for count in pieces:
        piece = laws.cut(case, call, slice(None), slice(begin, begin + count))
        if count % 64:
            stepped = state.clone()
            steps = case.decode(stepped, **piece)
            assert error(steps, whole[:, begin:].double().cpu()) <= 2 * BOUNDS[BF16]
            assert error(stepped, last.double().cpu()) <= 2 * BOUNDS[BF16]
        out, state = run(case, **piece, initial_states=state, return_final_states=True, final_states_out=state)
        outs.append(out)
        begin += count
    assert same(torch.cat(outs, 1), whole) and same(state, last)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("case", [DELTA, KDA], ids=["delta", "kda"])
def test_offsets_beyond_32_bits(case):
    repeats.offsets_may_exceed_32_bits(public, replace(case, heads=2, key_heads=1, head_k=64, head_v=64))


@pytest.mark.usefixtures("room")
def test_gates_beyond_32_bits():
    case = replace(KDA, heads=2, key_heads=1, head_k=64, head_v=64)
    call = make(case, 70) | {"cu_seqlens": starts_of((70,), "cuda")}
    near = call["g"].to(BF16)
    assert same(public(case, **call | {"g": repeats.far_tokens(near)}), public(case, **call | {"g": near}))


# 4.6 GB of images and 3.4 GB of out; 4.7 GB and 1.1 GB
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(("case", "count", "length", "gib"), [(DELTA, 64, 6400, 40), (KDA, 32, 4096, 20)], ids=["delta", "kda"])
def test_images_beyond_32_bits(case, count, length, gib):
    """A workspace of more than 4 GiB: the last sequence's output equals its output alone."""
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of the card's memory")
    case = replace(case, heads=64, key_heads=1, head_k=64, head_v=64)
    one = make(case, 1, length)
    call = {n: t.expand(count, *t.shape[1:]) if n in case.per_token else t for n, t in one.items()}
    assert case.workspace(count * length, count, 1) > 2**32
    out = public(case, **call)
    assert same(out[-1], public(case, **one)[0]) and same(out[0], out[-1])
