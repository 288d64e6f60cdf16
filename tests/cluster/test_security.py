"""What guards a service's pods: tokens of the admin port against a real engine, and the content of the NetworkPolicy.

No CNI enforces NetworkPolicies in the test cluster: these tests show what is asked for, not that it is carried out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.story import BUDGET, budgets, engines, service, wait_ready
from support.cluster_operator import OperatorProcess
from trimtab_operator.cluster.tokens import TOKEN_LIFE_S, Signer

Json = dict[str, Any]


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, running: OperatorProcess, model: Path) -> Iterator[Kubectl]:
    """A namespace with a service that is ready; its serving port is open to one team."""
    cluster.kubectl("create", "namespace", "security")
    kubectl = cluster.kubectl.within("security")
    team = {"namespaceSelector": {"matchLabels": {"team": "a"}}}
    kubectl.apply(service(model, security={"networkPolicy": {"ingressFrom": [team]}}))
    wait_ready(kubectl)
    yield kubectl
    cluster.kubectl("delete", "namespace", "security", "--wait=false")


class Door:
    """The admin port of the service's one engine."""

    def __init__(self, kubectl: Kubectl, running: OperatorProcess) -> None:
        [self.pod] = engines(kubectl)
        self.uid: str = self.pod["metadata"]["uid"]
        self.signer = Signer.load(running.folder / "admin-key.pem")
        self._url = f"http://{self.pod['status']['podIP']}:8001/admin/live-config"

    def knock(self, method: str, token: str | None, path: str = "", document: Json | None = None) -> int:
        """→ the HTTP status."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        answer = httpx.request(method, self._url + path, headers=headers, json=document, timeout=30)
        return answer.status_code

    def document(self, tokens: int) -> Json:
        """One that a good token would bring into force."""
        read = self.signer.token(self.uid, "read")
        found = httpx.get(self._url, headers={"Authorization": f"Bearer {read}"}, timeout=30).json()
        config = {**found["incumbent"]["config"], "max_num_batched_tokens": tokens}
        return {"generation": found["highest_generation"] + 1, "source": "Spec", "config": config}


def test_only_a_fresh_token_for_this_very_pod_and_scope_opens_the_admin_port(
    guarded: Kubectl, running: OperatorProcess
) -> None:
    door = Door(guarded, running)
    good_read, good_write = (door.signer.token(door.uid, "read"), door.signer.token(door.uid, "write"))
    assert door.knock("GET", good_read) == 200
    assert door.knock("GET", good_write) == 200, "write includes read"
    key = door.signer._key
    expired = Signer(key, now=lambda: time.time() - TOKEN_LIFE_S - 60)
    refused = {
        "none": None,
        "no token at all": "nonsense",
        "another pod's": door.signer.token("another-uid", "write"),
        "expired": expired.token(door.uid, "write"),
        "signed by another": Signer.new().token(door.uid, "write"),
    }
    document = door.document(64)
    for what, token in refused.items():
        assert door.knock("GET", token) == 401, what
        assert door.knock("PUT", token, document=document) == 401, what
    assert door.knock("PUT", good_read, document=document) == 403
    assert door.knock("DELETE", good_read, "/candidate") == 403
    assert budgets(running, guarded) == [BUDGET], "nothing came into force"
    assert door.knock("DELETE", good_write, "/candidate") in (200, 202, 204)


def test_engines_trust_the_operators_public_key_and_no_secret_is_theirs(guarded: Kubectl) -> None:
    data = guarded.get("configmap", "chat-live")["data"]
    assert data["admin.pem"].startswith("-----BEGIN PUBLIC KEY-----")
    assert "PRIVATE" not in json.dumps(data)
    assert guarded.items("secrets", "-l", "app.kubernetes.io/part-of=trimtab") == []
    [engine] = engines(guarded)
    assert engine["spec"]["automountServiceAccountToken"] is False
    assert not any("serviceAccount" in json.dumps(volume) for volume in engine["spec"]["volumes"])


def test_the_network_policy_lets_in_whom_the_spec_says_and_to_the_admin_port_operator_and_workers(
    guarded: Kubectl,
) -> None:
    spec = guarded.get("networkpolicy", "chat-engine")["spec"]
    [engine] = engines(guarded)
    assert spec["podSelector"]["matchLabels"].items() <= engine["metadata"]["labels"].items()
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec.get("egress", []) == [], "a model in the image needs nothing from outside"
    serving, admin = spec["ingress"]
    # Its runs' workers scrape one port and read the other, by read tokens; they are of this namespace.
    workers = {
        "podSelector": {
            "matchLabels": {
                "app.kubernetes.io/component": "tuning-worker",
                "serving.trimtab.dev/inferenceservice": "chat",
            }
        }
    }
    assert serving == {
        "ports": [{"port": "http", "protocol": "TCP"}],
        "from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}, workers],
    }
    assert admin["ports"] == [{"port": "admin", "protocol": "TCP"}]
    [peer] = [peer for peer in admin["from"] if peer != workers]
    assert workers in admin["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "default"}
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    ports = {port["name"] for port in engine["spec"]["containers"][0]["ports"]}
    assert {"http", "admin"} <= ports, "the policy's names are ports of the pod"
    assert [p["name"] for p in guarded.get("service", "chat")["spec"]["ports"]] == ["http"]
