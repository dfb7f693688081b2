"""One call that makes a model of transformers fast: `ssmgen.accelerate`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, PatchError, bullets
from ...launch import runtime
from .. import hf
from . import roles
from .attentions import Attentions
from .linears import Linears
from .positions import Positions, Rotary
from .rotations import Rotations

ROOM = 256  # tokens of a cache, at least: a longer one means another capture
GREEDY = {"do_sample": False, "num_beams": 1, "use_cache": True, "num_return_sequences": 1, "return_dict_in_generate": False}
"""Arguments of model.generate that greedy decoding honours, with these values."""
ENDS = ("eos_token_id", "pad_token_id")
CHECKED = 16  # tokens between two looks at whether all sequences have ended: a look waits for the device


class Accelerated:
    """The changes that `accelerate` made to a model: `done` and `left`, in sentences, which str() lists. A context manager that undoes it.

    generate() decodes greedily, with one CUDA graph per token where steps can be captured; `model.generate` is patched and fused.
    """

    def __init__(self, model: Any, patch: hf.Patch, linears: Linears, rotary: list[Any], done: list[str], left: list[str], steps: bool):
        self.model, self.patch, self._linears, self._rotary = model, patch, linears, rotary
        self.done, self.left = done, left
        self._steps_are_known = steps
        self._steps: dict[int, Steps] = {}  # by batch size
        self._undone = False

    def generate(
        self, input_ids: Tensor | None = None, max_new_tokens: Any = None, *, attention_mask: Tensor | None = None, **others: Any
    ) -> Any:
        """[batch, length + tokens]: the prompts, followed by the likeliest tokens, at most max_new_tokens.

        input_ids: [batch, length], on the model's device   attention_mask: [batch, length], 0 where a prompt is padded, on its left
        max_new_tokens: 20 where nothing says how many; as in model.generate, a GenerationConfig may stand here
        others: arguments of model.generate. Sampling, beams, streamers and all other calls except greedy decoding go to model.generate,
            which is patched and fused; eos_token_id and pad_token_id do not
        A sequence that has ended goes on with the padding token; once all have ended, nothing is added. The model's generation_config names
        the tokens that end and pad a sequence. The first call of a batch size captures a step, and so does a call that needs a longer cache
        than all calls before. A step that cannot be captured runs as it is, with a warning, and `left` says why. Padded prompts of models
        with attention go to model.generate, whose steps see the mask.
        Raises ArgumentError listing all that is wrong, and the errors of the model's forward; PatchError after undo().
        """
        if self._undone:
            raise PatchError("this acceleration has been undone. Call ssmgen.accelerate(model) again, or model.generate.")
        if isinstance(max_new_tokens, _generation_config()):
            others["generation_config"], max_new_tokens = max_new_tokens, None
        if input_ids is None:
            input_ids = others.pop("inputs", None)
        ends = {name: others.pop(name) for name in ENDS if isinstance(others.get(name), (int, list))}
        others = {name: value for name, value in others.items() if name not in GREEDY or value not in (None, GREEDY[name])}
        if others:
            given = {"input_ids": input_ids, "attention_mask": attention_mask, "max_new_tokens": max_new_tokens} | ends
            given["do_sample"] = None if {"do_sample", "generation_config"} & others.keys() else False
            return self.model.generate(**{name: value for name, value in given.items() if value is not None}, **others)
        count = 20 if max_new_tokens is None else max_new_tokens
        if problems := _problems(self.model, input_ids, count, attention_mask):
            raise ArgumentError("generate", problems)
        assert input_ids is not None
        padded = attention_mask is not None and not bool(attention_mask.all())
        batch, room = input_ids.shape[0], input_ids.shape[1] + count
        steps = self._steps_of(batch, room) if self._steps_are_known else None
        if steps is None or (padded and steps.attends):
            return self._by_transformers(input_ids, count, attention_mask, ends)
        with torch.no_grad():
            return steps.generate(input_ids, count, attention_mask if padded else None, self.left, **ends)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, patched and fused."""
        return self.model(*args, **kwargs)

    def _steps_of(self, batch: int, room: int) -> Steps:
        """The steps of a batch size, with a longer cache if need be."""
        steps = self._steps.get(batch)
        if steps is None or steps.room < room:
            self._steps.pop(batch, None)  # frees its memory before the new one is allocated
            steps = self._steps[batch] = Steps(self.model, batch, max(ROOM, 1 << (room - 1).bit_length()))
        return steps

    def _by_transformers(self, input_ids: Tensor, max_new_tokens: int, attention_mask: Tensor | None, ends: dict[str, Any]) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        found: Tensor = self.model.generate(
            input_ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, use_cache=True, **ends
        )
        return found

    def undo(self) -> None:
        """Puts transformers' and PyTorch's own functions back, and frees caches and graphs. A second time: nothing. Raises what Patch.undo
        does."""
        self._steps.clear()
        self._undone = True
        for part in self._rotary:
            part.undo()
        self._linears.undo()
        self.patch.undo()

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lost = f"; {len(self.patch.lost)} known functions are not replaced: {', '.join(self.patch.lost)}" if self.patch.lost else ""
        lines = [*(f"  + {words}" for words in self.done), *(f"  - {words}" for words in self.left)]
        return "\n".join([f"{type(self.model).__name__} on {_device(self.model)}, {_dtype(self.model)}{lost}", *lines])


def accelerate(model: torch.nn.Module, batches: Iterable[int] = (1,), *, prompt_length: int = 8, strict: bool = False) -> Accelerated:
    """Patches and fuses a model of transformers, loads its kernels, and gives it a `generate` that replays a CUDA graph per token.

    batches: sizes whose kernels are loaded now; others are when they come first   prompt_length: tokens of the prompt that this takes
    strict: raises PatchError where a function or a layer that ssmgen knows cannot be replaced, such as one that transformers has changed
    Returns an object whose str() lists the changes that were made and the ones that failed, and whose undo() takes them back. On a CPU
    nothing is loaded and nothing captured: ssmgen's reference implementation computes.
    Raises ArgumentError for an argument of another kind, PatchError for an unknown model, and the errors of hf.patch and hf.warm; then
    nothing stays replaced.
    """
    sizes = list(batches) if isinstance(batches, Iterable) and not isinstance(batches, str) else None
    if problems := _wrong(model, sizes, batches, prompt_length):
        raise ArgumentError("accelerate", problems)
    patch = hf.patch(model, fuse=True)
    linears = Linears(model)
    attentions = [Attentions(model)]
    rotary: list[Any] = [Rotary(model), Rotations(model), *attentions]
    try:
        if strict and patch.lost:
            lines = bullets([f"{label}: {words}" for label, words in patch.lost.items()])
            raise PatchError(
                f"accelerate(strict=True) cannot replace all known functions of {type(model).__name__}:\n{lines}\nPass strict=False to "
                "accelerate the rest."
            )
        done, left = _replaced(model, patch)
        done.append(linears.words)
        device = _device(model)
        if device == "several devices":
            left.append("the model is on several devices; kernels are not loaded in advance and steps are not captured")
        elif not device.startswith("cuda"):
            left.append(f"the model is on {device}, where the reference computes; kernels are not loaded and steps are not captured")
        else:
            loaded = runtime.loaded_count()
            hf.warm(model, sizes or (), prompt_length, fuse=True)
            linears.load(sizes or ())
            count = runtime.loaded_count() - loaded
            done.append(f"{count} kernels were compiled or loaded, for batches of {', '.join(map(str, sizes or ()))}")
        why = _without_steps(model)
        if not why:
            for found, into in zip(attentions[0].words, (done, left), strict=True):
                into += found
        if why:
            left.append(f"generate is model.generate: {why}")
        elif device.startswith("cuda"):
            done.append("generate captures a step of each batch size at its first call, and replays it for every token")
    except BaseException:
        for part in rotary:
            part.undo()
        linears.undo()
        patch.undo()
        raise
    return Accelerated(model, patch, linears, rotary, done, left, steps=not why)


def _wrong(model: Any, sizes: list[Any] | None, batches: Any, prompt_length: Any) -> list[str]:
    """Every fault of the arguments of accelerate, in words; sizes: the sizes in batches, or None."""
    problems = []
    if not isinstance(model, torch.nn.Module):
        problems.append(f"model is {model!r}; expected a model. Load it: transformers.AutoModelForCausalLM.from_pretrained({model!r})"
                        if isinstance(model, str) else f"model is {type(model).__name__}; expected a torch.nn.Module")  # fmt: skip
    if not sizes or not all(_is_count(size) for size in sizes):
        given, example = batches if sizes is None else sizes, batches if _is_count(batches) else 1
        problems.append(f"batches is {given!r}; expected sizes of 1 or more, such as batches=[{example}]")
    if not _is_count(prompt_length):
        problems.append(f"prompt_length is {prompt_length!r}; expected 1 token or more")
    return problems


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _replaced(model: torch.nn.Module, patch: hf.Patch) -> tuple[list[str], list[str]]:
    classes = [name for name in patch.replaced if name.partition(".")[2][:1].isupper()]
    functions = [name for name in patch.replaced if name not in classes]
    done = [f"{len(functions)} functions and the forwards of {len(classes)} classes are ssmgen's: {', '.join(patch.replaced)}"]
    left = [f"{label} is not replaced: {words}" for label, words in patch.lost.items()]
    left += [] if hf.fusible(model) else ["ssmgen has no fused step for layers of this kind, which make several calls per decode step"]
    return done, left


def _without_steps(model: Any) -> str:
    """Why a model cannot decode on a cache with fixed addresses, in words; empty if it can. Tries a prompt of two tokens and a step."""
    if _cache_name(model) is None:
        return f"its forward takes no cache; expected a parameter {', '.join(roles.names_of('cache'))}"
    try:
        steps = Steps(model, 1, 8)
        if any(getattr(steps.cache, "is_sliding", ())):
            return "some of its layers use sliding-window attention, whose cache position is counted on the host"
        with torch.no_grad():
            steps.begin(torch.zeros(1, 2, dtype=torch.long, device=steps.token.device), None)
            steps.step()
    except Exception as e:  # whatever a configuration lacks, or a layer of a cache like this
        return f"it does not run on transformers' StaticCache: {_first_line(e)}"
    return ""


def _generation_config() -> type:
    from transformers import GenerationConfig

    kind: type = GenerationConfig
    return kind


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"


def _cache(model: Any, room: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=room)


def _cache_name(model: Any) -> str | None:
    return roles.name_in("cache", inspect.signature(model.forward).parameters)


def _device(model: torch.nn.Module) -> str:
    devices = {str(p.device) for p in model.parameters()}
    return devices.pop() if len(devices) == 1 else "several devices"


def _dtype(model: torch.nn.Module) -> str:
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))


def _problems(model: torch.nn.Module, ids: Any, count: Any, mask: Any) -> list[str]:
    if not isinstance(ids, Tensor):
        return [f"input_ids is {type(ids).__name__}; expected a tensor [batch, length]"]
    problems = []
    if ids.dim() != 2 or not ids.numel() or ids.dtype not in (torch.int32, torch.int64):
        problems.append(f"input_ids is {ids.dtype} {list(ids.shape)}; expected int32 or int64 [batch, length] of one token or more")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        problems.append(f"max_new_tokens is {count!r}; expected 1 or more")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        problems.append(f"attention_mask is {found}; expected {list(ids.shape)}, the shape of input_ids")
    where = next(model.parameters()).device
    tensors = {"input_ids": ids, "attention_mask": mask}
    problems += [
        f"{n} is on {t.device}; expected {where}, the device of the model"
        for n, t in tensors.items()
        if isinstance(t, Tensor) and t.device != where
    ]
    return [problem.replace("torch.", "") for problem in problems]


class Steps:
    """Greedy steps of a model at one batch size, on a cache with fixed addresses that has room for `room` tokens."""

    def __init__(self, model: Any, batch: int, room: int):
        self.model, self.room = model, room
        self.cache, self.name = _cache(model, room), _cache_name(model)
        self.own = frozenset(vars(self.cache))  # attributes that no model has added
        parameters = inspect.signature(model.forward).parameters
        self.of_prompt = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        device = next(model.parameters()).device
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.attends = any(hasattr(layer, "max_cache_len") for layer in self.cache.layers)  # to all tokens before one
        counts = "position_ids" in parameters  # not every model counts its cache's tokens
        self.positions = Positions(model, self.cache, batch, room, device) if counts or self.attends else None
        self.position = self.positions.ids if self.positions is not None and counts else None
        self.graph: Any = None
        self.captured: dict[Any, Any] = {}  # the cache's contents at the capture
        self.captures = device.type == "cuda"

    def generate(self, ids: Tensor, count: int, mask: Tensor | None, left: list[str], **told: Any) -> Tensor:
        """Does what Accelerated.generate says; mask: None for none; told: of ENDS. A reason why no step can be captured goes to `left`."""
        found = ids.new_empty(ids.shape[0], count)
        ends, pad = _ends(self.model, **told)
        for i in range(count):
            if ends and i and i % CHECKED == 0 and _length(found[:, :i], ends) is not None:
                found = found[:, :i]
                break
            if i == 0:
                self.begin(ids, mask)
            else:
                self._next(i, left)
            found[:, i : i + 1].copy_(self.token)
        return torch.cat([ids, _ended(found, ends, pad)], dim=1)

    def begin(self, ids: Tensor, mask: Tensor | None) -> None:
        """The prompt, from an empty cache."""
        self.cache.reset()
        for added in vars(self.cache).keys() - self.own:  # Qwen4's positions of an earlier prompt, which reset() leaves
            delattr(self.cache, added)
        more = {} if mask is None else {"attention_mask": mask}
        out = self.model(input_ids=ids, use_cache=True, **{str(self.name): self.cache}, **more, **self.of_prompt)
        self._take(out.logits)
        if self.positions is not None:
            self.positions.ids.fill_(ids.shape[1])
        if self.graph is not None and _moved(self.captured, self._held()):
            self.graph = None

    def step(self) -> None:
        more = {} if self.position is None else {"position_ids": self.position}
        step: AbstractContextManager[dict[str, Any]] = nullcontext({}) if self.positions is None else self.positions.step()
        with step as masks:
            out = self.model(input_ids=self.token, use_cache=True, **{str(self.name): self.cache}, **more, **masks)
        self._take(out.logits)

    def _take(self, logits: Tensor) -> None:
        torch.argmax(logits[:, -1], dim=-1, keepdim=True, out=self.token)

    def _next(self, i: int, left: list[str]) -> None:
        """The token at index i > 0. Libraries initialise during the step of token 1; the step of token 2 is captured, unless the step of
        token 1 replaced an object that the cache held: a replay would not replace it."""
        if self.graph is None and self.captures and i > 1 and (why := self._capture()):
            self._leave(why, left)
        if self.graph is not None:
            self.graph.replay()
        elif not self.captures:
            self.step()
        else:
            before = self._held()
            self.step()
            if moved := _moved(before, self._held()):
                self._leave(f"each step allocates {', '.join(moved)} of the cache anew", left)

    def _capture(self) -> str:
        """A step in a CUDA graph, which does nothing now. Returns why there is none, or nothing."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        here = torch.cuda.stream(torch.cuda.current_stream())  # a capture that fails may leave its own stream current
        try:
            with here, torch.cuda.graph(graph):
                self.step()
        except Exception as e:  # whatever a model's step does that cannot be captured
            return _first_line(e)
        self.graph, self.captured = graph, self._held()
        return ""

    def _leave(self, why: str, left: list[str]) -> None:
        """Steps stay as they are."""
        self.captures = False
        left.append(f"steps of {len(self.token)} sequences are not captured: {why}")
        warnings.warn(left[-1], RuntimeWarning, stacklevel=5)

    def _held(self) -> dict[Any, Any]:
        """The contents of the cache and its layers, by owner, name and key: a tensor's address, any other value itself."""
        owners = enumerate(map(vars, (self.cache, *self.cache.layers)))
        items = [((i, name), value) for i, held in owners for name, value in held.items() if value is not self.cache.layers]
        return {(*at, key): v.data_ptr() if isinstance(v, Tensor) else v for at, value in items for key, v in _parts(value)}


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [(None, value)]


def _moved(before: dict[Any, Any], now: dict[Any, Any]) -> list[str]:
    """Names whose values have changed."""
    return sorted({at[1] for at, value in before.items() if at not in now or now[at] != value})


def _ends(model: Any, **told: Any) -> tuple[list[int], int]:
    """(tokens that end a sequence, the token that pads it): as told, else by the model's generation_config."""
    ends, pad = (told.get(name, getattr(model.generation_config, name)) for name in ENDS)
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = pad if pad is not None else ends[0] if ends else 0
    return ends, int(pad)


def _length(found: Tensor, ends: list[int]) -> int | None:
    """The length at which all rows have ended; None where one has not."""
    ended = torch.isin(found, found.new_tensor(ends))
    first = torch.where(ended.any(1), ended.int().argmax(1) + 1, found.shape[1] + 1)
    last = int(first.max())
    return None if last > found.shape[1] else last


def _ended(found: Tensor, ends: list[int], pad: int) -> Tensor:
    """Pads each row after its end token, and cuts the columns after the last row's end."""
    if not ends:
        return found
    ended = torch.isin(found, found.new_tensor(ends))
    behind = (ended.int().cumsum(1) - ended.int()) > 0
    return found.masked_fill(behind, pad)[:, : _length(found, ends)]
