"""The emulator: generated kernels on a CPU against float64, and the mistakes it must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from ssu_cases import BF16, F32, Case, assert_matches, expected, make_call, matrix

from ssmgen import emulator, registry
from ssmgen.arguments import Arguments
from ssmgen.cli import main
from ssmgen.emulator import EmulatorError, operands, run_source
from ssmgen.emulator.check import check
from ssmgen.kernels import FAMILIES
from ssmgen.kernels.causal_conv1d import ConvSpec
from ssmgen.kernels.selective_state_update import SsuSpec, space
from ssmgen.ops import causal_conv1d as conv
from ssmgen.ops import causal_conv1d_update as update
from ssmgen.ops import linear_attention_call as linear
from ssmgen.ops import selective_state_update as op
from ssmgen.render import render
from ssmgen.spec import Arch, KernelSpec, Param, parse_spec

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

SM90, SM80 = Arch.parse("sm_90a"), Arch.parse("sm_80")


def problem_of(call):
    named = call.named
    return op.problem_of(
        op.headed_views(named, []), {n: t.data_ptr() for n, t in named.items()}, call.case.softplus, call.case.limit is not None
    )


def emulate(call, spec, arch=SM90, change=lambda source: source) -> None:
    """One launch of a variant, through the same argument packing as on a card; `change` edits the text."""
    named = {n: call.named[n] for n in op._NAMES if n in call.named}
    values = op.kernel_values(spec, op.headed_views(named, []), call.case.pad_slot_id, call.case.limit)
    packed = Arguments(spec, values).at([t.data_ptr() for t in named.values()])
    grid = call.case.batch * spec.nheads * spec.tiles
    run_source(change(render(spec, arch)), spec.name, grid, spec.threads, packed, named, ("state", "out"))


def select(call, arch=SM90):
    return registry.select("selective_state_update", problem_of(call), call.case.batch, arch, arch is SM90)


# The whole matrix of the GPU tests, with fewer heads and rows where those add nothing.


def smaller(case: Case) -> Case:
    heads = case.heads if case.heads * case.headdim * case.d_state < 100_000 else 2 * case.groups
    return replace(case, heads=heads, batch=min(case.batch, 9))


@pytest.mark.parametrize("case", [smaller(c) for c in matrix()], ids=lambda c: c.id)
def test_within_rounding_of_float64(case):
    call = make_call(case, "cpu")
    want = expected(call)
    emulate(call, select(call))
    assert_matches(call, want)


@pytest.mark.parametrize("name", ["m2-bf16-pool", "m1-f32-pool", "m2-d96-f32"])
def test_without_pdl_for_an_old_architecture(name):
    call = make_call(smaller(next(c for c in matrix() if c.id == name)), "cpu")
    want = expected(call)
    emulate(call, select(call, SM80), SM80)
    assert_matches(call, want)


@pytest.mark.parametrize(
    "case",
    [
        Case("m2-bf16", heads=2, groups=2, state=BF16, out=F32, batch=2),
        Case("m1-d16", headdim=256, d_state=16, tied=False, z=BF16, out=F32, batch=2),
    ],
    ids=lambda c: c.id,
)
def test_variants_are_bit_equal(case):
    specs = {}
    for spec in space(problem_of(make_call(case, "cpu")), SM90):
        specs.setdefault((spec.lanes, spec.vec, spec.ilp > 1, spec.prefetch > 0), spec)
    results = []
    for spec in specs.values():
        call = make_call(case, "cpu")
        emulate(call, spec)
        results.append((call.args[0].contiguous(), call.kwargs["out"]))
        assert all(torch.equal(a, b) for a, b in zip(results[-1], results[0], strict=True)), spec
    assert len(specs) > 8


# What it catches, in kernels written to be wrong.

PRELUDE = "#define DEVICE inline\nusing u32 = unsigned;\nusing u16 = unsigned short;\n"


class Broken(KernelSpec):
    """Only a parameter list: float* data, const float* weight, int n."""

    def parameters(self) -> list[Param]:
        return [Param.pointer("data", "f32", const=False), Param.pointer("weight", "f32"), Param("n", "int", "i")]


def run_broken(body: str, *, grid: int = 1, block: int = 64, declarations: str = "", shared_bytes: int = 0) -> torch.Tensor:
    data, weight = torch.zeros(4, 64), torch.arange(64, dtype=F32)
    packed = Arguments(Broken(), {"n": 64}).at([data.data_ptr(), weight.data_ptr()])
    source = f'{PRELUDE}{declarations}\nextern "C" __global__ void broken(float* data, const float* weight, int n) {{\n{body}\n}}\n'
    run_source(source, "broken", grid, block, packed, {"data": data, "weight": weight}, ("data",), shared_bytes)
    return data


GOOD = "store_u32(data + blockIdx.x * 64 + threadIdx.x, load_u32(weight + threadIdx.x));"


def test_a_sound_kernel_passes():
    assert torch.equal(run_broken(GOOD, grid=4), torch.arange(64, dtype=F32).expand(4, 64))
    body = """
      SHARED(float, tile, 64);
      const unsigned t = threadIdx.x;
      tile[t] = __uint_as_float(load_u32(weight + t));
      __syncthreads();
      float v = tile[63 - t];
      v += __shfl_xor_sync(0xffffffffu, v, 1);
      if (__ballot_sync(0xffffffffu, t < 32) == 0) v = -v;
      __syncthreads();
      tile[t] = v;
      __syncwarp();
      store_u32(data + t, __float_as_uint(tile[t ^ 1]));
    """
    dynamic = "DYNAMIC_SHARED(float, tile); tile[threadIdx.x] = 2.f; store_u32(data + threadIdx.x, __float_as_uint(tile[threadIdx.x]));"
    assert (run_broken(dynamic, shared_bytes=256)[0] == 2).all() and (run_broken(dynamic, shared_bytes=512)[0] == 2).all()
    t = torch.arange(64)
    pair = ((63 - t) + (63 - (t ^ 1))).float()
    assert torch.equal(run_broken(body)[0], torch.where(t < 32, pair, -pair))


def test_atomics_collide_with_nothing():
    body = "atomicAdd(data, 1.f); atomicMax(reinterpret_cast<int*>(data) + 1, int(threadIdx.x));"
    data = run_broken(body, grid=3)
    assert data[0, 0] == 192 and data.view(torch.int32)[0, 1] == 63


BUGS = {
    "load past the end": (
        "load_u32(weight + threadIdx.x + 1);",
        "4-byte load outside of every operand; nearest: element 64 of weight [64] float32",
    ),
    "load before the start": ("load_u32(data - 1);", "nearest: element -1 of data [4, 64] float32"),
    "store past the end": (
        "store_u32(data + 256 + threadIdx.x, 0);",
        "4-byte store outside of every operand; nearest: element 256 of data",
    ),
    "store to an input": ("store_u32(const_cast<float*>(weight), 0);", "store to weight [64] float32, which is read only"),
    "atomic on an input": ("atomicAdd(const_cast<float*>(weight), 1.f);", "atomic to weight [64] float32, which is read only"),
    "misaligned vector": (
        "u32 r[4]; load_4xu32(weight + 1, r);",
        "16-byte load at an address that is not a multiple of 16; nearest: element 1 of weight",
    ),
    "misaligned half": ("load_u16(reinterpret_cast<const char*>(weight) + 1);", "2-byte load at an address that is not a multiple of 2"),
    "two lanes, one address": ("store_u32(data + threadIdx.x / 2, 0);", "also writes, with no barrier between; nearest: element 0 of data"),
    "two blocks, one address": ("store_u32(data + threadIdx.x, 0);", "thread 0 of block 0 also writes"),
    "shuffle of half a warp": (
        "if (threadIdx.x % 32 < 16) __shfl_sync(0xffffffffu, 1, 0); else __syncwarp(0xffff0000u);",
        "divergent shuffle: lane 16 of its mask is elsewhere",
    ),
    "shuffle after lanes have ended": (
        "if (threadIdx.x % 32 >= 16) return; __shfl_xor_sync(0xffffffffu, 1, 1);",
        "shuffle with lane 16, which has ended",
    ),
    "two shuffles at once": (
        "if (threadIdx.x % 2) __shfl_sync(0xffffffffu, 1, 0); else __shfl_sync(0xffffffffu, 2, 0);",
        "divergent shuffle: lane 1 of its mask is elsewhere",
    ),
    "shuffle from outside the mask": (
        "if (threadIdx.x % 32 < 16) __shfl_sync(0xffffu, 1, 20);",
        "shuffle from lane 20, which is not in the mask",
    ),
    "mask without the lane": ("__shfl_sync(0xfffffffeu, 1, 1);", "mask leaves out the lane itself"),
    "barrier in a branch": ("if (threadIdx.x < 32) __syncthreads();", "has ended while others wait at __syncthreads"),
    "two barriers at once": (
        "if (threadIdx.x < 32) __syncthreads(); else __syncthreads();",
        "divergent __syncthreads: others wait at another one",
    ),
    "shared, never written": (
        "SHARED(float, tile, 64); float v = tile[threadIdx.x]; (void)v;",
        "load of tile[0] in shared memory, which nothing has written",
    ),
    "shared, past the end": ("SHARED(float, tile, 32); tile[threadIdx.x] = 1.f;", "store of tile[32] in shared memory; it has 32 elements"),
    "shared, no barrier": (
        "SHARED(float, tile, 64); tile[threadIdx.x] = 1.f; __syncwarp(); float v = tile[63 - threadIdx.x]; (void)v;",
        "in shared memory, which",
    ),
    "shared, written while others read": (
        "SHARED(float, tile, 64); tile[threadIdx.x] = 1.f; __syncthreads(); float v = tile[63 - threadIdx.x]; tile[threadIdx.x] = v;",
        "in shared memory, which thread",
    ),
    "shared, two writers": (
        "SHARED(float, tile, 64); tile[threadIdx.x / 2] = 1.f;",
        "store to tile[0] in shared memory, which thread 0 also writes",
    ),
    "dynamic shared, past the end": (
        "DYNAMIC_SHARED(float, tile); tile[threadIdx.x] = 1.f;",
        "store of tile[16] in shared memory; it has 16 elements",
    ),
    "load before the wait": (
        "load_u32(weight); wait_for_upstream();  // griddepcontrol.wait",
        "4-byte load before the wait for the upstream kernel",
    ),
    "prefetch before the wait": ("prefetch_l2(weight, 64); wait_for_upstream();  // griddepcontrol.wait", "prefetch before the wait"),
    "prefetch past the end": ("prefetch_l2(weight, 512);", "prefetch outside of every operand"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug(bug):
    body, words = BUGS[bug]
    with pytest.raises(EmulatorError) as e:
        run_broken(body + "\n", grid=2, shared_bytes=64)
    assert words in str(e.value) and "block " in str(e.value)


def test_text_that_is_no_cpp_is_an_error_with_the_compiler_s_words():
    with pytest.raises(EmulatorError, match="was not declared"):
        run_broken("no_such_function();")


# What it catches in the real kernel, broken by one edit each.

SPLIT_TAIL = Case("split-tail", heads=2, headdim=70, state=BF16, index=torch.int32, split=True, conv_slices=True)
POOL = Case("pool", heads=4, groups=2, state=BF16, index=torch.int32)
CHANNELS = Case("channels", headdim=256, d_state=16, tied=False, z=BF16, index=torch.int64)

EDITS = {
    "no wait": (POOL, "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "no padding": (POOL, "if (u64(slot) >= u64(slots) || slot == pad_slot_id)", "if (false)", "outside of every operand"),
    "state past the tail": (
        SPLIT_TAIL,
        "min(row_of(step, i), u32(kHeadDim - 1))",
        "row_of(step, i) + 100000",
        "load outside of every operand",
    ),
    "stores past the tail": (SPLIT_TAIL, "row_of(step, i) < kHeadDim", "true", "no barrier between"),
    "output past the tail": (SPLIT_TAIL, "lane % kLanes < kIlp && row < kHeadDim", "lane % kLanes < kIlp", "store"),
    "every lane stores the output": (POOL, "if (lane % kLanes < kIlp) store", "store", "no barrier between"),
    "padded destination written": (SPLIT_TAIL, "u64(dst_slot) < u64(slots) && dst_slot != pad_slot_id", "true", "outside of every operand"),
    "wrong team offset": (POOL, "lane % kLanes * kVec;", "lane % kLanes * kVec + 1;", "not a multiple of 16"),
    "a lane skips the sum": (
        POOL,
        "sum_over_team<kLanes>(y, lane)",
        "(lane ? sum_over_team<kLanes>(y, lane) : 0.f)",
        "shuffle with lane 0, which has ended",
    ),
    "unrounded decay": (POOL, "h[j] * decay", "h[j]", "off by"),
    "wrong group": (POOL, "group = head / kHeadsPerGroup", "group = head % 2", "off by"),
    "x of another row": (CHANNELS, "dt_x, i, kLanes)", "dt_x, 0, kLanes)", "off by"),
    "output from the rounded state": (
        Case("r", heads=4, state=BF16, out=F32),
        "y[i][p] = dot(h, c[p]);",
        "pack(h, packed[i][p]); unpack(packed[i][p], h); y[i][p] = dot(h, c[p]);",
        "off by",
    ),
    "no softplus": (CHANNELS, "delta = softplus(delta);", "", "off by"),
    "source slot written": (SPLIT_TAIL, "State* dst = state + dst_slot", "State* dst = state + slot", "changed outside"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit):
    case, old, new, words = EDITS[edit]
    call = make_call(case, "cpu")
    want = expected(call)
    spec = select(call)

    def change(source: str) -> str:
        assert old in source, "the edit no longer applies"
        return source.replace(old, new, 1)

    with pytest.raises((EmulatorError, AssertionError)) as e:
        emulate(call, spec, change=change)
        assert_matches(call, want)
    assert words in str(e.value)


# The command.


def test_check_command(tmp_path, monkeypatch):
    spec = "selective_state_update:d_state=16,headdim=64,nheads=2,lanes=4,vec=4,tile=64,threads=64,index=i32,tied=no"
    result = CliRunner().invoke(main, ["check", spec])
    assert result.exit_code == 0 and result.output.startswith("ok ")
    monkeypatch.setattr("ssmgen.emulator.render", lambda s, a: render(s, a).replace("h[j] *", "0.9f * h[j] *"))
    result = CliRunner().invoke(main, ["check", spec])
    assert result.exit_code == 1 and result.output.startswith("WRONG ")
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
    spec = parse_spec(LINEAR[name], FAMILIES)
    for batch in (1, 4):
        assert check(spec, SM90, batch).passed


@pytest.mark.parametrize("name", LINEAR)
def test_its_operands_pose_the_problem_that_the_spec_is_for(name):
    spec = parse_spec(LINEAR[name], FAMILIES)
    named = operands.linear_attention(spec, 4, 0)
    form = linear.Form(spec.delta.value, spec.gate.value, spec.beta_form.value, spec.l2norm)
    options = linear.Options(form, 1.0, layout=spec.layout.value, update_state=spec.update.value != "none", commit=spec.commit)
    views = linear.checked_views(linear.Call("check", tuple(named.get(n) for n in linear.NAMES), options), named)
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

    def changed(spec: KernelSpec, arch: Arch) -> str:
        source = render(spec, arch)
        assert old in source, "the edit no longer applies"
        return source.replace(old, new)

    return changed


@pytest.mark.parametrize("name", WRONG)
def test_check_finds_what_is_wrong(name, monkeypatch):
    monkeypatch.setattr("ssmgen.emulator.render", edited(*WRONG[name]))
    assert not check(parse_spec(LINEAR[name], FAMILIES), SM90).passed


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
        return conv, operands.causal_conv1d(spec, batch, 0), conv.Options(spec.silu)
    return update, operands.causal_conv1d_update(spec, batch, 0), (spec.silu, -1)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_check_of_convolutions(name):
    spec = parse_spec(CONVOLUTIONS[name], FAMILIES)
    for batch in (1, 4):
        outcome = check(spec, SM90, batch)
        assert outcome.passed and outcome.state_error == 0


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_their_operands_pose_the_problem_that_the_spec_is_for(name):
    spec = parse_spec(CONVOLUTIONS[name], FAMILIES)
    op, named, options = convolution(spec, 4)
    posed = op.problem_of(op.views_of(named, options, []), {n: t.data_ptr() for n, t in named.items()}, options)
    assert {f.name: getattr(spec, f.name) for f in fields(posed)} == {f.name: getattr(posed, f.name) for f in fields(posed)}


WRONG_CONVOLUTIONS = {  # the last two: states are off by a bit
    "first": ("fmaf(taps[j], ", "fmaf(1.01f * taps[j], "),
    "last": ("fmaf(taps[j * kWidth + k], ", "fmaf(1.01f * taps[j * kWidth + k], "),
    "update-channels": ("fmaf(taps[c * kWidth + k], ", "fmaf(1.01f * taps[c * kWidth + k], "),
    "update-rolls": ("window_tokens)", "window_tokens - 2)"),
    "update": ("window[kWidth - 2] = token[t];", "window[kWidth - 2] = token[t]; window[kWidth - 2].word[0] ^= 1u;"),
    "first-varlen": ("conv_states_tap, kept_bits);", "conv_states_tap, kept_bits ^ 1u);"),
}


@pytest.mark.parametrize("name", WRONG_CONVOLUTIONS)
def test_check_finds_what_is_wrong_in_convolutions(name, monkeypatch):
    monkeypatch.setattr("ssmgen.emulator.render", edited(*WRONG_CONVOLUTIONS[name]))
    assert not check(parse_spec(CONVOLUTIONS[name], FAMILIES), SM90).passed


@pytest.mark.parametrize(
    "change", [{}, {"operand_loads": "element", "state_loads": "element"}, {"index": "i64", "pool": "split", "tied": False}]
)
def test_check_makes_operands_for_any_spec(change):
    from ssmgen.spec import Index, Loads, PoolMode

    kinds = {"operand_loads": Loads, "state_loads": Loads, "index": Index, "pool": PoolMode}
    fields = {k: kinds[k](v) if k in kinds else v for k, v in change.items()}
    assert check(SsuSpec(d_state=32, headdim=32, nheads=4, ngroups=2, lanes=8, vec=4, tile=32, threads=64, **fields), SM90).passed


def test_no_compiler_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(emulator, "available", lambda: False)
    with pytest.raises(emulator.EmulatorMissingError, match="install g"):
        emulator.compile_source("// text not seen before", "f")
