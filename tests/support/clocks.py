"""Breaks every clock, for tests of what must not read one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CLOCKS = (
    "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "sleep", "localtime", "gmtime",
)  # fmt: skip


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it lasts, whoever reads a clock fails. Fill imports and caches before."""

    def fail(*_: object) -> float:
        raise AssertionError("a clock was read in simulated time")

    with monkeypatch.context() as patched:
        for name in CLOCKS:
            patched.setattr(time, name, fail)
        for module in list(sys.modules.values()):  # names that were imported out of `time`
            if getattr(module, "__name__", "").startswith("trimtab_"):
                for clock in CLOCKS:
                    if getattr(module, clock, None) is not None and callable(getattr(module, clock)):
                        patched.setattr(module, clock, fail)
        yield
        with pytest.raises(AssertionError, match="clock"):
            time.monotonic()  # the trap works
