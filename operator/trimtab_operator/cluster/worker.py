"""The work queue and the threads that empty it: each service at most once at a time, failures with growing pauses.

Fed by `handlers` (watch events), by the resync and by reconciles that ask to look again. Keys are coalesced: however many
events arrive, one look is owed. Knows nothing of what a reconcile does.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from trimtab_operator.cluster.kube import NotLeading

logger = logging.getLogger(__name__)

K = TypeVar("K")
#: A service that was just looked at is not looked at again sooner: bursts of events become one look.
MIN_INTERVAL_S = 0.25
_STALE = 64  # entries without meaning that are not worth an effort
BACKOFF_S = (0.5, 60.0)  # first and longest pause after failures in a row, doubling


class WorkQueue(Generic[K]):
    """Keys with the time at which each is due. Thread-safe."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, min_interval_s: float = MIN_INTERVAL_S
    ) -> None:
        self._now = now
        self._min_interval_s = min_interval_s
        self._changed = threading.Condition()
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = itertools.count()
        self._busy: set[K] = set()
        self._parked: set[K] = set()  # due while busy, and therefore not in the heap until `done`
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._due)

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Owe `key` a look in `delay_s` seconds, or sooner if one is owed sooner."""
        with self._changed:
            now = self._now()
            due = max(now + delay_s, self._not_before.get(key, 0.0))
            if key in self._due and self._due[key] <= due:
                return
            self._due[key] = due
            self._push(key, due)
            self._changed.notify()

    def take(self, timeout_s: float = 1.0) -> K | None:
        """The next due key, marked as busy; None after `timeout_s` or when closed. `done` must follow."""
        with self._changed:
            end = self._now() + timeout_s
            while not self._closed:
                now = self._now()
                key = self._pop(now)
                if key is not None:
                    self._busy.add(key)
                    return key
                if now >= end:
                    return None
                next_due = self._heap[0][0] if self._heap else end
                self._changed.wait(max(0.0, min(next_due, end) - now))
            return None

    def done(self, key: K, *, again_s: float | None = None, failed: bool = False) -> float | None:
        """End the look at `key` → the pause before the next one, if one is owed by this call."""
        with self._changed:
            self._busy.discard(key)
            if key in self._parked:
                self._parked.discard(key)
                self._push(key, self._due[key])
            now = self._now()
            self._not_before[key] = now + self._min_interval_s
            pause = again_s
            if failed:
                count = self._failures.get(key, 0)
                self._failures[key] = count + 1
                first, longest = BACKOFF_S
                pause = min(longest, first * 2.0 ** min(count, 20)) * random.uniform(0.75, 1.25)
                self._not_before[key] = now + pause  # events must not shorten it
                if key in self._due:
                    del self._due[key]
            else:
                self._failures.pop(key, None)
                if key not in self._due and again_s is None:
                    self._not_before.pop(key, None)  # forgotten: nothing grows with deleted services
            self._changed.notify_all()
        if pause is not None:
            self.add(key, pause)
        return pause

    def clear(self) -> None:
        """Nothing is owed any more, but for what is being done."""
        with self._changed:
            self._due.clear()
            self._heap.clear()
            self._parked.clear()
            self._not_before.clear()
            self._failures.clear()

    def close(self) -> None:
        """Let every `take` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _push(self, key: K, due: float) -> None:
        """Of a look that is owed sooner than before, the later entry stays: for hours, where a run waits for its time."""
        heapq.heappush(self._heap, (due, next(self._serial), key))
        if len(self._heap) > 2 * len(self._due) + _STALE:
            waiting = (
                (due, next(self._serial), key) for key, due in self._due.items() if key not in self._parked
            )
            self._heap = list(waiting)
            heapq.heapify(self._heap)

    def _pop(self, now: float) -> K | None:
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) != due:
                continue  # moved since
            if key in self._busy:
                self._parked.add(key)  # left in the heap, it would keep idle threads turning until `done`
                continue
            del self._due[key]
            return key
        return None


class Workers(Generic[K]):
    """Threads that take keys and call `work`, which returns seconds until the next look or None."""

    def __init__(
        self,
        queue: WorkQueue[K],
        work: Callable[[K], float | None],
        threads: int,
        may_work: Callable[[], bool] = lambda: True,
        observe: Callable[[str, float], None] = lambda result, seconds: None,
    ) -> None:
        self._queue = queue
        self._work = work
        self._may_work = may_work
        self._observe = observe
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"reconcile-{i}", daemon=True) for i in range(threads)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def alive(self) -> bool:
        """Whether all threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def stop(self, timeout_s: float) -> None:
        """Finish what is being done, take nothing new."""
        self._stopping.set()
        self._queue.close()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._may_work():
                self._stopping.wait(0.2)
                continue
            key = self._queue.take()
            if key is not None:
                self._one(key)

    def _one(self, key: K) -> None:
        began = time.monotonic()
        try:
            again_s = self._work(key)
        except NotLeading:
            # Another process acts now. What is owed stays owed, in case this one leads again.
            self._queue.done(key, again_s=1.0)
            self._observe("retried", time.monotonic() - began)
        except (
            Exception
        ) as error:  # the outermost loop: one service's trouble must not end the work on all others
            pause = self._queue.done(key, failed=True)
            logger.warning(
                "reconcile failed",
                extra={
                    "service": str(key),
                    "error": f"{type(error).__name__}: {error}",
                    "again_in_s": round(pause or 0, 1),
                },
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
            self._observe("failed", time.monotonic() - began)
        else:
            self._queue.done(key, again_s=again_s)
            self._observe("ok", time.monotonic() - began)
