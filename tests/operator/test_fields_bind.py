"""Every field of spec changes something that is carried out: an argument, the live document, a manifest, the rollout. A field that
this release does not act on yet changes a condition, which names it: none is ignored in silence.

`PROBES` holds one probe a field; `ELSEWHERE` names the test of a field that needs more of a story than one look. The table is
held against the schema: a new field without a binding fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from support.crd_fields import leaves
from support.pods import T0
from support.runs import tuning_run
from support.services import BUDGET_PARAMETER, SMALLEST, flag, resource, service
from trimtab_operator import names, schema, support
from trimtab_operator.api import InferenceService
from trimtab_operator.api.status import Condition, Resolved, ServiceStatus
from trimtab_operator.cluster.observe import Key
from trimtab_operator.cluster.slo import SloWatch
from trimtab_operator.errors import InvalidResource
from trimtab_operator.plan import cluster, made_runs, monitors, nightly, shadow, tuning_drift
from trimtab_operator.plan.engine_flags import Placement, engine_arguments
from trimtab_operator.plan.live import Switch, effective, live_document, recommend
from trimtab_operator.plan.manifests import Context, manifests
from trimtab_operator.plan.pods import rfc3339
from trimtab_operator.plan.rollout import Desired
from trimtab_operator.plan.slo import Attainment, Counts
from trimtab_operator.plan.template import restarts, template_hash
from trimtab_operator.plan.tuner_pod import Tuner

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


def monitor(kind: str, *path: str) -> Probe:
    """The same in the monitor of that kind, where the API server has both kinds."""

    def probe(s: InferenceService) -> Any:
        both = frozenset({"PodMonitor", "PrometheusRule"})
        found: Any = next((m for m in monitors.manifests(s, both) if m["kind"] == kind), None)
        for step in path:
            found = found.get(step) if found is not None else None
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


def told(kind: str) -> Probe:
    """Status and reason of a condition, and the fields that its message names."""

    def probe(s: InferenceService) -> Any:
        seen = cluster.Observed(s)
        decision = cluster.decide(seen, cluster.Settings(Resolved(image="default")), T0, rfc3339(T0))
        found = cluster.conclude(seen, decision, T0, rfc3339(T0)).status.condition(kind)
        assert found is not None
        return found.status, found.reason, re.findall(r"(spec\.[\w.]+): ", found.message)

    return probe


class Asking(SloWatch):
    """Notes over which times Prometheus would be asked."""

    def __init__(self) -> None:
        super().__init__("http://prometheus", None, lambda key: None)
        self.windows: list[float] = []

    def _counts(self, window_s: float) -> dict[Key, dict[tuple[str, str], Counts]]:
        self.windows.append(window_s)
        return {}


def asked(s: InferenceService) -> Any:
    watch = Asking()
    watch.about(Key(s.namespace, s.name), s.spec.slo)
    watch.turn()
    return watch.windows


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
    "model.revision": Binding(argument("--revision"), "v1", "v1", HUB),
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
        manifest("NetworkPolicy", "spec", "ingress", 0, "from", 0), [{"podSelector": {}}], {"podSelector": {}}
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
    "monitoring.podMonitor.enabled": Binding(monitor("PodMonitor", "kind"), False, None),
    "monitoring.podMonitor.labels": Binding(
        monitor("PodMonitor", "metadata", "labels", "release"), {"release": "stack"}, "stack"
    ),
    "monitoring.prometheusRule.enabled": Binding(monitor("PrometheusRule", "kind"), False, None),
    "monitoring.prometheusRule.labels": Binding(
        monitor("PrometheusRule", "metadata", "labels", "release"), {"release": "stack"}, "stack"
    ),
    "startupTimeout": Binding(
        manifest("Deployment", *CONTAINER, "startupProbe", "failureThreshold"), "10m", 120
    ),
    "suspend": Binding(manifest("Deployment", "spec", "replicas"), True, 0),
}
MAY_TUNE = {"tuning": {"mode": "Apply", "parameters": [BUDGET_PARAMETER]}}
TARGET = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}
TRACE = {"workload": "Trace", "traceRef": {"name": "t", "key": "k"}}
NIGHTLY = {"tuning": {**MAY_TUNE["tuning"], "nightly": {"schedule": "@daily"}}}
DRIFT = {"tuning": {**MAY_TUNE["tuning"], "drift": {"enabled": True}}}


def scheduled(name: str, fields: dict[str, Any], want: Any) -> Binding:
    """A field of the CronJob."""

    def probe(s: InferenceService) -> Any:
        return nightly.manifests(s, Tuner())[-1]["spec"].get(name)

    return Binding(probe, {"schedule": "@daily", **fields}, want, NIGHTLY)


def started_with(word: str, fields: dict[str, Any], want: str) -> Binding:
    """A word of the command line that makes a run."""

    def probe(s: InferenceService) -> str | None:
        pod = nightly.manifests(s, Tuner())[-1]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        given = dict(argument.split("=", 1) for argument in pod["containers"][0]["args"] if "=" in argument)
        return given.get(word)

    return Binding(probe, {"schedule": "@daily", **fields}, want, NIGHTLY)


def drift_run_after_two_windows(s: InferenceService) -> bool:
    """Whether a run is made for targets that have been missed that long."""
    since = rfc3339(T0 - 2 * s.spec.slo.window_s)
    before = ServiceStatus(
        conditions=(Condition(names.SLO_MET, "False", names.TARGETS_MISSED, last_transition_time=since),)
    )
    found = tuning_drift.verdict(s, before, Attainment("Violated", names.TARGETS_MISSED), (), Switch(), T0)
    return found is not None and found.create is not None


def runs_kept_of_twelve(s: InferenceService) -> int:
    """How many finished nightly runs are left."""
    runs = [
        tuning_run(f"chat-{number}", origin="nightly", phase="Succeeded", age_s=number)
        for number in range(12)
    ]
    return 12 - len(made_runs.superfluous(runs, s.spec.tuning.run_history_limit))


def engines_of_a_run(s: InferenceService) -> int:
    """How many a Shadow run would get beside three replicas."""
    return shadow.size(replace(s, spec=replace(s.spec, replicas=3)))


def not_during(**changes: str) -> dict[str, Any]:
    """Limits with one quiet time, in force at 08:00 UTC, which is T0, until 09:30."""
    return {"notDuring": [{"schedule": "0 7 * * *", "duration": "2h30m", "timeZone": "UTC", **changes}]}


def quiet_until(s: InferenceService) -> str | None:
    """Until when tuning is not ready for a quiet time: hour and minute."""
    decided = cluster.decide(
        cluster.Observed(s), cluster.Settings(Resolved(image="default")), T0, rfc3339(T0)
    )
    found = cluster.conclude(cluster.Observed(s), decided, T0, rfc3339(T0)).status.condition(
        names.TUNING_READY
    )
    assert found is not None
    until = re.search(r"until 2027-01-15T(\d\d:\d\d):00Z", found.message)
    return until[1] if until and found.reason == names.QUIET_TIME else None


PROBES |= {
    "tuning.limits.extraReplicas": Binding(engines_of_a_run, {"extraReplicas": 2}, 2, MAY_TUNE),
    "slo.window": Binding(asked, "1m", [60.0]),
    **{f"targetRef.{name}": Binding(unsupported, TARGET, ["spec.targetRef"]) for name in TARGET},
    "tuning.nightly.schedule": scheduled("schedule", {"schedule": "@weekly"}, "@weekly"),
    "tuning.nightly.timeZone": scheduled("timeZone", {"timeZone": "Europe/Berlin"}, "Europe/Berlin"),
    "tuning.nightly.suspend": scheduled("suspend", {"suspend": True}, True),
    "tuning.nightly.startingDeadline": scheduled("startingDeadlineSeconds", {"startingDeadline": "2m"}, 120),
    "tuning.nightly.maxTrials": started_with("--max-trials", {"maxTrials": 3}, "3"),
    "tuning.nightly.timeLimit": started_with("--time-limit", {"timeLimit": "90m"}, "90m"),
    "tuning.nightly.workload": started_with("--trace-config-map", TRACE, "t"),
    "tuning.nightly.traceRef.name": started_with("--trace-config-map", TRACE, "t"),
    "tuning.nightly.traceRef.key": started_with("--trace-key", TRACE, "k"),
    "tuning.drift.enabled": Binding(
        drift_run_after_two_windows, {"enabled": True, "windows": 2}, True, MAY_TUNE
    ),
    "tuning.drift.windows": Binding(
        drift_run_after_two_windows, {"enabled": True, "windows": 2}, True, DRIFT
    ),
    "tuning.runHistoryLimit": Binding(runs_kept_of_twelve, 2, 2, MAY_TUNE),
    **{
        f"tuning.limits.notDuring[].{name}": Binding(
            quiet_until,
            not_during(**{name: value}),
            want,
            {"tuning": {**MAY_TUNE["tuning"], "limits": not_during()}},
        )
        for name, value, want in (
            ("schedule", "40 7 * * *", "10:10"),
            ("duration", "3h", "10:00"),
            ("timeZone", "Europe/Berlin", "08:30"),
        )
    },
}
ELSEWHERE = {
    "tuning.limits.canaryPods": "test_cluster_live.py::test_canary_pods_bound_how_many_try",
    "tuning.limits.maxThroughputLoss": "../tuner/study/test_operator_control.py::test_the_owners_limit_on_throughput_is_read_from_the_status",
    "rollout.upgradePolicy": "test_cluster_plan.py::test_upgrade_policy_auto_takes_the_newer_default_at_once",
}
LATER: dict[str, str] = {}


def built(binding: Binding, path: str, *, changed: bool) -> InferenceService:
    changes: dict[str, Any] = dict(binding.base or {})
    if changed and path.startswith("targetRef."):
        return schema.parse_service({**SMALLEST, "spec": {"targetRef": binding.value}})
    if changed:
        where = path.partition("[]")[0]
        # A value that is a whole object stands for the object of the field.
        if path.startswith("tuning.") and isinstance(binding.value, dict):
            where = ".".join(path.split(".")[:2])
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
        ("hf://organisation/name", "hf://organisation/name"),
        ("hf://organisation/name/q4/file.gguf", "hf://organisation/name/q4/file.gguf"),
    ):
        assert words(service(**{"model.uri": uri}))[:2] == ["serve", want]


def test_no_field_is_forgotten() -> None:
    tables = (set(PROBES), set(ELSEWHERE), set(LATER))
    assert set().union(*tables) == set(leaves(names.SERVICE_KIND))
    assert sum(map(len, tables)) == len(leaves(names.SERVICE_KIND)), "one table a field"


@pytest.mark.parametrize("path", ELSEWHERE)
def test_the_test_of_a_field_elsewhere_exists_and_sets_it(path: str) -> None:
    file, _, name = ELSEWHERE[path].partition("::")
    source = (Path(__file__).parent / file).read_text()
    body = source.partition(f"def {name}(")[2].partition("\ndef ")[0]
    assert path in body, f"{ELSEWHERE[path]} does not set spec.{path}"


@pytest.mark.parametrize(
    "path", [p for p in PROBES if not p.startswith(("engine.runtime", "engine.tensor", "targetRef"))]
)
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
