"""Which namespaces may be looked at, and when those that may not are asked again.

A namespace whose Role or RoleBinding is gone, or that was itself deleted, answers 403. That concerns it alone: nothing is looked at in it
until it can be listed again, and all others go on. `resync` says what its lists came to, `main` asks before each look and tells of a
look that was refused. Thread-safe; asks for nothing itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab_operator.cluster.kube import Denied, KubeError

logger = logging.getLogger(__name__)

#: First and longest pause before a namespace that could not be listed is asked again, doubling.
PAUSES_S = (2.0, 60.0)
#: Looks that were refused one thing of many, in a namespace that can be listed, ask for a list no more often than this.
DOUBT_S = 30.0

Place = str | None  # a namespace; None: all of them


@dataclass(slots=True)
class _State:
    listed: bool = False  # ever
    refusal: str | None = None
    failures: int = 0
    due_s: float | None = None  # when to ask again, where something was wrong
    doubted_s: float = float("-inf")


def refused(error: KubeError) -> bool:
    """Whether this is about rights. 401 is about who we are, and so about every namespace."""
    return isinstance(error, Denied) and error.status == 403


class Places:
    """See the module. `namespaces` None: all, as one place. `changed(place, away)` is called when looks in it end and begin again."""

    def __init__(
        self,
        namespaces: Sequence[str] | None,
        changed: Callable[[Place, bool], None] = lambda place, away: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.all: tuple[Place, ...] = tuple(namespaces) if namespaces is not None else (None,)
        self._changed = changed
        self._now = now
        self._lock = threading.Lock()
        self._states = {place: _State() for place in self.all}

    def of(self, namespace: str) -> Place:
        """The place that a namespace belongs to."""
        return None if self.all == (None,) else namespace

    def away(self, namespace: str) -> bool:
        """Whether nothing may be looked at there now: it is refused, or its runs are not known yet."""
        with self._lock:
            state = self._states.get(self.of(namespace))
            return state is not None and (state.refusal is not None or not state.listed)

    def due(self) -> list[Place]:
        """Those that are to be asked again now."""
        now = self._now()
        with self._lock:
            return [place for place, s in self._states.items() if s.due_s is not None and s.due_s <= now]

    def listed(self, place: Place) -> None:
        """All that there is was listed."""
        with self._lock:
            state = self._states[place]
            back = state.refusal is not None
            state.listed, state.refusal, state.failures, state.due_s = True, None, 0, None
        if back:
            logger.info("namespace may be looked at again", extra={"namespace": _word(place)})
            self._changed(place, False)

    def failed(self, place: Place, error: KubeError) -> None:
        """It could not be listed. What is no refusal ends no look that knows of the namespace's runs."""
        first, longest = PAUSES_S
        with self._lock:
            state = self._states[place]
            news = refused(error) and state.refusal is None
            if refused(error):
                state.refusal = str(error)
            state.due_s = self._now() + min(longest, first * 2.0 ** min(state.failures, 20))
            state.failures += 1
        if news:
            logger.warning(
                "namespace may not be looked at",
                extra={"namespace": _word(place), "error": str(error)},
            )
            self._changed(place, True)
        elif not refused(error):
            logger.warning("namespace not listed", extra={"namespace": _word(place), "error": str(error)})

    def doubt(self, namespace: str) -> None:
        """A look there was refused something: perhaps everything is."""
        now = self._now()
        with self._lock:
            state = self._states.get(self.of(namespace))
            if state is not None and state.due_s is None and now - state.doubted_s >= DOUBT_S:
                state.doubted_s = state.due_s = now

    def refusals(self) -> dict[str, str]:
        """The API server's words, by namespace."""
        with self._lock:
            return {_word(p): s.refusal for p, s in self._states.items() if s.refusal is not None}

    def nowhere(self) -> str | None:
        """What the API server says where it refuses everything; None when something may be looked at."""
        found = self.refusals()
        return next(iter(found.values())) if len(found) == len(self.all) else None


def _word(place: Place) -> str:
    return place if place is not None else "all"
