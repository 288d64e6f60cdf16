"""The fake runtime answers as an engine would, with an address per pod."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.cluster.cluster import Cluster, NodeOptions, is_ready
from support.cluster.kubectl import Kubectl
from support.cluster.manifests import config_map, deployment, main_state, service
from support.cluster.reach import get
from support.engine_server import wait_until

Json = dict[str, Any]
LIVE = {
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "priority_aging_s": 30.0,
    "slo": {
        "default_class": "default",
        "classes": [{"name": "default", "ttft_s": 1.0, "itl_s": 0.1, "objective": 99.0}],
    },
}


@pytest.fixture(scope="module")
def fake_node(cluster: Cluster) -> Iterator[str]:
    """A fake node, alone for pods that ask for it."""
    cluster.add_node(NodeOptions("fake-a", gpus=1000, fake=True))
    cluster.wait_for_node("fake-a")
    yield "fake-a"
    cluster.remove_node("fake-a")


def engines(replicas: int, node: str, *flags: str) -> Json:
    """A Deployment of engines on the fake node, with a live config file in ConfigMap `live`."""
    container = {
        "name": "engine",
        "image": "trimtab/engine:0",
        "args": ["serve", "hf://any/model", "--live-config", "/etc/live/live.json", *flags],
        "volumeMounts": [{"name": "live", "mountPath": "/etc/live"}],
    }
    spec = {
        "containers": [container],
        "nodeSelector": {"kubernetes.io/hostname": node},
        "volumes": [{"name": "live", "configMap": {"name": "live"}}],
    }
    return deployment("engines", replicas, {"metadata": {"labels": {"app": "engines"}}, "spec": spec})


def live_file(generation: int) -> Json:
    """ConfigMap `live`."""
    document = {"generation": generation, "source": "Spec", "config": LIVE}
    return config_map("live", **{"live.json": json.dumps(document)})


def test_every_pod_has_an_address_and_a_live_config_of_its_own(kubectl: Kubectl, fake_node: str) -> None:
    kubectl.apply(live_file(3), engines(2, fake_node), service("engines", "engines"))
    kubectl("rollout", "status", "deployment/engines", "--timeout=120s")
    first, second = (f"http://{p['status']['podIP']}:8001/admin/live-config" for p in kubectl.items("pods"))
    assert httpx.get(first).json()["in_force"]["generation"] == 3, "the file is read at start"
    candidate = {"generation": 4, "config": LIVE | {"max_num_batched_tokens": 256}, "lease_s": 1.0}
    answer = httpx.put(first, json=candidate)
    assert answer.status_code == 200
    assert answer.json()["new"]["config"]["max_num_batched_tokens"] == 256
    assert httpx.get(second).json()["in_force"]["generation"] == 3
    time.sleep(1.1)
    read = httpx.get(first).json()
    assert (read["in_force"]["generation"], read["candidate"]) == (3, None), "the lease ends by itself"
    assert httpx.put(first, json=candidate).status_code == 409
    refused = httpx.put(first, json={"generation": 9, "config": LIVE | {"max_num_seqs": 0}})
    assert refused.status_code == 400
    assert refused.json()["error"]["path"] == "config.max_num_seqs"
    vip = kubectl.get("service", "engines")["spec"]["clusterIP"]
    wait_until(lambda: (reply := get(f"http://{vip}/ready")) is not None and reply.status_code == 200)
    assert (
        "trimtab_live_config_generation 3" in httpx.get(first.replace("/admin/live-config", "/metrics")).text
    )


def test_wrong_flags_crash_a_fake_engine_too(kubectl: Kubectl, fake_node: str) -> None:
    kubectl.apply(live_file(1), engines(1, fake_node, "--max-num-seqs", "-1"))
    found = kubectl.wait_for(
        "there", "pods", condition=lambda pods: bool(pods["items"]) and main_state(pods["items"][0]) != {}
    )
    state = main_state(found["items"][0])
    assert state["waiting"]["reason"] == "CrashLoopBackOff"
    assert "max-num-seqs" in state["waiting"]["message"]


def test_a_hundred_pods_are_ready_in_seconds_and_gone_again(kubectl: Kubectl, fake_node: str) -> None:
    kubectl.apply(live_file(1), engines(100, fake_node))
    kubectl("rollout", "status", "deployment/engines", "--timeout=180s")
    pods = kubectl.items("pods")
    assert len({p["status"]["podIP"] for p in pods}) == 100
    assert all(is_ready(p) for p in pods)
    kubectl("delete", "deployment", "engines", "--cascade=foreground", "--timeout=180s")
    assert kubectl.items("pods") == []
