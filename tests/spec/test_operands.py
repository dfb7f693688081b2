"""Tables of operands: everything derived from them. Families declare their tensors nowhere else."""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ssmgen
from ssmgen.calls import checks
from ssmgen.spec.family import records
from ssmgen.spec.kernel import DType, Index, Narrow
from ssmgen.spec.operands import Operand, Table, Types, table
from tools import guide

FAMILIES = Path(ssmgen.__file__).parent / "families"
LEAD = "batch?!ragged token?several"
TWO_STATES = table(
    Operand("state", "slot head row n", Types.STATE, written=True, scales="state_scale", strides="slot:64"),
    Operand("second", "other head n", field="state", written=True, strides="other:64"),
    Operand("x", "token head row | token head", strides=f"{LEAD} head row?!tied"),
    Operand("A", "head row n | head", optional=True, strides="head row?!tied&loose"),
    Operand("kept", "rows token+ head", optional=True, written=True, field="state", there="keeps", strides="rows:64 token"),
    Operand("slots", "batch | batch column", Types.INDEX, optional=True, field="index", strides="batch column?picks"),
    Operand("seed", "slot | 1", Types.I64, optional=True, there="rounds"),
    Operand("state_scale", "slot head row", Types.F32, optional=True, written=True, there="scaled"),
    Operand("out", "like x", written=True, may_be=("x",), unless=("kept",)),
    head="heads", n="d_state", other="others",
)  # fmt: skip
PLAIN = {
    "state": DType.F32, "x": DType.BF16, "A": None, "index": Index.NONE, "out": DType.F16, "ragged": False, "several": True, "tied": True,
    "loose": True, "keeps": False, "picks": False, "rounds": 0, "scaled": False,
}  # fmt: skip


def spec(**fields) -> SimpleNamespace:
    return SimpleNamespace(**PLAIN | fields)


def test_kernels_take_what_a_spec_has_in_the_order_of_the_table():
    assert TWO_STATES.of(spec()) == ["state", "second", "x", "out"]
    everything = spec(A=DType.F32, keeps=True, index=Index.I64, rounds=10, scaled=True, state=Narrow.I8)
    assert TWO_STATES.of(everything) == list(TWO_STATES.names)
    said = [f"{p.ctype} {p.name}" for p in TWO_STATES.pointers(everything)]
    assert said[:5] == ["i8* state", "i8* second", "const bf16* x", "const f32* A", "i8* kept"]
    assert said[5:] == ["const i64* slots", "const i64* seed", "f32* state_scale", "f16* out"]
    assert [p.ctype for p in TWO_STATES.pointers(everything, ["second", "x"])] == ["i8*", "const bf16*"]


def test_a_kernel_may_leave_alone_what_others_of_the_call_write():
    parts = table(
        Operand("x", "token", written=True, writes="first&!frozen", strides="batch token?loose"), Operand("y", "token", written=True)
    )
    first, second = (SimpleNamespace(x=DType.F32, y=DType.F32, first=f, frozen=False) for f in (True, False))
    assert parts.written_by(first) == ["x", "y"] and parts.written_by(second) == ["y"]
    assert [p.ctype for p in parts.pointers(second)] == ["const f32*", "f32*"] and parts.gathered == ("x",)


def test_strides_are_those_of_a_spec_and_the_wide_ones_come_first():
    names = [f"{name}_{axis}" for name, axis, _ in TWO_STATES.strides(spec(tied=False, A=DType.F32, loose=False))]
    of_tokens = [[f"{name}_{axis}" for axis in ("batch", "token", "head", "row")] for name in ("x", "out")]
    assert names == ["state_slot", "second_other", *of_tokens[0], "A_head", *of_tokens[1]]
    assert ("A", "row", "u32") in TWO_STATES.strides(spec(tied=False, A=DType.F32))
    params = TWO_STATES.stride_params(spec(keeps=True, ragged=True))
    assert [(p.name, p.code) for p in params[:3]] == [("state_slot", "q"), ("second_other", "q"), ("kept_rows", "q")]
    assert all(p.code == "I" for p in params[3:]) and "x_batch" not in {p.name for p in params}


def test_values_of_strides_are_those_of_the_views_with_an_axis_of_tokens_and_without():
    x = torch.empty_strided((2, 5, 3, 4), (1000, 100, 10, 1))
    views = {"state": torch.zeros(6, 3, 4, 8), "second": torch.zeros(7, 3, 8), "x": x, "out": x}
    values = TWO_STATES.stride_values(spec(tied=False), views)
    assert values == {"state_slot": 96, "second_other": 24} | {
        f"{name}_{axis}": stride for name in ("x", "out") for axis, stride in (("batch", 1000), ("token", 100), ("head", 10), ("row", 1))
    }
    one = TWO_STATES.stride_values(spec(several=False), views | {"x": x[:, 0], "out": x[:, 0]})
    assert (one["x_batch"], one["x_head"]) == (1000, 10) and "x_token" not in one
    picked = TWO_STATES.stride_values(spec(index=Index.I32, picks=True), views | {"slots": torch.zeros(2, 9).t()})
    assert (picked["slots_batch"], picked["slots_column"]) == (1, 9)


SIZES = {"slot": 6, "other": 7, "head": 3, "row": 4, "n": 8, "rows": 2, "token": 5, "batch": 2}


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("state", (6, 3, 4), "state is [6, 3, 4]; expected [slots, heads, row, d_state] = [6, 3, 4, 8]"),
        ("second", (6, 3, 8), "second is [6, 3, 8]; expected [others, heads, d_state] = [7, 3, 8]"),
        ("x", (2, 3, 5), "x is [2, 3, 5]; expected [batch, tokens, heads, row] = [2, 5, 3, 4] or [batch, tokens, heads] = [2, 5, 3]"),
        ("A", (4,), "A is [4]; expected [heads, row, d_state] = [3, 4, 8] or [heads] = [3]"),
        ("kept", (2, 4, 3), "kept is [2, 4, 3]; expected [rows, tokens or more, heads] = [2, 5, 3]"),
        ("slots", (2, 1), "slots is [2, 1]; expected [batch] = [2]"),
        ("seed", (2,), "seed is [2]; expected [slots] = [6] or [1] = [1]"),
    ],
)
def test_a_shape_that_is_none_of_the_forms_is_told_with_all_of_them(name, shape, says):
    problems: list[str] = []
    assert not checks.check_shapes(TWO_STATES, {name: torch.zeros(shape)}, SIZES, problems, lead=("batch, tokens", (2, 5)))
    assert problems == [says]


def test_an_axis_may_be_longer_where_the_table_says_so():
    for name, shape in (("kept", (2, 9, 3)), ("x", (2, 5, 3)), ("seed", (1,)), ("slots", (2,))):
        problems: list[str] = []
        assert checks.check_shapes(TWO_STATES, {name: torch.zeros(shape)}, SIZES, problems, lead=("batch, tokens", (2, 5))), problems


def test_types_are_the_table_s():
    tensors = {"state": torch.zeros(1, dtype=torch.int8), "slots": torch.zeros(1)}
    tensors |= {"seed": torch.zeros(1, dtype=torch.int32), "x": torch.zeros(1).double()}
    problems: list[str] = []
    checks.check_types(TWO_STATES, tensors, "state", problems)
    assert problems == [
        "state is int8 and state_scale is None; expected a float32 scale for each row. Pass state_scale.",
        "slots is torch.float32; expected int32 or int64",
        "seed is int32; expected int64",
        "x is torch.float64; expected float32, float16 or bfloat16",
    ]


def test_a_short_form_is_seen_as_the_first_one():
    x, A, seed = torch.zeros(2, 5, 3), torch.arange(3.0), torch.ones(1)
    assert TWO_STATES.view("x", x, SIZES, 2).shape == (2, 5, 3, 4) and TWO_STATES.view("x", x, SIZES, 2).stride(-1) == 0
    seen = TWO_STATES.view("A", A, SIZES)
    assert seen.shape == (3, 4, 8) and torch.equal(seen[:, 2, 5], A) and TWO_STATES.view("seed", seed, SIZES).shape == (6,)
    full = torch.zeros(2, 5, 3, 4)
    assert TWO_STATES.view("x", full, SIZES, 2) is full
    with pytest.raises(LookupError, match=r"x has no form \[2, 2\]"):
        TWO_STATES.view("x", torch.zeros(2, 2), SIZES, 2)


def test_schemas_rules_and_aliases():
    assert TWO_STATES.schema([2]) == [
        "Tensor(a!) state", "Tensor(b!) second", "Tensor? x", "Tensor? A", "Tensor(c!)? kept", "Tensor? slots", "Tensor? seed",
        "Tensor(d!)? state_scale", "Tensor(e!) out",
    ]  # fmt: skip
    axes = TWO_STATES.axes()
    assert axes["x"] == "* head row|* head" and axes["state"] == "batch head row n" and axes["seed"] == "batch|1"
    assert TWO_STATES.in_place == (("out", "x", "kept"),) and TWO_STATES.only("state", "out").in_place == ()
    assert TWO_STATES.written[0] == "out" and TWO_STATES.required == {"state", "second", "x", "out"}
    assert TWO_STATES.only(required=("A",)).required == {"state", "second", "x", "out", "A"}
    assert TWO_STATES.Tensors(x=1)._asdict() == dict.fromkeys(TWO_STATES.names) | {"x": 1}


def test_a_kernel_may_call_an_operand_by_its_role():
    @dataclass
    class Spec:
        g: DType = DType.F32

    gates = table(Operand("a", "token head", role="g", field="g", strides="batch head"))
    assert gates.of(Spec()) == ["a"] and [p.name for p in gates.pointers(Spec())] == ["g"]
    assert gates.stride_values(Spec(), {"a": torch.zeros(2, 3)}) == {"g_batch": 3, "g_head": 1}


def test_rules_have_every_form_of_tokens_and_turned_tables_swap_two_axes():
    prompts = table(Operand("x", "token head n"), Operand("S", "sequences head n row"), Operand("d", "n"), n="N", row="P")
    assert prompts.axes(("batch token", "token"))["x"] == "batch token head n|token head n"
    turned = prompts.turned("n", "row")
    assert [row.axes for row in turned] == ["token head n", "sequences head row n", "n"] and turned.words == prompts.words
    assert prompts.beside(Operand("out", "like x")).names == (*prompts.names, "out")


def test_a_field_names_operands_of_one_type_and_strides_name_dense_axes():
    rows = table(
        Operand("x", "token head n", view="batch token head n", strides="batch:64?!ragged token head"),
        Operand("g", "head", strides="head"),
        Operand("out", "like x", field="x", written=True),
        Operand("S", "slot head n", view="slot head n m", strides="slot:64 head"),
    )
    assert rows.alike("out") == ("out", "x") and rows.alike("g") == ("g",)
    assert [rows.strided(name) for name in rows.names] == [3, 1, 3, 2] and TWO_STATES.strided("seed") == 0


# Families.

DECLARED = {record.name: record for record in records()}
PUBLIC = {name: record for name, record in DECLARED.items() if record.functions}
# Of torch, where there is not one of the family's name.
OPERATORS = {"gated_rms_norm": ("gated_rms_norm", "gated_layer_norm", "rms_norm"), "chunk_scan": ("chunk_scan", "chunk_attention")}
# Modules that may list tensors: the table, signatures, checks that relate tensors to each other, the reference, trials, benchmarks, and
# default variants, whose problems have fields of the same names.
SIGNATURES = ("call", "attention", "options", "plain", "centred", "context", "layer", "row")
MAY_LIST = ("operands", *SIGNATURES, "views", "planning", "reference", "trial", "models", "defaults")


def tables(family: str) -> list[Table]:
    """A family with one short table may have it in spec.py."""
    part = "operands" if (FAMILIES / family / "operands.py").is_file() else "spec"
    module = importlib.import_module(f"ssmgen.families.{family}.{part}")
    found = [value for value in vars(module).values() if isinstance(value, Table)]
    return found + [t for value in vars(module).values() if isinstance(value, dict) for t in value.values() if isinstance(t, Table)]


def lists_of_tensors(path: Path, names: set[str]) -> list[str]:
    """Tuples, lists, sets and keys of dictionaries that name several operands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        said = [item.value for item in items if isinstance(item, ast.Constant) and item.value in names]
        if len(said) > 3:
            found.append(f"{path.parent.name}/{path.name}:{node.lineno}: {', '.join(said)}")
    return found


@pytest.mark.parametrize("family", sorted(DECLARED))
def test_a_family_declares_its_tensors_in_its_table_alone(family):
    names = {name for t in tables(family) for name in t.names}
    assert names
    modules = [path for path in sorted((FAMILIES / family).glob("*.py")) if path.stem not in MAY_LIST and "bench" not in path.stem]
    assert {"spec"} <= {path.stem for path in modules}
    assert not [line for path in modules for line in lists_of_tensors(path, names)]


@pytest.mark.parametrize("family", sorted(PUBLIC))
def test_torch_s_operators_have_the_operands_of_the_table(family):
    for place in PUBLIC[family].functions.values():
        PUBLIC[family].part(place)  # defines them
    names = {name for t in tables(family) for name in t.names}
    for operator in OPERATORS.get(family, (family,)):
        schema = str(getattr(torch.ops.ssmgen, operator).default._schema)
        tensors = [word.rpartition(" ")[2] for word in schema.partition("(")[2].split(", ") if word.startswith("Tensor")]
        assert tensors and set(tensors) <= names and len(tensors) == len(set(tensors))


# Pages.


def test_pages_show_the_tables_as_they_are():
    """If they do not: python -m tools.guide."""
    shown = set()
    for page in guide.pages():
        text = page.read_text()
        assert guide.with_operands(text) == text, page.name
        shown |= {m["family"] for m in guide.OPERANDS.finditer(text)}
    assert shown == {family for family in PUBLIC if (FAMILIES / family / "operands.py").is_file()}


def test_a_page_s_table_says_shapes_types_and_what_is_written():
    assert TWO_STATES.page().splitlines()[2:6] == [
        f"| `state` | `[slots, heads, row, d_state]` | {Types.STATE.value} | written |",
        "| `second` | `[others, heads, d_state]` | float32, float16 or bfloat16 | written |",
        "| `x` | `[…, heads, row]` or `[…, heads]` | float32, float16 or bfloat16 |  |",
        "| `A` | `[heads, row, d_state]` or `[heads]` | float32, float16 or bfloat16 | may be left out |",
    ]
    assert TWO_STATES.page(["A"]).splitlines()[5].endswith("| may be None |")  # of an argument without a default
