"""`python -m tools.demo` if transformers calls packages of kernels: its own functions, patched and fused ones too. On CPU tensors."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from demo_cases import narrow
from demo_cases import on_cpu as on_cpu
from hf_cases import convolutions, modeling, tiny
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from ssmgen.compat import hf
from tools.demo import run
from tools.demo.decode import Greedy, prompt
from tools.demo.measure import FUSED, PATCHED, PLAIN, Options
from tools.demo.packages import PACKAGES, bound, own_functions
from tools.demo.prompts import UNITS
from tools.demo.run import Report
from tools.demo.table import as_markdown

FACTS = {"device": "GPU", "torch": "2.11", "transformers": "5.17", "date": "2026-01-02T03:04:05", "kernel_packages": ["a_package"]}
ONCE = Options(layers=2, tokens=3, rounds=1, prompts=(9,))


class Lengths(list[int]):
    """The lengths of the prompts that a package was called with. error: the error that it raises."""

    error: Exception | None = None


@pytest.fixture
def package(monkeypatch):
    """A package whose convolution over a prompt mamba2's modeling file calls, as if it had been there when that was imported."""
    lengths = Lengths()
    own = modeling("mamba2").causal_conv1d_fn.__wrapped__

    def causal_conv1d_fn(x, weight, bias=None, activation=None):
        lengths.append(x.shape[-1])
        if lengths.error:
            raise lengths.error
        return own(x, weight, bias, activation)

    causal_conv1d_fn.__module__, causal_conv1d_fn.__qualname__ = "a_package", "causal_conv1d_fn"
    there = ModuleType("a_package")
    there.causal_conv1d_fn = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "a_package", there)
    function = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "a_package")(own)
    monkeypatch.setattr(modeling("mamba2"), "causal_conv1d_fn", function)
    return lengths


def test_functions_of_packages_are_told_from_transformers_own(package):
    (found,) = bound(tiny("mamba2"))
    assert found.words == "mamba2.causal_conv1d_fn: a_package.causal_conv1d_fn"
    assert bound(tiny("qwen3_5")) == []


def test_within_own_functions_no_package_is_called_and_it_comes_back(package):
    model, before = tiny("mamba2"), modeling("mamba2").causal_conv1d_fn
    ids = prompt(1, 64, "cpu", 5)
    want = Greedy(model, ids).token
    assert set(package) == {5}
    package.clear()
    with pytest.raises(KeyError), own_functions(model):
        assert torch.equal(Greedy(model, ids).token, want)
        raise KeyError
    assert package == [] and modeling("mamba2").causal_conv1d_fn is before


def test_a_patch_within_is_of_the_packages_functions_too(package):
    model = tiny("mamba2")
    with hf.patch(model) as patch:
        Greedy(model, prompt(1, 64, "cpu", 5))
    assert package == [] and patch.calls()["mamba2.causal_conv1d_fn"] == (convolutions(model), 0)


@pytest.mark.matrix
def test_prompts_have_one_more_way(on_cpu, package):
    (row,), failed = run.family(narrow(), (1,), ONCE, "cpu")
    assert not failed and row.ms.keys() == row.kernels.keys() == row.memory.keys() == {PLAIN, PACKAGES, PATCHED, FUSED}
    assert row.bound == ("mamba2.causal_conv1d_fn: a_package.causal_conv1d_fn",) and package.count(9) >= 3 * 2
    assert row.apart.keys() == row.same.keys() == {PACKAGES, PATCHED, FUSED}
    assert row.tokens == 3 == row.same[PACKAGES] and row.apart[PACKAGES] == 0  # it computes what transformers does
    assert "transformers " in run.line(row) and ", packages " in run.line(row)
    text = as_markdown(Report(FACTS, prompts=[row]))
    assert "| packages ms |" in text and "| packages kernels |" in text and "packages 3/3, patched " in text


@pytest.mark.matrix
def test_packages_are_what_is_compared_with_where_transformers_own_pass_is_too_long(on_cpu, package):
    (row,), failed = run.family(narrow(), (1,), Options(layers=2, tokens=3, rounds=1, prompts=(9,), longest=0.0), "cpu")
    assert not failed and row.ms.keys() == {PACKAGES, PATCHED, FUSED} and row.notes[f"{PLAIN} ms"] == "it would take 0.1 s"
    assert row.apart.keys() == row.same.keys() == {PATCHED, FUSED} and row.tokens == 3


@pytest.mark.matrix
def test_a_package_that_fails_has_a_note_and_the_others_go_on(on_cpu, package):
    package.error = RuntimeError("no kernel for it\nin this build")
    (row,), failed = run.family(narrow(), (1,), ONCE, "cpu")
    assert not failed and row.ms.keys() == {PLAIN, PATCHED, FUSED} == {PLAIN, *row.same}
    assert row.notes == dict.fromkeys((f"{PACKAGES} {unit}" for unit in UNITS), "RuntimeError: no kernel for it")


def test_decode_steps_have_one_more_way(on_cpu, package):
    """The tokens equal the tokens of transformers' own functions."""
    (row,), failed = run.family(narrow(), (1,), Options(layers=2, tokens=2, rounds=1), "cpu")
    assert not failed and {PLAIN, PACKAGES, PATCHED, FUSED} <= row.ms.keys() and row.kernels[PACKAGES] == 5
    assert package == [8, 8] and (row.same, row.tokens) == (12, 12)
    assert "| packages ms |" in as_markdown(Report(FACTS, [row]))


@pytest.mark.matrix
def test_without_packages_there_is_no_such_way_and_no_such_column(on_cpu):
    (row,), failed = run.family(narrow(), (1,), ONCE, "cpu")
    assert not failed and PACKAGES not in row.ms and row.bound == ()
    assert "packages" not in as_markdown(Report({**FACTS, "kernel_packages": []}, prompts=[row])).partition("\n\n")[2]


def test_measuring_a_family_leaves_its_functions_as_they_were(on_cpu, package):
    before = dict(vars(modeling("mamba2")))
    run.family(narrow(), (1,), ONCE, "cpu")
    assert vars(modeling("mamba2")) == before


def test_models_are_transformers_own_where_a_package_has_registered_others(monkeypatch):
    """As flash-linear-attention does, when it is imported, for mamba and mamba2."""
    own = type(narrow().config(2))
    other = type("Mamba2Config", (PreTrainedConfig,), {"model_type": "mamba2"})
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    AutoConfig.register("mamba2", other, exist_ok=True)
    assert CONFIG_MAPPING["mamba2"] is other and type(narrow().config(2)) is own
    assert type(narrow().build(2, torch.float32, "cpu")).__module__ == "transformers.models.mamba2.modeling_mamba2"
