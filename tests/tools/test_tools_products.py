"""tools.products without a GPU: the shapes of models, and made-up times."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tools import products
from tools.demo.presets import presets

TIMES = {(18560, 4096): {1: (36.8, 42.7), 8: (37.1, 43.7)}, (4096, 8192): {1: (16.8, 21.6), 8: (23.0, 22.2)}}
ROWS = [
    {"shape": list(shape), "rows": rows, "served_us": ours, "us": {"ssmgen_pdl": ours, "cublas": theirs}}
    for shape, of_rows in TIMES.items()
    for rows, (ours, theirs) in of_rows.items()
]


def test_shapes_are_those_of_the_replaced_layers_without_the_head():
    found = products.shapes_of(presets()["mamba2"])
    assert found == {(18560, 4096): ["in_proj"], (4096, 8192): ["out_proj"]}
    assert products.shapes([presets()["mamba2"], presets()["nemotron_h"]])[18560, 4096] == [
        "Mamba-Codestral-7B in_proj",
        "Nemotron-H-8B in_proj",
    ]


def test_layers_that_accelerate_leaves_alone_are_not_timed():
    assert all(n % 8 == 0 and k % 8 == 0 for n, k in products.shapes_of(presets()["jamba"]))


def test_the_worst_shape_comes_first_and_every_loss_is_named():
    lines = products.table({"rows": ROWS}, {(18560, 4096): ["a in_proj", "b in_proj"]})
    assert lines[2] == "| 4096 x 8192 | 16.80 (0.78) | 23.00 (1.04) |  |"
    assert lines[3] == "| 18560 x 4096 | 36.80 (0.86) | 37.10 (0.85) | a in_proj; b in_proj |"
    alone = {"shape": [64, 4096], "rows": 1, "served_us": 2.2, "us": {"ssmgen_pdl": 2.2}}
    assert products.losses({"rows": [alone]}) == ["64 x 4096, 1 rows: cuBLAS was not timed"]
    assert products.losses({"rows": ROWS}) == ["4096 x 8192, 8 rows: 1.036 of cuBLAS's time"]


@pytest.mark.parametrize(("rows", "code"), [(ROWS, 1), (ROWS[:3], 0)], ids=["a loss", "none"])
def test_the_command_times_the_shapes_and_fails_on_a_loss(monkeypatch, tmp_path, rows, code):
    asked = {}

    def run(**given):
        asked.update(given)
        return {"rows": rows, "failed": []}

    monkeypatch.setattr(products, "bench_of", lambda op: SimpleNamespace(run=run))
    file = tmp_path / "found.json"
    done = CliRunner().invoke(products.products, ["--model", "mamba2", "--rows", "1", "--rows", "8", "--json", str(file)])
    assert done.exit_code == code, done.output
    assert {(18560, 4096), (4096, 8192)} < set(asked["shapes"]) and asked["rows"] == (1, 8)
    assert json.loads(file.read_text())["rows"] == rows
    assert ("1.036" in done.output) == bool(code)
