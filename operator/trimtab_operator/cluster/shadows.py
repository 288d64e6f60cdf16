"""Reads, makes and removes the engines of Shadow runs (`plan.shadow`). Called by `observe` and `reconcile`.

What goes wrong here is said in the run, and never holds up the service. The Secret with the key is made once and never read: the
operator may only create Secrets.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable

from trimtab_operator import names
from trimtab_operator.api import InferenceService, InvalidRun, TuningRun
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Conflict, Denied, Kube, NamespaceGoing, Refused
from trimtab_operator.cluster.store import Json, Key, ObjectKey, Store
from trimtab_operator.plan import runs, shadow

logger = logging.getLogger(__name__)


class Shadows:
    """See the module."""

    def __init__(self, kube: Kube, store: Store) -> None:
        self._kube = kube
        self._store = store

    def read(self, key: Key, found: Iterable[TuningRun | InvalidRun]) -> dict[ObjectKey, Json]:
        """Everything that shadows of the service's runs consist of, pods included. A run that may still get one is asked for by
        name too: what holds its names may be somebody else's."""
        asking = [run for run in found if isinstance(run, TuningRun) and shadow.asks_for(run)]
        if not asking:
            return {}
        objects: dict[ObjectKey, Json] = {}
        for kind in (*shadow.KINDS, kinds.POD.name):
            for item in self._kube.list(kinds.BY_NAME[kind], key.namespace, names.shadow_labels(key.name)):
                objects[(kind, item["metadata"]["name"])] = item
        for run in asking:
            if run.status.phase in runs.FINISHED:
                continue
            for kind in shadow.KINDS:
                name = names.shadow(run.name)
                holder = None
                if (kind, name) not in objects:
                    holder = self._kube.get(kinds.BY_NAME[kind], key.namespace, name)
                if holder is not None:
                    objects[(kind, name)] = holder
        return objects

    def carry_out(
        self, key: Key, service: InferenceService, run: TuningRun | None, plan: shadow.Plan
    ) -> shadow.Reason | None:
        """Remove and make → reason and message of what the API server would not have."""
        try:
            for live in plan.changes.delete:
                self._delete(live)
                logger.info("shadow removed", extra={"service": str(key), "object": _text(live)})
            if plan.changes.taken or run is None:
                return None
            if plan.keys:
                self._make_key(service, run)
            for manifest in plan.changes.apply:
                self._store.wrote(key, self._kube.apply(manifest))
                logger.info("shadow applied", extra={"service": str(key), "object": _text(manifest)})
        except NamespaceGoing:
            return None
        except Refused as error:
            return names.INVALID_SPEC, str(error)
        except Denied as error:
            return names.API_DENIED, str(error)
        return None

    def remove(self, key: Key, found: Iterable[TuningRun | InvalidRun]) -> None:
        """The service is not served: nobody's shadow stands."""
        for (kind, _), live in self.read(key, found).items():
            if kind in shadow.KINDS and shadow.whose(None, live) == "ours":
                self._delete(live)

    def _make_key(self, service: InferenceService, run: TuningRun) -> None:
        try:
            self._kube.create(shadow.secret(service, run, secrets.token_urlsafe(32)))
        except Conflict:
            return  # made by an earlier look, whose Deployment was not to be made

    def _delete(self, live: Json) -> None:
        metadata = live["metadata"]
        try:
            self._kube.delete(
                kinds.BY_NAME[live["kind"]], metadata["namespace"], metadata["name"], metadata["uid"]
            )
        except Conflict:
            return  # another object under that name by now; the next look judges it


def _text(item: Json) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"
