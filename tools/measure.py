"""Repeats the measurements shown in the documentation: `python -m tools.measure NAME …`. Needs a GPU, and the peers that a table names.

Writes docs/data/NAME.json.gz, which `ssmgen bench render` shows. `transformers` and `prompts` write the tables of
docs/lab/transformers.md, for decode steps and for prompts. With mamba-ssm, causal-conv1d and flash-linear-attention installed, the tables
also show transformers with these packages. docs/data/peers.json is filled from such results by hand: each entry has its command. A NAME is
a card and a suite, h200-all or h100-all; each report has the ceilings of its card. A file of all operators also updates docs/cards.md. A
file of all models (CARD-models) updates docs/models.md and its plots. With --from FILE, an output of `ssmgen bench … --json` on such a
card, nothing is measured, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ssmgen.bench import models_page
from ssmgen.bench.formats import as_json, load
from ssmgen.bench.models import stitched

from . import cards, models

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs" / "data", ROOT / "docs" / "lab" / "transformers.md"
END = "<!-- end -->\n"  # of a table of the page
TABLES = {  # their names -> the options of tools.demo
    "transformers": "--markdown",
    "prompts": "--markdown --prompt 2048 --prompt 8192 --longest 1 --model mamba2 --model nemotron_h --model bamba --model mamba "
    "--model falcon_mamba --model jamba --model kimi_linear --model qwen3_next --model qwen3_5",
}

LAYER = "--state bf16 --state f32"
COMMANDS = {  # measurement -> the commands of `ssmgen` whose reports are in its file
    "all": ["bench all --quick"],
    "flashinfer": [
        "bench replay_selective_state_update --state bf16",
        "bench replay_selective_state_update --state bf16 --with-conv1d --window 0 --batch 1 --batch 4 --batch 16 --batch 64",
        "bench combine_splits",
        "bench selective_state_update --model nemotron-h-8b --tp 8 --state bf16 --tokens 6",
        "bench selective_state_update --model nemotron-h-8b --tp 8 --state bf16 --batch 1 --batch 8",
    ],
    "mamba2-layer": [f"bench mamba2_layer --model nemotron-h-8b {LAYER} --batch 1 --batch 4 --batch 16 --batch 64"],
    "gdn-layer": [f"bench gdn_layer --model qwen3.5-35b-a3b {LAYER} --batch 1 --batch 4 --batch 16 --batch 64"],
    "gdn-layer-397b": [f"bench gdn_layer --model qwen3.5-397b-a17b {LAYER} --batch 1"],
    "kda-layer": [f"bench kda_layer --model kimi-linear-48b-a3b {LAYER} --batch 1 --batch 4 --batch 64"],
}


MODELS = "bench models"  # whose file, CARD-models, has a separate form
PRODUCTS = "tools.products"  # a module, whose file is CARD-products


def commands_of(name: str) -> list[str]:
    """The commands whose reports are in a data file; none if its name says nothing that is known."""
    card, _, what = name.partition("-")
    if not card:
        return []
    return {"models": [MODELS], "products": [PRODUCTS]}.get(what) or COMMANDS.get(what, [])


def output(module: str, *words: str) -> str:
    """The output of `python -m MODULE …`. Raises CalledProcessError if it fails, as a benchmark with a wrong result does."""
    return subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def refresh(name: str, data: Path = DATA, run: Callable[..., str] = output) -> Path:
    """Measures a data file and writes it; its path. The file that is there stays until all of it is measured.

    Raises ValueError where that was measured on another card than its name says.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i, command in enumerate(commands_of(name)):
            paths.append(Path(folder) / f"{i}.json")
            if command == PRODUCTS:  # its exit code says whether cuBLAS is faster somewhere
                subprocess.run([sys.executable, "-m", PRODUCTS, "--json", str(paths[-1])], cwd=ROOT)
                if not paths[-1].exists():
                    raise ValueError(f"{PRODUCTS} wrote no report; its output says why")
            else:
                paths[-1].write_text(run("ssmgen", *command.split(), "--json"))
        return keep(name, paths, data)


def keep(name: str, paths: Sequence[Path], data: Path = DATA) -> Path:
    """Makes a data file from output of `ssmgen bench … --json`; returns its path. Raises BenchFileError, and ValueError as `refresh`."""
    card, _, what = name.partition("-")
    if what == "models":
        reports = [models_page.load(path) for path in paths]
        text = json.dumps(stitched(reports), indent=1)
    elif what == "products":
        reports = [json.loads(path.read_text()) for path in paths]
        text = json.dumps(reports[0], indent=0)
    else:
        suite = load(paths)
        text, reports = as_json(suite, alone=False), suite.reports
    if wrong := {report["device"] for report in reports if card.upper() not in re.split(r"\W+", report["device"].upper())}:
        raise ValueError(f"{name} would be of {', '.join(sorted(wrong))}")
    path = data / f"{name}.json.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same results, the same bytes
    return path


def begin(name: str) -> str:
    """The line before a table of the page."""
    return f"<!-- python -m tools.measure {name} -->\n"


def refresh_table(name: str, page: Path = PAGE, run: Callable[..., str] = output) -> Path:
    """Measures a table of transformers' models and puts it into its page; the page's path."""
    table = run("tools.demo", *TABLES[name].split())
    before, rest = page.read_text().split(begin(name))
    page.write_text(f"{before}{begin(name)}\n{table.strip()}\n\n{END}{rest.partition(END)[2]}")
    return page


def main() -> None:
    known = [*(f"CARD-{what}" for what in (*COMMANDS, "models", "products")), *TABLES]
    parser = argparse.ArgumentParser(
        prog="python -m tools.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Of {', '.join(known)}.")
    parser.add_argument("--from", dest="files", nargs="+", type=Path, metavar="FILE", help="Results of the one NAME, measured before.")
    parser.add_argument("--list", action="store_true", help="Print the commands, and run none.")
    given = parser.parse_args()
    if given.list:
        for name in COMMANDS:
            print(f"CARD-{name}:", *COMMANDS[name], sep="\n  ssmgen ")
        print(f"CARD-models:\n  ssmgen {MODELS}")
        print(f"CARD-products:\n  python -m {PRODUCTS}")
        for name, options in TABLES.items():
            print(f"{name}:", f"python -m tools.demo {options}", sep="\n  ")
    elif not given.names or (unknown := [name for name in given.names if name not in TABLES and not commands_of(name)]):
        parser.error(f"give some of {', '.join(known)}" + (f", not {' or '.join(unknown)}" if given.names else ""))
    if given.files and (len(given.names) != 1 or given.names[0] in TABLES):
        parser.error("--from goes with one NAME of a card")
    for name in given.names:
        try:
            print(refresh_table(name) if name in TABLES else keep(name, given.files) if given.files else refresh(name))
        except ValueError as e:
            parser.exit(1, f"{e}\n")
        if name.endswith("-all"):
            print(cards.refresh())
        elif name.endswith("-models"):
            print(*models.refresh(), sep="\n")


if __name__ == "__main__":
    main()
