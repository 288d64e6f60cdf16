"""When a service that leaves its targets gets a run: how long that must last, what a gap does to it, and that it is one run.

`Watch` looks again and again, as the reconciler does: each look sees only what the last one wrote, so that a new operator, or a second
one, is the same as a further look.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.pods import T0
from support.runs import tuning_run
from support.services import BUDGET_PARAMETER, placed, resource, run_resource
from trimtab_operator import conditions, names, schema
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.status import Condition, Resolved, ServiceStatus
from trimtab_operator.plan import cluster
from trimtab_operator.plan.events import transitions
from trimtab_operator.plan.live import Switch
from trimtab_operator.plan.pods import rfc3339, unix
from trimtab_operator.plan.slo import NO_PROMETHEUS, UNASKED, Attainment
from trimtab_operator.plan.tuning_drift import COOL_DOWN_S, DriftVerdict, verdict

Word = Literal["Met", "Violated", "Unknown"]
SLO = {
    "Met": Attainment("Met", names.TARGETS_MET),
    "Violated": Attainment("Violated", names.TARGETS_MISSED, "itl of class default"),
    "Unknown": UNASKED,
}
WINDOW_S = 60.0
WINDOWS = 3
LONG_S = WINDOWS * WINDOW_S


def drifting(mode: str = "Apply", halt: str | None = None, **drift: Any) -> InferenceService:
    tuning = {
        "mode": mode,
        "parameters": [BUDGET_PARAMETER],
        "drift": {"enabled": True, "windows": WINDOWS, **drift},
    }
    given = resource(tuning=tuning, **{"slo.window": "1m"})
    return placed(given, halt)


class Watch:
    """A service that is looked at: `now`, its status, its runs, and the names of those that were made."""

    def __init__(self, service: InferenceService | None = None) -> None:
        self.service = service or drifting()
        self.now = T0
        self.status = ServiceStatus()
        self.runs: list[TuningRun] = []
        self.made: list[str] = []

    def look(self, word: Word, *, lost: bool = False) -> DriftVerdict:
        """One look; with `lost` the operator dies between making the run and writing the status."""
        found = verdict(self.service, self.status, SLO[word], self.runs, Switch(), self.now)
        assert found is not None
        if found.create is not None:
            name = found.create["metadata"]["name"]
            if all(run.name != name for run in self.runs):  # else the API server says that the name is taken
                self.made.append(name)
                self.runs.append(tuning_run(name, origin="drift", phase="Running", age_s=T0 - self.now))
        if lost:
            return found
        met = {"Met": "True", "Violated": "False", "Unknown": "Unknown"}[word]
        wanted = [Condition(names.SLO_MET, met, "Any")]
        merged = conditions.merge(self.status.conditions, wanted, rfc3339(self.now))
        tuning = replace(self.status.tuning, drift=found.kept)
        # As the API server keeps it.
        self.status = ServiceStatus.from_json(
            replace(self.status, conditions=merged, tuning=tuning).to_json()
        )
        return found

    def go_on(self, word: Word, seconds: float, step_s: float = 10.0) -> DriftVerdict:
        """Looks for so long, the first at once."""
        end = self.now + seconds
        found = self.look(word)
        while self.now < end:
            self.now = min(end, self.now + step_s)
            found = self.look(word)
        return found

    def finish(self, phase: str = "Succeeded") -> None:
        """All runs have just come to their end."""
        self.runs = [
            tuning_run(
                r.name,
                origin="drift",
                phase=phase,
                age_s=T0 - unix(r.metadata.creation_timestamp),
                ended_s=self.now,
            )
            for r in self.runs
        ]


def test_a_run_is_made_when_targets_were_missed_for_all_windows_and_no_sooner() -> None:
    watch = Watch()
    watch.go_on("Met", 60)
    since = watch.now = watch.now + 10
    found = watch.go_on("Violated", LONG_S - 1)
    assert watch.made == []
    assert (found.met, found.reason, found.look_again_s) == (False, names.TARGETS_MISSED, since + LONG_S)
    watch.now += 1
    found = watch.look("Violated")
    assert watch.made == [f"chat-drift-{int(since // 60)}"]
    assert (found.met, found.reason) == (True, names.RUN_CREATED)
    assert found.create is not None
    made = schema.parse_run(found.create)
    assert (made.spec.service, made.spec.evaluator) == ("chat", "Live")
    assert made.raw["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_enabling_it_counts_from_when_targets_began_to_be_missed() -> None:
    watch = Watch()
    before = Condition(names.SLO_MET, "False", "Any", last_transition_time=rfc3339(T0 - LONG_S))
    watch.status = ServiceStatus(conditions=(before,))
    watch.look("Violated")
    assert len(watch.made) == 1


def test_a_window_in_which_targets_were_met_begins_the_count_anew() -> None:
    watch = Watch()
    watch.go_on("Violated", LONG_S - 10)
    watch.now += 5
    watch.look("Met")
    watch.now += 5
    watch.go_on("Violated", LONG_S - 10)
    assert watch.made == []
    watch.go_on("Violated", 10)
    assert len(watch.made) == 1


@pytest.mark.parametrize(
    ("gap_s", "goes_on"), [(WINDOW_S - 10, True), (WINDOW_S, True), (WINDOW_S + 30, False)]
)
def test_a_gap_up_to_a_window_is_covered_by_the_verdict_after_it(gap_s: float, goes_on: bool) -> None:
    watch = Watch()
    watch.go_on("Violated", LONG_S / 2)
    watch.go_on("Unknown", gap_s)
    assert watch.made == []
    watch.go_on("Violated", LONG_S / 2 - gap_s)
    assert bool(watch.made) is goes_on
    watch.go_on("Violated", LONG_S)
    assert len(watch.made) == 1, "it only took longer"


def test_a_gap_that_nobody_looked_into_counts_by_its_beginning() -> None:
    watch = Watch()
    watch.look("Violated")
    watch.now += 10
    watch.look("Unknown")
    watch.now += LONG_S
    watch.look("Violated")
    assert watch.made == []


def test_no_run_is_made_while_nothing_is_known() -> None:
    watch = Watch()
    watch.go_on("Violated", LONG_S - 10)
    found = watch.go_on("Unknown", 30)
    assert (watch.made, found.met, found.reason) == ([], None, names.NOT_ENOUGH_SAMPLES)
    watch.look("Violated")
    assert len(watch.made) == 1


def test_one_violation_has_one_run_however_long_it_lasts_and_whoever_deletes_it() -> None:
    watch = Watch()
    watch.go_on("Violated", LONG_S)
    watch.finish()
    watch.go_on("Violated", 3 * COOL_DOWN_S, step_s=60)
    watch.runs.clear()
    found = watch.go_on("Violated", 3 * COOL_DOWN_S, step_s=60)
    assert len(watch.made) == 1
    assert (found.met, found.reason) == (True, names.RUN_CREATED)


def test_an_operator_that_dies_before_it_writes_makes_the_same_run_again() -> None:
    watch = Watch()
    watch.go_on("Violated", LONG_S - 10)
    watch.now += 20
    first, second = watch.look("Violated", lost=True), watch.look("Violated")
    assert first.create is not None
    assert len(watch.made) == 1
    assert second.reason == names.RUN_CREATED
    assert second.kept is not None
    assert second.kept.run == watch.made[0]


def test_a_run_under_way_is_waited_for() -> None:
    watch = Watch()
    watch.runs = [tuning_run("mine", phase="Running")]
    found = watch.go_on("Violated", LONG_S)
    assert (watch.made, found.met, found.reason) == ([], True, names.WAITING_FOR_RUN)
    assert "mine" in found.message
    watch.runs = [tuning_run("mine", phase="Succeeded")]
    watch.look("Violated")
    assert len(watch.made) == 1


def test_after_a_drift_run_none_is_made_for_an_hour() -> None:
    watch = Watch()
    watch.go_on("Violated", LONG_S)
    watch.now += 600
    watch.finish()
    ended = watch.now
    watch.look("Met")
    watch.now += 10
    found = watch.go_on("Violated", LONG_S)
    assert (len(watch.made), found.met, found.reason) == (1, True, names.COOLING_DOWN)
    assert found.look_again_s == ended + COOL_DOWN_S
    watch.go_on("Violated", ended + COOL_DOWN_S - 1 - watch.now, step_s=60)
    assert len(watch.made) == 1
    watch.now += 1
    watch.look("Violated")
    assert len(watch.made) == 2


def test_an_end_that_lies_ahead_counts_from_now() -> None:
    """A status may hold what somebody else wrote, or a clock that was ahead."""
    watch = Watch()
    watch.go_on("Violated", LONG_S)
    watch.finish()
    [mine] = watch.runs
    ahead = [replace(c, last_transition_time="9999-12-31T23:59:59-12:00") for c in mine.status.conditions]
    watch.runs = [replace(mine, status=replace(mine.status, conditions=tuple(ahead)))]
    assert ahead
    watch.look("Met")
    watch.now += 10
    found = watch.go_on("Violated", LONG_S)
    assert (found.reason, found.look_again_s) == (names.COOLING_DOWN, watch.now + COOL_DOWN_S)


def test_the_longest_name_of_a_service_has_drift_runs_of_its_own() -> None:
    longest = "c" * names.MAX_SERVICE_NAME
    found = names.drift_run(longest, T0), names.drift_run(longest[:-1] + "d", T0)
    assert len(set(found)) == 2
    assert max(map(len, found)) <= names.MAX_RUN_NAME
    assert names.drift_run(longest, T0) != names.drift_run(longest, T0 + 60)
    for name in found:
        schema.parse_run({**run_resource(), "metadata": {"name": name, "namespace": "team", "uid": "u"}})


@pytest.mark.parametrize(
    ("word", "reason"), [("paused", names.TUNING_PAUSED), ("reverted", names.TUNING_REVERTED)]
)
def test_none_is_made_while_tuning_is_held(word: str, reason: str) -> None:
    watch = Watch(drifting(halt=word))
    found = watch.go_on("Violated", LONG_S)
    assert (watch.made, found.met, found.reason) == ([], True, reason)
    watch.service = drifting()
    watch.look("Violated")
    assert len(watch.made) == 1


@pytest.mark.parametrize("mode", ["Off", "Recommend"])
def test_engines_are_touched_only_where_the_mode_allows_it(mode: str) -> None:
    watch = Watch(drifting(mode))
    found = watch.go_on("Violated", LONG_S)
    assert found.create is not None
    assert found.create["spec"]["evaluator"] == "Simulator"


def test_a_status_that_somebody_spoiled_makes_no_run_too_soon_or_too_late() -> None:
    for since in ("0000-01-01T00:00:00Z", rfc3339(T0 + 1e6)):
        watch = Watch()
        watch.status = ServiceStatus.from_json({"tuning": {"drift": {"since": since}}, "conditions": [
            {"type": names.SLO_MET, "status": "False", "reason": "x", "message": "", "lastTransitionTime": since}]})  # fmt: skip
        watch.go_on("Violated", LONG_S - 10)
        assert watch.made == []
        watch.go_on("Violated", 10)
        assert len(watch.made) == 1, "nor too late"


WORDS: st.SearchStrategy[list[tuple[Word, float]]] = st.lists(
    st.tuples(
        st.sampled_from(["Met", "Violated", "Violated", "Unknown"]),
        st.sampled_from([5.0, 20.0, 45.0, 90.0, 200.0, 4000.0]),
    ),
    max_size=30,
)


@given(WORDS, st.integers(0, 3))
def test_whatever_the_verdicts_a_run_stands_for_a_whole_row_and_never_comes_twice(
    story: list[tuple[Word, float]], finish_after: int
) -> None:
    """Against the definition, computed from the whole history: looks at the times of the story, runs that end now and then."""
    watch, history = Watch(), list[tuple[float, Word]]()
    for number, (word, pause_s) in enumerate(story):
        watch.now += pause_s
        if number % 4 == finish_after:
            watch.finish()
        before = list(watch.made)
        history.append((watch.now, word))
        ended = [unix(r.status.conditions[0].last_transition_time) for r in watch.runs if r.status.conditions]
        watch.look(word)
        if watch.made == before:
            continue
        began = row_of(history)
        assert began is not None
        assert word == "Violated"
        assert watch.now - began >= LONG_S
        assert watch.made[-1] not in before
        assert all(watch.now >= end + COOL_DOWN_S for end in ended)
    assert len(watch.made) == len(set(watch.made))


def row_of(history: list[tuple[float, Word]]) -> float | None:
    """Since when targets are missed: back to the first False with no True, and no gap longer than a window, after it."""
    began: float | None = None
    later: float | None = None  # the False after what is looked at
    for at, word in reversed(history):
        if word == "Met":
            break
        if word == "Violated":
            unknown = [
                t for t, w in history if w == "Unknown" and at < t < (later if later is not None else at)
            ]
            if later is not None and unknown and later - unknown[0] > WINDOW_S:
                break
            began = later = at
    return began


def test_the_condition_the_event_and_the_next_look_say_so() -> None:
    service = drifting()
    settings = cluster.Settings(Resolved(image="i"))
    seen, times = cluster.Observed(service, slo=SLO["Violated"]), [T0, T0 + 10, T0 + LONG_S, T0 + LONG_S + 10]
    told, looks, statuses = [], [], [ServiceStatus()]
    for now in times:
        decision = cluster.decide(seen, settings, now, rfc3339(now))
        found = cluster.conclude(seen, decision, now, rfc3339(now))
        looks.append(found.look_again_s)
        told.append(found.status.condition(names.DRIFT_DETECTED))
        statuses.append(found.status)
        seen = replace(seen, previous=found.status)
    assert [c.status for c in told if c is not None] == ["False", "False", "True", "True"]
    assert looks[0] == T0 + LONG_S
    events = [
        [h for h in transitions(a, b) if h.reason == names.DRIFT_DETECTED] for a, b in pairwise(statuses)
    ]
    assert [len(found) for found in events] == [0, 0, 1, 0]
    assert "TuningRun chat-drift-" in events[2][0].message
    assert (statuses[1].conditions, statuses[1].tuning) == (statuses[2].conditions, statuses[2].tuning), (
        "no write while it counts"
    )


@pytest.mark.parametrize("mode", ["Off", "Apply"])
def test_without_a_prometheus_it_is_told_that_nothing_can_be_seen(mode: str) -> None:
    seen = cluster.Observed(drifting(mode), slo=NO_PROMETHEUS)
    decision = cluster.decide(seen, cluster.Settings(Resolved(image="i")), T0, rfc3339(T0))
    status = cluster.conclude(seen, decision, T0, rfc3339(T0)).status
    ready = status.condition(names.TUNING_READY)
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", names.METRICS_UNAVAILABLE)
    assert "spec.tuning.drift.enabled" in ready.message
    assert "--prometheus-url" in ready.message
