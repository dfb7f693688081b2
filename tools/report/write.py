"""Variants -> a folder of pages. Links are relative and data comes in scripts, so that pages work when opened as files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ssmgen import __version__
from ssmgen.cache.store import Cache
from ssmgen.compile import nvrtc
from ssmgen.spec.kernel import Arch
from ssmgen.variants import inspect

from . import ReportError, benchmarks, colours, content
from .content import Family, Variant

HERE = Path(__file__).parent
LISTING = "ssmgen-report.json"  # the files of a report, so that the next report can remove them
FORMS = ("cu", "ptx", "sass")


def write(
    root: Path,
    archs: Sequence[Arch],
    timings: Sequence[Path],
    cache: Cache,
    jobs: int | None = None,
    done: Callable[[int], None] = lambda total: None,
) -> int:
    """Writes a report into a new or empty folder, or over an earlier one; the number of variants. Raises ReportError, CompileError."""
    earlier = _earlier(root)
    variants = content.gather(archs, benchmarks.read(timings), cache, jobs, done)
    files = pages(variants, archs)
    for path in earlier - files.keys():
        (root / path).unlink(missing_ok=True)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    (root / LISTING).write_text(json.dumps(sorted(files), indent=1) + "\n")
    return len(variants)


def _earlier(root: Path) -> set[str]:
    """The files of the report that is there. Raises ReportError when there is something else."""
    if not root.is_dir() or not any(root.iterdir()):
        return set()
    try:
        listed = {str(path) for path in json.loads((root / LISTING).read_text())}
    except (OSError, ValueError) as e:
        raise ReportError([f"{root} is not empty and holds no report of ssmgen: give a new folder, or empty it"]) from e
    return {path for path in listed if (root / path).resolve().is_relative_to(root.resolve())}


def pages(variants: Sequence[Variant], archs: Sequence[Arch]) -> dict[str, str]:
    """{path: text} of every file."""
    families = content.families(variants, archs)
    of_site = {"version": __version__, "compiler": nvrtc.build_id(), "archs": archs, "families": families, "forms": FORMS}
    env = _environment()

    def page(template: str, root: str, **about: Any) -> str:
        return env.get_template(template).render(**of_site, root=root, **about)

    files = {f"static/{path.name}": path.read_text() for path in (HERE / "static").iterdir()}
    files["static/style.css"] += colours.stylesheet()
    files["index.html"] = page("index.html.j2", "", variants=variants)
    files["data/search.js"] = _script("ssmgenVariants", [_searched(v) for v in variants])
    for family in families:
        files[f"families/{family.name}.html"] = page("family.html.j2", "../", family=family, known={v.key for v in family.variants})
        files[f"compare/{family.name}.html"] = page("compare.html.j2", "../", family=family)
        for form in FORMS:
            files[f"data/{family.name}.{form}.js"] = _script(f"ssmgen_{form}", _texts(family, form))
    for v in variants:
        files[f"variants/{v.key}.html"] = page("variant.html.j2", "../../", v=v, neighbours=v.neighbours(variants))
    return files


def _environment() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["code"] = lambda text, form: Markup(colours.as_html(text, form))
    return env


def _searched(v: Variant) -> dict[str, Any]:
    words = [*sorted({choice.rule for choice in v.choices}), *["spills"] * bool(v.entry.resources.spills), *["timed"] * bool(v.timings)]
    return {"name": v.spec.name, "arch": str(v.arch), "family": v.spec.kind, "spec": str(v.spec), "models": v.models, "words": words}


def _texts(family: Family, form: str) -> dict[str, str]:
    """{variant: its text in a form}, for comparisons; without what is not there."""
    texts = {v.key: (v, {"cu": v.entry.source, "ptx": v.ptx, "sass": v.sass}[form]) for v in family.variants}
    return {key: inspect.comparable(text, form, v.spec) for key, (v, text) in texts.items() if text is not None}


def _script(name: str, data: Any) -> str:
    """Data for pages that are opened as files, from which a browser fetches nothing but scripts."""
    return f"window.{name} = {json.dumps(data, separators=(',', ':'))};\n"
