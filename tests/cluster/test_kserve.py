"""Beside KServe: its CRD has the same kind and plural under another group. Ours is told apart by `infsvc`, theirs is left alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.story import OURS, engines, service, wait_condition, wait_ready, wait_until
from support.cluster_operator import OperatorProcess

Json = dict[str, Any]
THEIRS = "inferenceservices.serving.kserve.io"
FREE = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
#: Names, columns and subresource of KServe's definition; its fields are left free, as in their minimal one.
KSERVE: Json = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": THEIRS},
    "spec": {
        "group": "serving.kserve.io",
        "scope": "Namespaced",
        "names": {
            "kind": "InferenceService",
            "listKind": "InferenceServiceList",
            "plural": "inferenceservices",
            "singular": "inferenceservice",
            "shortNames": ["isvc"],
        },
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "additionalPrinterColumns": [{"name": "URL", "type": "string", "jsonPath": ".status.url"}],
                "schema": {
                    "openAPIV3Schema": {"type": "object", "properties": {"spec": FREE, "status": FREE}}
                },
            }
        ],
    },
}


@pytest.fixture
def beside(cluster: Cluster, running: OperatorProcess, kubectl: Kubectl) -> Iterator[Kubectl]:
    """A namespace in a cluster that serves both; `running` has installed ours before."""
    kubectl.apply(KSERVE)
    kubectl("wait", "--for=condition=Established", f"crd/{THEIRS}", "--timeout=60s")
    # Discovery is served from a cache of the API server's for a moment.
    wait_until(lambda: THEIRS in kubectl("api-resources", "--cached=false", "-o", "name").split())
    yield kubectl
    kubectl("delete", "crd", THEIRS)


def theirs(name: str, kubectl: Kubectl) -> Json:
    """One of KServe's services, with a status, as its controller would leave it."""
    kubectl.apply({"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": {"name": name},
                   "spec": {"predictor": {"model": {"modelFormat": {"name": "huggingface"}}}}})  # fmt: skip
    status = {"status": {"url": "http://theirs", "conditions": [{"type": "Ready", "status": "True"}]}}
    kubectl("patch", THEIRS, name, "--subresource=status", "--type=merge", "-p", json.dumps(status))
    return kubectl.get(THEIRS, name)


def test_both_kinds_of_one_name_live_side_by_side(
    beside: Kubectl, running: OperatorProcess, model: Path
) -> None:
    before = theirs("chat", beside)
    beside.apply(service(model))
    ours = wait_ready(beside)
    assert ours["apiVersion"] == "serving.trimtab.dev/v1alpha1"
    assert len(engines(beside)) == 1

    table = beside("get", "infsvc").splitlines()
    columns = dict(zip(table[0].split(), table[1].split(), strict=False))
    assert columns["NAME"] == "chat"
    assert (columns["MODEL"], columns["READY"], columns["REASON"]) == ("tiny", "True", "Serving")
    for word in ("isvc", "inferenceservices"):
        assert "http://theirs" in beside("get", word)
    assert beside.get("inferenceservices.serving.trimtab.dev", "chat")["metadata"] == ours["metadata"]
    explained = beside("explain", "infsvc.spec.engine")
    assert "GROUP:      serving.trimtab.dev" in explained
    assert "maxNumBatchedTokens" in explained

    beside("scale", "infsvc/chat", "--replicas=0")
    wait_until(lambda: engines(beside) == [], what="scaled down")
    beside("delete", "infsvc", "chat")
    wait_until(lambda: beside.items("deployments,services,configmaps", "-l", f"{OURS}=chat") == [])
    assert beside.get(THEIRS, "chat") == before, "theirs was never written"


def test_what_belongs_to_theirs_is_never_taken_over(beside: Kubectl, running: OperatorProcess) -> None:
    owner = theirs("chat", beside)
    reference = {"apiVersion": owner["apiVersion"], "kind": "InferenceService", "name": "chat", "controller": True,
                 "uid": owner["metadata"]["uid"]}  # fmt: skip
    beside.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "ownerReferences": [reference]},
                  "spec": {"ports": [{"port": 80}]}})  # fmt: skip
    before = beside.get("service", "chat")
    spec = {"model": {"uri": "file:///models/tiny"}, "suspend": True}
    beside.apply({"apiVersion": "serving.trimtab.dev/v1alpha1", "kind": "InferenceService",
                  "metadata": {"name": "chat"}, "spec": spec})  # fmt: skip
    stalled = wait_condition(beside, "Stalled", "True", "NameTaken")
    assert "Service" in json.dumps(stalled["status"]["conditions"])
    beside("delete", "infsvc", "chat")
    wait_until(lambda: "chat" not in beside("get", "infsvc", "-o", "name"))
    assert beside.get("service", "chat") == before
    assert beside.get(THEIRS, "chat") == owner
