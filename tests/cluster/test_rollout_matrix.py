"""Rollouts, drains, deletions and scaling of a service that holds its GPUs, under streaming load: what is served, refused and lost.

One service stands on two nodes of two GPUs, two to a pod. Two replicas therefore take everything, and one has a place for a second
until the other node is cordoned. An accepted request is never lost. None fails with two replicas, or with a place for the next
pod; one replica without it refuses new requests at once for a while, and the service says that it is not available.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.load import Load
from support.cluster.rollouts import (
    ENGINE,
    GPU,
    READY_S,
    ROLLOUT,
    Json,
    check_nothing_failed,
    cordon,
    drain,
    in_namespace,
    patch,
    pods,
    refusal_to_evict,
    rolling,
    uids,
    uncordon,
    wait_settled,
)
from support.cluster.story import (
    address,
    condition,
    engines,
    service,
    wait_condition,
    wait_ready,
    wait_until,
)
from support.cluster_operator import OperatorProcess

OPERATOR_OPTIONS = ("--room-patience", "2")
FAREWELL_S = 10  # of a pod that nobody holds: what preStop and leaving take until it refuses
pytestmark = pytest.mark.slow

_tags = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Place:
    """The service, and the file without which its pods do not begin."""

    kubectl: Kubectl
    gate: Path

    @property
    def node(self) -> str:
        """Where its first pod stands."""
        name: str = engines(self.kubectl)[0]["spec"]["nodeName"]
        return name


@pytest.fixture(scope="module")
def taken(cluster: Cluster, running: OperatorProcess, model: Path) -> Iterator[Place]:
    gate = model.parent / "gate"
    gate.touch()
    made = service(model, replicas=2, engine=ENGINE, rollout=ROLLOUT)
    template = made["spec"]["podTemplate"]["spec"]
    template["containers"][0]["resources"] = {"limits": {GPU: 2}}
    wait = f"until test -e {gate}; do sleep 0.1; done"
    mounts = template["containers"][0]["volumeMounts"]
    template["initContainers"] = [
        {"name": "gate", "image": "busybox", "command": ["sh", "-c", wait], "volumeMounts": mounts}
    ]
    for kubectl in in_namespace(cluster, "taken"):
        kubectl.apply(made)
        wait_ready(kubectl, timeout_s=READY_S)
        yield Place(kubectl, gate)


@pytest.fixture
def place(taken: Place) -> Iterator[Place]:
    """The same, with both nodes open before and after."""
    yield taken
    taken.gate.touch()
    uncordon(taken.kubectl)


# What happens to it


def change_image(place: Place) -> None:
    patch(place.kubectl, engine={"image": f"trimtab/engine:{next(_tags)}"})


def change_image_of_two(place: Place) -> None:
    change_image(place)
    found = place.kubectl.wait_for(
        "waiting for room", "infsvc", "chat", condition=lambda r: GPU in condition(r, "Ready").get("message", "")
    )  # fmt: skip
    assert condition(found, "Ready")["reason"] == "RolloutInProgress"
    wait_until(lambda: rolling(place.kubectl) == {"maxSurge": 0, "maxUnavailable": 1})


def delete_a_pod(place: Place) -> None:
    place.kubectl("delete", "pod", engines(place.kubectl)[0]["metadata"]["name"], "--wait=false")


def drain_its_node(place: Place) -> None:
    drain(place.kubectl, place.node)


def drain_one_of_two_nodes(place: Place) -> None:
    drain_its_node(place)
    [left] = engines(place.kubectl)
    assert "disruption budget" in refusal_to_evict(place.kubectl, left)


def while_the_next_one_starts_slowly(leave: Callable[[Place], None], place: Place) -> None:
    """The next pod has a node and does not begin: the old one serves on, for longer than it would by itself."""
    place.gate.unlink()
    [old] = engines(place.kubectl)
    ready = f"http://{old['status']['podIP']}:8000/ready"
    leaving = threading.Thread(target=leave, args=[place])
    leaving.start()
    wait_until(lambda: httpx.get(ready, trust_env=False, timeout=60).json().get("held"))
    began_s = time.monotonic()
    with Load(address(place.kubectl), short_clients=1, long_clients=0) as late:
        wait_until(lambda: any(a.began_s > began_s + FAREWELL_S for a in late.of_kind("served")))
    check_nothing_failed(late)
    found = place.kubectl.get("infsvc", "chat")
    assert condition(found, "Available")["reason"] == "LeavingPodServes"
    assert condition(found, "Ready")["status"] == "False"
    place.gate.touch()
    leaving.join(READY_S)


def fewer(place: Place) -> None:
    place.kubectl("scale", "infsvc", "chat", "--replicas=1")


def suspend_and_scale_to_none(place: Place) -> None:
    patch(place.kubectl, suspend=True)
    wait_condition(place.kubectl, "Available", "False", "Suspended")
    wait_until(lambda: pods(place.kubectl) == [], READY_S)
    place.kubectl("scale", "infsvc", "chat", "--replicas=0")
    patch(place.kubectl, suspend=False)
    wait_condition(place.kubectl, "Available", "False", "NoReadyPods")


# What ends it


def nothing(place: Place) -> None:
    """It goes on by itself."""


def open_the_nodes(place: Place) -> None:
    uncordon(place.kubectl)


def one_more(place: Place) -> None:
    place.kubectl("scale", "infsvc", "chat", "--replicas=1")


@dataclass(frozen=True, slots=True)
class Row:
    """`act` happens to `replicas`, `mend` ends it, `after` (the same, if None) are left."""

    replicas: int
    act: Callable[[Place], None]
    mend: Callable[[Place], None] = nothing
    has_room: bool = False
    refuses: bool = False
    after: int | None = None


MATRIX = {
    "two, image": Row(2, change_image_of_two),
    "two, pod deleted": Row(2, delete_a_pod),
    "two, node drained": Row(2, drain_one_of_two_nodes, open_the_nodes),
    "two, one fewer": Row(2, fewer, after=1),
    "one with room, node drained": Row(
        1, partial(while_the_next_one_starts_slowly, drain_its_node), has_room=True
    ),
    "one with room, pod deleted": Row(
        1, partial(while_the_next_one_starts_slowly, delete_a_pod), has_room=True
    ),
    "one, image": Row(1, change_image, refuses=True),
    "one, pod deleted": Row(1, delete_a_pod, refuses=True),
    "one, node drained": Row(1, drain_its_node, open_the_nodes, refuses=True),
    "one, suspended and scaled to none": Row(1, suspend_and_scale_to_none, one_more, refuses=True),
}


@pytest.mark.parametrize("row", MATRIX.values(), ids=MATRIX)
def test_nothing_is_lost_and_only_one_without_room_refuses(place: Place, row: Row) -> None:
    kubectl = place.kubectl
    if kubectl.get("infsvc", "chat")["spec"]["replicas"] != row.replicas:
        kubectl("scale", "infsvc", "chat", f"--replicas={row.replicas}")
    before = wait_settled(kubectl, row.replicas)
    if row.replicas == 1 and not row.has_room:
        cordon(kubectl, *({"node-a", "node-b"} - {place.node}))
    since = available(kubectl)
    with Load(address(kubectl), long_tokens=2000) as load:
        load.wait_served()
        row.act(place)
        if row.refuses:
            wait_condition(kubectl, "Available", "False", timeout_s=READY_S)
            load.wait_refused()
        row.mend(place)
        after = wait_settled(kubectl, row.after or row.replicas)
        load.wait_served()
    if row.after is None:
        assert uids(before) != uids(after)
    wait_until(lambda: rolling(kubectl) == {"maxSurge": 1, "maxUnavailable": 0})
    if not row.refuses:
        check_nothing_failed(load)
        assert available(kubectl) == since, "it was not available for a while"
        return
    assert load.of_kind("lost") == [], load.summary()
    assert max(answer.took_s for answer in load.of_kind("refused")) < 10, "clients may go elsewhere at once"
    assert condition(kubectl.get("infsvc", "chat"), "Available")["status"] == "True"
    print(f"refused for {load.gap_s():.1f} s; {load.summary()}")


def available(kubectl: Kubectl) -> Json:
    """Status of Available, and since when."""
    found = condition(kubectl.get("infsvc", "chat"), "Available")
    return {key: found[key] for key in ("status", "lastTransitionTime")}
