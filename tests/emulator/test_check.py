"""`ssmgen check`: variants of every family in the emulator, on operands made from the spec alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import kernel_laws as laws
import pytest
import torch
from click.testing import CliRunner
from emulated_calls import SM90, needs_emulator

from ssmgen.cli import main
from ssmgen.compile.render import render
from ssmgen.emulator import check as emulator_check
from ssmgen.emulator.check import check
from ssmgen.engine.recurrences.attention.switches import Form
from ssmgen.engine.trial import ordered
from ssmgen.errors import TrialError
from ssmgen.families.causal_conv1d import call as conv
from ssmgen.families.causal_conv1d import trial as conv_trial
from ssmgen.families.causal_conv1d.spec import ConvSpec
from ssmgen.families.causal_conv1d_update import call as update
from ssmgen.families.causal_conv1d_update import trial as update_trial
from ssmgen.families.linear_attention import planning as linear
from ssmgen.families.linear_attention import trial as linear_trial
from ssmgen.families.linear_attention.planning import Options
from ssmgen.families.selective_state_update.spec import SsuSpec
from ssmgen.select.catalog import SPECS
from ssmgen.spec.kernel import Arch, DType, KernelSpec, parse_spec

pytestmark = needs_emulator


def test_check_command(tmp_path, monkeypatch):
    spec = "selective_state_update:d_state=16,headdim=64,nheads=2,lanes=4,vec=4,tile=64,threads=64,index=i32,tied=no"
    result = CliRunner().invoke(main, ["check", spec])
    assert result.exit_code == 0 and result.output.startswith("ok ")
    monkeypatch.setattr("ssmgen.emulator.render", lambda s, a: render(s, a).replace("h[j] *", "0.9f * h[j] *"))
    result = CliRunner().invoke(main, ["check", spec])
    assert result.exit_code == 1 and result.output.startswith("WRONG ")
    assert "state differs from the reference in " in result.output and " is allowed" in result.output
    assert CliRunner().invoke(main, ["check", "slot_copy:slot_bytes=4096"]).exit_code == 1


TILE = "linear_attention:lanes=16,vec=4,ilp=2,tile=8,threads=64"
GDN = f"{TILE},dim_k=64,dim_v=32,nheads=4,key_heads=2,g=f32,beta=bf16"
RAW = "gate=softplus,A_log=f32,dt_bias=bf16,beta_form=sigmoid,l2norm=yes"
KDA = f"{GDN},{RAW},g=none,gk=f16"
PLAIN = f"{TILE},dim_k=64,dim_v=32,nheads=2,key_heads=1,delta=none"
RAGGED, ODD = "tokens=ragged,cu_seqlens=i64,index=i32", "state_loads=element,operand_loads=element"
FROZEN = f"{GDN},{RAW},tokens=many,update=none,frozen=yes,state=bf16,q=bf16,k=bf16,index=i64,lanes=4,vec=8,ilp=4,tile=32,threads=32"
LINEAR = {  # a later field counts
    "gdn": f"{GDN},{RAW},index=i32,state=bf16",
    "gdn-split-odd": f"{GDN},{ODD},index=i64,pool=split",
    "gdn-kv-odd": f"{GDN},{RAW},{ODD},layout=kv,index=i32,ilp=4,tile=16",
    "gdn-kept-rows": f"{GDN},beta_rows=yes,beta_form=twice_sigmoid,tokens=many,intermediates=yes",
    "gdn-ragged-each": f"{GDN},{RAW},{RAGGED},pool=split,update=each,accepted=i32,intermediates=yes",
    "gdn-accepted": f"{GDN},index=i32,accepted=i64",
    "gdn-frozen": FROZEN,
    "gdn-frozen-ring": f"{FROZEN},ring=store",
    "gdn-commit": f"{GDN},{RAW},tokens=many,ring=commit,accepted=i64,index=i32,layers=yes",
    "kda": f"{KDA},index=i32",
    "kda-ragged-odd": f"{KDA},{RAGGED},{ODD},gate=bounded,A_log=none",
    "kda-ring-odd": f"{KDA},{ODD},tokens=many,ring=store,index=i32,update=none",
    "rwkv7-tail": f"{TILE},dim_k=64,dim_v=36,nheads=2,key_heads=2,delta=old,gk=bf16,read=bf16,alpha=f32,tokens=many,index=i32",
    "gla": f"{PLAIN},gk=f32,gv=bf16,out=f32",
    "lightning": f"{PLAIN},g=f32,gate=slope",
}


@pytest.mark.parametrize("name", LINEAR)
def test_check_of_linear_attention(name):
    spec = parse_spec(LINEAR[name], SPECS)
    for batch in (1, 4):
        assert check(spec, SM90, batch).passed


@pytest.mark.parametrize("name", LINEAR)
def test_its_operands_pose_the_problem_that_the_spec_is_for(name):
    spec = parse_spec(LINEAR[name], SPECS)
    named = linear_trial.operands(spec, 4, 0)
    form = Form(spec.delta.value, spec.gate.value, spec.beta_form.value, spec.l2norm)
    options = Options(form, 1.0, layout=spec.layout.value, update_state=spec.update.value != "none", commit=spec.commit)
    views = linear.views_of(named, options, [])
    posed = linear.problem_of(views, {n: t.data_ptr() for n, t in named.items()}, options)
    assert {f.name: getattr(spec, f.name) for f in fields(posed)} == {f.name: getattr(posed, f.name) for f in fields(posed)}


WRONG = {
    "gdn": ("token.step = ", "token.step = 0.9f * "),
    "gdn-split-odd": ("State* dst = state + dst_slot", "State* dst = state + (dst_slot ^ 1)"),
    "gdn-ragged-each": ("t < rows_kept", "t + 1 < rows_kept"),
    "gdn-commit": ("accepted <= most_tokens", "accepted < most_tokens"),
    "kda-ring-odd": ("u64(t) * ring_k_token", "u64(t ^ 1) * ring_k_token"),
    "rwkv7-tail": ("token.query_scale = ", "token.query_scale = 1.01f * "),
}


def edited(old: str, new: str) -> Callable[[KernelSpec, Arch], str]:
    """render, and one edit."""

    return lambda spec, arch: laws.edited(old, new)(render(spec, arch))


@pytest.mark.parametrize("name", WRONG)
def test_check_finds_what_is_wrong(name, monkeypatch):
    monkeypatch.setattr("ssmgen.emulator.render", edited(*WRONG[name]))
    assert not check(parse_spec(LINEAR[name], SPECS), SM90).passed


FIRST, LAST = "causal_conv1d:layout=channel_first,vec=8", "causal_conv1d:layout=channel_last,vec=4,vectors=4"
WIDE, SPARSE = "width=4,bias=bf16", "loads=element,taps=element"
VARLEN = "query_start_loc=i32,pool=yes,started=yes,index=i32"
UPDATE = f"causal_conv1d_update:vec=4,threads=32,{WIDE}"
ROLLED, PACKED = "advance=roll,position=i32", "count=ragged,tokens=4,query_start_loc=i64"
CONVOLUTIONS = {
    "first": f"{FIRST},{WIDE}",
    "first-shifted-f32": "causal_conv1d:layout=channel_first,vec=4,vectors=1,width=8,shifted=yes,x=f32,weight=f32,silu=no",
    "first-sparse-states": f"{FIRST},width=3,{SPARSE},seq_idx=yes,initial=yes,final=yes",
    "first-varlen": f"{FIRST},{WIDE},shifted=yes,{VARLEN}",
    "first-varlen-states": f"{FIRST},{WIDE},shifted=yes,query_start_loc=i64,initial=yes,final=yes",
    "last": f"{LAST},{WIDE}",
    "last-sparse-states": f"{LAST},width=5,{SPARSE},seq_idx=yes,initial=yes,final=yes",
    "last-varlen": f"{LAST},{WIDE},{VARLEN}",
    "last-words": f"{LAST},{WIDE},loads=element,unit=yes",
    "last-words-varlen-f16": f"{LAST},{WIDE},x=f16,{SPARSE},unit=yes,{VARLEN}",
    "last-pool-f16": f"{LAST},width=2,x=f16,weight=f32,pool=yes,taps=element",
    "update": f"{UPDATE},state_len=3,index=i32",
    "update-channels": f"{UPDATE},layout=channels,index=i64",
    "update-any-sparse": f"{UPDATE},layout=any,{SPARSE},tokens=5,saved=any",
    "update-rolls": f"{UPDATE},tokens=4,state_len=6,{ROLLED},index=i32,saved=runs,saved_index=i32",
    "update-rolls-packed": f"{UPDATE},layout=channels,{ROLLED},{PACKED},index=i32",
    "update-ring-counted": f"{UPDATE},layout=any,advance=ring,position=i64,count=counted,tokens=4",
    "update-packed": f"{UPDATE},state_len=3,{PACKED},saved=any",
}


def convolution(spec: KernelSpec, batch: int) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """(the operator's module, operands, options)"""
    if isinstance(spec, ConvSpec):
        return conv, conv_trial.operands(spec, batch, 0), conv.Options(spec.silu)
    return update, update_trial.operands(spec, batch, 0), update_trial.Options(spec.silu)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_check_of_convolutions(name):
    spec = parse_spec(CONVOLUTIONS[name], SPECS)
    for batch in (1, 4):
        outcome = check(spec, SM90, batch)
        assert outcome.passed and outcome.state_error == 0


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_their_operands_pose_the_problem_that_the_spec_is_for(name):
    spec = parse_spec(CONVOLUTIONS[name], SPECS)
    op, named, options = convolution(spec, 4)
    posed = op.problem_of(op.views_of(named, options, []), {n: t.data_ptr() for n, t in named.items()}, options)
    assert {f.name: getattr(spec, f.name) for f in fields(posed)} == {f.name: getattr(posed, f.name) for f in fields(posed)}


TOKENS = "selective_state_update:several=yes,d_state=64,headdim=32,nheads=4,ngroups=2,lanes=16,vec=4,ilp=2,tile=8,threads=64,dt_bias=f32"
SSU_TOKENS = {
    "plain": f"{TOKENS},index=i32,D=f32,z=bf16",
    "limit-odd": f"{TOKENS},index=i64,pool=split,dt_limit=yes,{ODD},state=bf16",
    "kept-by-index": f"{TOKENS},intermediate_states=f16,intermediate_indices=i64,update=none",
    "ragged-each": f"{TOKENS},cu_seqlens=i32,index=i32,pool=split,update=each,accepted=i32,intermediate_states=f32",
    "tree": f"{TOKENS},parents=i64,intermediate_states=f32,{ODD}",
    "noisy": f"{TOKENS},state=f16,intermediate_states=bf16,philox_rounds=4,index=i32",
}


@pytest.mark.parametrize("name", SSU_TOKENS)
def test_check_of_several_tokens_of_mamba(name):
    for batch in (1, 4):
        assert check(parse_spec(SSU_TOKENS[name], SPECS), SM90, batch).passed


def test_check_finds_what_is_wrong_in_them(monkeypatch):
    monkeypatch.setattr("ssmgen.emulator.render", edited("h[i][p][j] * decay", "0.99f * h[i][p][j] * decay"))
    assert not check(parse_spec(SSU_TOKENS["plain"], SPECS), SM90).passed


WRONG_CONVOLUTIONS = {  # the last two: states are off by a bit
    "first": ("fmaf(taps[j], ", "fmaf(1.01f * taps[j], "),
    "last": ("fmaf(taps[j * kTaps + k], ", "fmaf(1.01f * taps[j * kTaps + k], "),
    "update-channels": ("fmaf(taps[c * kTaps + k], ", "fmaf(1.01f * taps[c * kTaps + k], "),
    "update-rolls": ("window_tokens)", "window_tokens - 2)"),
    "update": ("kWidth - 2] = token[t];", "kWidth - 2] = token[t]; window[kWidth - 2].word[0] ^= 1u;"),
    "first-varlen": ("conv_states_tap, kept_bits);", "conv_states_tap, kept_bits ^ 1u);"),
}


@pytest.mark.parametrize("name", WRONG_CONVOLUTIONS)
def test_check_finds_what_is_wrong_in_convolutions(name, monkeypatch):
    monkeypatch.setattr("ssmgen.emulator.render", edited(*WRONG_CONVOLUTIONS[name]))
    assert not check(parse_spec(CONVOLUTIONS[name], SPECS), SM90).passed


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"operand_loads": "element", "state_loads": "element"},
        {"index": "i64", "pool": "split", "tied": False},
        {"philox_rounds": 10, "state": DType.F16},
    ],
)
def test_check_makes_operands_for_any_spec(change):
    from ssmgen.spec.kernel import Index, Loads, PoolMode

    kinds = {"operand_loads": Loads, "state_loads": Loads, "index": Index, "pool": PoolMode}
    fields = {k: kinds[k](v) if k in kinds else v for k, v in change.items()}
    assert check(SsuSpec(d_state=32, headdim=32, nheads=4, ngroups=2, lanes=8, vec=4, tile=32, threads=64, **fields), SM90).passed


# A family's author forgets an operand.

STEP = "selective_state_update:d_state=16,headdim=64,nheads=2,lanes=4,vec=4,tile=64,threads=64,index=i32,tied=no"


def test_a_trial_without_an_operand_says_which_one_and_where_to_make_it():
    spec = parse_spec(STEP, SPECS)
    made = dict.fromkeys(spec.operands(), torch.zeros(1))
    assert list(ordered(spec, made)) == list(spec.operands())
    del made["dt"], made["B"]
    with pytest.raises(
        TrialError, match=r"the trial of selective_state_update makes no dt, B; expected all operands .* Make it in trial\.py\."
    ):
        ordered(spec, made)


def test_check_tells_an_author_of_an_operand_that_the_trial_does_not_have(monkeypatch):
    """Before any kernel is compiled, and without a traceback."""
    made = emulator_check.trial_of

    def trial(*args):
        found = made(*args)
        return found._replace(named={name: t for name, t in found.named.items() if name != "dt"})

    monkeypatch.setattr(emulator_check, "trial_of", trial)
    monkeypatch.setattr(emulator_check, "run", lambda *args: pytest.fail("a kernel ran"))
    result = CliRunner().invoke(main, ["check", STEP])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "the trial of selective_state_update makes no dt" in result.output
