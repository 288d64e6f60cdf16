"""One output sequence on its way from token ids to text pieces: detokeniser, then stop strings.

The chat and completion handlers make one `OutputText` per sequence; streaming or not, the same object makes the text, so
the deltas of a stream add up to the text of the buffered reply. A `Piece` is sent only when it and its tokens belong
together: tokens whose text is held back wait for it. Knows nothing of HTTP, logprobs or the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from trimtab_engine.server.text.detokenizer import Detokenizer
from trimtab_engine.server.text.stop import StopMatcher


class Piece(NamedTuple):
    """Next bit of output. `num_tokens` counts the tokens it describes, `stop` is the stop string that ended it."""

    text: str
    num_tokens: int
    stop: str | None = None


class OutputText:
    """Turns tokens into pieces; the sum of all pieces is the final text."""

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher, *, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pending = 0  # tokens since the last piece

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._num_tokens

    def push(self, token_id: int, *, silent: bool = False) -> Piece | None:
        """Add a token; None while all of its text is held back. `silent`: it counts but has no text (a stop token)."""
        self._num_tokens += 1
        self._pending += 1
        fresh = "" if silent else self._detokenizer.push(token_id)
        text, stop = self._stops.push(fresh, may_stop=self._num_tokens >= self._min_tokens)
        if not text and stop is None and (self._detokenizer.holds_back or self._stops.holds_back):
            return None
        return self._take(text, stop)

    def finish(self) -> Piece:
        """The end: everything held back comes out. A stop string that this completes still counts."""
        text, stop = self._stops.push(
            self._detokenizer.finish(), may_stop=self._num_tokens >= self._min_tokens
        )
        if stop is None:
            text += self._stops.finish()
        return self._take(text, stop)

    def _take(self, text: str, stop: str | None) -> Piece:
        pending, self._pending = self._pending, 0
        return Piece(text, pending, stop)
