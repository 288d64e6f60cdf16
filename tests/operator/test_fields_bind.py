"""Every field of spec changes something that is carried out: an argument, the live document, a manifest, the rollout.

`PROBES` holds one probe a field; `LATER` names the fields that only parts act on which are not there yet, with the part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from support.crd_fields import leaves
from support.services import BUDGET_PARAMETER, flag, resource, service
from trimtab_operator import names, schema, support
from trimtab_operator.api import InferenceService
from trimtab_operator.api.status import Resolved
from trimtab_operator.errors import InvalidResource
from trimtab_operator.plan.engine_flags import Placement, engine_arguments
from trimtab_operator.plan.live import effective, live_document, recommend
from trimtab_operator.plan.manifests import Context, manifests
from trimtab_operator.plan.rollout import Desired
from trimtab_operator.plan.template import restarts, template_hash

Probe = Callable[[InferenceService], Any]


def argument(name: str) -> Probe:
    return lambda s: flag(engine_arguments(s.spec), name)


def words(s: InferenceService) -> list[str]:
    return engine_arguments(s.spec)


def live(*path: str | int) -> Probe:
    def probe(s: InferenceService) -> Any:
        found: Any = live_document(s.spec, 1)["config"]
        for step in path:
            found = found[step] if not isinstance(step, int) or step < len(found) else None
        return found

    return probe


def manifest(kind: str, *path: str | int) -> Probe:
    """The value at `path` in the manifest of that kind; None when there is none."""

    def probe(s: InferenceService) -> Any:
        context = Context(Resolved(image="default"))
        found: Any = next((m for m in manifests(s, context) if m["kind"] == kind), None)
        for step in path:
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, list) and isinstance(step, int) and step < len(found):
                found = found[step]
            else:
                return None
        return found

    return probe


POD = ("spec", "template", "spec")
CONTAINER = (*POD, "containers", 0)


def volume(name: str) -> Probe:
    def probe(s: InferenceService) -> Any:
        volumes = manifest("Deployment", *POD, "volumes")(s)
        return next((v for v in volumes if v["name"] == name), None)

    return probe


def environment(name: str) -> Probe:
    def probe(s: InferenceService) -> Any:
        env = manifest("Deployment", *CONTAINER, "env")(s)
        return next((e for e in env if e["name"] == name), None)

    return probe


def desired(name: str) -> Probe:
    return lambda s: getattr(Desired.of(s.spec, template_hash(s.spec), 1), name)


def tuned(s: InferenceService) -> Any:
    """The budget in force when a tuner recommends 128, or why it was refused."""
    try:
        found = recommend(s.spec, {"max_num_batched_tokens": 128})
    except InvalidResource as error:
        return str(error)
    return effective(s.spec, found).config["max_num_batched_tokens"]


def tuned_policy(s: InferenceService) -> Any:
    try:
        found = recommend(s.spec, {"scheduling_policy": "priority"})
    except InvalidResource as error:
        return str(error)
    return effective(s.spec, found).config["scheduling_policy"]


def unsupported(s: InferenceService) -> Any:
    return [finding.path for finding in support.findings(s, "cluster")]


@dataclass(frozen=True)
class Binding:
    """`probe` gives `want` once the field is `value`, and something else before. `base` are fields it needs beside it."""

    probe: Probe
    value: Any
    want: Any
    base: dict[str, Any] | None = None


HUB = {"model.uri": "hf://a/b"}
APPLY = {"tuning": {"mode": "Apply", "parameters": [BUDGET_PARAMETER]}}
CLASS = {"slo.classes": [{"name": "batch"}]}
KEYS = {"security.apiKeySecretRef": {"name": "keys"}}


def batch(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "batch", **fields}]


PROBES: dict[str, Binding] = {
    "model.uri": Binding(words, "package://pack/model.gguf", None),
    "model.servedName": Binding(argument("--served-model-name"), "mine", "mine"),
    "model.cache.claimName": Binding(
        volume("cache"), "claim", {"name": "cache", "persistentVolumeClaim": {"claimName": "claim"}}
    ),
    "model.cache.sizeLimit": Binding(
        volume("cache"), "2Gi", {"name": "cache", "emptyDir": {"sizeLimit": str(2 * 2**30)}}
    ),
    "model.tokenSecretRef.name": Binding(
        environment("HF_TOKEN"),
        "token",
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}},
        HUB,
    ),
    "model.tokenSecretRef.key": Binding(
        environment("HF_TOKEN"),
        "k",
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "t", "key": "k"}}},
        {**HUB, "model.tokenSecretRef": {"name": "t"}},
    ),
    "replicas": Binding(manifest("Deployment", "spec", "replicas"), 3, 3),
    "engine.runtime": Binding(unsupported, "vllm", ["spec.engine.runtime"]),
    "engine.image": Binding(manifest("Deployment", *CONTAINER, "image"), "mine:1", "mine:1"),
    "engine.imagePullPolicy": Binding(
        manifest("Deployment", *CONTAINER, "imagePullPolicy"), "Always", "Always"
    ),
    "engine.imagePullSecrets[].name": Binding(
        manifest("Deployment", *POD, "imagePullSecrets"), [{"name": "s"}], [{"name": "s"}]
    ),
    "engine.extraArgs": Binding(lambda s: words(s)[-1], ["--seed=7"], "--seed=7"),
    "engine.maxNumBatchedTokens": Binding(live("max_num_batched_tokens"), 512, 512),
    "engine.maxNumSeqs": Binding(live("max_num_seqs"), 8, 8),
    "engine.schedulingPolicy": Binding(live("scheduling_policy"), "priority", "priority"),
    "engine.longPrefillTokenThreshold": Binding(live("long_prefill_token_threshold"), 99, 99),
    "engine.priorityAging": Binding(live("priority_aging_s"), "1m", 60.0),
    "engine.ceilings.maxNumBatchedTokens": Binding(
        argument("--ceiling-max-num-batched-tokens"), 4096, "4096"
    ),
    "engine.ceilings.maxNumSeqs": Binding(argument("--ceiling-max-num-seqs"), 99, "99"),
    "engine.maxModelLen": Binding(argument("--max-model-len"), 999, "999"),
    "engine.dtype": Binding(argument("--dtype"), "float16", "float16"),
    "engine.kvBlockSize": Binding(argument("--block-size"), 32, "32"),
    "engine.kvCacheMemory": Binding(argument("--kv-cache-memory"), "1.5Gi", str(1536 * 2**20)),
    "engine.gpuMemoryUtilization": Binding(argument("--gpu-memory-utilization"), 0.7, "0.7"),
    "engine.enablePrefixCaching": Binding(lambda s: "--no-enable-prefix-caching" in words(s), False, True),
    "engine.tensorParallelSize": Binding(
        lambda s: template_hash(s.spec) == template_hash(service(**{"engine.runtime": "vllm"}).spec),
        2,
        False,
        {"engine.runtime": "vllm"},
    ),
    "engine.maxQueuedRequests": Binding(argument("--max-queued-requests"), 9, "9"),
    "slo.objective": Binding(live("slo", "classes", 0, "objective"), 95, 95.0),
    "slo.ttft": Binding(live("slo", "classes", 0, "ttft_s"), "800ms", 0.8),
    "slo.itl": Binding(live("slo", "classes", 0, "itl_s"), "60ms", 0.06),
    "slo.defaultClass": Binding(live("slo", "default_class"), "chat", "chat"),
    "slo.trustedHeaders.class": Binding(argument("--trusted-class-header"), "X-C", "X-C"),
    "slo.trustedHeaders.tenant": Binding(argument("--trusted-tenant-header"), "X-T", "X-T"),
    "slo.classes[].name": Binding(
        lambda s: [c["name"] for c in live("slo", "classes")(s)], batch(), ["default", "batch"]
    ),
    "slo.classes[].ttft": Binding(live("slo", "classes", 1, "ttft_s"), batch(ttft="9s"), 9.0, CLASS),
    "slo.classes[].itl": Binding(live("slo", "classes", 1, "itl_s"), batch(itl="9s"), 9.0, CLASS),
    "slo.classes[].objective": Binding(
        live("slo", "classes", 1, "objective"), batch(objective=90), 90.0, CLASS
    ),
    "tuning.mode": Binding(tuned, "Apply", 128, {"tuning": {**APPLY["tuning"], "mode": "Recommend"}}),
    "tuning.parameters[].name": Binding(
        tuned,
        [BUDGET_PARAMETER],
        128,
        {"tuning": {"mode": "Apply", "parameters": [{**BUDGET_PARAMETER, "name": "maxNumSeqs", "max": 256}]}},
    ),
    "tuning.parameters[].min": Binding(
        tuned,
        [BUDGET_PARAMETER],
        128,
        {"tuning": {"mode": "Apply", "parameters": [{**BUDGET_PARAMETER, "min": 129}]}},
    ),
    "tuning.parameters[].max": Binding(
        tuned,
        [BUDGET_PARAMETER],
        128,
        {"tuning": {"mode": "Apply", "parameters": [{**BUDGET_PARAMETER, "max": 127}]}},
    ),
    "tuning.parameters[].choices": Binding(
        tuned_policy,
        [{"name": "schedulingPolicy", "choices": ["fcfs", "priority"]}],
        "priority",
        {"tuning": {"mode": "Apply", "parameters": [{"name": "schedulingPolicy", "choices": ["fcfs"]}]}},
    ),
    "rollout.strategy": Binding(desired("strategy"), "Recreate", "Recreate"),
    "rollout.maxSurge": Binding(desired("max_surge"), 2, 2),
    "rollout.maxUnavailable": Binding(desired("max_unavailable"), 1, 1),
    "rollout.drainTimeout": Binding(argument("--drain-timeout"), "2m", "120"),
    "rollout.progressDeadline": Binding(desired("progress_deadline_s"), "90s", 90.0),
    "podTemplate": Binding(
        manifest("Deployment", *POD, "nodeSelector"), {"spec": {"nodeSelector": {"a": "b"}}}, {"a": "b"}
    ),
    "service.type": Binding(manifest("Service", "spec", "type"), "NodePort", "NodePort"),
    "service.port": Binding(manifest("Service", "spec", "ports", 0, "port"), 80, 80),
    "service.annotations": Binding(manifest("Service", "metadata", "annotations"), {"a": "b"}, {"a": "b"}),
    "security.apiKeySecretRef.name": Binding(
        volume("api-keys"), "keys", {"name": "api-keys", "secret": {"secretName": "keys"}}
    ),
    "security.apiKeySecretRef.key": Binding(
        lambda s: flag(manifest("Deployment", *CONTAINER, "args")(s), "--api-keys"),
        "k.json",
        "/etc/trimtab/api-keys/k.json",
        KEYS,
    ),
    "security.networkPolicy.enabled": Binding(manifest("NetworkPolicy", "kind"), False, None),
    "security.networkPolicy.ingressFrom": Binding(
        manifest("NetworkPolicy", "spec", "ingress", 0, "from"), [{"podSelector": {}}], [{"podSelector": {}}]
    ),
    "podDisruptionBudget.enabled": Binding(
        manifest("PodDisruptionBudget", "kind"), False, None, {"replicas": 3}
    ),
    "podDisruptionBudget.minAvailable": Binding(
        manifest("PodDisruptionBudget", "spec", "minAvailable"), 2, 2, {"replicas": 3}
    ),
    "podDisruptionBudget.maxUnavailable": Binding(
        manifest("PodDisruptionBudget", "spec", "maxUnavailable"), 2, 2, {"replicas": 3}
    ),
    "startupTimeout": Binding(
        manifest("Deployment", *CONTAINER, "startupProbe", "failureThreshold"), "10m", 120
    ),
    "suspend": Binding(manifest("Deployment", "spec", "replicas"), True, 0),
}
TARGET = "targetRef: said to be unsupported until a server of one's own can be tuned"
SCHEDULED = "cluster mode: the CronJob and the runs it creates"
WATCHED = "cluster mode: the verdict SLOMet and drift, read from Prometheus"
LATER = {
    "model.revision": "hf:// downloads",
    "targetRef.apiVersion": TARGET,
    "targetRef.kind": TARGET,
    "targetRef.name": TARGET,
    "slo.window": WATCHED,
    "tuning.drift.enabled": WATCHED,
    "tuning.drift.windows": WATCHED,
    **{path: SCHEDULED for path in leaves(names.SERVICE_KIND) if path.startswith("tuning.nightly.")},
    **{path: SCHEDULED for path in leaves(names.SERVICE_KIND) if path.startswith("tuning.limits.")},
    "rollout.upgradePolicy": "cluster mode: what an operator upgrade may roll",
    **{
        path: "cluster mode: monitors"
        for path in leaves(names.SERVICE_KIND)
        if path.startswith("monitoring.")
    },
}


def built(binding: Binding, path: str, *, changed: bool) -> InferenceService:
    changes: dict[str, Any] = dict(binding.base or {})
    if changed:
        where = path.partition("[]")[0]
        whole = isinstance(changes.get("tuning"), dict) and where.startswith("tuning.")
        if whole:
            changes = {"tuning": {**changes["tuning"], where.removeprefix("tuning."): binding.value}}
        else:
            changes[where] = binding.value
    return service(**changes)


@pytest.mark.parametrize("path", PROBES)
def test_field_binds(path: str) -> None:
    binding = PROBES[path]
    before = binding.probe(built(binding, path, changed=False))
    after = binding.probe(built(binding, path, changed=True))
    assert after != before
    if path != "model.uri":
        assert after == binding.want


def test_model_uri_arrives_as_the_engines_own_reference() -> None:
    for uri, want in (
        ("package://pack/model.gguf", "package://pack/model.gguf"),
        ("file:///models/a%20b", "/models/a b"),
        ("pvc://claim/dir/model", "/models/dir/model"),
    ):
        assert words(service(**{"model.uri": uri}))[:2] == ["serve", want]


def test_no_field_is_forgotten() -> None:
    assert set(PROBES) | set(LATER) == set(leaves(names.SERVICE_KIND))
    assert set(PROBES) & set(LATER) == set()


def test_fields_of_later_parts_are_at_least_parsed() -> None:
    changes = {
        "slo.window": "1m",
        "tuning": {
            "parameters": [BUDGET_PARAMETER],
            "nightly": {
                "schedule": "@daily",
                "timeLimit": "90m",
                "workload": "Trace",
                "traceRef": {"name": "t"},
            },
            "drift": {"enabled": True, "windows": 2},
            "limits": {"maxThroughputLoss": "2.5%", "notDuring": [{"schedule": "@daily", "duration": "1h"}]},
        },
        "rollout.upgradePolicy": "Auto",
        "monitoring.podMonitor": {"enabled": False, "labels": {"a": "b"}},
    }
    spec = service(**changes).spec
    assert spec.slo.window_s == 60.0
    assert spec.tuning.nightly is not None
    assert spec.tuning.nightly.time_limit_s == 5400.0
    assert spec.tuning.nightly.trace_ref is not None
    assert spec.tuning.nightly.trace_ref.key == "trace.jsonl"
    assert spec.tuning.limits.max_throughput_loss_fraction == 0.025
    assert spec.tuning.limits.not_during[0].duration_s == 3600.0
    assert spec.monitoring.pod_monitor.enabled is False


@pytest.mark.parametrize("path", [p for p in PROBES if not p.startswith(("engine.runtime", "engine.tensor"))])
def test_field_restarts_engines_exactly_when_its_description_says_so(path: str) -> None:
    binding = PROBES[path]
    description = leaves(names.SERVICE_KIND)[path]["description"]
    before, after = built(binding, path, changed=False), built(binding, path, changed=True)
    assert restarts(before, after) == description.endswith("Change: restart.")
    if description.endswith("Change: live.") and not path.startswith("tuning."):
        assert live_document(before.spec, 1) != live_document(after.spec, 1)


def test_placement_alone_does_not_change_the_template() -> None:
    spec = service().spec
    assert engine_arguments(spec, Placement(port=1)) != engine_arguments(spec, Placement(port=2))
    assert template_hash(spec) == template_hash(schema.parse_service(resource()).spec)
