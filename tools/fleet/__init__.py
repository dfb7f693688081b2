"""Costs and savings of a fleet's shared kernel store: `python -m tools.fleet --help`."""
