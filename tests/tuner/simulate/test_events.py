"""The order of simulated events, simultaneous ones above all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_tuner.simulate.events import EventQueue, Kind


def drained(queue: EventQueue) -> list[tuple[float, Kind, int]]:
    found = []
    while queue:
        found.append(queue.pop())
    return found


def test_at_one_instant_steps_end_then_requests_arrive_then_steps_start() -> None:
    queue = EventQueue()
    for kind in (Kind.STEP_START, Kind.ARRIVAL, Kind.STEP_END):  # pushed in the opposite order
        queue.push(1.0, kind, 0)
    assert [kind for _, kind, _ in drained(queue)] == [Kind.STEP_END, Kind.ARRIVAL, Kind.STEP_START]


def test_equal_kinds_at_one_instant_go_by_number_not_by_order_of_pushing() -> None:
    queue = EventQueue()
    for number in (3, 1, 2):
        queue.push(1.0, Kind.STEP_START, number)
    assert [number for _, _, number in drained(queue)] == [1, 2, 3]


def test_time_decides_before_kind() -> None:
    queue = EventQueue()
    queue.push(1.0, Kind.STEP_START, 0)
    queue.push(2.0, Kind.STEP_END, 0)
    assert [at for at, _, _ in drained(queue)] == [1.0, 2.0]


def test_an_event_in_the_past_is_refused() -> None:
    queue = EventQueue()
    queue.push(2.0, Kind.ARRIVAL, 0)
    queue.pop()
    with pytest.raises(AssertionError, match="before now"):
        queue.push(1.0, Kind.ARRIVAL, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(Kind), st.integers(0, 5)), unique=True))
def test_the_order_depends_on_what_is_planned_and_not_on_when_it_was(
    events: list[tuple[int, Kind, int]],
) -> None:
    orders = []
    for order in (events, list(reversed(events))):
        queue = EventQueue()
        for at, kind, number in order:
            queue.push(float(at), kind, number)
        orders.append(drained(queue))
    assert orders[0] == orders[1] == sorted(orders[0])
