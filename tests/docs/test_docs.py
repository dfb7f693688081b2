"""The documentation is true: its examples run, its command lines parse, and every public name is documented."""

from __future__ import annotations

import re
import shlex

import click
import pytest
import torch
from docs_pages import DOCS, ROOT, blocks, name_of, pages, programs, run, with_examples

import ssmgen
from ssmgen import errors
from ssmgen.cli import main
from ssmgen.settings import VARIABLES
from ssmgen.spec.family import records

# Commands that pages name, and that are checked as soon as they are there.
LATER = {("bench", "all"), ("bench", "render"), ("tune",), ("tuned",)}


@pytest.mark.parametrize("page", with_examples(), ids=name_of)
def test_examples_run_on_cpu_tensors(page, monkeypatch, own_cache):
    """Blocks that need a GPU are compiled, not run; on a card, tests/gpu/test_docs_gpu.py runs all of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SSMGEN_CACHE_PATH", "")  # which a page sets
    torch.manual_seed(0)
    run(page, on_card=False)


def test_there_are_examples_for_every_operator():
    text = "".join(b.text for page in with_examples() for b in programs(page))
    operators = [name for family in records() for name in family.functions]
    (linear,) = (set(family.functions) for family in records() if "gated_delta_rule" in family.functions)
    like_gated_delta_rule = linear - {"gated_delta_rule", "gated_delta_rule_commit"}
    assert len(operators) > 20
    assert {name for name in operators if f"ssmgen.{name}(" not in text} <= like_gated_delta_rule


def command_lines() -> list[tuple[str, str]]:
    """(page, line) of each `ssmgen …` or `python -m ssmgen …` in a block of the shell's, indented, or within a sentence."""
    found = []
    for page in [*pages(), ROOT / "README.md"]:
        lines = [line for b in blocks(page, "sh") for line in b.text.splitlines()]
        lines += [line.strip() for line in page.read_text().splitlines() if line.startswith("    ")]
        lines += [code for code in re.findall(r"`([^`\n]+)`", page.read_text()) if not re.search("…|OPERATOR|--help", code)]
        found += [(name_of(page), match[1]) for line in lines if (match := re.match(r"(?:python -m )?(ssmgen [a-z]+\b.*)", line))]
    return found


def test_command_lines_parse():
    """Each names a command and options that exist."""
    wrong = []
    for page, line in command_lines():
        _, *words = shlex.split(line.partition(" > ")[0], comments=True)
        command, context, path = main, click.Context(main), ()
        try:
            while words and isinstance(command, click.Group):
                path = (*path, words[0])
                if path in LATER and words[0] not in command.commands:
                    words = []
                    break
                name, command, words = command.resolve_command(context, words)
                context = click.Context(command, info_name=name, parent=context)
            if words:  # else a sentence names the command, and no more
                command.parse_args(context, words)
        except click.ClickException as e:
            wrong.append(f"{page}: {line}: {e.format_message()}")
    assert len(command_lines()) > 40 and not wrong


def mentioned(*parts: str) -> str:
    return "".join(path.read_text() for part in parts for path in sorted(DOCS.glob(part)))


def test_every_public_name_is_in_the_reference():
    text = mentioned("reference/api.md")
    names = [name for name in ssmgen.__all__ if name != "Ring"] + ["heading: Ring"]
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


def test_every_error_is_explained():
    classes = [c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.SsmgenError)]
    text = mentioned("reference/errors.md")
    assert not [name for name in classes if f"`{name}`" not in text and name != "SsmgenError"]


def test_every_environment_variable_is_explained():
    text = mentioned("guides/deployment.md")
    assert not [name for name in VARIABLES if f"`{name}`" not in text]


def public_functions(module_name: str) -> list[str]:
    module = __import__(f"ssmgen.compat.{module_name}", fromlist=["_"])
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and not isinstance(value, type) and value.__module__.startswith("ssmgen.compat")
    ]


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("mamba_ssm", "mamba_ssm"), ("causal_conv1d", "causal_conv1d"), ("flashinfer", "flashinfer"), ("fla", "fla"),
        ("trtllm", "trtllm_vllm"), ("vllm", "engines"), ("sglang", "engines"), ("hf", "transformers"),
    ],
)  # fmt: skip
def test_every_function_of_another_package_is_on_its_page(module, page):
    text = mentioned(f"migrate/{page}.md", f"guides/{page}.md")
    names = public_functions(module)
    assert names and not [name for name in names if f"`{name}`" not in text]


def test_readme_is_short_and_has_the_lines_that_ci_takes():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    for pattern in (r"^python3 -m venv .*pytest", r"^python3 -m venv .*ssmgen build"):
        assert len(re.findall(pattern, text, re.MULTILINE)) == 1
    links = re.findall(r"\]\((docs/[^)#]*)", text)
    assert len(links) > 10 and all((ROOT / link).is_file() for link in links)
