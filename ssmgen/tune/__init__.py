"""Tuning: each operator's `cases`, a cost `model`, and the `search` for the fastest variant; its results are tables of `ssmgen.tuned`."""
