"""The rules of `sla-aware`, one by one, as pure functions."""

import math

import pytest

from support.core_builders import make_request, make_step_time
from trimtab_engine.core.live import Slo, SloClass
from trimtab_engine.core.policy import SlaAware
from trimtab_engine.core.policy_sla import (
    FLOOR_TOKENS,
    HEADROOM,
    PATIENCE,
    PROGRESS_SHARE,
    UNMEASURED_TOKENS,
    Standing,
    is_quick,
    latest_start_s,
    laxity_s,
    next_move_s,
    next_standing,
    prompt_chunk,
    step_cap_s,
    step_limit_s,
    targets,
    was_savable,
)
from trimtab_engine.core.request import Request
from trimtab_engine.core.step_time import StepFeatures, StepTimeModel

SLO = Slo("chat", (SloClass("chat", 1.0, 0.05), SloClass("batch", 30.0, 1.0)))
NOTHING = StepFeatures(0, 0, 0, 0.0)


def standing(kind: Standing, arrival_s: float, latest_s: float = math.inf, priority: int = 0) -> Request:
    request = make_request(arrival_s=arrival_s, priority=priority)
    request.standing, request.latest_start_s = kind, latest_s
    return request


def order(*requests: Request) -> list[Request]:
    for sequence, request in enumerate(requests):
        request.sequence = sequence
    return sorted(requests, key=SlaAware().waiting_rank)


def test_targets_are_the_requests_own_then_its_classs_then_the_default_classs() -> None:
    assert targets(SLO, "batch", None, None) == (30.0, 1.0)
    assert targets(SLO, "batch", 2.0, None) == (2.0, 1.0)
    assert targets(SLO, "batch", None, 0.2) == (30.0, 0.2)
    assert targets(SLO, "gone since", None, None) == (1.0, 0.05)


def test_the_savable_go_by_latest_start_not_by_deadline_or_arrival() -> None:
    long = standing(Standing.SAVABLE, 0.0, latest_start_s(0.0, ttft_s=1.0, prefill_s=0.9))
    short = standing(Standing.SAVABLE, -0.5, latest_start_s(-0.5, ttft_s=1.0, prefill_s=0.1))
    assert order(short, long) == [long, short]


def test_late_ones_stand_behind_the_savable_and_overdue_ones_before_both_by_arrival() -> None:
    savable = standing(Standing.SAVABLE, 50.0, 51.0)
    late = [standing(Standing.LATE, a, latest_s=9.0 - a) for a in (3.0, 2.0)]
    overdue = [standing(Standing.OVERDUE, a, latest_s=-a) for a in (1.0, 0.0)]
    assert order(savable, *late, *overdue) == [overdue[1], overdue[0], savable, late[1], late[0]]


def test_when_all_are_late_the_order_is_that_of_arrival() -> None:
    requests = [standing(Standing.LATE, a, latest_s=-a, priority=-int(a)) for a in (0.0, 1.0, 2.0, 3.0)]
    assert order(*reversed(requests)) == requests


def test_priority_breaks_ties() -> None:
    first, urgent = standing(Standing.SAVABLE, 0.0, 1.0, priority=5), standing(Standing.SAVABLE, 0.0, 1.0)
    assert order(first, urgent) == [urgent, first]


def test_a_preempted_request_that_has_spoken_stands_before_all() -> None:
    overdue, spoken = standing(Standing.OVERDUE, 0.0), standing(Standing.LATE, 9.0)
    spoken.last_token_s = 10.0
    assert order(overdue, spoken) == [spoken, overdue]


def test_a_standing_moves_one_way_at_the_latest_start_and_after_patience() -> None:
    request = standing(Standing.SAVABLE, 10.0, 10.8)
    request.ttft_target_s = 1.0
    moves = []
    while next_move_s(request) < math.inf:
        moves.append((request.standing, next_move_s(request)))
        request.standing = next_standing(request.standing)
    assert moves == [(Standing.SAVABLE, 10.8), (Standing.LATE, 10.0 + PATIENCE)]
    assert request.standing is Standing.OVERDUE
    spoken = standing(Standing.SAVABLE, 0.0, 1.0)
    spoken.last_token_s = 0.5
    assert next_move_s(spoken) == math.inf


def test_only_what_could_have_been_in_time_was_savable() -> None:
    assert was_savable(standing(Standing.SAVABLE, 5.0, 5.0))
    assert not was_savable(standing(Standing.SAVABLE, 5.0, 4.9))


def test_a_step_is_capped_by_the_smallest_itl_target_of_any_class() -> None:
    assert step_cap_s(SLO) == pytest.approx(HEADROOM * 0.05)


def test_the_limit_is_the_smallest_decode_slack_less_headroom() -> None:
    model, rows = make_step_time(0.01, 0.001), StepFeatures(2, 2, 0, 0.0)
    assert step_limit_s(model, rows, [100.08, 100.2], 100.0, 1.0) == pytest.approx(HEADROOM * 0.08)
    assert step_limit_s(model, rows, [100.08, 100.2], 100.03, 1.0) == pytest.approx(HEADROOM * 0.05)
    assert step_limit_s(model, rows, [100.08, 100.2], 100.0, 0.06) == pytest.approx(0.06)
    assert step_limit_s(model, NOTHING, [], 100.0, 0.06) == pytest.approx(0.06)


def test_a_decode_that_is_lost_limits_nobody() -> None:
    model, rows = make_step_time(0.01, 0.001), StepFeatures(2, 2, 0, 0.0)  # 11 ms alone
    assert step_limit_s(model, rows, [100.01, 100.1], 100.0, 1.0) == pytest.approx(HEADROOM * 0.1)
    assert step_limit_s(model, rows, [99.0], 100.0, 0.05) == pytest.approx(0.05)


def test_prompts_may_always_lengthen_a_step_by_a_share() -> None:
    model, rows = make_step_time(0.1, 0.0), StepFeatures(2, 2, 0, 0.0)
    want = pytest.approx(0.1 * (1 + PROGRESS_SHARE))
    assert step_limit_s(model, rows, [100.12], 100.0, 1.0) == want  # 0.108 s of slack
    assert (
        step_limit_s(model, rows, [100.02], 100.0, 0.045) == want
    )  # all lost, and the cap is below the step


def chunk(
    model: StepTimeModel | None,
    need: int,
    limit_s: float,
    *,
    rows: StepFeatures = NOTHING,
    prompt_tokens: int = 0,
    context: int = 0,
) -> int:
    return prompt_chunk(
        model,
        rows,
        prompt_tokens=prompt_tokens,
        context=context,
        need=need,
        most=min(need, 2048),
        limit_s=limit_s,
    )


def test_a_chunk_is_the_largest_that_the_time_limit_allows() -> None:
    model = make_step_time(0.01, 0.001)
    assert chunk(model, 5000, 0.11001) == 101
    assert chunk(model, 5000, 0.11001, rows=StepFeatures(20, 20, 0, 0.0)) == 81
    assert chunk(model, 50, 0.11001) == 50


def test_a_chunk_shrinks_as_the_context_before_it_grows() -> None:
    model = make_step_time(0.01, 0.001, attention_s=1e-6)
    assert chunk(model, 5000, 0.11, context=0) > 1.5 * chunk(model, 5000, 0.11, context=1000)


def test_the_first_prompt_of_a_step_gets_the_floor_and_no_other_gets_a_sliver() -> None:
    model = make_step_time(0.01, 0.001)
    assert chunk(model, 5000, 0.001) == FLOOR_TOKENS
    rows = StepFeatures(90, 1, 0, 0.0)
    assert chunk(model, 5000, 0.11, rows=rows, prompt_tokens=90) == 0  # ten would fit
    assert chunk(model, 9, 0.11, rows=rows, prompt_tokens=90) == 9  # they complete a prompt


def test_before_any_step_was_measured_chunks_are_small_and_then_at_most_double() -> None:
    assert chunk(None, 5000, math.inf) == UNMEASURED_TOKENS
    rows = StepFeatures(30, 4, 0, 0.0)
    assert chunk(None, 5000, math.inf, rows=rows, prompt_tokens=27) == UNMEASURED_TOKENS - 27
    measured = StepTimeModel(make_step_time().coefficients, largest_tokens=100)
    assert chunk(measured, 5000, 1e6, rows=rows, prompt_tokens=27) == 200 - 30


def test_a_waiting_prompt_is_quick_when_it_fits_whole_into_half_of_the_time_left() -> None:
    model, rows = make_step_time(0.01, 0.001), StepFeatures(10, 10, 0, 0.0)  # 19 ms
    assert is_quick(model, rows, 0, 40, limit_s=0.101)
    assert not is_quick(model, rows, 0, 42, limit_s=0.101)
    assert is_quick(None, rows, 0, UNMEASURED_TOKENS // 2, math.inf)
    assert not is_quick(None, rows, 2, UNMEASURED_TOKENS // 2, math.inf)


def test_laxity_is_the_time_to_the_next_deadline_less_what_recomputing_takes() -> None:
    decode, prompt = make_request(100, arrival_s=5.0), make_request(200, arrival_s=9.0)
    for request in (decode, prompt):
        request.ttft_target_s, request.itl_target_s = 2.0, 0.5
    decode.last_token_s = 10.0
    assert laxity_s(decode, 0.01, 0.0) == pytest.approx(10.5 - 1.0)
    assert laxity_s(prompt, 0.01, 0.0) == pytest.approx(11.0 - 2.0)
    assert laxity_s(prompt, 0.01, 1e-4) == pytest.approx(11.0 - 2.0 - 2.0)
