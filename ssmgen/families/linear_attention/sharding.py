"""What the axes of the linear-attention functions' tensors are."""

from __future__ import annotations

from ...calls.sharding import CONTROL, Rule

_RING = ("k", "v", "g", "beta")
_ROWS, _KEYS = "* head n", "* group n"
_AXES = {
    **dict.fromkeys(("q", "k"), _KEYS),
    **dict.fromkeys(("v", "out"), _ROWS),
    **dict.fromkeys(("g", "beta"), "* head n|* head|head"),
    "A_log": "head",
    "dt_bias": "head n|head",
    "state": "batch head row n",
    "intermediate_states": "batch token head row n",
    "ring.k": "batch token group n",
    **dict.fromkeys(("ring.v", "ring.g", "ring.beta"), "batch token head n|batch token head"),
    **CONTROL,
}
_FORMS: dict[str, dict[str, str]] = {
    "gated_delta_rule": {},
    "delta_rule": {},
    "simple_gla": {},
    "kda": {},
    "comba": {"p": _KEYS},
    "gdn2": {"b": _ROWS, "w": _ROWS},
    "rwkv7": {**dict.fromkeys(("r", "kk", "a"), _KEYS), "w": _ROWS},
    "dplr_delta_rule": {**dict.fromkeys(("a", "b"), _KEYS), "gk": _ROWS},
    "gla": {"gk": _ROWS, "gv": _ROWS},
    "lightning_attn": {"slope": "head"},
}
_WRITTEN = ("state", "out", "intermediate_states", *[f"ring.{name}" for name in _RING])
_commit = Rule(_AXES, ("state",), returns=("state",), by_sequence=False, layers=True, tuples={"ring": _RING})

RULES = {
    **{name: Rule(_AXES | axes, _WRITTEN, "v", tuples={"ring": _RING}) for name, axes in _FORMS.items()},
    "gated_delta_rule_commit": _commit,
    "kda_commit": _commit,
}
