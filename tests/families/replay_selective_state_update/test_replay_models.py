"""The replay kernels that are built for models, and the ones that are committed."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import ssmgen
from ssmgen.cli import main
from ssmgen.families.replay_selective_state_update.defaults import DEFAULTS
from ssmgen.families.replay_selective_state_update.spec import OPERATOR, History, Part
from ssmgen.select.models import Role, Wanted, find_model, models
from ssmgen.spec.kernel import DType, Index, Narrow
from ssmgen.variants import generate

BF16 = torch.bfloat16


@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind-conv"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("tokens", [1, 6, 9])
@pytest.mark.parametrize("name", ["nemotron-h-8b", "falcon-h1-7b"])
def test_what_is_built_is_what_a_call_asks_for(name, tokens, window, behind):
    model = find_model(name).divided(4)
    h, p, n, g, b = model.nheads, model.headdim, model.d_state, model.ngroups, 2
    new = {"x": torch.empty(b, tokens, h, p, dtype=BF16), "dt": torch.empty(b, tokens, h, dtype=BF16), "dt_softplus": True}
    new |= {name: torch.empty(b, tokens, g, n, dtype=BF16) for name in ("B", "C")} | {
        "A": torch.empty(h),
        "dt_bias": torch.empty(h, dtype=BF16),
    }
    new |= {"D": torch.empty(h, p, dtype=BF16), "z": new["x"].clone() if model.gate else None, "after_conv": behind}
    entries, both = (tokens, (2,)) if window is None else (window + tokens, ())
    call = new | {"state": torch.empty(b, h, p, n), "old_x": torch.empty(b, entries, h, p, dtype=BF16)}
    call |= {"old_B": torch.empty(b, *both, entries, g, n, dtype=BF16), "old_dt": torch.empty(b, *both, h, entries)}
    call |= {"prev_num_accepted_tokens": torch.zeros(b).int()}
    if window is None:
        function = ssmgen.replay_selective_state_update
        call |= {"old_dA_cumsum": torch.empty(b, 2, h, entries), "cache_buf_idx": torch.zeros(b).int()}
    else:
        function, call["ring_start"] = ssmgen.checkpoint_selective_state_update, torch.zeros(b).int()
    wanted = [ssmgen.explain(function, **call, **more, arch="sm_90a").problem for more in ({}, {"state_indices": torch.zeros(b).int()})]
    assert [p for p in model.asked(Wanted(replay=tokens, window=window), Role.REPLAY) if p.after_conv is behind] == wanted


def test_replays_are_of_mamba2():
    for model in models().values():
        posed = model.asked(Wanted(replay=6), Role.REPLAY)
        assert bool(posed) == (model.kind == "mamba2") and not any(problem.faults() for problem in posed)


def ran(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_build_of_replays(own_cache, monkeypatch):
    """Checks the list of kernels to build; the kernels' own tests check that they compile."""
    from ssmgen.variants import build

    asked = []
    monkeypatch.setattr(build, "build", lambda work, *args, **how: asked.extend(spec for spec, _ in work) or [])

    def families(*args: str) -> set[str]:
        asked.clear()
        ran("build", "--model", "mamba2-130m", "--index", "i32", "--no-pdl", "--json", *args)
        return {spec.family for spec in asked}

    others = {
        "selective_state_update",
        "causal_conv1d",
        "causal_conv1d_update",
        "gated_rms_norm",
        "mamba2_layer",
        "layer_gated_norm",
        "chunk_scan_warpgroups",
    }
    assert families() == others and families("--replay", "6") == others | {OPERATOR}
    assert families("--op", OPERATOR, "--replay", "6") == {OPERATOR}
    assert {spec.history for spec in asked} == {History.STEP} and {spec.after_conv for spec in asked} == {False, True}
    assert families("--op", OPERATOR, "--replay", "9", "--window", "20", "--state", "bf16") == {OPERATOR}
    assert {(spec.history, spec.tokens, spec.window, spec.state) for spec in asked} == {(History.RING, 16, 24, DType.BF16)}
    assert "--tokens does not apply to" in ran("build", "--model", "mamba2-130m", "--op", OPERATOR, code=2)
    assert "--window is given without --replay; expected both" in ran("build", "--model", "mamba2-130m", "--window", "9", code=2)
    assert "is not Mamba-2, which" in ran("build", "--model", "mamba-130m", "--replay", "6", code=2)
    asked.clear()
    ran("build", "--all", "--op", OPERATOR, "--replay", "6", "--json")
    assert {spec.family for spec in asked} == {OPERATOR}, "of the models that have it"


def test_explain_of_replays():
    rows = json.loads(ran("explain", OPERATOR, "--model", "nemotron-h-8b", "--tp", "8", "--replay", "6", "--batch", "8", "--json"))
    assert len(rows) == 4 and all(row["operator"] == OPERATOR and row["batch"] == 8 and not row["faults"] for row in rows)
    assert "is not Mamba-2, which" in ran("explain", OPERATOR, "--model", "mamba-130m", "--replay", "6", code=1)


def test_committed_defaults_show_replays():
    for arch in generate.ARCHS:
        found = [spec for spec, a in generate.default_variants() if str(a) == arch and spec.family == OPERATOR]
        assert {spec.part for spec in found} == set(Part) and {spec.history for spec in found} == set(History)
        assert {spec.state for spec in found} == {DType.F32, DType.BF16, Narrow.I8} and {spec.index for spec in found} == {Index.I32}
        assert {spec.window for spec in found} == {8, 16} and len(found) == len({spec.name for spec in found}) == len(DEFAULTS) + 1
