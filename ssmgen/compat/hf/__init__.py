"""transformers' models generate with ssmgen: `patch()` puts its functions into their modeling files, `warm(model)` prepares its kernels.

`patch` replaces ten functions in every modeling file that has them, found by name and parameters: the state update of a decode step, the
convolution's update, the convolution over a prompt and the scan over it of a Mamba, a Mamba-2, a gated delta rule or Kimi delta attention.
MiniMax's Lightning attention does not call such functions, so its forward is replaced. `fuse=True` also replaces whole layers, between
their projections, and gated norms. The modeling files look these functions up at every call, so models made before and after patching use
them, and all models of one kind do. A call that ssmgen does not serve goes to transformers' own function, with a warning once per reason:
for example if an operand requires grad.

Written for transformers 5.15 to 5.24. An older release is refused. A newer one causes a warning, and functions that it changed stay.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ...calls import api
from ...errors import PatchError, bullets
from ...launch import runtime
from . import between, found, functions, remote, targets
from .fusible import fusible as fusible
from .replacements import Calls as Calls
from .replacements import Replacement

_lock = threading.Lock()
_active: dict[tuple[str, str], Replacement] = {}  # by model and function: every replacement in force


class Patch:
    """The result of `patch`. As a context manager it undoes the patch. str() gives a table of calls, and says why transformers kept some.

    lost: functions and layers that ssmgen knows and that could not be replaced, with the reason; str() begins with them
    recognised: norms and blocks that are in no table of ssmgen's and were replaced all the same, with the evidence
    """

    def __init__(self, replacements: Iterable[Replacement], lost: dict[str, str], recognised: dict[str, str]):
        self.lost = lost
        self.recognised = recognised
        self._replacements = {r.label: r for r in replacements}
        self._before = {label: (r.served, r.kept) for label, r in self._replacements.items()}
        for r in self._replacements.values():
            r.owners.add(self)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The functions in place, as "mamba2.causal_conv1d_update"."""
        return tuple(self._replacements)

    def calls(self) -> dict[str, Calls]:
        """Calls since this patch, of each function that was called. Calls in code made by torch.compile do not count."""
        now = {label: (r.served, r.kept) for label, r in self._replacements.items()}
        since = {label: Calls(*(a - b for a, b in zip(now[label], self._before[label], strict=True))) for label in now}
        return {label: calls for label, calls in since.items() if any(calls)}

    def undo(self) -> None:
        """Puts the originals back, the same objects, where no other patch still has ours. A second time: nothing.

        Raises PatchError if someone else has replaced one of our functions since; that one stays, and all others are undone.
        """
        overwritten = []
        with _lock:
            for label, r in self._replacements.items():
                if self not in r.owners:
                    continue
                r.owners.remove(self)
                if r.owners:
                    continue
                key = label.rpartition(".")[::2]
                if _active.get(key) is r:  # else someone replaced ours, and we replaced theirs
                    del _active[key]
                if r.in_place:
                    r.restore()
                else:
                    overwritten.append(f"{label} is now {getattr(r.module, r.name, 'missing')!r}")
        if overwritten:
            raise PatchError(f"other code replaced these after ssmgen did; ssmgen does not restore them:\n{bullets(overwritten)}")

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        calls = self.calls()
        width = max(map(len, self.replaced), default=0)
        rows = [f"{label:{width}} {c.ssmgen:8} {c.original:8}" for label, c in calls.items()]
        left = [
            f"transformers computes {label}, first in {layer}:\n{reason}"
            for label, c in calls.items()
            for reason, layer in self._replacements[label].reasons.items()
            if c.original
        ]
        first = [f"not replaced: {label}: {words}" for label, words in self.lost.items()]
        first += [f"recognised: {label}: {words}" for label, words in self.recognised.items()]
        return "\n".join([*first, f"{'replaced and called':{width}} {'ssmgen':>8} {'original':>8}", *rows, *left])


def patch(models: str | torch.nn.Module | Iterable[str | torch.nn.Module] = "auto", *, fuse: bool = False) -> Patch:
    """Puts ssmgen's functions into modeling files of transformers.

    fuse: also whole layers, of the models that ssmgen has them for: at a decode step convolution, state update, gates and norm are one call
        between the layer's projections, over a prompt three; and gated norms are one launch
    models: "auto" for all that the installed transformers has; names of its model folders, such as "mamba2"; or models, whose kinds are
        patched: all models of one kind share the functions of a modeling file. If a model's code came with its checkpoint, `patch`
        replaces functions with transformers' names and parameters, and functions of mamba-ssm, causal-conv1d and flash-linear-attention,
        in the module of that code, and in layers that keep them
    Patches may overlap: a function goes back to the original when the last patch that has it is undone.
    Warns of a function or a layer that this transformers does not have as expected, and leaves it alone: `Patch.lost` lists these.
    Raises PatchError that lists every unknown name or model, before anything is replaced.
    """
    models = models if isinstance(models, (str, torch.nn.Module)) else list(models)
    wanted = [(name, target) for name in _names(models) for target in targets.targets(_module(name), fuse)]
    with _lock:
        lost = {f"{name}.{target.name}": words for name, target in wanted if (words := _objection(name, target))}
        if lost:
            lines = bullets([f"{label}: {words}" for label, words in lost.items()])
            warnings.warn(f"ssmgen does not replace these functions:\n{lines}", RuntimeWarning, stacklevel=2)
        kept = [(name, target) for name, target in wanted if f"{name}.{target.name}" not in lost]
        if wanted and not kept:
            raise PatchError("none of these models has a function that ssmgen replaces. It knows transformers 5.15 to 5.24.")
        seen = {f"{name}.{t.name}": between.recognised(getattr(_module(name), t.name)) for name, t in kept if t.between}
        recognised = {label: words for label, words in seen.items() if words}
        return Patch([_replacement(name, target) for name, target in kept] + _of_checkpoints(models), lost, recognised)


def models() -> dict[str, tuple[str, ...]]:
    """{model folder of the installed transformers: functions that `patch` replaces in its modeling file}, without `fuse`."""
    return {name: tuple(target.name for target in targets.targets(_module(name), fuse=False)) for name in found.names()}


def _names(models: str | torch.nn.Module | list[str | torch.nn.Module]) -> list[str]:
    """Names of model folders. Raises PatchError."""
    version = found.version()
    if isinstance(models, str) and models == "auto":
        return list(found.names())
    problems: list[str] = []
    names: dict[str, None] = {}  # a set that keeps its order
    for m in (models,) if isinstance(models, (str, torch.nn.Module)) else models:
        if isinstance(m, torch.nn.Module):
            kinds = found.kinds(m)
            names |= dict.fromkeys(kinds)
            if not kinds and not any(map(remote.bound, remote.modules_of(m))):
                problems.append(remote.missing(m))
        elif not isinstance(m, str):
            problems.append(f"{m!r} is {type(m).__name__}; expected a model or the name of a model folder")
        elif not found.is_folder(m):
            problems.append(f"{m!r} is not a model folder of transformers {version}")
        elif not found.has(found.modeling(m)):
            problems.append(f"{m!r} has no function or layer that ssmgen knows")
        else:
            names[m] = None
    if problems:
        raise PatchError(f"cannot patch:\n{bullets(problems)}\nNothing was replaced. ssmgen knows: {', '.join(found.names())}.")
    return list(names)


def _module(name: str) -> Any:
    return found.modeling(name)


def _objection(name: str, target: targets.Target) -> str:
    """Why a function of a modeling file cannot be replaced, in words; empty if it can."""
    known = _active.get((name, target.name))
    return "" if known is not None and known.in_place else target.objection(getattr(_module(name), target.name, None))


def _replacement(name: str, target: targets.Target) -> Replacement:
    """The replacement of a function without objections. It is put there unless it is there."""
    known = _active.get((name, target.name))
    if known is None or not known.in_place:
        known = _active[name, target.name] = target.place(f"{name}.{target.name}", _module(name))
    return known


def _of_checkpoints(models: str | torch.nn.Module | Iterable[str | torch.nn.Module]) -> list[Replacement]:
    """The replacements in modules that came with checkpoints, and in the layers of these models."""
    found: list[Replacement] = []
    for model in (models,) if isinstance(models, torch.nn.Module) else models:
        if not isinstance(model, torch.nn.Module):
            continue
        for module in remote.modules_of(model):
            for name, ours in remote.bound(module).items():
                known = _active.get((module.__name__, name))
                if not isinstance(known, remote.Replacement) or not known.in_place:
                    known = _active[module.__name__, name] = remote.Replacement(module, name, ours)
                known.rebind(model)
                found.append(known)
    return found


def warm(model: torch.nn.Module, batches: Iterable[int] = (1,), prompt_length: int = 8, *, fuse: bool = False) -> int:
    """Compiles and loads the kernels that `model` needs to generate at these batch sizes, so that decoding can be captured.

    model: on a CUDA device, with `generate`. It reads a prompt of prompt_length tokens and generates two tokens, as one sequence and, for
        larger batch sizes, as two; the calls of its layers are then prepared for all sizes. The model need not be patched, and stays as it
        was.
    fuse: as `patch` is told; where it already is patched like that, this may be left out
    A prompt of another length may need another kernel of the convolution, which its first call compiles. A prompt that continues a cache
    may need another scan, and a prompt with padding may need the kernels of packed sequences.
    Returns the number of kernels that were not loaded before. Raises PatchError, and the errors of ssmgen.warm: ArgumentError for a model
    that is not on a CUDA device.
    """
    sizes = sorted(set(batches))
    if not sizes or sizes[0] < 1:
        raise PatchError(f"batches is {sizes}; expected one or more sizes, of 1 or more sequences each")
    loaded = runtime.loaded_count()
    device = next(model.parameters()).device
    with patch(model, fuse=fuse) as handle, torch.no_grad():
        for batch in sorted({min(size, 2) for size in sizes}):  # two rows show the strides between rows, which one does not
            prompt = torch.zeros(batch, prompt_length, dtype=torch.long, device=device)
            with functions.recording() as calls:
                generate: Any = model.generate
                generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, min_new_tokens=2, do_sample=False, num_beams=1)
            for call in calls:
                # The operator's unit is not always sequences: norms count groups, convolutions KiB. If it does not grow with the batch, as
                # chunk_scan's heads do not, more sizes are prepared than come.
                size = api.size_of(call.function, *call.args, **call.kwargs)
                api.warm(call.function, *call.args, batches=[size * n // batch for n in sizes if n >= batch], **call.kwargs)
        if not any(c.ssmgen for c in handle.calls().values()):
            raise PatchError("no layer of the model called a function of ssmgen. The warnings say why.")
    return runtime.loaded_count() - loaded
