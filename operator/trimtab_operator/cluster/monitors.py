"""Finds out whether the API server has the Prometheus operator's kinds, and reads and writes a service's objects of them.

Discovery is readable by every account, unless somebody has taken that away; it is asked again now and then, since the CRDs may come
and go while the operator runs. Nothing that goes wrong here holds a service up: not a refusal, nor an API server or an admission webhook
of those kinds that fails; each request is tried once. Used by `observe` and `reconcile`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InferenceService
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Conflict, Denied, Kube, KubeError, NotFound, NotLeading, Refused
from trimtab_operator.cluster.store import Key
from trimtab_operator.plan import children, monitors
from trimtab_operator.plan.monitors import Monitors, Verdict

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0
AFTER_TROUBLE_S = 60.0  # before a service's objects are asked for again where that has failed
_WHAT = f"whether the API server has {monitors.GROUP}/{monitors.VERSION} cannot be found out"


class MonitorKinds:
    """Which of the kinds there are, as far as it can be found out. Thread-safe; never raises KubeError."""

    def __init__(self, kube: Kube, now: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._now = now
        self._lock = threading.Lock()
        self._found: frozenset[str] = frozenset()
        self._unknown: Verdict | None = None
        self._known = False  # ever
        self._asked_s = float("-inf")

    def found(self) -> tuple[frozenset[str], Verdict | None]:
        """→ those known of last, and why no newer answer is had. Asked for every `ASK_AGAIN_S`, by one look while others go on."""
        with self._lock:
            if self._now() - self._asked_s < ASK_AGAIN_S:
                return self._found, self._unknown
            self._asked_s = self._now()
            if not self._known:
                self._known = True
                self._ask()
                return self._found, self._unknown
        self._ask()
        return self._found, self._unknown

    def _ask(self) -> None:
        try:
            served = self._kube.served_kinds(monitors.GROUP, monitors.VERSION)
        except KubeError as error:
            if self._unknown is None:
                logger.warning(_WHAT, extra={"error": str(error)})
            self._unknown = Verdict(False, _reason(error), f"{_WHAT}: {error}")
        else:
            self._found = served & {monitors.POD_MONITOR, monitors.PROMETHEUS_RULE}
            self._unknown = None

    def forget(self) -> None:
        """Ask again at the next look: a kind was not there any more."""
        with self._lock:
            self._asked_s = float("-inf")


class MonitorObjects:
    """The objects of one service at a time. What was read is kept until something speaks against it: they are not watched, and a
    look that finds nothing to do shall ask for nothing. Thread-safe."""

    def __init__(self, kube: Kube, now: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube.once()
        self._kinds = MonitorKinds(self._kube, now)
        self._now = now
        self._lock = threading.Lock()
        #: Until when nothing is asked for a service, and why.
        self._held_off: dict[Key, tuple[float, Verdict]] = {}
        #: UID and generation of the service, and what there was.
        self._known: dict[Key, tuple[tuple[str, int], Monitors]] = {}

    def read(self, service: InferenceService, *, fresh: bool) -> Monitors:
        """What there is for a service; read anew when `fresh`, when its spec or the kinds have changed, and after trouble."""
        present, unknown = self._kinds.found()
        key = Key(service.namespace, service.name)
        state = service.metadata.uid, service.metadata.generation
        with self._lock:
            known = self._known.get(key)
            until_s, trouble = self._held_off.get(key, (float("-inf"), None))
        if self._now() < until_s:
            return Monitors(problem=trouble)
        if not fresh and known is not None and known[0] == state and known[1].kinds == present:
            return known[1] if known[1].unknown == unknown else replace(known[1], unknown=unknown)
        found = replace(self._read(present, key), unknown=unknown)
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
            self._held_off.pop(key, None)

    def _read(self, present: frozenset[str], key: Key) -> Monitors:
        live: dict[children.Key, Mapping[str, Any]] = {}
        for kind, child in monitors.possible(key.name):
            if kind not in present:
                continue
            try:
                found = self._kube.get(kinds.BY_NAME[kind], key.namespace, child)
            except KubeError as error:
                return Monitors(problem=self._trouble(key, error))
            if found is not None:
                live[(kind, child)] = found
        return Monitors(present, live)

    def write(self, service: InferenceService, changes: children.Changes) -> Verdict | None:
        """Carry `changes` out → what went wrong, None when nothing did."""
        problem: Verdict | None = None
        key = Key(service.namespace, service.name)
        if changes.apply or changes.delete:
            self.forget(key)
        for manifest in changes.apply:
            problem = self._attempt(key, partial(self._kube.apply, manifest)) or problem
        for live in changes.delete:
            problem = self._attempt(key, partial(self._delete, service.namespace, live)) or problem
        return problem

    def _delete(self, namespace: str, live: Mapping[str, Any]) -> None:
        metadata = live["metadata"]
        self._kube.delete(kinds.BY_NAME[live["kind"]], namespace, metadata["name"], metadata["uid"])

    def _attempt(self, key: Key, act: Callable[[], object]) -> Verdict | None:
        try:
            act()
        except Conflict:
            return None  # somebody was faster; the next look judges what is there now
        except NotLeading:
            raise
        except KubeError as error:
            if isinstance(error, NotFound):
                self._kinds.forget()
            return self._trouble(key, error)
        return None

    def _trouble(self, key: Key, error: KubeError) -> Verdict:
        """What it comes to. What may take its time to fail is not tried again in each look."""
        found = Verdict(False, _reason(error), str(error))
        if not isinstance(error, (Refused, Denied, NotFound)):
            with self._lock:
                self._held_off[key] = (self._now() + AFTER_TROUBLE_S, found)
        return found


def _reason(error: KubeError) -> str:
    reasons = {Refused: names.INVALID_SPEC, Denied: names.API_DENIED, NotFound: names.KIND_NOT_FOUND}
    return next((why for kind, why in reasons.items() if isinstance(error, kind)), names.API_UNAVAILABLE)
