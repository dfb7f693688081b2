"""The kernels of mamba2_layer, gdn_layer and kda_layer: the emulator's check, on operands made from a spec; and their texts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import kernel_laws as laws
import pytest
from layer_calls import SM90, differing, emulate, emulated_chain, make, needs_emulator
from layer_cases import I32
from layer_cases import MAMBA as BASE_CASE
from selection import costly
from test_check import edited

from ssmgen.compile.render import render
from ssmgen.emulator import EmulatorError
from ssmgen.emulator.check import check
from ssmgen.engine.layers.norm import LayerGatedNormSpec
from ssmgen.engine.recurrences.attention.problem import Gate, Update
from ssmgen.select.catalog import SPECS
from ssmgen.spec.kernel import Pdl, parse_spec

ROWS = (
    "dim_k=32,dim_v=16,nheads=4,beta=bf16,A_log=f32,dt_bias=f32,beta_form=sigmoid,l2norm=yes,index=i32,"
    "norm=bf16,norm_size=16,norm_grouped=yes,norm_first=yes"
)
BASES = {  # fields that the variants of a layer share
    "mamba": "mamba2_layer:d_state=32,headdim=16,nheads=4,ngroups=2,D=f32,dt_bias=f32,index=i32,norm=bf16,norm_size=64",
    "mamba tokens": "mamba2_layer:several=yes,d_state=32,headdim=16,nheads=4,ngroups=2,D=f32,dt_bias=f32,index=i32,norm=bf16,norm_size=64",
    "gdn": f"delta_layer:{ROWS},key_heads=2,g=bf16,gate=softplus",
    "kda": f"delta_layer:{ROWS},key_heads=4,gk=bf16,gate=softplus,norm_activation=sigmoid",
    "gdn tokens": f"delta_layer:{ROWS},key_heads=2,tokens=many,g=bf16,gate=softplus",
    "kda tokens": f"delta_layer:{ROWS},key_heads=2,tokens=many,gk=bf16,gate=softplus,norm_activation=sigmoid",
}
MAMBA = {
    "two": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "first": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_first,norm_pdl=trigger_first",
    "norm first": "state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,pdl=trigger_top,norm_pdl=trigger_first",
    "ahead": "state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,prefetch=3,windows_ahead=yes,pdl=trigger_loaded",
    "tail": "state=f32,lanes=8,vec=4,ilp=4,tile=32,threads=64,pdl=trigger_top,norm_size=32,norm_grouped=yes",
    "tiles": "state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,conv_layout=channels,conv_len=4,conv_bias=f32",
    "any": "state=f32,lanes=8,vec=4,ilp=4,tile=16,threads=32,conv_layout=any,conv_loads=element,conv_taps=element",
    "odd": "state=f16,state_loads=element,norm_loads=element,lanes=4,vec=8,ilp=2,tile=16,threads=32,out=f32,norm=f32",
    "gated": "state=f32,norm=none,norm_size=0,z=bf16,lanes=8,vec=4,ilp=2,tile=8,threads=32,index=none",
    "bare": "state=bf16,norm=none,norm_size=0,D=none,dt_bias=none,lanes=2,vec=8,ilp=1,tile=16,threads=32,conv_width=2,conv_len=1",
    "across": "state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,headdim=24,norm_size=32,norm_grouped=yes",
    "log": "state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,A_is_log=yes",
    "limit": "state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,dt_limit=yes,norm_first=yes,norm_activation=silu",
}
MAMBA_TOKENS = {
    "final": "conv_tokens=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "tail": "conv_tokens=2,state=f32,lanes=8,vec=4,ilp=4,tile=32,threads=64,pdl=trigger_top,norm_size=32,norm_grouped=yes",
    "tiles": "conv_tokens=2,state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,conv_layout=channels,conv_len=4,conv_bias=f32",
    "any": "conv_tokens=3,state=f32,lanes=8,vec=4,ilp=4,tile=16,threads=32,conv_layout=any,conv_loads=element,conv_taps=element",
    "kept": "conv_tokens=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,intermediate_states=bf16,conv_windows=runs,update=none",
    "rows": "conv_tokens=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,intermediate_states=f32,intermediate_indices=i32,update=none,"
    "conv_windows=any,conv_rows=i32,state_loads=element",
    "windows": "conv_tokens=1,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,conv_windows=runs,conv_rows=i64,norm=none,norm_size=0,z=f32",
    "accepted": "conv_tokens=3,state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,accepted=i32,update=each,pool=split,conv_len=5",
    "rolled": "conv_tokens=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,accepted=i64,update=each,pool=split,conv_layout=channels,"
    "conv_len=12",
    "first": "conv_tokens=3,state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,accepted=i32,update=each,pool=split,conv_len=5,"
    "pdl=trigger_first,norm_pdl=trigger_first",
    "log": "conv_tokens=2,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,A_is_log=yes,dt_limit=yes,index=none,norm_first=yes",
}
GDN = {
    "two": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "one": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,norm_inside=yes,pdl=trigger_loaded",
    "first": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,norm_inside=yes,pdl=trigger_first",
    "norm first": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded,norm_pdl=trigger_first",
    "cluster": "state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,norm_inside=yes,clustered=yes,pdl=trigger_loaded",
    "quarters": "state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,norm_inside=yes,clustered=yes,norm_first=no,norm_activation=sigmoid",
    "tail": "state=f32,lanes=8,vec=4,ilp=4,tile=32,threads=64,norm_inside=yes,pdl=trigger_top",
    "tiles": "state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,conv_layout=channels,conv_len=4,conv_bias=f32",
    "kv": "state=bf16,layout=kv,lanes=8,vec=4,ilp=8,tile=32,threads=32,norm_inside=yes,norm_activation=sigmoid",
    "kv-two": "state=f32,layout=kv,lanes=8,vec=4,ilp=4,tile=16,threads=32,conv_layout=any,conv_loads=element,conv_taps=element",
    "odd": "state=f16,state_loads=element,norm_loads=element,lanes=4,vec=8,ilp=2,tile=16,threads=32,norm_inside=yes,out=f32,norm=f32",
    "bare": "state=f32,norm=none,norm_size=0,norm_grouped=no,dt_bias=none,lanes=8,vec=4,ilp=2,tile=8,threads=32,index=none",
    "twice": "state=bf16,beta_form=twice_sigmoid,l2norm=no,norm_first=no,lanes=2,vec=8,ilp=1,tile=16,threads=32,conv_width=2,conv_len=1",
}
KDA = {
    "two": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "one": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,norm_inside=yes,pdl=trigger_loaded",
    "cluster": "state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,norm_inside=yes,clustered=yes,norm_activation=sigmoid",
    "bounded": "state=f32,gate=bounded,key_heads=2,lanes=8,vec=4,ilp=4,tile=32,threads=64,norm_inside=yes,pdl=trigger_top",
    "bare": "state=f32,gate=bounded,A_log=none,norm=none,norm_size=0,norm_grouped=no,lanes=8,vec=4,ilp=2,tile=8,threads=32,index=none",
    "kv": "state=bf16,layout=kv,lanes=8,vec=4,ilp=8,tile=32,threads=32,norm_inside=yes,conv_len=4",
    "odd": "state=f16,state_loads=element,operand_loads=element,norm_loads=element,lanes=4,vec=8,ilp=2,tile=16,threads=32,out=f32,gk=f32",
}
GDN_TOKENS = {
    "final": "conv_tokens=3,chunk=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "tail": "conv_tokens=2,chunk=2,state=f32,lanes=8,vec=4,ilp=4,tile=32,threads=64,pdl=trigger_top",
    "tiles": "conv_tokens=2,chunk=2,state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,conv_layout=channels,conv_len=4,conv_bias=f32",
    "kept": "conv_tokens=3,chunk=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,intermediates=yes,conv_windows=runs,update=none",
    "rows": "conv_tokens=8,chunk=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,intermediates=yes,intermediate_indices=i32,"
    "conv_windows=any,conv_rows=i32,update=none,state_loads=element",
    "accepted": "conv_tokens=3,chunk=3,state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,accepted=i32,update=each,pool=split,conv_len=5",
}
KDA_TOKENS = {
    "plain": "conv_tokens=3,chunk=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "bounded": "gate=bounded,A_log=none,conv_tokens=5,chunk=5,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,norm=none,"
    "norm_size=0,norm_grouped=no,index=none",
    "kv": "conv_tokens=2,chunk=2,state=bf16,layout=kv,lanes=8,vec=4,ilp=8,tile=32,threads=32,conv_windows=runs,conv_rows=i64",
    "odd": "conv_tokens=3,chunk=3,state=f16,state_loads=element,operand_loads=element,norm_loads=element,lanes=4,vec=8,"
    "ilp=2,tile=16,threads=32,gk=f32,conv_layout=any,conv_loads=element,conv_taps=element",
    "rolled": "conv_tokens=8,chunk=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,accepted=i64,update=each,pool=split,"
    "conv_layout=channels,conv_len=12",
}
HOW = {"mamba": MAMBA, "mamba tokens": MAMBA_TOKENS, "gdn": GDN, "kda": KDA, "gdn tokens": GDN_TOKENS, "kda tokens": KDA_TOKENS}
ALL = [f"{layer}: {name}" for layer, how in HOW.items() for name in how]


def spec_of(which: str) -> Any:
    layer, name = which.split(": ")
    kind, base = BASES[layer].split(":")
    fields = dict(item.split("=") for item in f"{base},{HOW[layer][name]}".split(","))
    return parse_spec(f"{kind}:" + ",".join("=".join(item) for item in fields.items()), SPECS)


EARLY = [which for which in ALL if which.endswith("first")]


@needs_emulator
@pytest.mark.parametrize("which", EARLY)
def test_check_of_early_triggers(which):
    assert check(spec_of(which), SM90, 4).passed


@costly(14)
@needs_emulator
@pytest.mark.parametrize("which", [which for which in ALL if which not in EARLY])
def test_check_of_variants(which):
    for batch in (1, 4):
        assert check(spec_of(which), SM90, batch).passed


EDITS = [  # of the first kernel
    ("mamba: two", "arrived == kReaders - 1;", "false;"),
    ("mamba: two", "(kGroups - 1) * kDState", "kGroups * kDState"),
    ("mamba: tiles", "(kDState + n) / 4", "n / 4"),
    ("mamba: gated", "silu(sum[c])", "sum[c]"),
    ("mamba: tail", "arrivals + slot * arrivals_slot + group, 0)", "arrivals + slot * arrivals_slot + group, 1)"),
    ("mamba tokens: final", "arrived == kReaders - 1;", "false;"),
    ("mamba tokens: final", "kWidth - 1 + kTokens - kLength + i", "kWidth + kTokens - kLength - 2 + i"),
    ("mamba tokens: tiles", "i < kDState ? B_staged : C_staged", "true ? B_staged : C_staged"),
    ("mamba tokens: kept", "tile == 0 && head % kHeadsPerGroup == 0", "tile == 0 && head == 0"),
    ("mamba tokens: kept", "inputs[r][t + 1 + k]", "inputs[r][t + k]"),
    ("mamba tokens: rows", "|| !keeps_window", ""),
    ("mamba tokens: accepted", "column & 2 ? there", "column & 1 ? there"),
    ("mamba tokens: accepted", "inputs[r][1 + i]", "inputs[r][i]"),
    ("mamba tokens: rolled", "int(column) + k", "k"),
    ("mamba tokens: tail", "arrivals + slot * arrivals_slot + group, 0)", "arrivals + slot * arrivals_slot + group, 1)"),
    ("gdn: one", "* weight[i] * gate[i]", "* weight[i]"),
    ("gdn: one", "1.f / kDimV, eps", "1.1f / kDimV, eps"),
    ("gdn: two", "arrived == kReaders - 1;", "false;"),
    ("gdn: two", "(kKeyHeads - 1) * kDimK", "kKeyHeads * kDimK"),
    ("gdn: kv-two", "2 * kKeyHeads * kDimK + head", "2 * kKeyHeads * kDimK + 0 * head"),
    ("gdn: tiles", "(kDimK + n) / 4", "n / 4"),
    ("gdn: bare", "silu(sum[c])", "sum[c]"),
    ("gdn: tail", "arrivals + slot * arrivals_slot + group, 0)", "arrivals + slot * arrivals_slot + group, 1)"),
    ("kda: one", "gk_head + offset", "gk_head"),
    ("kda: two", "token.query[p][j] * token.decay[p][j]", "token.query[p][j]"),
    ("kda: bounded", "lower_bound * sigmoid", "sigmoid"),
    ("kda: kv", "* weight[i] * gate[i]", "* weight[i]"),
    ("gdn tokens: final", "arrived == kReaders - 1;", "false;"),
    ("gdn tokens: final", "i < kDimK ? 0 : 1 * (kDimK / 4)", "0"),
    ("gdn tokens: tiles", "(kKeyHeads - 1) * kDimK", "kKeyHeads * kDimK"),
    ("gdn tokens: kept", "tile == 0 && head % kHeadsPerKey == 0", "tile == 0 && head == 0"),
    ("gdn tokens: kept", "kept_row * intermediate_states_row", "0 * intermediate_states_row"),
    ("gdn tokens: rows", "(keeps ? kept_row : 0)", "0"),
    ("gdn tokens: rows", "if (keeps && ", "if ("),
    ("gdn tokens: accepted", "dst_slot = dst_staged[t]", "dst_slot = dst_staged[0]"),
    ("gdn tokens: tail", "arrivals + slot * arrivals_slot + group, 0)", "arrivals + slot * arrivals_slot + group, 1)"),
    ("kda tokens: plain", "gk_head + offset", "gk_head"),
    ("kda tokens: plain", "staged[c * kTokenQuads + quad(0, p, z)] = quad_of(token.query[p] + 4 * z);", ""),
    ("kda tokens: rolled", "int(column) + k", "k"),
]


def of_kernel(norm: bool, old: str, new: str) -> Any:
    """A render that plants a mistake in the norm's kernel or in the first one."""

    def rendered(spec: Any, arch: Any) -> str:
        return edited(old, new)(spec, arch) if isinstance(spec, LayerGatedNormSpec) == norm else render(spec, arch)

    return rendered


@costly(18)
@needs_emulator
@pytest.mark.parametrize(("which", "old", "new"), EDITS, ids=[f"{which}, {old}" for which, old, _ in EDITS])
def test_check_finds_what_is_wrong(which, old, new, monkeypatch):
    """The emulator itself finds races and missing writes."""
    monkeypatch.setattr("ssmgen.emulator.render", of_kernel(False, old, new))
    try:
        assert not check(spec_of(which), SM90).passed
    except EmulatorError as e:
        assert any(name in str(e) for name in ("conv_", "staged", "intermediate_states", "which is read only"))


PADDED = replace(BASE_CASE, tokens=3, accepted=I32, batch=8)


@needs_emulator
@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (BASE_CASE, "const bool live =", "const bool live = true ||"),
        (PADDED, "in_range && is_slot", "is_slot"),
        (PADDED, "&& is_slot(window_slot)", ""),
        (PADDED, "is_slot(slot) &&", ""),
    ],
)
def test_check_finds_a_norm_that_forgets_the_padding(case, old, new, monkeypatch):
    """Nothing is written of a padded row, whose gate is NaN."""
    call, chain = make(case), emulated_chain(case)
    monkeypatch.setattr("ssmgen.emulator.render", of_kernel(True, old, new))
    emulate(call.built())
    assert differing(call, chain) == ["out"]


# Texts.


@pytest.mark.parametrize("which", ALL)
def test_layout_of_the_text(which):
    spec = spec_of(which)
    for part in spec.kernels:
        laws.is_well_formed(part)
    inside = getattr(spec, "norm_inside", False)
    assert len(spec.kernels) == (1 if inside or spec.norm.weight is None else 2)
    text = render(spec, SM90)
    if "tokens" in which:
        assert ("arrivals" in text) == (spec.update is not Update.NONE)
    if spec.family == "delta_layer":
        assert ("squares" in text) == inside and spec.stem.startswith(f"{which[:3]}_layer_")
        assert ("lower_bound" in [p.name for p in spec.parameters()]) == (spec.gate is Gate.BOUNDED)
    if "tokens" in which and spec.norm.weight is not None:
        assert (spec.kernels[1].tokens, spec.kernels[1].accepted) == (spec.conv.tokens, spec.accepted)


@pytest.mark.parametrize("which", [which for which in ALL if "tokens" in which])
def test_shared_memory_is_what_the_text_declares(which):
    spec, sizes = spec_of(which), {"Quad": 16, "float": 4, "int": 4, "i64": 8}
    known = {"kChunk": spec.chunk, "kTile": spec.tile, "1": 1}
    if spec.family == "mamba2_layer":
        known["kVectorQuads"] = spec.d_state // 4
    else:
        known["kTokenQuads"] = len(spec.token_vectors()) * spec.dim_k // 4 + 2
    declared = re.findall(r"^ +SHARED\((\w+), \w+, ([^)]*)\);", render(spec, SM90), re.M)
    total = sum(sizes[kind] * math.prod(known[factor] for factor in count.split(" * ")) for kind, count in declared)
    assert total <= spec.shared_bytes <= total + 63


WAITING = ["mamba: two", "mamba: gated", "mamba tokens: final", "mamba tokens: accepted", "mamba tokens: kept", "gdn: one", "gdn: two",
           "gdn: kv", "gdn tokens: final", "gdn tokens: accepted", "kda tokens: plain"]  # fmt: skip


@pytest.mark.parametrize("pdl", Pdl)
@pytest.mark.parametrize("which", WAITING)
def test_wait_precedes_every_access(which, pdl):
    laws.waits_first(spec_of(which), pdl)


@pytest.mark.parametrize("pdl", [p for p in Pdl if p is not Pdl.OFF])
@pytest.mark.parametrize("norm_pdl", [p for p in Pdl if p not in (Pdl.OFF, Pdl.TRIGGER_TOP, Pdl.TRIGGER_SLOT)])
@pytest.mark.parametrize(("which", "more"), [("mamba: two", set()), ("mamba tokens: accepted", {"num_accepted_tokens"})])
def test_the_norm_touches_its_input_after_the_wait(which, more, pdl, norm_pdl):
    """And the gate, if the first kernel lets the norm start before the gate is known to be complete."""
    spec = replace(spec_of(which), pdl=pdl, norm_pdl=norm_pdl)
    norm = spec.kernels[1]
    before, after = render(norm, SM90).split('extern "C"')[1].split("wait_for_upstream();")
    late = pdl is Pdl.TRIGGER_FIRST
    assert not spec.violations(SM90) and norm.late == late and norm.pdl is norm_pdl
    assert "raw_x" not in before and "raw_x" in after
    assert set(norm.early_operands()) == (set() if late else {"z", "norm_weight", "state_indices"} | more)
    assert ("raw_gate" in before) == ("state_indices" in before.split(") {")[1]) == (not late)
    assert ("allow_dependents" in before) == (norm_pdl is Pdl.TRIGGER_FIRST) and ("allow_dependents" in after) == (norm_pdl is not Pdl.WAIT)


@pytest.mark.parametrize(
    ("which", "change", "words"),
    [
        ("mamba: two", {"norm_pdl": Pdl.OFF}, "norm_pdl is off"),
        ("mamba: gated", {"norm_pdl": Pdl.TRIGGER_FIRST}, "norm_pdl is trigger_first without a separate norm"),
        ("gdn: one", {"norm_pdl": Pdl.TRIGGER_FIRST}, "norm_pdl is trigger_first without a separate norm"),
    ],
)
def test_a_norm_of_its_own_has_its_own_trigger(which, change, words):
    laws.says_its_violation(spec_of(which), change, words)
