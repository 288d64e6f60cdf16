"""Cron lines as Kubernetes' CronJobs have them, and when they come. Pure: no clock.

Used by `api` to judge a line and its zone, and by `plan.quiet_times`. The grammar is that of a CronJob's schedule: five fields or a
macro, names of months and days, Sunday is 0 alone, `?` says `*`, a step after a single number runs to the field's end, and of two
restricted day fields one is enough. Zones, months and summer time are cronsim's: what summer time skips comes right after the gap,
what it repeats comes once, at the first of the two; a line whose minute or hour is `*` follows real time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_NUMBER = re.compile(r"\+?[0-9]{1,18}", re.ASCII)
_ZONE_PART = re.compile(r"[A-Za-z._0-9+][A-Za-z._0-9+-]{0,13}", re.ASCII)
#: What an operating system keeps beside the zones: copies of them, and links of its own.
_NO_ZONES = ("posix", "right", "localtime", "posixrules", "Factory")


@dataclass(frozen=True, slots=True)
class _Field:
    """What one field may hold; `low` to `high` are inclusive."""

    name: str
    low: int
    high: int
    words: Mapping[str, int]


_MONTHS = {
    name: n
    for n, name in enumerate(
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1
    )
}
_DAYS = {name: n for n, name in enumerate(["sun", "mon", "tue", "wed", "thu", "fri", "sat"])}
_FIELDS = (
    _Field("minute", 0, 59, {}),
    _Field("hour", 0, 23, {}),
    _Field("day of the month", 1, 31, {}),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of the week", 0, 6, _DAYS),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One cron line in one zone. `fields` as cronsim reads them."""

    fields: str
    zone: ZoneInfo

    def latest(self, at_s: float) -> float | None:
        """The last time that it came, at `at_s` or before; all times are Unix seconds. None: never."""
        at = math.floor(at_s)
        local = datetime.fromtimestamp(at, self.zone)
        # In the hour that the end of summer time repeats, the wall clock shows less than it did at begins that are over.
        ahead_s = (_offset(local.replace(fold=0)) - _offset(local)).total_seconds() if local.fold else 0.0
        start = datetime.fromtimestamp(at + 1 + ahead_s, self.zone)
        found = (moment.timestamp() for moment in CronSim(self.fields, start, reverse=True))
        return next((moment for moment in found if moment <= at_s), None)

    def following(self, at_s: float) -> float | None:
        """The first time that it comes after `at_s`; None: not in fifty years."""
        start = datetime.fromtimestamp(math.floor(at_s), self.zone)
        found = (moment.timestamp() for moment in CronSim(self.fields, start))
        return next((moment for moment in found if moment > at_s), None)


def _offset(moment: datetime) -> timedelta:
    offset = moment.utcoffset()
    assert offset is not None, "a zone gives one"
    return offset


@lru_cache(maxsize=4096)
def line(schedule: str, time_zone: str | None = None) -> Line:
    """Parsed; without a zone it is in UTC. Raises ValueError saying what is wrong."""
    return Line(fields(schedule), zone(time_zone or "UTC"))


def zone(name: str) -> ZoneInfo:
    """The zone of that name, as a CronJob's timeZone; raises ValueError when there is none."""
    parts = name.split("/")
    known = all(_ZONE_PART.fullmatch(part) and part not in (".", "..") for part in parts)
    if known and parts[0] not in _NO_ZONES:
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            pass  # no such file, a folder, or a file that holds no zone
    raise ValueError("the name of a zone such as Europe/Berlin")


def fields(schedule: str) -> str:
    """The five fields of a line, each `*`, `*/n` or a list of numbers. Raises ValueError saying what is wrong."""
    if schedule.startswith("@"):
        if schedule not in MACROS:
            raise ValueError(f"one of {', '.join(MACROS)}, or a line of five fields")
        return MACROS[schedule]
    texts = re.split(r"[ \t\n\r\f\v]+", schedule.strip(" \t\n\r\f\v"))
    if len(texts) != len(_FIELDS):
        raise ValueError(
            f"five fields (minute, hour, day of the month, month, day of the week), not {len(texts)}"
        )
    found = " ".join(_read(text, kind) for text, kind in zip(texts, _FIELDS, strict=True))
    try:
        CronSim(found, datetime(2000, 1, 1))
    except CronSimError:
        raise ValueError("a day that some year has: none has this one") from None
    return found


def _read(text: str, kind: _Field) -> str:
    values: set[int] = set()
    every = False
    for piece in filter(None, text.split(",")):
        span, slash, step_text = piece.partition("/")
        ends = span.split("-")
        step = _number(step_text, kind, {}) if slash else 1
        if ends[0] in ("*", "?"):
            every = every or step == 1
            low, high = kind.low, kind.high
        elif len(ends) > 2:
            raise ValueError(f"{kind.name}: at most one - in {piece!r}")
        else:
            low = _number(ends[0], kind, kind.words)
            high = _number(ends[-1], kind, kind.words)
            if slash and len(ends) == 1:
                high = kind.high
        if step == 0:
            raise ValueError(f"{kind.name}: a step of at least 1 in {piece!r}")
        if not kind.low <= low <= high <= kind.high:
            raise ValueError(f"{kind.name}: {kind.low} to {kind.high}, the lower end first, in {piece!r}")
        values.update(range(low, high + 1, step))
    if not values:
        raise ValueError(f"{kind.name}: at least one value")
    if every:
        return "*"
    if re.fullmatch(r"\*/[0-9]+", text) and kind.high in (59, 23):
        return text  # a star follows real time when summer time begins and ends
    return ",".join(map(str, sorted(values)))


def _number(text: str, kind: _Field, words: Mapping[str, int]) -> int:
    if text.lower() in words:
        return words[text.lower()]
    if not _NUMBER.fullmatch(text):
        named = f", or one of {', '.join(words)}" if words else ""
        raise ValueError(f"{kind.name}: a number from {kind.low} to {kind.high}{named}, not {text!r}")
    return int(text)
