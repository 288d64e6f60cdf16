"""Which cron lines and zones there are: a real API server's verdict on CronJobs, against the table that `cron` is held to."""

from __future__ import annotations

from typing import Any

from kubernetes import client, config

from support.cluster.kubectl import Kubectl
from support.cron_cases import CRON_LINES, ZONES

Json = dict[str, Any]


def test_the_api_server_takes_the_same_lines_and_zones(kubectl: Kubectl) -> None:
    api = client.BatchV1Api(config.new_client_from_config(str(kubectl.kubeconfig), context=kubectl.context))

    def taken(schedule: str, zone: str) -> bool:
        try:
            api.create_namespaced_cron_job(kubectl.namespace, cron_job(schedule, zone), dry_run="All")
        except client.ApiException as error:
            if error.status != 422:
                raise
            return False
        return True

    lines = {case.line: taken(case.line, "UTC") for case in CRON_LINES}
    assert lines == {case.line: case.taken for case in CRON_LINES}
    zones = {name: taken("@daily", name) for name, _ in ZONES}
    assert zones == dict(ZONES)


def cron_job(schedule: str, zone: str) -> Json:
    container = {"name": "one", "image": "one"}
    pod = {"restartPolicy": "Never", "containers": [container]}
    return {
        "metadata": {"name": "one"},
        "spec": {
            "schedule": schedule,
            "timeZone": zone,
            "jobTemplate": {"spec": {"template": {"spec": pod}}},
        },
    }
