"""Looks at every service once in a while, whatever the watches say, and finds out when a watch has died.

`main` calls `turn` in a thread of its own, first after one period, and `retry` in another. Lists all services and runs, one namespace after the
other; each service gets a look, spread over time. What goes wrong in one namespace concerns that one alone (`places`). A change that
a list shows and the watch has not delivered a while later means that the watch is dead although its process lives.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Kube, KubeError
from trimtab_operator.cluster.observe import Key, RunIndex
from trimtab_operator.cluster.places import Place, Places, refused

logger = logging.getLogger(__name__)

RETRY_S = 5.0
#: From a list that shows a change to the watch's delivery of it; a watch that has fallen silent reopens by itself after 70 s.
WATCH_GRACE_S = 120.0
ASK_AGAIN_S = WATCH_GRACE_S / 2
_SPREAD = 0.5  # of the period, over which looks are spread


class Resync:
    """See the module."""

    def __init__(
        self,
        kube: Kube,
        places: Places,
        index: RunIndex,
        enqueue: Callable[[Key, float], None],
        period_s: float,
        on_done: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._places = places
        self._index = index
        self._enqueue = enqueue
        self._period_s = period_s
        self._on_done = on_done
        self._now = now
        self._lock = threading.Lock()
        self._lists = 0
        # Resource versions of one object are integers that grow.
        self._delivered: dict[Key, tuple[int, int]] = {}  # resource version, by the watch; lists begun before
        self._suspects: dict[Key, tuple[int, float]] = {}  # resource version that the watch owes, since when
        self.last_s = now()

    def delivered(self, key: Key, resource_version: str) -> None:
        """The watch has delivered this service. A name's former holder may be spoken of after its next one."""
        with self._lock:
            version = max(int(resource_version), self._delivered.get(key, (0, 0))[0])
            self._delivered[key] = version, self._lists
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

    def overdue(self) -> list[Key]:
        """Services that the watch has owed for a while."""
        with self._lock:
            return [
                key for key, (_, since_s) in self._suspects.items() if self._now() - since_s > ASK_AGAIN_S
            ]

    def postpone(self, place: Place) -> None:
        """The watch may not be open there: what it owes counts from now."""
        now = self._now()
        with self._lock:
            for key, (version, _) in self._suspects.items():
                if place in (None, key.namespace):
                    self._suspects[key] = (version, now)

    def ask_again(self) -> None:
        """Ask for each service that the watch has owed for a while: one that was deleted before the watch began is never shown."""
        for key in self.overdue():
            if self._places.away(key.namespace):
                continue
            try:
                if self._kube.get(kinds.SERVICE, key.namespace, key.name) is not None:
                    continue
            except KubeError as error:
                logger.warning("a service cannot be asked for", extra={"error": str(error)})
                if refused(error):
                    self._places.doubt(key.namespace)
                    continue
                return
            with self._lock:
                self._delivered.pop(key, None)
                self._suspects.pop(key, None)
            self._enqueue(key, 0.0)

    def once(self, spread_s: float = 0.0) -> None:
        """List everywhere, compare and enqueue. Raises KubeError when the API server answers nowhere, or knows not the kinds."""
        answered, last, silent = False, None, 0
        for place in self._places.all:
            try:
                self._list(place, spread_s)
                answered = True
            except KubeError as error:
                self._places.failed(place, error)
                answered, last = answered or refused(error), error
                silent = silent + 1 if error.status is None else 0
                if silent == 2:
                    break  # one that does not answer may have a reason of its own, two have none
        if not answered and last is not None:
            raise last
        self.last_s = self._now()
        self._on_done()

    def retry(self) -> None:
        """List the namespaces whose turn it is after trouble in them; who may be looked at again is looked at at once."""
        for place in self._places.due():
            try:
                self._list(place, 0.0)
            except KubeError as error:
                self._places.failed(place, error)
                if error.status is None:
                    return  # the others would wait for as long; their turn comes

    def turn(self) -> float | None:
        """As `once`, with looks spread over time → seconds to the next turn when it failed."""
        try:
            self.once(spread_s=self._period_s * _SPREAD)
        except KubeError as error:
            logger.warning("resync failed", extra={"error": str(error)})
            return min(RETRY_S, self._period_s)
        return None

    def _list(self, place: Place, spread_s: float) -> None:
        """One place. What the watch says while the list is on its way is newer than the list. Raises KubeError."""
        with self._lock:
            self._lists += 1
            began = self._lists
        mark = self._index.mark()
        runs = self._kube.list(kinds.RUN, place)
        services = self._kube.list(kinds.SERVICE, place)
        self._index.replace(runs, mark, place)
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
            new = {key for key, (_, lists) in self._delivered.items() if lists >= began}
            here = {key for key in (*self._delivered, *self._suspects) if place in (None, key.namespace)}
            gone = here - set(found) - new
            for key in gone:
                self._delivered.pop(key, None)
                self._suspects.pop(key, None)
        self._places.listed(place)
        # One that went between a list and the first word of the watch is deleted without any event: its look forgets it, and what
        # the watch owes of it. A run of a service that does not exist gets a look too: somebody has to say so.
        keys = {*found, *gone} | {Key(run["metadata"]["namespace"], run["spec"]["service"]) for run in runs}
        for key in keys:
            self._enqueue(key, random.uniform(0, spread_s))
