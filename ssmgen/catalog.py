"""All operator families in tables, for what goes through them: by operator, by problem, by name."""

from __future__ import annotations

from .families.causal_conv1d import spec as causal_conv1d
from .families.causal_conv1d_update import spec as causal_conv1d_update
from .families.combine_splits import spec as combine_splits
from .families.delta_layer import (
    gdn_spec as gdn_layer,
)
from .families.delta_layer import (
    gdn_tokens_spec as gdn_layer_tokens,
)
from .families.delta_layer import (
    kda_spec as kda_layer,
)
from .families.delta_layer import (
    kda_tokens_spec as kda_layer_tokens,
)
from .families.gated_rms_norm import layer_spec as layer_gated_norm
from .families.gated_rms_norm import spec as gated_rms_norm
from .families.linear_attention import spec as linear_attention
from .families.mamba2_layer import spec as mamba2_layer
from .families.mamba2_layer import tokens_spec as mamba2_layer_tokens
from .families.replay_selective_state_update import spec as replay_selective_state_update
from .families.selective_state_update import spec as selective_state_update
from .families.selective_state_update import tokens_spec as selective_state_update_tokens
from .families.slot_copy import spec as slot_copy
from .spec import KernelSpec, Problem

# Modules whose problems the registry can select variants for, by operator name.
OPERATORS = {
    module.OPERATOR: module
    for module in (
        selective_state_update,
        selective_state_update_tokens,
        replay_selective_state_update,
        linear_attention,
        mamba2_layer,
        mamba2_layer_tokens,
        gdn_layer,
        gdn_layer_tokens,
        kda_layer,
        kda_layer_tokens,
        causal_conv1d,
        causal_conv1d_update,
        combine_splits,
        gated_rms_norm,
    )
}

# The operator that poses such a problem.
OPERATOR_OF: dict[type[Problem], str] = {
    selective_state_update.SsuProblem: selective_state_update.OPERATOR,
    replay_selective_state_update.ReplayProblem: replay_selective_state_update.OPERATOR,
    selective_state_update_tokens.SsuTokensProblem: selective_state_update_tokens.OPERATOR,
    linear_attention.LinearAttentionProblem: linear_attention.OPERATOR,
    mamba2_layer.Mamba2LayerProblem: mamba2_layer.OPERATOR,
    mamba2_layer_tokens.Mamba2LayerTokensProblem: mamba2_layer_tokens.OPERATOR,
    gdn_layer.GdnLayerProblem: gdn_layer.OPERATOR,
    gdn_layer_tokens.GdnLayerTokensProblem: gdn_layer_tokens.OPERATOR,
    kda_layer.KdaLayerProblem: kda_layer.OPERATOR,
    kda_layer_tokens.KdaLayerTokensProblem: kda_layer_tokens.OPERATOR,
    causal_conv1d.ConvProblem: causal_conv1d.OPERATOR,
    causal_conv1d_update.UpdateProblem: causal_conv1d_update.OPERATOR,
    combine_splits.CombineProblem: combine_splits.OPERATOR,
    gated_rms_norm.NormProblem: gated_rms_norm.OPERATOR,
}

# Every spec class, by family name: what `parse_spec` and the command line know.
SPECS: dict[str, type[KernelSpec]] = {
    cls.family: cls
    for cls in (
        selective_state_update.SsuSpec,
        replay_selective_state_update.ReplaySpec,
        selective_state_update_tokens.SsuTokensSpec,
        linear_attention.LinearAttentionSpec,
        mamba2_layer.Mamba2LayerSpec,
        mamba2_layer_tokens.Mamba2LayerTokensSpec,
        gdn_layer.GdnLayerSpec,
        gdn_layer_tokens.GdnLayerTokensSpec,
        kda_layer.KdaLayerSpec,
        kda_layer_tokens.KdaLayerTokensSpec,
        layer_gated_norm.LayerGatedNormSpec,
        causal_conv1d.ConvSpec,
        causal_conv1d_update.UpdateSpec,
        combine_splits.CombineSpec,
        gated_rms_norm.NormSpec,
        slot_copy.SlotCopySpec,
    )
}
