"""One call that makes a whole model fast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch  # whole, before parts of it: another thread may be importing it

if TYPE_CHECKING:
    from .generate import Accelerated


def accelerate(model: torch.nn.Module, batches: Iterable[int] = (1,), *, prompt_length: int = 8, strict: bool = False) -> Accelerated:
    """Makes a model of transformers fast: patches it, fuses its layers, loads its kernels; a `generate` replays a CUDA graph per token.

    The model's linear layers multiply up to 16 rows by skinny_linear; weights are not copied, and larger calls stay PyTorch's.

    model: of a kind that ssmgen.compat.hf knows, where it will stay. Functions are its modeling file's: other models of its kind are
        patched, too
    batches: sizes whose kernels are loaded now; others are when they come first   prompt_length: tokens of the prompt that this takes
    strict: a function or a layer that ssmgen knows and cannot replace is an error; without, the first line of str() names it

    Returns an object whose `generate` takes the arguments of `model.generate` and decodes greedily unless told otherwise; calling it calls
    the model. Its str() lists the changes that were made and the ones that failed. `undo()`, or the end of a `with`, undoes them. On a CPU
    nothing is loaded or captured, and the reference computes.
    Raises ArgumentError for an argument of another kind; PatchError for an unknown model, without transformers, and with `strict`; and the
    errors of warm(). Then nothing stays replaced.
    """
    from . import generate as hf_generate  # which needs transformers

    return hf_generate.accelerate(model, batches, prompt_length=prompt_length, strict=strict)
