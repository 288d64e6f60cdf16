"""The state machine of live configs: what is taken, what is refused, and that no candidate outlives its lease."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.errors import ConfigError, GenerationConflict
from trimtab_engine.live_state import (
    FIRST_LIMIT,
    MAX_LEASE_S,
    MAX_RISE,
    LiveState,
    Versioned,
    check_generation,
    check_lease,
    check_source,
)

START = Versioned(3, "Spec", LiveConfig())


def document(generation: int, budget: int = 256, source: str = "Spec") -> Versioned:
    return Versioned(generation, source, replace(LiveConfig(), max_num_batched_tokens=budget))


def fresh() -> LiveState:
    return LiveState(START, Ceilings())


def snapshot(state: LiveState) -> tuple[object, ...]:
    return state.incumbent, state.candidate, state.in_force, state.highest_generation, state.to_json(0.0)


def test_a_higher_generation_becomes_the_incumbent() -> None:
    state = fresh()
    assert state.offer(document(4), None, now=0.0)
    assert state.incumbent == state.in_force == document(4)
    assert state.highest_generation == 4


@pytest.mark.parametrize("generation", [0, 2, 3])
def test_a_generation_that_is_not_new_conflicts_and_changes_nothing(generation: int) -> None:
    state = fresh()
    before = snapshot(state)
    with pytest.raises(GenerationConflict, match=f"generation {generation}"):
        state.offer(document(generation), None, now=0.0)
    assert snapshot(state) == before


@pytest.mark.parametrize("lease_s", [None, 10.0])
def test_a_generation_far_above_all_seen_conflicts_so_that_later_ones_have_room(
    lease_s: float | None,
) -> None:
    state = fresh()
    before = snapshot(state)
    for generation in (2**62 - 1, START.generation + MAX_RISE + 1):
        with pytest.raises(GenerationConflict, match="rise by at most"):
            state.offer(document(generation), lease_s, now=0.0)
        assert snapshot(state) == before
    assert state.offer(document(START.generation + MAX_RISE), lease_s, now=0.0)


def test_an_engine_that_has_seen_none_takes_any_first_generation_with_room_above() -> None:
    state = LiveState(replace(START, generation=0), Ceilings())
    with pytest.raises(GenerationConflict):
        state.offer(document(FIRST_LIMIT), None, now=0.0)
    assert state.offer(document(FIRST_LIMIT - 1), None, now=0.0)
    assert state.offer(document(FIRST_LIMIT), None, now=0.0)


def test_the_incumbent_again_is_no_conflict_and_no_change() -> None:
    state = fresh()
    assert not state.offer(START, None, now=0.0)
    state.offer(document(4), 10.0, now=0.0)
    assert not state.offer(
        START, None, now=1.0
    )  # a level-based operator repeats itself under a running trial
    assert state.in_force == document(4)


def test_the_same_number_from_another_source_conflicts() -> None:
    state = fresh()
    state.offer(document(4), None, now=0.0)
    with pytest.raises(GenerationConflict, match="other content"):
        state.offer(document(4, source="Recommendation"), None, now=0.0)


def test_a_candidate_ends_when_its_lease_runs_out() -> None:
    state = fresh()
    assert state.offer(document(4), 10.0, now=100.0)
    assert state.next_end_s == 110.0
    assert not state.expire(109.9)
    assert state.in_force == document(4)
    assert state.expire(110.0)
    assert state.in_force == START
    assert state.next_end_s == math.inf


def test_a_renewed_lease_starts_again_and_is_no_change() -> None:
    state = fresh()
    state.offer(document(4), 10.0, now=0.0)
    assert not state.offer(document(4), 10.0, now=8.0)
    assert not state.expire(17.9)
    assert state.expire(18.0)


def test_an_ended_lease_cannot_be_renewed() -> None:
    state = fresh()
    state.offer(document(4), 10.0, now=0.0)
    state.expire(10.0)
    with pytest.raises(GenerationConflict, match="has ended"):
        state.offer(document(4), 10.0, now=10.0)
    assert state.in_force == START


def test_a_renewal_with_other_content_conflicts() -> None:
    state = fresh()
    state.offer(document(4), 10.0, now=0.0)
    with pytest.raises(GenerationConflict, match="other content"):
        state.offer(document(4, budget=512), 10.0, now=1.0)
    assert state.next_end_s == 10.0


def test_a_candidate_is_not_promoted_under_its_own_number() -> None:
    state = fresh()
    state.offer(document(4), 10.0, now=0.0)
    with pytest.raises(GenerationConflict, match="not both"):
        state.offer(document(4), None, now=1.0)


def test_a_new_incumbent_ends_the_candidate() -> None:
    state = fresh()
    state.offer(document(4), 10.0, now=0.0)
    assert state.offer(document(5, 512), None, now=1.0)
    assert state.candidate is None
    assert state.in_force == document(5, 512)


def test_a_new_candidate_replaces_the_old_one() -> None:
    state = fresh()
    state.offer(document(4), 10.0, now=0.0)
    assert state.offer(document(5, 512), 10.0, now=1.0)
    assert state.in_force == document(5, 512)
    state.expire(11.0)
    assert state.in_force == START


def test_the_readback_shows_wall_clock_time() -> None:
    state = LiveState(START, Ceilings(), boot_error="live.json: broken")
    state.offer(document(4), 10.0, now=5.0)
    readback: Any = state.to_json(unix_offset_s=1_000_000.0)
    assert readback["candidate"]["until"] == 1_000_015.0
    assert readback["in_force"]["generation"] == 4
    assert readback["incumbent"]["generation"] == 3
    assert readback["boot_error"] == "live.json: broken"
    assert readback["highest_generation"] == 4


@pytest.mark.parametrize("lease_s", [0, -1, MAX_LEASE_S + 0.1, math.nan, math.inf, "10", True, []])
def test_a_lease_outside_its_range_is_refused(lease_s: object) -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        check_lease(lease_s)


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, None, 2**62])
def test_a_generation_that_is_no_counting_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="generation"):
        check_generation(value)


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of Spec, Recommendation"):
        check_source("Me")


DOCUMENTS = st.builds(
    document,
    generation=st.integers(0, 12),
    budget=st.sampled_from([128, 256]),
    source=st.sampled_from(["Spec", "Recommendation"]),
)


class LiveStateMachine(RuleBasedStateMachine):
    """Any order of offers, renewals, clock ticks and deletions, beside what must hold of each."""

    def __init__(self) -> None:
        super().__init__()
        self.state = fresh()
        self.now = 0.0
        self.last_promise_s = -math.inf  # until when somebody has asked for the candidate

    @rule(new=DOCUMENTS, lease_s=st.none() | st.floats(0.5, 20.0))
    def offer(self, new: Versioned, lease_s: float | None) -> None:
        state, before = self.state, snapshot(self.state)
        highest, was = state.highest_generation, state.in_force
        try:
            changed = state.offer(new, lease_s, self.now)
        except GenerationConflict:
            assert snapshot(state) == before
            assert new.generation <= highest
            return
        assert changed == (state.in_force != was)
        if new.generation > highest:
            assert state.in_force == new
            assert (state.candidate is None) == (lease_s is None)
        else:
            assert new in (state.incumbent, was)  # nothing but a repetition or a renewal gets this far
        if lease_s is not None:
            self.last_promise_s = self.now + lease_s

    @rule(step_s=st.floats(0.1, 15.0))
    def time_passes(self, step_s: float) -> None:
        self.now += step_s
        was = self.state.in_force
        assert self.state.expire(self.now) == (self.state.in_force != was)

    @rule()
    def end_candidate(self) -> None:
        self.state.end_candidate()
        assert self.state.in_force == self.state.incumbent

    @invariant()
    def nothing_is_in_force_longer_than_promised(self) -> None:
        if self.state.candidate is not None:
            assert self.now < self.state.candidate.until_s == self.last_promise_s
            assert self.state.candidate.until_s <= self.now + MAX_LEASE_S
        else:
            assert self.state.in_force == self.state.incumbent

    @invariant()
    def the_highest_generation_bounds_all(self) -> None:
        assert self.state.highest_generation >= self.state.in_force.generation
        assert self.state.highest_generation >= self.state.incumbent.generation >= START.generation


TestLiveStateMachine = LiveStateMachine.TestCase


@given(documents=st.lists(st.tuples(DOCUMENTS, st.none() | st.floats(0.5, 20.0)), max_size=20))
def test_generations_of_taken_incumbents_only_rise(
    documents: list[tuple[Versioned, float | None]],
) -> None:
    state, seen = fresh(), [START.generation]
    for now, (new, lease_s) in enumerate(documents):
        state.expire(float(now))
        try:
            state.offer(new, lease_s, float(now))
        except GenerationConflict:
            continue
        if state.incumbent.generation != seen[-1]:
            seen.append(state.incumbent.generation)
    assert seen == sorted(set(seen))
