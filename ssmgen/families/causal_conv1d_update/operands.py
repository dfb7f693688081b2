"""The tensors of causal_conv1d_update. Views of x and out are [batch, dim, T]; `tap` numbers the entries of a window."""

from __future__ import annotations

from ...calls.sharding import Rule
from ...engine.window import BESIDE, RESIDUALS
from ...spec.operands import Operand, Types, table

CHILDREN = ("first_children", "next_siblings", "parents_out")  # a draft tree by children instead of parents


def _by_sequence(name: str, field: str, there: str = "", axes: str = "batch") -> Operand:
    return Operand(name, axes, Types.INDEX, optional=True, field=field, there=there, view="sequence", strides="sequence")


def _tree(name: str, field: str) -> Operand:
    return Operand(
        name, "batch token", Types.INDEX, optional=True, written=name == "parents_out", field=field, view="sequence token",
        strides="sequence token",
    )  # fmt: skip


def _beside(name: str) -> Operand:
    return Operand(name, "like x", optional=True, field="x", there=name)


OPERANDS = table(
    Operand("x", "batch dim token | batch dim", view="batch dim token", strides="batch?!ragged dim?loose token?several"),
    Operand("conv_state", "slot dim tap", written=True, field="x", strides="slot:64 dim?any_place tap?!runs"),
    Operand("weight", "dim width", view="dim tap", strides="dim?loose_taps tap?loose_taps"),
    Operand("bias", "dim", optional=True, strides="dim?loose_taps"),
    _by_sequence("cache_seqlens", "position", "is_ring"),
    _by_sequence("conv_state_indices", "index"),
    _by_sequence("num_accepted_tokens", "position", "rolls"),
    _by_sequence("query_start_loc", "query_start_loc", axes="starts"),
    _tree("parents", "parents"),
    *[_tree(name, "children") for name in CHILDREN],
    Operand(
        "intermediate_conv_window", "kept token+ dim tap", optional=True, written=True, field="x", there="saves",
        view="slot token dim tap", strides="slot:64 token dim?saves_any tap?saves_any",
    ),
    _by_sequence("intermediate_state_indices", "saved_index"),
    Operand("has_initial_state", "batch", Types.BOOL, optional=True, there="started", view="sequence", strides="sequence"),
    *[_beside(name) for name in BESIDE],
    # A tree reads inputs again after outputs are written.
    Operand("out", "like x", written=True, field="x", may_be=("x", *RESIDUALS), unless=("parents", "first_children")),
    tap="state_len", token="T", kept="rows", starts="batch + 1",
)  # fmt: skip

# How a mesh of devices may divide them.
RULES = {"causal_conv1d_update": Rule(OPERANDS.axes(), OPERANDS.written, anchors=("conv_state",))}
