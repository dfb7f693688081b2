"""The README's examples do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent.parent / "README.md"

CHECKS = [
    """
torch.cuda.synchronize()
assert y.shape == (batch, H, P) and torch.isfinite(y).all() and len(ssmgen.stats()) == 1
used = state[slot.long()]
assert used.abs().sum() > 0 and int((state.flatten(1).abs().sum(1) > 0).sum()) == batch
""",
    """
torch.cuda.synchronize()
assert y.shape == (batch, 8, HV, V) and torch.isfinite(y).all() and len(ssmgen.stats()) == 3
used = state[slot.long()]
assert used.abs().sum() > 0 and int((state.flatten(1).abs().sum(1) > 0).sum()) == batch
""",
    """
torch.cuda.synchronize()
assert y.shape == (batch, T, H, P) and torch.isfinite(y).all() and len(ssmgen.stats()) == 1
used = state[slot.long()]
assert used.abs().sum() > 0 and int((state.flatten(1).abs().sum(1) > 0).sum()) == batch
assert (buffer[slot.long()] == 1).all() and (accepted[slot.long()] >= 1).all() and arrivals.sum() == 0
""",
    """
torch.cuda.synchronize()
assert y.shape == (batch, dim) and torch.isfinite(y).all() and len(ssmgen.stats()) == 2
assert torch.equal(pool[slot.long(), :, -1], x[:, :, 0]) and int((pool.flatten(1).abs().sum(1) > 0).sum()) == batch
""",
    """
torch.cuda.synchronize()
assert out.shape == (batch, heads, d_v) and torch.isfinite(out).all() and len(ssmgen.stats()) == 1
assert torch.equal(out[1], o[16].bfloat16()) and torch.allclose(lse_out[3], lse[39] * torch.log(torch.tensor(2.0)))
""",
]


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(CHECKS)))
def test_example(tmp_path, number):
    programs = [text.split("```")[0] for text in README.read_text().split("```python\n")[1:]]
    assert len(programs) == len(CHECKS)
    path = tmp_path / "example.py"
    path.write_text(programs[number] + CHECKS[number])
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
