"""transformers' models generate with ssmgen: `patch()` puts its functions into their modeling files, `warm(model)` prepares its kernels.

Of a modeling file the state update of a decode step, the convolution's update, the convolution over a prompt and the scan over it of a
Mamba, a Mamba-2, a gated delta rule or Kimi delta attention are replaced, each on its own; of MiniMax's layers of Lightning attention,
which have no such functions, the forward; with `fuse=True` also whole layers, between their projections, and gated norms. Other
scans over a prompt stay as they are. The modeling files look these functions up at every call, so models made before and after patching
use them, and all models of one kind do. A call that ssmgen does not serve goes to transformers' own function, with a warning once per
reason: where an operand requires grad, for one.

Written for transformers 5.17 to 5.23; 5.16 works as well, and 5.15 but for whole layers. Older ones are refused.
"""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .. import api, runtime
from ..errors import PatchError, bullets
from . import hf_between as between
from . import hf_functions as functions
from . import hf_layers as layers
from . import hf_lightning as lightning
from . import hf_norms as norms
from . import hf_remote as remote
from .hf_functions import FUNCTIONS, Replacement

_CONV = ("causal_conv1d_update", "causal_conv1d_fn")
_SCANS = {
    ("mamba_selective_state_update", "mamba_selective_scan"): ("mamba", "falcon_mamba", "jamba", "zamba"),
    ("mamba2_selective_state_update", "mamba2_chunk_scan"): ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
    ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"): (
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
        "olmo_hybrid",
    ),
    ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"): ("kimi_linear", "glm5_next", "bailing_hybrid"),
}
_CONV_ONLY = ("lfm2", "lfm2_moe", "lfm3")
MODELS = {m: (*_CONV, *scans) for scans, models in _SCANS.items() for m in models} | dict.fromkeys(_CONV_ONLY, _CONV)
"""Functions that are replaced, by the name of transformers' model folder."""
KNOWN = (*MODELS, *lightning.CLASSES)
"""Names of transformers' model folders of which something is replaced."""

_lock = threading.Lock()
_active: dict[tuple[str, str], Replacement] = {}  # by model and function; what `patch` put in place and no `undo` has taken out


class Calls(NamedTuple):
    """Calls of one function: those that ssmgen computed, and those that went on to transformers' own."""

    ssmgen: int
    original: int


class Patch:
    """What `patch` did. A context manager that undoes it; str() of it is a table of calls, and why some were left to transformers."""

    def __init__(self, replacements: Iterable[Replacement]):
        self._replacements = {r.label: r for r in replacements}
        self._before = {label: (r.served, r.kept) for label, r in self._replacements.items()}
        for r in self._replacements.values():
            r.owners.add(self)

    @property
    def replaced(self) -> tuple[str, ...]:
        """Such as "mamba2.causal_conv1d_update"."""
        return tuple(self._replacements)

    def calls(self) -> dict[str, Calls]:
        """Calls since this patch, by function, without those that had none. What torch.compile made does not count."""
        now = {label: (r.served, r.kept) for label, r in self._replacements.items()}
        since = {label: Calls(*(a - b for a, b in zip(now[label], self._before[label], strict=True))) for label in now}
        return {label: calls for label, calls in since.items() if any(calls)}

    def undo(self) -> None:
        """Puts the originals back, the same objects, where no other patch still has ours. A second time: nothing.

        Raises PatchError where something else has been put in our place meanwhile; that stays, and all others are undone.
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
                if _active.get(key) is r:  # else another one of ours is on top of what came between
                    del _active[key]
                if r.in_place:
                    r.restore()
                else:
                    overwritten.append(f"{label} is now {getattr(r.module, r.name, 'missing')!r}")
        if overwritten:
            raise PatchError(f"these were replaced by something else after ssmgen did, and are left as they are:\n{bullets(overwritten)}")

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        calls = self.calls()
        width = max(map(len, self.replaced), default=0)
        rows = [f"{label:{width}} {c.ssmgen:8} {c.original:8}" for label, c in calls.items()]
        left = [
            f"{label} is left to transformers, first in {layer}:\n{reason}"
            for label, c in calls.items()
            for reason, layer in self._replacements[label].reasons.items()
            if c.original
        ]
        return "\n".join([f"{'replaced and called':{width}} {'ssmgen':>8} {'original':>8}", *rows, *left])


def patch(models: str | torch.nn.Module | Iterable[str | torch.nn.Module] = "auto", *, fuse: bool = False) -> Patch:
    """Puts ssmgen's functions into modeling files of transformers.

    fuse: also whole layers, of the models that ssmgen has them for: at a decode step convolution, state update, gates and norm are one call
        between the layer's projections, over a prompt three; and gated norms are one launch
    models: "auto" for all that ssmgen knows and the installed transformers has; names of its model folders, such as "mamba2"; or models,
        whose kinds are patched: a function is a modeling file's, and so another model of the same kind has it too. Of a model whose code
        came with its checkpoint, functions of transformers' names and parameters, and those of mamba-ssm, causal-conv1d and
        flash-linear-attention, are replaced in its own module, and in layers that keep them
    Patches may overlap: a function goes back to the original when the last patch that has it is undone.
    Warns of a function that this transformers does not have as expected, and leaves it alone.
    Raises PatchError for what is not known, listing all of it, before anything is replaced.
    """
    models = models if isinstance(models, (str, torch.nn.Module)) else list(models)
    names = _names(models)
    wanted = [(name, function) for name in names for function in MODELS.get(name, ())]
    wanted += [(name, lightning.CLASSES[name]) for name in names if name in lightning.CLASSES]
    if fuse:
        wanted += [(name, layers.CLASSES[name]) for name in names if name in layers.CLASSES]
        wanted += [(name, norms.NORMS[name]) for name in names if norms.has(_modeling(name), name)]
        wanted += [(name, found) for name in names for found in between.classes(_modeling(name)) if (name, found) not in wanted]
    with _lock:
        objections = {pair: words for pair in wanted if (words := _objection(*pair))}
        if objections:
            lines = bullets([f"{name}.{function}: {words}" for (name, function), words in objections.items()])
            warnings.warn(f"these functions are not replaced:\n{lines}", RuntimeWarning, stacklevel=2)
        if wanted and len(objections) == len(wanted):
            raise PatchError("none of these models has a function to replace; ssmgen knows transformers 5.15 and later")
        return Patch([_replacement(*pair) for pair in wanted if pair not in objections] + _of_checkpoints(models))


def fusible(model: torch.nn.Module) -> bool:
    """Whether `patch(model, fuse=True)` replaces whole decode layers of it."""
    return any(name in layers.LAYERS for name in _kinds(model))


def _names(models: str | torch.nn.Module | Iterable[str | torch.nn.Module]) -> list[str]:
    """Names of model folders, whose modeling files are imported. Raises PatchError."""
    version = _transformers_version()
    if isinstance(models, str) and models == "auto":
        return [name for name in KNOWN if _modeling(name) is not None]
    problems: list[str] = []
    names: dict[str, None] = {}  # a set that keeps its order
    for m in (models,) if isinstance(models, (str, torch.nn.Module)) else models:
        if isinstance(m, torch.nn.Module):
            kinds = _kinds(m)
            names |= dict.fromkeys(kinds)
            if not kinds and not any(map(remote.bound, remote.modules_of(m))):
                problems.append(remote.missing(m))
        elif m not in KNOWN:
            problems.append(f"{m!r} is not known")
        elif _modeling(m) is None:
            problems.append(f"{m} is not in transformers {version}")
        else:
            names[m] = None
    if problems:
        raise PatchError(f"cannot patch:\n{bullets(problems)}\nNothing was replaced. Known are: {', '.join(KNOWN)}.")
    return list(names)


def _transformers_version() -> str:
    try:
        import transformers
    except ImportError as e:
        raise PatchError("transformers is not installed: pip install 'ssmgen[hf]'") from e
    version = transformers.__version__
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < (5, 15):
        raise PatchError(
            f"transformers is {version}, whose modeling files do not look up functions that could be replaced; those of 5.15 and later do: "
            "pip install -U 'ssmgen[hf]'. Nothing was replaced."
        )
    return version


def _modeling(name: str) -> Any | None:
    """The modeling file of a model, or None where transformers has none of that name."""
    path = f"transformers.models.{name}.modeling_{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as e:
        if e.name is not None and path.startswith(e.name):
            return None
        raise


def _kinds(model: torch.nn.Module) -> list[str]:
    """Names of the model folders that the classes of a model's layers come from."""
    modules = {c.__module__ for layer in model.modules() for c in type(layer).__mro__}
    return [name for name in KNOWN if f"transformers.models.{name}.modeling_{name}" in modules]


def _objection(model: str, function: str) -> str:
    """What keeps a function of a modeling file from being replaced, or nothing."""
    known = _active.get((model, function))
    if known is not None and known.in_place:
        return ""
    original = getattr(_modeling(model), function, None)
    if _is_between(model, function):
        return ""
    if original is None:
        return "this transformers has no such function"
    if isinstance(original, type):
        return _forward_module(model, function).objection(original)
    differences = functions.unknown_parameters(FUNCTIONS[function], original)
    return f"its parameters are others than expected: {', '.join(differences)}" if differences else ""


def _forward_module(model: str, name: str) -> ModuleType:
    """The module of what replaces the forward of a class: its `objection` and its `run`."""
    return next((m for m, names in ((lightning, lightning.CLASSES), (norms, norms.NORMS)) if names.get(model) == name), layers)


def _is_between(model: str, name: str) -> bool:
    """Whether it is a class that stands between layers, which nobody lists."""
    listed = (lightning.CLASSES.get(model), norms.NORMS.get(model), layers.LAYERS[model].name if model in layers.LAYERS else None)
    return name not in listed and name in between.classes(_modeling(model))


def _replacement(model: str, function: str) -> Replacement:
    """What stands in place of a function to which there is no objection, put there if need be."""
    known = _active.get((model, function))
    if known is None or not known.in_place:
        label, module = f"{model}.{function}", _modeling(model)
        owner = getattr(module, function)
        if _is_between(model, function):
            known = Replacement(label, between.Forward(owner), "forward", between.run)
        elif isinstance(owner, type):
            known = Replacement(label, owner, "forward", _forward_module(model, function).run)
        else:
            known = Replacement(label, module, function, functions.run_function)
        _active[model, function] = known
    return known


def _of_checkpoints(models: str | torch.nn.Module | Iterable[str | torch.nn.Module]) -> list[Replacement]:
    """What stands in modules that came with checkpoints, and in the layers of these models."""
    found = []
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

    model: on a CUDA device, with `generate`. It reads a prompt of so many tokens and generates two, as one sequence and, for larger batch
        sizes, as two; what its layers call is then prepared for all sizes. The model need not be patched, and stays as it was.
    fuse: as `patch` is told; where it already is patched like that, this may be left out
    A prompt of another length may need another kernel of the convolution, which its first call compiles; so may one that goes on from a
    cache another scan, and one with padding those of packed sequences.
    Returns the number of kernels that were not loaded before. Raises PatchError, and what ssmgen.warm does: ArgumentError
    for a model that is not on a CUDA device.
    """
    sizes = sorted(set(batches))
    if not sizes or sizes[0] < 1:
        raise PatchError(f"batches are {sizes}: name one or more, of 1 or more sequences each")
    loaded = runtime.loaded_count()
    device = next(model.parameters()).device
    with patch(model, fuse=fuse) as handle, torch.no_grad():
        for batch in sorted({min(size, 2) for size in sizes}):  # two rows show the strides between rows, which one does not
            prompt = torch.zeros(batch, prompt_length, dtype=torch.long, device=device)
            with functions.recording() as calls:
                model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, min_new_tokens=2, do_sample=False, num_beams=1
                )
            for call in calls:
                # In the operator's unit, which is not always sequences: groups of norms, KiB of convolutions. Where it does not grow with
                # the batch, as chunk_scan's heads do not, more sizes are prepared than come.
                size = api.size_of(call.function, *call.args, **call.kwargs)
                api.warm(call.function, *call.args, batches=[size * n // batch for n in sizes if n >= batch], **call.kwargs)
        if not any(c.ssmgen for c in handle.calls().values()):
            raise PatchError("no layer of the model called a function of ssmgen's; the warnings say why")
    return runtime.loaded_count() - loaded
