"""Records events on resources, each at most once in a while: the API server must not drown in a state that repeats.

Called by `reconcile` from worker threads. A failed event is logged and holds nothing up; who comes with it again may write it then.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from trimtab_operator import names
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Conflict, Kube, KubeError
from trimtab_operator.plan.events import Happening
from trimtab_operator.plan.pods import rfc3339

logger = logging.getLogger(__name__)

REPEAT_AFTER_S = 600.0
BURST, REFILL_S = 20, 30.0  # per resource: so many at once, then one in this time
_REMEMBERED = 5_000
_MESSAGE_LIMIT = 1000  # of the API server, in bytes


class Recorder:
    """See the module."""

    def __init__(
        self,
        kube: Kube,
        instance: str,
        now: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._instance = instance
        self._now = now
        self._elapsed = elapsed  # for limits: the machine's clock may be set back
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()  # event name → last time, count
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # uid → tokens left, at

    def record(self, resource: Mapping[str, Any], happening: Happening) -> None:
        """Write it, count it up, or leave it out."""
        metadata = resource["metadata"]
        now = self._now()
        message = happening.message.encode()[:_MESSAGE_LIMIT].decode(errors="ignore")
        mark = hashlib.sha256(f"{metadata['uid']}\0{happening.reason}\0{message}".encode()).hexdigest()[:16]
        name = f"{metadata['name']}.{mark}"
        with self._lock:
            elapsed = self._elapsed()
            last, count = self._seen.get(name, (float("-inf"), 0))
            if elapsed - last < REPEAT_AFTER_S or not self._spend(metadata["uid"], elapsed):
                return
            self._seen[name] = (elapsed, count + 1)
            _trim(self._seen)
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": resource["apiVersion"],
                "kind": resource["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": happening.severity,
            "reason": happening.reason,
            "message": message,
            "firstTimestamp": rfc3339(now),
            "lastTimestamp": rfc3339(now),
            "count": count + 1,
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": self._instance,
        }
        try:
            self._write(event)
        except KubeError as error:
            with self._lock:
                self._seen[name] = (last, count)
            logger.warning("event lost", extra={"reason": happening.reason, "error": str(error)})

    def _write(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(Conflict):  # it was written before, by us or an operator before us
            self._kube.create(event)  # also again: the API server forgets events after an hour
            return
        metadata = event["metadata"]
        patch = {"count": event["count"], "lastTimestamp": event["lastTimestamp"]}
        self._kube.merge(kinds.EVENT, metadata["namespace"], metadata["name"], patch)

    def _spend(self, uid: str, now: float) -> bool:
        tokens, at = self._tokens.get(uid, (float(BURST), now))
        tokens = min(float(BURST), tokens + (now - at) / REFILL_S)
        spent = tokens >= 1
        self._tokens[uid] = (tokens - 1 if spent else tokens, now)
        _trim(self._tokens)
        return spent


def _trim(table: OrderedDict[str, Any]) -> None:
    while len(table) > _REMEMBERED:
        table.popitem(last=False)
