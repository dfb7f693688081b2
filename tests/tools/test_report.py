"""`python -m tools.report`: the contents of its pages, which need no other files."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from click.testing import CliRunner
from report_cases import ARCHS, benchmark, few_variants

from ssmgen.cache.store import shared_cache
from ssmgen.engine.rows import RowSpec
from ssmgen.families.linear_attention import spec as linear_attention
from ssmgen.families.selective_state_update.spec import SsuProblem, SsuSpec
from ssmgen.select import tuned as table
from ssmgen.select.catalog import SPECS
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, Index, entries, parse_spec
from ssmgen.variants import inspect
from tools.report import ReportError, benchmarks, content, write
from tools.report.__main__ import report as report_command
from tools.report.colours import as_html

SM90 = Arch.parse("sm_90a")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """A report of a few variants for two architectures, with one benchmark."""
    root = tmp_path_factory.mktemp("report")
    timings = root / "bench.json"
    timings.write_text(json.dumps(benchmark()))
    with few_variants():
        write.write(root / "site", ARCHS, [timings], shared_cache())
    return root / "site"


class Page(HTMLParser):
    """Links, ids and texts; that tags close in the order in which they open."""

    VOID = frozenset({"meta", "link", "input", "br"})

    def __init__(self, path: Path):
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(path.read_text())
        self.close()
        assert not self.open, f"{path}: {self.open} stay open"

    def handle_starttag(self, tag, attrs):
        told = dict(attrs)
        self.links += [told[name] for name in ("href", "src") if name in told]
        self.ids += [told["id"]] if "id" in told else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_links_lead_to_files_of_the_report(report):
    pages = list(report.rglob("*.html"))
    assert len(pages) > 8
    for path in pages:
        page = Page(path)
        assert len(page.ids) == len(set(page.ids))
        for link in page.links:
            file, _, part = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target.is_file() and target.is_relative_to(report.resolve()), f"{path} links to {link}"
            assert not part or "=" in part or part in Page(target).ids, f"{path} links to {link}"


def test_nothing_comes_from_elsewhere(report):
    for path in report.rglob("*"):
        if path.suffix in (".html", ".css") or path.parent.name == "static":
            assert not re.search(r"https?:|//\w+\.|@import|fetch\(|XMLHttpRequest", _without_code(path)), path


def _without_code(path: Path) -> str:
    return re.sub(r'<pre class="code">.*?</pre>', "", path.read_text(), flags=re.DOTALL)


def test_a_variants_page_says_what_show_says(report):
    for path in (report / "variants").rglob("*.html"):
        spec = inspect.resolve(path.stem, shared_cache())
        arch = Arch.parse(path.parent.name)
        stats = inspect.stats(spec, arch, shared_cache())
        tiles = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+?) ?<", path.read_text()))
        assert int(tiles["registers per thread"]) == stats["registers"] and int(tiles["resident blocks"]) == stats["blocks_per_sm"]
        assert int(tiles["global loads"]) == stats["global_loads"] and int(tiles["local memory"]) == stats["local_memory"]


def test_sources_are_whole(report):
    """The source that a browser shows on a page is the whole source."""
    path = next((report / "variants/sm_90a").glob("ssu*.html"))
    shown = re.search(r'<section id="cu">.*?<pre class="code">(.*?)</pre>', path.read_text(), re.DOTALL)[1]
    texts = json.loads((report / "data/selective_state_update.cu.js").read_text().removeprefix("window.ssmgen_cu = ").rstrip(";\n"))
    plain = re.sub(r"<[^>]+>", "", shown)
    for entity, sign in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#39;", "'"), ("&amp;", "&")):
        plain = plain.replace(entity, sign)
    assert plain.strip() == texts[f"sm_90a/{path.stem}"].strip() and "#include" not in plain and "__global__" in plain


def test_everything_is_escaped(tmp_path):
    hostile = "<script>alert(1)</script>"
    told = benchmark()
    told["device"] = told["rows"][0]["model"] = told["method"] = hostile
    (tmp_path / "bench.json").write_text(json.dumps(told))
    with few_variants():
        write.write(tmp_path / "site", [SM90], [tmp_path / "bench.json"], shared_cache())
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert not any(hostile in page for page in pages) and sum("&lt;script&gt;alert(1)" in page for page in pages) == 2


def test_choices_are_those_of_the_registry():
    with few_variants():
        found = content.choices(SM90)
    spec = next(s for s in found if isinstance(s, SsuSpec) and s.nheads == 128 and s.headdim == 64 and s.prefetch and s.index is Index.I32)
    (choice,) = (c for c in found[spec] if "nemotron-h-8b" in c.models and not c.gpu)
    assert choice.rule == "bandwidth" and choice.pdl and choice.last is None
    problem = SsuProblem(**{f.name: getattr(spec, f.name) for f in fields(SsuProblem)})
    assert {select(SsuSpec.family, problem, batch, SM90, True) for batch in (choice.first, 300, 4096)} == {spec}
    assert select(SsuSpec.family, problem, choice.first - 1, SM90, True) != spec


@pytest.mark.parametrize("cls", dict.fromkeys(SPECS.values()), ids=lambda cls: cls.family)
def test_meanings_are_of_fields(cls):
    assert content.meanings(cls).keys() <= entries(cls).keys()


def test_meanings_are_the_comments_beside_the_fields():
    found = content.meanings(SsuSpec)
    assert found["tile"] == "rows per block" and found["tied"] == "A, dt and dt_bias hold one value per head"
    assert content.meanings(RowSpec).keys() < found.keys()


def test_neighbours_differ_least():
    with few_variants():
        variants = content.gather([SM90], {}, shared_cache(), None, lambda total: None)
    wide = next(v for v in variants if v.spec.family == "selective_state_update" and v.spec.prefetch)
    first, *_ = wide.neighbours(variants)
    assert wide.changes(first) == [("prefetch", "264", "0")] and wide not in wide.neighbours(variants)


def test_docstrings_keep_their_formulas():
    found = content.paragraphs(linear_attention.__doc__)
    assert [kind for kind, _ in found] == ["p", "p", "pre", "p"] and found[2][1].count("\n") == 3
    assert content.Family("linear_attention", found, []).sentence.startswith("decode steps of gated delta rules")


def test_without_nvdisasm_the_pages_say_so(tmp_path, monkeypatch):
    def missing() -> str:
        raise inspect.DisassemblerMissingError

    monkeypatch.setattr(inspect, "_nvdisasm", missing)
    with few_variants():
        write.write(tmp_path, [SM90], [], shared_cache())
    page = next((tmp_path / "variants/sm_90a").glob("ssu*.html")).read_text()
    assert "pip install &#39;ssmgen[sass]&#39;" in page and "global loads" not in page and "resident warps" in page


def test_a_report_takes_the_place_of_an_earlier_one_and_of_nothing_else(tmp_path):
    with few_variants():
        write.write(tmp_path, ARCHS, [], shared_cache())
        assert (tmp_path / "variants/sm_80").is_dir() and (tmp_path / "variants/sm_90a").is_dir()
        (tmp_path / "notes.txt").write_text("mine")
        write.write(tmp_path, [SM90], [], shared_cache())
        assert not list((tmp_path / "variants/sm_80").iterdir()) and (tmp_path / "notes.txt").read_text() == "mine"
        (tmp_path / write.LISTING).unlink()
        with pytest.raises(ReportError, match="not empty and holds no report"):
            write.write(tmp_path, [SM90], [], shared_cache())


def test_benchmarks_belong_to_the_variants_that_they_name(tmp_path):
    told = benchmark()
    (tmp_path / "bench.json").write_text(json.dumps(told))
    found = benchmarks.read([tmp_path / "bench.json"])
    (timing,) = found[told["rows"][0]["spec"]]
    assert timing.ours == {"ssmgen_pdl"} and timing.us["flashinfer"] == 5.0 and timing.tbs == 1.5
    assert timing.case == "mamba-130m, f32 state, batch 8"
    parts = {spec: timing.ours for spec, (timing,) in found.items() if spec.startswith("slot_copy")}
    assert parts == {"slot_copy:slot_bytes=4096,threads=128,min_blocks=0,pdl=off": {"two_kernels"}}


def test_files_that_are_no_benchmarks_are_named_and_nothing_is_written(tmp_path):
    (tmp_path / "other.json").write_text("[]")
    result = CliRunner().invoke(report_command, [str(tmp_path / "site"), "--bench", str(tmp_path / "other.json")])
    assert result.exit_code == 1 and "other.json" in result.output and not (tmp_path / "site").exists()


def test_choices_that_were_measured_name_their_gpu(monkeypatch):
    """Measured choices appear with the rules' choices, which serve every other GPU."""
    with few_variants():
        found = content.choices(SM90)
    tuned = [choice for served in found.values() for choice in served if choice.gpu]
    assert {choice.gpu for choice in tuned} == set(table.gpus(SM90)) and {choice.rule for choice in tuned} == {"tuned"}
    assert not any(choice.rule == "tuned" for served in found.values() for choice in served if not choice.gpu)
    monkeypatch.setattr(table, "gpus", lambda arch: ())
    with few_variants():
        found = content.choices(SM90)
    assert found and not any(choice.gpu for served in found.values() for choice in served)


def test_specs_of_another_release_are_named(tmp_path):
    told = benchmark()
    told["rows"][0]["spec"] = "slot_copy:slot_bytes=4096,colour=red"
    (tmp_path / "bench.json").write_text(json.dumps(told))
    result = CliRunner().invoke(report_command, [str(tmp_path / "site"), "--bench", str(tmp_path / "bench.json")])
    assert result.exit_code == 1 and "field 'colour' is unknown" in result.output and not (tmp_path / "site").exists()


def test_command(tmp_path):
    with few_variants():
        result = CliRunner().invoke(report_command, [str(tmp_path / "site"), "--arch", "sm_89"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "site/index.html").is_file() and "index.html" in result.output
    variants = json.loads((tmp_path / "site/data/search.js").read_text().removeprefix("window.ssmgenVariants = ").rstrip(";\n"))
    assert {v["arch"] for v in variants} == {"sm_89"}
    assert all(parse_spec(v["spec"], SPECS).name == v["name"] for v in variants)
    assert any(DType.F32.value in v["spec"] for v in variants)


def test_html_is_escaped():
    assert "<script>" not in as_html("// <script>alert(1)</script> &\n", "cu")
    assert "&lt;script&gt;" in as_html("// <script>alert(1)</script> &\n", "cu")
