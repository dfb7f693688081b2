"""Tuning: measured choices of variants (`table`), and how they are found (`search`, on each operator's `cases`, with a cost `model`)."""
