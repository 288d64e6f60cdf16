"""What was last seen of each service's children and pods, so that a look that finds nothing to do need not ask for them again.

Fed by `handlers` (what the watches deliver), by `observe` (what was read) and by `reconcile` (what the API server answered to a
write); read by `observe`. It is never the ground for a write: what is about to be written is read fresh first. A service that
was not looked at yet, and one whose turn in the resync has come, are read fresh as a whole. What was read or written and is not
delivered by its watch for long means that the watch is dead. Kept as JSON without managedFields: a thousand services take about ten
megabytes. Thread-safe; knows nothing of what objects mean.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from trimtab_operator import names
from trimtab_operator.plan import nightly

WATCH_GRACE_S = 120.0  # from an answer that shows an object to the watch's delivery of it
ASK_AGAIN_S = WATCH_GRACE_S / 2

Json = dict[str, Any]
ObjectKey = tuple[str, str]  # kind, name


class Key(NamedTuple):
    """A service's place."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Mark(NamedTuple):
    """A moment: what is noted later has a higher serial; the epoch ends when a watch begins anew."""

    serial: int
    epoch: int


class _Seen(NamedTuple):
    """One object: `content` is None once it was deleted; `serial` orders what was noted, whatever its source."""

    version: int
    content: bytes | None
    serial: int


@dataclass(slots=True)
class _Service:
    complete_at: int | None = None  # epoch in which everything that exists was in `objects`
    objects: dict[ObjectKey, _Seen] = field(default_factory=dict)
    own_version: str | None = None  # of the resource, as our last status write left it
    #: Version that a watch owes, since when.
    owed: dict[ObjectKey, tuple[int, float]] = field(default_factory=dict)


class Store:
    """See the module. Objects are ordered by resource version; an older one never replaces a newer one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._services: dict[Key, _Service] = {}
        #: Versions that watches have shown, of services that nobody looks at too: a follower's, or one whose first look comes late.
        self._shown: dict[Key, dict[ObjectKey, int]] = defaultdict(dict)
        self._serial = 0
        self._epoch = 0

    # What a look does

    def begin(self, key: Key) -> Mark:
        """A look at `key` begins → a mark: what is noted later is newer than what was asked for before."""
        with self._lock:
            service = self._services.setdefault(key, _Service())
            # Deleted objects are remembered only against answers of one look that are older than the deletion.
            service.objects = {
                name: seen for name, seen in service.objects.items() if seen.content is not None
            }
            return Mark(self._serial, self._epoch)

    def mark(self) -> Mark:
        """Something is about to be asked for."""
        with self._lock:
            return Mark(self._serial, self._epoch)

    def all(self, key: Key) -> dict[ObjectKey, Json] | None:
        """Everything of a service; None when it has to be read."""
        with self._lock:
            service = self._services.get(key)
            if service is None or service.complete_at != self._epoch:
                return None
            contents = {n: seen.content for n, seen in service.objects.items() if seen.content is not None}
        return {name: msgspec.json.decode(content) for name, content in contents.items()}

    def has(self, key: Key, names: Collection[ObjectKey]) -> bool:
        """Whether one of these was there when last seen."""
        with self._lock:
            service = self._services.get(key)
            found = {} if service is None else service.objects
            return any(name in found and found[name].content is not None for name in names)

    def fill(self, key: Key, mark: Mark, found: Iterable[Json]) -> None:
        """Everything that there is, as read after `mark`."""
        listed = {(item["kind"], item["metadata"]["name"]): item for item in found}
        with self._lock:
            service = self._services.get(key)
            if service is None:
                return
            for name, seen in list(service.objects.items()):
                if name not in listed and seen.serial <= mark.serial:
                    self._drop(service, name)
            for name, item in listed.items():
                self._answer(key, service, name, item)
            service.complete_at = mark.epoch

    def read(self, key: Key, mark: Mark, name: ObjectKey, item: Json | None) -> None:
        """One object as read after `mark`; None: there is none."""
        with self._lock:
            service = self._services.get(key)
            if service is None:
                return
            if item is not None:
                self._answer(key, service, name, item)
            elif (seen := service.objects.get(name)) is not None and seen.serial <= mark.serial:
                self._drop(service, name)

    def wrote(self, key: Key, item: Json) -> None:
        """The API server's answer to a write of ours."""
        with self._lock:
            service = self._services.get(key)
            if service is not None:
                self._answer(key, service, (item["kind"], item["metadata"]["name"]), item)

    def wrote_status(self, key: Key, version: str) -> None:
        """The resource is at `version` by a write of ours, and otherwise as the look read it."""
        with self._lock:
            service = self._services.get(key)
            if service is not None:
                service.own_version = version

    def forget(self, key: Key) -> None:
        """The service is gone."""
        with self._lock:
            self._services.pop(key, None)

    def known(self) -> list[Key]:
        """Services that something is remembered of."""
        with self._lock:
            return list(self._services)

    # What others say

    def delivered(self, key: Key, kind: str, item: Mapping[str, Any], *, deleted: bool) -> bool:
        """A watch shows an object → whether that is news."""
        with self._lock:
            name, version = (kind, item["metadata"]["name"]), _version(item)
            self._show(key, name, version, deleted=deleted)
            service = self._services.get(key)
            if service is None:
                if deleted or name not in nightly.possible(key.name):
                    return True  # the first look reads everything
                # But for a schedule's objects, which it asks for only when there is reason to.
                service = self._services[key] = _Service()
            if service.owed.get(name, (version, 0.0))[0] <= version:
                service.owed.pop(name, None)
            if deleted:
                seen = service.objects.get(name)
                self._serial += 1
                if seen is None or seen.version <= version:
                    service.objects[name] = _Seen(version, None, self._serial)
                return True
            return self._note(service, name, item)

    def is_own(self, key: Key, version: str) -> bool:
        """Whether the resource at `version` is what our own status write made of it."""
        with self._lock:
            service = self._services.get(key)
            return service is not None and service.own_version == version

    def distrust(self, key: Key) -> None:
        """The next look shall read everything, whatever the watches have said."""
        with self._lock:
            service = self._services.get(key)
            if service is not None:
                service.complete_at = None

    def distrust_all(self) -> None:
        """A watch has begun anew with a list: what was deleted meanwhile it will never say."""
        with self._lock:
            self._epoch += 1

    def overdue(self) -> list[Key]:
        """Services of which a watch has owed something for a while; the next look at each reads everything. What was deleted
        between an answer and the watch's beginning is never shown by it, and only a look finds out that it is not there."""
        latest = self._now() - ASK_AGAIN_S
        with self._lock:
            found = [
                key
                for key, service in self._services.items()
                if any(since_s < latest for _, since_s in service.owed.values())
            ]
            for key in found:
                self._services[key].complete_at = None
        return found

    def postpone(self, namespace: str | None, kind: str | None = None) -> None:
        """No watch may be open there (None: everywhere) on objects of `kind` (None: on any): what they owe counts from now."""
        now = self._now()
        with self._lock:
            for key, service in self._services.items():
                if namespace in (None, key.namespace):
                    for name, (version, _) in service.owed.items():
                        if kind in (None, name[0]):
                            service.owed[name] = (version, now)

    def debts(self) -> set[tuple[str, str]]:
        """Namespace and kind of what watches have owed for a while."""
        latest = self._now() - ASK_AGAIN_S
        with self._lock:
            return {
                (key.namespace, kind)
                for key, service in self._services.items()
                for (kind, _), (_, since_s) in service.owed.items()
                if since_s < latest
            }

    def dead_watch(self, failed_s: float = float("-inf")) -> str | None:
        """Which object a watch has owed for too long; None while all is well. After a request that failed at `failed_s` (by this
        clock) watches too need time to come back."""
        latest = self._now() - WATCH_GRACE_S
        if failed_s > latest:
            return None
        with self._lock:
            for key, service in self._services.items():
                for (kind, name), (version, since_s) in service.owed.items():
                    if since_s < latest:
                        return f"the watch has not delivered {kind} {key.namespace}/{name} at resource version {version}"
        return None

    def _answer(self, key: Key, service: _Service, name: ObjectKey, item: Mapping[str, Any]) -> None:
        """Note what the API server has answered. The watch will show it too, if it has our label."""
        label = (item["metadata"].get("labels") or {}).get(names.LABEL_SERVICE)
        mine = label is not None and names.service_of_label(label) == key.name
        news = self._note(service, name, item)
        if news and mine and self._shown.get(key, {}).get(name, -1) < _version(item):
            since_s = service.owed.get(name, (0, self._now()))[1]
            service.owed[name] = (_version(item), since_s)

    def _show(self, key: Key, name: ObjectKey, version: int, *, deleted: bool) -> None:
        """Remember what a watch has shown for as long as the object exists; a service that is forgotten may come again. Of a name
        that was given again, the former object's end may be told last."""
        last = self._shown.get(key, {}).get(name, -1)
        if not deleted:
            self._shown[key][name] = max(version, last)
        elif key in self._shown and last <= version:
            self._shown[key].pop(name, None)
            if not self._shown[key]:
                del self._shown[key]

    @staticmethod
    def _drop(service: _Service, name: ObjectKey) -> None:
        del service.objects[name]
        service.owed.pop(name, None)

    def _note(self, service: _Service, name: ObjectKey, item: Mapping[str, Any]) -> bool:
        version, seen = _version(item), service.objects.get(name)
        if seen is not None and seen.version >= version:
            return False
        metadata = {k: v for k, v in item["metadata"].items() if k != "managedFields"}
        self._serial += 1
        service.objects[name] = _Seen(
            version, msgspec.json.encode({**item, "kind": name[0], "metadata": metadata}), self._serial
        )
        return True


def _version(item: Mapping[str, Any]) -> int:
    """Resource versions of one object are integers that grow."""
    return int(item["metadata"]["resourceVersion"])
