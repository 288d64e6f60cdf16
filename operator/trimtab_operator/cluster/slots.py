"""Gives out the places for runs that act: at most so many hold candidates at a time, over all services.

Asked by `reconcile` in worker threads, for a run whose candidate may be tried. What is remembered here only bridges the time until
the runs' own statuses say it: after a restart the first answers come from those. The rule is `plan.fleet.may_act`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from trimtab_operator.api import TuningRun
from trimtab_operator.cluster.observe import Key, RunIndex
from trimtab_operator.plan.fleet import Contender, contenders, may_act


class Slots:
    """See the module. Runs of namespaces that are `away` hold no place: nothing renews their candidates. Thread-safe."""

    def __init__(
        self,
        limit: int,
        index: RunIndex,
        enqueue: Callable[[Key], None],
        away: Callable[[str], bool] = lambda namespace: False,
    ) -> None:
        self._away = away
        self._limit = limit
        self._index = index
        self._enqueue = enqueue
        self._lock = threading.Lock()
        self._held: dict[Key, Contender] = {}
        self._waiting: set[Key] = set()

    def ask(self, key: Key, run: TuningRun, now: float) -> str | None:
        """Whether `run` may act: None when it may, else why it waits."""
        mine = Contender.of(run)
        with self._lock:
            self._held = {k: c for k, c in self._held.items() if c.until_s > now}
            wanting = {**contenders(self._index.contenders(), now), **self._held}
            wanting = {k: contender for k, contender in wanting.items() if not self._away(k.namespace)}
            held = self._held.get(key)
            wanting[key] = replace(mine, holds=mine.holds or (held is not None and held.uid == mine.uid))
            if key in may_act(wanting, self._limit):
                self._held[key] = replace(mine, holds=True)
                self._waiting.discard(key)
                return None
            self._waiting.add(key)
        return f"--max-concurrent-runs {self._limit}: runs of other services act already, or are older"

    def wake(self) -> None:
        """Those that wait are looked at: others may have lost their places."""
        with self._lock:
            woken = list(self._waiting)
        for key in woken:
            self._enqueue(key)

    def release(self, keys: Iterable[Key]) -> None:
        """These services try nothing now; those that wait are looked at."""
        with self._lock:
            given_back = [self._held.pop(key, None) for key in keys]
            self._waiting.difference_update(keys)
            woken = list(self._waiting) if any(given_back) else []
        for key in woken:
            self._enqueue(key)
