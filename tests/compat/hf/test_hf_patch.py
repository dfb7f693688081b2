"""Functions of transformers' modeling files are replaced and put back."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from programs import succeeds

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import MODELS, assert_same, built, generate, modeling, replaced, snapshot
from hf_cases import nothing_stays_patched as nothing_stays_patched

from ssmgen.compat import hf
from ssmgen.compat.hf.functions import FUNCTIONS, unknown_parameters
from ssmgen.compat.hf.lightning import CLASSES
from ssmgen.errors import PatchError

ROOT = Path(__file__).parents[3]


def test_auto_replaces_all_that_is_known_and_undo_restores_every_attribute():
    before = snapshot()
    patch = hf.patch()
    functions = {f"{name}.{f}" for name in before for f in MODELS[name]}
    assert set(patch.replaced) == functions | {f"minimax.{c}" for c in CLASSES}
    after = snapshot()
    assert {f"{name}.{a}" for name in before for a in before[name] if after[name][a] is not before[name][a]} == functions
    patch.undo()
    assert_same(snapshot(), before)
    patch.undo()
    assert_same(snapshot(), before)


@pytest.mark.parametrize("first_out", [0, 1])
def test_overlapping_patches(first_out):
    before = snapshot()
    patches = hf.patch("mamba2"), hf.patch(["mamba", "mamba2"])
    ours = modeling("mamba2").causal_conv1d_update
    patches[first_out].undo()
    assert modeling("mamba2").causal_conv1d_update is ours, "the other patch still has it"
    patches[first_out].undo()
    assert modeling("mamba2").causal_conv1d_update is ours, "undoing twice takes nothing from the other"
    assert (modeling("mamba").causal_conv1d_fn is before["mamba"]["causal_conv1d_fn"]) == (first_out == 1)
    patches[1 - first_out].undo()
    assert_same(snapshot(), before)


def test_calls_are_counted_from_each_patch_on():
    model = built("lfm2")
    with hf.patch(model) as outer:
        generate(model, 2)
        with hf.patch(model) as inner:
            assert inner.calls() == {}
            generate(model, 2)
        assert outer.calls()["lfm2.causal_conv1d_update"].ssmgen == 2 * inner.calls()["lfm2.causal_conv1d_update"].ssmgen == 4
        assert "lfm2.causal_conv1d_update" in str(outer)


def test_an_exception_undoes_a_patch():
    before = snapshot()
    with pytest.raises(KeyError), hf.patch("mamba2"):
        raise KeyError
    assert_same(snapshot(), before)


def test_what_others_put_in_our_place_stays(monkeypatch):
    monkeypatch.setattr(modeling("mamba2"), "causal_conv1d_fn", modeling("mamba2").causal_conv1d_fn)  # restores it afterwards
    original = modeling("mamba2").causal_conv1d_update
    patch = hf.patch("mamba2")
    modeling("mamba2").causal_conv1d_fn = print
    with pytest.raises(PatchError, match=r"mamba2\.causal_conv1d_fn is now <built-in function print>"):
        patch.undo()
    assert modeling("mamba2").causal_conv1d_fn is print and modeling("mamba2").causal_conv1d_update is original


def test_a_patch_over_what_others_put_there(monkeypatch):
    def theirs(hidden_states, weight, bias=None, activation=None, **kwargs):
        raise AssertionError

    monkeypatch.setattr(modeling("lfm2"), "causal_conv1d_fn", modeling("lfm2").causal_conv1d_fn)  # restores it afterwards
    first = hf.patch("lfm2")
    modeling("lfm2").causal_conv1d_fn = theirs
    second = hf.patch("lfm2")
    with pytest.raises(PatchError, match="causal_conv1d_fn is now"):
        first.undo()
    second.undo()
    assert modeling("lfm2").causal_conv1d_fn is theirs


def test_a_warning_that_is_an_error_leaves_nothing_replaced(monkeypatch):
    monkeypatch.delattr(modeling("lfm2"), "causal_conv1d_fn")
    before = snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            hf.patch(["mamba2", "lfm2"])
    assert_same(snapshot(), before)


def test_what_is_not_known_is_refused_in_one_message():
    before = snapshot()
    with pytest.raises(PatchError) as refused:
        hf.patch(["mamba2", "llama", torch.nn.Linear(2, 2), "mamba3"])
    assert all(
        words in str(refused.value)
        for words in ("'llama' has no function", "Linear", "'mamba3' is not a model folder", "Nothing was replaced. ssmgen knows:")
    )
    assert_same(snapshot(), before)


def test_a_function_with_other_parameters_is_left_alone(monkeypatch):
    def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None, dilation=1):
        raise AssertionError

    monkeypatch.setattr(modeling("lfm2"), "causal_conv1d_update", causal_conv1d_update)
    monkeypatch.delattr(modeling("lfm2_moe"), "causal_conv1d_fn")
    with pytest.warns(RuntimeWarning) as said:
        patch = hf.patch(["lfm2", "lfm2_moe"])
    with patch:
        assert patch.replaced == ("lfm2.causal_conv1d_fn", "lfm2_moe.causal_conv1d_update")
        assert modeling("lfm2").causal_conv1d_update is causal_conv1d_update
    assert "dilation" in str(said[0].message) and "causal_conv1d_fn: this version of transformers does not have it" in str(said[0].message)


def test_functions_that_are_modules_have_their_forwards_parameters():
    """As transformers' are where `kernels` is installed."""

    class Function(torch.nn.Module):
        def forward(self, hidden_states, conv_state, weight, bias=None, activation=None):
            raise AssertionError

    assert unknown_parameters(FUNCTIONS["causal_conv1d_update"], Function()) == []
    assert unknown_parameters(FUNCTIONS["mamba_selective_state_update"], Function()) != []


def test_patching_warns_of_nothing_where_all_is_as_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.patch().undo()


# Installed packages.

PROGRAM = """
import sys, torch
sys.path.insert(0, {tests!r})
from hf_cases import generate, known, tiny
from ssmgen.compat import hf

for name in filter(known, ("mamba2", "mamba", "qwen3_5", "kimi_linear")):
    model = tiny(name)
    try:
        generate(model, 3)
        raise SystemExit(f"{{name}} did not take the packages")
    except NotImplementedError as e:
        assert str(e) == "a package's", e
    with hf.patch(model) as patch:
        generate(model, 3)
    assert len(patch.calls()) == len(patch.replaced) and not any(c.original for c in patch.calls().values()), str(patch)
"""


@pytest.mark.matrix
def test_installed_packages_are_replaced_too(tmp_path):
    """Packages of these names replace the real ones. They have only the functions that are called."""
    there = {
        "causal_conv1d": ["causal_conv1d_fn", "causal_conv1d_update"],
        "mamba_ssm/ops/triton/selective_state_update": ["selective_state_update"],
        "mamba_ssm/ops/triton/ssd_combined": ["mamba_chunk_scan_combined"],
        "fla/ops/gated_delta_rule": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"],
        "fla/ops/kda": ["fused_recurrent_kda"],
    }
    body = 'def {}(*args, **kwargs):\n    raise NotImplementedError("a package\'s")\n'
    for path, functions in there.items():
        file = tmp_path / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(body.format(f) for f in functions))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    program = PROGRAM.format(tests=str(ROOT / "tests" / "support"))
    succeeds(program, env=env)


@pytest.mark.parametrize(
    ("version", "refused"), [("4.57.1", True), ("5.0.0", True), ("5.14.2", True), ("5.15.0.dev0", False), ("6.0", False)]
)
def test_versions_that_look_nothing_up_are_refused(monkeypatch, version, refused):
    monkeypatch.setattr("transformers.__version__", version)
    before = replaced()
    if refused:
        with pytest.raises(PatchError, match=rf"transformers is {version}; expected 5\.15 or later"):
            hf.patch(fuse=True)
    else:
        hf.patch(fuse=True).undo()
    assert replaced() == before
