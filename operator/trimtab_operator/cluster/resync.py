"""Looks at every service once in a while, whatever the watches say, and finds out when a watch has died.

`main` calls `turn` in a thread of its own, first after one period. Lists all services and runs; each service gets a look, spread over time. A change that
the list shows and the watch has not delivered a while later means that the watch is dead although its process lives.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Kube, KubeError
from trimtab_operator.cluster.observe import Key, RunIndex

logger = logging.getLogger(__name__)

RETRY_S = 5.0
#: From a list that shows a change to the watch's delivery of it; a watch that has fallen silent reopens by itself after 70 s.
WATCH_GRACE_S = 120.0
ASK_AGAIN_S = WATCH_GRACE_S / 2
_SPREAD = 0.5  # of the period, over which looks are spread


class Resync:
    """See the module. `namespaces` None: all."""

    def __init__(
        self,
        kube: Kube,
        namespaces: Sequence[str] | None,
        index: RunIndex,
        enqueue: Callable[[Key, float], None],
        period_s: float,
        on_done: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._places: Sequence[str | None] = list(namespaces) if namespaces is not None else [None]
        self._index = index
        self._enqueue = enqueue
        self._period_s = period_s
        self._on_done = on_done
        self._now = now
        self._lock = threading.Lock()
        self._turns = 0
        # Resource versions of one object are integers that grow.
        self._delivered: dict[Key, tuple[int, int]] = {}  # resource version, by the watch; turns begun before
        self._suspects: dict[Key, tuple[int, float]] = {}  # resource version that the watch owes, since when
        self.last_s = now()

    def delivered(self, key: Key, resource_version: str) -> None:
        """The watch has delivered this service. A name's former holder may be spoken of after its next one."""
        with self._lock:
            version = max(int(resource_version), self._delivered.get(key, (0, 0))[0])
            self._delivered[key] = version, self._turns
            if self._suspects.get(key, (version, 0.0))[0] <= version:
                self._suspects.pop(key, None)

    def known(self) -> list[Key]:
        """All services that the watch or a list has shown."""
        with self._lock:
            return list({**self._delivered, **self._suspects})

    def dead_watch(self) -> str | None:
        """Which change a watch has owed for too long; None while all is well."""
        with self._lock:
            for key, (version, since_s) in self._suspects.items():
                if self._now() - since_s > WATCH_GRACE_S:
                    return f"the watch has not delivered {key} at resource version {version}"
        return None

    def ask_again(self) -> None:
        """Ask for each service that the watch has owed for a while: one that was deleted before the watch began is never shown."""
        with self._lock:
            overdue = [
                key for key, (_, since_s) in self._suspects.items() if self._now() - since_s > ASK_AGAIN_S
            ]
        for key in overdue:
            try:
                if self._kube.get(kinds.SERVICE, key.namespace, key.name) is not None:
                    continue
            except KubeError as error:
                logger.warning("a service cannot be asked for", extra={"error": str(error)})
                return
            with self._lock:
                self._delivered.pop(key, None)
                self._suspects.pop(key, None)
            self._enqueue(key, 0.0)

    def once(self, spread_s: float = 0.0) -> None:
        """List, compare and enqueue. Raises KubeError. What the watch says while the list is on its way is newer than the list."""
        with self._lock:
            self._turns += 1
        mark = self._index.mark()
        runs = [run for place in self._places for run in self._kube.list(kinds.RUN, place)]
        self._index.replace(runs, mark)
        services = [item for place in self._places for item in self._kube.list(kinds.SERVICE, place)]
        found: dict[Key, int] = {}
        for item in services:
            metadata = item["metadata"]
            found[Key(metadata["namespace"], metadata["name"])] = int(metadata["resourceVersion"])
        now = self._now()
        with self._lock:
            for key, version in found.items():
                # The watch may be ahead of the list: it told of a change while the list was on its way.
                if self._delivered.get(key, (0, 0))[0] < version:
                    self._suspects.setdefault(key, (version, now))
            new = {key for key, (_, turns) in self._delivered.items() if turns == self._turns}
            gone = {*self._delivered, *self._suspects} - set(found) - new
            for key in gone:
                self._delivered.pop(key, None)
                self._suspects.pop(key, None)
        # One that went between a list and the first word of the watch is deleted without any event: its look forgets it, and what
        # the watch owes of it. A run of a service that does not exist gets a look too: somebody has to say so.
        keys = {*found, *gone} | {Key(run["metadata"]["namespace"], run["spec"]["service"]) for run in runs}
        for key in keys:
            self._enqueue(key, random.uniform(0, spread_s))
        self.last_s = now
        self._on_done()

    def turn(self) -> float | None:
        """As `once`, with looks spread over time → seconds to the next turn when it failed."""
        try:
            self.once(spread_s=self._period_s * _SPREAD)
        except KubeError as error:
            logger.warning("resync failed", extra={"error": str(error)})
            return min(RETRY_S, self._period_s)
        return None
