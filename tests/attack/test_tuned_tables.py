"""A user's table of tuned variants that was tampered with: a row that nothing measured can have left changes nothing, and is named once."""

from __future__ import annotations

import copy
import json
import os
import random
import warnings
from dataclasses import asdict

import pytest
from click.testing import CliRunner

from ssmgen.cache import files
from ssmgen.cli import main
from ssmgen.families.selective_state_update.spec import SsuSpec
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.select import registry
from ssmgen.select import tuned as table
from ssmgen.select.catalog import OPERATORS
from ssmgen.select.model_variants import specs_for
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import SM90, DType, Index, Pdl, PoolMode

GPU, OP = "Test GPU 7", "selective_state_update"
PROBLEM = find_model("nemotron-h-8b").problem(DType.BF16, Index.I32, PoolMode.SINGLE)
RULE = registry.select(OP, PROBLEM, 8, SM90, True)
OTHER = next(s for s in OPERATORS[OP].space(PROBLEM, SM90) if s.pdl is Pdl.WAIT and s.tile != RULE.tile)
SEVERAL = find_model("nemotron-h-8b").problem(DType.BF16, Index.I32, PoolMode.SINGLE, tokens=4)
TOKENS = registry.select(OP, SEVERAL, 8, SM90, True)
ROW = asdict(
    table.Row(
        operator=OP, problem=table.bucket(PROBLEM), size=8, pdl=True, spec=str(OTHER), us=2.0, rule_us=2.5, runner_up="tile=64 for 32",
        runner_up_us=2.5, label="a case", arch="sm_90a", driver="CUDA 13.0", code=table.code_digest(OTHER, SM90), compiler="a build",
        date="2026-01-02",
    )
)  # fmt: skip
SOUND = {"schema": table.SCHEMA, "gpu": GPU, "rows": [ROW | {"size": n} for n in (2, 8, 32)]}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Only the table that a test writes exists."""
    monkeypatch.setenv("SSMGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    yield tmp_path
    registry.forget()


def overlay(content) -> str:
    """Written as it is; its path."""
    path = table.overlay_path(GPU)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    registry.forget()
    return str(path)


def served() -> tuple[list, list[str]]:
    """(the variant of each of some sizes, the warnings) of all that reads tables; each variant is one of the problem's, and legal."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen = [registry.select(OP, PROBLEM, size, SM90, True, GPU) for size in (2, 8, 32, 100)]
        built = specs_for([PROBLEM], SM90, (True,), 64, (None, *table.gpus(SM90), GPU))
    for spec in (*chosen, *built):
        assert type(spec) is SsuSpec and not spec.violations(SM90)
        assert all(getattr(spec, name) == getattr(PROBLEM, name) for name in PROBLEM.__dataclass_fields__)
    return chosen, [str(w.message) for w in said]


def test_a_sound_table_is_served_without_a_word():
    overlay(SOUND)
    assert served() == ([OTHER, OTHER, OTHER, OTHER], [])


NESTED: list = []
for _ in range(50):
    NESTED = [NESTED]

TAMPERED = {
    "size as text": ({"size": "1"}, "size is '1'; expected a whole number of 1 or more"),
    "size 0": ({"size": 0}, "size is 0; expected"),
    "size -8": ({"size": -8}, "size is -8; expected"),
    "size 8.0": ({"size": 8.0}, "size is 8.0; expected"),
    "size NaN": ({"size": float("nan")}, "size is nan; expected"),
    "size wide": ({"size": 10**400}, "size is 1000"),
    "size true": ({"size": True}, "size is True; expected"),
    "size none": ({"size": None}, "size is None; expected"),
    "arch as number": ({"arch": 5}, "arch is 5; expected a text of one line"),
    "arch of none": ({"arch": "sm_9"}, "arch is 'sm_9':"),
    "arch too old": ({"arch": "sm_20"}, ""),
    "pdl as text": ({"pdl": "yes"}, "pdl is 'yes'; expected true or false"),
    "another operator": ({"operator": "softmax"}, "operator"),
    "operator as list": ({"operator": [OP]}, "operator is ['selective_state_update']; expected"),
    "another family's variant": ({"spec": str(SlotCopySpec(slot_bytes=4096))}, "its variant is of 'slot_copy'; expected " + OP),
    "a variant of several tokens": ({"spec": str(TOKENS)}, "its variant is for another problem"),
    "no variant": ({"spec": f"{OP}:lanes=x,{str(OTHER).partition(':')[2]}"}, "its variant is not legal"),
    "another field": ({"spec": str(OTHER).replace("tile=", "tilt=")}, "its variant is not legal"),
    "a variant that is not legal": ({"spec": str(OTHER).replace(f"tile={OTHER.tile}", "tile=7")}, "its variant is not legal"),
    "lanes 0": ({"spec": str(OTHER).replace(f"lanes={OTHER.lanes}", "lanes=0")}, "its variant is not legal"),
    "vec 0": ({"spec": str(OTHER).replace(f"vec={OTHER.vec}", "vec=0")}, "its variant is not legal"),
    "threads wide": ({"spec": str(OTHER).replace(f"threads={OTHER.threads}", f"threads={'9' * 5000}")}, "its variant is not legal"),
    "us NaN": ({"us": float("nan")}, "us is nan; expected a number above 0"),
    "us infinite": ({"rule_us": float("inf")}, "rule_us is inf; expected"),
    "us 0": ({"us": 0}, "us is 0; expected a number above 0"),
    "nested": ({"us": NESTED}, "us is [[["),
    "escape": ({"label": "\x1b[2Jall is well"}, r"label is '\x1b[2Jall is well'; expected a text of one line"),
    "reordered": ({"label": "\u202etxet"}, r"label is '\u202etxet'; expected"),
    "two lines": ({"runner_up": "a\nb"}, r"runner_up is 'a\nb'; expected"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), TAMPERED.values(), ids=TAMPERED)
def test_a_row_that_was_tampered_with_is_named_once_and_left_out(changes, words):
    path = overlay(SOUND | {"rows": [SOUND["rows"][0], SOUND["rows"][1] | changes, SOUND["rows"][2]]})
    chosen, said = served()
    assert chosen == [OTHER] * 4, "by the rows beside it"
    assert len(said) == 1 and said[0].startswith(f"ssmgen ignores 1 of 3 rows of {path}: row 2: ") and words in said[0], said
    assert said[0].isprintable() and len(said[0]) < 1000


@pytest.mark.parametrize("row", [5, None, "x", [], {}, {"operator": OP}, NESTED], ids=repr)
def test_what_is_no_row(row):
    overlay(SOUND | {"rows": [*SOUND["rows"], row]})
    chosen, said = served()
    assert chosen == [OTHER] * 4 and len(said) == 1 and "row 4: " in said[0]


def test_of_many_rows_the_first_are_named():
    overlay(SOUND | {"rows": [ROW | {"size": str(n)} for n in range(500)]})
    chosen, said = served()
    assert chosen == [registry.select(OP, PROBLEM, n, SM90, True) for n in (2, 8, 32, 100)]
    assert len(said) == 1 and "500 of 500 rows" in said[0] and "; and 496 more" in said[0] and len(said[0]) < 1000


WHOLE = {
    "empty": b"",
    "no UTF-8": b'{"schema": 2, "gpu": "\xff"}',
    "nested": b"[" * 200_000,
    "nested objects": b'{"schema":' * 200_000,
    "no JSON": b"{'schema': 2}",
    "list": b"[]",
    "no rows": {"schema": table.SCHEMA, "gpu": GPU},
    "rows of an object": SOUND | {"rows": {}},
    "another schema": SOUND | {"schema": [2]},
    "schema true": SOUND | {"schema": True},
    "gpu as number": SOUND | {"gpu": 7},
    "gpu with an escape": SOUND | {"gpu": "Test GPU 7\x1b"},
    "another GPU": SOUND | {"gpu": "Test GPU 8"},
    "cut gzip": b"\x1f\x8b\x08\x00",
}


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_a_file_that_is_no_table_is_named_once(content):
    path = overlay(content)
    chosen, said = served()
    assert chosen == [registry.select(OP, PROBLEM, n, SM90, True) for n in (2, 8, 32, 100)]
    assert len(said) == 1 and said[0].startswith(f"ssmgen ignores your tuned variants: {path} is ") and said[0].isprintable(), said


def test_what_is_no_file_or_too_large(home):
    path = overlay(SOUND)
    for make, words in [
        (lambda: os.mkfifo(path), "it is not a regular file"),
        (lambda: os.symlink("/dev/zero", path), "it is not a regular file"),
        (lambda: os.mkdir(path), "Is a directory"),
        (lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY)) or os.truncate(path, 20 * 2**30), "more than 32 MiB"),
    ]:
        os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
        make()
        registry.forget()
        _, said = served()
        assert len(said) == 1 and words in said[0], said
    assert files.MAX_BYTES == 32 * 2**20


@pytest.mark.parametrize("where", ["x" * 300, "file/below"])
def test_cache_directories_that_cannot_be(where, home, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("SSMGEN_CACHE_DIR", str(home / where))
    registry.forget()
    assert table.rows_of(GPU) == {} and table.gpus() == ()


def test_the_commands_go_on():
    overlay(SOUND | {"rows": [*SOUND["rows"], ROW | {"arch": 5}]})
    for args in (["tuned"], ["tuned", "--json"], ["explain", OP, "--model", "nemotron-h-8b", "--gpu", GPU], ["models"]):
        registry.forget()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = CliRunner().invoke(main, args)
        assert result.exit_code == 0 and len(said) == (args != ["models"]), (args, result.output, repr(result.exception))


# Whatever a value becomes.

VALUES = [
    None, True, False, 0, 1, -1, 7, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", "1", "x" * 10_000, "\x1b]0;x\x07", "\u202e",
    "\ud800", [], {}, [1], {"a": 1}, "sm_90a", "sm_120", OP, "linear_attention", str(OTHER), str(RULE), str(TOKENS),
    str(SlotCopySpec(slot_bytes=4096)),
]  # fmt: skip
WORDS = ["0", "-1", "1", "3", "1000000007", "9" * 30, "none", "yes", "no", "bf16", "any", "element", "", "1e5", "٣"]


def tampered(rng: random.Random) -> bytes:
    content = copy.deepcopy(SOUND)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        row = rng.choice(content["rows"])
        how = rng.randrange(10)
        if how < 6 and row:
            row[rng.choice(list(row))] = copy.deepcopy(rng.choice(VALUES))
        elif how < 8 and isinstance(row.get("spec"), str) and "," in row["spec"]:
            items = row["spec"].split(",")
            i = rng.randrange(len(items))
            items[i] = f"{items[i].partition('=')[0]}={rng.choice(WORDS)}"
            row["spec"] = ",".join(items)
        elif how == 8 and row:
            row.pop(rng.choice(list(row)))
        else:
            content[rng.choice(list(content))] = rng.choice(VALUES)
            break
    data = json.dumps(content).encode()
    if rng.randrange(8) == 0:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data


def test_whatever_a_table_says_nothing_wrong_is_served():
    rng, count = random.Random(11), int(os.environ.get("ATTACKS", "250"))
    known = {OTHER, *(registry.select(OP, PROBLEM, n, SM90, True) for n in (2, 8, 32, 100))}
    found = {"as measured": 0, "in part": 0, "by the rules": 0, "named": 0}
    for _ in range(count):
        path = overlay(tampered(rng))
        chosen, said = served()  # raises for illegal variants
        assert len(said) <= 1 and all(path in words and words.isprintable() and len(words) < 1500 for words in said), said
        assert set(chosen) <= known
        found["as measured" if set(chosen) == {OTHER} else "in part" if OTHER in chosen else "by the rules"] += 1
        found["named"] += len(said)
    print(f"{count} tampered tables: {found}")
    assert found["named"] > count / 2 and all(found.values())
