"""The operator for two namespaces, with a Role in each and one in its own: no right over the cluster, and no request over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import audit, rights
from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.story import (
    CHILDREN,
    OURS,
    TUNABLE,
    budgets,
    edit_budget,
    service,
    start_run,
    told,
    tuning_run,
    wait_ready,
    wait_until,
)
from support.cluster_operator import OperatorProcess, operator
from trimtab_operator import crds, names


@pytest.fixture
def places(cluster: Cluster) -> Iterator[tuple[Kubectl, ...]]:
    """The operator's namespace, two that it serves, and one that it does not."""
    mark = os.urandom(2).hex()
    made = tuple(f"namespaced-{word}-{mark}" for word in ("home", "a", "b", "other"))
    for name in made:
        cluster.kubectl("create", "namespace", name)
    yield tuple(map(cluster.kubectl.within, made))
    cluster.kubectl("delete", "namespace", *made, "--wait=false")


@pytest.fixture
def confined(
    cluster: Cluster, places: tuple[Kubectl, ...], tmp_path: Path
) -> Iterator[tuple[Kubectl, Kubectl, Kubectl, OperatorProcess]]:
    """The operator for the two, and the namespaces."""
    home, first, second, other = places
    cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
    with operator(cluster.kubeconfig, tmp_path, "confined", "--operator-namespace", home.namespace, "--resync", "10",
                  "--tuner-image", "trimtab-stand-in:1",
                  "--namespace", first.namespace, "--namespace", second.namespace) as started:  # fmt: skip
        yield first, second, other, started


def phases(kubectl: Kubectl) -> list[str]:
    """Of the pods of a run's worker."""
    return [pod["status"]["phase"] for pod in kubectl.items("pods", "-l", f"{names.LABEL_RUN}=waits")]


def test_with_roles_alone_it_serves_its_namespaces_and_asks_nothing_of_the_cluster(
    confined: tuple[Kubectl, Kubectl, Kubectl, OperatorProcess],
    places: tuple[Kubectl, ...],
    cluster: Cluster,
    model: Path,
) -> None:
    first, second, other, running = confined
    home = places[0].namespace
    who = f"--as={rights.user(home)}"
    assert first("auth", "can-i", "list", "infsvc", "-A", who, check=False).strip() == "no"
    assert first("auth", "can-i", "list", "infsvc", who, check=False).strip() == "yes"
    for place in (first, second, other):
        place.apply(service(model, tuning=TUNABLE))
    for place in (first, second):
        wait_ready(place)

    edit_budget(first, 256)
    start_run(second, 128, 110)
    wait_until(lambda: budgets(running, first) == [256])
    wait_until(lambda: budgets(running, second) == [128])
    second("delete", "trun", "chat-1")
    wait_until(lambda: budgets(running, second) == [512])
    first.apply(tuning_run("waits"))
    wait_until(lambda: phases(first) == ["Running"], 90)
    wait_until(lambda: "RunStarted" in told(first, "waits"))

    looks = running.metric("trimtab_operator_reconcile_total")
    wait_until(lambda: running.metric("trimtab_operator_reconcile_total") > looks + 2)  # a resync has been
    assert "status" not in other.get("infsvc", "chat")
    assert other.items(CHILDREN, "-l", OURS) == []

    requests = audit.requests(cluster.control_plane.audit_log, rights.user(home))
    assert [r for r in requests if r.code in (401, 403)] == []
    # What names no namespace is discovery, which names no resource either.
    ours = {home, first.namespace, second.namespace}
    assert {r.namespace for r in requests if r.resource} == ours
    assert {r.path.split("/")[1] for r in requests if not r.resource} <= {"api", "apis", "version"}

    # A worker of a service that is gone has nothing to work on.
    first("delete", "infsvc", "chat", timeout_s=60)
    wait_until(lambda: phases(first) == [], 90)
    wait_until(lambda: names.SERVICE_NOT_FOUND in told(first, "waits"))
    first("delete", "trun", "waits")
    wait_until(lambda: first.items(CHILDREN, "-l", OURS) == [])
