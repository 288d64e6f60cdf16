"""The operator's own metrics, and what `/healthz` is judged by. One registry per process; thread-safe."""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from trimtab_operator import names
from trimtab_operator.api.status import ServiceStatus
from trimtab_operator.cluster.engines import EngineRefused, EngineUnreachable
from trimtab_operator.cluster.observe import Key


class OperatorMetrics:
    """All series of `trimtab_operator_*`. None has a label with a service's name: a fleet's series stay few."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._ready: dict[Key, str] = {}
        self._counts = True
        registry = self.registry
        self.reconciles = Counter(
            "trimtab_operator_reconcile",
            "Reconciles by result (ok, retried, failed)",
            ["result"],
            registry=registry,
        )
        self.reconcile_seconds = Histogram(
            "trimtab_operator_reconcile_duration_seconds",
            "Time of one reconcile",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.requests = Counter(
            "trimtab_operator_api_requests", "Requests to the API server; code 0 had no answer", ["verb", "kind", "code"],
            registry=registry,
        )  # fmt: skip
        self.pushes = Counter(
            "trimtab_operator_live_pushes",
            "Live documents pushed to engines, by result",
            ["result"],
            registry=registry,
        )
        self.queue = Gauge(
            "trimtab_operator_queue_length", "Services that wait for a reconcile", registry=registry
        )
        self.leading = Gauge("trimtab_operator_leading", "1 while this process may write", registry=registry)
        self.last_event = Gauge(
            "trimtab_operator_last_event_timestamp_seconds",
            "When a watch last delivered something",
            registry=registry,
        )
        self.last_resync = Gauge(
            "trimtab_operator_last_resync_timestamp_seconds",
            "When all services were last listed",
            registry=registry,
        )
        self.refused = Gauge(
            "trimtab_operator_namespace_refused",
            "1 while the API server refuses to list services or runs there",
            ["namespace"],
            registry=registry,
        )
        self.services = Gauge(
            "trimtab_operator_services",
            "Services by reason of condition Ready",
            ["reason"],
            registry=registry,
        )

    def request(self, verb: str, kind: str, code: int) -> None:
        """One request to the API server."""
        self.requests.labels(verb, kind, str(code)).inc()

    def pushed(self, answer: object) -> None:
        """One engine that was told something."""
        result = "ok"
        if isinstance(answer, EngineRefused):
            result = "refused"
        elif isinstance(answer, EngineUnreachable):
            result = "unreachable"
        self.pushes.labels(result).inc()

    def event(self) -> None:
        """A watch delivered something."""
        self.last_event.set(time.time())

    def status(self, key: Key, status: ServiceStatus) -> None:
        """A service's status as it is now."""
        ready = status.condition(names.READY)
        with self._lock:
            if not self._counts:
                return  # a last look, from before the Lease went
            self._ready[key] = ready.reason if ready is not None else "Unknown"

    def forget(self, key: Key) -> None:
        """A service that is gone."""
        with self._lock:
            self._ready.pop(key, None)

    def away(self, namespace: str | None, away: bool) -> None:
        """Whether nothing can be known of a namespace (None: of any). Its services are counted again once they are looked at."""
        self.refused.labels(namespace or "all").set(away)
        if away:
            with self._lock:
                for key in [key for key in self._ready if namespace in (None, key.namespace)]:
                    del self._ready[key]

    def leads(self, leading: bool) -> None:
        """Whether this process may write. One that may not speaks of no service: it would count again what the leader counts."""
        self.leading.set(leading)
        with self._lock:
            self._counts = leading
            if not leading:
                self._ready.clear()

    def render(self) -> bytes:
        """Exposition text."""
        with self._lock:
            tally = Tally(self._ready.values())
            self.services.clear()
            for reason, count in tally.items():
                self.services.labels(reason).set(count)
        return generate_latest(self.registry)
