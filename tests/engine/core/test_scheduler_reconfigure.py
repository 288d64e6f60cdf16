"""Live changes between steps: they bind at once, lose nobody, and change no output."""

import pytest

from support.core_builders import Engine, assert_as_if_alone, make_live, make_request, make_scheduler
from trimtab_engine.core.request import RequestState
from trimtab_engine.errors import ConfigError


def test_a_new_budget_and_generation_bind_in_the_next_step() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8)))
    engine.add(make_request(prompt=40, max_tokens=1))
    assert engine.step().num_tokens == 8
    engine.scheduler.reconfigure(make_live(budget=16), generation=7)
    step = engine.step()
    assert (step.num_tokens, step.budget, step.generation) == (16, 16, 7)
    engine.scheduler.reconfigure(make_live(budget=3, seqs=3), generation=8)
    assert engine.step().num_tokens == 3  # below the chunk in progress: chunks are per step
    engine.finish()


def test_lowering_max_num_seqs_drains_down_and_evicts_nobody() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=4)))
    running = [make_request(max_tokens=4 + i) for i in range(4)]
    waiting = make_request()
    engine.add(*running)
    engine.step()
    engine.add(waiting)
    engine.scheduler.reconfigure(make_live(seqs=2), 2)
    engine.step()
    assert engine.scheduler.stats.num_running == 4
    engine.until(lambda: waiting.state is RequestState.RUNNING)
    assert engine.scheduler.stats.num_running <= 2
    assert engine.scheduler.stats.preemptions_recompute == 0
    engine.finish()
    assert_as_if_alone(*running, waiting)


def test_a_lowered_max_num_seqs_is_not_reached_by_displacement() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=4, policy="priority")))
    running = [make_request(max_tokens=9, priority=9) for _ in range(4)]
    engine.add(*running)
    engine.step()
    engine.scheduler.reconfigure(make_live(seqs=2, policy="priority"), 2)
    engine.add(make_request(priority=0))
    for _ in range(5):
        engine.step()
    assert engine.scheduler.stats.preemptions_recompute == 0
    engine.finish()


def test_raising_max_num_seqs_admits_in_the_next_step() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=1)))
    engine.add(*(make_request(max_tokens=9) for _ in range(3)))
    engine.step()
    engine.scheduler.reconfigure(make_live(seqs=3), 2)
    assert len(engine.step().requests) == 3
    engine.finish()


def test_a_policy_switch_reorders_the_waiting_and_keeps_the_running() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=1)))
    running = make_request(max_tokens=3, priority=9)
    low, high = make_request(priority=5), make_request(priority=1)
    engine.add(running)
    engine.step()
    engine.add(low, high)
    engine.scheduler.reconfigure(make_live(seqs=1, policy="priority"), 2)
    engine.scheduler.check_integrity()
    assert running.state is RequestState.RUNNING
    engine.until(lambda: high.state is RequestState.RUNNING)
    assert low.first_scheduled_s is None
    engine.scheduler.reconfigure(make_live(seqs=1, policy="fcfs"), 3)
    engine.scheduler.check_integrity()
    late = make_request(priority=-9)
    engine.add(late)
    engine.until(lambda: low.first_scheduled_s is not None)
    assert late.first_scheduled_s is None
    engine.finish()
    assert_as_if_alone(running, low, high, late)


def test_a_policy_switch_keeps_preempted_requests_and_their_counts() -> None:
    engine = Engine(make_scheduler(num_blocks=6, block_size=4))
    requests = [make_request(prompt=8, max_tokens=12, priority=i) for i in range(2)]
    engine.add(*requests)
    (victim,) = engine.until_preempted().preempted
    engine.scheduler.reconfigure(make_live(policy="priority"), 2)
    assert (victim.state, victim.num_preemptions) == (RequestState.PREEMPTED, 1)
    engine.scheduler.reconfigure(make_live(policy="fcfs"), 3)
    engine.add(make_request())
    engine.until(lambda: victim.state is not RequestState.PREEMPTED)
    engine.finish()
    assert_as_if_alone(*requests)


def test_after_a_policy_switch_running_requests_give_way_by_the_new_policy() -> None:
    for policy, want in (("fcfs", "high"), ("priority", "low")):
        engine = Engine(make_scheduler(num_blocks=6, block_size=4))
        low, high = make_request(8, 12, priority=9, id="low"), make_request(8, 12, priority=0, id="high")
        engine.add(low, high)
        engine.step()
        engine.scheduler.reconfigure(make_live(policy=policy), 2)
        assert [r.id for r in engine.until_preempted().preempted] == [want]
        engine.finish()
        assert_as_if_alone(low, high)


def test_after_a_policy_switch_running_prompts_get_the_budget_by_the_new_policy() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8, long_prefill=4)))
    low, high = make_request(30, 1, priority=9), make_request(30, 1, priority=0)
    engine.add(low, high)
    engine.step()
    engine.scheduler.reconfigure(make_live(budget=8), 2)
    assert engine.step().requests == [low]
    engine.scheduler.reconfigure(make_live(budget=8, policy="priority"), 3)
    assert engine.step().requests == [high]
    engine.finish()
    assert_as_if_alone(low, high)


def test_a_change_of_aging_alone_reorders_the_waiting() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=1, policy="priority", aging_s=0.0)))
    engine.add(make_request(max_tokens=2, priority=-9))
    engine.step()
    patient, urgent = make_request(priority=2, arrival_s=0.0), make_request(priority=0, arrival_s=60.0)
    engine.add(patient, urgent)
    engine.scheduler.reconfigure(make_live(seqs=1, policy="priority", aging_s=10.0), 2)
    engine.until(lambda: patient.first_scheduled_s is not None)
    assert urgent.first_scheduled_s is None
    engine.finish()


def test_a_config_that_cannot_work_is_refused_and_changes_nothing() -> None:
    scheduler = make_scheduler(live=make_live(budget=8))
    before = (scheduler.live, scheduler.generation)
    for live, message in (
        (make_live(policy="lottery"), "config.scheduling_policy: 'lottery'"),
        (make_live(budget=0), "config.max_num_batched_tokens: 0"),
        (make_live(seqs=0), "config.max_num_seqs: 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            scheduler.reconfigure(live, 9)
        assert (scheduler.live, scheduler.generation) == before


def test_a_config_that_cannot_work_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        make_scheduler(live=make_live(seqs=0))


def test_requests_added_while_the_engine_drains_are_still_served() -> None:
    # Draining is the loop's business; the scheduler takes what it is given until the last request has ended.
    engine = Engine(make_scheduler())
    engine.add(make_request(max_tokens=3))
    engine.step()
    late = make_request(max_tokens=3)
    engine.add(late)
    engine.finish()
    assert_as_if_alone(late)


def test_switching_policy_budget_and_places_in_every_step_changes_no_output() -> None:
    engine = Engine(make_scheduler(num_blocks=16, block_size=4, live=make_live(budget=12, seqs=5)))
    requests = [make_request(prompt=3 + 7 * i % 23, max_tokens=11, priority=i % 3) for i in range(14)]
    engine.add(*requests)
    generation = 1
    while engine.scheduler.has_work:
        generation += 1
        assert generation < 1000
        live = make_live(
            budget=2 + generation * 5 % 29,
            seqs=1 + generation * 3 % 5,
            policy=("fcfs", "priority")[generation % 2],
            long_prefill=generation % 4,
            aging_s=float(generation % 3),
        )
        engine.scheduler.reconfigure(live, generation)
        engine.step()
    assert engine.scheduler.stats.preemptions_recompute > 0
    assert_as_if_alone(*requests)
