"""The threads by which the operator asks by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain, repeat

from trimtab_operator.cluster.periodic import Periodic

WAIT_S = 60.0
LONG_S = 3600.0


def test_a_turn_comes_after_each_pause_until_it_is_stopped() -> None:
    turns = threading.Semaphore(0)
    periodic = Periodic("test", lambda: turns.release(), 0.01)
    periodic.start()
    for _ in range(3):
        assert turns.acquire(timeout=WAIT_S)
    assert periodic.alive()
    periodic.stop(WAIT_S)
    assert not periodic.alive()


def test_a_turn_may_ask_for_another_pause_and_the_first_for_none() -> None:
    asked: Iterator[float | None] = chain([0.01, 0.01, None], repeat(0.01))
    turned = threading.Semaphore(0)

    def turn() -> float | None:
        turned.release()
        return next(asked)

    periodic = Periodic("test", turn, LONG_S, first_s=0)
    periodic.start()
    for _ in range(3):
        assert turned.acquire(timeout=WAIT_S)
    assert not turned.acquire(timeout=0.2), "the third asked for none, so that the period holds"
    periodic.stop(WAIT_S)
    assert not periodic.alive(), "it does not wait for the end of a pause"


def test_a_turn_under_way_may_finish_and_a_thread_that_dies_is_seen() -> None:
    begun, go = threading.Event(), threading.Event()

    def turn() -> None:
        begun.set()
        assert go.wait(WAIT_S)

    periodic = Periodic("test", turn, 0.01)
    periodic.start()
    assert begun.wait(WAIT_S)
    periodic.stop(0)
    assert periodic.alive()
    go.set()
    periodic.stop(WAIT_S)
    assert not periodic.alive()
