"""Time that a thread waited for a CPU, by the kernel's account."""

import os
import resource
import subprocess
import sys
import threading
import time

import pytest

from trimtab_engine.runtime import lost_time
from trimtab_engine.runtime.lost_time import LostTime


def test_it_never_falls_and_sleeping_is_not_waiting() -> None:
    lost = LostTime()
    first = lost()
    time.sleep(0.05)
    assert first <= lost()


def test_a_thread_that_shares_its_cpu_loses_about_half_of_it() -> None:
    cpu = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    lost_s: list[float] = []

    def work() -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread
        lost, used = LostTime(), time.thread_time()
        before = lost()
        while time.thread_time() - used < 0.3:
            sum(range(10_000))
        lost_s.append(lost() - before)

    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(120.0)
        finally:
            other.kill()
    assert lost_s
    assert lost_s[0] >= 0.1


def test_without_the_kernels_account_forced_switches_count_as_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lost_time, "_ACCOUNT", "/proc/thread-self/no-such-file")
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    assert LostTime()() >= before
