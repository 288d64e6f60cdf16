"""PodMonitor and PrometheusRule of a service: when they are made, and that the alerts say when they should, by promtool itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.prometheus import prometheus_binary
from support.services import service
from trimtab_engine.server.metrics import catalog
from trimtab_operator import names
from trimtab_operator.plan import monitors
from trimtab_operator.plan.monitors import Monitors, Verdict

Json = dict[str, Any]
BOTH = frozenset({"PodMonitor", "PrometheusRule"})
POD = 'namespace="default",pod="chat-engine-5d9c7b-x2x9k"'


def kinds(enabled: bool | None, present: frozenset[str]) -> list[str]:
    changes = {} if enabled is None else {"monitoring.podMonitor.enabled": enabled,
                                          "monitoring.prometheusRule.enabled": enabled}  # fmt: skip
    return [m["kind"] for m in monitors.manifests(service(**changes), present)]


def test_they_are_made_where_their_kinds_exist_unless_they_are_switched_off() -> None:
    assert kinds(None, BOTH) == ["PodMonitor", "PrometheusRule"]
    assert kinds(None, frozenset({"PodMonitor"})) == ["PodMonitor"]
    assert kinds(None, frozenset()) == []
    assert kinds(True, BOTH) == ["PodMonitor", "PrometheusRule"]
    assert kinds(False, BOTH) == []


def said(enabled: bool | None, found: Monitors) -> Verdict | None:
    changes = {} if enabled is None else {"monitoring.podMonitor.enabled": enabled}
    built = service(**changes)
    return monitors.verdict(built, found, monitors.changes(built, found))


def test_the_status_says_what_is_missing_only_to_those_who_asked_for_it() -> None:
    assert said(None, Monitors()) is None
    asked = said(True, Monitors())
    assert asked is not None
    assert (asked.met, asked.reason) == (False, names.KIND_NOT_FOUND)
    assert "no PodMonitor (monitoring.coreos.com/v1)" in asked.message
    there = said(None, Monitors(BOTH))
    assert there is not None
    assert (there.met, there.message) == (True, "PodMonitor, PrometheusRule exist")
    denied = Verdict(False, names.API_DENIED, "no")
    assert said(None, Monitors(BOTH, problem=denied)) == denied


def test_somebody_elses_object_is_left_alone_and_said() -> None:
    theirs = {"kind": "PodMonitor", "metadata": {"name": "chat-engine"}}
    found = Monitors(BOTH, {("PodMonitor", "chat-engine"): theirs})
    verdict = said(None, found)
    assert verdict is not None
    assert (verdict.met, verdict.reason) == (False, names.NAME_TAKEN)
    assert [m["kind"] for m in monitors.changes(service(), found).apply] == ["PrometheusRule"]


def test_the_pod_monitor_picks_the_services_pods_and_a_port_that_they_have() -> None:
    built = monitors.pod_monitor(service(**{"monitoring.podMonitor.labels": {"release": "prometheus"}}))
    assert built["spec"]["selector"]["matchLabels"] == names.selector("chat")
    assert built["metadata"]["labels"]["release"] == "prometheus"
    [endpoint] = built["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")


def test_a_users_label_cannot_take_the_object_away_from_its_service() -> None:
    labels = {names.LABEL_SERVICE: "other"}
    built = monitors.pod_monitor(service(**{"monitoring.podMonitor.labels": labels}))
    assert built["metadata"]["labels"][names.LABEL_SERVICE] == "chat"


def rules(**changes: Any) -> list[Json]:
    [group] = monitors.prometheus_rule(service(**changes))["spec"]["groups"]
    found: list[Json] = group["rules"]
    return found


def test_alerts_ask_only_for_series_that_engines_or_kube_state_metrics_have() -> None:
    ours = {family.name for family in catalog.CATALOG}
    asked = {name for rule in rules() for name in re.findall(r"(\w+)\{", rule["expr"])}
    assert asked - ours == {"up", "kube_deployment_status_replicas_ready"}


def test_every_objective_has_alerts_that_can_fire() -> None:
    for objective in (50.0, 90.0, 99.999):
        limits = [
            float(limit)
            for rule in rules(**{"slo.objective": objective})
            for limit in re.findall(r"\) > ([0-9.e-]+)", rule["expr"])
            if rule["alert"] == "TrimtabSLOBurn"
        ]
        assert len(limits) == 6
        assert all(0 < limit < 1 for limit in limits)


def test_classes_with_their_own_objective_have_their_own_alerts() -> None:
    classes = [{"name": "chat.fast", "objective": 99.9}, {"name": "batch", "ttft": "60s", "itl": "2s"}]
    found = [r["expr"] for r in rules(**{"slo.classes": classes}) if r["alert"] == "TrimtabSLOBurn"]
    assert len(found) == 6
    assert sum('slo_class=~"default|batch"' in expression for expression in found) == 3
    assert sum('slo_class=~"chat[.]fast"' in expression for expression in found) == 3


def test_nobody_is_told_that_a_suspended_service_has_no_replicas() -> None:
    assert {"TrimtabNoReadyReplica", "TrimtabNotScraped"} <= {r["alert"] for r in rules()}
    assert not {"TrimtabNoReadyReplica", "TrimtabNotScraped"} & {r["alert"] for r in rules(suspend=True)}


# By promtool


def promtool(tmp_path: Path, tests: list[Json], **changes: Any) -> None:
    """Check the rules' syntax, then run `tests` on them."""
    spec = monitors.prometheus_rule(service(**changes))["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    program = prometheus_binary("promtool")
    suite = {"rule_files": ["rules.yaml"], "evaluation_interval": "30s", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(suite))
    for words in (("check", "rules", "rules.yaml"), ("test", "rules", "tests.yaml")):
        done = subprocess.run(
            [program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def series(name: str, values: str, labels: str = POD) -> Json:
    return {"series": f"{name}{{{labels}}}", "values": values}


def slo(outcome: str, values: str, kind: str = "itl") -> Json:
    labels = f'{POD},slo_class="default",slo="{kind}",outcome="{outcome}",generation="1"'
    return series("trimtab_slo_requests_total", values, labels)


def firing(at: str, *alerts: tuple[str, str]) -> list[Json]:
    """Which of ours fire at that time: (name, severity), whatever their texts."""
    expression = (
        'sort_by_label(count by (alertname, severity) (ALERTS{alertstate="firing"}), "alertname", "severity")'
    )
    samples = [
        {"labels": f'{{alertname="{name}", severity="{severity}"}}', "value": 1} for name, severity in alerts
    ]
    expression = expression.removeprefix("sort_by_label(").removesuffix(', "alertname", "severity")')
    return [{"expr": f"{expression} > bool 0", "eval_time": at, "exp_samples": samples}]


UP = series("up", "1x2000")
BURNT = ("TrimtabSLOBurn", "critical")
SLOW = ("TrimtabSLOBurn", "warning")


@pytest.mark.parametrize(
    ("violated", "met", "alerts"),
    [
        # Requests of a minute: share of violations against an objective of 99 %.
        pytest.param("0+2x1600", "0+98x1600", (SLOW,), id="2 %: twice the budget"),
        pytest.param("0+8x1600", "0+92x1600", (BURNT, SLOW), id="8 %: six times"),
        pytest.param("0+0x1600", "0+100x1600", (), id="none"),
        pytest.param("0+0.5x1600", "0+99.5x1600", (), id="half the budget"),
    ],
)
def test_the_error_budgets_burn_rate_decides_about_severity(
    tmp_path: Path, violated: str, met: str, alerts: tuple[tuple[str, str], ...]
) -> None:
    content = [UP, slo("violated", violated), slo("met", met)]
    test = {"interval": "1m", "input_series": content, "promql_expr_test": firing("1500m", *alerts)}
    promtool(tmp_path, [test])


def test_an_alert_ends_soon_after_the_trouble_and_few_requests_are_none(tmp_path: Path) -> None:
    burst = [UP, slo("violated", "0+50x60 3000x600"), slo("met", "0+50x660")]
    few = [UP, slo("violated", "0 1 2 3x60"), slo("met", "0x63")]
    promtool(
        tmp_path,
        [
            {"interval": "1m", "input_series": burst, "promql_expr_test": firing("50m", BURNT, SLOW)},
            # Half an hour and five minutes later both short windows are clean.
            {"interval": "1m", "input_series": burst, "promql_expr_test": firing("100m", SLOW)},
            {"interval": "1m", "input_series": few, "promql_expr_test": firing("4m")},
        ],
    )


def test_stuck_answers_and_waiting_requests_are_alerts_after_a_minute(tmp_path: Path) -> None:
    gap = [UP, series("trimtab_longest_token_gap_seconds", "0+15x20")]
    wait = [UP, series("trimtab_oldest_waiting_seconds", "0+15x20")]
    promtool(
        tmp_path,
        [
            {"interval": "15s", "input_series": gap, "promql_expr_test": firing("45s")},
            {"interval": "15s", "input_series": gap,
             "promql_expr_test": firing("150s", ("TrimtabLongTokenGap", "warning"))},
            {"interval": "15s", "input_series": wait,
             "promql_expr_test": firing("150s", ("TrimtabLongWait", "warning"))},
        ],
        **{"slo.itl": "100ms", "slo.ttft": "1s"},
    )  # fmt: skip


def test_nobody_serving_is_an_alert_with_and_without_kube_state_metrics(tmp_path: Path) -> None:
    other = 'namespace="default",pod="chat-engine-b-engine-5d9c7b-x2x9k"'
    shadow = 'namespace="default",pod="chat-engine-shadow-5d9c7bx2x9k"'
    deployment = 'namespace="default",deployment="chat-engine"'
    replicas = series("kube_deployment_status_replicas_ready", "1x2 0x40", deployment)
    promtool(
        tmp_path,
        [
            {"interval": "1m", "input_series": [UP, replicas],
             "promql_expr_test": firing("20m", ("TrimtabNoReadyReplica", "critical"))},
            {"interval": "1m", "input_series": [series("up", "1x40", other)],
             "promql_expr_test": firing("20m", ("TrimtabNotScraped", "critical"))},
            {"interval": "1m", "input_series": [series("up", "1x40", shadow)],
             "promql_expr_test": firing("20m", ("TrimtabNotScraped", "critical"))},
            {"interval": "1m", "input_series": [UP], "promql_expr_test": firing("20m")},
        ],
    )  # fmt: skip
