"""Steps that read states through a ring of the tokens that the states lack: checks of their operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...calls import checks
from ...engine.recurrences.attention.operands import ROLES
from ...spec.kernel import DType


def kept_type(views: Mapping[str, Tensor]) -> DType | None:
    """The dtype of keys and errors in the ring; None if k and v have it, too."""
    kept = views["ring_k"].dtype
    return None if kept == views["k"].dtype == views["v"].dtype else checks.DTYPES[kept]


def shapes(views: Mapping[str, Tensor], lead: Sequence[int], options: Any, problems: list[str]) -> dict[str, checks.Shapes]:
    """Allowed shapes of a ring of keys, errors and log decays. lead: axes of tokens. Adds to `problems` what such a step does not take."""
    gate = "gk" if "gk" in views else "g"
    kept = [f"ring_{n}" for n in ("k", "v", gate)]
    if missing := [n for n in ("ring_position", "state_indices", *kept) if n not in views]:
        problems.append(
            f"a step through a ring lacks {', '.join(missing)}; expected ring_position, state_indices, ring.k, ring.v and ring.g"
        )
    own = ("state", "out", "state_indices", *ROLES, *kept)
    given = [n for n in views if n not in own and n not in ("ring_position", "ring_flush")]
    given += [] if options.update_state else ["update_state=False"]
    given += ["ring_ready=True"] if options.ring_ready else []
    given += ["state_layout='kv'"] if options.layout == "kv" else []
    if given:
        problems.append(f"ring_position is given with {', '.join(given)}; expected none of them")
    if len(lead) == 2 and lead[1] != 1:
        problems.append(f"q has {lead[1]} tokens per sequence with ring_position; expected 1")
    if "beta" in views and views["beta"].dim() == len(lead) + 2:
        problems.append("beta has one element per value channel with ring_position; expected one per head")
    found: dict[str, checks.Shapes] = {}
    first = views.get("ring_k")
    length = first.shape[1] if first is not None and first.dim() > 1 else 0
    for name in ("k", "v", gate):
        ring, operand = views.get(f"ring_{name}"), views.get(name)
        if ring is None or operand is None:
            continue
        if name == gate and ring.dtype != torch.float32:
            problems.append(f"ring_{name} is {ring.dtype} with ring_position; expected torch.float32")
        if name == "v" and first is not None and ring.dtype != first.dtype:
            problems.append(f"ring_v is {ring.dtype}; expected {first.dtype}, the dtype of ring.k")
        found[f"ring_{name}"] = {"[slots, length, …], of one length,": (views["state"].shape[0], length, *operand.shape[len(lead) :])}
        if ring.dim() > 3 and ring.stride(-1) != 1:
            problems.append(f"ring_{name} has strides {list(ring.stride())}; expected 1 for its last axis")
        checks.check_distinct(views, (f"ring_{name}",), problems)
    return found
