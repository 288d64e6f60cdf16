"""The health scripts of docs/helm.md say of both kinds what their conditions say, run in the Lua that Argo CD embeds."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster import binaries
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.status import ServiceStatus
from trimtab_operator.errors import Finding
from trimtab_operator.plan.rollout import RolloutStatus
from trimtab_operator.plan.runs import run_status
from trimtab_operator.plan.status import Facts, invalid_status, service_status

Json = dict[str, Any]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "helm.md"
NOW = "2026-01-01T00:00:00Z"


def setting(name: str) -> str:
    """One entry of the page's argocd-cm."""
    [text] = [
        b for b in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) if "argocd-cm" in b
    ]
    found: str = yaml.safe_load(text)["data"][f"resource.customizations.{name}"]
    return found


def lua(value: object) -> str:
    """A JSON value as Lua."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"[{json.dumps(k)}] = {lua(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "{" + ", ".join(map(lua, value)) + "}"
    return "nil" if value is None else json.dumps(value)


def health(kind: str, resource: Json, folder: Path) -> tuple[str, str]:
    """What Argo CD would show → status, message."""
    script = folder / "health.lua"
    body = setting(f"health.serving.trimtab.dev_{kind}")
    script.write_text(
        f"obj = {lua(resource)}\nlocal function health()\n{body}\nend\n"
        'local answer = health()\nprint(answer.status)\nprint(answer.message or "")\n'
    )
    done = subprocess.run(
        [str(binaries.find_or_build(binaries.GLUA) / "glua"), str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    status, _, message = done.stdout.partition("\n")
    return status, message.strip()


def rollout(**different: Any) -> RolloutStatus:
    """Two of two replicas serve, but for what is `different`."""
    facts: Json = {"wanted": 2, "total": 2, "updated": 2, "ready": 2, "available": 2, "applied": 2, "draining": 0,
                   "reason": "Serving", "message": "2 of 2 replicas are ready", "progressing": False}  # fmt: skip
    return RolloutStatus(**{**facts, **different})


BARE: Json = {"metadata": {"name": "chat", "namespace": "default", "generation": 3}, "spec": {"model": {"uri": "file:///m"}}}  # fmt: skip
SERVICE = InferenceService.parse(BARE)
RUNNING = service_status(SERVICE, rollout(), Facts(), ServiceStatus(), NOW)
OLDER = {**BARE, "metadata": {**BARE["metadata"], "generation": 4}, "status": RUNNING.to_json()}


def served(**different: Any) -> Json:
    """The service with the status that the operator writes for such a rollout."""
    status = service_status(SERVICE, rollout(**different), Facts(), ServiceStatus(), NOW)
    return {**BARE, "status": status.to_json()}


SERVICES: dict[str, tuple[Json, str, str]] = {
    "nobody has looked yet": (BARE, "Progressing", "waiting for the operator"),
    "the edit is not seen yet": (OLDER, "Progressing", "waiting for the operator"),
    "all replicas serve": (served(), "Healthy", "2 of 2 replicas are ready"),
    "a rollout is under way": (
        served(ready=1, reason="RolloutInProgress", message="1 old one is left", progressing=True),
        "Progressing",
        "RolloutInProgress: 1 old one is left",
    ),
    "a rollout cannot end, old replicas serve": (
        served(ready=0, reason="ModelLoadFailed", message="no such file", stalled=True),
        "Degraded",
        "ModelLoadFailed: no such file",
    ),
    "it is suspended": (
        served(wanted=0, total=0, ready=0, available=0, reason="Suspended", message="spec.suspend is true"),
        "Suspended",
        "suspended by spec.suspend",
    ),
    "it cannot be carried out": (
        {**BARE, "status": invalid_status(SERVICE, (Finding("spec.replicas", -1, "0 or more"),), "InvalidSpec",
                                          ServiceStatus(), NOW).to_json()},
        "Degraded",
        "InvalidSpec: spec.replicas: -1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("situation", SERVICES)
def test_health_of_a_service(situation: str, tmp_path: Path) -> None:
    resource, want, message = SERVICES[situation]
    status, said = health("InferenceService", resource, tmp_path)
    assert status == want
    assert said.startswith(message)


def run_with(unserved: str | None = None, **status: Any) -> Json:
    """A run with what its job wrote and what the operator makes of it."""
    resource: Json = {"metadata": {"name": "chat-1", "namespace": "default", "uid": "u", "generation": 1,
                                   "creationTimestamp": NOW}, "spec": {"service": "chat"}, "status": status}  # fmt: skip
    made = run_status(TuningRun.parse(resource), acts=True, refusal=None, now=NOW, unserved=unserved)
    return {**resource, "status": {**status, **made}}


RUNS: dict[str, tuple[Json, str, str]] = {
    "nobody has looked yet": ({"metadata": {}, "spec": {}}, "Progressing", "waiting for the operator"),
    "it waits": (run_with(), "Progressing", "Pending"),
    "it tries": (run_with(trials=[{"number": 0, "state": "Running"}]), "Progressing", "Running"),
    "it found something": (run_with(result={"verdict": "Applied"}), "Healthy", "Applied"),
    "it kept what was": (run_with(result={"verdict": "KeptIncumbent"}), "Healthy", "KeptIncumbent"),
    "it failed": (run_with(result={"verdict": "Failed"}), "Degraded", "Failed"),
    "there is no such service": (
        run_with(unserved="ServiceNotFound"),
        "Degraded",
        "ServiceNotFound: there is no",
    ),
    "it was stopped": (run_with(phase="Stopped"), "Degraded", "Stopped"),
}


@pytest.mark.parametrize("situation", RUNS)
def test_health_of_a_run(situation: str, tmp_path: Path) -> None:
    resource, want, message = RUNS[situation]
    status, said = health("TuningRun", resource, tmp_path)
    assert status == want
    assert said.startswith(message)


def test_what_is_not_compared_are_fields_of_these_kinds() -> None:
    for kind in ("InferenceService", "TuningRun"):
        ignored = yaml.safe_load(setting(f"ignoreDifferences.serving.trimtab.dev_{kind}"))
        assert ignored["jsonPointers"] == ["/status"]
        assert set(ignored) <= {"jsonPointers", "managedFieldsManagers"}
