"""What each axis of the public functions' tensors is, for `sharded`: the heads of a call and its sequences may lie on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Rule(NamedTuple):
    """The axes of a function's tensors, and what may be done with them.

    axes: by parameter (of a ring "ring.k"), one word per axis. Three of the words mean something: "head" (of the state; a channel, where
        there are no heads), "group" (of heads that share it) and "batch" (also: slot). `*` stands for the axes ahead of the heads, of
        which the first is the batch; `|` separates forms, of which the number of axes picks one
    """

    axes: Mapping[str, str]
    written: tuple[str, ...]
    like: str = ""  # the parameter whose number of axes says how many `*` stands for; one if there is none
    anchors: tuple[str, ...] = ("state",)  # the first that is there says what is sharded
    returns: tuple[str, ...] = ("out",)
    by_sequence: bool = True  # whether sequences may be on several ranks
    layers: bool = False  # whether all but what is per sequence may have a layers axis in front

    def axes_of(self, name: str, dims: Mapping[str, int], dim: int) -> tuple[str, ...]:
        """A word per axis of a tensor with `dim` of them, in a call whose tensors have `dims`. None where that is no form of the parameter,
        which the call itself will say."""
        layers = 1 if self.layers and dims["state"] == 5 and name not in _CONTROL else 0
        lead = max(dims.get(self.like, 3) - 2, 1)  # an operand of Mamba-1 has no heads, only channels
        ahead = ("batch", *["token"] * (lead - 1))
        for form in self.axes.get(name, "").split("|"):
            words = form.split()
            found = (*ahead, *words[1:]) if words[:1] == ["*"] else tuple(words)
            if len(found) == dim - layers:
                return ("layers",) * layers + found
        return ()


RING = ("k", "v", "g", "beta")
_ROWS, _KEYS = "* head n", "* group n"
_CONTROL = dict.fromkeys(("state_indices", "dst_state_indices", "parents"), "batch|batch column") | dict.fromkeys(
    ("num_accepted_tokens", "intermediate_state_indices"), "batch"
)
_SSU = {
    **dict.fromkeys(("x", "z", "out"), "* head row|* head"),
    **dict.fromkeys(("D", "dt_bias"), "head row|head"),
    "dt": "* head row|* head",
    "A": "head row n|head n|head",
    "B": "* group n|batch n",
    "C": "* group n|batch n",
    **_CONTROL,
    "rand_seed": "batch",
}
_LINEAR = {
    **dict.fromkeys(("q", "k"), _KEYS),
    **dict.fromkeys(("v", "out"), _ROWS),
    **dict.fromkeys(("g", "beta"), "* head n|* head|head"),
    "A_log": "head",
    "dt_bias": "head n|head",
    "state": "batch head row n",
    "intermediate_states": "batch token head row n",
    "ring.k": "batch token group n",
    **dict.fromkeys(("ring.v", "ring.g", "ring.beta"), "batch token head n|batch token head"),
    **_CONTROL,
}
_LINEAR_FORMS: dict[str, dict[str, str]] = {
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
_REPLAY = _SSU | {
    "state": "batch head row n",
    "old_x": "batch token head row",
    "old_B": "batch buffer token group n|batch token group n",
    **dict.fromkeys(("old_dt", "old_dA_cumsum"), "batch buffer head token|batch head token"),
    **dict.fromkeys(("cache_buf_idx", "ring_start", "prev_num_accepted_tokens", "arrivals"), "batch"),
}
_HISTORY = (
    "state", "old_x", "old_B", "old_dt", "old_dA_cumsum", "cache_buf_idx", "ring_start", "prev_num_accepted_tokens", "arrivals", "out",
)  # fmt: skip
_CONV = {
    "weight": "head tap",
    "bias": "head",
    **dict.fromkeys(("cache_seqlens", "conv_state_indices", "num_accepted_tokens", "intermediate_state_indices"), "batch"),
}


_replay = Rule(_REPLAY, _HISTORY, "x")
_commit = Rule(_LINEAR, ("state",), returns=("state",), by_sequence=False, layers=True)

RULES: dict[str, Rule] = {
    "selective_state_update": Rule(
        _SSU | {"state": "batch head row n|batch head n", "intermediate_states": "batch token head row n"},
        ("state", "out", "intermediate_states"),
        "x",
    ),
    **{
        name: Rule(_LINEAR | axes, ("state", "out", "intermediate_states", *[f"ring.{n}" for n in RING]), "v")
        for name, axes in _LINEAR_FORMS.items()
    },
    "gated_delta_rule_commit": _commit,
    "kda_commit": _commit,
    "causal_conv1d_update": Rule(
        _CONV
        | {
            **dict.fromkeys(("x", "out"), "batch head token|batch head"),
            "conv_state": "batch head tap",
            "intermediate_conv_window": "batch token head tap",
        },
        ("conv_state", "intermediate_conv_window", "out"),
        anchors=("conv_state",),
    ),
    "causal_conv1d": Rule(
        _CONV
        | {
            **dict.fromkeys(("x", "out"), "batch head token|head token"),
            **dict.fromkeys(("initial_states", "final_states_out", "conv_states"), "batch head tap"),
            "seq_idx": "batch token",
            "has_initial_state": "batch",
        },
        ("final_states_out", "conv_states", "out"),
        anchors=("conv_states", "final_states_out", "out", "x"),
        returns=("out", "final_states_out"),
    ),
    "replay_selective_state_update": _replay,
    "checkpoint_selective_state_update": _replay,
    "materialize_selective_state": Rule(_REPLAY | {"out": "batch head row n"}, ("out",)),
}
