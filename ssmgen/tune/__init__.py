"""Tuning: each operator's `cases`, a cost `model`, and the `search` for the fastest variant. Results are tables in `select/tuned/`."""
