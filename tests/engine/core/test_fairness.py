"""Fairness between tenants: counters, lifting, and bounded differences of service under every policy."""

from __future__ import annotations

import pytest

from support.core_builders import Engine, make_live, make_request, make_scheduler
from trimtab_engine.core import fairness
from trimtab_engine.core.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue
from trimtab_engine.core.live import POLICIES, SloClass
from trimtab_engine.core.request import Request


def waiting(tenant: str | None, rank: float = 0.0, arrival_s: float = 0.0) -> Request:
    request = make_request(tenant=tenant, arrival_s=arrival_s)
    request.sequence = int(request.id.removeprefix("r"))
    request.rank = (rank, 0.0, request.sequence)
    return request


def queue_of(*requests: Request) -> FairQueue:
    queue = FairQueue()
    for request in requests:
        queue.push(request)
    return queue


def make_engine(policy: str, *, fair: bool, seqs: int = 2, num_blocks: int = 400) -> Engine:
    classes = (SloClass("default", 5.0, 2.0),)
    scheduler = make_scheduler(
        num_blocks=num_blocks, live=make_live(64, seqs, policy, classes=classes), fair_tenants=fair
    )
    return Engine(scheduler)


def service(requests: list[Request]) -> int:
    """Weighted tokens that these requests got."""
    return sum(
        OUTPUT_WEIGHT * r.num_output_tokens
        + (PROMPT_WEIGHT * r.num_prompt_tokens if r.num_output_tokens else 0)
        for r in requests
    )


def test_the_tenant_that_got_least_is_next_and_within_it_the_policys_order_holds() -> None:
    a, a_first, b = waiting("a", 5.0), waiting("a", 1.0), waiting("b", 9.0)
    queue = queue_of(a, a_first, b)
    assert queue.peek() is a_first  # equal counters: by rank
    queue.charge("a", 1)
    assert queue.peek() is b
    queue.charge("b", 2)
    assert queue.peek() is a_first
    queue.remove(a_first)
    assert queue.peek() is a


def test_of_tenants_that_got_the_same_the_one_with_the_better_head_is_next() -> None:
    later, sooner = waiting("b", 9.0), waiting("a", 5.0)
    assert queue_of(later, sooner).peek() is sooner
    assert queue_of(sooner, later).peek() is sooner


def test_a_tenant_that_comes_back_has_earned_no_credit() -> None:
    queue = queue_of(waiting("busy"), waiting("busier"))
    queue.charge("busy", 1000)
    queue.charge("busier", 1500)
    queue.push(waiting("new"))
    assert queue.counter("new") == 1000
    queue.push(waiting("new"))
    assert queue.counter("new") == 1000


def test_when_nobody_waits_a_newcomer_starts_from_who_left_last() -> None:
    last = waiting("last")
    queue = queue_of(last)
    queue.charge("last", 70)
    queue.remove(last)
    queue.push(waiting("new"))
    assert queue.counter("new") == 70
    assert len(queue) == 1


def test_a_preempted_request_does_not_lift_its_tenant() -> None:
    queue = queue_of(waiting("busy"))
    queue.charge("busy", 1000)
    preempted = waiting("poor")
    preempted.num_preemptions = 1
    queue.push(preempted)
    assert queue.counter("poor") == 0
    assert queue.peek() is preempted


def test_counters_of_tenants_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_COUNTERS", 8)
    queue = queue_of(waiting("rich"))
    queue.charge("rich", 5)
    for number in range(100):
        request = waiting(f"t{number}")
        queue.push(request)
        queue.charge(request.tenant, number % 2)
        queue.remove(request)
    assert len(queue._counters) <= 60
    assert queue.counter("rich") == 5


def test_the_interface_is_that_of_the_plain_queue() -> None:
    early, late = waiting("a", 3.0, arrival_s=1.0), waiting("b", 1.0, arrival_s=2.0)
    queue = queue_of(late, early)
    assert (len(queue), set(queue)) == (2, {early, late})
    assert early in queue
    assert queue.oldest_arrival_s() == 1.0
    queue.rerank(lambda request: (-request.arrival_s, 0.0))
    assert queue.peek() is late
    queue.remove(late)
    queue.remove(early)
    assert late not in queue
    assert (queue.peek(), queue.oldest_arrival_s(), list(queue)) == (None, None, [])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_one_tenant_does_not_keep_the_other_from_its_half(policy: str) -> None:
    engine = make_engine(policy, fair=True)
    flood = [make_request(12, 6, tenant="flood", priority=-3) for _ in range(60)]
    modest = [make_request(12, 6, tenant="modest") for _ in range(20)]
    engine.add(*flood, *modest)
    while any(r.finish_reason is None for r in modest):
        engine.step()
        # Theorem 4.8 of the paper: a bound that does not grow with time. A batch holds two requests of 12 + 2·6.
        if sum(r.finish_reason is None and not r.num_computed for r in modest):
            assert abs(service(flood) - service(modest)) <= 2 * 2 * (12 + 2 * 6)
    assert sum(r.finish_reason is None for r in flood) >= 35


@pytest.mark.parametrize("policy", POLICIES)
def test_without_the_option_the_flood_goes_first(policy: str) -> None:
    engine = make_engine(policy, fair=False)
    flood = [make_request(12, 6, tenant="flood", priority=-3) for _ in range(20)]
    modest = make_request(12, 6, tenant="modest")
    engine.add(*flood, modest)
    engine.until(lambda: modest.finish_reason is not None)
    assert all(r.num_output_tokens for r in flood)


def test_within_a_tenant_priority_decides() -> None:
    engine = make_engine("priority", fair=True, seqs=1)
    engine.add(make_request(8, 2, tenant="a"))
    engine.step()
    low, high = make_request(8, 2, tenant="a", priority=5), make_request(8, 2, tenant="a", priority=1)
    engine.add(low, high)
    engine.finish()
    order = [r for step in engine.steps for r in step.admitted]
    assert order[1:] == [high, low]


def test_cached_tokens_are_not_charged_and_recomputation_is_not_charged_twice() -> None:
    engine = make_engine("fcfs", fair=True)
    text = list(range(1, 41))
    engine.add(make_request(text, 1, tenant="a"))
    engine.finish()
    fair = engine.scheduler._state.fair
    assert fair is not None
    assert fair.counter("a") == 40 + OUTPUT_WEIGHT
    engine.add(make_request([*text, 7], 1, tenant="a"))
    engine.finish()
    assert fair.counter("a") == 40 + OUTPUT_WEIGHT + 1 + OUTPUT_WEIGHT
    squeezed = make_engine("fcfs", fair=True, num_blocks=12)
    squeezed.add(make_request(12, 30, tenant="x"), make_request(12, 30, tenant="y"))
    squeezed.finish()
    assert squeezed.scheduler.stats.preemptions_recompute >= 1
    counters = squeezed.scheduler._state.fair
    assert counters is not None
    assert counters.counter("x") == counters.counter("y") == 12 + 30 * OUTPUT_WEIGHT


def test_steps_done_at_once_are_charged_as_single_ones() -> None:
    engine = make_engine("fcfs", fair=True)
    engine.add(make_request(8, 20, tenant="a"), make_request(8, 20, tenant="b"))
    engine.step()
    fair = engine.scheduler._state.fair
    assert fair is not None
    before = fair.counter("a")
    assert engine.scheduler.skip_decodes(lambda request: 7, [2.0, 3.0, 4.0]) == 3
    assert fair.counter("a") == fair.counter("b") == before + 3 * OUTPUT_WEIGHT


def test_a_step_that_failed_is_not_charged() -> None:
    engine = make_engine("fcfs", fair=True)
    request = make_request(20, 4, tenant="a")
    engine.add(request)
    engine.scheduler.rollback(engine.scheduler.schedule(1.0))
    fair = engine.scheduler._state.fair
    assert fair is not None
    assert fair.counter("a") == 0
    engine.scheduler.check_integrity()
