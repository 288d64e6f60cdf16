"""Finds out whether the API server has the Prometheus operator's kinds, and reads and writes a service's objects of them.

Discovery is readable by every account, so no right is needed to find out; it is asked again now and then, since the CRDs may come
and go while the operator runs. Nothing that goes wrong here holds a service up. Used by `observe` and `reconcile`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InferenceService
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Conflict, Denied, Kube, KubeError, NotFound, Refused
from trimtab_operator.cluster.store import Key
from trimtab_operator.plan import children, monitors
from trimtab_operator.plan.monitors import Monitors, Verdict

ASK_AGAIN_S = 30.0


class MonitorKinds:
    """Which of the kinds there are. Thread-safe."""

    def __init__(self, kube: Kube, now: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._now = now
        self._lock = threading.Lock()
        self._found: frozenset[str] = frozenset()
        self._asked_s = float("-inf")

    def found(self) -> frozenset[str]:
        """At most `ASK_AGAIN_S` old. Raises KubeError."""
        with self._lock:
            if self._now() - self._asked_s >= ASK_AGAIN_S:
                served = self._kube.served_kinds(monitors.GROUP, monitors.VERSION)
                self._found = served & {monitors.POD_MONITOR, monitors.PROMETHEUS_RULE}
                self._asked_s = self._now()
            return self._found

    def forget(self) -> None:
        """Ask again at the next look: a kind was not there any more."""
        with self._lock:
            self._asked_s = float("-inf")


class MonitorObjects:
    """The objects of one service at a time. What was read is kept until something speaks against it: they are not watched, and a
    look that finds nothing to do shall ask for nothing. Thread-safe."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._kinds = MonitorKinds(kube)
        self._lock = threading.Lock()
        #: UID and generation of the service, and what there was.
        self._known: dict[Key, tuple[tuple[str, int], Monitors]] = {}

    def read(self, service: InferenceService, *, fresh: bool) -> Monitors:
        """What there is for a service; read anew when `fresh`, when its spec or the kinds have changed, and after trouble. Raises
        KubeError when the API server cannot be used."""
        present = self._kinds.found()
        key = Key(service.namespace, service.name)
        state = service.metadata.uid, service.metadata.generation
        with self._lock:
            known = self._known.get(key)
        if not fresh and known is not None and known[0] == state and known[1].kinds == present:
            return known[1]
        found = self._read(present, service.namespace, service.name)
        with self._lock:
            if found.problem is None:
                self._known[key] = (state, found)
            else:
                self._known.pop(key, None)
        return found

    def forget(self, key: Key) -> None:
        """Read anew at the next look; or the service is gone."""
        with self._lock:
            self._known.pop(key, None)

    def _read(self, present: frozenset[str], namespace: str, name: str) -> Monitors:
        live: dict[children.Key, Mapping[str, Any]] = {}
        for kind, child in monitors.possible(name):
            if kind not in present:
                continue
            try:
                found = self._kube.get(kinds.BY_NAME[kind], namespace, child)
            except Denied as error:
                return Monitors(frozenset(), {}, Verdict(False, names.API_DENIED, str(error)))
            if found is not None:
                live[(kind, child)] = found
        return Monitors(present, live)

    def write(self, service: InferenceService, changes: children.Changes) -> Verdict | None:
        """Carry `changes` out → what went wrong, None when nothing did."""
        problem: Verdict | None = None
        if changes.apply or changes.delete:
            self.forget(Key(service.namespace, service.name))
        for manifest in changes.apply:
            problem = self._attempt(partial(self._kube.apply, manifest)) or problem
        for live in changes.delete:
            problem = self._attempt(partial(self._delete, service.namespace, live)) or problem
        return problem

    def _delete(self, namespace: str, live: Mapping[str, Any]) -> None:
        metadata = live["metadata"]
        self._kube.delete(kinds.BY_NAME[live["kind"]], namespace, metadata["name"], metadata["uid"])

    def _attempt(self, act: Callable[[], object]) -> Verdict | None:
        reasons: dict[type[KubeError], str] = {
            Refused: names.INVALID_SPEC,
            Denied: names.API_DENIED,
            NotFound: names.KIND_NOT_FOUND,
        }
        try:
            act()
        except Conflict:
            return None  # somebody was faster; the next look judges what is there now
        except (Refused, Denied, NotFound) as error:
            if isinstance(error, NotFound):
                self._kinds.forget()
            return Verdict(False, reasons[type(error)], str(error))
        return None
