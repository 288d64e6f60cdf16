"""Three hundred invalid resources through the real API server, with the operator running: none is taken in silence, none does harm.

Each is refused by the API server, or told by a condition with path, value and range. Local mode's own reading of the same resource
gives the same verdict. A valid service in the same namespace goes on, and so does the operator.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

from kubernetes import client, config

from support.cluster.kubectl import Kubectl
from support.cluster.story import (
    budgets,
    condition,
    edit_budget,
    engines,
    restarts,
    service,
    wait_ready,
    wait_until,
)
from support.cluster_operator import OperatorProcess
from support.spoiled import FULL, FULL_RUN, distinct, spoiled, too_long
from trimtab_operator import schema
from trimtab_operator.errors import InvalidResource

Json = dict[str, Any]
SERVICES, RUNS = 380, 60
INVALID = 300
PLURALS = {"InferenceService": "inferenceservices", "TuningRun": "tuningruns"}
FAILED = 'trimtab_operator_reconcile_total{result="failed"'


class Sent(NamedTuple):
    """One resource and what became of it. `said` is the API server's refusal, None when it took the resource."""

    built: Json
    kind: str
    name: str
    said: str | None


def made(full: Json, count: int, prefix: str) -> list[Json]:
    """Spoiled resources, each under a name of its own where its name is not what is spoiled."""
    found = []
    for index, built in enumerate([*too_long(full), *distinct(spoiled(full), count)]):
        metadata = built.get("metadata")
        if isinstance(metadata, dict) and metadata.get("name") == full["metadata"]["name"]:
            metadata["name"] = f"{prefix}-{index}"
        found.append(built)
    return found


def send(api: client.CustomObjectsApi, namespace: str, kind: str, built: Json) -> Sent:
    """Create it as kubectl does: unknown fields are refused."""
    metadata = built.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    try:
        api.create_namespaced_custom_object(
            "serving.trimtab.dev", "v1alpha1", namespace, PLURALS[kind], built, field_validation="Strict"
        )
    except client.ApiException as error:
        if error.status not in (400, 422):
            raise
        return Sent(built, kind, str(name), str(json.loads(error.body)["message"]))
    return Sent(built, kind, str(name), None)


def schema_refusal(built: Json, kind: str) -> InvalidResource | None:
    """What local mode says where the API server can speak too: structure and rules."""
    try:
        schema.validate(built, kind=kind)
    except InvalidResource as error:
        return error
    return None


def later_refusal(built: Json, kind: str) -> InvalidResource | None:
    """What local mode says of a resource that the API server takes: ranges of durations, the pod template."""
    try:
        schema.parse_run(built) if kind == "TuningRun" else schema.parse_service(built)
    except InvalidResource as error:
        return error
    return None


def judged(kubectl: Kubectl, names: dict[str, set[str]]) -> dict[tuple[str, str], Json]:
    """The resources that the API server took, by kind and name; empty until the operator has spoken of each."""
    found: dict[tuple[str, str], Json] = {}
    for kind, plural in PLURALS.items():
        for item in kubectl.items(f"{plural}.serving.trimtab.dev"):
            name = item["metadata"]["name"]
            if name not in names[kind]:
                continue
            status = item.get("status", {})
            if status.get("observedGeneration") != item["metadata"]["generation"]:
                return {}
            found[(kind, name)] = item
    return found


def test_300_invalid_resources_are_refused_or_told_by_a_condition_and_harm_nobody(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    kubectl.apply(service(model))
    wait_ready(kubectl)
    [before] = engines(kubectl)
    assert running.process is not None
    pid, failed = running.process.pid, running.metric(FAILED)

    connection = config.new_client_from_config(str(kubectl.kubeconfig), context=kubectl.context)
    api = client.CustomObjectsApi(connection)
    todo = [("InferenceService", built) for built in made(FULL, SERVICES, "bad")]
    todo += [("TuningRun", built) for built in made(FULL_RUN, RUNS, "run")]
    sent = [send(api, kubectl.namespace, kind, copy.deepcopy(built)) for kind, built in todo]

    differ = []
    for item in sent:
        ours = schema_refusal(item.built, item.kind)
        if (ours is None) != (item.said is None):
            differ.append(f"{item.name}: the API server said {item.said}, local mode said {ours}")
    assert differ == []

    taken = [item for item in sent if item.said is None]
    names = {kind: {item.name for item in taken if item.kind == kind} for kind in PLURALS}
    wait_until(lambda: len(judged(kubectl, names)) == len(taken), 120, "the operator has not spoken of each")
    told, untold = 0, []
    for (kind, name), resource in judged(kubectl, names).items():
        error = later_refusal(next(i.built for i in taken if (i.kind, i.name) == (kind, name)), kind)
        stalled = condition(resource, "Stalled")
        if error is None:
            continue  # valid after all, but for what only the API server's dry run of a pod knows
        told += 1
        missing = [str(finding) for finding in error.errors if str(finding) not in stalled["message"]]
        if (stalled["status"], stalled["reason"]) != ("True", "InvalidSpec") or missing:
            untold.append(f"{name}: {missing or error} is not in {stalled}")
    assert untold == []
    refused = len(sent) - len(taken)
    print(
        f"{refused} refused by the API server, {told} told by a condition, {len(taken) - told} valid after all"
    )
    assert refused + told >= INVALID
    assert told >= 5, "both ways are walked"

    edit_budget(kubectl, 256)
    wait_until(lambda: budgets(running, kubectl) == [256], 60, "the valid service goes on")
    [after] = engines(kubectl)
    assert (after["metadata"]["uid"], restarts(after)) == (before["metadata"]["uid"], restarts(before))
    assert running.process.poll() is None
    assert (running.process.pid, running.metric(FAILED)) == (pid, failed), "no reconcile failed"
    assert running.healthy()
    assert "Traceback" not in running.log.read_text()
