"""Objects of the Prometheus operator for one service: which are wanted, what is to be changed, and what the status says of them. Pure.

They are no part of serving: whatever is wrong with them is said in a condition of its own and holds nothing up. Used by
`plan.cluster`; `cluster.monitors` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trimtab_operator import names
from trimtab_operator.api.service import InferenceService, Monitor
from trimtab_operator.plan import alerts, children
from trimtab_operator.plan.objects import Manifest, child

GROUP, VERSION = "monitoring.coreos.com", "v1"
POD_MONITOR, PROMETHEUS_RULE = "PodMonitor", "PrometheusRule"
SCRAPE_INTERVAL = "15s"


class Verdict(NamedTuple):
    """Condition MonitoringReady."""

    met: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Monitors:
    """What is there. `kinds`: those that the API server has; `problem`: what went wrong with reading or writing; `unknown`: why it
    cannot be found out which kinds there are, so that `kinds` is of before."""

    kinds: frozenset[str] = frozenset()
    live: Mapping[children.Key, Mapping[str, Any]] = field(default_factory=dict)
    problem: Verdict | None = None
    unknown: Verdict | None = None


def possible(service: str) -> tuple[children.Key, ...]:
    """Both objects that a service may have."""
    return (POD_MONITOR, names.pod_monitor(service)), (PROMETHEUS_RULE, names.prometheus_rule(service))


def pod_monitor(service: InferenceService) -> Manifest:
    """Scrapes every engine pod, by its serving port: that one answers `/metrics` without a key."""
    built = _labelled(
        child(service, f"{GROUP}/{VERSION}", POD_MONITOR, names.pod_monitor(service.name)),
        service.spec.monitoring.pod_monitor,
    )
    built["spec"] = {
        "selector": {"matchLabels": names.selector(service.name)},
        "podTargetLabels": [names.LABEL_SERVICE],
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": SCRAPE_INTERVAL}],
    }
    return built


def prometheus_rule(service: InferenceService) -> Manifest:
    """The alerts."""
    built = _labelled(
        child(service, f"{GROUP}/{VERSION}", PROMETHEUS_RULE, names.prometheus_rule(service.name)),
        service.spec.monitoring.prometheus_rule,
    )
    built["spec"] = {"groups": alerts.groups(service)}
    return built


def manifests(service: InferenceService, kinds: frozenset[str]) -> list[Manifest]:
    """What is wanted, as far as the API server knows the kind."""
    monitoring = service.spec.monitoring
    built = []
    if POD_MONITOR in kinds and monitoring.pod_monitor.enabled is not False:
        built.append(pod_monitor(service))
    if PROMETHEUS_RULE in kinds and monitoring.prometheus_rule.enabled is not False:
        built.append(prometheus_rule(service))
    return built


def changes(service: InferenceService, found: Monitors) -> children.Changes:
    """What to apply and delete."""
    return children.changes(service, manifests(service, found.kinds), found.live)


def verdict(service: InferenceService, found: Monitors, decided: children.Changes) -> Verdict | None:
    """None where nothing is wanted."""
    if found.problem is not None:
        return found.problem
    if decided.taken:
        return Verdict(False, names.NAME_TAKEN, "; ".join(map(str, decided.taken)))
    monitoring = service.spec.monitoring
    asked = {POD_MONITOR: monitoring.pod_monitor, PROMETHEUS_RULE: monitoring.prometheus_rule}
    missing = [kind for kind, monitor in asked.items() if monitor.enabled and kind not in found.kinds]
    if missing and found.unknown is not None:
        return found.unknown
    if missing:
        message = f"the API server has no {' and no '.join(missing)} ({GROUP}/{VERSION}), which spec.monitoring enables"
        return Verdict(False, names.KIND_NOT_FOUND, message)
    wanted = [manifest["kind"] for manifest in manifests(service, found.kinds)]
    return Verdict(True, names.AS_EXPECTED, f"{', '.join(wanted)} exist") if wanted else None


def _labelled(built: Manifest, monitor: Monitor) -> Manifest:
    """With the labels by which somebody's Prometheus selects it; ours say whose it is, and win."""
    built["metadata"]["labels"] = {**monitor.labels, **built["metadata"]["labels"]}
    return built
