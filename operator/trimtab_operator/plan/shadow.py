"""The engines of a Shadow run: replicas of the service's own that take its candidates, under replayed requests alone. Pure.

They are made from the template that the service's engines are made from, and differ in what keeps the two apart: other labels, so
that nothing that picks the service's pods picks these; an API key of their own instead of the service's, which the run's worker alone
has; and no rank among pods, so that a measurement displaces nobody. They stand while their run may act, and the service comes first: as
soon as it changes, or needs their place, the run is over. A run that is held (paused, in a quiet time, without its turn) has no pods, and
keeps what they stand behind: its worker goes on afterwards, and knows their address and number from its beginning. Used by
`plan.cluster`; `cluster.shadows` carries it out.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.errors import Finding
from trimtab_operator.plan import children, pods, rollout
from trimtab_operator.plan.manifests import (
    KEYS_DIRECTORY,
    SERVING_PORT,
    Context,
    Manifest,
    hash_of,
    network_policy,
)
from trimtab_operator.plan.objects import run_child

Json = dict[str, Any]
Reason = tuple[str, str]  # reason and message of a condition

EVALUATOR = "Shadow"
LIMIT = "spec.tuning.limits.extraReplicas"
#: Entry of the run's Secret; an engine's file of keys (name: key) with one entry.
KEYS_ENTRY = "api-keys.json"
WORKER_ENTRY = "api-key"  # the same, as its worker shows it
KEY_NAME = "shadow"
KEYS_VOLUME = "api-keys"
#: Nobody misses what a shadow was doing: enough to say goodbye, too little to hold a GPU.
GRACE_S = 10
#: Kinds of what belongs to one, besides its Secret, in the order to make them.
KINDS = ("NetworkPolicy", "Service", "Deployment")


@dataclass(frozen=True, slots=True)
class Standing:
    """What there is of the shadows of a service's runs."""

    objects: Mapping[children.Key, Mapping[str, Any]] = field(default_factory=dict)
    pods: tuple[Mapping[str, Any], ...] = ()

    def of(self, run: TuningRun) -> Mapping[str, Any] | None:
        """The Deployment of `run`'s."""
        return self.objects.get(("Deployment", names.shadow(run.name)))

    def since(self, run: TuningRun) -> str | None:
        """When it was made, and the run thereby begun."""
        deployment = self.of(run)
        if deployment is None or whose(run, deployment) != "ours":
            return None
        found: str | None = deployment["metadata"].get("creationTimestamp")
        return found

    def pods_of(self, run: TuningRun) -> tuple[Mapping[str, Any], ...]:
        """Its pods; those that have ended are none."""
        mine = names.shadow_labels(run.spec.service, run.name).items()
        return tuple(
            pod
            for pod in self.pods
            if mine <= (pod["metadata"].get("labels") or {}).items() and not pods.over(pod)
        )


@dataclass(frozen=True, slots=True)
class Engines:
    """What a run's worker has to know of them: how many there are, behind which address, and where the key is."""

    replicas: int
    url: str
    secret: str
    secret_key: str = WORKER_ENTRY


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do about shadows now. `size` pods are wanted for the acting run. `waits`: what they lack; `ended`: why the run is over."""

    changes: children.Changes = field(default_factory=children.Changes)
    keys: bool = False  # the Secret is to be made first
    size: int = 0
    pods: frozenset[str] = frozenset()
    engines: Engines | None = None  # once they have an address
    waits: Reason | None = None
    ended: Reason | None = None


def asks_for(run: TuningRun | None) -> bool:
    """Whether the run has engines of its own."""
    return run is not None and run.spec.evaluator == EVALUATOR


def size(service: InferenceService, standing: Mapping[str, Any] | None = None) -> int:
    """How many engines: a run keeps to the number that it began with, whatever an autoscaler does."""
    spec = service.spec
    if standing is not None:
        noted = str((standing["metadata"].get("annotations") or {}).get(names.ANNOTATION_ENGINES, ""))
        # Older operators noted nothing. What a person writes there is held against what the service allows.
        known = noted.isascii() and noted.isdecimal() and len(noted) < 6
        return max(1, int(noted) if known else int(standing["spec"].get("replicas", 1)))
    return max(1, min(spec.tuning.limits.extra_replicas, spec.wanted_replicas))


def plan(
    service: InferenceService,
    run: TuningRun | None,
    standing: Standing,
    template: Manifest,
    own: Sequence[rollout.Replica],
    replicas: Mapping[str, rollout.Replica],
    context: Context,
    *,
    held: bool = False,
) -> Plan:
    """`run` is the acting one, when it asks for engines of its own and may have them, or may have them later (`held`). `template` is that
    of the service's pods, `own` are those pods; `replicas` are the pods of shadows, by name."""
    deployment = None if run is None else standing.of(run)
    if deployment is not None and whose(run, deployment) != "ours":
        deployment = None
    if run is None or (held and deployment is None):
        return Plan(_changes(None, (), standing))
    resting = deployment is not None and deployment["spec"].get("replicas") == 0
    ended = _ended(service, deployment, template, () if held or resting else own)
    begins = not held and (resting or deployment is None)
    waits = _waits(service, template, own) if begins else None
    if ended is not None or (waits is not None and deployment is None):
        return Plan(_changes(None, (), standing), waits=waits, ended=ended)
    wanted = size(service, deployment)
    if held or waits is not None:
        rest = manifests(service, run, template, wanted, context, resting=True)
        return Plan(_changes(run, rest, standing), size=wanted, waits=waits)
    changes = _changes(run, manifests(service, run, template, wanted, context), standing)
    mine = [replicas[pod["metadata"]["name"]] for pod in standing.pods_of(run)]
    return Plan(
        changes,
        keys=deployment is None and not changes.taken and not changes.waiting,
        size=wanted,
        pods=frozenset(replica.name for replica in mine),
        engines=_engines(run, wanted, standing),
        waits=_lacking(wanted, mine, deployment),
    )


def whose(run: TuningRun | None, live: Mapping[str, Any]) -> children.Ownership:
    """Whose object this is, seen from `run`; `former` belonged to a run of the same name that is gone. Without a run, the shadow of
    any is `ours`."""
    for owner in live["metadata"].get("ownerReferences") or ():
        if not owner.get("controller"):
            continue
        group = str(owner.get("apiVersion", "")).partition("/")[0]
        if group != names.GROUP or owner.get("kind") != names.RUN_KIND:
            return "foreign"
        if live["metadata"]["name"] != names.shadow(str(owner.get("name"))):
            return "foreign"  # something else that a run has
        if run is None or owner.get("uid") == run.uid:
            return "ours"
        return "former" if owner.get("name") == run.name else "foreign"
    return "foreign"


def _engines(run: TuningRun, replicas: int, standing: Standing) -> Engines | None:
    """By the cluster's own address of their Service: no name look-up is needed, and a policy need not admit one."""
    name = names.shadow(run.name)
    found = standing.objects.get(("Service", name))
    address = "" if found is None or whose(run, found) != "ours" else found["spec"].get("clusterIP", "")
    host = f"[{address}]" if ":" in address else address
    if not host:
        return None
    return Engines(replicas, f"http://{host}:{SERVING_PORT}", names.shadow_secret(run.name, run.uid))


def _changes(run: TuningRun | None, wanted: Sequence[Manifest], standing: Standing) -> children.Changes:
    """What of `wanted` is to be applied for `run`; what any other run's shadow has left is to be deleted."""
    keys = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted}
    live = {key: found for key, found in standing.objects.items() if key in keys}
    changes = children.differences(wanted, live, lambda found: whose(run, found))
    left = tuple(
        dict(found)
        for key, found in standing.objects.items()
        if key not in keys and whose(None, found) == "ours" and not found["metadata"].get("deletionTimestamp")
    )
    return replace(changes, delete=left)


def _ended(
    service: InferenceService,
    deployment: Mapping[str, Any] | None,
    template: Manifest,
    own: Sequence[rollout.Replica],
) -> Reason | None:
    """Why a run that has begun cannot go on."""
    tuning, allowed = service.spec.tuning, service.spec.tuning.limits.extra_replicas
    least = 1 if deployment is None else size(service, deployment)
    if tuning.mode == "Off":
        return names.SERVICE_CHANGED, str(Finding("spec.tuning.mode", "Off", "any other, for a Shadow run"))
    if allowed < least:
        return names.SERVICE_CHANGED, str(Finding(LIMIT, allowed, f"at least {least}, for this run"))
    if deployment is None:
        return None
    marks = deployment["spec"]["template"]["metadata"].get("annotations") or {}
    if marks.get(names.ANNOTATION_TEMPLATE_HASH) != hash_of(template):
        message = (
            "the service's pods are replaced by others (another image, or another value of a field that restarts) since the "
            "run began: what it measured would be of engines that no longer serve"
        )
        return names.SERVICE_CHANGED, message
    if service.spec.wanted_replicas == 0:
        return names.SERVICE_CHANGED, "the service was set to no replicas"
    without = _without_place(own)
    return None if without is None else (names.MADE_ROOM, f"the run gave its engines' place back: {without}")


def _waits(service: InferenceService, template: Manifest, own: Sequence[rollout.Replica]) -> Reason | None:
    """Why a run cannot begin yet: the service comes first."""
    others = sum(replica.template_hash != hash_of(template) for replica in own)
    if service.spec.wanted_replicas == 0:
        why = "the service has no replicas"
    elif others:
        why = f"{others} of the service's own pods are still to be replaced"
    elif not any(replica.ready for replica in own):
        why = "none of the service's own pods is ready"
    else:
        without = _without_place(own)
        if without is None:
            return None
        why = f"the service's own pods come first: {without}"
    return names.SHADOW_NOT_READY, why


def _without_place(own: Sequence[rollout.Replica]) -> str | None:
    """Which of the service's own pods looks for a place; None for none."""
    found = next((r for r in own if r.unschedulable_since_s is not None and not r.ready), None)
    return None if found is None else f"{found.name}: {found.message}"


def _lacking(
    wanted: int, mine: Sequence[rollout.Replica], deployment: Mapping[str, Any] | None
) -> Reason | None:
    """What the run's engines lack; None once all are ready."""
    ready = sum(replica.ready for replica in mine)
    if ready >= wanted:
        return None
    hint = next((f"{r.name}: {r.message}" for r in mine if not r.ready and r.message), None)
    failures = (deployment or {}).get("status", {}).get("conditions") or []
    refused = next((c for c in failures if c["type"] == "ReplicaFailure" and c["status"] == "True"), None)
    if hint is None and refused is not None:
        hint = str(refused.get("message", ""))
    return names.SHADOW_NOT_READY, "; ".join(
        filter(None, (f"{ready} of {wanted} shadow pods are ready", hint))
    )


# What they are


def manifests(
    service: InferenceService,
    run: TuningRun,
    template: Manifest,
    replicas: int,
    context: Context,
    *,
    resting: bool = False,
) -> list[Manifest]:
    """In the order to apply them: who may reach the pods is settled before there are any. `resting`: without pods for now."""
    return [
        _network_policy(service, run, context),
        _cluster_service(service, run),
        _deployment(service, run, template, replicas, resting=resting),
    ]


def secret(service: InferenceService, run: TuningRun, key: str) -> Manifest:
    """The API key of the run's engines, for them and for its worker."""
    built = _head(service, run, "v1", "Secret")
    built["metadata"]["name"] = names.shadow_secret(run.name, run.uid)
    content = {KEYS_ENTRY: json.dumps({KEY_NAME: key}), WORKER_ENTRY: key}
    data = {name: base64.b64encode(text.encode()).decode() for name, text in content.items()}
    return {**built, "type": "Opaque", "immutable": True, "data": data}


def _network_policy(service: InferenceService, run: TuningRun, context: Context) -> Manifest:
    """As the service's own; but requests come from the run's worker alone."""
    usual = network_policy(service, context)["spec"]
    worker = {
        "podSelector": {
            "matchLabels": {names.LABEL_COMPONENT: names.WORKER_COMPONENT, names.LABEL_RUN: run.name}
        }
    }
    admin = [rule for rule in usual["ingress"] if all(port["port"] == "admin" for port in rule["ports"])]
    built = _head(service, run, "networking.k8s.io/v1", "NetworkPolicy")
    built["spec"] = {
        "podSelector": {"matchLabels": names.shadow_labels(service.name, run.name)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": "http", "protocol": "TCP"}], "from": [worker]}, *admin],
    }
    if service.spec.security.network_policy.enabled:
        built["spec"] |= {"policyTypes": ["Ingress", "Egress"], "egress": usual["egress"]}
    return built


def _cluster_service(service: InferenceService, run: TuningRun) -> Manifest:
    built = _head(service, run, "v1", "Service")
    built["spec"] = {
        "type": "ClusterIP",
        "selector": names.shadow_labels(service.name, run.name),
        "ports": [{"name": "http", "port": SERVING_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    return built


def _deployment(
    service: InferenceService, run: TuningRun, template: Manifest, replicas: int, *, resting: bool
) -> Manifest:
    built = _head(service, run, "apps/v1", "Deployment")
    built["metadata"]["annotations"] = {names.ANNOTATION_ENGINES: str(replicas)}
    built["spec"] = {
        "replicas": 0 if resting else replicas,
        "paused": False,
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": names.shadow_labels(service.name, run.name)},
        "strategy": {"type": "Recreate"},
        "template": pod_template(service, run, template),
    }
    return built


def pod_template(service: InferenceService, run: TuningRun, template: Manifest) -> Manifest:
    """The service's own, as its pods were made from it, with what keeps the two apart; `template` is not changed."""
    made = copy.deepcopy(template)
    made["metadata"]["labels"] = _labels(service, run)  # the owner's labels too may be what something selects
    pod = made["spec"]
    pod["terminationGracePeriodSeconds"] = GRACE_S
    pod.pop("priorityClassName", None)
    keys = {"name": KEYS_VOLUME, "secret": {"secretName": names.shadow_secret(run.name, run.uid)}}
    pod["volumes"] = [volume for volume in pod.get("volumes", ()) if volume["name"] != KEYS_VOLUME] + [keys]
    for container in pod["containers"]:
        if container["name"] == names.ENGINE_CONTAINER:
            container.pop("lifecycle", None)  # it waits for endpoints to forget the pod
            container["args"] = _with(container["args"], "--api-keys", f"{KEYS_DIRECTORY}/{KEYS_ENTRY}")
            mounts = [m for m in container.get("volumeMounts", ()) if m["mountPath"] != KEYS_DIRECTORY]
            mounts.append({"name": KEYS_VOLUME, "mountPath": KEYS_DIRECTORY, "readOnly": True})
            container["volumeMounts"] = mounts
    return made


def _with(arguments: Sequence[str], flag: str, value: str) -> list[str]:
    """`arguments` with that value of `flag`, whatever it was before."""
    if flag not in arguments:
        return [*arguments, flag, value]
    at = arguments.index(flag)
    return [*arguments[:at], flag, value, *arguments[at + 2 :]]


def _labels(service: InferenceService, run: TuningRun) -> dict[str, str]:
    common = {
        names.LABEL_NAME: "trimtab",
        names.LABEL_PART_OF: "trimtab",
        names.LABEL_MANAGED_BY: names.FIELD_MANAGER,
    }
    return {**common, names.LABEL_INSTANCE: run.name, **names.shadow_labels(service.name, run.name)}


def _head(service: InferenceService, run: TuningRun, api_version: str, kind: str) -> Manifest:
    built = run_child(run, api_version, kind, names.shadow(run.name), "shadow")
    built["metadata"]["labels"] = _labels(service, run)
    return built
