"""Preemption by swap: KV goes to CPU memory and comes back, recomputation is the fallback, and nobody says anything else."""

from __future__ import annotations

import pytest

from support.core_builders import (
    Engine,
    assert_as_if_alone,
    make_live,
    make_request,
    make_scheduler,
    make_step_time,
)
from trimtab_engine.core.request import Request, RequestState
from trimtab_engine.core.step import StepResult
from trimtab_engine.core.swap import SwapSpace, pays


def make_engine(
    num_swap_blocks: int = 16,
    *,
    swap_block_s: float = 0.0,
    policy: str = "fcfs",
    prefix_caching: bool = False,
) -> Engine:
    """Room for 48 tokens in blocks of four: two requests of 12 + 30 tokens do not fit."""
    return Engine(
        make_scheduler(
            num_blocks=12,
            live=make_live(policy=policy),
            num_swap_blocks=num_swap_blocks,
            swap_block_s=swap_block_s,
            prefix_caching=prefix_caching,
        )
    )


def two() -> list[Request]:
    return [make_request(12, 30), make_request(12, 30)]


def test_a_swapped_request_goes_on_where_it_was() -> None:
    engine, requests = make_engine(), two()
    engine.add(*requests)
    step = engine.until_preempted()
    (victim,) = step.preempted
    computed = victim.num_swapped
    assert victim.state is RequestState.SWAPPED
    assert computed == victim.num_tokens - 1
    assert [place for _, place in step.swap_out] == victim.swap_ids
    assert len(victim.swap_ids) == -(-computed // 4)
    engine.until(lambda: victim.state is RequestState.RUNNING)
    back = engine.steps[-1]
    row = back.requests.index(victim)
    assert (back.context[row], back.chunk[row]) == (computed, 1)
    assert len(back.swap_in) == len(step.swap_out)
    engine.finish()
    assert_as_if_alone(*requests)
    stats = engine.scheduler.stats
    assert (stats.preemptions_swap, stats.preemptions_recompute, stats.recomputed_tokens) == (1, 0, 0)


def test_a_half_computed_prompt_is_swapped_too() -> None:
    scheduler = make_scheduler(
        num_blocks=20, live=make_live(budget=20, seqs=4), num_swap_blocks=20, prefix_caching=False
    )
    engine = Engine(scheduler)
    decodes = [make_request(4, 40) for _ in range(3)]
    engine.add(*decodes)
    engine.step()
    prompt = make_request(44, 4)
    engine.add(prompt)
    engine.step()
    scheduler.reconfigure(
        make_live(budget=4, seqs=4), 2
    )  # the prompt stands still while the decodes grow into its memory
    step = engine.until_preempted()
    assert step.preempted == [prompt]
    assert 0 < prompt.num_swapped < 44
    scheduler.reconfigure(make_live(budget=20, seqs=4), 3)
    engine.finish()
    assert_as_if_alone(*decodes, prompt)


def test_without_room_in_cpu_memory_it_is_computed_again() -> None:
    engine, requests = make_engine(num_swap_blocks=2), two()
    engine.add(*requests)
    engine.finish()
    stats = engine.scheduler.stats
    assert (stats.preemptions_swap, stats.preemptions_recompute) == (0, 1)
    assert_as_if_alone(*requests)


@pytest.mark.parametrize(("block_s", "swaps"), [(0.001, 1), (1.0, 0)], ids=["cheap copy", "dear copy"])
def test_the_cheaper_way_is_taken(block_s: float, swaps: int) -> None:
    engine, requests = make_engine(swap_block_s=block_s), two()
    engine.scheduler.use_step_time(make_step_time(0.01, 0.01))  # some 20 tokens: a quarter of a second
    engine.add(*requests)
    engine.finish()
    stats = engine.scheduler.stats
    assert (stats.preemptions_swap, stats.preemptions_recompute) == (swaps, 1 - swaps)
    assert_as_if_alone(*requests)


def test_it_pays_when_both_copies_take_less_than_computing_again() -> None:
    assert pays(10, 0.001, 0.0201)
    assert not pays(10, 0.001, 0.02)
    assert pays(10, 0.001, None)


def test_blocks_that_are_still_cached_are_not_copied_back() -> None:
    engine, requests = make_engine(prefix_caching=True), two()
    engine.add(*requests)
    (victim,) = engine.until_preempted().preempted
    engine.until(lambda: victim.state is RequestState.RUNNING)
    back = engine.steps[-1]
    assert len(back.swap_in) < -(-back.context[back.requests.index(victim)] // 4)
    engine.finish()
    assert_as_if_alone(*requests)


def test_an_abort_frees_its_room_and_takes_a_copy_back_that_was_not_made() -> None:
    engine, requests = make_engine(), two()
    engine.add(*requests)
    (victim,) = engine.until_preempted().preempted
    engine.scheduler.abort(victim.id)
    engine.scheduler.check_integrity()
    assert engine.scheduler._state.swap.num_free == 16
    engine.finish()


def test_kv_that_a_step_in_flight_still_writes_is_not_copied() -> None:
    engine, request = make_engine(), make_request(12, 30)
    scheduler = engine.scheduler
    engine.add(request)
    engine.step()
    step = scheduler.schedule(2.0)
    assert request.num_in_flight == 1
    assert not scheduler._can_swap(request)
    scheduler.commit(step, engine.runner.run(step), 2.0)
    assert scheduler._can_swap(request)


def test_a_step_that_failed_loses_its_copies_and_they_are_computed_again() -> None:
    engine, requests = make_engine(), two()
    scheduler = engine.scheduler
    engine.add(*requests)
    for _ in range(200):
        step = scheduler.schedule(0.0)
        if step.swap_out:
            break
        scheduler.commit(step, engine.runner.run(step), 0.0)
    (victim,) = step.preempted
    scheduler.rollback(step)
    scheduler.check_integrity()
    assert (victim.state, victim.num_swapped, victim.swap_ids) == (RequestState.PREEMPTED, 0, [])
    assert scheduler._state.swap.num_free == 16
    engine.finish()
    assert_as_if_alone(*requests)
    assert scheduler.stats.recomputed_tokens > 0


def test_a_step_that_failed_while_bringing_a_request_back_has_it_computed_again() -> None:
    engine, requests = make_engine(), two()
    scheduler = engine.scheduler
    engine.add(*requests)
    for _ in range(200):
        step = scheduler.schedule(0.0)
        if step.swap_in:
            break
        scheduler.commit(step, engine.runner.run(step), 0.0)
    (victim,) = step.admitted
    scheduler.rollback(step)
    scheduler.check_integrity()
    assert victim.state is RequestState.PREEMPTED
    engine.finish()
    assert_as_if_alone(*requests)


def test_a_readmission_that_failed_counts_neither_its_look_up_nor_its_hits() -> None:
    engine, requests = make_engine(prefix_caching=True), two()
    scheduler = engine.scheduler
    engine.add(*requests)
    engine.until_preempted()
    for _ in range(200):
        before = scheduler.stats
        step = scheduler.schedule(0.0)
        if step.admitted:
            break
        scheduler.commit(step, engine.runner.run(step), 0.0)
    hits = scheduler.stats.readmission_hits - before.readmission_hits
    assert 0 < hits < step.context[step.requests.index(step.admitted[0])]  # some cached, the rest swapped in
    scheduler.rollback(step)
    after = scheduler.stats
    assert (after.readmission_queries, after.readmission_hits) == (
        before.readmission_queries,
        before.readmission_hits,
    )
    engine.finish()
    assert_as_if_alone(*requests)


def test_copies_of_a_step_that_holds_nothing_go_with_the_next_one() -> None:
    space = SwapSpace(4)
    places = space.copy_out([7, 8])
    assert space.take() == ([(7, places[0]), (8, places[1])], [])
    space.copy_in(places, [3, 4, 5], first=1)
    assert space.num_free == 2  # not before the copy is handed out
    assert space.take() == ([], [(places[1], 4)])
    assert space.num_free == 4
    space.check([])


def test_a_copy_nobody_wants_is_not_made() -> None:
    space = SwapSpace(4)
    unwanted, wanted = space.copy_out([7]), space.copy_out([8])
    space.discard(unwanted)
    assert space.take() == ([(8, wanted[0])], [])
    space.check(wanted)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sla-aware"])
def test_a_switch_of_policy_and_budget_in_every_step_changes_nothing_while_requests_are_swapped(
    policy: str,
) -> None:
    engine = make_engine()
    requests = [make_request(8 + i, 20, priority=i % 3) for i in range(5)]
    engine.add(*requests)
    names = ["fcfs", "priority", "sla-aware"]
    number = names.index(policy)
    while engine.scheduler.has_work:
        number += 1
        engine.scheduler.reconfigure(make_live(5 + number % 40, 1 + number % 4, names[number % 3]), number)
        engine.step()
        assert number < 2000
    assert engine.scheduler.stats.preemptions_swap > 0
    assert_as_if_alone(*requests)


def test_results_of_a_step_are_not_needed_for_its_copies() -> None:
    """A step whose rows were all dropped meanwhile still made its copies: they were handed out with it."""
    engine, requests = make_engine(), two()
    scheduler = engine.scheduler
    engine.add(*requests)
    for _ in range(200):
        step = scheduler.schedule(0.0)
        result = engine.runner.run(step)
        if step.swap_out:
            break
        scheduler.commit(step, result, 0.0)
    (victim,) = step.preempted
    (other,) = step.requests
    scheduler.abort(other.id)
    scheduler.commit(step, StepResult(result.token_ids), 0.0)
    assert victim.state is RequestState.SWAPPED
    engine.finish()
    assert_as_if_alone(victim)
