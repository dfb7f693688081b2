"""`python -m tools.plots`: writes docs/plots/*.svg, and the tables of docs/performance/ between `<!-- plot NAME -->` and `<!-- end -->`.

Tables between `<!-- states MODEL -->` and `<!-- end -->` come from docs/data/state_accuracy.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from . import states
from .charts import Panel, chart, table
from .diagrams import DRAWINGS
from .speed import halves, speed

DOCS = Path(__file__).parents[2] / "docs"
DATA, PLOTS = DOCS / "data" / "peers.json", DOCS / "plots"
STATES = re.compile(r"^<!-- states ([\w ,.-]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"^<!-- plot ([\w-]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def panels() -> dict[str, Panel]:
    return {found["name"]: Panel.of(found) for found in json.loads(DATA.read_text())}


def files() -> dict[Path, str]:
    """Every file that the data make, and its text: plots, drawings, and pages with their tables."""
    known = panels()
    made = {PLOTS / f"{name}.svg": chart(panel) for name, panel in known.items()}
    made |= {PLOTS / f"{name}.svg": draw() for name, draw in DRAWINGS.items()}
    made[PLOTS / "speed.svg"] = speed(known)
    made |= {PLOTS / f"{name}.svg": text for name, text in halves(known).items()}
    made[PLOTS / f"{states.NAME}.svg"] = states.chart()
    for page in sorted(DOCS.glob("**/*.md")):
        text = page.read_text()
        if PLACE.search(text):
            up = "../" * (len(page.relative_to(DOCS).parts) - 1)
            made[page] = PLACE.sub(lambda found, up=up: block(known[found[1]], up), text)
        if STATES.search(text):
            made[page] = STATES.sub(lambda found: f"<!-- states {found[1]} -->\n\n{states.table(found[1])}\n\n<!-- end -->", text)
    return made


def block(panel: Panel, up: str) -> str:
    """A plot, a collapsed table, and the date and method of the measurement."""
    told = f"{panel.card}, {panel.date}, `{panel.command}`. {panel.note}".strip()
    return (
        f"<!-- plot {panel.name} -->\n\n![{panel.title}]({up}plots/{panel.name}.svg)\n\n"
        f'<details markdown="1"><summary>Table</summary>\n\n{table(panel)}\n\n</details>\n\n{told}\n\n<!-- end -->'
    )


if __name__ == "__main__":
    PLOTS.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
    print(f"{len(files())} files")
