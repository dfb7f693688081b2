"""The benchmark of Mamba-3's decode step: the call of mamba-ssm's functions, for which ssmgen's drop-ins stand in on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from bench_cases import small_case

import ssmgen
from ssmgen.bench import bench_of, engine, report
from ssmgen.compat import mamba_ssm
from ssmgen.families.mamba3_state_update.operands import POOLS
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import DType

BATCH = 3


@pytest.mark.parametrize("model", ["mamba3-siso-187m", "mamba3-mimo-187m"])
def test_the_official_step_computes_the_case(monkeypatch, model):
    """Without the norms of B and C, and with softplus for A: its parts take ready values."""
    monkeypatch.setattr(report, "imported", lambda module, name: getattr(mamba_ssm, name))
    monkeypatch.setattr(report, "usable", dict)
    case = small_case("mamba3_state_update", 1, model=find_model(model), state=DType.F32, batch=BATCH)
    call = case.arguments(0)
    given = call | {name: call[name][:BATCH].clone() for name in POOLS} | {"A_form": "softplus", "A_floor": 0.0}
    given |= {"state_indices": None, "out": torch.empty_like(call["out"]), "B_norm": None, "C_norm": None}
    expected = ssmgen.mamba3_state_update(**given)
    (peer,) = engine.peers_of(case, bench_of("mamba3_state_update").peers).values()
    peer(0)
    error = (call["out"].float() - expected.float()).norm() / expected.float().norm()
    assert error < 1e-2, "rotated rows are rounded to bf16 by the official functions"


def test_several_tokens_have_no_peer(monkeypatch):
    monkeypatch.setattr(report, "imported", lambda module, name: getattr(mamba_ssm, name))
    case = small_case("mamba3_state_update", 1, model=find_model("mamba3-siso-187m"), state=DType.F32, batch=BATCH, tokens=2)
    assert engine.peers_of(case, bench_of("mamba3_state_update").peers) == {}


def test_tuning_poses_one_prompt_in_parts_too():
    """24 heads leave most SMs idle; a batch is posed whole."""
    posed = bench_of("mamba3_chunk_scan").tuned([find_model("mamba3-siso-187m")], (1, 8), (1,))
    assert [(at["shape"][0], at.get("segments", 1)) for at in posed] == [(1, 1), (1, 5), (8, 1)]
    case = small_case("mamba3_chunk_scan", 1, model=find_model("mamba3-siso-187m"), shape=(1, 130), segments=2)
    assert case.arguments(0)["segments"] == 2 and bench_of("mamba3_chunk_scan").label(case.at).endswith("in 2 segments")
