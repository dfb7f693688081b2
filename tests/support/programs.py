"""Python programs in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def succeeds(program: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """The outputs of a program, which has to end without an error. how: environment, directory and the like."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
