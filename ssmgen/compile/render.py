"""Spec -> CUDA source. Deterministic: no clock, no environment variable and no version number reaches a template."""

from __future__ import annotations

import functools
import hashlib
import re
import textwrap
from pathlib import Path

import jinja2

from ..spec.kernel import SM90, Arch, DType, KernelSpec, Narrow, Pdl, flat
from .forks import whole

PDL_WAIT = "griddepcontrol.wait"


@functools.cache
def templates_dir() -> Path:
    """`ssmgen/_templates` in a wheel, `templates/` in a checkout."""
    packaged = Path(__file__).parents[1] / "_templates"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "templates"


@functools.cache
def environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["at"] = lambda text, column: textwrap.indent(text.strip("\n"), " " * column)  # indents to a column
    environment.globals |= {"constants": _constants, "types": _types}
    environment.filters["commented"] = lambda text: textwrap.indent(text.strip("\n"), "//     ")
    return environment


@whole()
def render(spec: KernelSpec, arch: Arch) -> str:
    """The kernel's source text. Raises SpecError if the spec is not legal for the architecture."""
    spec.check(arch)
    needs = spec.needs
    text = (
        environment()
        .get_template(spec.template)
        .render(
            s=spec,
            arch=arch,
            facts=_facts(spec),
            dtypes={v.value for v in flat(spec).values() if isinstance(v, (DType, Narrow))} | {needs.mma},
            needs=needs,
            clusters=spec.cluster_blocks > 1,
            waits=spec.pdl is not Pdl.OFF,
            triggers=spec.pdl is not Pdl.WAIT and arch >= SM90,
            parameters=_parameters(spec),
            **spec.constants(),
        )
    )
    # Preprocessor directives start at the beginning of a line, whatever the indentation of the text around them.
    lines = (line.lstrip() if line.lstrip().startswith("#") else line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


@functools.lru_cache(maxsize=1024)
def code_digest(spec: KernelSpec, arch: Arch) -> str:
    """A digest of the code of a call's kernels, without their names, comments and empty lines. Raises SpecError as `render` does."""
    texts = (render(part, arch).replace(part.name, "kernel") for part in spec.kernels)
    lines = (re.sub(r"\s*//.*$", "", line) for text in texts for line in text.splitlines())
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]


def uses_pdl(source: str) -> bool:
    """Whether to launch with the programmatic attribute: if and only if the kernel waits for the previous kernel."""
    return PDL_WAIT in source


def _constants(**values: int | None) -> str:
    """Declares the constants that are not None, in one line for each of the types int and bool."""
    said = {name: str(value).lower() for name, value in values.items() if value is not None}
    named = {kind: [f"{name} = {text}" for name, text in said.items() if type(values[name]) is kind] for kind in (int, bool)}
    return "\n".join(f"constexpr {kind.__name__} {', '.join(names)};" for kind, names in named.items() if names)


def _types(**types: DType | Narrow | None) -> str:
    """Declares names for the element types that are not None, a line each."""
    return "\n".join(f"using {name} = {dtype.value};" for name, dtype in types.items() if dtype is not None)


def _parameters(spec: KernelSpec) -> str:
    """The parameter list, broken between parameters only."""
    glued = ", ".join(f"{p.ctype} {p.name}".replace(" ", "~") for p in spec.parameters())
    return textwrap.fill(glued, 120, initial_indent=" " * 4, subsequent_indent=" " * 4, break_on_hyphens=False).replace("~", " ")


def _facts(spec: KernelSpec) -> list[str]:
    """The spec's fields as comment lines."""
    lines = [""]
    for item in spec.said():
        if len(lines[-1]) + len(item) > 110:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + item
    return lines
