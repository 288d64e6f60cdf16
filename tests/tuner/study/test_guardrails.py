"""Guardrails as pure functions: each rule stops what it must and nothing else."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.study import SLO, make_config, make_reading
from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_tuner import guardrails, space
from trimtab_tuner.guardrails import Limits, must_stop
from trimtab_tuner.metrics.reading import Block, Unknown

LIVE = Limits()
CONFIGS = st.builds(
    lambda seqs, extra, policy, threshold: make_config(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + extra,
        scheduling_policy=policy,
        long_prefill_token_threshold=min(threshold, seqs + extra),
    ),
    st.integers(1, 256),
    st.integers(0, 7000),
    st.sampled_from(["fcfs", "priority"]),
    st.integers(0, 4000),
)


def difference(a: LiveConfig, b: LiveConfig) -> list[str]:
    return [f for f in LiveConfig.__dataclass_fields__ if getattr(a, f) != getattr(b, f)]


@given(CONFIGS, CONFIGS)
def test_a_path_moves_one_knob_at_a_time_by_a_factor_of_two_and_arrives(
    start: LiveConfig, goal: LiveConfig
) -> None:
    at = start
    for move in guardrails.path(start, goal, LIVE):
        changed = difference(at, move)
        assert len(changed) == 1
        before, after = getattr(at, changed[0]), getattr(move, changed[0])
        if isinstance(before, int) and before and after:
            assert max(before, after) <= 2 * min(before, after) + 1
        assert space.valid(dataclasses.replace(move, long_prefill_token_threshold=0), Ceilings(8192, 256)), (
            "the engine would refuse this step of the way"
        )
        at = move
    assert at == goal


def test_offline_a_path_is_one_move() -> None:
    start, goal = make_config(max_num_batched_tokens=4096), make_config(max_num_batched_tokens=64)
    assert guardrails.path(start, goal, Limits(max_factor=None)) == (goal,)
    assert len(guardrails.path(start, goal, LIVE)) == 6
    assert guardrails.path(start, start, LIVE) == ()


def test_a_step_may_take_nine_tenths_of_the_tightest_gap_target() -> None:
    assert guardrails.step_time_limit_s(SLO, LIVE) == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("tuning", "reason"),
    [
        ({"state": "paused", "mode": "Apply"}, "paused by the annotation"),
        ({"state": "reverted", "mode": "Apply"}, "reverted by the annotation"),
        ({"state": "active", "mode": "Off"}, "needs Canary or Apply"),
        ({"state": "active", "mode": "Recommend"}, "needs Canary or Apply"),
        ({"state": "quiet", "mode": "Apply", "quiet": {"message": "until 18:00"}}, "until 18:00"),
        ({"state": "active", "mode": "Canary"}, None),
        ({"state": "active", "mode": "Apply"}, None),
    ],
)
def test_what_the_operator_says_of_tuning_is_a_kill_switch(
    tuning: dict[str, object], reason: str | None
) -> None:
    found = guardrails.paused({"tuning": tuning}, pause_file=False)
    assert (found is None) if reason is None else (reason in (found or ""))


def test_a_pause_file_pauses_and_a_bare_engine_does_not() -> None:
    assert guardrails.paused({}, pause_file=True)
    assert guardrails.paused({}, pause_file=False) is None


def test_no_exploring_with_the_error_budget_nearly_gone_or_right_after_a_rollback() -> None:
    def may(left: float, since: int | None) -> str | None:
        return guardrails.may_explore(pause=None, budget_left=left, windows_since_rollback=since, limits=LIVE)

    assert may(0.5, None) is None
    assert "error budget" in (may(0.1, None) or "")
    assert "cooling down" in (may(0.5, 2) or "")
    assert may(0.5, 3) is None


def test_the_error_budget_is_that_of_the_worst_target() -> None:
    # Objective 99 %: 1 violated in 200 is half of the budget, 4 in 200 overspends it by as much again.
    assert guardrails.error_budget_left(make_reading(n=200, violated_itl=1), SLO) == pytest.approx(0.5)
    assert guardrails.error_budget_left(make_reading(n=200, violated_itl=1, violated_ttft=4), SLO) < 0


def test_a_quiet_candidate_may_go_on() -> None:
    assert must_stop(make_reading(), baseline=make_reading(), slo=SLO, limits=LIVE) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"faults": 3.0}, "failed"),
        ({"preemptions": 5.0}, "preempted"),
        ({"oldest_waiting_s": 6.0}, "oldest waiting"),
        ({"longest_gap_s": 0.6}, "longest token gap"),
    ],
)
def test_each_rate_and_gauge_stops_a_candidate_unless_the_incumbent_is_as_bad(
    changes: dict[str, Any], reason: str
) -> None:
    bad = make_reading(**changes)
    assert reason in (must_stop(bad, baseline=make_reading(), slo=SLO, limits=LIVE) or "")
    assert must_stop(bad, baseline=bad, slo=SLO, limits=LIVE) is None


def test_missing_metrics_stop_a_candidate() -> None:
    assert "unknown: gone" in (must_stop(Unknown("gone"), baseline=None, slo=SLO, limits=LIVE) or "")


def test_a_candidate_that_is_clearly_worse_is_stopped_before_its_end() -> None:
    good, bad = [Block(0, 6)] * 12, [Block(4, 6)] * 5
    stop = must_stop(
        make_reading(),
        baseline=make_reading(),
        slo=SLO,
        limits=LIVE,
        incumbent_blocks=good,
        candidate_blocks=bad,
    )
    assert "violates more" in (stop or "")
    assert (
        must_stop(
            make_reading(),
            baseline=make_reading(),
            slo=SLO,
            limits=LIVE,
            incumbent_blocks=good,
            candidate_blocks=bad[:3],
        )
        is None
    )
