"""Which operands the kernels of replay take, in which order, with which strides, and which of them they write."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from ...spec import DType, Index, KernelSpec, Loads, Narrow, Param
from .problem import History, ReplayProblem

_INTEGER = {Index.I32: "int", Index.I64: "i64"}


class Part(Enum):
    """One kernel, or two: one that makes `mix` and keeps the new inputs, and one that goes through the states."""

    FUSED = "fused"
    PRECOMPUTE = "precompute"
    MAIN = "main"


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(KernelSpec, ReplayProblem):
    """A problem, and which of its kernels this is."""

    part: Part = Part.FUSED

    def operands(self) -> list[str]:
        """Tensor arguments in order."""
        step, ring = self.history is History.STEP, self.history is History.RING
        makes, applies = self.part is not Part.MAIN, self.part is not Part.PRECOMPUTE
        split = self.part is not Part.FUSED
        there = {
            "state": applies,
            "old_x": applies,
            "old_B": True,
            "old_dt": True,
            "old_dA_cumsum": step,
            "cache_buf_idx": step,
            "ring_start": ring,
            "prev_num_accepted_tokens": True,
            "x": applies and not self.materialize,
            "dt": makes and not self.materialize,
            "A": (makes and not self.materialize) or ring,
            "B": makes and not self.materialize,
            "C": not self.materialize,
            "D": applies and self.D is not None and not self.materialize,
            "z": applies and self.z is not None and not self.materialize,
            "dt_bias": makes and self.dt_bias is not None and not self.materialize,
            "out": applies,
            "state_indices": self.index is not Index.NONE,
            "cu_seqlens": self.cu_seqlens is not Index.NONE,
            "rand_seed": applies and bool(self.philox_rounds),
            "arrivals": applies and self.advance,
            "state_scale": applies and self.scaled,
            "mix": split,
            "sums": split,
        }
        return [name for name, given in there.items() if given]

    def written(self) -> list[str]:
        """Operands that the kernel may write."""
        names = {
            Part.FUSED: ["state", "state_scale", "old_x", "old_B", "old_dt", "old_dA_cumsum", "out"],
            Part.PRECOMPUTE: ["old_B", "old_dt", "old_dA_cumsum", "mix", "sums"],
            Part.MAIN: ["state", "state_scale", "old_x", "out"],
        }[self.part]
        if self.materialize:
            return ["out"]
        kept = ["cache_buf_idx", "ring_start", "prev_num_accepted_tokens", "rand_seed", "arrivals"]
        return [name for name in self.operands() if name in names or (name in kept and "arrivals" in self.operands())]

    def strides(self) -> list[tuple[str, str]]:
        """(operand, axis) of every stride the kernel takes, in elements. Only the distance between slots is 64-bit."""
        batch = ["batch"] if self.cu_seqlens is Index.NONE else []
        inner = ["n"] if self.operand_loads is Loads.ELEMENT else []
        row = ["row"] if self.operand_loads is Loads.ELEMENT else []
        buffer = ["buffer"] if self.history is History.STEP else []
        axes = {
            "state": ["slot"],
            "old_x": ["slot", "token", "head", *row],
            "old_B": ["slot", *buffer, "token", "group", *inner],
            "old_dt": ["slot", *buffer, "head", "token"],
            "old_dA_cumsum": ["slot", *buffer, "head", "token"],
            **dict.fromkeys(("x", "z", "out"), [*batch, "token", "head", *row]),
            "dt": [*batch, "token", "head"],
            **dict.fromkeys(("B", "C"), [*batch, "token", "group", *inner]),
            "A": ["head"],
            "D": ["head", "row"],
            "dt_bias": ["head"],
            "rand_seed": ["slot"],
            "state_scale": ["slot", "head", "row"],
        }
        if self.materialize:
            axes["out"] = ["slot"]
        return [(operand, axis) for operand in self.operands() for axis in axes.get(operand, [])]

    def parameters(self) -> list[Param]:
        element = {f.name: getattr(self, f.name).value for f in fields(self) if isinstance(getattr(self, f.name), (DType, Narrow))}
        element |= dict.fromkeys(("B", "C", "old_x", "old_B"), self.x.value)
        element |= dict.fromkeys(("old_dt", "old_dA_cumsum", "mix", "sums", "state_scale"), "f32")
        element |= dict.fromkeys(("cache_buf_idx", "ring_start", "prev_num_accepted_tokens", "arrivals"), "int")
        element |= {"state_indices": _INTEGER.get(self.index, ""), "cu_seqlens": _INTEGER.get(self.cu_seqlens, ""), "rand_seed": "i64"}
        if self.materialize:
            element["out"] = self.out.value if self.scaled else self.state.value
        pointers = [Param.pointer(op, element[op], const=op not in self.written()) for op in self.operands()]
        pooled = self.index is not Index.NONE
        wide = [Param.i64("slots"), Param.i64("pad_slot_id")] if pooled else []
        wide += [Param.i64(f"{op}_{axis}") for op, axis in self.strides() if axis == "slot"]
        narrow = [*(["state_indices_batch"] if pooled else []), "window", *(["ring"] if self.history is History.RING else [])]
        narrow += [] if self.materialize else ["tokens" if self.cu_seqlens is Index.NONE else "total_tokens"]
        narrow += [f"{op}_{axis}" for op, axis in self.strides() if axis != "slot"]
        return [*pointers, *wide, *map(Param.u32, narrow)]
