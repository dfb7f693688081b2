"""The problems that calls of gdn_layer and kda_layer pose. The two differ in the form of the decay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...engine.layers.norm import NormedLayer
from ...engine.recurrences.attention.problem import Beta, Delta, Gate, LinearAttentionProblem, Tokens
from ...spec.kernel import LATER, DType, Index, PoolMode, Ring, Update, must


@dataclass(frozen=True, kw_only=True)
class DeltaLayerProblem(NormedLayer, LinearAttentionProblem):
    """The fields that a call fixes. q, k and v are channels of mixed_qkv and have its dtype. The decay gate is raw, beta a logit.

    gdn_layer has a decay per head, g; kda_layer has one per key channel, gk.
    """

    intermediate_indices: Index = field(default=Index.NONE, metadata=LATER)  # type of the rows' numbers in intermediate_states

    @property
    def function(self) -> str:
        """The public function that poses this problem."""
        return "kda_layer" if self.gk else "gdn_layer"

    @property
    def conv_dtype(self) -> DType:
        return self.q

    @property
    def conv_input(self) -> str:
        return "mixed_qkv"

    @property
    def norm_groups(self) -> int:
        return self.nheads if self.norm.weight else 0

    @property
    def shared_channels(self) -> int:
        return 2 * self.dim_k

    def fields_of_tokens(self, intermediates: bool) -> dict[str, Any]:
        return {"tokens": Tokens.MANY, "intermediates": intermediates}

    def faults(self) -> list[str]:
        read = self.delta is Delta.DECAYED and not (self.read or self.erase or self.w or self.write or self.alpha)
        bare = not (self.gv or self.beta_rows)
        per_head = self.g and self.A_log and self.gate is Gate.SOFTPLUS and not self.gk
        return [
            *LinearAttentionProblem.faults(self),
            *self.layer_faults(self.nheads, self.dim_v),
            *must(
                bool(read and bare and self.beta),
                "a layer's delta rule reads the decayed state with k, and has a beta per head and no other operands",
            ),
            *must(
                bool(per_head or (self.gk and not self.g)),
                "the decay is per head, with g and A_log, and a softplus, or per key channel, with gk",
            ),
            *must(self.gate in (Gate.SOFTPLUS, Gate.BOUNDED), "a layer's gate is raw"),
            *must(self.beta_form is not Beta.PLAIN, "a layer's beta is a logit"),
            *must(self.q == self.k == self.v, "q, k and v are of one dtype: they are one tensor"),
            *must(self.norm.weight is None or self.norm.size == self.dim_v, f"groups of {self.norm.size} are not heads of {self.dim_v}"),
            *must(self.ring is Ring.NONE and not (self.layers or self.frozen), "a layer keeps no ring, and has no ring to replay"),
            *must(self.tokens is not Tokens.RAGGED, "a layer of several tokens takes as many of every sequence, and no packed ones"),
            *must(not self.scaled, "a layer's states are f32, f16 or bf16"),
            *must(not self.guarded, f"a layer's dim_k is a multiple of 4, not {self.dim_k}"),
            *must(self.several or self.update is Update.FINAL, "a layer's call of one token updates the state"),
            *must(
                self.pool is PoolMode.SINGLE or self.update is Update.EACH,
                "the window and the state of a layer are updated in place, unless each token has a slot",
            ),
            *must(self.intermediates or self.intermediate_indices is Index.NONE, "rows of states that are not kept"),
            *must(self.parents is self.kept_index is Index.NONE, "a layer takes no draft trees, and has its own rows of states"),
        ]
