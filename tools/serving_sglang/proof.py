"""The proof of SGLang's deterministic inference: tools.serving.proof with SGLang's engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.serving import proof
from tools.serving.engines import Engine
from tools.serving.models import FEW
from tools.serving.proof import GRAPHS, LONGEST, Proof, Row, Setting

# SGLang serves recurrent models in this mode without cached prefixes. The first one's answers are compared with all others.
SETTINGS = (
    Setting("pieces of 8192, graphs", 8192),
    Setting("pieces of 512, eager", 512, eager=True),
    Setting("control: without ssmgen and mode", 8192, proves=False),
)


def build(engine: Engine, setting: Setting, model: str) -> None:
    """Asks an engine to build itself."""
    how = {
        "chunked_prefill_size": setting.step, "disable_decode_cuda_graph": setting.eager, "enable_deterministic_inference": setting.proves,
        "disable_radix_cache": True, "mamba_ssm_dtype": "float32",
    }  # fmt: skip
    engine.say("build", model=model, layers=FEW, dtype="bfloat16", longest=LONGEST, graphs=GRAPHS, folder=str(engine.folder), **how)


def prove_all(
    models: Sequence[str], folder: Path, until: float, tell: Callable[[Proof, Row | str], None], start: Callable[[str, bool, Path], Engine]
) -> list[Proof]:
    """Proves one model after the other. start: makes an engine, with a name, with or without ssmgen, with a folder for its files"""

    def engine(name: str, with_ssmgen: bool, folder: Path, _: Any) -> Engine:
        return start(name, with_ssmgen, folder)

    return proof.prove_all(models, folder, until, tell, engine, SETTINGS, build)
