"""Specs: one text, and one list of rules for legality."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssmgen.compile.render import render
from ssmgen.errors import SpecError
from ssmgen.families.selective_state_update.spec import SsuProblem, SsuSpec, space
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.select.catalog import OLD_NAMES, OPERATORS, SPECS, name_of, parse
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl, PoolMode, changed, entries, flat, made, parse_spec, text_of

SPEC = SsuSpec(d_state=128, headdim=64, nheads=8, ngroups=2, state=DType.BF16, lanes=16, vec=8)
SM90 = Arch.parse("sm_90a")

specs = st.builds(
    SsuSpec,
    d_state=st.integers(1, 512),
    headdim=st.integers(1, 4096),
    nheads=st.integers(1, 256),
    ngroups=st.integers(1, 8),
    state=st.sampled_from(DType),
    D=st.none() | st.sampled_from(DType),
    z=st.none() | st.sampled_from(DType),
    tied=st.booleans(),
    index=st.sampled_from(Index),
    pool=st.sampled_from(PoolMode),
    operand_loads=st.sampled_from(Loads),
    lanes=st.integers(1, 64),
    vec=st.integers(1, 16),
    ilp=st.integers(1, 8),
    pdl=st.sampled_from(Pdl),
)


@given(specs)
def test_text_parses_back(spec):
    assert parse_spec(str(spec), SPECS) == spec


@given(specs, specs)
def test_different_specs_have_different_names(a, b):
    assert (a.name == b.name) == (a == b)


@given(specs)
@settings(max_examples=300)
def test_legal_specs_have_consistent_geometry(spec):
    if spec.violations(SM90):
        return
    assert spec.passes * spec.lanes * spec.vec == spec.d_state
    assert spec.tile % spec.rows_per_step == 0 and spec.tiles * spec.tile >= spec.headdim


def test_every_violation_is_listed_at_once():
    broken = replace(SPEC, d_state=130, ngroups=3, vec=16, pdl=Pdl.WAIT)
    with pytest.raises(SpecError) as e:
        broken.check(Arch.parse("sm_80"))
    text = str(e.value)
    for part in (
        "d_state 130",
        "nheads is 8; expected a multiple of ngroups 3",
        "vec is 16 of bf16; expected 4 … 16 bytes",
        "arch is sm_80; expected sm_90 or later",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lanes": 3}, "lanes is 3; expected a power of two"),
        ({"vec": 2}, "vec is 2; expected 4 or more, the chain of the canonical sum"),
        ({"ilp": 32}, "ilp is 32; expected at most lanes"),
        ({"tile": 48}, "tile is 48; expected a multiple of the 32 rows in flight"),
        ({"tile": 128}, "tile is 128; expected at most the 64 rows of a head, rounded up to 32"),
        ({"threads": 100}, "threads is 100; expected 32 … 1024"),
        ({"headdim": 80, "tile": 64, "prefetch": 132}, "prefetch is 132 with tile 64; expected a tile that divides 80 rows"),
        ({"state_loads": Loads.ELEMENT, "prefetch": 132}, "and the state is not loaded as aligned 16-byte vectors; expected 0"),
        ({"pool": PoolMode.SPLIT}, "pool is split and index is none"),
    ],
)
def test_violation_in_words(change, words):
    assert any(words in v for v in replace(SPEC, **change).violations(SM90))


def test_old_architectures_have_no_pdl_and_no_bulk_prefetch():
    sm80 = Arch.parse("sm_80")
    assert replace(SPEC, pdl=Pdl.WAIT).violations(sm80) and replace(SPEC, prefetch=132).violations(sm80)
    assert not SPEC.violations(sm80)


def test_parse_names_every_unreadable_part():
    with pytest.raises(SpecError) as e:
        parse_spec("selective_state_update:d_state=x,colour=red,headdim=64", SPECS)
    assert all(part in str(e.value) for part in ("d_state is 'x'", "field 'colour' is unknown", "lanes, vec is missing"))
    with pytest.raises(SpecError, match="the family is"):
        parse_spec("softmax:x=1", SPECS)


def test_defaults_may_be_left_out():
    assert parse_spec("slot_copy:slot_bytes=4096", SPECS) == SlotCopySpec(slot_bytes=4096)


@pytest.mark.parametrize("text", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"])
def test_arch_text(text):
    assert str(Arch.parse(text)) == text


def test_arch_order_and_capability():
    assert Arch.parse("sm_80") < Arch.parse("sm_90a") < Arch.parse("sm_100a") < Arch.parse("sm_120")
    assert str(Arch.of_capability(9, 0)) == "sm_90a" and str(Arch.of_capability(8, 6)) == "sm_86"
    for wrong in ("90", "sm_9", "compute_90", "sm_90b"):
        with pytest.raises(SpecError):
            Arch.parse(wrong)


def test_arguments_are_packed_without_padding():
    """8-byte arguments first, so that every argument is aligned at the offset the packing gives it."""
    for change in ({}, {"index": Index.I32, "dt_limit": True}, {"tied": False, "operand_loads": Loads.ELEMENT, "z": DType.F32}):
        codes = [p.code for p in replace(SPEC, **change).parameters()]
        assert codes == sorted(codes, key=lambda c: "QqIf".index(c))


def test_space_is_legal_and_varied():
    problem = SsuProblem(d_state=128, headdim=64, nheads=4)
    found = list(space(problem, SM90))
    assert found and not any(s.violations(SM90) for s in found)
    assert {s.lanes for s in found} >= {4, 8, 16, 32} and {s.pdl for s in found} == set(Pdl)
    assert all(getattr(s, f.name) == getattr(problem, f.name) for s in found[:5] for f in fields(SsuProblem))


def test_a_field_that_came_later_is_said_where_it_is_not_its_default():
    plain = replace(SPEC, tile=64, threads=256)
    noisy = replace(plain, philox_rounds=4)
    assert "philox" not in str(plain) + render(plain, Arch(80)) and ",philox_rounds=4," in str(noisy)
    assert all(parse_spec(str(s), SPECS) == s for s in (plain, noisy)) and plain.name != noisy.name


# Names of releases before.

OLD_TEXTS = [  # as locks and tuned tables had them
    "selective_state_update_tokens:d_state=128,headdim=64,nheads=128,ngroups=8,state=f16,x=bf16,dt=bf16,A=f32,B=bf16,"
    "C=bf16,D=bf16,z=none,dt_bias=bf16,out=bf16,tied=yes,dt_softplus=yes,dt_limit=no,index=i32,pool=split,"
    "state_loads=vector,operand_loads=vector,philox_rounds=10,cu_seqlens=i32,accepted=i32,update=final,"
    "intermediate_states=f16,intermediate_indices=i32,parents=i32,lanes=16,vec=8,ilp=4,tile=32,threads=128,"
    "min_blocks=0,prefetch=0,pdl=trigger_loaded,chunk=8",
    "mamba2_layer_tokens:d_state=256,headdim=128,nheads=24,ngroups=1,state=f32,x=bf16,dt=bf16,A=f32,B=bf16,C=bf16,"
    "D=bf16,z=bf16,dt_bias=bf16,out=bf16,tied=yes,dt_softplus=yes,dt_limit=no,index=none,pool=single,"
    "state_loads=vector,operand_loads=vector,cu_seqlens=none,accepted=none,update=final,intermediate_states=none,"
    "intermediate_indices=none,parents=none,norm=none,norm_gate=bf16,norm_size=0,norm_grouped=no,norm_first=no,"
    "norm_activation=silu,norm_loads=vector,conv_width=4,conv_weight=bf16,conv_bias=bf16,conv_len=3,"
    "conv_layout=channels,conv_loads=vector,conv_taps=vector,conv_tokens=3,conv_windows=no,conv_rows=none,A_is_log=no,"
    "lanes=32,vec=4,ilp=4,tile=32,threads=256,min_blocks=2,prefetch=132,pdl=trigger_loaded,norm_threads=32",
    "gdn_layer:dim_k=128,dim_v=128,nheads=16,key_heads=4,delta=decayed,layout=vk,tokens=one,state=bf16,q=bf16,"
    "k=bf16,v=bf16,out=bf16,g=bf16,gk=none,gv=none,gate=softplus,A_log=f32,dt_bias=bf16,beta=bf16,"
    "beta_form=sigmoid,beta_rows=no,read=none,erase=none,w=none,write=none,alpha=none,l2norm=yes,index=i32,"
    "accepted=none,cu_seqlens=none,update=final,pool=single,ring=none,layers=no,frozen=no,intermediates=no,"
    "state_loads=vector,operand_loads=vector,norm=bf16,norm_gate=bf16,norm_size=128,norm_grouped=yes,norm_first=yes,"
    "norm_activation=silu,norm_loads=vector,conv_width=4,conv_weight=bf16,conv_bias=none,conv_len=3,conv_layout=runs,"
    "conv_loads=vector,conv_taps=vector,lanes=16,vec=8,ilp=2,tile=16,threads=128,min_blocks=0,prefetch=0,"
    "pdl=trigger_loaded,chunk=8,norm_inside=yes,clustered=yes,norm_threads=32",
    "gdn_layer_tokens:dim_k=128,dim_v=128,nheads=64,key_heads=16,delta=decayed,layout=vk,tokens=many,state=bf16,"
    "q=bf16,k=bf16,v=bf16,out=bf16,g=bf16,gk=none,gv=none,gate=softplus,A_log=f32,dt_bias=bf16,beta=bf16,"
    "beta_form=sigmoid,beta_rows=no,read=none,erase=none,w=none,write=none,alpha=none,l2norm=yes,index=i32,"
    "accepted=i32,cu_seqlens=none,update=each,pool=split,ring=none,layers=no,frozen=no,intermediates=no,"
    "state_loads=vector,operand_loads=vector,norm=bf16,norm_gate=bf16,norm_size=128,norm_grouped=yes,norm_first=yes,"
    "norm_activation=silu,norm_loads=vector,conv_width=4,conv_weight=bf16,conv_bias=none,conv_len=6,conv_layout=runs,"
    "conv_loads=vector,conv_taps=vector,conv_tokens=4,conv_windows=no,conv_rows=none,intermediate_indices=none,"
    "lanes=16,vec=8,ilp=4,tile=64,threads=256,min_blocks=0,prefetch=0,pdl=trigger_loaded,chunk=4,norm_threads=128",
    "kda_layer:dim_k=128,dim_v=128,nheads=12,key_heads=12,delta=decayed,layout=vk,tokens=one,state=f32,q=bf16,"
    "k=bf16,v=bf16,out=bf16,g=none,gk=bf16,gv=none,gate=bounded,A_log=f32,dt_bias=f32,beta=bf16,beta_form=sigmoid,"
    "beta_rows=no,read=none,erase=none,w=none,write=none,alpha=none,l2norm=yes,index=i32,accepted=none,"
    "cu_seqlens=none,update=final,pool=single,ring=none,layers=no,frozen=no,intermediates=no,state_loads=vector,"
    "operand_loads=element,norm=bf16,norm_gate=bf16,norm_size=128,norm_grouped=yes,norm_first=yes,"
    "norm_activation=sigmoid,norm_loads=element,conv_width=4,conv_weight=bf16,conv_bias=none,conv_len=3,"
    "conv_layout=any,conv_loads=element,conv_taps=element,lanes=32,vec=4,ilp=4,tile=128,threads=512,min_blocks=0,"
    "prefetch=0,pdl=trigger_loaded,chunk=8,norm_inside=yes,norm_threads=32",
    "kda_layer_tokens:dim_k=128,dim_v=128,nheads=32,key_heads=32,delta=decayed,layout=vk,tokens=many,state=bf16,"
    "q=bf16,k=bf16,v=bf16,out=bf16,g=none,gk=bf16,gv=none,gate=softplus,A_log=f32,dt_bias=f32,beta=bf16,"
    "beta_form=sigmoid,beta_rows=no,read=none,erase=none,w=none,write=none,alpha=none,l2norm=yes,index=i32,"
    "accepted=none,cu_seqlens=none,update=none,pool=single,ring=none,layers=no,frozen=no,intermediates=yes,"
    "state_loads=vector,operand_loads=vector,norm=bf16,norm_gate=bf16,norm_size=128,norm_grouped=yes,norm_first=yes,"
    "norm_activation=sigmoid,norm_loads=vector,conv_width=4,conv_weight=bf16,conv_bias=none,conv_len=3,"
    "conv_layout=runs,conv_loads=vector,conv_taps=vector,conv_tokens=4,conv_windows=runs,conv_rows=none,"
    "intermediate_indices=none,lanes=16,vec=8,ilp=4,tile=64,threads=256,min_blocks=0,prefetch=132,pdl=trigger_loaded,"
    "chunk=4,norm_threads=128",
]  # fmt: skip


@pytest.mark.parametrize("text", OLD_TEXTS, ids=lambda text: text.partition(":")[0])
def test_an_old_text_is_read_as_the_variant_that_it_says(text):
    """All fields that it says are the spec's, which is legal and says itself with the names of today."""
    old, _, said = text.partition(":")
    spec = parse(text)
    now = {name: text_of(value) for name, value in flat(spec).items()}
    assert not spec.violations(Arch.parse("sm_90a")) and parse_spec(str(spec), SPECS) == spec
    assert not [item for item in said.split(",") if now[item.partition("=")[0]] != item.partition("=")[2]]


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_are_of_specs_and_operators_that_are_there(old):
    name, unsaid = OLD_NAMES[old]
    assert old not in SPECS and name_of(old) == name and name in OPERATORS and name_of(name) == name
    assert all(item.partition("=")[0] in entries(SPECS[name]) for item in filter(None, unsaid.split(",")))
    assert {text.partition(":")[0] for text in OLD_TEXTS} == set(OLD_NAMES)


# Parts.


def test_fields_of_parts_are_said_one_by_one():
    spec = parse(OLD_TEXTS[1])
    assert (spec.conv.tokens, spec.norm.weight) == (flat(spec)["conv_tokens"], flat(spec)["norm"]) and made(type(spec), flat(spec)) == spec
    other = changed(spec, conv_width=3, norm_first=True, tile=8)
    assert (other.conv.width, other.norm.first, other.tile) == (3, True, 8) and changed(other, **flat(spec)) == spec
    with pytest.raises(SpecError, match="conv_width is 'x'; expected one of"):
        parse(str(spec).replace("conv_width=4", "conv_width=x"))
    with pytest.raises(TypeError, match="conv_colour"):
        changed(spec, conv_colour=1)
