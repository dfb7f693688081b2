"""Programs for those who work on ssmgen, run in a checkout as `python -m tools.NAME`: README.md lists them. Not in the wheel."""
