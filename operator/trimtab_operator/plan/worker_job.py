"""A TuningRun → the objects of its worker: account with rights, Secret with read tokens, Job. Pure.

All have one name, `<run>-worker`, and belong to the run, so that they go with it. They are made once and never changed: an upgraded
operator leaves a worker of an older one alone, unless that does not get to start (`settings_mark`). What the worker may do is read its run, its service and that one's live config, find the
engines' addresses, and write its run's status; candidates reach engines by way of that status only. Called by `cluster.workers`.

The worker's contract: exit status 0 once a result stands in the run's status; 2 when another try would end alike (the run ends);
anything else is tried again, `RETRIES` times. The last line of its termination message is what people read.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.service import SecretKey
from trimtab_operator.plan.access import account_with_rights, rule
from trimtab_operator.plan.drift import digest
from trimtab_operator.plan.objects import run_child, run_labels
from trimtab_operator.plan.shadow import Engines
from trimtab_operator.plan.tuner_pod import Mount, Tuner, tuner_pod

Manifest = dict[str, Any]

TOKENS_DIRECTORY = "/var/run/trimtab/tokens"
TOKENS_ENTRY = "tokens.json"
TRACE_DIRECTORY = "/var/run/trimtab/trace"
KEYS_DIRECTORY = "/var/run/trimtab/keys"
#: By which a worker learns what to show to engines that ask for a key.
API_KEY_VARIABLE = "TRIMTAB_API_KEY"
#: The beginning of a run is when it reads engines' admin ports; later, candidates go through its status.
TOKEN_LIFE_S = 3600.0
RETRIES = 2
FINAL_EXIT_STATUS = 2
#: From the end of spec.timeLimit, when the operator ends the run, to the end of a Job that no operator has ended.
DEADLINE_MARGIN_S = 60
#: From SIGTERM: to give a candidate back, and to end what is being replayed.
GRACE_S = 30
#: Records of the Job and its pod, and with them the worker's log, stay for a day.
KEPT_S = 86_400


def access(service: InferenceService, run: TuningRun) -> list[Manifest]:
    """Role, account and binding."""
    rules = [
        rule(names.GROUP, "inferenceservices", "get", only=[service.name]),
        rule("", "configmaps", "get", only=[names.live_config_map(service.name)]),
        rule(names.GROUP, "tuningruns", "get", only=[run.name]),
        rule(names.GROUP, "tuningruns/status", "patch", only=[run.name]),
        rule("discovery.k8s.io", "endpointslices", "list"),
    ]
    return account_with_rights(lambda version, kind: _head(run, version, kind), rules)


def tokens(run: TuningRun, by_pod_uid: Mapping[str, str], name: str | None = None) -> Manifest:
    """The Secret. `name`: another than the usual one, where that is taken."""
    built = _head(run, "v1", "Secret")
    built["metadata"]["name"] = name or built["metadata"]["name"]
    content = json.dumps(dict(by_pod_uid), sort_keys=True).encode()
    return {
        **built,
        "type": "Opaque",
        "immutable": True,
        "data": {TOKENS_ENTRY: base64.b64encode(content).decode()},
    }


def job(
    service: InferenceService,
    run: TuningRun,
    tuner: Tuner,
    left_s: float,
    secret: str | None = None,
    engines: Engines | None = None,
    address: str | None = None,
) -> Manifest:
    """The Job, which has `left_s` of the run's time limit; `secret`: name of the Secret with tokens; `engines` are a Shadow run's own;
    `address` is the service's in the cluster, so that a replay needs no name look-up."""
    mounts = [
        Mount("tokens", TOKENS_DIRECTORY, {"secret": {"secretName": secret or names.worker(run.name)}}),
    ]
    trace = run.spec.workload.trace_ref
    if trace is not None:
        # One key of what may hold many; a kubelet says which of the two is missing.
        items = [{"key": trace.key, "path": trace.key}]
        mounts.append(Mount("trace", TRACE_DIRECTORY, {"configMap": {"name": trace.name, "items": items}}))
    keys = asked_keys(service, run)
    if keys is not None:
        items = [{"key": keys.key, "path": keys.key}]
        mounts.append(Mount("keys", KEYS_DIRECTORY, {"secret": {"secretName": keys.name, "items": items}}))
    built = _head(run, "batch/v1", "Job")
    built["metadata"]["annotations"] = {names.ANNOTATION_WORKER_SETTINGS: settings_mark(service, tuner)}
    built["spec"] = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": RETRIES,
        # A status may say that the run begins tomorrow (a clock that was ahead): it has its time limit and no more.
        "activeDeadlineSeconds": math.ceil(min(max(0.0, left_s), run.spec.time_limit_s)) + DEADLINE_MARGIN_S,
        "ttlSecondsAfterFinished": KEPT_S,
        # Never two at a time: the next one starts when the last one has given its candidate back.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": names.WORKER_CONTAINER,
                        "operator": "In",
                        "values": [FINAL_EXIT_STATUS],
                    },
                },
                # A drained node, a preemption: nothing that the run has to answer for.
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": tuner_pod(
            tuner,
            container=names.WORKER_CONTAINER,
            arguments=[*arguments(run, tuner, engines, keys), *_where(service, run, address)],
            labels=run_labels(run, names.WORKER_COMPONENT),
            account=names.worker(run.name),
            mounts=mounts,
            env=[] if engines is None else [_api_key(engines)],
            pull_secrets=_pull_secrets(service),
            grace_s=GRACE_S,
        ),
    }
    return built


def settings_mark(service: InferenceService, tuner: Tuner) -> str:
    """Of what people change when a worker's pod does not get to start: under another mark, another Job may do better."""
    content = {
        "image": tuner.image,
        "resources": dict(tuner.resources),
        "pullSecrets": _pull_secrets(service),
    }
    return digest(content)


def asked_keys(service: InferenceService, run: TuningRun) -> SecretKey | None:
    """The service's API keys, where a trace is replayed to a service that asks for one. A kubelet reads them, not the operator."""
    replays = run.spec.evaluator == "Live" and run.spec.workload.trace_ref is not None
    return service.spec.security.api_key_secret_ref if replays else None


def arguments(
    run: TuningRun, tuner: Tuner, engines: Engines | None = None, keys: SecretKey | None = None
) -> list[str]:
    """The worker's command line, behind the image's entrypoint."""
    words = ["work", "--namespace", run.metadata.namespace, "--run", run.name]
    words += ["--tokens", f"{TOKENS_DIRECTORY}/{TOKENS_ENTRY}"]
    if tuner.prometheus_url is not None:
        words += ["--prometheus", tuner.prometheus_url]
    trace = run.spec.workload.trace_ref
    if trace is not None:
        words += ["--trace", f"{TRACE_DIRECTORY}/{trace.key}"]
    if keys is not None:
        words += ["--api-keys", f"{KEYS_DIRECTORY}/{keys.key}"]
    if engines is not None:
        words += ["--engines", f"{engines.replicas}@{engines.url}"]
    return words


def _where(service: InferenceService, run: TuningRun, address: str | None) -> list[str]:
    """Where a Live run's trace is replayed to; nothing where the worker has to go by the service's name."""
    if run.spec.evaluator != "Live" or run.spec.workload.trace_ref is None or address in (None, "", "None"):
        return []
    host = f"[{address}]" if ":" in str(address) else address
    return ["--url", f"http://{host}:{service.spec.service.port}"]


def _pull_secrets(service: InferenceService) -> list[str]:
    return [secret.name for secret in service.spec.engine.image_pull_secrets]


def _api_key(engines: Engines) -> Manifest:
    source = {"secretKeyRef": {"name": engines.secret, "key": engines.secret_key}}
    return {"name": API_KEY_VARIABLE, "valueFrom": source}


def _head(run: TuningRun, api_version: str, kind: str) -> Manifest:
    return run_child(run, api_version, kind, names.worker(run.name), names.WORKER_COMPONENT)
