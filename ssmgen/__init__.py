"""ssmgen: specialised CUDA decode kernels for state-space and linear-attention models, generated, compiled at run time, cached.

Importing this package touches neither CUDA nor the file system; names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LINEAR = (
    "comba",
    "delta_rule",
    "dplr_delta_rule",
    "gated_delta_rule",
    "gated_delta_rule_commit",
    "gdn2",
    "gla",
    "kda",
    "kda_commit",
    "lightning_attn",
    "rwkv7",
    "simple_gla",
    "Ring",
)
_REPLAY = ("replay_selective_state_update", "checkpoint_selective_state_update", "materialize_selective_state")
_HOME = {
    "causal_conv1d": "ops.causal_conv1d",
    "causal_conv1d_update": "ops.causal_conv1d_update",
    "combine_splits": "ops.combine_splits",
    "gated_rms_norm": "ops.gated_rms_norm",
    "gdn_layer": "ops.gdn_layer",
    "kda_layer": "ops.kda_layer",
    "mamba2_layer": "ops.mamba2_layer",
    "selective_state_update": "ops.selective_state_update",
    **dict.fromkeys(_LINEAR, "ops.linear_attention"),
    **dict.fromkeys(_REPLAY, "ops.replay_selective_state_update"),
    "warm": "warming",
    "is_warm": "api",
    "bind": "api",
    "BoundCall": "api",
    "supported": "api",
    "explain": "api",
    "stats": "registry",
}

if TYPE_CHECKING:
    from .api import BoundCall, bind, explain, is_warm, supported
    from .families.causal_conv1d.call import causal_conv1d
    from .families.causal_conv1d_update.call import causal_conv1d_update
    from .families.combine_splits.call import combine_splits
    from .families.delta_layer.gdn_call import gdn_layer
    from .families.delta_layer.kda_call import kda_layer
    from .families.gated_rms_norm.call import gated_rms_norm
    from .families.linear_attention.call import (
        Ring,
        comba,
        delta_rule,
        dplr_delta_rule,
        gated_delta_rule,
        gated_delta_rule_commit,
        gdn2,
        gla,
        kda,
        kda_commit,
        lightning_attn,
        rwkv7,
        simple_gla,
    )
    from .families.mamba2_layer.call import mamba2_layer
    from .families.replay_selective_state_update.call import (
        checkpoint_selective_state_update,
        materialize_selective_state,
        replay_selective_state_update,
    )
    from .families.selective_state_update.call import selective_state_update
    from .registry import stats
    from .warming import warm

__all__ = [
    "BoundCall",
    "Ring",
    "bind",
    "causal_conv1d",
    "causal_conv1d_update",
    "checkpoint_selective_state_update",
    "comba",
    "combine_splits",
    "delta_rule",
    "dplr_delta_rule",
    "explain",
    "gated_delta_rule",
    "gated_delta_rule_commit",
    "gated_rms_norm",
    "gdn2",
    "gdn_layer",
    "gla",
    "is_warm",
    "kda",
    "kda_commit",
    "kda_layer",
    "lightning_attn",
    "mamba2_layer",
    "materialize_selective_state",
    "replay_selective_state_update",
    "rwkv7",
    "selective_state_update",
    "simple_gla",
    "stats",
    "supported",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        # Bound here as well, so that the module of the same name does not hide the function from the second use on.
        value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
