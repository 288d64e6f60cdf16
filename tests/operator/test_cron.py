"""Cron lines: the grammar of CronJobs, and the calendar with its summer times. What a real API server takes is compared in
tests/cluster."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cron_cases import CRON_LINES, FILES_THAT_ARE_NO_ZONES, ZONES
from trimtab_operator import cron

BERLIN = "Europe/Berlin"


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def utc(moment_s: float | None) -> str | None:
    return None if moment_s is None else datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%MZ")


def taken(text: str) -> bool:
    try:
        cron.fields(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("text", "want"), [(c.line, c.taken_here) for c in CRON_LINES])
def test_a_line_is_taken_or_refused_as_a_cronjob_does(text: str, want: bool) -> None:
    assert taken(text) is want


@pytest.mark.parametrize(("name", "want"), [*ZONES, *((name, False) for name in FILES_THAT_ARE_NO_ZONES)])
def test_a_zone_is_taken_or_refused_as_a_cronjob_does(name: str, want: bool) -> None:
    try:
        cron.zone(name)
    except ValueError:
        assert not want
    else:
        assert want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0 8 * * MON-Fri", "0 8 * * 1,2,3,4,5"),
        ("*/15 */2 * * *", "*/15 */2 * * *"),
        ("? ? ? ? ?", "* * * * *"),
        ("10/20 5-9/2 * * *", "10,30,50 5,7,9 * * *"),
        ("5-5/15 0 * * *", "5 0 * * *"),
        ("0 0 */10 jan,Dec *", "0 0 1,11,21,31 1,12 *"),
        ("0 0 * * 3/2", "0 0 * * 3,5"),
        ("7,*/30 0 * * *", "0,7,30 0 * * *"),
        ("@weekly", "0 0 * * 0"),
    ],
)
def test_a_line_is_read_as_a_cronjob_reads_it(text: str, want: str) -> None:
    assert cron.fields(text) == want


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0 25 * * *", "hour"),
        ("0 8 * * 7", "day of the week: 0 to 6"),
        ("0 8 * *", "not 4"),
        ("@noon", "@daily"),
        ("0 0 31 4,6 *", "a day that some year has"),
    ],
)
def test_a_wrong_line_is_told_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cron.fields(text)


def test_of_two_restricted_day_fields_one_is_enough() -> None:
    both = cron.line("0 0 13 * 5")
    assert utc(both.following(at("2026-11-01T00:00Z"))) == "2026-11-06T00:00Z"  # a Friday
    assert utc(both.following(at("2026-12-12T00:00Z"))) == "2026-12-13T00:00Z"  # a Sunday
    # A stepped star restricts too.
    assert utc(cron.line("0 0 */30 * 5").following(at("2026-11-30T12:00Z"))) == "2026-12-01T00:00Z"


def test_a_line_is_read_in_its_zone() -> None:
    assert utc(cron.line("0 8 * * *", BERLIN).following(at("2026-07-01T12:00Z"))) == "2026-07-02T06:00Z"
    assert utc(cron.line("0 8 * * *", BERLIN).following(at("2026-12-01T12:00Z"))) == "2026-12-02T07:00Z"
    assert utc(cron.line("0 8 * * *").following(at("2026-12-01T12:00Z"))) == "2026-12-02T08:00Z"


def test_what_summer_time_skips_comes_right_after_the_gap() -> None:
    line = cron.line("30 2 * * *", BERLIN)  # 2026-03-29: 02:00 to 03:00 is not there
    assert utc(line.following(at("2026-03-28T12:00Z"))) == "2026-03-29T01:00Z"
    assert utc(line.latest(at("2026-03-29T01:00Z"))) == "2026-03-29T01:00Z"
    assert utc(line.latest(at("2026-03-29T00:59:59Z"))) == "2026-03-28T01:30Z"


def test_what_the_end_of_summer_time_repeats_comes_once() -> None:
    line = cron.line(
        "30 2 * * *", BERLIN
    )  # 2026-10-25: 02:00 to 03:00 is there twice, from 00:00Z and from 01:00Z
    assert utc(line.following(at("2026-10-24T12:00Z"))) == "2026-10-25T00:30Z"
    assert utc(line.following(at("2026-10-25T00:45Z"))) == "2026-10-26T01:30Z"
    # In the second of the two hours the wall clock shows less than at the begin that is over.
    assert utc(line.latest(at("2026-10-25T01:10Z"))) == "2026-10-25T00:30Z"


def test_a_line_for_every_hour_follows_real_time_through_the_repeated_one() -> None:
    line = cron.line("15 * * * *", BERLIN)
    moment, found = at("2026-10-24T23:30Z"), []
    for _ in range(3):
        following = line.following(moment)
        assert following is not None
        assert line.latest(following) == following
        found.append(utc(following))
        moment = following
    assert found == ["2026-10-25T00:15Z", "2026-10-25T01:15Z", "2026-10-25T02:15Z"]


LINES = st.sampled_from(
    [
        "30 2 * * *",
        "*/20 1-3 * * *",
        "15 * * * *",
        "0 0 * * 0",
        "*/7 * * * *",
        "0 3 28-31 * *",
        "45 2,3 * 3,10 *",
    ]
)

CHANGES = st.sampled_from(
    ["2026-03-08", "2026-03-29", "2026-04-05", "2026-04-24", "2026-10-25", "2026-10-29", "2026-11-01"]
)


@settings(max_examples=120)
@given(
    text=LINES,
    zone=st.sampled_from([BERLIN, "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "UTC"]),
    moment=st.one_of(
        # Around the changes of clocks in March, April, October and November 2026, to the minute, and anywhere.
        st.builds(lambda day, minutes: at(f"{day}T00:00Z") + 61 * minutes, CHANGES, st.integers(-3000, 3000)),
        st.integers(1_700_000_000, 1_900_000_000).map(float),
    ),
)
def test_the_latest_one_is_that_which_no_other_follows(text: str, zone: str, moment: float) -> None:
    line = cron.line(text, zone)
    latest = line.latest(moment)
    assert latest is not None
    assert latest <= moment
    walk, seen = latest - 1, []
    while (following := line.following(walk)) is not None and following <= moment:
        seen.append(following)
        walk = following
    assert seen == [latest]


@settings(max_examples=60)
@given(text=LINES, zone=st.sampled_from([BERLIN, "America/New_York"]), day=st.integers(0, 800))
def test_every_wall_clock_day_has_its_begins(text: str, zone: str, day: int) -> None:
    """Away from changes of clocks a begin is simply a minute whose fields match."""
    line, where = cron.line(text, zone), ZoneInfo(zone)
    noon = datetime(2025, 1, 1, 12, tzinfo=where) + timedelta(days=day)
    start, end = noon, noon + timedelta(hours=6)
    if start.utcoffset() != end.utcoffset():
        return
    minutes, hours, days, months, weekdays = (_values(f) for f in line.fields.split())
    want = []
    for step in range(1, 361):
        moment = start + timedelta(minutes=step)
        on_day = (days is None or moment.day in days) and (
            weekdays is None or moment.isoweekday() % 7 in weekdays
        )
        if (
            (minutes is None or moment.minute in minutes)
            and (hours is None or moment.hour in hours)
            and (months is None or moment.month in months)
            and on_day
        ):
            want.append(moment.timestamp())
    found, walk = [], start.timestamp()
    while (following := line.following(walk)) is not None and following <= end.timestamp():
        found.append(following)
        walk = following
    assert found == want


def _values(text: str) -> set[int] | None:
    if text == "*":
        return None
    if text.startswith("*/"):
        return set(range(0, 60, int(text[2:])))
    return {int(value) for value in text.split(",")}
