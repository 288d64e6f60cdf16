"""Models from a hub and from volume claims on the test cluster: one download for all replicas of a claim, and true reasons."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.namespace import NODE_IP
from support.cluster.story import condition, engines, wait_ready, wait_until
from support.cluster_operator import OperatorProcess, operator
from support.hub import HubServer, Model, hub_server, wait_for
from trimtab_operator import crds

Json = dict[str, Any]
WEIGHTS = "model.safetensors"
TOKEN = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": "right"}}


@pytest.fixture(scope="module")
def hub(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A hub over TLS at the nodes' address: a model that needs a token, one that is gated, one of an unknown kind."""
    folder = tmp_path_factory.mktemp("hub")
    odd = folder / "odd"
    shutil.copytree(model, odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with hub_server(NODE_IP, folder / "pki") as server:
        server.models["trimtab/tiny"] = Model(model, token="right")
        server.models["trimtab/gated"] = Model(model, gated="right")
        server.models["trimtab/odd"] = Model(odd)
        yield server


@pytest.fixture(scope="module")
def running(
    cluster: Cluster, hub: HubServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """An operator that knows this hub and its authority."""
    cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
    with operator(cluster.kubeconfig, tmp_path_factory.mktemp("operator"), "sources", "--all-namespaces", "--resync", "20",
                  "--operator-namespace", "default", "--hub-endpoint", hub.url, "--hub-ca-file", str(hub.ca_file)) as started:  # fmt: skip
        yield started


def service(name: str, **model: Any) -> Json:
    env = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    return {
        "apiVersion": "serving.trimtab.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"servedName": "tiny", **model},
            "engine": {"maxNumBatchedTokens": 512, "maxNumSeqs": 16, "kvCacheMemory": "16Mi", "maxModelLen": 512},
            "rollout": {"drainTimeout": "5s"},
            "podTemplate": {"spec": {"containers": [{"name": "engine", "env": env}]}},
        },
    }  # fmt: skip


def claim(kubectl: Kubectl, name: str, folder: Path) -> None:
    """A claim that is bound to a folder, as an administrator without a provisioner makes it."""
    bound = {
        "storageClassName": "",
        "accessModes": ["ReadWriteMany"],
    }
    volume = f"{kubectl.namespace}-{name}"
    kubectl.apply(
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
            "spec": {**bound, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)},
                     "persistentVolumeReclaimPolicy": "Retain",
                     "claimRef": {"namespace": kubectl.namespace, "name": name}},
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
            "spec": {**bound, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}},
        },
    )  # fmt: skip


def complete(kubectl: Kubectl, name: str) -> str:
    address = kubectl.get("service", name)["spec"]["clusterIP"]
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"http://{address}:8000/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def stalled(kubectl: Kubectl, name: str, words: str) -> Json:
    """Wait until it is Stalled with those words, for want of its model."""
    found = kubectl.wait_for(
        f"stalled with {words!r}",
        "infsvc",
        name,
        condition=lambda r: (
            condition(r, "Stalled")["status"] == "True"
            and words in condition(r, "Stalled").get("message", "")
        ),
        timeout_s=120,
    )
    assert condition(found, "Stalled")["reason"] == "ModelLoadFailed"
    assert condition(found, "Ready")["reason"] == "ModelLoadFailed"
    assert found["status"]["model"]["state"] == "FailedToLoad"
    return found


def test_a_model_comes_from_the_hub_once_for_all_replicas_of_a_claim(
    kubectl: Kubectl, hub: HubServer, running: OperatorProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    cache.chmod(0o777)  # what a provisioner does for fsGroup
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    claim(kubectl, "weights", cache)
    held = hub.fault(WEIGHTS, hold_at=250_000)
    hub.requests.clear()
    kubectl.apply(TOKEN, service("chat", uri="hf://trimtab/tiny", tokenSecretRef={"name": "hub"}, cache={"claimName": "weights"}))  # fmt: skip
    wait_for(held.reached.is_set, "the download of the weights", timeout_s=120)
    found = kubectl.wait_for(
        "downloading",
        "infsvc",
        "chat",
        condition=lambda r: " % of " in condition(r, "ModelLoaded").get("message", ""),
    )
    assert condition(found, "ModelLoaded")["reason"] == "ModelDownloading"
    assert "downloads the model: " in condition(found, "Ready")["message"]
    assert found["status"]["model"]["state"] == "Downloading"
    held.released.set()
    ready = wait_ready(kubectl)
    assert ready["status"]["model"]["state"] == "Loaded"
    assert complete(kubectl, "chat")
    assert {Path(asked.path).name for asked in hub.downloads()} == {
        "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", WEIGHTS,
    }  # fmt: skip
    hub.requests.clear()
    kubectl("scale", "infsvc", "chat", "--replicas=2")
    wait_until(lambda: len(engines(kubectl)) == 2, timeout_s=120)
    assert hub.downloads() == []
    assert len(hub.requests) == 1, "the second only asked which commit main is"
    policy = kubectl.get("networkpolicy", "chat-engine")["spec"]
    port = int(hub.url.rpartition(":")[2])
    assert {"port": port, "protocol": "TCP"} in [p for rule in policy["egress"] for p in rule["ports"]]


def test_a_claim_that_holds_the_model_is_mounted_once_it_is_there(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    kubectl.apply(service("chat", uri="pvc://late/tiny"))
    stalled(kubectl, "chat", 'persistentvolumeclaim "late" not found')
    claim(kubectl, "late", model.parent)
    found = wait_ready(kubectl, timeout_s=120)
    assert condition(found, "Stalled")["status"] == "False"
    assert complete(kubectl, "chat")
    [pod] = engines(kubectl)
    [container] = pod["spec"]["containers"]
    assert next(m for m in container["volumeMounts"] if m["name"] == "model")["readOnly"] is True


def test_models_that_cannot_be_had_are_stalled_with_the_cause(
    kubectl: Kubectl, hub: HubServer, running: OperatorProcess, model: Path
) -> None:
    claim(kubectl, "models", model.parent)
    token = {"tokenSecretRef": {"name": "hub"}}
    kubectl.apply(
        TOKEN,
        service("revision", uri="hf://trimtab/tiny", revision="v9", **token),
        service("private", uri="hf://trimtab/tiny"),
        service("gated", uri="hf://trimtab/gated"),
        service("odd", uri="hf://trimtab/odd"),
        service("big", uri="hf://trimtab/tiny", cache={"sizeLimit": "10Ki"}, **token),
        service("path", uri="pvc://models/no-such-model"),
    )
    for name, words in (
        ("revision", "model hf://trimtab/tiny: the hub has no revision 'v9' of it"),
        ("private", "or it needs a token (tokenSecretRef, or HF_TOKEN)"),
        ("gated", "access is gated (HTTP 401); it needs a token"),
        ("odd", "model_type is 'mamba'; supported are llama"),
        ("big", "the cache may hold 10.0 KiB (cache.sizeLimit)"),
        ("path", "/models/no-such-model does not exist"),
    ):
        stalled(kubectl, name, words)
    kubectl("delete", "infsvc", "--all")
