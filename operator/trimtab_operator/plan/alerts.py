"""The alerts of one service as Prometheus rules, made from its SLO. Pure; used by `monitors`.

Series are selected by the customary labels `namespace` and `pod`, which every monitor of the Prometheus operator sets, so the alerts
work with any scrape of the engines. `docs/metrics.md` says what the series mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_operator import names
from trimtab_operator.api.service import InferenceService, ResolvedClass

Json = dict[str, Any]
INTERVAL = "30s"


@dataclass(frozen=True, slots=True)
class Burn:
    """One alert on the error budget: spent `rate` times as fast as would last the SLO's period, over both windows."""

    rate: float
    long: str
    short: str
    severity: str


#: Google, The Site Reliability Workbook, chapter 5, table 5-8: 2 % of a 30-day budget in an hour, 5 % in six, 10 % in three days.
#: The short window, a twelfth of the long one, ends the alert soon after the trouble has ended.
BURNS = (
    Burn(14.4, "1h", "5m", "critical"),
    Burn(6.0, "6h", "30m", "critical"),
    Burn(1.0, "3d", "6h", "warning"),
)
#: With a low objective a multiple of the budget exceeds 100 %, which no share reaches: nine in ten always counts as burning.
MAX_SHARE = 0.9
#: Over fewer requests one bad one would be an alert.
MIN_REQUESTS = 30
_GAP = (20.0, 10.0)  # times the largest ITL target, and at least seconds
_WAIT = (10.0, 30.0)  # times the largest TTFT target, and at least seconds


def groups(service: InferenceService) -> list[Json]:
    """`spec.groups` of a PrometheusRule; all alerts have labels severity, namespace and inferenceservice."""
    classes = service.spec.slo.resolved_classes()
    rules = [*_burns(service, classes), *_starvation(service, classes)]
    if service.spec.wanted_replicas > 0:
        rules += _absence(service)
    return [{"name": f"trimtab-{service.namespace}-{service.name}", "interval": INTERVAL, "rules": rules}]


def _rule(
    service: InferenceService,
    name: str,
    expression: str,
    severity: str,
    summary: str,
    description: str,
    for_: str | None = None,
) -> Json:
    built: Json = {
        "alert": name,
        "expr": expression,
        "labels": {"severity": severity, "namespace": service.namespace, "inferenceservice": service.name},
        "annotations": {"summary": summary, "description": description},
    }
    if for_ is not None:
        built["for"] = for_
    return built


def _pods(service: InferenceService) -> str:
    """Labels of the service's engine pods: a Deployment's pods have its name and two parts more. So may have those of a shadow, when
    its run is called as the Deployment is and the long name is cut."""
    deployment = names.deployment(service.name)
    pod = f'pod=~"{deployment}-[a-z0-9]+-[a-z0-9]+",pod!~"{names.shadow(deployment)}-.*"'
    return f'namespace="{service.namespace}",{pod}'


def _burns(service: InferenceService, classes: Sequence[ResolvedClass]) -> list[Json]:
    by_objective: dict[float, list[str]] = defaultdict(list)
    for slo_class in classes:
        by_objective[slo_class.objective].append(slo_class.name)
    found = []
    for objective, listed in by_objective.items():
        named = "|".join(listed).replace(".", "[.]")
        series = f'trimtab_slo_requests_total{{{_pods(service)},slo_class=~"{named}"'
        for burn in BURNS:
            limit = f"{min(burn.rate * (100 - objective) / 100, MAX_SHARE):.6g}"
            expression = "\nand\n".join(
                (
                    f"{_share(series, burn.long)} > {limit}",
                    f"{_share(series, burn.short)} > {limit}",
                    f"sum by (slo_class, slo) (increase({series}}}[{burn.long}])) >= {MIN_REQUESTS}",
                )
            )
            found.append(
                _rule(
                    service,
                    "TrimtabSLOBurn",
                    expression,
                    burn.severity,
                    f"{service.name} misses its {{{{ $labels.slo }}}} target too often",
                    f"{{{{ $value | humanizePercentage }}}} of the requests of class {{{{ $labels.slo_class }}}} missed their "
                    f"{{{{ $labels.slo }}}} target over {burn.long}, and more than {limit} of all over {burn.short}. The "
                    f"objective is {objective:g} % met.",
                )
            )
            found[-1]["labels"]["window"] = burn.long
    return found


def _share(series: str, window: str) -> str:
    """Share of requests that violated their target; nothing, not 0, without requests."""
    by = "sum by (slo_class, slo)"
    return f'{by} (rate({series},outcome="violated"}}[{window}])) / {by} (rate({series}}}[{window}]))'


def _starvation(service: InferenceService, classes: Sequence[ResolvedClass]) -> list[Json]:
    """What histograms learn too late: a stream that stands still, a request that never begins."""
    factor, least = _GAP
    gap_s = max(least, factor * max(c.itl_s for c in classes))
    factor, least = _WAIT
    wait_s = max(least, factor * max(c.ttft_s for c in classes))
    return [
        _rule(
            service,
            "TrimtabLongTokenGap",
            f"max by (pod) (trimtab_longest_token_gap_seconds{{{_pods(service)}}}) > {gap_s:g}",
            "warning",
            f"Answers of {service.name} stand still",
            f"For a minute some answer of {{{{ $labels.pod }}}} has waited for its next token for more than {gap_s:g} s "
            "(now {{ $value | humanizeDuration }}).",
            for_="1m",
        ),
        _rule(
            service,
            "TrimtabLongWait",
            f"max by (pod) (trimtab_oldest_waiting_seconds{{{_pods(service)}}}) > {wait_s:g}",
            "warning",
            f"Requests to {service.name} do not begin",
            f"For a minute some request to {{{{ $labels.pod }}}} has waited for its first token for more than {wait_s:g} s "
            "(now {{ $value | humanizeDuration }}).",
            for_="1m",
        ),
    ]


def _absence(service: InferenceService) -> list[Json]:
    """Two views of the same: the first needs kube-state-metrics and is silent without it, the second needs the scrape alone, and
    counts a pod that loads its model as there."""
    deployment = f'namespace="{service.namespace}",deployment="{names.deployment(service.name)}"'
    return [
        _rule(
            service,
            "TrimtabNoReadyReplica",
            f"kube_deployment_status_replicas_ready{{{deployment}}} == 0",
            "critical",
            f"{service.name} serves nobody",
            f"No replica of {service.namespace}/{service.name} has been ready for five minutes, by kube-state-metrics.",
            for_="5m",
        ),
        _rule(
            service,
            "TrimtabNotScraped",
            f"absent(up{{{_pods(service)}}} == 1)",
            "critical",
            f"No engine of {service.name} answers Prometheus",
            f"No pod of {service.namespace}/{service.name} was scraped for five minutes: none runs, or a NetworkPolicy or the "
            "monitor's labels keep Prometheus away. No other alert of this service can fire meanwhile.",
            for_="5m",
        ),
    ]
