"""Aborts, rollbacks and steps in flight: nothing is lost, doubled or delivered to the dead."""

import pytest

from support.core_builders import (
    Engine,
    HistoryRunner,
    assert_as_if_alone,
    make_live,
    make_request,
    make_scheduler,
    outputs_of,
)
from trimtab_engine.core.request import FinishReason, RequestState
from trimtab_engine.core.step import StepResult


def test_aborting_a_waiting_request_takes_it_out_of_the_queue() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=1)))
    running, waiting = make_request(max_tokens=4), make_request()
    engine.add(running, waiting)
    engine.step()
    assert engine.scheduler.abort(waiting.id) is waiting
    assert (waiting.state, waiting.finish_reason) == (RequestState.FINISHED, FinishReason.ABORT)
    engine.finish()
    assert_as_if_alone(running)


def test_aborting_in_the_middle_of_a_prompt_frees_its_blocks() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8)))
    request = make_request(prompt=40)
    engine.add(request)
    engine.step()
    assert engine.scheduler.abort(request.id) is request
    engine.scheduler.check_integrity()
    assert not engine.scheduler.has_work
    assert engine.scheduler.stats.kv_used_fraction == 0.0


def test_aborting_a_preempted_request_takes_it_out_of_the_queue() -> None:
    engine = Engine(make_scheduler(num_blocks=6, block_size=4))
    requests = [make_request(prompt=8, max_tokens=12) for _ in range(2)]
    engine.add(*requests)
    (victim,) = engine.until_preempted().preempted
    assert engine.scheduler.abort(victim.id) is victim
    engine.finish()
    assert_as_if_alone(next(r for r in requests if r is not victim))


def test_aborting_twice_or_an_unknown_id_does_nothing() -> None:
    engine, request = Engine(make_scheduler()), make_request()
    engine.add(request)
    engine.step()
    assert engine.scheduler.abort("never heard of") is None
    assert engine.scheduler.abort(request.id) is request
    assert engine.scheduler.abort(request.id) is None
    engine.scheduler.check_integrity()


def test_aborting_before_the_first_schedule_and_in_the_same_breath_as_add() -> None:
    scheduler, request = make_scheduler(), make_request()
    scheduler.add(request)
    assert scheduler.abort(request.id) is request
    assert not scheduler.schedule(1.0)
    scheduler.check_integrity()


def test_the_result_of_a_request_aborted_in_flight_is_dropped() -> None:
    scheduler, runner = make_scheduler(), HistoryRunner(4)
    gone, stays = make_request(), make_request(max_tokens=2)
    scheduler.add(gone)
    scheduler.add(stays)
    step = scheduler.schedule(1.0)
    result = runner.run(step)
    scheduler.abort(gone.id)
    scheduler.check_integrity()
    events = scheduler.commit(step, result, 1.0)
    assert [e.request for e in events] == [stays]
    assert outputs_of(gone) == []
    scheduler.check_integrity()


def test_a_request_aborted_in_the_step_that_would_have_finished_it_stays_aborted() -> None:
    scheduler, runner = make_scheduler(), HistoryRunner(4)
    request = make_request(max_tokens=1)
    scheduler.add(request)
    step = scheduler.schedule(1.0)
    result = runner.run(step)
    scheduler.abort(request.id)
    assert scheduler.commit(step, result, 1.0) == []
    assert request.finish_reason is FinishReason.ABORT
    assert not scheduler.has_work


def test_aborting_right_after_the_finish_does_nothing() -> None:
    engine, request = Engine(make_scheduler()), make_request(max_tokens=1)
    engine.add(request)
    engine.step()
    assert engine.scheduler.abort(request.id) is None
    assert request.finish_reason is FinishReason.LENGTH


def test_an_abort_one_step_late_as_for_a_stop_string_ends_with_the_tokens_so_far() -> None:
    engine, request = Engine(make_scheduler()), make_request(max_tokens=9)
    engine.add(request)
    engine.step()
    engine.step()  # the HTTP process found its stop string in the first token; this one ran meanwhile
    engine.scheduler.abort(request.id)
    assert len(engine.events) == 2
    assert not engine.scheduler.has_work


def test_aborting_all_running_requests_leaves_an_engine_that_serves_on() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=3)))
    requests = [make_request(max_tokens=9) for _ in range(5)]
    engine.add(*requests)
    engine.step()
    for request in requests[:3]:
        engine.scheduler.abort(request.id)
    engine.finish()
    assert_as_if_alone(*requests[3:])


def test_a_second_schedule_before_the_commit_leaves_out_requests_whose_token_is_in_flight() -> None:
    scheduler, runner = make_scheduler(live=make_live(budget=8)), HistoryRunner(4)
    chat, document = make_request(prompt=4, max_tokens=3), make_request(prompt=30, max_tokens=1)
    scheduler.add(chat)
    scheduler.add(document)
    first = scheduler.schedule(1.0)
    second = scheduler.schedule(1.0)
    assert first.requests == [chat, document]
    assert (second.requests, second.context, second.chunk) == ([document], [4], [8])
    assert document.num_computed == 0
    assert document.num_in_flight == 12
    for step in (first, second):
        scheduler.commit(step, runner.run(step), 1.0)
        scheduler.check_integrity()
    assert document.num_computed == 12
    engine = Engine(scheduler, runner)
    engine.finish()
    assert_as_if_alone(chat, document)


def test_a_prompt_finished_in_flight_is_not_scheduled_again_before_its_commit() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=6, max_tokens=3))
    assert scheduler.schedule(1.0)
    assert not scheduler.schedule(1.0)
    scheduler.check_integrity()


def test_steps_are_committed_in_order_and_only_once() -> None:
    scheduler, runner = make_scheduler(live=make_live(budget=4)), HistoryRunner(4)
    scheduler.add(make_request(prompt=12))
    first, second = scheduler.schedule(1.0), scheduler.schedule(1.0)
    results = [runner.run(first), runner.run(second)]
    with pytest.raises(AssertionError, match="not the oldest in flight"):
        scheduler.commit(second, results[1], 1.0)
    scheduler.commit(first, results[0], 1.0)
    with pytest.raises(AssertionError, match="not the oldest in flight"):
        scheduler.commit(first, results[0], 1.0)
    scheduler.commit(second, results[1], 1.0)


def test_an_empty_step_may_be_committed_or_rolled_back_without_effect() -> None:
    scheduler = make_scheduler()
    step = scheduler.schedule(1.0)
    assert not step
    assert scheduler.commit(step, StepResult([]), 1.0) == []
    scheduler.rollback(step)
    scheduler.check_integrity()


def test_the_result_of_a_request_preempted_in_flight_is_dropped_and_its_token_sampled_again() -> None:
    # `low` decodes in the first step; the second, scheduled before the first is committed, takes its memory.
    scheduler, runner = (
        make_scheduler(num_blocks=6, block_size=4, live=make_live(budget=40, policy="priority")),
        HistoryRunner(4),
    )
    engine = Engine(scheduler, runner)
    low = make_request(prompt=8, max_tokens=8, priority=9)
    engine.add(low)
    engine.step()
    high = make_request(prompt=18, max_tokens=3, priority=0)
    live = make_live(budget=40, policy="priority", long_prefill=6)
    scheduler.reconfigure(live, 2)
    scheduler.add(high)
    dropped = 0
    for _ in range(40):
        first = scheduler.schedule(1.0)
        first_result = runner.run(first)
        second = scheduler.schedule(1.0)
        scheduler.check_integrity()
        second_result = runner.run(second)
        in_flight = low in first.requests and low in second.preempted
        before = len(outputs_of(low))
        scheduler.commit(first, first_result, 1.0)
        if in_flight:
            dropped += 1
            assert len(outputs_of(low)) == before
        scheduler.commit(second, second_result, 1.0)
        scheduler.check_integrity()
    assert not scheduler.has_work
    assert_as_if_alone(low, high)


def test_a_rolled_back_step_leaves_everything_as_if_it_had_not_been_scheduled() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8)))
    chat, document = make_request(prompt=4, max_tokens=6), make_request(prompt=30, max_tokens=2)
    engine.add(chat)
    engine.step()
    engine.add(document)
    scheduler = engine.scheduler
    before = scheduler.stats
    step = scheduler.schedule(5.0)
    assert step.admitted == [document]
    scheduler.rollback(step)
    scheduler.check_integrity()
    assert scheduler.stats == before
    assert (document.state, document.num_cached, document.first_scheduled_s) == (
        RequestState.WAITING,
        None,
        None,
    )
    assert chat.num_in_flight == 0
    again = scheduler.schedule(6.0)
    assert (again.requests, again.context, again.chunk) == (step.requests, step.context, step.chunk)
    scheduler.rollback(again)
    engine.finish()
    assert_as_if_alone(chat, document)


def test_steps_in_flight_are_rolled_back_newest_first() -> None:
    scheduler = make_scheduler(live=make_live(budget=4))
    scheduler.add(make_request(prompt=12))
    first, second = scheduler.schedule(1.0), scheduler.schedule(1.0)
    with pytest.raises(AssertionError, match="rolled back newest first"):
        scheduler.rollback(first)
    scheduler.rollback(second)
    scheduler.rollback(first)
    scheduler.check_integrity()
    assert scheduler.stats.kv_used_fraction == 0.0


def test_a_readmission_that_is_rolled_back_is_preempted_again_not_new() -> None:
    engine = Engine(make_scheduler(num_blocks=6, block_size=4))
    requests = [make_request(prompt=8, max_tokens=12) for _ in range(2)]
    engine.add(*requests)
    (victim,) = engine.until_preempted().preempted
    scheduler = engine.scheduler
    while True:
        step = scheduler.schedule(99.0)
        if victim in step.admitted:
            break
        scheduler.commit(step, engine.runner.run(step), 99.0)
    cached, preemptions = victim.num_cached, victim.num_preemptions
    scheduler.rollback(step)
    assert (victim.state, victim.num_cached, victim.num_preemptions) == (
        RequestState.PREEMPTED,
        cached,
        preemptions,
    )
    engine.finish()
    assert_as_if_alone(*requests)


def test_an_aborted_row_of_a_step_that_is_rolled_back_stays_aborted() -> None:
    scheduler = make_scheduler()
    gone, stays = make_request(), make_request()
    scheduler.add(gone)
    scheduler.add(stays)
    step = scheduler.schedule(1.0)
    scheduler.abort(gone.id)
    scheduler.rollback(step)
    scheduler.check_integrity()
    assert (gone.state, stays.state) == (RequestState.FINISHED, RequestState.WAITING)


def test_a_row_that_fails_while_its_next_chunk_is_in_flight_ends_once() -> None:
    bad = make_request(prompt=20, max_tokens=2)
    scheduler = make_scheduler(live=make_live(budget=4))
    runner = HistoryRunner(4, fail=lambda r: r is bad)
    scheduler.add(bad)
    first, second = scheduler.schedule(1.0), scheduler.schedule(1.0)
    results = [runner.run(first), runner.run(second)]
    assert [e.finished for e in scheduler.commit(first, results[0], 1.0)] == [True]
    assert scheduler.commit(second, results[1], 1.0) == []
    scheduler.check_integrity()
    assert not scheduler.has_work
