"""Cron lines and zones that a CronJob takes or refuses. The same table is held against a real API server and against `cron`."""

from __future__ import annotations

from typing import NamedTuple


class CronCase(NamedTuple):
    """`taken`: by a CronJob. `never`: it takes a day that does not exist, and never runs; we refuse that."""

    line: str
    taken: bool
    never: bool = False

    @property
    def taken_here(self) -> bool:
        """Whether a quiet time takes it."""
        return self.taken and not self.never


CRON_LINES = [
    *(
        CronCase(text, True)
        for text in (
            "* * * * *",
            "? ? ? ? ?",
            "0 8 * * 1-5",
            "0 8 * * MON-Fri",
            "0 8 1 JAN,jul *",
            "*/5 */2 */3 */4 */5",
            "*/1000 * * * *",
            "5/15 * * * *",
            "5-5/15 * * * *",
            "0,30 0-6,20-23 * * *",
            ",5,, * * * *",
            "*-x * * * *",
            "*,5 * * * *",
            "+5 08 * * *",
            "0 0 13 * 5",
            "0  0\t1 1 0",
            "0 0 29 2 *",
            "@yearly",
            "@annually",
            "@monthly",
            "@weekly",
            "@daily",
            "@midnight",
            "@hourly",
        )
    ),
    CronCase("0 0 30 2 *", True, never=True),
    CronCase("0 0 31 4,6,9,11 *", True, never=True),
    CronCase(", * * * *", True, never=True),
    *(
        CronCase(text, False)
        for text in (
            "0 8 * * 7",
            "0 8 * * 0-7",
            "0 8 * * sun-7",
            "0 24 * * *",
            "60 * * * *",
            "0 0 0 * *",
            "0 0 * 13 *",
            "0 0 * 0 *",
            "*/0 * * * *",
            "5-1 * * * *",
            "0 0 * * fri-mon",
            "1-2-3 * * * *",
            "1/2/3 * * * *",
            "*/ * * * *",
            "-5 * * * *",
            "*,99 * * * *",
            "mon * * * *",
            "0 0 L * *",
            "0 0 * * 5L",
            "0 0 * * mon#1",
            "1.5 * * * *",
            "TZ=UTC 0 8 * *",
            "@noon",
            "@Daily",
            "@reboot",
        )
    ),
]
ZONES = [
    *(
        (name, True)
        for name in (
            "UTC", "Etc/UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires", "EST5EDT", "Etc/GMT+5", "Asia/Kolkata",
        )
    ),
    *(
        (name, False)
        for name in (
            "Local", "local", "Europe", "Europe/", "../UTC", "Nowhere/City", "+01:00", "CEST+1x",
        )
    ),
]  # fmt: skip
#: Taken where the API server's machine has such files, which says nothing of ours: a quiet time takes none of them.
FILES_THAT_ARE_NO_ZONES = ["localtime", "posix/UTC", "right/UTC", "posixrules"]
