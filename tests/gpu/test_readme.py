"""The README's example runs as described."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent.parent / "README.md"

CHECK = """
torch.cuda.synchronize()
assert y.shape == (batch, H, P) and torch.isfinite(y).all() and len(ssmgen.stats()) == 1
used = state[slot.long()]
assert used.abs().sum() > 0 and int((state.flatten(1).abs().sum(1) > 0).sum()) == batch
"""


@pytest.mark.gpu
def test_example(tmp_path):
    (program,) = (text.split("```")[0] for text in README.read_text().split("```python\n")[1:])
    path = tmp_path / "example.py"
    path.write_text(program + CHECK)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
