"""The work queue: one look at a time for each service, bursts coalesced, failures with growing pauses, nothing lost."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from support.clock import Clock
from trimtab_operator.cluster.kube import NotLeading
from trimtab_operator.cluster.worker import BACKOFF_S, Workers, WorkQueue


@pytest.fixture
def clock() -> Clock:
    return Clock()


def take(queue: WorkQueue[str]) -> str | None:
    return queue.take(timeout_s=0.0)


def test_a_burst_of_events_owes_one_look(clock: Clock) -> None:
    queue: WorkQueue[str] = WorkQueue(clock)
    for _ in range(5):
        queue.add("a")
    assert take(queue) == "a"
    queue.done("a")
    assert take(queue) is None


def test_an_event_during_a_look_owes_another_one_afterwards_and_not_meanwhile(clock: Clock) -> None:
    queue: WorkQueue[str] = WorkQueue(clock)
    queue.add("a")
    assert take(queue) == "a"
    queue.add("a")
    queue.add("b")
    assert take(queue) == "b"
    assert take(queue) is None
    queue.done("a")
    clock.now_s += 1
    assert take(queue) == "a"


def test_waiting_for_a_busy_key_costs_nothing() -> None:
    asked = itertools.count()

    def now() -> float:
        next(asked)
        return time.monotonic()

    queue: WorkQueue[str] = WorkQueue(now)
    queue.add("a")
    assert take(queue) == "a"
    queue.add("a")
    time.sleep(0.3)  # due by now, and nobody may have it
    before = next(asked)
    assert queue.take(timeout_s=0.3) is None
    assert next(asked) - before < 20
    queue.done("a")
    assert queue.take(timeout_s=5) == "a"


def test_a_look_is_due_when_it_was_asked_for_or_sooner_if_something_happens(clock: Clock) -> None:
    queue: WorkQueue[str] = WorkQueue(clock)
    queue.add("a", 10)
    queue.add("b", 10)
    queue.add("a", 3)
    clock.now_s += 3
    assert take(queue) == "a"
    queue.done("a")
    assert take(queue) is None
    clock.now_s += 7
    assert take(queue) == "b"


def test_failures_wait_longer_each_time_and_events_do_not_shorten_that(clock: Clock) -> None:
    queue: WorkQueue[str] = WorkQueue(clock)
    queue.add("a")
    pauses = []
    for _ in range(12):
        assert take(queue) == "a"
        pause = queue.done("a", failed=True)
        assert pause is not None
        pauses.append(pause)
        queue.add("a")
        clock.now_s += pause * 0.9
        assert take(queue) is None
        clock.now_s += pause * 0.2
    assert pauses[0] <= BACKOFF_S[0] * 1.25
    assert all(late > early for early, late in itertools.pairwise(pauses[:6]))
    assert max(pauses) <= BACKOFF_S[1] * 1.25
    assert take(queue) == "a"
    queue.done("a")
    queue.add("a")
    clock.now_s += 1
    assert take(queue) == "a", "a success forgets earlier failures"


def wait_until(check: object, timeout_s: float = 10.0) -> None:
    assert callable(check)
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_workers_never_work_on_one_key_twice_at_a_time_and_survive_a_crash() -> None:
    queue: WorkQueue[str] = WorkQueue(min_interval_s=0.0)
    busy: set[str] = set()
    calls: list[str] = []
    lock = threading.Lock()
    crashed = threading.Event()

    def work(key: str) -> float | None:
        with lock:
            assert key not in busy
            busy.add(key)
            calls.append(key)
        time.sleep(0.001)
        with lock:
            busy.discard(key)
        if key == "k0" and not crashed.is_set():
            crashed.set()
            raise ValueError("one bad service")
        return None

    workers = Workers(queue, work, threads=4)
    workers.start()
    for _ in range(20):
        for index in range(5):
            queue.add(f"k{index}")
    wait_until(
        lambda: len(queue) == 0 and {f"k{i}" for i in range(5)} <= set(calls) and calls.count("k0") >= 2
    )
    assert workers.alive()
    workers.stop(5)
    assert not workers.alive()


def test_a_process_that_stops_leading_keeps_what_it_owes() -> None:
    queue: WorkQueue[str] = WorkQueue()
    results: list[str] = []

    def work(key: str) -> float | None:
        raise NotLeading("write", None, "NotLeading", "no Lease")

    workers = Workers(queue, work, threads=1, observe=lambda result, seconds: results.append(result))
    queue.add("a")
    workers.start()
    wait_until(lambda: results == ["retried"])
    assert len(queue) == 1
    workers.stop(5)


def test_a_follower_takes_nothing() -> None:
    queue: WorkQueue[str] = WorkQueue()
    leading = threading.Event()
    done: list[str] = []
    workers = Workers(queue, lambda key: done.append(key), threads=2, may_work=leading.is_set)
    queue.add("a")
    workers.start()
    time.sleep(0.1)
    assert done == []
    leading.set()
    wait_until(lambda: done == ["a"])
    workers.stop(5)


def test_a_service_that_is_looked_at_often_while_it_waits_for_tomorrow_costs_no_memory(clock: Clock) -> None:
    queue: WorkQueue[str] = WorkQueue(clock)
    for key in ("a", "b", "c"):
        queue.add(key, 90_000.0)
    for number in range(5_000):
        queue.add("a")
        assert take(queue) == "a"
        queue.add("b", 80_000.0 - number)
        queue.done("a", again_s=86_400.0 - number)
        clock.now_s += 1
    assert len(queue._heap) < 500
    clock.now_s += 100_000.0
    assert {take(queue), take(queue), take(queue), take(queue)} == {"a", "b", "c", None}


def test_a_cleared_queue_owes_nothing_and_takes_new_keys(clock: Clock) -> None:
    queue: WorkQueue[str] = WorkQueue(clock)
    queue.add("a")
    queue.add("b")
    assert take(queue) == "a"
    queue.add("a")
    assert take(queue) == "b"
    queue.done("b", failed=True)
    queue.clear()
    assert len(queue) == 0
    queue.done("a")
    assert take(queue) is None
    queue.add("b")
    assert take(queue) == "b"
