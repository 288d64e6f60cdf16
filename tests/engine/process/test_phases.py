"""Phases of a server, and health as progress."""

from __future__ import annotations

import itertools

import pytest

from support.clock import Clock
from trimtab_engine.server.health import Progress
from trimtab_engine.server.lifecycle import LINGER_S, Lifecycle, Phase


def test_phases_only_move_forward() -> None:
    for first, second in itertools.product(Phase, Phase):
        lifecycle = Lifecycle()
        lifecycle.advance(first)
        moved = lifecycle.advance(second)
        assert moved == (list(Phase).index(second) > list(Phase).index(first))


@pytest.mark.parametrize(
    ("phase", "ready", "takes", "going_away"),
    [
        (Phase.READY, True, True, False),
        (Phase.LEAVING, False, True, True),
        (Phase.REFUSING, False, False, True),
        (Phase.DEAD, False, False, False),
    ],
)
def test_what_each_phase_allows(phase: Phase, ready: bool, takes: bool, going_away: bool) -> None:
    lifecycle = Lifecycle()
    lifecycle.advance(Phase.READY)
    lifecycle.advance(phase)
    assert (lifecycle.ready, lifecycle.takes_requests, lifecycle.going_away) == (ready, takes, going_away)


def test_a_server_that_leaves_while_loading_never_takes_requests() -> None:
    lifecycle = Lifecycle()
    assert lifecycle.leave()
    assert not lifecycle.advance(Phase.READY)
    assert not lifecycle.takes_requests


def looks(lifecycle: Lifecycle) -> tuple[bool, bool, float]:
    """(ready, takes requests, how long it does)."""
    return lifecycle.ready, lifecycle.takes_requests, lifecycle.leaves_for_s(5.0)


def test_a_hold_puts_leaving_off_and_its_end_leaves_the_whole_leaving_time() -> None:
    clock = Clock()
    lifecycle = Lifecycle(clock)
    lifecycle.advance(Phase.READY)
    assert lifecycle.hold(15.0)
    lifecycle.leave()
    assert looks(lifecycle) == (True, True, 20.0)
    assert lifecycle.going_away, "clients open their next connection elsewhere, once there is an elsewhere"
    clock.now_s = 110.0
    lifecycle.hold(15.0)
    assert looks(lifecycle) == (True, True, 20.0), "renewed"
    clock.now_s = 125.0
    assert looks(lifecycle) == (False, True, 5.0), "lapsed"
    lifecycle.hold(15.0)
    assert looks(lifecycle) == (True, True, 20.0), "while it leaves it may be asked again"
    clock.now_s = 127.0
    lifecycle.hold(0.0)
    assert looks(lifecycle) == (False, True, 5.0), "ended"
    clock.now_s = 131.0
    lifecycle.hold(0.0)
    assert looks(lifecycle) == (False, True, 1.0), "there is nothing to end any more"
    lifecycle.advance(Phase.REFUSING)
    assert not lifecycle.hold(15.0)
    assert not lifecycle.ready


def test_a_server_stays_while_requests_still_come_to_be_refused_but_not_for_ever() -> None:
    clock = Clock()
    lifecycle = Lifecycle(clock)
    for phase in (Phase.READY, Phase.LEAVING, Phase.REFUSING):
        lifecycle.advance(phase)
    assert lifecycle.lingers_for_s(5.0) == LINGER_S
    assert lifecycle.lingers_for_s(0.0) == 0.0, "without a leaving time nobody sends requests by old lists"
    for clock.now_s in (100.5, 101.25, 102.0):
        lifecycle.refused()
        assert lifecycle.lingers_for_s(5.0) == LINGER_S
    clock.now_s = 104.5
    lifecycle.refused()
    assert lifecycle.lingers_for_s(5.0) == 0.5, "the leaving time once more, and no longer"
    clock.now_s = 160.0  # a long drain
    lifecycle.refused()
    assert lifecycle.lingers_for_s(5.0) < 0


def test_an_idle_engine_never_stalls() -> None:
    progress = Progress(10.0)
    progress.heard(0.0, still_owes=False)
    assert progress.stalled_for_s(1e9) is None


def test_work_without_a_step_is_a_stall_and_a_step_ends_it() -> None:
    progress = Progress(10.0)
    progress.owes(100.0)
    progress.owes(109.0)  # more work does not excuse the old
    assert progress.stalled_for_s(110.0) is None
    assert progress.stalled_for_s(110.5) == 10.5
    progress.heard(111.0, still_owes=True)
    assert progress.stalled_for_s(120.0) is None
    assert progress.stalled_for_s(121.5) == 10.5
    progress.heard(122.0, still_owes=False)
    assert progress.stalled_for_s(1e9) is None
