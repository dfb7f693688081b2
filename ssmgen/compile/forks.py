"""Makes a fork wait until no thread is inside code that would block the child forever.

Locks of other libraries cannot be reset: if another thread is inside NVRTC, or inside the template engine's caches, during a fork, the
child inherits their locks taken, and waits for them forever. Such code runs inside `whole`, and a fork waits for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator

WAIT_SECONDS = 30.0  # a fork's longest wait; a kernel takes some tenths of a second to compile, the largest a few seconds


class _Gate:
    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._renew)

    def _renew(self) -> None:
        self._changed = threading.Condition()  # its lock is reentrant: a signal handler may fork at any instruction
        self._inside: Counter[int] = Counter()  # by thread
        self._forks = 0  # forks that wait, or are in progress

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Keeps other threads from forking inside the block; first waits for forks in progress."""
        me, changed, inside = threading.get_ident(), self._changed, self._inside
        with changed:
            changed.wait_for(lambda: not self._forks or inside[me])
            inside[me] += 1
        try:
            yield
        finally:
            with changed:
                inside[me] -= 1
                changed.notify_all()

    def _close(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: not any(depth for thread, depth in self._inside.items() if thread != me), WAIT_SECONDS)

    def _open(self) -> None:
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()


whole = _Gate().whole
