"""The tensors of linear attention over prompts, by their roles in the recurrence, and which of them each public function takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# In the order of the library's operator. The first three every function has.
OPERANDS = ("q", "k", "v", "g", "gk", "beta", "read", "erase", "write", "alpha", "A_log", "dt_bias")
OF_KEYS = ("q", "k", "read", "write", "alpha")  # […, HK, K]
ALIKE = ("v", "q", "k", "read", "write", "out")  # of one dtype
CHANNELS = ("gk", "erase", "alpha", "dt_bias")  # with a number per key channel, each of its own dtype
PER_TOKEN = {**dict.fromkeys((*ALIKE, "gk", "erase", "alpha"), 4), "g": 3, "beta": 3}  # axes


class Function(NamedTuple):
    """What a public function cannot do without, beside q, k and v, and which of its parameters are called otherwise than their roles."""

    required: tuple[str, ...] = ()
    words: Mapping[str, str] = {}  # role -> parameter


FUNCTIONS = {
    "chunk_kda": Function(("gk", "beta"), {"gk": "g"}),
    "chunk_gla": Function(),
    "chunk_gdn2": Function(("gk", "erase"), {"gk": "g", "erase": "b"}),
    "chunk_comba": Function(("g", "beta", "read"), {"read": "p"}),
    "chunk_rwkv7": Function(("gk", "read", "alpha"), {"q": "r", "gk": "w", "read": "kk", "alpha": "a"}),
    "chunk_dplr_delta_rule": Function(("read", "write"), {"read": "a", "write": "b"}),
}
