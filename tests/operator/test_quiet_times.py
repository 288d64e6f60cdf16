"""Quiet times: in force or not, until when, and when the next one begins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_operator.api.service import Limits, QuietTime
from trimtab_operator.plan import quiet_times
from trimtab_operator.plan.pods import rfc3339, unix

HOUR = 3600.0


def limits(*entries: tuple[str, float] | tuple[str, float, str]) -> Limits:
    return Limits(not_during=tuple(QuietTime(entry[0], entry[1], *entry[2:]) for entry in entries))


def until(quiet: Limits, text: str) -> str | None:
    """The end of what is in force at a moment, None when nothing is."""
    found = quiet_times.in_force(quiet, unix(text))
    return None if found is None else rfc3339(found.until_s)


WORKDAYS = limits(("0 8 * * 1-5", 10 * HOUR, "Europe/Berlin"))  # 2026-11-30 is a Monday


@pytest.mark.parametrize(
    ("moment", "want"),
    [
        ("2026-11-30T06:59:59Z", None),
        ("2026-11-30T07:00:00Z", "2026-11-30T17:00:00Z"),
        ("2026-11-30T16:59:59Z", "2026-11-30T17:00:00Z"),
        ("2026-11-30T17:00:00Z", None),
        ("2026-11-29T12:00:00Z", None),  # a Sunday
        ("2026-07-01T06:00:00Z", "2026-07-01T16:00:00Z"),  # summer time
    ],
)
def test_a_quiet_time_lasts_from_its_begin_for_its_duration(moment: str, want: str | None) -> None:
    assert until(WORKDAYS, moment) == want


def test_without_entries_nothing_is_in_force_and_nothing_begins() -> None:
    assert quiet_times.in_force(Limits(), 0.0) is None
    assert quiet_times.next_begin_s(Limits(), 0.0) is None
    assert quiet_times.border_s(Limits(), 0.0) is None


def test_entries_that_overlap_or_touch_make_one_time() -> None:
    nested = limits(
        ("0 8 * * *", 8 * HOUR), ("0 10 * * *", HOUR), ("30 15 * * *", 2 * HOUR), ("30 17 * * *", HOUR)
    )
    assert until(nested, "2026-11-30T10:30:00Z") == "2026-11-30T18:30:00Z"
    apart = limits(("0 8 * * *", HOUR), ("1 9 * * *", HOUR))
    assert until(apart, "2026-11-30T08:30:00Z") == "2026-11-30T09:00:00Z"


def test_a_time_that_goes_over_midnight_is_in_force_on_the_next_day() -> None:
    assert until(limits(("0 22 * * 0", 24 * HOUR)), "2026-11-30T20:00:00Z") == "2026-11-30T22:00:00Z"


def test_times_that_follow_each_other_without_a_pause_have_no_known_end() -> None:
    always = limits(("@hourly", HOUR))
    found = quiet_times.in_force(always, unix("2026-11-30T10:30:00Z"))
    assert found is not None
    assert not found.ends
    assert found.until_s > unix("2026-11-30T23:00:00Z")
    assert "without a pause" in str(found)


def test_a_quiet_time_lasts_as_long_when_clocks_change() -> None:
    berlin = limits(("30 2 * * *", 2 * HOUR, "Europe/Berlin"))
    assert (
        until(berlin, "2026-03-29T02:30:00Z") == "2026-03-29T03:00:00Z"
    )  # begins right after the gap, at 01:00Z
    assert (
        until(berlin, "2026-10-25T01:10:00Z") == "2026-10-25T02:30:00Z"
    )  # in the second 02:10 of that night
    assert until(berlin, "2026-10-25T02:30:00Z") is None


def test_it_says_which_entry_and_until_when() -> None:
    both = limits(("0 3 * * *", HOUR), ("0 8 * * 1-5", HOUR, "Europe/Berlin"))
    said = str(quiet_times.in_force(both, unix("2026-11-30T07:10:00Z")))
    assert said == (
        "spec.tuning.limits.notDuring[1] (0 8 * * 1-5, Europe/Berlin) is in force until 2026-11-30T08:00:00Z"
    )


def test_the_border_is_the_end_of_what_is_in_force_else_the_next_begin() -> None:
    both = limits(("0 8 * * *", HOUR), ("0 20 * * *", HOUR))
    assert quiet_times.border_s(both, unix("2026-11-30T08:30:00Z")) == unix("2026-11-30T09:00:00Z")
    assert quiet_times.border_s(both, unix("2026-11-30T09:00:00Z")) == unix("2026-11-30T20:00:00Z")
    assert quiet_times.next_begin_s(both, unix("2026-11-30T08:30:00Z")) == unix("2026-11-30T20:00:00Z")
    assert quiet_times.next_begin_s(both, unix("2026-11-30T08:00:00Z")) == unix("2026-11-30T20:00:00Z")


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["0 8 * * *", "*/30 9-11 * * *", "15 * * * *", "0 0 * * 1", "30 2 * * *", "@daily"]),
        st.sampled_from([60.0, 600.0, 1800.0, HOUR, 6 * HOUR, 24 * HOUR]),
        st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"]),
    ),
    min_size=1,
    max_size=4,
)
MOMENTS = st.integers(0, 20_000).map(lambda n: unix("2026-10-20T00:00:00Z") + 61.0 * n)


@settings(max_examples=80)
@given(entries=ENTRIES, now=MOMENTS)
def test_nothing_changes_before_the_border_and_something_does_there(
    entries: list[tuple[str, float, str]], now: float
) -> None:
    quiet = limits(*entries)
    border = quiet_times.border_s(quiet, now)
    assert border is not None
    assert border > now
    held = quiet_times.in_force(quiet, now)
    for share in (0.25, 0.5, 0.9):
        between = now + (border - now) * share
        assert (quiet_times.in_force(quiet, between) is None) == (held is None)
    if held is None or held.ends:
        assert (quiet_times.in_force(quiet, border) is None) != (held is None)
