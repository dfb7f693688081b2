"""Plots of the documentation as SVG, and the tables beside them: `python -m tools.plots` writes them from docs/data/peers.json."""
