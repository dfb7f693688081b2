"""Plots and tables of the documentation are made from docs/data/peers.json."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tools.plots.__main__ import DOCS, PLOTS, files, panels
from tools.plots.charts import OWN


def test_plots_and_tables_show_the_data():
    assert [str(path.relative_to(DOCS)) for path, text in files().items() if not path.is_file() or path.read_text() != text] == []


def test_every_plot_is_shown():
    text = "".join(page.read_text() for page in [*DOCS.glob("**/*.md"), DOCS.parent / "README.md"])
    assert {path.name for path in PLOTS.iterdir()} == {path.name for path in files() if path.parent == PLOTS}
    assert [path.name for path in PLOTS.iterdir() if f"plots/{path.name}" not in text] == []


@pytest.mark.parametrize("panel", panels().values(), ids=lambda panel: panel.name)
def test_a_panel_is_complete(panel):
    assert all(len(us) == len(panel.cases) for us in [*panel.series.values(), *panel.extra.values()])
    assert (
        all(panel.series[OWN]) and set(panel.shown) <= set(panel.cases) and panel.command and re.fullmatch(r"\d{4}-\d\d-\d\d", panel.date)
    )
    assert panel.ceiling is None or panel.ceiling in panel.series


@pytest.mark.parametrize("path", sorted(path for path in files() if path.suffix == ".svg"), ids=lambda path: path.stem)
def test_a_plot_is_one_file_that_fetches_nothing(path):
    root = ElementTree.fromstring(path.read_text())
    assert root.tag.endswith("svg") and "prefers-color-scheme:dark" in path.read_text()
    assert re.findall(r"https?://[^\"']*", path.read_text().replace("http://www.w3.org/2000/svg", "")) == []
