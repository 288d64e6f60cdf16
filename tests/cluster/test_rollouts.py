"""Pods come and go under streaming load while there is room, and no request fails: how one leaves, changes, strategies, dead ends.

Requests go to the Service's cluster IP by raw httpx (`support.cluster.load`). What happens without room is in
`test_rollout_matrix.py`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
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
    in_namespace,
    patch,
    pods,
    rolling,
    uids,
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


@pytest.fixture(scope="module")
def pair(cluster: Cluster, running: OperatorProcess, model: Path) -> Iterator[Kubectl]:
    """A service of two replicas for many tests, each of which leaves two behind."""
    for kubectl in in_namespace(cluster, "pair"):
        kubectl.apply(service(model, replicas=2, engine=ENGINE, rollout=ROLLOUT))
        wait_ready(kubectl, timeout_s=READY_S)
        yield kubectl


def test_a_leaving_pod_goes_step_by_step_and_no_request_fails(pair: Kubectl) -> None:
    pod = engines(pair)[0]
    name, where = pod["metadata"]["name"], f"http://{pod['status']['podIP']}:8000"

    def ready_status() -> int:
        return httpx.get(f"{where}/ready", trust_env=False, timeout=60).status_code

    def short() -> httpx.Response:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
        return httpx.post(f"{where}/v1/completions", json=body, trust_env=False, timeout=60)

    said: list[str] = []
    following = threading.Thread(target=lambda: said.append(pair("logs", "-f", name)))
    with Load(address(pair), long_clients=0) as load:
        with Load(where, short_clients=0, long_clients=2) as direct:
            direct.wait_served(0)
            load.wait_served()
            following.start()
            deleted_s = time.monotonic()
            pair("delete", "pod", name, "--wait=false")
            # preStop: the engine does not know yet. Then it is leaving: it says so to probes and clients, and still serves.
            wait_until(lambda: ready_status() == 503)
            assert time.monotonic() - deleted_s >= 5
            answer = short()
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            assert endpoint(pair, name) == {"ready": False, "terminating": True}, (
                "nobody is sent here any more"
            )
            # Refusing: what it took goes on, nothing else begins.
            wait_until(lambda: short().status_code == 503)
            direct.stop_asking()
            refusing_s = time.monotonic()
            assert "retry-after" in short().headers
        assert direct.of_kind("lost") == [], direct.summary()
        assert any(a.began_s < refusing_s < a.ended_s for a in direct.of_kind("served"))
        wait_settled(pair, 2)
        load.wait_served()
    check_nothing_failed(load)
    following.join(READY_S)
    [draining] = [json.loads(line) for line in said[0].splitlines() if '"draining"' in line]
    assert draining["open"] >= 1
    happened = [e["reason"] for e in pair.items("events") if e["involvedObject"]["name"] == name]
    assert "Killing" in happened
    assert "FailedPreStopHook" not in happened


def endpoint(kubectl: Kubectl, pod: str) -> Json:
    """Whether a pod's endpoint is ready and terminating."""
    slices = kubectl.items("endpointslices", "-l", "kubernetes.io/service-name=chat")
    listed = [e for piece in slices for e in piece.get("endpoints") or [] if e["targetRef"]["name"] == pod]
    return {key: listed[0]["conditions"][key] for key in ("ready", "terminating")}


def test_fewer_replicas_and_a_rollout_of_the_last_one_fail_no_request(pair: Kubectl) -> None:
    [budget] = pair.items("poddisruptionbudgets")
    assert budget["spec"]["maxUnavailable"] == 1
    with Load(address(pair)) as load:
        load.wait_served()
        pair("scale", "infsvc", "chat", "--replicas=1")
        [before] = wait_settled(pair, 1)
        assert pair.items("poddisruptionbudgets") == [], "it would only block drains"
        load.wait_served()
        # There is a free place for a second one, so that the new one is there before the old one goes.
        patch(pair, engine={"maxModelLen": 8000})
        wait_condition(pair, "Ready", "False", "RolloutInProgress")
        [after] = wait_settled(pair, 1)
        load.wait_served()
    check_nothing_failed(load)
    assert after["metadata"]["uid"] != before["metadata"]["uid"]


def test_recreate_ends_the_old_pod_before_it_starts_a_new_one(pair: Kubectl) -> None:
    pair("scale", "infsvc", "chat", "--replicas=1")
    before = uids(wait_settled(pair, 1))
    patch(pair, rollout={"strategy": "Recreate"}, engine={"maxModelLen": 7000})
    seen: list[set[str]] = []

    def replaced() -> bool:
        listed = uids(pods(pair))
        seen.append(listed)
        rolling(pair)
        return len(listed) == 1 and not listed & before

    wait_until(replaced, READY_S)
    assert all(len(listed) <= 1 for listed in seen), "old and new side by side"
    after = uids(wait_settled(pair, 1))
    for strategy in ({"maxSurge": 0, "maxUnavailable": 2}, {"maxSurge": 1, "maxUnavailable": 0}):
        patch(pair, rollout={"strategy": "RollingUpdate", **strategy})
        wait_until(lambda wanted=strategy: rolling(pair) == wanted)  # type: ignore[misc]
    patch(pair, rollout={"strategy": "Auto"})
    assert uids(wait_settled(pair, 1)) == after, "another strategy is no reason to replace anything"


def wait_stalled(kubectl: Kubectl, reason: str, word: str, serving: set[str]) -> None:
    """Until the rollout is Stalled for `reason`, naming `word`, while the pods `serving` serve on."""
    stalled = wait_condition(kubectl, "Stalled", "True", reason)
    message = condition(stalled, "Stalled")["message"]
    assert word in message
    assert "1 old replica goes on serving" in message
    assert condition(stalled, "Ready")["status"] == "False"
    assert condition(stalled, "Available")["status"] == "True"
    assert stalled["status"]["availableReplicas"] == 1
    wait_until(lambda: reason in {e["reason"] for e in kubectl.items("events")})
    assert uids(engines(kubectl)) == serving


def test_an_image_that_is_not_there_stalls_and_the_right_one_goes_on_without_a_failed_request(
    pair: Kubectl,
) -> None:
    pair("scale", "infsvc", "chat", "--replicas=1")
    before = uids(wait_settled(pair, 1))
    with Load(address(pair)) as load:
        load.wait_served()
        patch(pair, engine={"image": "registry.invalid/none:1"})
        wait_stalled(pair, "ImagePullFailed", "registry.invalid/none:1", before)
        load.wait_served()
        patch(pair, engine={"image": "trimtab/engine:2"})
        [after] = wait_settled(pair, 1)
        load.wait_served()
    check_nothing_failed(load)
    assert after["metadata"]["uid"] not in before
    assert after["spec"]["containers"][0]["image"] == "trimtab/engine:2"
    assert condition(pair.get("infsvc", "chat"), "Stalled")["status"] == "False"


@pytest.mark.parametrize(
    ("container", "spec", "reason", "word"),
    [
        pytest.param({}, {"model": {"uri": "file:///models/none"}}, "ModelLoadFailed", "/models/none", id="model"),
        pytest.param({}, {"engine": {"image": "trimtab-crash:1"}}, "EngineCrashed", "signal 9", id="crash"),
        pytest.param({"resources": {"limits": {GPU: 3}}}, {}, "InsufficientGPU", f"Insufficient {GPU}", id="GPU"),
    ],
)  # fmt: skip
def test_a_rollout_that_cannot_finish_says_why_and_goes_back_when_the_spec_is_mended(
    pair: Kubectl, container: Json, spec: Json, reason: str, word: str
) -> None:
    pair("scale", "infsvc", "chat", "--replicas=1")
    before = uids(wait_settled(pair, 1))
    good = pair.get("infsvc", "chat")["spec"]
    [engine] = good["podTemplate"]["spec"]["containers"]
    changed = {"spec": {"containers": [{**engine, **container}]}}
    with Load(address(pair), long_clients=0) as load:
        load.wait_served()
        patch(pair, rollout={"progressDeadline": "10s"}, podTemplate=changed, **spec)
        wait_stalled(pair, reason, word, before)
        load.wait_served()
        patch(pair, rollout={"progressDeadline": "10m"}, podTemplate=good["podTemplate"], model=good["model"],
              engine={"image": good["engine"].get("image")})  # fmt: skip
        after = uids(wait_settled(pair, 1))
        load.wait_served()
    check_nothing_failed(load)
    assert after == before, "they are what is wanted again"
