"""SVG of the documentation: text, lines and rectangles in classes whose colours fit a light and a dark page."""

from __future__ import annotations

from html import escape

STYLE = """
 .card{fill:#fff;stroke:#d5dade}
 text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2933}
  .quiet{fill:#5b6770}
 .grid{stroke:#d5dade}
 .s0{fill:#00796b;stroke:#00796b}
 .s1{fill:#c2570c;stroke:#c2570c}
 .s2{fill:#6d4fc4;stroke:#6d4fc4}
  .s3{fill:#a8326d;stroke:#a8326d}
 .s4{fill:#2f6fb3;stroke:#2f6fb3}
 .ceiling{fill:#87929b;stroke:#87929b}
 .box{fill:#eef3f5;stroke:#87929b}
 .soft{fill:#d6efeb;stroke:#00796b}
  .warm{fill:#fbe3d2;stroke:#c2570c}
 .cool{fill:#e6dffa;stroke:#6d4fc4}
 .line{fill:none;stroke-width:2.5}
 .own{fill:#00796b;font-weight:700}
  @media (prefers-color-scheme:dark){.card{fill:#1f2430;stroke:#3b4452}
 text{fill:#e3e8ee}
 .quiet{fill:#a5b0bb}
 .grid{stroke:#3b4452}
  .s0{fill:#3fd0bd;stroke:#3fd0bd}
 .s1{fill:#ff9d5c;stroke:#ff9d5c}
 .s2{fill:#b49cff;stroke:#b49cff}
 .s3{fill:#ff8fc0;stroke:#ff8fc0}
 .s4{fill:#7db8f5;stroke:#7db8f5}
  .ceiling{fill:#98a4b0;stroke:#98a4b0}
 .box{fill:#2b3240;stroke:#6b7683}
 .soft{fill:#16433f;stroke:#3fd0bd}
 .warm{fill:#4a2f1b;stroke:#ff9d5c}
  .cool{fill:#352b57;stroke:#b49cff}
 .line{fill:none}
 .own{fill:#3fd0bd}}
"""
WIDTH = 560  # of a plot: its text stays readable on a page of 400 pixels
ARROW = (
    '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" class="ceiling"/></marker>'
)


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "", size: float = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" class="{kind}">{escape(words)}</text>'


def line(x: float, y: float, to_x: float, to_y: float, kind: str = "grid", more: str = "") -> str:
    return f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" class="{kind}" {more}/>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return line(x, y, to_x, to_y, "ceiling", 'stroke-width="1.6" marker-end="url(#a)"')


def rectangle(x: float, y: float, width: float, height: float, kind: str, radius: float = 2) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{max(width, 1):.1f}" height="{height:g}" rx="{radius:g}" class="{kind}"/>'


def path(points: list[tuple[float, float]], kind: str) -> str:
    return f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" class="{kind} line"/>'


def drawing(width: float, height: float, title: str, parts: list[str]) -> str:
    """A whole file. The background card has the page's colour or a similar one, in both themes."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><defs>{ARROW}</defs>\n"
        + rectangle(0.5, 0.5, width - 1, height - 1, "card", 8)
        + "\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )
