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
                "the delta rule is not a layer's; expected delta=decayed with beta per head, without read, erase, w, write, alpha and gv",
            ),
            *must(bool(per_head or (self.gk and not self.g)), "the decay is not a layer's; expected g with A_log and gate=softplus, or gk"),
            *must(
                self.gate in (Gate.SOFTPLUS, Gate.BOUNDED),
                f"gate is {self.gate.value}; expected softplus or bounded: a layer's gate is raw",
            ),
            *must(self.beta_form is not Beta.PLAIN, "beta_form is plain; expected sigmoid or twice_sigmoid: a layer's beta is a logit"),
            *must(
                self.q == self.k == self.v,
                f"q, k and v are {self.q.value}, {self.k.value} and {self.v.value}; expected one dtype: they are one tensor",
            ),
            *must(
                self.norm.weight is None or self.norm.size == self.dim_v,
                f"norm_size is {self.norm.size}; expected dim_v {self.dim_v}, a group per head",
            ),
            *must(
                self.ring is Ring.NONE and not (self.layers or self.frozen),
                "ring, layers or frozen is set; expected none of them in a layer",
            ),
            *must(
                self.tokens is not Tokens.RAGGED,
                "tokens is ragged; expected one or many: a layer takes the same number of tokens from each sequence",
            ),
            *must(not self.scaled, f"state is {self.state.value}; expected f32, f16 or bf16 in a layer"),
            *must(not self.guarded, f"dim_k is {self.dim_k} with dim_v {self.dim_v}; expected multiples of 4 in a layer"),
            *must(self.several or self.update is Update.FINAL, f"update is {self.update.value} with one token; expected final"),
            *must(
                self.pool is PoolMode.SINGLE or self.update is Update.EACH,
                f"pool is split and update is {self.update.value}; expected pool=single, or update=each with a slot per token",
            ),
            *must(
                self.intermediates or self.intermediate_indices is Index.NONE,
                f"intermediate_indices is {self.intermediate_indices.value} and intermediates is no; expected both or neither",
            ),
            *must(
                self.parents is self.kept_index is Index.NONE, "parents or kept_index is set; expected none: a layer takes no draft trees"
            ),
        ]
