"""Replacements that need other replacements, whose modules an engine imports in its first call."""

from __future__ import annotations

import sys

import pytest
from test_engine_plugins import PLUGINS, with_ours
from test_engine_plugins import engine as engine

from ssmgen.compat.shared import replacing


@pytest.mark.parametrize("there", [True, False])
def test_a_call_imports_what_its_replacement_needs(engine, there, tmp_path, monkeypatch, caplog):
    """Engines import some modules in their first call, which is ours too if the functions of these modules are."""
    other = next(r for r in reversed(PLUGINS[engine]._ENGINE.replacements) if "." not in r.name and not r.asked)
    function, engine_s = with_ours(monkeypatch, engine, lambda *args: "ours", needs=(other.place,))
    assert PLUGINS[engine].register()[other.place] == replacing.WAITING and other.module not in sys.modules
    if not there:
        tmp_path.joinpath(*other.module.split(".")).with_suffix(".py").write_text("import a_module_that_is_missing")
    for _ in range(2):
        assert function(*[None] * 8) == ("ours" if there else engine_s)
    reason = "kept: its module cannot be imported: No module named 'a_module_that_is_missing'"
    assert PLUGINS[engine].register()[other.place] == (replacing.REPLACED if there else reason)
    assert (f"{other.place} is {engine}'s own" in caplog.text) == (not there)
    assert caplog.text.count("cannot be imported") == (not there), "an import was tried again"
