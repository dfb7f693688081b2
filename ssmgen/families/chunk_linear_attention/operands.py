"""The tensors of linear attention over prompts, by their roles in the recurrence, and which of them each public function takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# In the order of the library's operator. The first three every function has.
OPERANDS = ("q", "k", "v", "g", "beta", "read", "erase", "write", "alpha", "A_log", "dt_bias")
OF_KEYS = ("q", "k", "read", "write", "alpha")  # […, HK, K]
ROWS = ("v", *OF_KEYS, "erase", "out")  # of one dtype, with contiguous channels behind heads
PER_TOKEN = {**dict.fromkeys((*ROWS, "g"), 4), "beta": 3}  # axes


class Function(NamedTuple):
    """What a public function cannot do without, beside q, k and v, and which of its parameters are called otherwise than their roles."""

    required: tuple[str, ...] = ()
    words: Mapping[str, str] = {}  # role -> parameter
    per_head: bool = False  # g and dt_bias have one number for all key channels of a head


FUNCTIONS = {
    "chunk_kda": Function(("g", "beta")),
    "chunk_gla": Function((), {"g": "gk"}),
    "chunk_gdn2": Function(("g", "erase"), {"erase": "b"}),
    "chunk_comba": Function(("g", "beta", "read"), {"read": "p"}, per_head=True),
    "chunk_rwkv7": Function(("g", "read", "alpha"), {"q": "r", "g": "w", "read": "kk", "alpha": "a"}),
    "chunk_dplr_delta_rule": Function(("read", "write"), {"g": "gk", "read": "a", "write": "b"}),
}
