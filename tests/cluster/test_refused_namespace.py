"""The operator for two namespaces, of which one is refused: from the start, later, and with the namespace gone. The other notices nothing.

Services are suspended, since no pods are needed for this. The operator looks at services by itself only every ten minutes, so what
happens sooner was brought by its watches, or by what it does about the refusal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import rights
from support.cluster.cluster import Cluster
from support.cluster.helm import apply
from support.cluster.kubectl import Kubectl
from support.cluster.story import service, wait_condition, wait_until
from support.cluster_operator import OperatorProcess, write_admin_key
from trimtab_operator import crds

REFUSED = "trimtab_operator_namespace_refused"


@pytest.fixture
def places(cluster: Cluster) -> Iterator[tuple[Kubectl, Kubectl, Kubectl]]:
    """The operator's namespace, and the two that it serves."""
    made = tuple(f"refused-{word}-{os.urandom(2).hex()}" for word in ("home", "a", "b"))
    for name in made:
        cluster.kubectl("create", "namespace", name)
    home, first, second = map(cluster.kubectl.within, made)
    yield home, first, second
    cluster.kubectl("delete", "namespace", *made, "--wait=false", "--ignore-not-found")


def grant(cluster: Cluster, home: Kubectl, *served: Kubectl) -> None:
    """The chart's rights, as `helm upgrade` would put them right."""
    built = rights.manifests(home.namespace, tuple(place.namespace for place in served))
    apply(cluster.kubectl.within(home.namespace), built, ("--force-conflicts",))


def take_away(place: Kubectl) -> None:
    place("delete", "rolebinding", "--all")


def looked_at(place: Kubectl) -> bool:
    """Whether the newest spec has been."""
    found = place.get("infsvc", "chat")
    return bool(found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"])


def edit(place: Kubectl, tokens: int) -> None:
    patch = {"spec": {"engine": {"maxNumBatchedTokens": tokens}}}
    place("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps(patch))


def test_a_namespace_that_is_refused_holds_up_no_other_and_is_served_once_it_may_be(
    cluster: Cluster, places: tuple[Kubectl, Kubectl, Kubectl], tmp_path: Path
) -> None:
    home, first, second = places
    cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
    own = rights.kubeconfig(cluster.kubeconfig, tmp_path, home.namespace, [first.namespace, second.namespace])
    take_away(first)
    asleep = service(tmp_path, suspend=True)
    for place in (first, second):
        place.apply(asleep)
    write_admin_key(tmp_path)
    options = (
        "--operator-namespace",
        home.namespace,
        "--namespace",
        first.namespace,
        "--namespace",
        second.namespace,
    )
    running = OperatorProcess(own, tmp_path, "refused", ("--resync", "600", *options))

    def refused() -> float:
        return running.metric(f'{REFUSED}{{namespace="{first.namespace}"}}')

    def said(words: str, field: str = "namespace", about: str = first.namespace) -> int:
        lines = map(json.loads, running.log.read_text().splitlines())
        return sum(one["message"] == words and one[field] == about for one in lines)

    def failed_looks() -> int:
        return said("reconcile failed", "service", f"{first.namespace}/chat")

    running.start()
    try:
        wait_condition(second, "Ready", "False", "Suspended")
        assert refused() == 1
        assert "status" not in first.get("infsvc", "chat")
        grant(cluster, home, first, second)
        wait_condition(first, "Ready", "False", "Suspended", timeout_s=120)
        wait_until(lambda: refused() == 0)
        edit(first, 256)
        wait_until(lambda: looked_at(first), 120, "its watches are open")

        # In mid-life. Its watches stand open until they end by themselves, so an edit there is still told.
        take_away(first)
        edit(first, 300)
        wait_until(lambda: refused() == 1)
        edit(second, 256)
        wait_until(lambda: looked_at(second))
        failed = failed_looks()
        # All of it goes.
        cluster.kubectl("delete", "namespace", first.namespace, timeout_s=120)
        edit(second, 300)
        wait_until(lambda: looked_at(second))
        assert (refused(), said("namespace may not be looked at")) == (1, 2), "once each time"
        assert failed_looks() == failed, "nobody tries in vain for months"
        assert running.healthy()

        cluster.kubectl("create", "namespace", first.namespace)
        first.apply(asleep)
        grant(cluster, home, first, second)
        wait_condition(first, "Ready", "False", "Suspended", timeout_s=120)
        wait_until(lambda: (refused(), said("namespace may be looked at again")) == (0, 2))
        assert running.process is not None
        assert running.process.poll() is None, "and all that in one life"
    finally:
        running.stop()
