"""`python -m tools.extra`: the extra that fits the CUDA of the installed torch, cu12 or cu13. The README's install lines use it."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def extra_of(cuda: str | None) -> str:
    """cuda: torch.version.cuda. A torch without CUDA takes either extra: cu12, under whose compiler CI compares registers."""
    return f"cu{cuda.partition('.')[0]}" if cuda else "cu12"


def main() -> None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("torch is not installed. Install the torch that you want first: pip install torch")
    version = Path(spec.origin).with_name("version.py")  # read alone: importing torch takes seconds, and warns where numpy is missing
    print(extra_of(runpy.run_path(str(version))["cuda"]))


if __name__ == "__main__":
    main()
