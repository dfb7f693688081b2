"""The models of presets.toml, and building them."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

from . import DemoError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHARED = {
    "vocab_size": 1024,  # small, so that the layers dominate the time, not the head
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,  # with tied weights, a token predicts itself
}  # fmt: skip
CHUNKS = ("chunk_size", "mamba_chunk_size")
OTHERS = ("attention", "full_attention", "mlp", "moe")  # kinds of layers that ssmgen does not change


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A family of transformers, at the width of a public model."""

    name: str  # of transformers' model folder
    like: str
    kind: str
    sizes: Mapping[str, Any]
    source: str
    pattern: tuple[str, ...] = ()
    pattern_as: str = ""
    verified: bool = True

    def kinds(self, layers: int) -> list[str]:
        """The kind of each layer: `layers` of them, or a few more, so that each kind occurs once."""
        pattern = self.pattern or (self.name,)
        return list(itertools.islice(itertools.cycle(pattern), max(layers, len(pattern))))

    def served(self, layers: int) -> tuple[int, int]:
        """(layers with a convolution or a scan by ssmgen, layers)"""
        kinds = self.kinds(layers)
        return sum(kind not in OTHERS for kind in kinds), len(kinds)

    @property
    def for_prompts(self) -> Preset:
        """The same preset with the configuration's default chunk length for scans: the preset's chunks are for prompts of a few tokens."""
        return replace(self, sizes={key: value for key, value in self.sizes.items() if key not in CHUNKS})

    def config(self, layers: int) -> Any:
        """transformers' configuration. Raises DemoError if the installed transformers lacks the family."""
        import transformers

        names = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
        if self.kind not in names:
            raise DemoError(f"this transformers has no {self.name}")
        kinds = self.kinds(layers)
        own: dict[str, Any] = {"num_hidden_layers": len(kinds)}
        if self.pattern_as == "attn_layer_indices":
            own["attn_layer_indices"] = [i for i, kind in enumerate(kinds) if kind in OTHERS]
        elif self.pattern_as:
            own[self.pattern_as] = kinds
        # Not AutoConfig.for_model: once imported, flash-linear-attention registers its own models there for mamba and mamba2
        return getattr(transformers, names[self.kind])(**{**SHARED, **self.sizes, **own})

    def build(self, layers: int, dtype: torch.dtype, device: torch.device | str) -> torch.nn.Module:
        """The model for generation, with random weights: the same in every call."""
        from transformers import AutoModelForCausalLM

        config = self.config(layers)
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.to(device).eval()


@functools.cache
def presets() -> dict[str, Preset]:
    """{family: its preset}, in the file's order."""
    table = tomllib.loads(resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))
    return {name: Preset(name=name, **{**row, "pattern": tuple(row.get("pattern", ()))}) for name, row in table.items()}


def chosen(names: tuple[str, ...]) -> list[Preset]:
    """Presets by name; by default all that the installed transformers has. Raises DemoError that names all unknown ones."""
    known = presets()
    if unknown := [name for name in names if name not in known]:
        raise DemoError(f"no family is named {', '.join(unknown)}; known are {', '.join(known)}")
    if names:
        return [known[name] for name in dict.fromkeys(names)]
    from transformers import CONFIG_MAPPING

    return [preset for preset in known.values() if preset.kind in CONFIG_MAPPING]
