"""Lists what one decode step of an accelerated model launches: kernels of ssmgen, and operations that are left to torch.

Needs no GPU: the step runs on tensors without memory, or on a CPU, and a mode of torch's dispatcher sees each operation. Calls of ssmgen
are seen where they are planned; their kernels are the ones for sm_90. An operation of torch counts as one launch; views and allocations
count as none. On a GPU, attention and experts may launch several kernels per operation: there the list also has CUPTI's names.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ssmgen import accelerate
from ssmgen.calls import operator
from ssmgen.compat.hf import block_sums, generate
from ssmgen.select import registry
from ssmgen.spec.kernel import SM90

from . import DemoError
from .measure import Launches, kernels_by_name
from .presets import Preset

AROUND = "around the layers"
"""The kind of an operation outside all layers: embedding, masks, positions, head and the choice of the token."""
_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Site(NamedTuple):
    """The place of an operation: the kind of its layer, and the class of the innermost module."""

    kind: str
    module: str


class Op(NamedTuple):
    """A launch. name: of torch's operation, or of ssmgen's kernel; shapes: of its tensors; nbytes: of inputs and outputs"""

    site: Site
    ours: bool
    name: str
    shapes: str
    nbytes: int


@dataclass
class Listing:
    """The launches of one step. layers: number of layers by kind"""

    layers: Counter[str] = field(default_factory=Counter)
    ops: list[Op] = field(default_factory=list)

    def per_layer(self, ours: bool) -> dict[str, float]:
        """Launches per layer of each kind, of ssmgen or of torch, and of all that is around the layers."""
        counts = Counter(op.site.kind for op in self.ops if op.ours == ours)
        return {kind: counts[kind] / self.layers.get(kind, 1) for kind in (*self.layers, AROUND)}


def shape_of(value: Any) -> str:
    """The type and the sizes of a tensor, as in bf16[1, 1, 4096]."""
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int64": "i64", "int32": "i32"}
    name = str(value.dtype).removeprefix("torch.")
    return f"{short.get(name, name)}{list(value.shape)}"


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


class _Watch(TorchDispatchMode):
    """Appends torch's operations that launch something to `ops`."""

    def __init__(self, ops: list[Op], stack: list[Site]):
        super().__init__()
        self.ops, self.stack = ops, stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(out)
        if not _is_free(func, given, made):
            moved = {id(t): t.nbytes for t in (*given, *made)}
            self.ops.append(Op(self.stack[-1], False, func._schema.name.removeprefix("aten::"), _words(given), sum(moved.values())))
        return out


class _Attention(TorchFunctionMode):
    """Appends attention as one operation: its parts differ from device to device."""

    def __init__(self, ops: list[Op], stack: list[Site]):
        super().__init__()
        self.ops, self.stack = ops, stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with _disable_current_modes():
            out = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        self.ops.append(Op(self.stack[-1], False, func.__name__, _words(given), sum(t.nbytes for t in (*given, out))))
        return out


def _words(given: list[Tensor]) -> str:
    return ", ".join(map(shape_of, given[:3])) + (", …" if len(given) > 3 else "")


def _is_free(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operation launches nothing: views and allocations, and copies that were not needed."""
    name = func._schema.name.removeprefix("aten::")
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    if writes or not made:
        return not given
    if name == "_unsafe_view":
        return True
    views = all(r.alias_info is not None for r in func._schema.returns)
    return views or name in _ALLOCATES or all(t.numel() == 0 for t in made) or all(any(t is g for g in given) for t in made)


@contextlib.contextmanager
def _calls(ops: list[Op], stack: list[Site]) -> Iterator[None]:
    """Appends the kernels of ssmgen's calls, and hides the reference's operations."""
    launch = operator.launch

    def seen(call: operator.Call, learn: Any) -> None:
        with _disable_current_modes():
            launch(call, learn)
            problem, size, _, pdl = call.problem()
            tensors = list(call.operands.values())
            if size:
                spec = registry.select(call.caller.family.operator, problem, size, SM90, True if pdl is None else pdl)
                for part in spec.kernels:
                    held = {id(t): t.nbytes for name, t in call.operands.items() if name in part.operands()}
                    ops.append(Op(stack[-1], True, part.name, _words(tensors), sum(held.values())))

    operator.launch = seen
    try:
        yield
    finally:
        operator.launch = launch


@contextlib.contextmanager
def _sites(layers: dict[torch.nn.Module, str], stack: list[Site]) -> Iterator[None]:
    """Keeps the site of the module that runs on top of the stack."""

    def enter(module: torch.nn.Module, args: Any) -> None:
        if not isinstance(module, torch.nn.Linear):  # whose launches count as their owner's
            stack.append(Site(layers.get(module, stack[-1].kind), type(module).__name__))

    def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
        if not isinstance(module, torch.nn.Linear):
            stack.pop()

    # Hooks of all modules: a module with a hook of its own does not share its launches.
    every = torch.nn.modules.module
    hooks = [every.register_module_forward_pre_hook(enter), every.register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """The layers of a model, and the kind of each."""
    found: dict[torch.nn.Module, str] = {}
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) and block_sums.count(type(m[0]))]
    for layer in (layer for stack in stacks for layer in stack):
        kind = getattr(layer, "block_type", getattr(layer, "layer_type", "layer"))
        mlp = getattr(layer, "mlp", getattr(layer, "feed_forward", None))
        found[layer] = f"{kind}, {type(mlp).__name__}" if mlp is not None else str(kind)
    return found


def listed(model: torch.nn.Module, batch: int = 1, prompt: int = 2) -> Listing:
    """The launches of a decode step of the model, accelerated for this. Raises DemoError for a model on a GPU, where a repeated call
    of ssmgen is not planned again."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        raise DemoError("the model is on a GPU; expected one on meta or on a CPU, whose calls are all seen")
    found, stack = Listing(), [Site(AROUND, type(model).__name__)]
    layers = layers_of(model)
    found.layers.update(layers.values())
    with accelerate(model, [batch]), torch.no_grad():
        steps = generate.Steps(model, batch, generate.ROOM)
        steps.begin(torch.zeros(batch, prompt, dtype=torch.long, device=device), None)
        for _ in range(2):  # the first steps learn which norms follow sums
            steps.step()
        with _sites(layers, stack), _calls(found.ops, stack), _Attention(found.ops, stack), _Watch(found.ops, stack):
            steps.step()
    return found


def launched(model: torch.nn.Module, batch: int = 1) -> dict[str, Launches]:
    """The kernels of a step of the model, on a GPU and accelerated, by the names that CUPTI sees; in a graph where it can be captured."""
    ids = torch.zeros(batch, 2, dtype=torch.long, device=next(model.parameters()).device)
    with accelerate(model, [batch]) as fast, torch.no_grad():
        fast.generate(ids, 4, eos_token_id=[])
        steps = fast._steps[batch]
        return kernels_by_name(steps.step if steps.graph is None else steps.graph.replay)


def listings(presets: list[Preset], layers: int, batch: int) -> Iterator[str]:
    """The text of each model, followed by CUPTI's names of its kernels if there is a GPU."""
    for preset in presets:
        found = listed(preset.build(layers, torch.bfloat16, "meta"), batch)
        yield as_text(f"{preset.name}, as wide as {preset.like}, batch {batch}", found)
        if torch.cuda.is_available():
            names = launched(preset.build(layers, torch.bfloat16, "cuda"), batch)
            total = sum(launch.count for launch in names.values())
            head = f"  CUPTI: {total} kernels, copies and fills in one token"
            yield "\n".join([head, *(f"    {launch.count:4} {launch.us:9.2f} us {name[:110]}" for name, launch in names.items())])


def as_text(title: str, found: Listing) -> str:
    """The list of a model, one line for each launch of a layer's kind, with its count per layer."""
    ours, torchs = found.per_layer(True), found.per_layer(False)
    lines = [title]
    for kind in (*found.layers, AROUND):
        count = found.layers.get(kind, 1)
        head = f"{kind} ({count} layers)" if kind in found.layers else kind
        lines.append(f"  {head}: {ours[kind]:.2f} kernels of ssmgen, {torchs[kind]:.2f} of torch")
        grouped = Counter((op.ours, op.site.module, op.name, op.shapes, op.nbytes) for op in found.ops if op.site.kind == kind)
        for (own, module, name, shapes, nbytes), times in grouped.items():
            mark = "ssmgen" if own else "torch "
            lines.append(f"    {mark} {times / count:5.2f} {module:28} {name[:60]:40} {nbytes:11,} bytes  {shapes}")
    return "\n".join(lines)
