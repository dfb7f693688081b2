"""Plots of the documentation as SVG, and their tables: `python -m tools.plots` writes them from docs/data/peers.json."""
