"""The products that `ssmgen build --rows` builds for models, and the calls that they serve."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import ssmgen
from ssmgen import cli
from ssmgen.calls.operator import call_of
from ssmgen.families.skinny_linear.problem import OPERATOR
from ssmgen.select.models import Client, Role, Wanted, find_model, models
from ssmgen.spec.kernel import DType

# The classes of transformers whose defaults are the models' configs.
CLASSES = {
    "jamba-v0.1": "JambaConfig",
    "mamba-codestral-7b": "Mamba2Config",
    "nemotron-h-8b": "NemotronHConfig",
    "bamba-9b": "BambaConfig",
    "qwen3-next-80b-a3b": "Qwen3NextConfig",
    "qwen3.5-35b-a3b": "Qwen3_5MoeTextConfig",
    "lara-4-mini": "LaraMiniConfig",
    "olmo-hybrid-7b": "OlmoHybridConfig",
    "kimi-linear-48b-a3b": "KimiLinearConfig",
    "ling-3.0-flash": "BailingHybridConfig",
}


def asked(name, tp=1, **wanted):
    return find_model(name).divided(tp).asked(Wanted(**wanted), Role.PRODUCT)


def widths(name, tp=1):
    return {p.k for p in asked(name, tp, rows=1)}


def ran(*args, code=0):
    found = CliRunner().invoke(cli.main, args)
    assert found.exit_code == code, found.output
    return found.output


def test_widths_are_of_the_model_and_of_its_rank():
    assert widths("mamba-codestral-7b") == {4096, 8192} and widths("mamba-codestral-7b", 8) == {4096, 1024}
    assert widths("olmo-hybrid-7b") == {3840, 30 * 192}
    assert find_model("falcon-mamba-7b").hidden is None and widths("falcon-mamba-7b") == {8192}
    assert widths("mamba-130m", 2) == {768}, "of both projections"


def test_rows_choose_the_kernels():
    assert [p.rows for p in asked("falcon-mamba-7b", rows=8)] == [8]
    assert [p.rows for p in asked("falcon-mamba-7b", rows=9, io=DType.F16)] == [8, 16]
    assert not any(type(p).__name__ == "SkinnyProblem" for p in find_model("mamba-130m").asked(Wanted()))


def test_all_models_have_legal_products():
    for model in models().values():
        problems = model.asked(Wanted(rows=16), Role.PRODUCT)
        assert problems and not any(p.faults() for p in problems), model
        assert model.hidden is None or model.hidden % 64 == 0, model


@pytest.mark.parametrize("name", CLASSES)
def test_hidden_sizes_are_the_defaults_of_transformers(name):
    config = getattr(pytest.importorskip("transformers"), CLASSES[name], None)
    if config is None:
        pytest.skip("this release of transformers has no such model")
    assert find_model(name).hidden == config().hidden_size


@pytest.mark.parametrize(("rows", "shape"), [(1, (18560, 4096)), (12, (4096, 8192))])
def test_a_call_of_a_linear_layer_has_a_problem_that_was_built(rows, shape):
    x, weight = torch.zeros(rows, shape[1]).bfloat16(), torch.zeros(8, shape[1]).bfloat16()
    problem, *_ = call_of(ssmgen.skinny_linear, x, weight).problem()
    model = find_model("mamba-codestral-7b")
    wanted = Wanted(rows=rows)
    assert problem in model.asked(wanted) and problem in model.asked(wanted.of(Client.TRANSFORMERS))
    assert problem not in model.asked(wanted.of(Client.ENGINES))


@pytest.mark.parametrize("how", [{}, {"activation": "silu_and_mul"}], ids=["apart", "gated"])
@pytest.mark.parametrize("weights", [2, 3, 4])
def test_a_launch_of_layers_that_read_the_hidden_state_was_built(weights, how):
    if how and weights != 2:
        pytest.skip("gate and up are two")
    x, weight = torch.zeros(1, 4096).bfloat16(), torch.zeros(8, 4096).bfloat16()
    problem, *_ = call_of(ssmgen.skinny_linear, x, [weight.clone() for _ in range(weights)], **how).problem()
    assert problem in find_model("mamba-codestral-7b").asked(Wanted(rows=1).of(Client.TRANSFORMERS))


def test_the_commands():
    def families(*more):
        rows = json.loads(ran("build", "--model", "mamba-codestral-7b", "--dry-run", "--json", *more))["variants"]
        return {row["spec"].split(":")[0] for row in rows}

    assert OPERATOR not in families() and OPERATOR in families("--rows", "8", "--caller", "transformers")
    assert families("--op", OPERATOR, "--rows", "16") == {OPERATOR} and OPERATOR not in families("--rows", "8", "--caller", "engines")
    assert "--tokens does not apply to skinny_linear. Pass --rows." in ran("build", "--model", "mamba-130m", "--op", OPERATOR, code=2)
    rows = json.loads(ran("explain", OPERATOR, "--model", "mamba-codestral-7b", "--rows", "1", "--json"))
    assert len(rows) == 2 + 5 and not any(row["faults"] for row in rows)
