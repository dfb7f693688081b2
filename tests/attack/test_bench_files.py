"""Files of `ssmgen bench … --json` that were altered: an error that names the field, or a rendering that no terminal acts on."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_cases import MEASURED
from click.testing import CliRunner
from rich.console import Console

from ssmgen import cli
from ssmgen.bench import formats, table
from ssmgen.bench.formats import BenchFileError, load
from ssmgen.bench.html import as_html
from ssmgen.cache.files import plain

SOUND = json.loads(MEASURED.read_text())
# Characters that act on terminals or mislead readers: C0 except line breaks, DEL, C1, marks that reorder or hide text, line separators.
ACTING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def saved(content, folder: Path) -> Path:
    path = folder / "results.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def rendered(path: Path) -> dict[str, str]:
    """The reports in every form. Raises BenchFileError."""
    suite = load([path])
    out = io.StringIO()
    table.print_tables(suite, Console(file=out, width=200, force_terminal=True, color_system=None))
    forms = {"text": table.as_text(suite), "csv": formats.as_csv(suite), "json": formats.as_json(suite, False), "page": as_html(suite)}
    return forms | {"terminal": out.getvalue()}


def render(path: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.main, ["bench", "render", str(path), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.exit_code, result.output


def places(value, path=()):
    """The path of every value except the whole."""
    if path:
        yield path
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, name))


def changed(path: tuple, value) -> dict:
    """The sound file with another value at a path; None: without it."""
    content = copy.deepcopy(SOUND)
    *above, last = path
    place = content
    for name in above:
        place = place[name]
    place[last] = value
    return content


def words_of(path: tuple) -> str:
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path).lstrip(".")


# The field is named.

ROW = ("reports", 0, "rows", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("reports",), {}),
        (("reports", 0), 5),
        (("reports", 0, "rows"), None),
        (("reports", 0, "device"), ["NVIDIA"]),
        (("reports", 0, "device"), " "),
        (("reports", 0, "ceilings_tbs"), 4.2),
        (("reports", 0, "ceilings_tbs", "in_place"), 0),
        (ROW, "x"),
        ((*ROW, "us"), []),
        ((*ROW, "us", "ssmgen"), "2.4"),
        ((*ROW, "us", "ssmgen"), -1),
        ((*ROW, "us", "ssmgen"), float("nan")),
        ((*ROW, "served_us"), float("inf")),
        ((*ROW, "served_us"), 10**400),
        ((*ROW, "tbs"), True),
        ((*ROW, "heads"), 1.5),
        ((*ROW, "batch"), None),
        ((*ROW, "intermediates"), "no"),
        ((*ROW, "spec"), 7),
        ((*ROW, "rule"), {}),
        ((*ROW, "host_us", "ssmgen"), []),
        ((*ROW, "peer_ratio", "flashinfer"), 0),
        ((*ROW, "compile_seconds"), 0),
        ((*ROW, "state_error"), "small"),
        (("reports", 2, "shape"), [16, 64, 128]),
        (("reports", 2, "shape", 1), "64"),
        (("reports", 2, "rows", 0, "written"), None),
        (("reports", 4, "rows", 0, "shape"), [1, 2, 3]),
        (("reports", 4, "rows", 0, "hot"), 1),
        (("reports", 4, "rows", 0, "mul_ratio"), None),
        (("failed",), {}),
    ],
    ids=lambda v: words_of(v) if isinstance(v, tuple) else repr(v)[:12],
)
def test_the_field_is_named(path, value, tmp_path):
    content = changed(path, value)
    for option in ([], ["--csv"], ["--json"], [f"--html={tmp_path / 'page.html'}"]):
        code, said = render(saved(content, tmp_path), *option)
        assert code == 1 and said.startswith("BenchFileError: these files are not what `ssmgen bench … --json` writes:\n  - "), said
        assert said.count("\n") == 2 and f": {words_of(path)} is " in said and len(said) < 600, said
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((*ROW, "peer_ratio", "fla"), 0.5, f"{words_of(ROW)}.us.fla is missing; peer_ratio needs it"),
        ((*ROW, "us"), {"ssmgen": 2.0, "flashinfer": 2.0}, f"{words_of(ROW)}.us has no copy; copy_ratio needs it"),
        ((*ROW, "us", "mul"), 2.0, f"{words_of(ROW)}.us.mul is not a contender of this operator"),
        (("reports", 2, "rows", 0, "specs"), [], "reports[2].rows[0] has neither spec nor specs"),
        (
            ("reports", 0, "ceilings_tbs", "sideways"),
            2.0,
            "reports[0].ceilings_tbs: 'sideways' is unknown; expected one of in_place, out_of_place",
        ),
        (("reports", 0, "op"), "softmax", "reports[0].op is 'softmax'; expected one of causal_conv1d, "),
        (("reports", 0, "op"), ["kda"], "reports[0].op is ['kda']; expected one of"),
    ],
)
def test_what_fields_say_of_each_other(path, value, words, tmp_path):
    code, said = render(saved(changed(path, value), tmp_path))
    assert code == 1 and words in said, said


BYTES = {
    "nested": (b"[" * 200_000, "nested too deeply"),
    "nested objects": (b'{"reports":' * 200_000, "nested too deeply"),
    "nested a little less": (b'{"failed": [], "reports": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
    "no UTF-8": (b'{"device": "\xff"}', "not UTF-8 from byte 12 on"),
    "cut": (MEASURED.read_bytes()[:-9], "not JSON"),
    "cut gzip": (gzip.compress(MEASURED.read_bytes())[:-9], "it is not a complete gzip file"),
    "damaged gzip": (b"\x1f\x8b\x08\x00" + b"\xff" * 99, "it is not a complete gzip file"),
    "gzip bomb": (gzip.compress(b" " * (33 * 2**20), 9), "more than 32 MiB"),
    "wide number": (b"[" + b"1" * 5000 + b"]", ""),
    "null": (b"null", "it is None; expected an object"),
}


@pytest.mark.parametrize(("data", "words"), BYTES.values(), ids=BYTES)
def test_what_is_no_file_of_results(data, words, tmp_path):
    code, said = render(saved(data, tmp_path))
    assert code == 1 and said.startswith("BenchFileError: ") and words in said and len(said) < 600, said


def test_places_that_cannot_be_read_or_written(tmp_path):
    assert "Is a directory" in render(tmp_path)[1] and "more than 32 MiB" in render(Path("/dev/zero"))[1]
    assert render(MEASURED, "--html=/proc/page.html")[1].startswith("FileError: /proc/page.html cannot be written: ")


def test_a_pipe_is_as_good_as_a_file(tmp_path):
    ours, theirs = os.pipe()
    with open(theirs, "wb") as pipe:
        pipe.write(json.dumps(SOUND["reports"][0]).encode())
    assert load([Path(f"/dev/fd/{ours}")]).reports == [SOUND["reports"][0]]
    os.close(ours)


# Terminals and pages.

TRICKS = [
    "\x1b[2J\x1b[1;31mall is well\x1b]0;title\x07", "\x9b2J", "\x90q\x9c", "a\rb", "a\x08\x08b", "\x00", "\u202etxet\u202c",
    "\u2066x\u2069", "\x85", "\u2028", "\ud800", "\ufeff", "two\nlines", "<script>alert(1)</script>", '" onload="alert(1)', "&lt;",
    "[red]rich[/red]", "{{ 7 * 7 }}", "=cmd()",
]  # fmt: skip


def test_plain_text():
    assert [plain(text) for text in ("", "a … b ×", "a\tb\nc", "\x1b[1mx\x9b0m")] == ["", "a … b ×", "a b c", "[1mx0m"]
    assert plain("a\nb\r\x1b\u2028c", lines=True) == "a\nb  c"
    for text in TRICKS:
        assert not ACTING.search(plain(text)) and "\n" not in plain(text)


def texts(content) -> list[tuple]:
    """The paths of texts that may be anything."""
    found = []
    for path in places(content):
        value = content
        for name in path:
            value = value[name]
        if isinstance(value, str) and path[-1] != "op":
            found.append(path)
    return found


class Tags(HTMLParser):
    """The tags of a page with the names of their attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.found: set[tuple[str, ...]] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found |= {(tag, name) for name, _ in attrs} | {(tag, "")}


def check_harmless(forms: dict[str, str]) -> None:
    for form, text in forms.items():
        assert not (found := ACTING.search(text)), (form, text[max(0, found.start() - 40) : found.end() + 40])
    assert Tags(forms["page"]).found <= ORDINARY, Tags(forms["page"]).found - ORDINARY


ORDINARY = Tags(as_html(load([MEASURED]))).found | {("ul", ""), ("li", ""), ("text", "transform")}  # of failures, of long names


@pytest.mark.parametrize("trick", TRICKS, ids=ascii)
def test_texts_of_files_do_nothing_to_terminals_and_pages(trick, tmp_path):
    content = copy.deepcopy(SOUND)
    named = {k: content["reports"][0]["rows"][0][k] for k in ("model", "state", "heads", "tokens", "intermediates", "batch")}
    content["reports"][0]["failed"] = [named | {"error": "why"}]
    content["failed"] = [{"op": "kda", "error": "why"}]
    for path in texts(content):
        *above, last = path
        place = content
        for name in above:
            place = place[name]
        place[last] += trick
    for report in content["reports"]:  # names of contenders, too
        for row in report["rows"]:
            for times in (row["us"], row["host_us"], row["peer_ratio"]):
                for name in [name for name in times if name.partition(".")[0] in ("flashinfer", "tensorrt_llm")]:
                    times[name + trick] = times.pop(name)
    forms = rendered(saved(content, tmp_path))
    check_harmless(forms)
    code, said = render(saved(content, tmp_path))
    assert code == 0 and not ACTING.search(said)


def test_an_error_keeps_its_lines(tmp_path):
    content = SOUND | {"failed": [{"op": "kda", "error": "kda cannot run:\n  - \x1b[1mthis"}]}
    assert render(saved(content, tmp_path))[1].endswith("not timed: kda: kda cannot run:\n  - [1mthis\n")


def test_a_wrong_text_in_an_error_is_shown_harmlessly(tmp_path):
    for path in ((*ROW, "us"), (*ROW, "heads"), ("reports", 0, "op")):
        code, said = render(saved(changed(path, "\x1b[2J\u202e" * 9), tmp_path))
        assert code == 1 and not ACTING.search(said)
    odd = copy.deepcopy(SOUND)
    odd["reports"][0]["rows"][0]["us"]["\x1b[2J"] = "x"
    assert not ACTING.search(render(saved(odd, tmp_path))[1])
    with pytest.raises(BenchFileError) as e:
        load([tmp_path / "\x1b[2J.json"])
    assert not ACTING.search(str(e.value))


# Whatever a value becomes.

VALUES = [
    None, True, False, 0, 1, -1, 3, 2**63, 10**400, -0.5, 1e-9, 1e-320, 1e15, 1e308, float("nan"), float("inf"), "", "x", "7", "x" * 2000,
    [], {}, [1], [[]], {"a": 1}, {"ssmgen": 1.0}, [16, 64], [1, 2, 3], [1, 2, 3, 4], "kda", "combine_splits", *TRICKS,
]  # fmt: skip


def mutated(rng: random.Random, paths: list[tuple]) -> bytes:
    content = copy.deepcopy(SOUND)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        *above, last = rng.choice(paths)
        place = content
        try:
            for name in above:
                place = place[name]
            how = rng.randrange(8)
            if how == 0:
                del place[last]
            elif how == 1 and isinstance(place, dict):
                place[rng.choice([*TRICKS, "mul", "copy", "x"])] = place.pop(last)
            elif how == 2 and isinstance(place, list):
                place.append(copy.deepcopy(place[last]))
            else:
                place[last] = copy.deepcopy(rng.choice(VALUES))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier one took that away
    data = json.dumps(content).encode()
    if rng.randrange(10) == 0:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + rng.randrange(3) :]
    return data


def test_whatever_a_file_says_it_is_rendered_or_refused(tmp_path):
    rng, count = random.Random(13), int(os.environ.get("ATTACKS", "150"))
    paths, found = list(places(SOUND)), {"rendered": 0, "refused": 0}
    for _ in range(count):
        path = saved(mutated(rng, paths), tmp_path)
        try:
            forms = rendered(path)
        except BenchFileError as e:
            assert str(path) in str(e) and len(str(e)) < 1600 and not ACTING.search(str(e)), e
            found["refused"] += 1
        else:
            check_harmless(forms)
            assert max(map(len, forms.values())) < 3_000_000
            found["rendered"] += 1
    print(f"{count} mutated files: {found}")
    assert min(found.values()) > count / 20
