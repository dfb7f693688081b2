"""A few trials of each campaign of `cache_attacks`; by hand, thousands."""

from __future__ import annotations

import cache_attacks
import pytest


@pytest.mark.parametrize("name, trials", [("kills", 12), ("damage", 120), ("races", 16), ("forks", 4)])
def test_campaign(tmp_path, name, trials):
    figures = cache_attacks.CAMPAIGNS[name](trials, tmp_path / "cache")
    print(figures)
    assert figures["wrong"] == 0 and next(iter(figures.values())) == trials
    if name == "kills":
        assert figures["entries"] and figures["leftovers"], "some were killed while writing, some after"
    if name == "damage":
        assert figures["misses"] > trials * 0.9
