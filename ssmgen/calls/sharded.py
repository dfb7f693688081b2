"""Public functions on DTensors: each rank runs the same function on its shards, and the result is a DTensor.

The operand that is updated in place decides, for each axis of the mesh: a state that is sharded over its heads (or channels) splits the
call over heads, and a state sharded over its slots splits it over sequences. Other operands are redistributed to match. Written operands
must already match: an update of a copy would be lost. A sharding strategy of DTensor may redistribute every argument of an operator, so it
cannot be used here.

Heads are independent, and so are sequences: a call communicates only to redistribute operands, and the mesh changes no bit of the result.
Tokens are not independent: for sequences that are sharded over tokens, `context` makes the call on that axis of the mesh.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..errors import ArgumentError
from .sharding import KINDS, Axis, Kind, Rule


def is_sharded(values: Iterable[Any]) -> bool:
    """Whether a call's arguments include a DTensor, also in tuples and lists."""
    module = sys.modules.get("torch.distributed.tensor")  # if not imported, there is no DTensor; importing it takes 0.4 s
    if module is None:
        return False
    for v in values:
        for t in v if isinstance(v, (tuple, list)) else (v,):
            if isinstance(t, module.DTensor):
                return True
    return False


def run(function: Callable[..., Any], names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call with DTensors. Raises ArgumentError on all ranks, before any communication."""
    rule = _rule_of(function.__name__)
    given = _by_name(rule, names, args, kwargs)
    sharding = _sharding_of(function.__name__, rule.of(given), given)
    local = sharding.local(given)
    return sharding.result(given, function(**local) if Kind.TOKEN not in sharding.kinds else sharding.over_tokens(function, given, local))


def local_arguments(function: Callable[..., Any], names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's arguments, by name, for a call with DTensors. Raises as `run`."""
    rule = _rule_of(function.__name__)
    given = _by_name(rule, names, args, kwargs)
    return _sharding_of(function.__name__, rule.of(given), given).local(given)


def _rule_of(function: str) -> Rule:
    """The family's sharding rule for a function. Raises ArgumentError if it has none."""
    from .sharding_rules import RULES  # imports all families: calls without DTensors need not wait for that

    if function not in RULES:
        raise ArgumentError(function, ["an argument is a DTensor; expected this rank's tensors. Pass DTensor.to_local()."])
    return RULES[function]


def _by_name(rule: Rule, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by parameter name; each item of a tuple separately, such as "ring.k"."""
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    given.update(kwargs)
    for name, fields in rule.tuples.items():
        if isinstance(given.get(name), (tuple, list)) and len(given[name]) <= len(fields):  # the function reports more items
            given.update({f"{name}.{field}": t for field, t in zip(fields, given.pop(name), strict=False)})
    return given


_known: dict[Any, Sharding] = {}
_EVERY = tuple(Kind)  # torch.compile of torch 2.11 cannot iterate over an enumeration
_UPDATED = (Kind.HEAD, Kind.BATCH)  # over which a tensor that is updated in place may be sharded


def _sharding_of(function: str, rule: Rule, given: Mapping[str, Any]) -> Sharding:
    """How a call is split among ranks. Calls share the answer if they agree in everything that it depends on."""
    if is_compiling():
        return Sharding(function, rule, given)
    parts = [
        (n, t.shape, getattr(t, "placements", None), getattr(t, "device_mesh", t.is_floating_point()))
        for n, t in given.items()
        if isinstance(t, Tensor)
    ]
    key = (function, None if rule.variant is None else (*rule.axes.values(),), given.get("philox_rounds"), *parts)
    found = _known.get(key)
    if found is None:
        found = Sharding(function, rule, given)
        if len(_known) >= 1024:
            _known.clear()
        _known[key] = found
    return found


class Sharding:
    """The placements that the operands of a call should have, by parameter. Holds no tensors."""

    def __init__(self, function: str, rule: Rule, given: Mapping[str, Any]):
        """Raises ArgumentError for every placement that is not possible."""
        from torch.distributed.tensor import DTensor, Replicate

        self.function, self.rule = function, rule
        tensors: dict[str, Tensor] = {n: t for n, t in given.items() if isinstance(t, Tensor)}
        self.distributed = {n: t for n, t in tensors.items() if isinstance(t, DTensor)}
        mesh = next(iter(self.distributed.values())).device_mesh
        self.sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
        self._check_mesh(tensors, mesh)
        self.anchor: str = next(n for n in self.rule.anchors if n in tensors)
        self.of_tokens = next((n for n in reversed(self.rule.anchors) if n in tensors), self.anchor)
        self.dims = {n: t.dim() for n, t in tensors.items()}
        self.shapes = {n: t.shape for n, t in tensors.items()}
        found = {n: [Axis.of(word) for word in self.rule.axes_of(n, self.dims, dim)] for n, dim in self.dims.items()}
        self.axes = {n: tuple([axis.word for axis in axes]) for n, axes in found.items()}
        self.kinds_of = {n: axis.kinds for n, axes in found.items() for axis in axes if axis.kinds}
        self.together = {n: axis.together for n, axes in found.items() for axis in axes if axis.together > 1}
        everywhere = (Replicate(),) * mesh.ndim
        self.placements = {n: tuple(t.placements) if isinstance(t, DTensor) else everywhere for n, t in tensors.items()}
        problems: list[str] = []
        # Each axis of the mesh splits one kind of axis, or nothing.
        self.kinds = [self._kind(axis, problems) for axis in range(mesh.ndim)]
        self.heads = 1  # the number of parts of the heads
        for axis, kind in enumerate(self.kinds):
            self.heads *= self.sizes[axis] if kind is Kind.HEAD else 1
        self._check(given.get("philox_rounds") != 0, problems)
        self.wanted = {n: self._wanted(n, problems) for n in tensors}
        if problems:
            raise ArgumentError(function, problems)

    def _check_mesh(self, tensors: Mapping[str, Tensor], mesh: Any) -> None:
        """Raises ArgumentError if operands are not on one mesh. Integers may be plain tensors, assumed equal on all ranks."""
        problems: list[str] = []
        for name, t in tensors.items():
            if (found := self.distributed.get(name)) is not None:
                if found.device_mesh != mesh:
                    problems.append(f"{name} is on {found.device_mesh}; expected {mesh}, the mesh of the other operands")
            elif t.is_floating_point():
                how = "Use distribute_tensor or DTensor.from_local, or pass shards of all operands"
                problems.append(f"{name} is a plain tensor; expected a DTensor, like the other operands. {how}")
        if not any(n in tensors for n in self.rule.anchors):
            problems.append(f"{self.rule.anchors[-1]} is not given; expected a tensor")
        if problems:
            raise ArgumentError(self.function, problems)

    def _kind(self, axis: int, problems: list[str]) -> Kind | None:
        from torch.distributed.tensor import Replicate, Shard

        if self._has_tokens(axis):
            return Kind.TOKEN
        placement, words = self.placements[self.anchor][axis], self.axes[self.anchor]
        if isinstance(placement, Replicate):
            return None
        word = words[placement.dim] if type(placement) is Shard and placement.dim < len(words) else None
        if word in _UPDATED:
            return Kind(word)
        if self.anchor in self.rule.written:  # else it is gathered
            legal = ", ".join([f"Shard({words.index(w)}) ({w.value})" for w in _UPDATED if w in words])
            where = f"{self.anchor} is {placement} on axis {axis} of the mesh"
            problems.append(f"{where}; expected {legal} or Replicate(), since it is updated in place")
        return None

    def _has_tokens(self, axis: int) -> bool:
        """Whether this axis of the mesh splits the tokens of a function whose sequences may be split over ranks."""
        from torch.distributed.tensor import Shard

        placement, words = self.placements[self.of_tokens][axis], self.axes[self.of_tokens]
        if type(placement) is not Shard or placement.dim >= len(words) or words[placement.dim] != Kind.TOKEN:
            return False
        from .context_rules import RULES

        return self.function in RULES

    def _size(self, name: str, word: str) -> int:
        """The size of the operand's axis with this word in the rule; 1 if there is none."""
        return self.shapes[name][self.axes[name].index(word)] if word in self.axes[name] else 1

    def _check(self, noise: bool, problems: list[str]) -> None:
        """Checks conditions that involve several operands."""
        count = self._size(self.anchor, Kind.HEAD)
        if count % self.heads:
            problems.append(f"{self.anchor} has {count} heads (or channels); expected a multiple of the {self.heads} parts")
        for name, heads in self.together.items():
            if self.heads > 1 and count // self.heads % heads:
                problems.append(f"{name} groups {heads} of the {count} heads; expected whole groups on each of {self.heads} ranks")
        if noise and "rand_seed" in self.axes and (Kind.HEAD in self.kinds or Kind.BATCH in self.kinds):
            problems.append("rand_seed is given with sharded states; expected None: noise depends on an element's index in the whole pool")
        if self.kinds.count(Kind.TOKEN) > 1:
            problems.append(f"the tokens of {self.of_tokens} are sharded over several axes of the mesh; expected one axis")
        if Kind.BATCH not in self.kinds:
            return
        if not self.rule.by_sequence:
            problems.append(f"{self.anchor} is sharded over its first axis; expected its heads")
        for name in self.axes:
            if name.endswith("indices") or name in ("cu_seqlens", "query_start_loc", "checkpoint_positions"):
                problems.append(
                    f"{self.anchor} is sharded over its first axis, into which {name} points; expected a whole axis. Shard the heads."
                )
        counts = {n: self._size(n, Kind.BATCH) for n in self.axes if Kind.BATCH in self.axes[n]}
        if len(set(counts.values())) > 1:
            problems.append(f"{self.anchor} is sharded over its first axis with {counts}; expected as many slots as sequences")

    def _wanted(self, name: str, problems: list[str]) -> tuple[Any, ...]:
        """The placements that an operand must have; Replicate() if several parts of the heads share its groups."""
        from torch.distributed.tensor import Replicate, Shard

        words, groups = self.axes[name], self._size(name, "group")
        shared = groups % self.heads != 0
        along: dict[Kind, str] = {kind: kind for kind in _EVERY}
        along[Kind.HEAD] = next((word for word in (Kind.HEAD, KINDS, "" if shared else "group") if word in words), "")
        placements = [Shard(words.index(along[kind])) if kind and along[kind] in words else Replicate() for kind in self.kinds]
        if KINDS in words and Kind.HEAD in self.kinds:
            here = [self.placements[name][axis].is_shard(words.index(KINDS)) for axis, kind in enumerate(self.kinds) if kind is Kind.HEAD]
            if any(here) and not all(here):
                problems.append(f"{name} is {_words(self.placements[name])}; expected its channels sharded like the heads, or not at all")
        if shared and self.heads % groups:
            problems.append(
                f"{name} has {groups} groups (or key heads) for {self.heads} parts of the heads; expected a multiple or a divisor"
            )
        if name in self.rule.written and name != self.anchor:
            have, want = _words(self.placements[name]), _words(placements)
            if have != want:
                problems.append(f"{name} is {have} and is written; expected {want}, as {self.anchor} is sharded")
            elif shared and groups > 1:
                problems.append(
                    f"{name} is written, and {self.heads} parts of the heads share its {groups} groups; expected a group for each part"
                )
        return tuple(placements)

    def local(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's arguments by parameter: shards, views of replicated tensors, and redistributed tensors."""
        mesh = self._mesh(given)
        here = mesh.get_coordinate()
        if here is None:
            raise ArgumentError(
                self.function, [f"this process is not a rank of {mesh}; expected a rank. Call it on the ranks of the mesh only."]
            )
        local = {n: self._local(n, v, here) if n in self.wanted else v for n, v in given.items()}
        for name, fields in self.rule.tuples.items():
            if f"{name}.{fields[0]}" in local:
                local[name] = tuple([local.pop(f"{name}.{field}") for field in fields if f"{name}.{field}" in local])
        return local

    def over_tokens(self, function: Callable[..., Any], given: Mapping[str, Any], local: dict[str, Any]) -> Any:
        """The function's result on this rank, for sequences whose other tokens are on other ranks."""
        from . import context
        from .context_rules import RULES

        group = self._mesh(given).get_group(self.kinds.index(Kind.TOKEN))
        return context.run(function, RULES[self.function], local, group)

    def _local(self, name: str, t: Any, here: Sequence[int]) -> Tensor:
        words, have, wanted = self.axes[name], self.placements[name], self.wanted[name]
        divided = KINDS in words and Kind.HEAD in self.kinds and not any(p.is_shard(words.index(KINDS)) for p in have)
        if divided:  # split each kind separately, from the replicated tensor
            from torch.distributed.tensor import Replicate

            wanted = tuple([Replicate() if kind is Kind.HEAD else wanted[axis] for axis, kind in enumerate(self.kinds)])
        everywhere = all(p.is_replicate() for p in have)
        if have != wanted and not everywhere:
            t = t.redistribute(placements=wanted)
        local: Tensor = t.to_local() if name in self.distributed else t
        if have != wanted and everywhere:
            for axis, p in enumerate(wanted):
                if p.is_shard():
                    start, length = _part(local.shape[p.dim], self.sizes[axis], here[axis])
                    local = local.narrow(p.dim, start, length)
        part = 0  # this rank's part of the heads
        for axis, kind in enumerate(self.kinds):
            if kind is Kind.HEAD:
                part = part * self.sizes[axis] + here[axis]
        if divided:
            local = self._of_each_kind(name, local, words.index(KINDS), part)
        groups = self._size(name, "group")
        if groups > 1 and groups % self.heads:
            local = local.narrow(words.index("group"), part * groups // self.heads, 1)
        return local

    def _of_each_kind(self, name: str, t: Tensor, dim: int, part: int) -> Tensor:
        """A copy of the channels for one part of the heads: its share of each kind, or the group that it shares with other parts."""
        pieces, start = [], 0
        for count, size in self.kinds_of[name]:
            first, length = part * count // self.heads, max(count // self.heads, 1)
            pieces.append(t.narrow(dim, start + first * size, length * size))
            start += count * size
        return torch.cat(pieces, dim)

    def _mesh(self, given: Mapping[str, Any]) -> Any:
        """The mesh of these tensors. An earlier call with the same split may have been on an equal mesh with other process groups."""
        return given[next(iter(self.distributed))].device_mesh

    def result(self, given: Mapping[str, Any], local: Any) -> Any:
        """The function's result on this rank as DTensors. Given output tensors are returned themselves."""
        mesh = self._mesh(given)
        returned = local if isinstance(local, tuple) else (local,)
        names = [n for n in self.rule.returns if n not in self.rule.asked or given.get(self.rule.asked[n])]
        if len(returned) > len(names):  # one name for several outputs
            names = [f"{n}.{field}" for n in names for field in self.rule.tuples.get(n, ())]
        found = tuple([self._distributed(given.get(n), n, t, mesh) for n, t in zip(names, returned, strict=False)])
        return found if isinstance(local, tuple) else found[0]

    def _distributed(self, given: Tensor | None, name: str, local: Tensor, mesh: Any) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if given is not None:
            return given
        words = [Axis.of(word).word for word in self.rule.axes_of(name, self.dims, local.dim())]
        placements = [Shard(words.index(kind)) if kind in words else Replicate() for kind in self.kinds]
        shape, stride = list(local.shape), list(local.stride())
        sizes = {
            Kind.HEAD: local.shape[words.index(Kind.HEAD)] * self.heads if Kind.HEAD in words else 1,
            Kind.BATCH: self._size(self.anchor, Kind.BATCH),
            Kind.TOKEN: self._size(self.of_tokens, Kind.TOKEN),
        }
        for kind in _EVERY:  # the parts of sequences and of tokens may have different sizes
            if kind in words and kind in self.kinds:
                axis = words.index(kind)
                for i, s in enumerate(stride):
                    if s > stride[axis] or (s == stride[axis] and i < axis):  # the axis lies within this one
                        stride[i] = s // max(shape[axis], 1) * sizes[kind]
                shape[axis] = sizes[kind]
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def _part(size: int, parts: int, part: int) -> tuple[int, int]:
    """(start, length) of one part of an axis, split as by torch.chunk; the last parts may be empty."""
    most = -(-size // parts)
    start = min(size, most * part)
    return start, min(most, size - start)


def _words(placements: Iterable[Any]) -> str:
    return ", ".join([str(p) for p in placements])
