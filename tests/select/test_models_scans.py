"""Prompts of Mamba-2 and Lightning models: the kernels built for them are those requested by transformers, this package and engines'
drop-ins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from compiled import compiled

import ssmgen
from ssmgen.compat import sglang, vllm
from ssmgen.compat.hf.functions import mamba2_chunk_scan, recording
from ssmgen.families.chunk_scan.warpgroups import may_stay
from ssmgen.families.selective_state_update.models import Mamba
from ssmgen.select.model_variants import specs_for
from ssmgen.select.models import Role, Wanted, asks, find_model, models
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, Index

BF16, F32 = torch.bfloat16, torch.float32
SM90 = Arch.parse("sm_90a")


def scanned(model: Mamba, monkeypatch: pytest.MonkeyPatch) -> tuple[list, Callable[[], object]]:
    """The problems of calls on two sequences by transformers' modeling files, this package and the engines; and a function that adds vLLM's
    problems with states after chunks."""
    H, P, N, posed_by = 2, model.headdim, model.d_state, []

    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=BF16)

    def record(*args, **kwargs):
        posed_by.append(ssmgen.chunk_scan.build(*args, **kwargs).problem()[0])

    monkeypatch.setattr("ssmgen.compat.shared.mamba_prompts.chunk_scan", record)
    before, starts, weights = torch.zeros(2, H, P, N), torch.tensor([0, 2, 4]).int(), {"D": bf16(H), "dt_bias": bf16(H)}
    row = (bf16(1, 4, H, P), bf16(1, 4, H), torch.zeros(H), bf16(1, 4, 1, N), bf16(1, 4, 1, N))
    x, dt, A, B, C = row
    packed, batch = (x[0], dt[0], A, B[0], C[0]), (x.view(2, 2, H, P), dt.view(2, 2, H), A, B.view(2, 2, 1, N), C.view(2, 2, 1, N))
    with recording() as calls:
        limits = (0.001, float("inf")) if model.dt_limit else (0.0, float("inf"))
        more = {"chunk_size": 256, "z": None, "dt_softplus": True, "dt_limit": limits, "return_final_states": True, **weights}
        for states in (None, before):
            mamba2_chunk_scan(*batch, initial_states=states, **more)
    for recorded in calls:
        record(*recorded.args, **recorded.kwargs)
    pool = {"state": before, "state_indices": starts[:2], "has_initial_state": torch.zeros(2).bool()}
    record(*packed, **weights, dt_softplus=True, cu_seqlens=starts, **pool)
    more = {"chunk_size": 256, "cu_seqlens": starts, "dt_softplus": True, "state_dtype": F32, **weights}
    chunks = {"cu_chunk_seqlens": starts, "last_chunk_indices": starts[:2], "seq_idx": starts[:2], "out": bf16(4, H, P)}
    pool = {"final_states_out": before.clone(), "final_state_indices": starts[:2]}
    for states in (None, before):
        vllm.mamba_chunk_scan_combined_varlen(*packed, **more, **chunks, initial_states=states, **pool)
    for states in (None, before):
        ids = torch.tensor([[0, 0, 1, 1]]).int()
        sglang.mamba_chunk_scan_combined(*row, **more, seq_idx=ids, out=bf16(1, 4, H, P), initial_states=states, return_varlen_states=True)
    return posed_by, lambda: [
        vllm.mamba_chunk_scan_combined_varlen(*packed, **more, **chunks, initial_states=states, return_intermediate_states=True)
        for states in (None, before)
    ]


@pytest.mark.parametrize("name", ["nemotron-h-8b", "falcon-h1-7b", "mamba2-2.7b", "zamba2-2.7b"])
def test_scans_of_prompts(name, monkeypatch):
    model = find_model(name)
    found, ask_for_chunks = scanned(model, monkeypatch)

    def posed(long):
        return long + [replace(p, short=True) for p in long if may_stay(p, model.nheads)]

    assert model.asked(Wanted(), Role.SCAN) == posed(found)
    if model.d_state <= 128:
        ask_for_chunks()
    assert model.asked(Wanted(indices=(Index.I32,), intermediates=True), Role.SCAN) == posed(found[2:])
    assert model.asked(Wanted(indices=(Index.NONE,), io=DType.F32), Role.SCAN) == [
        replace(p, x=DType.F32, dt=DType.F32, D=DType.F32, dt_bias=DType.F32) for p in found[:2]
    ]


def test_scans_of_every_model():
    """In every dtype of activations there are kernels; of f32 where a block has the room."""
    asking = [m for m in models().values() if asks()["chunk_scan"].used_by(m)]
    assert {m.kind for m in asking} == {"mamba2", "lightning_attn"}
    for model, io in product(asking, DType):
        problems = model.asked(Wanted(io=io, intermediates=True), Role.SCAN)
        count = 2 if not isinstance(model, Mamba) else 9 if model.d_state <= 128 else 7
        assert len(set(problems)) == len(problems) == count + sum(p.short for p in problems)
        assert [replace(p, short=False) for p in problems[count:]] == [p for p in problems[:count] if may_stay(p, model.nheads)]
        assert all(specs_for([p], SM90, (True,)) for p in problems)
    assert asks()["chunk_scan"].size(find_model("nemotron-h-8b").divided(8), Wanted(), batch=32) == 16, "heads alone"


@pytest.mark.matrix
@pytest.mark.parametrize("tp", [1, 4, 8], ids="{} ranks".format)
def test_scans_of_packed_sequences_compile(tp):
    """The number of heads on a rank decides how many blocks share a sequence."""
    model = find_model("nemotron-h-8b").divided(tp)
    problems = [p for p in model.asked(Wanted(indices=(Index.I32,)), Role.SCAN) if p.initial]
    assert len(problems) == (4 if tp == 1 else 2)  # also for many short sequences, if they are not divided
    for problem in problems:
        spec = select("chunk_scan", problem, model.nheads, SM90, True)
        assert not compiled(spec, SM90).resources.spills
