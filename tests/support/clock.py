"""A clock that stands until a test moves it, for what takes its time by a function (`now=clock`)."""

from dataclasses import dataclass


@dataclass
class Clock:
    """Call it for the time; set or add to `now_s`."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s
