"""What a worker reads of its run and service, and what it may turn."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab_tuner.cluster import objects
from trimtab_tuner.cluster.objects import Applied, Parameter
from trimtab_tuner.errors import InputError

Json = dict[str, Any]
BUDGET = {"name": "maxNumBatchedTokens", "min": 64, "max": 4096}
POLICY = {"name": "schedulingPolicy", "choices": ["fcfs", "sla-aware"]}


def service(annotations: Json | None = None, **tuning: Any) -> objects.Service:
    return objects.service_of(
        {
            "metadata": {"name": "chat", "uid": "s", "annotations": annotations or {}},
            "spec": {"tuning": {"mode": "Apply", "parameters": [BUDGET, POLICY], **tuning}},
        }
    )


def run(status: Json | None = None, **spec: Any) -> objects.Run:
    return objects.run_of(
        {
            "metadata": {"name": "try", "uid": "r"},
            "spec": {"service": "chat", **spec},
            "status": status or {},
        }
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("1h30m", 5400.0), ("1m0.5s", 60.5), ("800ms", 0.8), ("2h", 7200.0)]
)
def test_durations_are_read_as_resources_hold_them(text: str, seconds: float) -> None:
    assert objects.duration_s(text, "spec.timeLimit") == seconds


@pytest.mark.parametrize("text", ["", "soon", "5x", "0s"])
def test_what_is_no_duration_is_named(text: str) -> None:
    with pytest.raises(InputError, match=r"spec\.timeLimit"):
        objects.duration_s(text, "spec.timeLimit")


def test_a_run_without_parameters_turns_the_services() -> None:
    assert objects.allowed(service(), run()) == (
        Parameter("max_num_batched_tokens", bounds=(64, 4096)),
        Parameter("scheduling_policy", choices=("fcfs", "sla-aware")),
    )


def test_a_runs_own_bounds_hold_within_the_services() -> None:
    wide = run(parameters=[{**BUDGET, "min": 16, "max": 512}, {**POLICY, "choices": ["priority", "fcfs"]}])
    assert objects.allowed(service(), wide) == (
        Parameter("max_num_batched_tokens", bounds=(64, 512)),
        Parameter("scheduling_policy", choices=("fcfs",)),
    )


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ({"name": "maxNumSeqs", "min": 1, "max": 8}, "spec.parameters[maxNumSeqs]"),
        ({**BUDGET, "min": 8192, "max": 9000}, "within the service's 64 to 4096"),
        ({**POLICY, "choices": ["priority"]}, "among the service's fcfs, sla-aware"),
    ],
)
def test_what_the_service_does_not_allow_is_said_with_path_and_range(parameter: Json, words: str) -> None:
    with pytest.raises(InputError) as caught:
        objects.allowed(service(), run(parameters=[parameter]))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("value", "halted"), [(None, None), ("active", None), ("paused", "paused"), ("reverted", "reverted"), ("halt!", "paused")]
)  # fmt: skip
def test_an_unknown_word_of_the_owners_halts(value: str | None, halted: str | None) -> None:
    found = service(None if value is None else {"serving.trimtab.dev/tuning": value})
    assert found.halted == halted


@pytest.mark.parametrize(
    ("applied", "found"),
    [
        ({"generation": 7, "pods": "2/2"}, Applied(7, 2, 2)),
        ({"generation": 7, "pods": "0/0"}, Applied(7, 0, 0)),
        ({"generation": 7, "pods": "all"}, None),
        ({"generation": 7, "pods": "²/²"}, None),
        ({"pods": "2/2"}, None),
        (None, None),
    ],
)
def test_only_what_makes_sense_counts_as_applied(applied: Json | None, found: Applied | None) -> None:
    assert run({"applied": applied}).applied == found


def test_in_force_everywhere_means_in_at_least_one_pod() -> None:
    assert Applied(7, 2, 2).everywhere
    assert not Applied(7, 1, 2).everywhere
    assert not Applied(7, 0, 0).everywhere


def test_a_time_is_never_written_later_than_it_is() -> None:
    assert objects.rfc3339(1_700_000_000.9) == "2023-11-14T22:13:20Z"
    assert objects.unix_s("2023-11-14T22:13:20Z") == 1_700_000_000
    assert objects.unix_s("soon") is None
