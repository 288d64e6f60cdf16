"""Stop strings on a stream of text, wherever the stream is cut.

One `StopMatcher` per output sequence. The stop that is complete earliest wins; of those that complete at the same
character, the longest. Held back is only a suffix of the text that is a proper prefix of a stop string. Knows nothing of
tokens: the caller says whether enough of them were generated (`min_tokens`) for a match to count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Matched(NamedTuple):
    """Text that may go out now, and the stop string that ended the output, if one did."""

    text: str
    stop: str | None


class StopMatcher:
    """Finds the first stop string and keeps it (and what follows) out of the text."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        assert all(stops), "an empty stop string would stop everything; refused at the door"
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""

    @property
    def holds_back(self) -> bool:
        """Whether text waits for what comes next."""
        return bool(self._held)

    def push(self, text: str, *, may_stop: bool = True) -> Matched:
        """Add text. With `may_stop` false a complete stop string is ordinary text, and stays so."""
        if not self._stops:
            return Matched(text, None)
        buffer = self._held + text
        if may_stop and text:
            # The first occurrence of a stop is the one that ends first; (end, start) orders earliest, then longest.
            found = min(
                (
                    (start + len(stop), start, stop)
                    for stop in self._stops
                    if (start := buffer.find(stop)) >= 0
                ),
                default=None,
            )
            if found is not None:
                end, start, stop = found
                self._held = ""
                return Matched(buffer[: end if self._include else start], stop)
        cut = len(buffer) - self._longest_open(buffer)
        self._held = buffer[cut:]
        return Matched(buffer[:cut], None)

    def finish(self) -> str:
        """The held-back text: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _longest_open(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
