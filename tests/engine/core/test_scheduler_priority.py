"""The priority policy on whole steps: order, displacement, aging, and that nobody starves."""

from itertools import pairwise

from support.core_builders import Engine, assert_as_if_alone, make_live, make_request, make_scheduler
from trimtab_engine.core.policy import MAX_DISPLACEMENTS
from trimtab_engine.core.request import RequestState
from trimtab_engine.core.scheduler import DISPLACEMENT_INTERVAL_STEPS


def test_waiting_requests_are_admitted_by_priority() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=1, policy="priority")))
    low, high = make_request(priority=5), make_request(priority=1)
    engine.add(low, high)
    assert engine.step().requests == [high]
    engine.finish()


def test_running_prompts_get_the_budget_by_priority() -> None:
    live = make_live(budget=8, seqs=4, policy="priority", long_prefill=4)
    engine = Engine(make_scheduler(live=live))
    low, high = make_request(prompt=20, priority=5), make_request(prompt=20, priority=1)
    engine.add(low)
    engine.step()
    engine.add(high)
    engine.step()
    engine.scheduler.reconfigure(make_live(budget=8, seqs=4, policy="priority"), 2)
    step = engine.step()
    assert step.requests == [high]
    assert step.chunk == [8]
    engine.finish()
    assert_as_if_alone(low, high)


def test_a_more_important_request_takes_the_place_of_a_less_important_one() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=2, policy="priority")))
    running = [make_request(max_tokens=30, priority=p) for p in (3, 5)]
    engine.add(*running)
    engine.step()
    urgent = make_request(priority=0)
    engine.add(urgent)
    engine.until(lambda: urgent.state is RequestState.RUNNING, limit=4)
    assert running[1].state is RequestState.PREEMPTED
    assert running[0].state is RequestState.RUNNING
    assert engine.scheduler.stats.displacements == 1
    engine.finish()
    assert_as_if_alone(*running, urgent)


def test_an_equally_important_request_never_displaces() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=1, policy="priority", aging_s=1.0)))
    running, waiting = make_request(max_tokens=30, arrival_s=50.0), make_request(arrival_s=0.0)
    engine.add(running)
    engine.step()
    engine.add(waiting)
    engine.until(lambda: running.state is RequestState.FINISHED)
    assert engine.scheduler.stats.displacements == 0
    engine.finish()


def test_displacing_the_only_running_request_loses_no_step() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=1, policy="priority")))
    low, high = make_request(max_tokens=9, priority=5), make_request(priority=0)
    engine.add(low)
    engine.step()
    engine.add(high)
    engine.step()
    step = engine.step()
    assert step.preempted == [low]
    assert step.requests == step.admitted == [high]
    engine.finish()
    assert_as_if_alone(low, high)


def test_memory_is_made_for_a_more_important_request_one_victim_at_a_time() -> None:
    engine = Engine(make_scheduler(num_blocks=12, block_size=4, live=make_live(seqs=8, policy="priority")))
    low = [make_request(prompt=12, max_tokens=4, priority=5 + i) for i in range(3)]
    engine.add(*low)
    engine.step()
    urgent = make_request(prompt=24, max_tokens=2, priority=0)
    engine.add(urgent)
    engine.until(lambda: urgent.first_scheduled_s is not None)
    assert all(len(s.preempted) <= 1 for s in engine.steps)
    assert all(not (s.preempted and s.admitted) for s in engine.steps)
    engine.finish()
    assert_as_if_alone(*low, urgent)


def test_nobody_is_displaced_when_it_would_not_help() -> None:
    engine = Engine(make_scheduler(num_blocks=12, block_size=4, live=make_live(seqs=8, policy="priority")))
    important = make_request(prompt=28, max_tokens=8, priority=0)
    small = make_request(prompt=4, max_tokens=8, priority=9)
    engine.add(important, small)
    engine.step()
    waiting = make_request(prompt=24, max_tokens=2, priority=1)  # 6 blocks; the small one has 2, 3 are free
    engine.add(waiting)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.stats.displacements == 0
    assert small.state is RequestState.RUNNING
    engine.finish()
    assert_as_if_alone(important, small, waiting)


def test_a_request_is_displaced_only_so_often() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=1, policy="priority")))
    low = make_request(max_tokens=90, priority=9)
    engine.add(low)
    engine.step()
    for _ in range(MAX_DISPLACEMENTS + 3):
        engine.add(make_request(max_tokens=1, priority=0))
        for _ in range(12):
            engine.step()
    assert low.num_preemptions == MAX_DISPLACEMENTS
    engine.finish()
    assert_as_if_alone(low)


def test_a_stream_of_important_requests_displaces_only_one_in_so_many_steps() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=4, policy="priority")))
    low = [make_request(max_tokens=60, priority=9) for _ in range(4)]
    engine.add(*low)
    engine.step()
    for _ in range(30):
        engine.add(make_request(max_tokens=40, priority=0))
        engine.step()
    displacing = [i for i, s in enumerate(engine.steps) if s.preempted]
    assert len(displacing) >= 3
    gaps = [b - a for a, b in pairwise(displacing)]
    assert min(gaps) >= DISPLACEMENT_INTERVAL_STEPS
    engine.finish()
    assert_as_if_alone(*low)


def test_fcfs_never_displaces_and_counts_the_priorities_it_ignores() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=1)))
    low, high = make_request(max_tokens=9, priority=5), make_request(priority=-5)
    engine.add(low)
    engine.step()
    engine.add(high)
    engine.until(lambda: low.state is RequestState.FINISHED)
    assert high.first_scheduled_s is None
    assert engine.scheduler.stats.priorities_ignored == 2
    engine.finish()


def test_a_preempted_request_keeps_its_rank_among_those_that_never_ran() -> None:
    engine = Engine(make_scheduler(num_blocks=6, block_size=4, live=make_live(seqs=2, policy="priority")))
    pair = [make_request(prompt=8, max_tokens=12, priority=1, arrival_s=float(i)) for i in range(2)]
    later = [make_request(prompt=4, max_tokens=2, priority=1, arrival_s=9.0) for _ in range(3)]
    engine.add(*pair)
    engine.step()
    engine.add(*later)
    engine.until_preempted()
    victim = engine.steps[-1].preempted[0]
    engine.until(lambda: victim.state is RequestState.RUNNING)
    assert all(r.first_scheduled_s is None or r.first_scheduled_s >= engine.now for r in later)
    engine.finish()
    assert_as_if_alone(*pair, *later)


def test_aging_ends_the_wait_of_an_unimportant_request_under_a_stream_of_important_ones() -> None:
    def wait(aging_s: float) -> float:
        engine = Engine(make_scheduler(live=make_live(seqs=1, policy="priority", aging_s=aging_s)))
        patient = make_request(max_tokens=1, priority=2, arrival_s=0.0)
        engine.add(make_request(max_tokens=1, priority=0, arrival_s=0.0), patient)
        for _ in range(100):
            engine.add(make_request(max_tokens=1, priority=0, arrival_s=engine.now))
            engine.step()
        return 100.0 if patient.first_scheduled_s is None else patient.first_scheduled_s

    assert wait(aging_s=10.0) < 30.0
    assert wait(aging_s=0.0) == 100.0
