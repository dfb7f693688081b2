"""Decode shapes of public models, so that kernels can be built by model name."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from .errors import ModelError
from .families.causal_conv1d.spec import ConvLayout, ConvProblem
from .families.causal_conv1d_update.spec import Advance, StateLayout, UpdateProblem
from .families.delta_layer.problem import DeltaLayerProblem
from .families.gated_rms_norm.spec import Activation, NormProblem
from .families.linear_attention import spec as linear_attention
from .families.linear_attention.problem import Beta, Delta, Gate, Layout, LinearAttentionProblem, Ring, Tokens, Update
from .families.mamba2_layer import spec as mamba2_layer
from .families.mamba2_layer.spec import Mamba2LayerProblem
from .families.replay_selective_state_update.spec import History, ReplayProblem
from .families.selective_state_update import spec as selective_state_update
from .families.selective_state_update.problem import SsuProblem
from .spec import DType, Index, PoolMode, Problem, flat, made

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


LayerProblem = Mamba2LayerProblem | DeltaLayerProblem
# By kind: the public function that does the decode step of a whole layer, and what it asks for.
LAYERS: dict[str, tuple[str, type[LayerProblem]]] = {
    "mamba2": (mamba2_layer.OPERATOR, Mamba2LayerProblem),
    "gated_delta_rule": ("gdn_layer", DeltaLayerProblem),
    "kda": ("kda_layer", DeltaLayerProblem),
}


def room(tokens: int) -> int:
    """What a replay kernel makes room for: eights."""
    return max(8, -(-tokens // 8) * 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What all rows of models.toml have."""

    operator: ClassVar[str]  # whose kernels decode it
    conv_bias: ClassVar[bool]  # of its short convolution

    name: str
    kind: str
    nheads: int  # of the state
    state: DType = DType.F32  # as its reference implementation keeps it
    conv_width: int = 4  # taps of its short convolution, if it has one
    verified: bool
    source: str

    @property
    def function(self) -> str:
        """The public function that decodes it."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int, int]:
        """(rows per head, elements per row, groups of heads that share operands) of the state"""
        raise NotImplementedError

    @property
    def conv_channels(self) -> int:
        """Of its short convolution, 0 if it has none."""
        raise NotImplementedError

    @property
    def norm_shape(self) -> tuple[int, int] | None:
        """(groups, elements of each) of the gated norm behind its state; None where there is none, or where a group is several ranks'."""
        return None

    def divided(self, tp: int) -> Model:
        """One tensor-parallel rank's share. Raises ModelError when the heads (Mamba-1: channels) do not divide."""
        raise NotImplementedError

    def problems(
        self,
        states: tuple[DType, ...] = (),
        indices: tuple[Index, ...] = (Index.NONE, Index.I32),
        pools: tuple[PoolMode, ...] = (PoolMode.SINGLE,),
        **call: Any,
    ) -> list[Problem]:
        """What decoding the model asks for; nothing without slot indices where they are needed. call: further keywords of `problem`."""
        by_slot = call.get("ring") is Ring.STORE
        kinds = [(i, pool) for i in indices for pool in pools if i is not Index.NONE or not (by_slot or pool is PoolMode.SPLIT)]
        return [self.problem(state, index, pool, **call) for state in states or (self.state,) for index, pool in kinds]

    def problem(self, state: DType, index: Index, pool: PoolMode, **call: Any) -> Problem:
        """What one kind of call asks for, in the dtypes of transformers and the serving engines."""
        raise NotImplementedError

    def convolutions(
        self, indices: tuple[Index, ...] = (Index.NONE, Index.I32), io: DType = DType.BF16, tokens: int = 1
    ) -> list[ConvProblem | UpdateProblem]:
        """What its short convolution asks for, over prompts and in decoding, in every layout; of several tokens, the window rolls.

        Prompts: rows of any length, and packed sequences with a pool of states. The number of channels is not among it.
        """
        if not self.conv_channels:
            return []
        same: dict[str, Any] = {"width": self.conv_width, "x": io, "weight": io, "bias": io if self.conv_bias else None}
        first, last = {"layout": ConvLayout.FIRST}, {"layout": ConvLayout.LAST}
        unaligned = first | {"shifted": True}  # rows begin anywhere
        pool = {"query_start_loc": Index.I32, "pool": True, "started": True}
        prompts = [ConvProblem(**same, **layout) for layout in (first, unaligned, last)]
        prompts += [ConvProblem(**same, **layout, **pool, index=index) for layout in (unaligned, last) for index in indices]
        step = same | {"tokens": tokens} | ({"advance": Advance.ROLL, "position": Index.I32} if tokens > 1 else {})
        # A window that shifts may hold the input that has left the convolution, as transformers' does; one that rolls does not.
        lengths = [self.conv_width + tokens - 2, *([self.conv_width] if tokens == 1 else [])]
        layouts = [{"layout": StateLayout.RUNS, "state_len": length} for length in lengths] + [{"layout": StateLayout.CHANNELS}]
        return prompts + [UpdateProblem(**step, **layout, index=index) for layout in layouts for index in indices]

    def replays(
        self,
        states: tuple[DType, ...] = (),
        indices: tuple[Index, ...] = (Index.NONE, Index.I32),
        io: DType = DType.BF16,
        tokens: int = 6,
        window: int | None = None,
    ) -> list[ReplayProblem]:
        """What speculative decoding by replay asks for, of steps of so many tokens; nothing where there is none. window: of a ring."""
        return []

    def norms(self, io: DType = DType.BF16) -> list[NormProblem]:
        """What that norm asks for."""
        if self.norm_shape is None:
            return []
        groups, size = self.norm_shape
        activation = Activation.SIGMOID if self.kind == "kda" else Activation.SILU
        same = {"x": io, "gate": io, "weight": io, "out": io, "norm_first": self.kind != "mamba2", "activation": activation}
        return [NormProblem(size=size, grouped=groups > 1, **same)]

    @property
    def layer_function(self) -> str | None:
        """The public function that does the decode step of a whole layer, between its projections; None where there is none."""
        return LAYERS[self.kind][0] if self.kind in LAYERS else None

    @property
    def layer_channels(self) -> int:
        """That such a step convolves."""
        return self.conv_channels

    def layers(
        self,
        states: tuple[DType, ...] = (),
        indices: tuple[Index, ...] = (Index.NONE, Index.I32),
        io: DType = DType.BF16,
        tokens: int = 1,
        intermediates: bool = False,
        update_state: bool = True,
        **call: Any,
    ) -> list[Problem]:
        """What that step asks for, in every layout of its window that is in use: windows as runs, with and without the input that has left
        the convolution, and inputs as rows of channels. A norm whose groups are several ranks' is not of it. Several tokens, and call: as
        of `problems`."""
        if self.layer_function is None:
            return []
        windows = [
            (StateLayout.RUNS, self.conv_width - 1),
            (StateLayout.RUNS, self.conv_width),
            (StateLayout.CHANNELS, self.conv_width - 1),
        ]
        norm: dict[str, Any] = {}
        for found in self.norms(io):
            norm = {name: getattr(found, name) for name in ("size", "grouped", "activation")}
            norm = {f"norm_{name}": value for name, value in norm.items()}
            norm |= {"norm": found.weight, "norm_gate": found.gate, "norm_first": found.norm_first}
        _, layer = LAYERS[self.kind]
        same = {"conv_width": self.conv_width, "conv_weight": io, "conv_bias": io if self.conv_bias else None, **norm}
        recurrences = [self.problem(state, index, PoolMode.SINGLE, io=io, **call) for state in states or (self.state,) for index in indices]
        given = [flat(problem) | same for problem in recurrences]
        found = [made(layer, problem | {"conv_layout": layout, "conv_len": length}) for problem in given for layout, length in windows]
        logarithms = [p for p in found if layer is Mamba2LayerProblem and p.index is Index.NONE]  # as transformers' modules hold A
        found += [replace(p, A=io, A_is_log=True) for p in logarithms]
        if tokens == 1 and not intermediates and update_state:
            return found
        return [problem for one in found for problem in one.of_tokens(tokens, intermediates, update_state)]

    def _share(self, whole: int, of: str, tp: int) -> int:
        if tp < 1 or whole % tp:
            raise ModelError(f"{self.name} has {whole} {of}, which {tp} ranks cannot share")
        return whole // tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(Model):
    """kind: mamba1 (one head of `headdim` channels) or mamba2."""

    operator: ClassVar[str] = selective_state_update.OPERATOR
    conv_bias: ClassVar[bool] = True

    headdim: int
    d_state: int
    ngroups: int = 1
    gate: bool = False  # z goes through the kernel
    whole_groups: bool = True  # each is one rank's

    @property
    def function(self) -> str:
        return "selective_state_update"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.headdim, self.d_state, self.ngroups

    @property
    def conv_channels(self) -> int:
        """Mamba-1: of x; Mamba-2: of x, B and C."""
        return self.headdim if self.kind == "mamba1" else self.nheads * self.headdim + 2 * self.ngroups * self.d_state

    @property
    def norm_shape(self) -> tuple[int, int] | None:
        """Of Mamba-2: its groups are those of B and C."""
        if self.kind == "mamba1" or self.gate or not self.whole_groups:
            return None
        return self.ngroups, self.nheads * self.headdim // self.ngroups

    def divided(self, tp: int) -> Mamba:
        """Groups that cannot be divided are replicated, as serving engines do."""
        if self.kind == "mamba1":
            return replace(self, headdim=self._share(self.headdim, "channels", tp))
        groups = self.ngroups // tp if self.ngroups % tp == 0 else max(1, self.ngroups // tp)
        return replace(self, nheads=self._share(self.nheads, "heads", tp), ngroups=groups, whole_groups=self.ngroups % tp == 0)

    def problem(
        self,
        state: DType,
        index: Index,
        pool: PoolMode,
        io: DType = DType.BF16,
        tokens: int = 1,
        intermediates: bool = False,
        update_state: bool = True,
        **more: Any,
    ) -> SsuProblem:
        """intermediates: of the state's type; more: other fields of the problem. Raises ModelError for several tokens of Mamba-1."""
        mamba1 = self.kind == "mamba1"
        several = tokens > 1 or intermediates or not update_state
        if several and mamba1:
            raise ModelError(f"{self.name} is a Mamba-1 model, which takes one token at a time")
        if several:
            more |= {"update": Update.FINAL if update_state else Update.NONE, "intermediate_states": state if intermediates else None}
        return SsuProblem(
            several=several,
            d_state=self.d_state,
            headdim=self.headdim,
            nheads=self.nheads,
            ngroups=self.ngroups,
            state=state,
            x=io,
            dt=io,
            B=io,
            C=io,
            out=io,
            A=DType.F32,
            D=io,
            z=io if self.gate else None,
            dt_bias=DType.F32 if mamba1 else io,
            tied=not mamba1,
            dt_softplus=True,
            index=index,
            pool=pool,
            **more,
        )

    def replays(
        self,
        states: tuple[DType, ...] = (),
        indices: tuple[Index, ...] = (Index.NONE, Index.I32),
        io: DType = DType.BF16,
        tokens: int = 6,
        window: int | None = None,
    ) -> list[ReplayProblem]:
        """Of Mamba-2, for calls by themselves and for those behind its convolution."""
        if self.kind == "mamba1":
            return []
        first = ReplayProblem(
            d_state=self.d_state,
            headdim=self.headdim,
            nheads=self.nheads,
            ngroups=self.ngroups,
            x=io,
            dt=io,
            A=DType.F32,
            D=io,
            z=io if self.gate else None,
            dt_bias=io,
            out=io,
            history=History.STEP if window is None else History.RING,
            tokens=room(tokens),
            window=room(tokens if window is None else window),
        )
        kinds = [(state, index, behind) for state in states or (self.state,) for index in indices for behind in (False, True)]
        return [replace(first, state=state, index=index, after_conv=behind) for state, index, behind in kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention(Model):
    """kind: the public function of `families/linear_attention/call.py` that decodes it."""

    operator: ClassVar[str] = linear_attention.OPERATOR
    conv_bias: ClassVar[bool] = False

    key_heads: int
    dim_k: int
    dim_v: int
    gate: Gate = Gate.SOFTPLUS  # of gated_delta_rule and kda
    allow_neg_eigval: bool = False  # beta is twice a sigmoid

    @property
    def function(self) -> str:
        return self.kind

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.dim_v, self.dim_k, self.key_heads

    @property
    def conv_channels(self) -> int:
        """gated_delta_rule: of q, k and v; kda: of each of them by itself."""
        if self.kind == "gated_delta_rule":
            return 2 * self.key_heads * self.dim_k + self.nheads * self.dim_v
        return self.nheads * self.dim_k if self.kind == "kda" else 0

    @property
    def layer_channels(self) -> int:
        """Of kda: those of its three convolutions, next to each other."""
        return 3 * self.conv_channels if self.kind == "kda" else self.conv_channels

    @property
    def norm_shape(self) -> tuple[int, int] | None:
        """Of gated_delta_rule and kda: its groups are the heads of v."""
        return (self.nheads, self.dim_v) if self.kind in ("gated_delta_rule", "kda") else None

    def divided(self, tp: int) -> LinearAttention:
        heads, key_heads = self._share(self.nheads, "heads", tp), self._share(self.key_heads, "key heads", tp)
        return replace(self, nheads=heads, key_heads=key_heads)

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
    ) -> LinearAttentionProblem:
        """intermediates, update_state, layout, ring: as in PoolOptions; or a commit of a ring, of one layer or of several."""
        commit = ring is Ring.COMMIT
        found = LinearAttentionProblem(
            dim_k=self.dim_k,
            dim_v=self.dim_v,
            nheads=self.nheads,
            key_heads=self.key_heads,
            layout=layout,
            tokens=Tokens.MANY if tokens > 1 or intermediates or ring is not Ring.NONE else Tokens.ONE,
            state=state,
            index=index,
            accepted=Index.I32 if commit else Index.NONE,
            update=Update.FINAL if update_state else Update.NONE,
            pool=pool,
            ring=ring,
            layers=layers,
            intermediates=intermediates,
            **dict.fromkeys(("k", "v") if commit else ("q", "k", "v", "out"), io),
            **self._recurrence(io),
        )
        return found.for_tokens(tokens)

    def _recurrence(self, io: DType) -> dict[str, Any]:
        """What else there is: gates and betas as the projections give them, for the kernel to finish; log decays where models do that."""
        if self.kind == "lightning_attn":
            return {"delta": Delta.NONE, "gate": Gate.SLOPE, "g": DType.F32}
        if self.kind == "rwkv7":
            return {"delta": Delta.OLD, "gk": io, "read": io, "alpha": io}
        beta = {"beta": io, "beta_form": Beta.TWICE_SIGMOID if self.allow_neg_eigval else Beta.SIGMOID, "l2norm": True}
        decay = {"g": io, "dt_bias": io} if self.kind == "gated_delta_rule" else {"gk": io, "dt_bias": DType.F32}
        return beta | decay | {"gate": self.gate, "A_log": DType.F32}


_KINDS: dict[str, type[Model]] = {"mamba1": Mamba, "mamba2": Mamba} | dict.fromkeys(
    ("gated_delta_rule", "kda", "lightning_attn", "rwkv7"), LinearAttention
)


def _model(name: str, row: dict[str, Any]) -> Model:
    """One row of models.toml."""
    if row["kind"] == "mamba1":
        row = {"nheads": 1, "headdim": row["dim"], "gate": True} | {field: value for field, value in row.items() if field != "dim"}
    parsed = {field: convert(row[field]) for field, convert in (("state", DType), ("gate", Gate)) if isinstance(row.get(field), str)}
    return _KINDS[row["kind"]](name=name, **row | parsed)


@functools.cache
def models() -> dict[str, Model]:
    """All models, by name."""
    table = tomllib.loads((Path(__file__).parent / "models.toml").read_text())
    return {name: _model(name, row) for name, row in table.items()}


def find_model(name: str) -> Model:
    """Raises ModelError that names the models there are."""
    if name not in models():
        close = [m for m in models() if name in m or m in name]
        raise ModelError(f"no model {name!r} in models.toml; known: {', '.join(close or models())}")
    return models()[name]
