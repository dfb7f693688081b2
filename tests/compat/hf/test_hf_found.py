"""Parts of the installed transformers are found by name, parameters and source; parameters of its forwards by their use."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from programs import succeeds

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import CLASSES, MODELS, TINY, built, generate, known, minimax, modeling, undo_leaks
from hf_cases import nothing_stays_patched as nothing_stays_patched

import ssmgen
from ssmgen.compat import hf
from ssmgen.compat.hf import copies as hf_copies
from ssmgen.compat.hf import found as hf_found
from ssmgen.compat.hf import roles as hf_roles
from ssmgen.errors import PatchError


def test_every_model_that_has_functions_is_found_and_no_other():
    assert hf.models() == {name: MODELS[name] for name in MODELS if known(name)} | {"minimax": ("MiniMaxLightningAttention",)}


def test_a_modeling_file_that_nothing_lists_is_found_by_its_text(tmp_path, monkeypatch):
    """A folder of tomorrow: a name of a function in its text is enough to look closer; a file without one is not imported."""
    for name, text in (("tomorrow", "def causal_conv1d_fn(hidden_states, weight): ..."), ("other", "raise SystemExit")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"modeling_{name}.py").write_text(text)
    monkeypatch.setattr(hf_found, "folder", lambda: tmp_path)
    assert hf_found._matching(tmp_path) == ("tomorrow",) and hf_found.is_folder("tomorrow") and not hf_found.is_folder("../tmp")


def test_every_mixer_is_found():
    found = {name: list(hf_copies.mixers(modeling(name))) for name in MODELS if known(name)}
    assert found == {name: [CLASSES[name]] if name in CLASSES else [] for name in found}


def test_a_copy_is_found_by_its_source(monkeypatch):
    """Finds a class of another name with Qwen3.5's methods; not a class whose forward, or a function that it calls, differs in a word."""
    module = modeling("qwen3_5")
    theirs = module.Qwen3_5GatedDeltaNet
    copied = type("TomorrowGatedDeltaNet", (theirs.__bases__), dict(vars(theirs)))
    assert hf_copies.layer_of(copied) is hf_copies.TABLE["Qwen3_5GatedDeltaNet"][1]

    def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
        return torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule  # noqa: F821

    changed = type("TomorrowGatedDeltaNet", (theirs.__bases__), dict(vars(theirs)) | {"forward": forward})
    assert hf_copies.layer_of(changed) is None
    assert all(hf_copies.layer_of(getattr(modeling(n), c)) is None for n, c in (("olmo_hybrid", "OlmoHybridGatedDeltaNet"),))


class Mixer:
    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs): ...


class Renamed:
    def forward(self, hidden_states, extra=1, cache=None, attention_mask=None, **kwargs): ...


@pytest.mark.parametrize("owner", [Mixer, Renamed])
@pytest.mark.parametrize("name", hf_roles.ALIASES["cache"])
def test_an_argument_is_found_under_every_name_of_its_role(owner, name):
    roles = hf_roles.Roles(owner.forward, "hidden_states", "cache", "attention_mask")
    assert hf_roles.objection(owner, "hidden_states", "cache", "attention_mask") == ""
    assert roles((1,), {name: 2, "other": 3}) == (1, 2, None, {"other": 3})
    assert roles((), {"hidden_states": 1, name: 2, "attention_mask": 4}) == (1, 2, 4, {})


def test_arguments_are_found_by_position():
    mixer, renamed = (hf_roles.Roles(o.forward, "hidden_states", "cache", "attention_mask") for o in (Mixer, Renamed))
    assert mixer((1, 2, 3), {}) == (1, 2, 3, {})
    assert renamed((1, 5, 2, 3), {}) == (1, 2, 3, {"extra": 5})
    assert renamed.unknown({"extra": 5}) and not renamed.unknown({"extra": 1}) and not renamed.unknown({"more": 5})


def test_a_forward_with_a_parameter_that_nothing_here_knows_is_not_replaced():
    class Needed:
        def forward(self, hidden_states, gate_of_tomorrow, cache=None, attention_mask=None): ...

    class Gone:
        def forward(self, hidden_states, attention_mask=None, **kwargs): ...

    for owner in (Needed, Gone):
        assert "its forward takes self, hidden_states" in hf_roles.objection(owner, "hidden_states", "cache", "attention_mask")
    assert hf_roles.objection(Mixer, "hidden_states", "cache", more=False)


@pytest.mark.parametrize("name", ["mamba2", "mamba", "qwen3_5", "kimi_linear", "lfm2", "minimax"])
def test_our_calls_use_no_deprecated_name(name):
    model = minimax() if name == "minimax" else built(name)
    ids = torch.arange(3, 13).view(2, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        with ssmgen.accelerate(model) as fast:
            fast.generate(ids, 3)
            generate(model, 3)


def test_a_newer_transformers_is_warned_of_once(monkeypatch):
    import transformers

    monkeypatch.setattr(hf_found, "_told", set())
    monkeypatch.setattr(transformers, "__version__", "5.99.1")
    with pytest.warns(RuntimeWarning, match=r"transformers is 5\.99\.1; ssmgen was tested up to 5\.24"):
        hf.patch("mamba2").undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.patch("mamba2").undo()


def test_a_leaked_patch_is_undone_and_told():
    """The fixture of these tests does this: after one test fails, the next begins with transformers' own functions."""
    original = modeling("mamba2").causal_conv1d_fn
    hf.patch("mamba2")
    hf.patch(["mamba2", "lfm2"])
    leaked = undo_leaks()
    assert "mamba2.causal_conv1d_fn" in leaked and "lfm2.causal_conv1d_fn" in leaked
    assert not hf._active and modeling("mamba2").causal_conv1d_fn is original and undo_leaks() == []


def test_a_name_that_no_folder_has_and_one_of_a_model_without_functions():
    with pytest.raises(PatchError, match="'mamba9' is not a model folder of transformers"):
        hf.patch("mamba9")
    with pytest.raises(PatchError, match="'llama' has no function or layer that ssmgen knows"):
        hf.patch("llama")


def test_looking_for_models_imports_no_modeling_file_that_has_nothing():
    program = (
        "import sys\nfrom ssmgen.compat import hf\nhf.models()\nassert 'transformers.models.llama.modeling_llama' not in sys.modules\n"
    )
    program += f"assert sum('.modeling_' in name for name in sys.modules) < {2 * len(TINY)}\n"
    succeeds(program)


RECURRENT = re.compile(
    r"recurrent_state|update_conv_state|update_recurrent_state|set_linear_cache|rwkv_linear_attention|mLSTM|CausalConv|causal_conv|"
    r"nn\.(?:LSTM|GRU)\("
)
"""Words of a modeling file with a recurrent layer or a causal convolution."""


def test_the_page_lists_every_folder_and_what_is_replaced_there():
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < hf_found.TESTED:
        pytest.skip(f"the page lists the folders of transformers 5.24, and this is {transformers.__version__}")
    files = [f for f in hf_found.folder().glob("*/modeling_*.py") if f.stem == f"modeling_{f.parent.name}" and f.parent.name != "auto"]
    folders = {f.parent.name for f in files if RECURRENT.search(f.read_text())}
    page = (Path(__file__).parents[3] / "docs/migrate/transformers.md").read_text()
    section = page.partition("### Every model folder")[2].partition("\n## ")[0]
    table = {name: (functions, layers) for name, functions, layers in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", section, re.M)}
    assert table.keys() == hf.models().keys()
    nothing = section.partition("Nothing is replaced")[2].partition(".")[0]
    assert folders == table.keys() | set(re.findall(r"`(\w+)`", nothing))
    words = {"causal_conv1d_fn": "convolution", "mamba_selective_scan": "Mamba", "mamba2_chunk_scan": "Mamba-2"}
    words |= {"torch_chunk_gated_delta_rule": "gated delta rule", "chunk_kimi_delta_attention": "Kimi delta attention"}
    words |= {"MiniMaxLightningAttention": "Lightning attention"}
    for name, functions in hf.models().items():
        steps = {layer.step is not None for layer in hf_copies.mixers(modeling(name)).values()}
        fused = "steps and prompts" if True in steps else "prompts" if False in steps else "its forward" if name == "minimax" else "no"
        assert table[name] == (", ".join(words[f] for f in functions if f in words), fused), name
