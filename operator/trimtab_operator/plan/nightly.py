"""spec.tuning.nightly → a CronJob that creates TuningRuns, and an account that may do that and nothing else. Pure.

They are no part of serving: whatever is wrong with them is said in condition TuningReady and holds nothing up. Used by
`plan.cluster` and `render`; `cluster.nightly` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from trimtab_operator import names
from trimtab_operator.api.service import InferenceService, Nightly
from trimtab_operator.errors import Finding
from trimtab_operator.plan import children, made_runs
from trimtab_operator.plan.access import account_with_rights, rule
from trimtab_operator.plan.objects import Manifest, child
from trimtab_operator.plan.tuner_pod import Tuner, tuner_pod
from trimtab_operator.quantities import format_duration

TIME_TO_START_S = 600  # of a job, all its tries together; one takes a second
RETRIES = 4  # 10 s to 80 s apart
FINAL_EXIT_STATUS = 2  # of `trimtab-tuner start`, when another try would end alike
KEPT_JOBS, KEPT_FAILED_JOBS = 1, 3
RESOURCES: Mapping[str, Any] = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
#: Paths of the CronJob → fields of spec that they come from.
_FIELDS = {"spec.schedule": "schedule", "spec.timeZone": "timeZone"}
_WHERE = "spec.tuning.nightly"


class Problem(NamedTuple):
    """Why there are no runs on the schedule that is asked for: reason and message of TuningReady."""

    reason: str
    message: str


def possible(service: str) -> tuple[children.Key, ...]:
    """Every object that a service's schedule may have."""
    name = names.nightly(service)
    return ("CronJob", name), ("RoleBinding", name), ("Role", name), ("ServiceAccount", name)


def manifests(service: InferenceService, tuner: Tuner, *, halted: bool = False) -> list[Manifest]:
    """All that is wanted, the CronJob last. `halted`: tuning is paused or reverted, so no run is made."""
    nightly = service.spec.tuning.nightly
    if nightly is None:
        return []
    suspend = nightly.suspend or service.spec.suspend or halted
    create = rule(names.GROUP, "tuningruns", "create")
    return [
        *account_with_rights(partial(_head, service), [create]),
        _cron_job(service, nightly, tuner, suspend),
    ]


def changes(
    service: InferenceService, wanted: Sequence[Manifest], live: Mapping[children.Key, Mapping[str, Any]]
) -> children.Changes:
    """What to apply and delete; `live` may hold other children too."""
    mine = possible(service.name)
    return children.changes(service, wanted, {key: live[key] for key in mine if key in live})


def refused(service: InferenceService, message: str, causes: Sequence[tuple[str, str]]) -> Problem:
    """What the API server did not take, by the fields of our spec; `causes` are (path, message)."""
    nightly = service.spec.tuning.nightly
    values = {"schedule": nightly.schedule, "timeZone": nightly.time_zone} if nightly is not None else {}
    found = [
        Finding(f"{_WHERE}.{_FIELDS[path]}", values.get(_FIELDS[path]), _words(text))
        for path, text in causes
        if path in _FIELDS
    ]
    return Problem(names.INVALID_SPEC, "; ".join(map(str, found)) or f"{_WHERE}: {message}")


def problem(changes: children.Changes) -> Problem | None:
    """What stands in the way already before anything is written."""
    if not changes.taken:
        return None
    return Problem(names.NAME_TAKEN, "; ".join(map(str, changes.taken)))


def _words(text: str) -> str:
    """What is allowed, out of the API server's `Invalid value: "…": why`."""
    return text.rpartition('": ')[2] or text


def _head(service: InferenceService, api_version: str, kind: str) -> Manifest:
    return child(service, api_version, kind, names.nightly(service.name), names.NIGHTLY_COMPONENT)


def _cron_job(service: InferenceService, nightly: Nightly, tuner: Tuner, suspend: bool) -> Manifest:
    built = _head(service, "batch/v1", "CronJob")
    labels = names.labels(service.name, names.NIGHTLY_COMPONENT)
    built["spec"] = {
        "schedule": nightly.schedule,
        "suspend": suspend,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": round(nightly.starting_deadline_s),
        "successfulJobsHistoryLimit": KEPT_JOBS,
        "failedJobsHistoryLimit": KEPT_FAILED_JOBS,
        "jobTemplate": {
            "metadata": {"labels": labels},
            "spec": {
                "backoffLimit": RETRIES,
                "activeDeadlineSeconds": TIME_TO_START_S,
                "podFailurePolicy": {"rules": [_give_up(), _disrupted()]},
                "template": _pod(service, nightly, tuner, labels),
            },
        },
    }
    if nightly.time_zone is not None:
        built["spec"]["timeZone"] = nightly.time_zone
    return built


def _give_up() -> Manifest:
    codes = {"containerName": names.STARTER_CONTAINER, "operator": "In", "values": [FINAL_EXIT_STATUS]}
    return {"action": "FailJob", "onExitCodes": codes}


def _disrupted() -> Manifest:
    return {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _pod(service: InferenceService, nightly: Nightly, tuner: Tuner, labels: Mapping[str, str]) -> Manifest:
    template = tuner_pod(
        replace(tuner, resources=RESOURCES),
        container=names.STARTER_CONTAINER,
        arguments=arguments(service, nightly),
        labels=labels,
        account=names.nightly(service.name),
        pull_secrets=[secret.name for secret in service.spec.engine.image_pull_secrets],
    )
    job = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-name']"}}
    template["spec"]["containers"][0]["env"].append({"name": "JOB_NAME", "valueFrom": job})
    return template


def arguments(service: InferenceService, nightly: Nightly) -> list[str]:
    """The command line of `trimtab-tuner` that makes one run."""
    built = [
        "start",
        f"--namespace={service.namespace}",
        f"--service={service.name}",
        *([f"--service-uid={service.metadata.uid}"] if service.metadata.uid else []),
        "--job=$(JOB_NAME)",  # Kubernetes fills it in from env
        f"--evaluator={made_runs.evaluator(service)}",
        f"--max-trials={nightly.max_trials}",
        f"--time-limit={format_duration(nightly.time_limit_s)}",
    ]
    if nightly.workload == "Trace" and nightly.trace_ref is not None:
        built += [
            f"--trace-config-map={_literal(nightly.trace_ref.name)}",
            f"--trace-key={_literal(nightly.trace_ref.key)}",
        ]
    return built


def _literal(text: str) -> str:
    """Kubernetes would put a variable's value in place of `$(…)`."""
    return text.replace("$", "$$")
