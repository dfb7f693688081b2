"""causal_conv1d and causal_conv1d_update: specs, the text and machine code of kernels, and that wrong ones are found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle, product

import kernel_laws as laws
import pytest
from conv_cases import FIRST, I32, LAST, POOL, RING, ROLL, SHORT, STATEFUL, UpdateCase
from emulated_calls import SM90, needs_emulator
from selection import costly, few, kept
from subjects import a_mistake_is_found

from ssmgen.families.causal_conv1d import spec as conv
from ssmgen.families.causal_conv1d.spec import ConvLayout, ConvProblem, ConvSpec
from ssmgen.families.causal_conv1d_update import spec as step
from ssmgen.families.causal_conv1d_update.spec import Advance, Saved, StateLayout, Tokens, UpdateProblem, UpdateSpec
from ssmgen.select import registry
from ssmgen.spec.kernel import DType, Index, KernelSpec, Loads, Pdl

# Specs and text.

WHOLE_SPEC = ConvSpec(layout=ConvLayout.FIRST, width=4, vec=8)
CHANNELS_SPEC = ConvSpec(layout=ConvLayout.LAST, width=4, vec=4, vectors=8)
STEP_SPEC = UpdateSpec(width=4, state_len=3, vec=4)


@pytest.mark.parametrize(
    ("spec", "change", "words"),
    [
        (WHOLE_SPEC, {"width": 9}, "width is 9; expected 1 … 8"),
        (WHOLE_SPEC, {"width": 1, "final": True}, "width is 1 with a state; expected 2 or more, or no state"),
        (
            WHOLE_SPEC,
            {"pool": True, "initial": True},
            "pool is yes with initial or final; expected one or the other: a pool holds both states",
        ),
        (WHOLE_SPEC, {"started": True}, "index or started is set without a pool; expected pool=yes"),
        (
            WHOLE_SPEC,
            {"seq_idx": True, "query_start_loc": Index.I32},
            "seq_idx is yes and query_start_loc is i32; expected one of them",
        ),
        (CHANNELS_SPEC, {"shifted": True}, "shifted is yes with layout=channel_last, loads=vector; expected channel-first vectors"),
        (WHOLE_SPEC, {"threads": 48}, "threads is 48; expected 32 … 1024 in steps of 32"),
        (WHOLE_SPEC, {"vectors": 0}, "vectors is 0 and min_blocks 0; expected 1 or more"),
        (WHOLE_SPEC, {"vec": 4}, "vec is 4 of bf16; expected 16 bytes"),
        (CHANNELS_SPEC, {"vec": 8}, "vec is 8 of bf16; expected 4 or 8 bytes"),
        (CHANNELS_SPEC, {"vectors": 2}, "a warp takes pieces of 2 tokens; expected 3 or more, the history"),
        (WHOLE_SPEC, {"width": 3}, "a lane's taps have 6 bytes; expected a multiple of 4. Use taps=element."),
        (WHOLE_SPEC, {"width": 6}, "a lane's taps have 12 bytes; expected 4, 8, 16 or 32, to stay aligned. Use taps=element."),
        (CHANNELS_SPEC, {"loads": Loads.ELEMENT}, "taps is vector for lanes whose channels are apart; expected element"),
        (STEP_SPEC, {"width": 1}, "width is 1; expected 2 … 8"),
        (STEP_SPEC, {"tokens": 17}, "tokens is 17; expected 1 … 16"),
        (
            STEP_SPEC,
            {"advance": Advance.ROLL},
            "advance is roll and position is none; expected none with shift, and a type with ring or roll",
        ),
        (
            STEP_SPEC,
            {"count": Tokens.RAGGED},
            "count is ragged and query_start_loc is none; expected a type if and only if count is ragged",
        ),
        (STEP_SPEC, {"layout": StateLayout.ANY}, "state_len is 3 with layout=any; expected 0"),
        (STEP_SPEC, {"state_len": 5}, "state_len is 5; expected 3 or 4"),
        (STEP_SPEC, {"advance": Advance.RING, "position": Index.I32}, "layout is runs with advance=ring; expected another layout"),
        (
            STEP_SPEC,
            {"advance": Advance.ROLL, "position": Index.I32, "count": Tokens.COUNTED},
            "count is counted with runs that roll; expected fixed",
        ),
        (STEP_SPEC, {"saved_index": Index.I32}, "saved_index is i32 and saved is no; expected saved windows"),
        (STEP_SPEC, {"parents": Index.I32}, "tokens is 1 with a draft tree; expected several"),
        (
            replace(STEP_SPEC, tokens=2),
            {"parents": Index.I32, "children": Index.I32},
            "parents and children are both set; expected one of them",
        ),
        (
            replace(STEP_SPEC, tokens=2),
            {"children": Index.I32, "count": Tokens.RAGGED, "query_start_loc": Index.I32},
            "children is set with count=ragged",
        ),
        (STEP_SPEC, {"threads": 2048}, "threads is 2048; expected 32 … 1024"),
        (STEP_SPEC, {"vec": 8}, "vec is 8 of bf16; expected 4 or 8 bytes"),
    ],
)
def test_violations_in_words(spec, change, words):
    laws.says_its_violation(spec, change, words)


@pytest.mark.parametrize("spec", [WHOLE_SPEC, CHANNELS_SPEC, STEP_SPEC], ids=lambda s: s.stem)
def test_violations_of_architectures(spec):
    laws.says_its_architectures(spec)


FULL = {"pool": True, "started": True, "index": Index.I64, "query_start_loc": Index.I32}
TEXTS = [
    WHOLE_SPEC,
    replace(WHOLE_SPEC, **FULL, shifted=True, bias=DType.F32),
    replace(WHOLE_SPEC, seq_idx=True, initial=True, final=True, loads=Loads.ELEMENT, taps=Loads.ELEMENT),
    CHANNELS_SPEC,
    replace(CHANNELS_SPEC, **FULL, bias=DType.BF16),
    replace(CHANNELS_SPEC, seq_idx=True, initial=True, final=True, loads=Loads.ELEMENT, taps=Loads.ELEMENT),
    STEP_SPEC,
    replace(STEP_SPEC, advance=Advance.ROLL, position=Index.I64, tokens=4, state_len=6, index=Index.I32, bias=DType.F32),
    replace(
        STEP_SPEC, advance=Advance.RING, position=Index.I32, count=Tokens.RAGGED, query_start_loc=Index.I64, layout=StateLayout.ANY,
        state_len=0, saved=Saved.ANY, saved_index=Index.I32, loads=Loads.ELEMENT, taps=Loads.ELEMENT, tokens=4,
    ),
]  # fmt: skip


@pytest.mark.parametrize("pdl", Pdl)
@pytest.mark.parametrize("spec", TEXTS, ids=lambda s: s.name)
def test_wait_precedes_every_access_and_the_launch_attribute_follows_the_text(spec, pdl):
    laws.waits_first(spec, pdl, "load|store|find")


@pytest.mark.parametrize("spec", TEXTS, ids=lambda s: s.name)
def test_layout_of_the_text(spec):
    laws.is_well_formed(spec)


OFF = (
    "silu exp2 bias seq_idx query_start_loc pad_slot_id initial_states find_sequence griddepcontrol.wait parent elder intermediate "
    "cache_seqlens accepted"
)


@pytest.mark.parametrize("spec", [WHOLE_SPEC, CHANNELS_SPEC, STEP_SPEC], ids=lambda s: s.stem)
def test_what_is_switched_off_is_not_in_the_text(spec):
    laws.has_none_of(replace(spec, silu=False), *OFF.split(), "struct f16")


# Errors that the emulator finds in wrong kernels.

ODD = replace(LAST, layout="last_odd", dim=37)
SPECULATED = UpdateCase("u", ROLL, tokens=4, state="channels")
EDITS = {
    "no wait": (FIRST, "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "halo of another lane": (FIRST, "(lane + 32 - h) % 32", "(lane + 31 - h) % 32", "off by"),
    "before the row": (
        replace(FIRST, layout="first_slice", length=541),
        "if (t >= 0 && t < tokens) store",
        "if (t < tokens) store",
        "store",
    ),
    "no padding": (replace(LAST, lengths=SHORT, **POOL), "if (u64(slot) >= u64(slots) || slot == pad_slot_id)", "if (false)", "outside"),
    "past kept by all pieces": (replace(LAST, **STATEFUL), "if (first == 0) {\n    Pack", "if (true) {\n    Pack", "no barrier between"),
    "other segments": (replace(LAST, seq_idx=True), "id[t + k * kDilation] == id[t + kWidth - 1]", "true", "off by"),
    "channels past the last": (ODD, "if (c < dim && lane > 0) store", "if (lane > 0) store", "no barrier between"),
    "heads of the piece before": (
        replace(FIRST, lengths=(510, 90)),
        "starts_at(next - 1) + kWidth - 1",
        "starts_at(next - 1)",
        "no barrier",
    ),
    "heads not replaced": (replace(FIRST, lengths=(300, 90), **STATEFUL), "__any_sync(0xffffffffu, begins)", "false", "differs"),
    "indices not compared": (
        replace(FIRST, seq_idx=True),
        "one_sequence[u] = __all_sync(0xffffffffu, same)",
        "one_sequence[u] = true",
        "off by",
    ),
    "halves of words": (replace(ODD, dim=300), "is_odd(i) ? 0x5432 : 0x3210", "0x3210", "off by"),
    "window in the wrong order": (UpdateCase("u", tokens=2), "window[i] = window[i + 1]", "window[i] = window[i]", "differs"),
    "padded sequence written": (UpdateCase("u"), "u64(slot) < u64(slots) && slot != pad_slot_id", "true", "outside of every operand"),
    "count out of range": (SPECULATED, "accepted >= 1 && accepted + kWidth - 2 <= i64(state_len)", "true", "outside"),
    "siblings in a row": (UpdateCase("u", tokens=5, parents=I32), "u64(parent) < u64(t) ? int(parent)", "false ? 0", "off by"),
    "a parent that is later": (UpdateCase("u", tokens=5, parents=I32), "u64(parent) < u64(t)", "parent >= 0", "off by"),
    "parents of elders": (UpdateCase("u", tokens=9, children=I32), "parent_of_eldest[eldest]", "parent_of_eldest[t]", "differs"),
    "no barrier in a tree": (UpdateCase("u", tokens=9, children=I32), "= -1;\n  }\n  __syncthreads();", "= -1;\n  }", "no barrier between"),
    "windows in a row": (
        UpdateCase("u", tokens=5, parents=I32, saved="windows"),
        "after[i] = path[t][i + 1]",
        "after[i] = window[i]",
        "differs",
    ),
    "ring one behind": (UpdateCase("u", RING, state="channels", extra=2), "u32(kWidth - 1 + first", "u32(kWidth + first", "differs"),
}


@costly(6)
@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit):
    a_mistake_is_found("causal_conv1d", EDITS[edit])


# Machine code.

LOADS = {
    "first": {"layout": ConvLayout.FIRST},
    "first-shifted": {"layout": ConvLayout.FIRST, "shifted": True},
    "first-any": {"layout": ConvLayout.FIRST, "loads": Loads.ELEMENT, "taps": Loads.ELEMENT},
    "last": {"layout": ConvLayout.LAST},
    "last-any": {"layout": ConvLayout.LAST, "loads": Loads.ELEMENT, "taps": Loads.ELEMENT},
}
MODES = {"plain": {}, "ids": {"seq_idx": True}, "states": {"initial": True, "final": True}, "packed": FULL}


def sampled(kind: str, widths: Iterable[int]) -> list[KernelSpec]:
    """Problems of these widths with every set of operands; dtypes take turns. Sizes are small, or fill the card."""
    types, weights = cycle(DType), cycle([DType.BF16, DType.F32, None, DType.F16, DType.BF16])
    specs: dict[KernelSpec, None] = {}
    for width, mode in product(widths, MODES):
        if (width == 1 and mode in ("states", "packed")) or (kind == "first" and mode == "packed"):  # such calls are shifted
            continue
        weight = next(weights)
        problem = ConvProblem(width=width, x=next(types), weight=weight or DType.F16, bias=weight, **LOADS[kind], **MODES[mode])
        if kind.startswith("first") and width * problem.weight.size not in (4, 8, 16, 32):
            problem = replace(problem, taps=Loads.ELEMENT)
        specs |= {registry.select(conv.OPERATOR, problem, size, SM90, True): None for size in (1024, 2**20)}
    return list(specs)


def sampled_updates(advance: Advance, widths: Iterable[int]) -> list[KernelSpec]:
    """Problems of these widths in every layout of the state, for some numbers of tokens; dtypes take turns."""
    types, counts = cycle((DType.BF16, DType.F32, DType.F16)), cycle((1, 4, None, 2, 20, 3, 8))
    position = Index.NONE if advance is Advance.SHIFT else Index.I32
    specs: dict[KernelSpec, None] = {}
    for width, layout, tree in product(widths, StateLayout, (Index.NONE, Index.I64)):
        starts = Index.I32 if (T := next(counts)) is None else Index.NONE
        if T == 1 and tree is not Index.NONE:
            T = 6
        tokens, count = step.tokens_of(width, T or 1, starts, tree)
        runs = layout is StateLayout.RUNS
        if runs and (advance is Advance.RING or (advance is Advance.ROLL and count is not Tokens.FIXED)):
            continue
        loads = Loads.ELEMENT if layout is StateLayout.ANY else Loads.VECTOR
        problem = UpdateProblem(
            width=width, x=next(types), weight=DType.F32, bias=DType.F32, advance=advance, position=position, tokens=tokens, count=count,
            query_start_loc=starts, index=Index.I32, layout=layout, loads=loads, taps=loads, parents=tree,
        )  # fmt: skip
        for length in problem.runs_lens if runs else (0,):
            specs[registry.select(step.OPERATOR, replace(problem, state_len=length), 64, SM90, True)] = None
    return list(specs)


def widths(*others: int):
    """The width that all models have; and others: an odd one and the widest, which takes the most registers."""
    return pytest.mark.parametrize("widths", kept(((4,), others), lambda widths: widths == (4,)), ids=("w4", "others"))


@widths(3, 8)
@pytest.mark.parametrize("kind", few(LOADS, 1))
def test_nothing_spills_over_whole_sequences(kind, widths):
    assert not laws.spilled((spec, SM90) for spec in sampled(kind, widths))


@widths(3, 6)
@pytest.mark.parametrize("advance", few(Advance, 1), ids=lambda a: a.value)
def test_nothing_spills_in_updates(advance, widths):
    assert not laws.spilled((spec, SM90) for spec in sampled_updates(advance, widths))
