"""chunk_scan: the laws that hold for every variant, on the CPU and in the emulator; checks, texts, and that wrong kernels are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import scan_cases as laws
import torch
from compiled import compiled
from emulated_calls import needs_emulator
from kernel_laws import edited, found, waits_before_any_of
from scan_cases import BF16, F16, F32, SM90, Sizes, emulated, make, problem_of, same
from selection import costly, kept

import ssmgen
from ssmgen.cache.store import shared_cache
from ssmgen.compile.occupancy import LIMITS
from ssmgen.emulator.check import check
from ssmgen.errors import ArgumentError, UnsupportedError
from ssmgen.families.chunk_scan.rules import candidates, space
from ssmgen.families.chunk_scan.spec import OPERATOR, ScanProblem, ScanSpec
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl
from ssmgen.tune.model import Candidate, Card
from ssmgen.variants import inspect

SMALL = Sizes()
by_both = pytest.mark.parametrize("scan", [ssmgen.chunk_scan, pytest.param(emulated, marks=needs_emulator)], ids=["reference", "emulated"])


# Laws.


@costly(4)
@needs_emulator
@pytest.mark.parametrize(
    ("sizes", "tokens", "decay", "more"),
    [
        (SMALL, 130, 1.0, {}),
        (SMALL, 200, 1e-3, {}),  # long memory
        (SMALL, 130, 16.0, {"step": 3.0}),  # strong decay: a chunk's sum is about -3000
        (replace(SMALL, x=F16), 70, 1.0, {"z": True}),
        (Sizes(heads=4, groups=2, headdim=64, d_state=128), 70, 0.1, {"z": True}),
        (Sizes(heads=1, headdim=80, d_state=16), 65, 0.1, {}),
        (replace(SMALL, x=F32), 130, 1.0, {"z": True}),
        (replace(SMALL, x=F32, heads=1, d_state=80), 200, 1e-3, {}),
    ],
    ids=["plain", "long-memory", "strong-decay", "f16-gate", "model", "p80", "f32-gate", "f32-long-memory"],
)
def test_results_are_those_of_float64(sizes, tokens, decay, more):
    laws.is_accurate(emulated, sizes, tokens, decay, **more)


CUTS = ((BF16, 64), (BF16, 128), (F32, 128))
OFFSETS = ((BF16, 8), (BF16, 4), (F32, 2), (F32, 1))  # elements from multiples of 16 bytes
EXACT = replace(SMALL, x=F32)
pool, elsewhere = laws.a_pool_is_touched_where_it_should_be, laws.states_of_a_pool_may_begin_elsewhere
ends = partial(laws.checkpoints_are_final_states, lengths=(5, 0, 64, 130, 7))
ONE = replace(SMALL, heads=1)
# A name with a slash is another form of a law, which runs with -m matrix.
LAWS: dict[str, tuple[Sizes, Callable[[laws.Scan, Sizes], None]]] = {
    "packing": (SMALL, partial(laws.packing_changes_no_bit, lengths=laws.LENGTHS)),
    "packing/f32": (EXACT, partial(laws.packing_changes_no_bit, lengths=laws.LENGTHS)),
    "cut": (EXACT, partial(laws.a_cut_changes_no_bit, tokens=150, at=64)),
    **{f"cut/{x} at {at}": (replace(SMALL, x=x), partial(laws.a_cut_changes_no_bit, tokens=150, at=at)) for x, at in CUTS},
    "pool": (SMALL, partial(pool, state=BF16)),
    "pool/f32": (SMALL, partial(pool, state=F32)),
    "pool/all f32": (EXACT, partial(pool, state=F32)),
    "elsewhere": (SMALL, partial(elsewhere, state=BF16, index=torch.int64)),
    "elsewhere/i32": (SMALL, partial(elsewhere, state=F32, index=torch.int32)),
    "elsewhere/in order": (SMALL, partial(elsewhere, state=F32, index=None)),
    "layout": (SMALL, partial(laws.layout_changes_no_bit, offset=2)),
    **{f"layout/{x}, {n} off": (replace(SMALL, x=x), partial(laws.layout_changes_no_bit, offset=n)) for x, n in OFFSETS},
    "decoding": (SMALL, partial(laws.decoding_goes_on, tokens=70)),
    "ids": (SMALL, partial(laws.ids_are_sequences, lengths=(1, 63, 64, 7, 0, 57, 10))),
    "ids go on": (SMALL, laws.ids_go_on),
    "checkpoints": (ONE, partial(ends, state=F32, ids=True)),
    **{f"checkpoints/{state}": (ONE, partial(ends, state=state, ids=False)) for state in (F32, BF16, F16)},
    "checkpoints of a batch": (SMALL, laws.checkpoints_of_a_batch),
    "without tokens": (SMALL, partial(laws.sequences_without_tokens_keep_states, state=BF16)),
    "without tokens/f32": (SMALL, partial(laws.sequences_without_tokens_keep_states, state=F32)),
    "boundaries": (SMALL, laws.boundaries_that_make_no_sense_are_sequences_without_tokens),
}


@by_both
@pytest.mark.parametrize("law", kept(LAWS, lambda name: "/" not in name))
def test_laws(scan, law):
    sizes, holds = LAWS[law]
    holds(scan, sizes)


@costly(1)
@needs_emulator
@pytest.mark.parametrize(("x", "kept"), [(BF16, ((64, 3), (16, 1), (32, 2), (16, 4))), (F32, ((64, 2), (16, 1), (32, 3)))])
def test_variants_are_bit_equal(x, kept):
    call = make(replace(SMALL, headdim=64, x=x), 1, 130, z=True)
    problem = problem_of(**call, return_final_states=True)
    shapes = {(s.tile, s.stages): s for s in space(problem, SM90) if s.pdl is Pdl.TRIGGER_LOADED and s.min_blocks == 1}
    assert {tile for tile, _ in shapes} == {16, 32, 64} and {stages for _, stages in shapes} == {1, 2, 3, 4}
    specs = [shapes[at] for at in kept]
    results = [emulated(spec=spec, **call, return_final_states=True) for spec in specs]
    assert all(same(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


@needs_emulator
def test_place_in_the_batch_changes_no_bit():
    call = make(SMALL, 3, 70)
    whole = emulated(**call)
    per_token = ("x", "dt", "B", "C")
    assert all(same(emulated(**{n: t[i : i + 1] if n in per_token else t for n, t in call.items()})[0], whole[i]) for i in (0, 2))


def test_without_sequences_there_is_nothing_to_launch():
    for starts, tokens, final in (([0], 20, False), ([20], 20, True), ([0], 0, True), ([0, 0], 0, False)):
        call = make(SMALL, tokens) | {"cu_seqlens": torch.tensor(starts), "return_final_states": final}
        assert ssmgen.chunk_scan.build(**call).problem()[1] == 0, (starts, tokens)
    for starts, tokens, final in (([0, 0], 0, True), ([0, 0], 20, False)):  # a state to leave; perhaps tokens, which the host does not know
        call = make(SMALL, tokens) | {"cu_seqlens": torch.tensor(starts), "return_final_states": final}
        assert ssmgen.chunk_scan.build(**call).problem()[1] == SMALL.heads, (starts, tokens)


# Checks and choices.


def operands(**changes: object) -> dict[str, object]:
    return make(SMALL, 2, 5) | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(2, 5, 32)}, "x is [2, 5, 32]; expected [batch, T, H, P]"),
        ({"cu_seqlens": torch.zeros(3).int()}, "x is [2, 5, 2, 32]; expected [tokens, H, P] or [1, tokens, H, P], as cu_seqlens is given"),
        ({"B": torch.zeros(2, 5, 3, 32).bfloat16()}, "x has 2 heads; expected a multiple of the 3"),
        ({"C": torch.zeros(2, 5, 1, 16).bfloat16()}, "C is [2, 5, 1, 16]; expected […, G, N] = [2, 5, 1, 32]"),
        ({"C": torch.zeros(2, 5, 1, 32)}, "C is float32; expected bfloat16, the dtype of x"),
        ({"state_indices": torch.zeros(2).int()}, "state_indices is given without state"),
        ({"state": torch.zeros(2, 2, 32, 16)}, "state is [2, 2, 32, 16]; expected [slots, H, P, N] = [2, 2, 32, 32]"),
        ({"state": torch.zeros(1, 2, 32, 32)}, "state has 1 slots; expected 2, one per sequence. Pass a larger state, or state_indices."),
        (
            {"state": torch.zeros(2, 2, 32, 32), "return_final_states": True},
            "final_states_out is given with state, which receives the final states",
        ),
        (
            dict.fromkeys(("state", "initial_states"), torch.zeros(2, 2, 32, 32)) | {"has_initial_state": torch.ones(2).bool()},
            "initial_states and has_initial_state are both given",
        ),
        ({"state": torch.zeros(2, 2, 32, 32).mT}, "expected a dense state for each head. Pass a contiguous tensor."),
        ({"x": torch.zeros(2, 5, 32, 2).bfloat16().mT}, "expected contiguous rows. Pass a contiguous tensor."),
        ({"out": torch.zeros(1, 5, 2, 32).bfloat16().expand(2, 5, 2, 32)}, "two of its elements share memory"),
        ({"seq_idx": torch.zeros(2, 4).int()}, "seq_idx is [2, 4]; expected [batch, T] = [2, 5]"),
        ({"seq_idx": torch.zeros(2, 5).long()}, "seq_idx is int64; expected int32"),
        ({"checkpoint_positions": torch.ones(3).int()}, "checkpoint_positions is given without a result"),
        ({"checkpoints_out": torch.zeros(3, 2, 32, 32)}, "checkpoints_out is given without checkpoint_positions"),
        ({"return_checkpoints": True}, "return_checkpoints is True and checkpoint_positions is None"),
        (
            {"checkpoint_positions": torch.ones(3), "return_checkpoints": True},
            "checkpoint_positions is torch.float32; expected int32 or int64",
        ),
        (
            {"checkpoint_positions": torch.ones(3).int(), "checkpoints_out": torch.zeros(2, 2, 32, 32)},
            "checkpoints_out is [2, 2, 32, 32]; expected [count, H, P, N] = [3, 2, 32, 32]",
        ),
        (
            {"A": torch.zeros(2, requires_grad=True)},
            "A requires grad; expected no gradients, since the scan of a prompt has no backward",
        ),
        ({"dt_limit": (2, 1)}, "dt_limit is (2, 1); expected a tuple (low, high)"),
    ],
)
def test_what_is_wrong_in_words(changes, words):
    with pytest.raises(ArgumentError) as e:
        ssmgen.chunk_scan(**operands(**changes))
    assert words in str(e.value)


def test_everything_wrong_is_in_one_message():
    with pytest.raises(ArgumentError) as e:
        ssmgen.chunk_scan(**operands(A=torch.zeros(3), dt=torch.zeros(2, 5), state_indices=torch.zeros(2)))
    assert len(e.value.problems) == 4


def refused(problem: ScanProblem, arch: Arch = SM90) -> str:
    with pytest.raises(UnsupportedError) as e:
        select(OPERATOR, problem, 1, arch, False)
    return str(e.value)


def test_what_no_kernel_serves_in_words():
    odd = make(SMALL, 2, 5)
    odd["x"] = torch.zeros(2, 5, 2, 33).bfloat16()[..., 1:]
    assert "the tokens or heads of x, B, C, z or out begin at an odd element" in refused(problem_of(**odd))
    assert "headdim is 72; expected 16 … 256 in steps of 16" in refused(ScanProblem(headdim=72, d_state=64))
    assert "arch is sm_75; expected sm_80 or later for asynchronous copies and bf16" in refused(
        ScanProblem(headdim=64, d_state=16), Arch(75)
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120"])
def test_every_size_is_served_where_there_is_shared_memory_for_it(arch):
    """The smallest SM has 99 KiB."""
    where = Arch.parse(arch)
    for headdim in range(16, 257, 16):
        for d_state in range(16, 257, 16):
            problem = ScanProblem(headdim=headdim, d_state=d_state, z=True)
            spec = select(OPERATOR, problem, 1, where, False)
            assert not spec.violations(where)
            rules = [spec for _, spec, _ in candidates(problem, 1, where, False) if spec]
            assert rules[-1].shared_bytes == min(s.shared_bytes for s in rules)
            if d_state <= 128 or LIMITS[where.number].shared > 100 << 10:
                select(OPERATOR, replace(problem, x=DType.F32), 1, where, False)


SPECS = [
    ScanSpec(headdim=64, d_state=128, tile=64, D=DType.F32, final=True),
    ScanSpec(headdim=32, d_state=16, tile=16, stages=2, z=True, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64),
    ScanSpec(headdim=32, d_state=48, tile=32, stages=1, copy=4, initial=True, state=DType.F16, state_loads=Loads.ELEMENT, x=DType.F16),
    ScanSpec(headdim=32, d_state=16, tile=32, stages=1, copy=4, z=True, D=DType.F32, cu_seqlens=Index.I32, initial=True, x=DType.F32),
    ScanSpec(headdim=16, d_state=32, tile=16, stages=2, final=True, seq_idx=True, checkpoints=Index.I32, x=DType.F32),
    ScanSpec(headdim=32, d_state=16, tile=32, initial=True, final=True, seq_idx=True, checkpoints=Index.I64, state_loads=Loads.ELEMENT),
    ScanSpec(headdim=16, d_state=32, tile=16, stages=1, cu_seqlens=Index.I32, pool=True, index=Index.I32, checkpoints=Index.I32),
    ScanSpec(headdim=16, d_state=32, tile=16, stages=1, cu_seqlens=Index.I32, initial=True, pool=True, index=Index.I32),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_the_wait_precedes_every_access(spec):
    waits_before_any_of(replace(spec, pdl=Pdl.TRIGGER_LOADED), "load(", "load_u8(", "prefetch(", "copy_rows<", "store_")


@costly(1)
@needs_emulator
@pytest.mark.parametrize("spec", SPECS[1:], ids=lambda s: s.stem)
def test_check_of_variants(spec):
    assert check(spec, SM90, 4).passed


EDITS = {
    "no wait for copies": ("wait_copies<kStages - 3>();", "", "has not waited for the copy"),
    "a barrier too few": ("meet(1, kThreads);  // all threads see chunk n", "__syncwarp();  // all threads see chunk n", "shared memory"),
    "a role meets one time less": ("n < chunks + 1; ++n) {", "n < chunks; ++n) {", "waits at barrier 1, at which 64 of 192 threads are"),
    "a role waits for fewer": (
        "meet(1, kThreads);  // all threads see chunk n",
        "meet(1, 128);  // all threads see chunk n",
        "than the 128 threads that it is for",
    ),
    "each role by itself": (
        "meet(1, kThreads);  // all threads see chunk n",
        "meet(1 + (warp < kConsumers), warp < kConsumers ? 64 : 128);  //",
        "shared memory",
    ),
    "asked for too early": ("prefetch(n + kStages - 2);", "prefetch(n + kStages - 1);", "shared memory"),
    "one M for two chunks": (
        "const u32 to = kAtMix + n % 2 * (kChunk * kMixWords) + part;",
        "const u32 to = kAtMix + part;",
        "shared memory",
    ),
    "above the diagonal": ("column + e <= row[side]", "true", "off"),
    "a chunk too few": ("(length + kChunk - 1) / kChunk", "length / kChunk", "off"),
    "tokens past the end": ("n * kChunk + 2 * lane + e < length ?", "true ?", "off"),
    "no decay of the state": ("S[i][e] * decay", "S[i][e]", "off"),
    "an id's past": ("from[0] ? 0.f : exp2_approx(s[0])", "exp2_approx(s[0])", "off"),
    "an id's neighbours": (" && column + e + 1 >= from[side]", "", "off"),
    "an id's additions": ("alive[1] ? exp2_approx(alive[1] ? last - s[1] : 0.f) * d[1] : 0.f", "exp2_approx(last - s[1]) * d[1]", "off"),
    "a mark's tokens": ("? Pair(steps[at_first + 2 * lane + e]).high : 0.f", "? Pair(steps[at_first + 2 * lane + e]).high : 1.f", "off"),
    "a mark's decay": ("const float kept = last_from ? 0.f", "const float kept = false ? 0.f", "off"),
    "no upstream": ("  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "copier: no wait for copies": ("wait_copies<kStages - 3>();", "", "has not waited for the copy"),
    "copier: a barrier too few": ("prefetch(n + kStages - 2);", "prefetch(n + kStages - 1);", "shared memory"),
    "parts: no wait for copies": ("wait_copies<kStages - 2>();", "", "has not waited for the copy"),
    "parts: asked for too early": ("prefetch(n + kStages - 1);", "prefetch(n + kStages);", "shared memory"),
    "parts: one that nobody walks": ("passed = first_of(rank), chunks", "passed = first_of(rank) + (rank > 0), chunks", "off"),
    "parts: one that is passed twice": ("pass(n);", "pass(n ? n : 1);", "shared memory"),
    "parts: steps of another chunk": ("sum_steps(n + 1, raw_steps[0]);", "sum_steps(n + 1, raw_steps[1]);", "off"),
    "parts: no decay": (
        "S[i][e] = S[i][e] * decay;\n      }\n#pragma unroll kUnrolled",
        "S[i][e] = S[i][e];\n      }\n#pragma unroll kUnrolled",
        "off",
    ),
}


@costly(4)
@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_kernels_are_found(edit):
    old, new, words = EDITS[edit]
    change = edited(old, new, "store_checkpoints" if edit.startswith("a mark") else "")  # not in a call that it is compared with
    how = {"stages": 4, "copiers": 1} if edit.startswith("copier") else {"parts": 3} if edit.startswith("parts") else {}

    def scan(**call: object) -> object:
        return emulated(**call, spec=laws.variant(**how), change=change)

    one = replace(SMALL, heads=1)
    with found(words):
        if edit.startswith("an id"):
            laws.ids_go_on(scan, one)
        elif edit.startswith("a mark"):
            laws.checkpoints_are_final_states(scan, one, F32, ids=True, lengths=(130,))
        elif edit.startswith("parts"):
            laws.is_accurate(scan, one, 500, 0.1)
        else:
            laws.is_accurate(scan, one, 200, 0.1)


def test_what_a_launch_asks_for_counts_too():
    """Most of a block's shared memory is dynamic."""
    stats = inspect.stats(SPECS[0], SM90, shared_cache())
    assert (
        stats["dynamic_shared"] == SPECS[0].dynamic_bytes > 48 << 10 and stats["shared"] + stats["dynamic_shared"] == SPECS[0].shared_bytes
    )
    assert stats["blocks_per_sm"] == 1 and Candidate(SPECS[0], 1, registers=32).resident(Card(SM90, 132, 4.0)) == 132


@costly(1)
@pytest.mark.matrix
@pytest.mark.parametrize(("arch", "turn"), [("sm_80", 0), ("sm_90a", 1), ("sm_100a", 2)])
def test_no_variant_spills(arch, turn):
    """In addition to the kernels in generated/: the variants with the most and the fewest registers per thread, which take turns with
    architectures."""
    where, full = Arch.parse(arch), {"D": DType.F32, "dt_bias": DType.F32, "initial": True, "final": True}
    problems = (
        ScanProblem(headdim=128, d_state=128, **full),
        ScanProblem(headdim=64, d_state=256, z=True, **full),
        ScanProblem(headdim=64, d_state=256, x=DType.F32, z=True, **full),
        ScanProblem(headdim=64, d_state=128, seq_idx=True, checkpoints=Index.I64, **full),
    )
    for problem in problems[turn::3]:
        spec = select(OPERATOR, problem, 1, where, where >= Arch(90))
        resources = compiled(spec, where).resources
        assert not resources.spills and not resources.stack, f"{spec}: {resources}"
