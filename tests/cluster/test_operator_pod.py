"""The operator as a pod, under the `restricted` level and with its own rights, as `make cluster` installs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import operator
from support.cluster.cluster import Cluster, is_ready
from support.cluster.kubectl import Kubectl
from support.cluster.reach import get
from support.engine_server import wait_until


@pytest.fixture(scope="module")
def with_operator(cluster: Cluster) -> Iterator[None]:
    """The operator runs."""
    operator.install(cluster.kubectl)
    yield
    operator.uninstall(cluster.kubectl)


@pytest.mark.usefixtures("with_operator")
def test_a_service_becomes_ready_answers_and_goes_with_all_its_children(
    kubectl: Kubectl, tiny_model: Path
) -> None:
    for file in tiny_model.iterdir():
        file.chmod(0o644)
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    engine = {"maxModelLen": 256, "kvCacheMemory": "8Mi", "maxNumBatchedTokens": 512}
    service = {
        "apiVersion": "serving.trimtab.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {"model": {"uri": f"file://{tiny_model}", "servedName": "tiny"}, "engine": engine},
    }
    kubectl.apply(service)
    kubectl.wait_for("ready", "infsvc", "chat", condition=is_ready, timeout_s=150)
    address = kubectl.get("service", "chat")["spec"]["clusterIP"]
    wait_until(
        lambda: (answer := get(f"http://{address}:8000/v1/models")) is not None and answer.status_code == 200
    )

    [pod] = kubectl.items("pods")
    engine["maxNumBatchedTokens"] = 256
    kubectl.apply(service)
    kubectl.wait_for(
        "live config applied",
        "configmap",
        "chat-live",
        condition=lambda found: (
            json.loads(found["data"]["live.json"])["config"]["max_num_batched_tokens"] == 256
        ),
    )
    wait_until(lambda: "live config applied" in kubectl("logs", pod["metadata"]["name"]))
    [after] = kubectl.items("pods")
    assert after["metadata"]["uid"] == pod["metadata"]["uid"], "a live edit restarts nothing"

    kubectl("delete", "infsvc", "chat")
    kinds = "deployments,replicasets,pods,services,networkpolicies,poddisruptionbudgets"
    kubectl.wait_for("gone", kinds, condition=lambda found: found["items"] == [])


@pytest.mark.usefixtures("with_operator")
def test_the_operator_may_not_read_any_secret(kubectl: Kubectl) -> None:
    who = f"--as=system:serviceaccount:{operator.NAMESPACE}:{operator.NAME}"
    for verb in ("get", "list", "watch"):
        answer = kubectl("auth", "can-i", verb, "secrets", who, "-A", check=False)
        assert answer.strip() == "no"
