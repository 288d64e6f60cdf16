"""Reads everything about one service, fresh: its resource, children, pods, runs, and what its engines say of themselves.

Used by `reconcile`. Nothing is taken from a cache or from the event that asked for the look: events only say that something
happened, and may be late or lost.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trimtab_operator import names
from trimtab_operator.api import InferenceService, InvalidRun, TuningRun, read_run
from trimtab_operator.api.status import ServiceStatus
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.engines import Engines
from trimtab_operator.cluster.kube import Kube
from trimtab_operator.errors import InvalidResource
from trimtab_operator.plan import children, pods
from trimtab_operator.plan.cluster import Observed

Json = dict[str, Any]


class Key(NamedTuple):
    """A service's place."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class RunIndex:
    """Which TuningRuns name which service: the one thing that labels cannot select. Thread-safe; the runs are read fresh."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[Key, set[str]] = defaultdict(set)

    def put(self, run: Mapping[str, Any]) -> Key:
        """Note a run → the service that it is about."""
        metadata = run["metadata"]
        key = Key(metadata["namespace"], run["spec"]["service"])
        with self._lock:
            self._runs[key].add(metadata["name"])
        return key

    def drop(self, run: Mapping[str, Any]) -> Key:
        """Forget a run."""
        metadata = run["metadata"]
        key = Key(metadata["namespace"], run["spec"]["service"])
        with self._lock:
            self._runs[key].discard(metadata["name"])
            if not self._runs[key]:
                del self._runs[key]
        return key

    def names(self, key: Key) -> list[str]:
        """Names of a service's runs."""
        with self._lock:
            return sorted(self._runs.get(key, ()))

    def replace(self, runs: Iterable[Mapping[str, Any]]) -> None:
        """Start over from a list of all runs."""
        fresh: dict[Key, set[str]] = defaultdict(set)
        for run in runs:
            fresh[Key(run["metadata"]["namespace"], run["spec"]["service"])].add(run["metadata"]["name"])
        with self._lock:
            self._runs = fresh


class Observer:
    """See the module."""

    def __init__(self, kube: Kube, engines: Engines, index: RunIndex) -> None:
        self._kube = kube
        self._engines = engines
        self._index = index

    def resource(self, key: Key) -> Json | None:
        """The InferenceService as it is now."""
        return self._kube.get(kinds.SERVICE, key.namespace, key.name)

    def runs(self, key: Key) -> tuple[TuningRun | InvalidRun, ...]:
        """All TuningRuns of a service."""
        found = (self._kube.get(kinds.RUN, key.namespace, name) for name in self._index.names(key))
        return tuple(read_run(run) for run in found if run is not None)

    def everything(
        self,
        service: InferenceService,
        previous: ServiceStatus,
        refusals: Mapping[str, tuple[int, str]],
    ) -> Observed:
        """`refusals` by pod UID: what engines have refused before."""
        key = Key(service.namespace, service.name)
        live: dict[children.Key, Json] = {}
        for kind, name in children.possible(service.name):
            found = self._kube.get(kinds.BY_NAME[kind], key.namespace, name)
            if found is not None:
                live[(kind, name)] = found
        listed = self._kube.list(kinds.POD, key.namespace, names.selector(service.name))
        reachable = {pod["metadata"]["name"]: pod for pod in listed if pods.admin_reachable(pod)}
        by_name = {
            pod["metadata"]["name"]: refusals[pod["metadata"]["uid"]]
            for pod in listed
            if pod["metadata"]["uid"] in refusals
        }
        runs = self.runs(key)
        return Observed(
            service=service,
            previous=previous,
            children=live,
            pods=tuple(listed),
            runs=tuple(run for run in runs if isinstance(run, TuningRun)),
            invalid_runs=tuple(run for run in runs if isinstance(run, InvalidRun)),
            read_backs=self._engines.read_backs(reachable),
            refusals=by_name,
        )


def previous_status(resource: Mapping[str, Any]) -> ServiceStatus:
    """The status that the resource carries; an unreadable one (a newer or older operator's) counts as none."""
    try:
        return ServiceStatus.from_json(resource.get("status") or {})
    except InvalidResource:
        return ServiceStatus()
