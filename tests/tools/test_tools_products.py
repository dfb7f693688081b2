"""tools.products without a GPU: the shapes of models, and made-up times."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ssmgen.families.skinny_linear.problem import OPERATOR, SkinnyProblem
from ssmgen.select import registry
from ssmgen.spec.kernel import Arch
from tools import measure, products
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


# Saved times: docs/data/h200-products.json.gz, of `python -m tools.products --json`.

DATA = Path(__file__).parents[2] / "docs/data/h200-products.json.gz"
# Products that took longer than cuBLAS's, by at most this ratio: docs/lab/skinny_linear.md says why.
LOST = {(20480, 128, 16): 1.39, (20480, 128, 8): 1.04, (20480, 128, 1): 1.03, (7424, 7424, 16): 1.01}


def test_no_other_product_is_slower_than_cublas():
    report = products.load(DATA)
    lost = {(*row["shape"], row["rows"]): found for row in report["rows"] if (found := products.ratio(row)) is None or found > 1}
    assert set(lost) == set(LOST) and all(lost[key] <= most for key, most in LOST.items())


def test_saved_times_are_of_the_variants_that_serve_today():
    """A changed rule changes times that users read: measure again."""
    report = products.load(DATA)
    for row in report["rows"]:
        (n, k), rows = row["shape"], 8 if row["rows"] <= 8 else 16
        chosen = registry.select(OPERATOR, SkinnyProblem(k=k, rows=rows), n, Arch(90, "a"), True, report["device"])
        assert str(chosen) == row["spec"], row["shape"]


def test_every_layer_of_the_models_was_timed():
    """Numbers of rows are 1, 8 and 16."""
    timed = {(*row["shape"], row["rows"]) for row in products.load(DATA)["rows"]}
    wanted = {(*shape, rows) for shape in products.shapes(presets().values()) for rows in (1, 8, 16)}
    assert wanted == timed


def test_a_saved_report_is_printed_without_a_card():
    done = CliRunner().invoke(products.products, ["--saved", str(DATA)])
    assert done.exit_code == 0 and "| 18560 x 4096 | 35.54 (0.86) |" in done.output


def test_a_report_becomes_a_data_file(tmp_path):
    (tmp_path / "now.json").write_text(json.dumps(products.load(DATA)))
    path = measure.keep("h200-products", [tmp_path / "now.json"], tmp_path)
    assert products.load(path) == products.load(DATA)
    with pytest.raises(ValueError, match="h100-products would be of NVIDIA H200"):
        measure.keep("h100-products", [tmp_path / "now.json"], tmp_path)
