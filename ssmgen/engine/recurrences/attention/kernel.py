"""How a kernel processes the rows of linear attention, for one or several tokens per call.

A row of the engine is one value channel v of a head: the K elements S[v, :] of the state. Per token, row by row,

        p = <S or D∘S, read>          the value stored for this key, in the state before or after its decay
    e = beta (w v - p)            its error
    S = D∘S + e write             (low rank: S = D∘S + p write + v k)
    o = <S, q> scale

Models differ in the terms that they have. DeltaNet has no decay D, gated DeltaNet one per head, KDA one per key channel. GLA and its
simpler forms do not read. Comba reads before the decay with a separate key. RWKV-7 is the low-rank form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ....spec.kernel import FP8, Arch, Index, Loads, Narrow, Needs, Param, Ring, Update, must
from ...rows import RowSpec, Rule
from .operands import KEY_VECTORS, OF_KEY_HEADS, OPERANDS, RINGED, ROW_SCALARS, WEIGHTS
from .problem import Delta, Gate, LinearAttentionProblem, Tokens

MAX_SHARED = 48 * 1024  # bytes, of static arrays


@dataclass(frozen=True, kw_only=True)
class AttentionKernel(RowSpec, LinearAttentionProblem):
    """A problem, and how one variant computes it. A family's spec adds its name and its template."""

    table: ClassVar[Any] = OPERANDS

    chunk: int = 8  # tokens staged at a time, in calls with several; fewer if shared memory is too small

    def violations(self, arch: Arch) -> list[str]:
        found = RowSpec.violations(self, arch)
        if found:
            return found
        return [
            *must(
                not self.several or self.tile == self.rows_per_step,
                f"tile is {self.tile}; expected {self.rows_per_step}, the rows in flight: several tokens keep all rows of a "
                "tile in registers",
            ),
            *must(arch >= FP8 or self.state is not Narrow.E4M3, f"arch is {arch}; expected sm_89 or later for fp8 states"),
            *must(self.shared_bytes <= MAX_SHARED, f"a block uses {self.shared_bytes} bytes of shared memory; expected at most 49152"),
            *must(
                not self.prefetch or self.accepted is Index.NONE,
                f"prefetch is {self.prefetch} with accepted={self.accepted.value}; "
                "expected 0: the column that a call starts from is in memory",
            ),
            *must(
                not self.prefetch or not self.heads_apart,
                f"prefetch is {self.prefetch} with heads_apart=yes; expected 0, or contiguous heads",
            ),
            *must(
                not self.frozen or (self.lanes, self.vec) == (4, 8),
                f"lanes is {self.lanes} and vec is {self.vec}; expected 4 and 8 with frozen=yes, which uses tensor cores",
            ),
            *must(
                not self.rounded or not self.interleaved or self.ilp % 4 == 0,
                f"ilp is {self.ilp} with philox_rounds {self.philox_rounds} and interleaved rows; expected a multiple of 4",
            ),
            *must(not self.frozen or self.ilp in (2, 4), f"ilp is {self.ilp}; expected 2 or 4 with frozen=yes, which uses tensor cores"),
        ]

    @property
    def shared_bytes(self) -> int:
        """Staged tokens, and the sums of rows that lie in several warps."""
        tree = 1 if self.parents is not Index.NONE else 0
        token = len(self.token_vectors()) * self.row_room + 8 + len(self.row_scalars()) * self.tile + tree
        return (4 * self.chunk * token if self.staged else 0) + self._bytes_across_warps

    @property
    def _bytes_across_warps(self) -> int:
        parts = self.row_warps * self.passes  # of a sum
        teams = self.threads // self.lanes
        return 4 * ((len(self.row_sums()) * parts + len(self.row_values())) * self.rows_per_step + 4 * parts * teams) if parts else 0

    @property
    def needs(self) -> Needs:
        mma = self.state.value if self.frozen else ""
        by_byte = self.scaled and self.state.size == 1 and self.state_loads is Loads.ELEMENT
        raw, streaming = self.stores, self.intermediates and self.parents is Index.NONE
        needs = replace(super().needs, mma=mma, raw=raw, streaming=streaming, narrow=self.scaled, bytes=by_byte)
        return replace(needs, shared_quads=self.row_warps > 0, guarded=self.guarded)

    @property
    def stem(self) -> str:
        tokens_kept = {Ring.NONE: [], Ring.STORE: ["ring"], Ring.READY: ["ready"], Ring.COMMIT: ["commit"], Ring.REPLAY: ["replay"]}[
            self.ring
        ]
        kind = "bonus" if self.bonus else "la"
        kind = {Delta.NONE: kind, Delta.DECAYED: "delta", Delta.OLD: "lowrank" if self.low_rank else "olddelta"}[self.delta]
        decay = "".join(name for name in ("g", "gk", "gv") if getattr(self, name))
        tokens = [] if self.tokens is Tokens.ONE else ["frozen" if self.frozen else self.tokens.value]
        shape = f"h{self.nheads}v{self.dim_v}k{self.dim_k}g{self.key_heads}_{self.state.value}{'_apart' if self.heads_apart else ''}"
        return "_".join([kind, *([decay] if decay else []), shape, *tokens, *tokens_kept, self.how()])

    def _given(self, names: Sequence[str]) -> list[str]:
        """Names of the operands, among these, that the problem has."""
        return [name for name in names if getattr(self, name) is not None]

    def key_vectors(self) -> list[str]:
        """Operands with an element per key channel and token."""
        return [name for name in self._given(KEY_VECTORS) if not (self.commit and name == "q")]

    def row_scalars(self) -> list[str]:
        """Operands with an element per value channel and token."""
        return [*self._given(ROW_SCALARS), *(["beta"] if self.beta_rows else [])]

    def head_scalars(self) -> list[str]:
        """Operands with an element per head and token."""
        return [*(["g"] if self.g else []), *(["beta"] if self.beta and not self.beta_rows else [])]

    def weights(self) -> list[str]:
        return self._given(WEIGHTS)

    def token_vectors(self) -> list[str]:
        """Vectors of a token that its rows need, in f32, with an element per key channel. `write` is also the key to read with if
        `reads_key`."""
        if self.delta is Delta.NONE:
            names = ["query", "write"]
        elif self.low_rank:
            names = ["query", "read", "write", "key"]
        elif self.reads_key:
            names = ["query", "write"]
        else:
            names = ["query", "read", "write"]
        return names[self.commit :] + (["decay"] if self.gk else [])

    def token_scalars(self) -> list[str]:
        """The factors of a token that all rows of a head share."""
        read = self.delta is not Delta.NONE
        decayed = self.g is not None and self.gk is None
        return [
            *(["forget"] if decayed else []),
            *(["read_scale"] if read and (self.l2norm or (decayed and self.delta is Delta.DECAYED)) else []),
            *(["query_scale"] if not self.commit else []),
            *(["write_scale"] if self.l2norm else []),
            *(["mix"] if read and not self.commit else []),
            *(["mix_key"] if self.low_rank or self.bonus else []),
            *(["step"] if self.beta is not None and not self.beta_rows else []),
        ]

    def row_sums(self) -> list[str]:
        """The sums over a row that each token needs."""
        return [*(["p_sum"] if self.delta is not Delta.NONE else []), *(["y_sum"] if not self.commit else [])]

    def row_values(self) -> list[str]:
        """Values that the owner of a row computes and all lanes of the row need."""
        return ["added", *(["value"] if self.low_rank else []), *(["row_decay"] if self.gv else [])]

    @property
    def recurrence(self) -> str:
        """The partial that has this recurrence."""
        added = "bonus" if self.bonus else "plain"
        return f"recurrences/{'low_rank' if self.low_rank else added if self.delta is Delta.NONE else 'delta'}.cuh.j2"

    @property
    def reads_key(self) -> bool:
        """Whether the key to read with is k itself, up to a factor."""
        own = self.read is not None or self.erase is not None
        return self.delta is not Delta.NONE and not own and not (self.gk is not None and self.delta is Delta.DECAYED)

    def ringed(self) -> list[str]:
        """Operands that a call stores in the ring."""
        return [name for name in self._given(RINGED) if self.stores or (self.replays and name != "beta")]

    def parameters(self) -> list[Param]:
        slots = [] if self.index is Index.NONE and not self.commit else [Param.i64("slots"), Param.i64("pad_slot_id")]
        slots += [] if self.kept_index is Index.NONE else [Param.i64("kept_rows")]
        counts = [
            *([Param.u32("most_tokens")] if self.commit else [Param.u32("tokens")] if self.tokens is Tokens.MANY else []),
            *([Param.u32("sequences")] if self.layers else []),
            *([Param.u32("total_tokens")] if self.tokens is Tokens.RAGGED else []),
            *([Param.u32("columns")] if self.picks else []),
            *([Param.u32("dst_columns")] if self.update is Update.EACH and self.tokens is Tokens.RAGGED else []),
            *([Param.u32("rows_kept")] if self.intermediates and self.tokens is Tokens.RAGGED else []),
            *([Param.u32("ring_rows")] if self.replays or (self.stores and self.tokens is Tokens.RAGGED) else []),
            *([Param.u32("parent_columns")] if self.parents is not Index.NONE and self.tokens is Tokens.RAGGED else []),
        ]
        factors = [*([] if self.commit else [Param.f32("scale")]), *([Param.f32("lower_bound")] if self.gate is Gate.BOUNDED else [])]
        return [*OPERANDS.pointers(self), *slots, *OPERANDS.stride_params(self), *counts, *factors]

    def constants(self) -> dict[str, Any]:
        return {
            "pooled": self.index is not Index.NONE,
            "commit": self.commit,
            "split": self.split,
            "final_state": self.update is Update.FINAL,
            "ragged": self.tokens is Tokens.RAGGED,
            "accepted": self.picks,
            "each": self.each,
            "conv_rolls": False,
            "of_key_heads": OF_KEY_HEADS,
            "convolved": (),  # operands that the kernel makes itself
            "in_place": (),  # vectors of a token that are staged unchanged, before they are prepared
            "rows_by_index": self.kept_index is not Index.NONE,  # of intermediate states
            "tree": self.parents is not Index.NONE,
            "scalars": self.token_scalars(),
            "rounded": self.rounded,
            "ready": self.ring is Ring.READY,
            "replays": self.replays,
            "narrow_noise": bool(self.rounded) and self.scaled,
            "tail": self.dim_v % self.tile != 0,
            "vector_state": self.state_loads is Loads.VECTOR,
            "vector_operands": self.operand_loads is Loads.VECTOR,
        }


# How a step of one token goes over its rows, where nothing else was measured.
ONE_TOKEN = [
    Rule("smallest", 8, tile_kib=8, ilp=2),
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),
]
