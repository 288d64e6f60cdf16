"""The objects of a run's worker: safe, bounded, owned by the run, and with no more rights than its work needs."""

from __future__ import annotations

import argparse
import base64
import json
import math
from typing import Any

import pytest

from support.services import resource, run_resource
from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.cluster import main
from trimtab_operator.plan import worker_job
from trimtab_operator.plan.shadow import Engines
from trimtab_operator.plan.tuner_pod import Tuner

Json = dict[str, Any]
TUNER = Tuner("tuner:1", {"requests": {"cpu": "1"}})


def service(**changes: Any) -> InferenceService:
    given = resource(**changes)
    given["metadata"] = {"name": "chat", "namespace": "team", "uid": "u-service"}
    return schema.parse_service(given)


def run(name: str = "chat-1", **changes: Any) -> TuningRun:
    given = run_resource(**changes)
    given["metadata"] = {"name": name, "namespace": "team", "uid": "u-run"}
    return schema.parse_run(given)


def everything(of: TuningRun, tuner: Tuner = TUNER) -> list[Json]:
    made = [*worker_job.access(service(), of), worker_job.tokens(of, {"pod-uid": "token"})]
    return [*made, worker_job.job(service(), of, tuner, 7200.0)]


def pod_of(built: Json) -> Json:
    found: Json = built["spec"]["template"]["spec"]
    return found


def words(**changes: Any) -> list[str]:
    container = pod_of(worker_job.job(service(), run(**changes), TUNER, 60.0))["containers"][0]
    found: list[str] = container["args"]
    return found


def test_all_objects_have_the_runs_name_belong_to_it_and_carry_its_labels() -> None:
    built = everything(run())
    assert [made["kind"] for made in built] == ["Role", "ServiceAccount", "RoleBinding", "Secret", "Job"]
    for made in built:
        metadata = made["metadata"]
        assert (metadata["namespace"], metadata["name"]) == ("team", "chat-1-worker")
        [owner] = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
            "TuningRun",
            "chat-1",
            "u-run",
            True,
        )
        labels = metadata["labels"]
        assert labels[names.LABEL_COMPONENT] == "tuning-worker"
        assert (labels[names.LABEL_SERVICE], labels[names.LABEL_RUN]) == ("chat", "chat-1")


def test_the_longest_name_of_a_run_leaves_room_for_what_is_made_of_it() -> None:
    built = everything(run("r" * 52))
    assert {len(made["metadata"]["name"]) for made in built} == {59}


def test_the_worker_may_read_its_own_things_write_its_runs_status_and_nothing_else() -> None:
    role, account, binding = worker_job.access(service(), run())
    allowed = {
        (verb, resource): rule.get("resourceNames")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed == {
        ("get", "inferenceservices"): ["chat"],
        ("get", "configmaps"): ["chat-live"],
        ("get", "tuningruns"): ["chat-1"],
        ("patch", "tuningruns/status"): ["chat-1"],
        ("list", "endpointslices"): None,
    }
    assert account["automountServiceAccountToken"] is False
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": "chat-1-worker",
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "chat-1-worker", "namespace": "team"}]


def test_the_pod_meets_the_restricted_level_and_has_what_the_operator_was_told() -> None:
    spec = pod_of(everything(run())[-1])
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {"emptyDir", "secret", "configMap"} >= {key for v in spec["volumes"] for key in v if key != "name"}
    assert (container["image"], container["resources"]) == ("tuner:1", {"requests": {"cpu": "1"}})
    assert (spec["serviceAccountName"], spec["restartPolicy"]) == ("chat-1-worker", "Never")
    engine = service(**{"engine.imagePullSecrets": [{"name": "registry"}]})
    assert pod_of(worker_job.job(engine, run(), TUNER, 60.0))["imagePullSecrets"] == [{"name": "registry"}]


def test_a_pod_of_a_worker_is_no_engine_pod() -> None:
    labels = everything(run())[-1]["spec"]["template"]["metadata"]["labels"]
    assert not names.selector("chat").items() <= labels.items()


def test_a_job_makes_one_pod_at_a_time_tries_thrice_and_ends_by_itself_after_the_runs_limit() -> None:
    spec = worker_job.job(service(), run(), TUNER, 120.4)["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (1, 1, 2)
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["activeDeadlineSeconds"] == 121 + 60
    limit = math.ceil(run().spec.time_limit_s)
    for left_s, deadline in ((-5.0, 60), (1e12, limit + 60)):
        assert worker_job.job(service(), run(), TUNER, left_s)["spec"]["activeDeadlineSeconds"] == deadline
    final, disrupted = spec["podFailurePolicy"]["rules"]
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [2])
    assert final["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")


def test_the_command_line_names_run_tokens_and_prometheus_if_it_asks_for_no_credentials() -> None:
    assert words() == [
        "work", "--namespace", "team", "--run", "chat-1", "--tokens", "/var/run/trimtab/tokens/tokens.json",
    ]  # fmt: skip
    told = Tuner("tuner:1", prometheus_url="http://prometheus:9090")
    assert worker_job.arguments(run(), told)[-2:] == ["--prometheus", "http://prometheus:9090"]


def test_a_trace_is_mounted_by_its_one_key() -> None:
    workload = {"type": "Trace", "traceRef": {"name": "traffic", "key": "monday.jsonl"}}
    assert words(workload=workload)[-2:] == ["--trace", "/var/run/trimtab/trace/monday.jsonl"]
    spec = pod_of(worker_job.job(service(), run(workload=workload), TUNER, 60.0))
    source = {"name": "traffic", "items": [{"key": "monday.jsonl", "path": "monday.jsonl"}]}
    assert {"name": "trace", "configMap": source} in spec["volumes"]
    mounted = {"name": "trace", "mountPath": "/var/run/trimtab/trace", "readOnly": True}
    assert mounted in spec["containers"][0]["volumeMounts"]


def test_tokens_are_by_pod_and_the_job_mounts_the_secret_that_holds_them() -> None:
    secret = worker_job.tokens(run(), {"b": "2", "a": "1"}, "chat-1-worker-x7")
    assert json.loads(base64.b64decode(secret["data"]["tokens.json"])) == {"a": "1", "b": "2"}
    assert (secret["metadata"]["name"], secret["immutable"]) == ("chat-1-worker-x7", True)
    spec = pod_of(worker_job.job(service(), run(), TUNER, 60.0, "chat-1-worker-x7"))
    assert {"name": "tokens", "secret": {"secretName": "chat-1-worker-x7"}} in spec["volumes"]


def test_a_shadow_runs_worker_knows_where_its_engines_are_and_shows_them_their_key() -> None:
    of = run(evaluator="Shadow")
    engines = Engines(2, "http://10.96.0.9:8000", "chat-1-shadow")
    container = pod_of(worker_job.job(service(), of, TUNER, 60.0, engines=engines))["containers"][0]
    assert container["args"][-2:] == ["--engines", "2@http://10.96.0.9:8000"]
    reference = {"name": "chat-1-shadow", "key": "api-key"}
    assert {
        "name": "TRIMTAB_API_KEY",
        "valueFrom": {"secretKeyRef": reference},
    } in container["env"]
    usual = pod_of(worker_job.job(service(), of, TUNER, 60.0))["containers"][0]
    assert [one["name"] for one in usual["env"]] == ["HOME"]


def test_a_trace_is_replayed_with_a_key_where_the_service_asks_for_one() -> None:
    keyed = service(**{"security.apiKeySecretRef": {"name": "keys", "key": "keys.yaml"}})
    trace: Json = {"workload": {"type": "Trace", "traceRef": {"name": "t"}}}
    pod = pod_of(worker_job.job(keyed, run(**trace), TUNER, 60.0))
    words = pod["containers"][0]["args"]
    assert words[words.index("--api-keys") + 1] == "/var/run/trimtab/keys/keys.yaml"
    [mounted] = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "keys"]
    assert mounted == {"secretName": "keys", "items": [{"key": "keys.yaml", "path": "keys.yaml"}]}
    for made, where in ((run(), keyed), (run(**trace), service())):
        assert "--api-keys" not in pod_of(worker_job.job(where, made, TUNER, 60.0))["containers"][0]["args"]


def told(*flags: str) -> Tuner:
    """What the operator makes of its command line."""
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    return main.tuner_of(parser.parse_args(flags))


def test_the_operators_flags_size_workers_and_send_them_to_a_prometheus_without_credentials(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = "http://prometheus:9090"
    made = told(
        "--tuner-image", "t:2", "--worker-resources", '{"limits": {"memory": "1Gi"}}', "--prometheus-url", url
    )
    assert made == Tuner("t:2", {"limits": {"memory": "1Gi"}}, url)
    assert (
        told("--prometheus-url", url, "--prometheus-credentials", "/etc/credentials").prometheus_url is None
    )
    for wrong in ("{", "[]"):
        with pytest.raises(SystemExit):
            told("--worker-resources", wrong)
        assert "--worker-resources" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("10.96.0.9", "http://10.96.0.9:8000"),
        ("fd00::9", "http://[fd00::9]:8000"),
        ("None", None),
        (None, None),
    ],
)
def test_a_trace_is_replayed_to_the_services_address_where_it_has_one(
    address: str | None, url: str | None
) -> None:
    trace: Json = {"workload": {"type": "Trace", "traceRef": {"name": "t"}}}
    built = worker_job.job(service(), run(**trace), TUNER, 60.0, address=address)
    words = pod_of(built)["containers"][0]["args"]
    assert (words[words.index("--url") + 1] if "--url" in words else None) == url
    usual = worker_job.job(service(), run(), TUNER, 60.0, address=address)
    assert "--url" not in pod_of(usual)["containers"][0]["args"], "nothing is sent to it"
