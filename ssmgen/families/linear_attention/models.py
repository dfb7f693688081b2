"""Models of gated delta rules and their relatives, and the kernels that decode them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...engine.recurrences.attention.model import AttentionModel
from ...engine.recurrences.attention.problem import Beta, Delta, Gate, LinearAttentionProblem, Tokens
from ...select.models import OPTIONS, Client, Model, StateAsk, Wanted
from ...spec.kernel import DType, Index, Layout, PoolMode, Ring, Update
from .spec import OPERATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention(AttentionModel):
    """kind: the public function of `call.py` that decodes it."""

    operator: ClassVar[str] = OPERATOR
    conv_bias: ClassVar[bool] = False

    @property
    def function(self) -> str:
        return self.kind

    @property
    def conv_channels(self) -> int:
        """Channels of one short convolution: gated_delta_rule convolves q, k and v together, kda each of them separately."""
        if self.kind == "gated_delta_rule":
            return 2 * self.key_heads * self.dim_k + self.nheads * self.dim_v
        return self.nheads * self.dim_k if self.kind == "kda" else 0

    @property
    def layer_channels(self) -> int:
        """Channels that a layer convolves; for kda, the sum over its three convolutions, which are laid out side by side."""
        return 3 * self.conv_channels if self.kind == "kda" else self.conv_channels

    @property
    def norm_shape(self) -> tuple[int, int] | None:
        """(groups, elements of each) of the gated norm of gated_delta_rule and kda, whose groups are the heads of v; else None."""
        return (self.nheads, self.dim_v) if self.kind in ("gated_delta_rule", "kda") else None

    def problem(
        self,
        state: DType,
        index: Index,
        pool: PoolMode,
        io: DType = DType.BF16,
        tokens: int = 1,
        intermediates: bool = False,
        update_state: bool = True,
        layout: Layout = Layout.VK,
        ring: Ring = Ring.NONE,
        layers: bool = False,
        **more: Any,
    ) -> LinearAttentionProblem:
        """intermediates, update_state, layout, ring: as in PoolOptions; or a commit of a ring, of one layer or of several. more: other
        fields of the problem."""
        commit = ring is Ring.COMMIT
        if ring is Ring.REPLAY:  # as SGLang has it: keys and errors of the state's dtype
            more = {"position": Index.I32, "kept": None if state is io else state} | more
        operands: dict[str, Any] = dict.fromkeys(("k", "v") if commit else ("q", "k", "v", "out"), io)
        found = LinearAttentionProblem(
            dim_k=self.dim_k,
            dim_v=self.dim_v,
            nheads=self.nheads,
            key_heads=self.key_heads,
            layout=layout,
            tokens=Tokens.MANY if tokens > 1 or intermediates or ring not in (Ring.NONE, Ring.REPLAY) else Tokens.ONE,
            state=state,
            index=index,
            accepted=Index.I32 if commit else Index.NONE,
            update=Update.FINAL if update_state else Update.NONE,
            pool=pool,
            ring=ring,
            layers=layers,
            intermediates=intermediates,
            **operands,
            **self._recurrence(io),
            **more,
        )
        return found.for_tokens(tokens)

    def _recurrence(self, io: DType) -> dict[str, Any]:
        """Gates and betas as the projections produce them, for the kernel to finish; log decays if the model computes them itself."""
        if self.kind == "lightning_attn":
            return {"delta": Delta.NONE, "gate": Gate.SLOPE, "g": DType.F32}
        if self.kind == "rwkv7":
            return {"delta": Delta.OLD, "gk": io, "read": io, "alpha": io}
        beta = {"beta": io, "beta_form": Beta.TWICE_SIGMOID if self.allow_neg_eigval else Beta.SIGMOID, "l2norm": True}
        decay = {"g": io, "dt_bias": io} if self.kind == "gated_delta_rule" else {"gk": io, "dt_bias": DType.F32}
        return beta | decay | {"gate": self.gate, "A_log": DType.F32}


class LinearAttentionAsk(StateAsk):
    """A decode step, of one token or of several, and the commit of a ring."""

    operator = OPERATOR
    options = OPTIONS
    narrow = True

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is not Client.MAMBA_SSM and model.kind != "rwkv7"

    def problems(self, model: Model, wanted: Wanted) -> list[Any]:
        if model.kind == "lightning_attn" and wanted.caller is Client.TRANSFORMERS:  # its cache holds states of the activations' dtype
            wanted = replace(wanted, states=wanted.states or (wanted.io,))
        if model.kind == "lightning_attn" and wanted.caller is Client.ENGINES:
            wanted = replace(wanted, layout=Layout.KV)
        found: list[Any] = super().problems(model, wanted)
        if model.kind in ("gated_delta_rule", "kda") and wanted.caller is Client.ENGINES:  # decode steps packed with prompts
            found += [replace(p, tokens=Tokens.RAGGED, cu_seqlens=Index.I32) for p in found if p.tokens is Tokens.ONE and not p.replays]
        if wanted.caller is not Client.TRANSFORMERS:
            return found
        if model.kind == "gated_delta_rule":  # its layers before version 5.23 repeat the heads of q and k
            found += [replace(p, key_heads=p.nheads) for p in found if p.key_heads != p.nheads]
        return list(map(_finished, found))


def _finished(problem: LinearAttentionProblem) -> LinearAttentionProblem:
    """The same with log decays in f32 and plain betas, as transformers' layers make them."""
    if problem.delta is Delta.NONE:
        return problem
    own: dict[str, Any] = {"gate": Gate.LOG, "A_log": None, "dt_bias": None, "beta_form": Beta.PLAIN}
    return replace(problem, **own, g=problem.g and DType.F32, gk=problem.gk and DType.F32)


KINDS = dict.fromkeys(("gated_delta_rule", "kda", "lightning_attn", "rwkv7"), LinearAttention)
ASKS = {OPERATOR: LinearAttentionAsk()}
