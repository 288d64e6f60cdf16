"""What holds for all services together: the fleet's switch in the operator's ConfigMap, and the limit of runs that act."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster import rights
from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.manifests import config_map
from support.cluster.story import (
    BUDGET,
    TUNABLE,
    budgets,
    condition,
    service,
    start_run,
    tuning_run,
    wait_condition,
    wait_ready,
    wait_until,
)
from support.cluster_operator import OperatorProcess, operator
from trimtab_operator import crds, names
from trimtab_operator.plan.workers import FINISHED

Json = dict[str, Any]
HOME = "fleet-home"
IN_FORCE_S = 10.0  # what is promised
MARGIN_S = 10.0  # two shared cores
RUN_S = 600.0  # at rest a run takes ten seconds


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """An operator for a fleet of which one run may act at a time."""
    cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
    cluster.kubectl("create", "namespace", HOME)
    with operator(cluster.kubeconfig, tmp_path_factory.mktemp("operator"), "fleet", "--all-namespaces", "--resync", "20",
                  "--operator-namespace", HOME, "--max-concurrent-runs", "1") as started:  # fmt: skip
        yield started


@pytest.fixture(scope="module")
def pair(cluster: Cluster, limited: OperatorProcess, model: Path) -> Iterator[tuple[Kubectl, Kubectl]]:
    """Two namespaces with a ready service each, that may be tuned."""
    names = ("fleet-a", "fleet-b")
    for name in names:
        cluster.kubectl("create", "namespace", name)
    first, second = map(cluster.kubectl.within, names)
    for kubectl in (first, second):
        kubectl.apply(service(model, tuning=TUNABLE))
    for kubectl in (first, second):
        wait_ready(kubectl)
    yield first, second
    cluster.kubectl("delete", "namespace", *names, HOME, "--wait=false")


def throw(kubectl: Kubectl, value: str | None) -> None:
    """Set the fleet's switch; None removes it."""
    home = kubectl.within(HOME)
    if value is None:
        home("delete", "configmap", rights.FLEET_CONFIG_MAP, "--ignore-not-found")
    else:
        metadata = {"name": rights.FLEET_CONFIG_MAP}
        home.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"tuning": value}})


def finish(kubectl: Kubectl, name: str, tokens: int) -> None:
    """The run's job has a result that was confirmed."""
    status = {
        "candidate": None,
        "result": {"verdict": "Applied", "config": {"maxNumBatchedTokens": tokens}},
    }
    kubectl(
        "patch", "trun", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
    )


def tuning(kubectl: Kubectl) -> tuple[str, str]:
    """Reason and message of TuningReady."""
    found = condition(kubectl.get("infsvc", "chat"), names.TUNING_READY)
    return found["reason"], found.get("message", "")


def test_the_fleets_switch_holds_reverts_and_lets_go_for_every_service(
    pair: tuple[Kubectl, Kubectl], limited: OperatorProcess
) -> None:
    first, second = pair
    start_run(first, 128, 110, name="held")
    wait_until(lambda: budgets(limited, first) == [128])
    try:
        throw(first, "paused")
        assert wait_until(lambda: budgets(limited, first) == [BUDGET]) < IN_FORCE_S + MARGIN_S
        for kubectl in pair:
            found = wait_condition(kubectl, names.TUNING_READY, "False", names.TUNING_PAUSED)
            assert (
                f"ConfigMap {HOME}/{rights.FLEET_CONFIG_MAP}"
                in condition(found, names.TUNING_READY)["message"]
            )
            assert found["status"]["tuning"]["state"] == "Paused"
        # A result that comes now waits, and is in force once tuning goes on.
        finish(first, "held", 256)
        first.wait_for(
            "held", "trun", "held", condition=lambda r: condition(r, "Ready")["reason"] == names.TUNING_PAUSED
        )
        throw(first, "active")
        wait_until(lambda: budgets(limited, first) == [256])
        throw(first, "reverted")
        assert wait_until(lambda: budgets(limited, first) == [BUDGET]) < IN_FORCE_S + MARGIN_S
        wait_until(lambda: tuning(first)[0] == names.TUNING_REVERTED)
        # The weaker word of a service changes nothing; a word that nobody knows holds what is in force.
        first("annotate", "infsvc", "chat", f"{names.ANNOTATION_TUNING}=paused")
        throw(first, "Active")
        wait_until(lambda: budgets(limited, first) == [256])
        wait_until(lambda: tuning(second)[0] == names.TUNING_PAUSED)
        events = first.within(HOME)
        wait_until(lambda: "InvalidFleetSwitch" in {e["reason"] for e in events.items("events")})
        assert "'Active' is not allowed; one of active, paused, reverted" in limited.log.read_text()
    finally:
        throw(first, None)
        first("annotate", "infsvc", "chat", f"{names.ANNOTATION_TUNING}-")
    for kubectl in pair:
        wait_condition(kubectl, names.TUNING_READY, "True")


def test_of_two_services_runs_the_older_one_acts_and_the_other_waits_for_its_turn(
    pair: tuple[Kubectl, Kubectl], limited: OperatorProcess
) -> None:
    first, second = pair
    standing = budgets(limited, second)
    start_run(first, 128, 110, name="older")
    wait_until(lambda: budgets(limited, first) == [128])
    start_run(second, 64, 110, name="younger")
    waiting = second.wait_for(
        "waiting",
        "trun",
        "younger",
        condition=lambda r: condition(r, "Ready")["reason"] == names.WAITING_FOR_TURN,
    )
    assert "--max-concurrent-runs 1" in condition(waiting, "Ready")["message"]
    assert waiting["status"]["phase"] == "Pending"
    assert budgets(limited, second) == standing
    first("delete", "trun", "older")
    wait_until(lambda: budgets(limited, second) == [64])
    running = second.wait_for(
        "running", "trun", "younger", condition=lambda r: r["status"]["phase"] == "Running"
    )
    assert running["status"]["applied"]["pods"] == "1/1"
    second("delete", "trun", "younger")
    wait_until(lambda: budgets(limited, second) == standing)


def traced(name: str) -> Json:
    """A run with a worker; it has nothing to gain, so measuring the incumbent once is enough."""
    workload = {"type": "Trace", "traceRef": {"name": "traffic", "key": "t.jsonl"}}
    return tuning_run(name, maxTrials=1, workload=workload)


def test_the_workers_of_two_services_work_one_after_the_other_and_both_come_to_a_result(
    pair: tuple[Kubectl, Kubectl], limited: OperatorProcess
) -> None:
    first, second = pair
    rows = [{"arrival_s": number / 20, "prompt_tokens": 8, "output_tokens": 4} for number in range(60)]
    traffic = config_map("traffic", **{"t.jsonl": "\n".join(map(json.dumps, rows))})
    patient = json.dumps({"spec": {"slo": {"ttft": "1h", "itl": "1h"}}})
    for kubectl in pair:
        kubectl("patch", "infsvc", "chat", "--type=merge", "-p", patient)
    second.apply(traffic)
    first.apply(traced("older"))
    # Its worker is made, and holds the place although it waits for its trace.
    first.wait_for(
        "made", "trun", "older", condition=lambda r: condition(r, "Ready")["reason"] == names.FAILED_MOUNT
    )
    second.apply(traced("younger"))
    waiting = second.wait_for(
        "waiting",
        "trun",
        "younger",
        condition=lambda r: condition(r, "Ready")["reason"] == names.WAITING_FOR_TURN,
    )
    said = "--max-concurrent-runs 1: runs of other services act already, or are older"
    assert condition(waiting, "Ready")["message"] == said
    assert (waiting["status"]["phase"], condition(waiting, "Stalled")["status"]) == ("Pending", "False")
    # The operator's next life knows whose turn it is.
    limited.stop(signal.SIGKILL)
    limited.start()
    first.apply(traffic)

    def begun() -> bool:
        begun = "startTime" in second.get("trun", "younger")["status"]
        assert not begun or "result" in first.get("trun", "older")["status"], "both work at a time"
        return begun

    wait_until(begun, RUN_S, "the second never begins")
    for kubectl, name in ((first, "older"), (second, "younger")):
        over = kubectl.wait_for("over", "trun", name, timeout_s=RUN_S, condition=lambda r: r["status"]["phase"] in FINISHED)  # fmt: skip
        assert over["status"]["phase"] == "Succeeded", json.dumps(over["status"], indent=1)
        assert over["status"]["result"]["verdict"] == "KeptIncumbent"
        assert over["status"]["result"]["before"]["requests"] >= len(rows)
