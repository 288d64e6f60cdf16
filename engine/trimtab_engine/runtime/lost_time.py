"""How long the kernel kept a thread waiting for a CPU: what makes a step's time say more about its neighbours than about itself.

Used by the engine loop and by benchmarks. Reads the kernel's own account of the calling thread; knows nothing of steps.
"""

from __future__ import annotations

import os
import resource

_ACCOUNT = (
    "/proc/thread-self/schedstat"  # nanoseconds on a CPU, nanoseconds ready and waiting for one, time slices
)


class LostTime:
    """Called again and again by one thread: seconds that it has been ready to run and did not, so far.

    Where the kernel keeps no such account, each forced context switch counts as a second.
    """

    def __init__(self) -> None:
        self._account: int | None = None
        self._opened = False

    def __call__(self) -> float:
        """Seconds so far. The first call fixes the thread."""
        if not self._opened:
            self._opened = True
            try:
                self._account = os.open(_ACCOUNT, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._account = None
        if self._account is None:
            return float(resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw)
        return int(os.pread(self._account, 128, 0).split()[1]) * 1e-9

    def __del__(self) -> None:
        if self._account is not None:
            os.close(self._account)
