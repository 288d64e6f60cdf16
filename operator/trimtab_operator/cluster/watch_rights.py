"""Finds out that a watch is silent because it may not be open, before it is taken for dead: a new process would be refused as well.

`main` calls `turn` in a thread of its own, every few seconds. kopf tries a refused watch again by itself; until it succeeds the resync alone
brings what it would have told. Knows nothing of what the objects mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from trimtab_operator import names
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Kube, KubeError
from trimtab_operator.cluster.observe import Key
from trimtab_operator.cluster.places import Place, Places, refused
from trimtab_operator.cluster.resync import Resync
from trimtab_operator.cluster.store import Store

logger = logging.getLogger(__name__)

_NOTHING = {names.LABEL_SERVICE: "no.service.is.called.so"}


class WatchRights:
    """See the module."""

    def __init__(
        self, kube: Kube, places: Places, resync: Resync, store: Store, enqueue: Callable[[Key], None]
    ) -> None:
        self._kube = kube
        self._places = places
        self._resync = resync
        self._store = store
        self._enqueue = enqueue
        self._told: set[tuple[Place, str]] = set()

    def turn(self) -> None:
        """Excuse watches that may not be open; ask for what the others have owed for a while: whether it is there at all."""
        for namespace in self._places.refusals():
            self._postpone(None if self._places.all == (None,) else namespace, None)
        owed = self._store.debts() | {(key.namespace, kinds.SERVICE.name) for key in self._resync.overdue()}
        for place, kind in {(self._places.of(namespace), kind) for namespace, kind in owed}:
            if self._refused(place, kind):
                self._postpone(place, kind)
        self._resync.ask_again()
        for key in self._store.overdue():
            self._enqueue(key)

    def _refused(self, place: Place, kind: str) -> bool:
        try:
            error = self._kube.watch_refusal(kinds.BY_NAME[kind], place, _NOTHING)
        except KubeError as trouble:
            logger.warning("a watch cannot be asked for", extra={"error": str(trouble)})
            return False
        if error is None or not refused(error):
            self._told.discard((place, kind))
            return False
        if (place, kind) not in self._told:
            self._told.add((place, kind))
            logger.warning("a watch is refused; looks come by the resync alone", extra={"error": str(error)})
        return True

    def _postpone(self, place: Place, kind: str | None) -> None:
        self._store.postpone(place, kind)
        if kind in (None, kinds.SERVICE.name):
            self._resync.postpone(place)
