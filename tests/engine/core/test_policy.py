"""Orderings, victims, displacement and chunk sizes: pure functions over views."""

import pytest

from support.core_builders import make_live, make_request
from trimtab_engine.core.policy import (
    MAX_DISPLACEMENTS,
    Fcfs,
    Priority,
    choose_victim,
    may_displace,
    policy_of,
    prefill_chunk,
    whole_prefill,
)
from trimtab_engine.core.request import Request
from trimtab_engine.errors import ConfigError


def ranked(policy: Fcfs | Priority, *requests: Request) -> list[Request]:
    for sequence, request in enumerate(requests):
        request.sequence = sequence
        request.rank = policy.waiting_rank(request)
    return sorted(requests, key=lambda r: r.rank)


def test_fcfs_serves_in_order_of_add_with_preempted_ones_in_front() -> None:
    first, second, third = make_request(), make_request(), make_request()
    third.num_preemptions = 1
    assert ranked(Fcfs(), first, second, third) == [third, first, second]


def test_fcfs_ignores_priority() -> None:
    first, second = make_request(priority=9), make_request(priority=-9)
    assert ranked(Fcfs(), first, second) == [first, second]


def test_priority_serves_lower_numbers_first_then_earlier_arrivals_then_order_of_add() -> None:
    late, early = make_request(priority=1, arrival_s=5.0), make_request(priority=1, arrival_s=2.0)
    twin, urgent = make_request(priority=1, arrival_s=5.0), make_request(priority=0, arrival_s=9.0)
    assert ranked(Priority(aging_s=0), late, early, twin, urgent) == [urgent, early, late, twin]


def test_aging_lets_a_patient_request_overtake_a_more_important_one() -> None:
    patient, urgent = make_request(priority=2, arrival_s=0.0), make_request(priority=0, arrival_s=61.0)
    assert ranked(Priority(aging_s=30.0), urgent, patient) == [patient, urgent]
    assert ranked(Priority(aging_s=0), urgent, patient) == [urgent, patient]


def test_aging_orders_like_the_priority_lowered_by_time_waited_at_any_moment() -> None:
    aging = 7.0
    requests = [make_request(priority=p, arrival_s=a) for p in (-1, 0, 3) for a in (0.0, 4.0, 30.0)]
    want = ranked(Priority(aging_s=aging), *requests)
    for now in (30.0, 1000.0):
        assert want == sorted(
            requests, key=lambda r: (r.priority - (now - r.arrival_s) / aging, r.arrival_s, r.sequence)
        )


def test_the_victim_is_the_largest_by_the_full_key() -> None:
    a, b, c = (make_request(priority=p, arrival_s=t) for p, t in ((1, 0.0), (1, 3.0), (0, 9.0)))
    ranked(Priority(aging_s=0), a, b, c)
    assert choose_victim([a, b, c]) is b
    a.admission, b.admission, c.admission = 1, 3, 2
    for request in (a, b, c):
        request.rank = Fcfs().running_rank(request)
    assert choose_victim([a, b, c]) is b


def test_only_a_strictly_more_important_request_displaces_and_only_by_a_margin() -> None:
    policy = Priority(aging_s=10.0)

    def displaces(waiting: tuple[int, float], running: tuple[int, float], preemptions: int = 0) -> bool:
        w = make_request(priority=waiting[0], arrival_s=waiting[1])
        r = make_request(priority=running[0], arrival_s=running[1])
        r.num_preemptions = preemptions
        ranked(policy, w, r)
        return may_displace(w, r)

    assert displaces((0, 5.0), (1, 5.0))
    assert not displaces((1, 0.0), (1, 90.0))  # equal priority: never, however long it has waited
    assert not displaces((0, 6.0), (1, 0.0))  # only 0.4 levels ahead after aging
    assert not displaces((0, 30.0), (1, 0.0))  # aging has put the running one ahead
    assert not displaces((0, 5.0), (1, 5.0), preemptions=MAX_DISPLACEMENTS)


def test_a_chunk_is_what_need_budget_and_threshold_allow() -> None:
    assert prefill_chunk(100, 64, 0) == 64
    assert prefill_chunk(10, 64, 0) == 10
    assert prefill_chunk(100, 64, 16) == 16
    assert prefill_chunk(5, 64, 16) == 5


def test_without_chunking_a_prompt_runs_whole_or_alone_or_not() -> None:
    assert whole_prefill(64, 64, step_is_empty=False) == 64
    assert whole_prefill(65, 64, step_is_empty=False) == 0
    assert whole_prefill(65, 64, step_is_empty=True) == 65


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="scheduling_policy: 'lottery' is not allowed; one of fcfs, priority, sla-aware"
    ):
        policy_of(make_live(policy="lottery"))
