"""The nightly CronJob's command line, as the operator writes it, makes the TuningRun that the CRD knows, as the tuner writes it."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from support.services import BUDGET_PARAMETER, resource
from trimtab_operator import names, schema
from trimtab_operator.api import TuningRun
from trimtab_operator.plan import made_runs, nightly
from trimtab_operator.plan.tuner_pod import Tuner
from trimtab_tuner.commands import start


def made(job: str, service: str = "chat", **fields: Any) -> TuningRun:
    tuning = {"mode": "Apply", "parameters": [BUDGET_PARAMETER], "nightly": {"schedule": "@daily", **fields}}
    given = resource(tuning=tuning)
    given["metadata"] = {"name": service, "namespace": "team", "uid": "u-1"}
    parsed = schema.parse_service(given)
    pod = nightly.manifests(parsed, Tuner())[-1]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    command, *words = [
        word.replace("$(JOB_NAME)", job).replace("$$", "$") for word in pod["containers"][0]["args"]
    ]
    assert command == "start"
    parser = argparse.ArgumentParser()
    start.add_arguments(parser)
    return schema.parse_run(start.manifest(parser.parse_args(words)))


def test_every_field_of_the_schedule_arrives_in_the_run() -> None:
    run = made(
        "chat-nightly-29401470",
        maxTrials=7,
        timeLimit="90m",
        workload="Trace",
        traceRef={"name": "t", "key": "$(k)"},
    )
    assert (run.name, run.metadata.namespace) == ("chat-29401470", "team")
    assert (run.spec.service, run.spec.evaluator, run.spec.max_trials, run.spec.time_limit_s) == (
        "chat",
        "Live",
        7,
        5400,
    )
    assert run.spec.workload.type == "Trace"
    assert run.spec.workload.trace_ref is not None
    assert (run.spec.workload.trace_ref.name, run.spec.workload.trace_ref.key) == ("t", "$(k)")
    assert made_runs.origin(run) == made_runs.NIGHTLY
    assert run.metadata.labels[names.LABEL_SERVICE] == "chat"
    [owner] = run.raw["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner.get("controller")) == (names.SERVICE_KIND, "u-1", None)


@pytest.mark.parametrize(
    ("job", "want"),
    [("chat-nightly-29401470", "chat-29401470"), ("try", "chat-try"), ("chat-try", "chat-try")],
)
def test_a_run_is_named_after_its_job(job: str, want: str) -> None:
    assert made(job).name == want


def test_names_are_short_enough_and_differ_where_jobs_do() -> None:
    service = "c" * names.MAX_SERVICE_NAME
    jobs = [f"{names.nightly(service)}-29401470", "j" * 62 + "a", "j" * 62 + "b"]
    found = [made(job, service).name for job in jobs]
    assert max(map(len, found)) <= start.MAX_NAME
    assert len(set(found)) == len(found)
    assert found[0].endswith("-29401470")
