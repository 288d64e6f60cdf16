"""The whole life of a service as its owner sees it, with kubectl and the openai client, on a real control plane."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI

from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.load import Load
from support.cluster.story import (
    CHILDREN,
    MAX_GAP_S,
    OURS,
    Json,
    address,
    budgets,
    engines,
    restarts,
    service,
    wait_ready,
    wait_until,
)
from support.cluster_operator import OperatorProcess

READY_S = 240


def test_the_life_of_a_service(
    cluster: Cluster, kubectl: Kubectl, running: OperatorProcess, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chat.yaml"
    made = service(model, replicas=2, rollout={"drainTimeout": "60s"})
    made["spec"]["engine"]["maxModelLen"] = 8192
    file.write_text(json.dumps(made))  # JSON is YAML

    # Apply, and wait as a script does.
    kubectl("apply", "-f", str(file))
    kubectl("wait", "--for=condition=Ready", "infsvc/chat", f"--timeout={READY_S}s", timeout_s=READY_S + 10)
    assert row(kubectl("get", "infsvc")) == {
        "NAME": "chat", "MODEL": "tiny", "READY": "True", "AVAILABLE": "True", "REASON": "Serving", "REPLICAS": "2/2",
        "POLICY": "fcfs", "BATCHTOKENS": "512", "SLO": "Unknown",
    }  # fmt: skip
    at_first = engines(kubectl)

    # A streamed chat through the Service.
    client = OpenAI(base_url=f"{address(kubectl)}/v1", api_key="unused", max_retries=0, timeout=60)
    pieces, _ = chat(client, 32)
    assert len(pieces) > 5

    # A live field: every engine has it, no pod restarts, no stream stands still.
    with ThreadPoolExecutor(1) as editor:

        def edit() -> None:
            kubectl("patch", "infsvc", "chat", "--type=merge", "-p", '{"spec": {"engine": {"maxNumBatchedTokens": 256}}}')  # fmt: skip
            wait_until(lambda: budgets(running, kubectl) == [256, 256])

        under_way = editor.submit(edit)
        gaps = [0.0]
        while not under_way.done():
            gaps.append(chat(client, 2000)[1])
        under_way.result()
    assert max(gaps) < MAX_GAP_S
    live = kubectl.wait_for("applied", "infsvc", "chat", condition=lambda r: r["status"]["engine"]["applied"] == r["status"]["engine"]["desired"])  # fmt: skip
    assert live["status"]["engine"]["applied"]["maxNumBatchedTokens"] == 256
    assert live["status"]["engine"]["appliedReplicas"] == "2/2"
    assert {p["metadata"]["uid"]: restarts(p) for p in engines(kubectl)} == {p["metadata"]["uid"]: 0 for p in at_first}  # fmt: skip
    assert {"kopf", "finalizers"}.isdisjoint(json.dumps(live["metadata"]).split('"'))

    # A field that needs a restart, under load.
    with Load(address(kubectl)) as load:
        load.wait_served()
        kubectl(
            "patch", "infsvc", "chat", "--type=merge", "-p", '{"spec": {"engine": {"maxModelLen": 8000}}}'
        )
        settle(kubectl, 2)
        load.wait_served()
    assert load.failed == [], load.summary()
    after = engines(kubectl)
    assert uids(after).isdisjoint(uids(at_first))
    assert budgets(running, kubectl) == [256, 256], "a new pod comes up with the present live config"

    # More replicas; then a node is emptied, by the eviction API and the disruption budget.
    kubectl("scale", "infsvc", "chat", "--replicas=3")
    settle(kubectl, 3)
    assert row(kubectl("get", "infsvc"))["REPLICAS"] == "3/3"
    node, count = Counter(pod["spec"]["nodeName"] for pod in engines(kubectl)).most_common(1)[0]
    assert count >= 2
    try:
        with Load(address(kubectl)) as load:
            load.wait_served()
            said = kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", timeout_s=READY_S)
            settle(kubectl, 3)
            load.wait_served()
    finally:
        kubectl("uncordon", node)
    assert said.count("evicting pod") >= count
    assert load.failed == [], load.summary()
    assert node not in {pod["spec"]["nodeName"] for pod in engines(kubectl)}

    # Deleted, with everything.
    kubectl("delete", "infsvc", "chat", timeout_s=60)
    wait_until(lambda: kubectl.items(CHILDREN, "-l", f"{OURS}=chat") == [], READY_S)
    wait_until(lambda: kubectl.items("endpointslices") == [])


def test_an_autoscaler_can_drive_a_service(kubectl: Kubectl, running: OperatorProcess, model: Path) -> None:
    kubectl.apply(service(model))
    wait_ready(kubectl)
    scale = json.loads(
        kubectl(
            "get",
            "--raw",
            f"/apis/serving.trimtab.dev/v1alpha1/namespaces/{kubectl.namespace}/inferenceservices/chat/scale",
        )
    )
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (1, 1)
    assert len(kubectl.items("pods", "-l", scale["status"]["selector"])) == 1
    kubectl("autoscale", "infsvc", "chat", "--min=2", "--max=3", "--cpu=80%")
    # There are no metrics here; bounds bind without any.
    settle(kubectl, 2)
    conditions = {c["type"]: c for c in kubectl.get("hpa", "chat")["status"]["conditions"]}
    assert conditions["AbleToScale"]["status"] == "True"
    assert kubectl.get("infsvc", "chat")["spec"]["replicas"] == 2


def chat(client: OpenAI, tokens: int) -> tuple[list[str], float]:
    """One streamed chat → its pieces, and the longest gap between two."""
    pieces: list[str] = []
    longest_s, last_s = 0.0, None
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Tell me about the sea"}],
        max_tokens=tokens,
        stream=True,
    )
    finish = None
    for chunk in stream:
        now_s = time.monotonic()
        longest_s = max(longest_s, now_s - (last_s or now_s))
        last_s = now_s
        pieces.append(chunk.choices[0].delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    assert finish == "length"
    return pieces, longest_s


def row(table: str) -> dict[str, str]:
    """The one row of a `kubectl get` by its headings, without the age."""
    heading, line = table.splitlines()
    found = dict(zip(heading.split(), line.split(), strict=True))
    del found["AGE"]
    return found


def uids(pods: list[Json]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def settle(kubectl: Kubectl, replicas: int) -> None:
    """Until the service is Ready with so many pods, and nobody is leaving any more."""

    def settled() -> bool:
        wait_ready(kubectl, timeout_s=READY_S)
        listed = kubectl.items("pods", "-l", f"{OURS}=chat")
        return len(listed) == len(engines(kubectl)) == replicas

    wait_until(settled, READY_S, f"no {replicas} pods at rest")
