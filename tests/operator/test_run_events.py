"""What a person is told of a run by events: each change of its status once, whatever dies in between, and not each trial."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.pods import T0, moment
from support.services import run_resource
from trimtab_operator import names, schema
from trimtab_operator.api import InvalidRun, TuningRun, read_run
from trimtab_operator.plan import run_events, runs
from trimtab_operator.plan.events import Happening
from trimtab_operator.plan.pods import rfc3339
from trimtab_operator.plan.workers import Account, Obstacle

Json = dict[str, Any]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operator.md").read_text()
EVENTS = PAGE.partition("## Events")[2].partition("\n## ")[0]
WORKERS = ("candidate", "trials", "result")
RUNNING = Account("running", since=moment(1))
CONFIG = {"maxNumBatchedTokens": 64, "schedulingPolicy": "sla-aware"}


def trial(number: int, state: str, message: str = "") -> Json:
    return {"number": number, "state": state, "config": CONFIG, "message": message}


class Story:
    """A run, of which each look sees what the one before wrote, and what its worker wrote meanwhile."""

    def __init__(self, status: Json | None = None, **spec: Any) -> None:
        self._resource = run_resource(**spec)
        self._resource["metadata"] |= {"uid": "u", "namespace": "team", "generation": 1, "creationTimestamp": moment(0)}  # fmt: skip
        self.status: Json = status or {}

    def look(self, worker_wrote: Json | None = None, **said: Any) -> list[tuple[str, str]]:
        """Severity and reason of each event."""
        return [(told.severity, told.reason) for told in self.told(worker_wrote, **said)]

    def told(self, worker_wrote: Json | None = None, **said: Any) -> list[Happening]:
        self.status = {**self.status, **(worker_wrote or {})}
        first, written = self._look(said)
        lost, _ = self._look(said)  # an operator that died before it wrote the status, and the next one
        assert lost == first
        self.status = {**written, **{key: self.status[key] for key in WORKERS if key in self.status}}
        again, same = self._look(said)
        assert again == [], "nothing is new"
        assert {key: value for key, value in self.status.items() if key not in WORKERS} == same
        assert {happening.reason for happening in first} <= set(re.findall(r"\w+", EVENTS)), (
            "not in docs/operator.md"
        )
        return first

    def _look(self, said: Json) -> tuple[list[Happening], Json]:
        seen: TuningRun = schema.parse_run({**self._resource, "status": self.status})
        given = {"acts": True, "refusal": None, "now": rfc3339(T0 + 10), **said}
        status = runs.run_status(seen, **given)
        return run_events.transitions(seen, status), status


def test_a_run_is_told_from_its_turn_to_its_verdict_and_its_trials_are_not() -> None:
    story = Story(maxTrials=3, timeLimit="1h")
    first = Obstacle(names.WAITING_FOR_RUN, "run chat-0 of this service comes first")
    assert story.look(acts=False, obstacle=first) == [("Normal", names.WAITING_FOR_RUN)]
    second = Obstacle(names.WAITING_FOR_RUN, "run chat-00 of this service comes first")
    assert story.look(acts=False, obstacle=second) == [], "the reason is the same"
    [begun] = story.told(worker=RUNNING)
    assert (begun.severity, begun.reason) == ("Normal", run_events.STARTED)
    assert begun.message == "evaluator Live, up to 3 candidates, for 1h at most"
    for state in ("Running", "Complete", "Failed"):
        assert story.look({"trials": [trial(0, state)]}, worker=RUNNING) == []
    quiet = (names.QUIET_TIME, "spec.tuning.limits.notDuring[0] is in force until four")
    [waits] = story.told(waits=quiet, worker=RUNNING)
    assert waits == Happening("Normal", *quiet)
    assert story.look(worker=RUNNING) == []
    assert story.look(waits=quiet, worker=RUNNING) == [("Normal", names.QUIET_TIME)]
    result = {"verdict": "Applied", "config": CONFIG}
    [over] = story.told({"result": result}, outcome="64 is better, and is in force")
    assert over == Happening("Normal", "Applied", "64 is better, and is in force")


def test_what_begins_and_ends_between_two_looks_is_told_by_both() -> None:
    wrote = {"trials": [trial(0, "Pruned", "worse")], "result": {"verdict": "KeptIncumbent"}}
    assert Story().look(wrote, worker=RUNNING) == [
        ("Normal", run_events.STARTED),
        ("Warning", run_events.PRUNED),
        ("Normal", "KeptIncumbent"),
    ]


@pytest.mark.parametrize(
    ("verdict", "severity"),
    [("Applied", "Normal"), ("Recommended", "Normal"), ("KeptIncumbent", "Normal"), ("RolledBack", "Normal"),
     ("Inconclusive", "Normal"), ("Failed", "Warning")],
)  # fmt: skip
def test_every_verdict_is_told_by_its_name(verdict: str, severity: str) -> None:
    story = Story()
    story.look(worker=RUNNING)
    result = {"verdict": verdict}
    assert story.look({"result": result}, outcome="so it is") == [(severity, verdict)]
    assert story.look(acts=False, outcome="said otherwise later") == []


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"worker": Account("failed", failure="exit status 2")}, names.WORKER_FAILED),
        ({"now": rfc3339(T0 + 7300)}, names.TIME_LIMIT_REACHED),
        ({"ended": (names.MADE_ROOM, "the service needs its place")}, names.MADE_ROOM),
        ({"ended": (names.SERVICE_CHANGED, "it has other pods")}, names.SERVICE_CHANGED),
    ],
)
def test_a_run_that_ends_without_a_result_says_why(said: Json, reason: str) -> None:
    story = Story()
    story.look(worker=RUNNING)
    assert story.look(**said) == [("Warning", reason)]


def test_each_lease_that_a_guardrail_ends_is_told_once_whichever_trial_it_was() -> None:
    story = Story()
    trials = [trial(0, "Complete"), trial(1, "Running")]
    story.look({"trials": trials}, worker=RUNNING)
    trials[1] = trial(1, "Pruned", "the longest gap is 3 s: 1 s is allowed\nand more")
    [told] = story.told({"trials": trials}, worker=RUNNING)
    assert (told.severity, told.reason) == ("Warning", run_events.PRUNED)
    assert told.message == (
        "a guardrail ended trial 1: the longest gap is 3 s: 1 s is allowed "
        "(maxNumBatchedTokens 64, schedulingPolicy sla-aware)"
    )
    # The best one is confirmed, and its number is the lower one.
    trials[0] = trial(0, "Running")
    assert story.look({"trials": trials}, worker=RUNNING) == []
    trials[0] = trial(0, "Pruned", "requests fail")
    [told] = story.told({"trials": trials}, worker=RUNNING)
    assert told.message.startswith("a guardrail ended trial 0: requests fail")
    assert story.status["pruned"] == [0, 1]


def test_a_run_that_was_over_before_an_upgrade_is_not_told_anew() -> None:
    over = {"phase": "Succeeded", "trials": [trial(0, "Pruned")], "result": {"verdict": "KeptIncumbent"}}
    story = Story(over)
    assert story.look(acts=False) == []
    assert "pruned" not in story.status


def test_each_refused_candidate_is_told_and_other_trouble_by_its_reason() -> None:
    story = Story()
    story.look(worker=RUNNING)
    for tokens in (1, 2):
        said: Json = {"refusal": f"status.candidate.config: {tokens}", "worker": RUNNING}
        [told] = story.told(**said)
        assert (told.severity, told.reason) == ("Warning", names.CANDIDATE_REFUSED)
        assert str(tokens) in told.message
    assert story.look(worker=RUNNING) == []
    for words in ("pull failed", "back-off"):
        obstacle = Obstacle(names.IMAGE_PULL_FAILED, words, stalled=True)
        wanted = [("Warning", names.IMAGE_PULL_FAILED)] if words == "pull failed" else []
        assert story.look(obstacle=obstacle) == wanted


@pytest.mark.parametrize(
    ("reason", "severity"),
    [(names.UNSCHEDULABLE, "Warning"), (names.FAILED_MOUNT, "Warning"), (names.PODS_NOT_CREATED, "Warning"),
     (names.CONTAINER_CONFIG_ERROR, "Warning"), (names.WAITING_FOR_TURN, "Normal"), (names.NO_READY_PODS, "Normal"),
     (names.TUNING_PAUSED, "Normal"), (names.TUNING_REVERTED, "Normal"), (names.SHADOW_NOT_READY, "Normal")],
)  # fmt: skip
def test_what_a_run_waits_for_is_told_when_its_reason_changes(reason: str, severity: str) -> None:
    story = Story()
    assert story.look(obstacle=Obstacle(reason, "so it is")) == [(severity, reason)]
    assert story.look(obstacle=Obstacle(reason, "until then")) == []
    assert story.look(obstacle=Obstacle("Pending", "its worker starts")) == []


def test_a_run_without_its_service_and_one_that_cannot_be_read_are_told_of() -> None:
    assert Story().look(unserved=names.SERVICE_NOT_FOUND) == [("Warning", names.SERVICE_NOT_FOUND)]
    assert Story().look(unserved="it is odd") == [("Warning", names.SERVICE_NOT_SERVED)]
    spoiled = run_resource(timeLimit="30h")
    spoiled["metadata"] |= {"uid": "u", "namespace": "team", "generation": 1, "creationTimestamp": moment(0)}
    found = read_run(spoiled)
    assert isinstance(found, InvalidRun)
    status = runs.invalid_run_status(found, moment(1))
    [told] = run_events.transitions(found, status)
    assert (told.severity, told.reason) == ("Warning", names.INVALID_SPEC)
    again = read_run({**spoiled, "status": status})
    assert isinstance(again, InvalidRun)
    assert run_events.transitions(again, runs.invalid_run_status(again, moment(2))) == []


def test_a_status_that_is_unreadable_for_a_while_makes_no_old_news_new() -> None:
    story = Story()
    story.look({"trials": [trial(0, "Pruned", "worse")]}, worker=RUNNING)
    spoiled = read_run(
        {**story._resource, "status": {**story.status, "candidate": {"config": {}, "until": "soon"}}}
    )
    assert isinstance(spoiled, InvalidRun)
    assert runs.invalid_run_status(spoiled, moment(2))["pruned"] == [0]
