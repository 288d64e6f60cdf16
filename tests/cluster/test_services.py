"""Services: real kube-proxy rules in front of real processes, an engine among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster.cluster import Cluster, is_ready
from support.cluster.kubectl import Kubectl
from support.cluster.manifests import HTTP_SERVER, deployment, pod, service
from support.cluster.reach import get
from support.engine_server import wait_until

Json = dict[str, Any]
READY = {"readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}}


def address(kubectl: Kubectl, name: str) -> str:
    """http URL of a Service's cluster IP."""
    spec = kubectl.get("service", name)["spec"]
    return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"


def test_requests_to_a_cluster_ip_are_spread_over_ready_pods(kubectl: Kubectl) -> None:
    kubectl.apply(deployment("web", 2, pod("web", HTTP_SERVER, container=READY)), service("web", "web"))
    kubectl("rollout", "status", "deployment/web", "--timeout=60s")
    names = {p["metadata"]["name"] for p in kubectl.items("pods")}
    url = address(kubectl, "web")
    wait_until(lambda: {answer.text for _ in range(20) if (answer := get(url)) is not None} == names)
    # From inside a pod too, and from one whose own address is among the endpoints.
    script = f"import urllib.request as u; print(*{{u.urlopen('{url}').read().decode() for _ in range(20)}})"
    kubectl.apply(pod("client", script, restartPolicy="Never"))
    kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/client", "--timeout=60s")
    assert set(kubectl("logs", "client").split()) == names


def test_a_service_without_ready_pods_refuses_at_once(kubectl: Kubectl) -> None:
    never = {"readinessProbe": {"tcpSocket": {"port": 9}, "periodSeconds": 1}}
    kubectl.apply(deployment("web", 1, pod("web", HTTP_SERVER, container=never)), service("web", "web"))
    kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod", "-l", "app=web", "--timeout=60s")
    url = address(kubectl, "web")

    def refused() -> bool:
        try:
            httpx.get(url, timeout=2)
        except httpx.ConnectError:
            return True
        except httpx.TimeoutException:
            pass
        return False

    wait_until(refused)


@pytest.fixture
def model_on_nodes(cluster: Cluster, tiny_model: Path) -> Path:
    """The tiny model, readable by any user: every image of these nodes holds it (`conftest.py`)."""
    for file in tiny_model.iterdir():
        file.chmod(0o644)
    return tiny_model


def engine(model: Path) -> Json:
    """The pod of an engine, with what its container image says of users and folders."""
    listen = ("--host", "0.0.0.0", "--port", "8000", "--admin-port", "8001", "--kv-cache-memory", "8Mi")
    container = {
        "name": "main",
        "image": "registry.example/trimtab-engine:0.1",
        "args": ["serve", str(model), "--served-model-name", "tiny", "--num-threads", "1", *listen],
        "startupProbe": {
            "httpGet": {"path": "/ready", "port": 8000},
            "periodSeconds": 1,
            "failureThreshold": 120,
        },
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8000}, "periodSeconds": 1},
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": 8000},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
        },
        "env": [{"name": "HOME", "value": "/cache"}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }
    return pod("engine", "", container=container, volumes=[{"name": "cache", "emptyDir": {}}])


def test_an_engine_answers_through_its_service(kubectl: Kubectl, model_on_nodes: Path) -> None:
    kubectl.apply(deployment("engine", 1, engine(model_on_nodes)), service("engine", "engine"))
    kubectl("rollout", "status", "deployment/engine", "--timeout=120s")
    url = address(kubectl, "engine")
    wait_until(lambda: (answer := get(f"{url}/ready")) is not None and answer.status_code == 200)
    body = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) != ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    [found] = kubectl.items("pods")
    assert is_ready(found)
    assert "listening" in kubectl("logs", found["metadata"]["name"])


def test_an_engine_that_is_deleted_ends_by_itself_within_its_grace(
    kubectl: Kubectl, model_on_nodes: Path
) -> None:
    manifest = engine(model_on_nodes)
    manifest["spec"]["terminationGracePeriodSeconds"] = 60
    kubectl.apply(manifest)
    kubectl.wait_for("ready", "pod", "engine", condition=is_ready, timeout_s=120)
    watch = kubectl.get("pod", "engine")["metadata"]["uid"]
    kubectl("delete", "pod", "engine", "--timeout=40s")
    ended = [
        e
        for e in kubectl.items("events")
        if e["involvedObject"].get("uid") == watch and e["reason"] == "Killing"
    ]
    assert len(ended) == 1, "stopped once, by SIGTERM; it did not need the 60 s"
