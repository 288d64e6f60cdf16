"""kopf's part: watch our resources and their children, note what they show, and say which service has to be looked at.

Only `on.event`, `on.startup` and `on.login` handlers are registered. kopf therefore writes no annotation, no finalizer and no
event, and a resource never waits for this process to be deleted. Used by `main`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

import kopf

from trimtab_operator import names
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Credentials
from trimtab_operator.cluster.login import connection
from trimtab_operator.cluster.observe import Key, RunIndex
from trimtab_operator.cluster.store import Store

Json = Mapping[str, Any]
WATCHED_CHILDREN = (*kinds.CHILDREN, *kinds.NIGHTLY, kinds.POD)


def registry(
    enqueue: Callable[[Key], None],
    seen: Callable[[Key, str], None],
    index: RunIndex,
    store: Store,
    credentials: Credentials,
) -> kopf.OperatorRegistry:
    """All handlers, in a registry of their own. `seen` hears each service's resource version as the watch delivers it; what tells
    nothing new (what a look has read, or what we wrote ourselves) asks for no look."""
    built = kopf.OperatorRegistry()

    @kopf.on.startup(registry=built)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings)

    @kopf.on.login(registry=built)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return connection(credentials)

    @kopf.on.event(names.GROUP, names.VERSION, kinds.SERVICE.plural, registry=built)
    async def service_event(
        namespace: str | None, name: str | None, event: Json, meta: Json, **_: Any
    ) -> None:
        if namespace and name:
            key, version = Key(namespace, name), str(meta.get("resourceVersion"))
            seen(key, version)
            if event["type"] != "MODIFIED" or not store.is_own(key, version):
                enqueue(key)

    @kopf.on.event(names.GROUP, names.VERSION, kinds.RUN.plural, registry=built)
    async def run_event(event: Json, body: Json, **_: Any) -> None:
        if not body.get("spec"):
            return
        enqueue(index.drop(body) if event["type"] == "DELETED" else index.put(body))

    def child_handler(kind: kinds.Kind) -> Callable[..., Coroutine[Any, Any, None]]:
        async def child_event(namespace: str | None, event: Json, meta: Json, **_: Any) -> None:
            listed = event["type"] is None
            if listed:
                store.distrust_all()
            deleted = event["type"] == "DELETED"
            for key in concerned(namespace, meta):
                news = store.delivered(key, kind.name, event["object"], deleted=deleted)
                # A Deployment that we applied may carry a status that no look has seen yet.
                if news or listed or kind is kinds.DEPLOYMENT:
                    enqueue(key)

        return child_event

    for kind in WATCHED_CHILDREN:
        kopf.on.event(*_place(kind), registry=built)(child_handler(kind))
    return built


def concerned(namespace: str | None, meta: Json) -> set[Key]:
    """The services that a child or pod is about: the one that its label names, and the one that made it, whose label somebody
    may have written over."""
    if not namespace:
        return set()
    label = (meta.get("labels") or {}).get(names.LABEL_SERVICE)
    found = {names.service_of_label(str(label)) if label else None}
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller") and owner["kind"] == names.SERVICE_KIND:
            found.add(owner["name"])
        elif owner.get("controller") and owner["kind"] == "ReplicaSet":
            deployment = owner["name"].rpartition("-")[0]
            made_by = deployment.removesuffix(names.deployment(""))
            found.add(made_by if made_by != deployment else None)
    return {Key(namespace, str(name)) for name in found if name}


def _place(kind: kinds.Kind) -> tuple[str, str] | tuple[str, str, str]:
    """As kopf names a resource; core has no group."""
    return (kind.group, kind.version, kind.plural) if kind.group else (kind.version, kind.plural)


def _configure(settings: kopf.OperatorSettings) -> None:
    """A silent watch is noticed within 70 s and reopened after 5 minutes at the latest; kopf itself writes nothing."""
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.scanning.disabled = (
        True  # no list of CRDs and namespaces: ours are known, and no right is needed for it
    )
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = 70
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = _Pauses()
    # A worker serves one object and lingers: 50 of them take 500 objects a second in.
    settings.queueing.worker_limit = 50
    settings.queueing.idle_timeout = 0.1
    settings.queueing.exit_timeout = 2
    settings.peering.standalone = True
    settings.persistence.diffbase_storage = _NoDifferences()
    for kind in WATCHED_CHILDREN:
        settings.watching.label_selectors[_place(kind)] = names.LABEL_SERVICE  # filtered by the server


class _Pauses(Iterable[float]):
    """Between tries, without an end: a watch that gives up ends the process, and with it the watches of namespaces in which all is well.
    No long pause among them: a watch must be back soon after the server, or the right, is; else the resync finds changes that it owes."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3, 5), itertools.repeat(8, 75), itertools.repeat(30))


class _NoDifferences(kopf.DiffBaseStorage):
    """kopf copies each object deeply at each event, to find out what changed, for kinds of handlers that we have none of."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        raise AssertionError("no handler of ours needs a difference")
