"""Gathers everything about one service: its resource, children, pods, runs, and what its engines say of themselves.

Used by `reconcile`. The resource, its runs and the engines are asked each time. Children and pods come from `store` when nothing
speaks against it; the first look at a service, each resync's, and whatever is about to be written are read fresh.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from trimtab_operator import names
from trimtab_operator.api import InferenceService, InvalidRun, TuningRun, read_run
from trimtab_operator.api.status import ServiceStatus
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.engines import Engines
from trimtab_operator.cluster.kube import Kube
from trimtab_operator.cluster.monitors import MonitorObjects
from trimtab_operator.cluster.shadows import Shadows
from trimtab_operator.cluster.store import Key, ObjectKey, Store
from trimtab_operator.cluster.workers import WorkerObjects
from trimtab_operator.errors import InvalidResource
from trimtab_operator.plan import children, nightly, pods, workers
from trimtab_operator.plan import runs as plan_runs
from trimtab_operator.plan.cluster import Observed
from trimtab_operator.plan.engine_flags import from_hub
from trimtab_operator.plan.fleet import Contender
from trimtab_operator.plan.shadow import KINDS, Standing

Json = dict[str, Any]


__all__ = ["Key", "Observer", "RunIndex", "previous_status"]


class _Indexed(NamedTuple):
    """A run as last told; `contender` is None once it was deleted; `serial` orders what was told."""

    version: int
    contender: Contender | None
    serial: int


class RunIndex:
    """Which TuningRuns name which service: the one thing that labels cannot select; and what of them the fleet's limit is judged
    by. Newer versions win, whatever the order in which watch and lists tell them. Thread-safe; for their own service the runs
    are read fresh."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[Key, dict[str, _Indexed]] = defaultdict(dict)
        self._serial = 0

    def put(self, run: Mapping[str, Any]) -> Key:
        """Note a run → the service that it is about."""
        key, name, version = _place(run)
        with self._lock:
            self._note(key, name, version, Contender.of(read_run(run)))
        return key

    def drop(self, run: Mapping[str, Any]) -> Key:
        """Forget a run. That it is gone is kept until the next list, which may have been on its way before."""
        key, name, version = _place(run)
        with self._lock:
            self._note(key, name, version, None)
        return key

    def mark(self) -> int:
        """A list of all runs is about to be asked for."""
        with self._lock:
            return self._serial

    def names(self, key: Key) -> list[str]:
        """Names of a service's runs."""
        with self._lock:
            return sorted(
                name for name, known in self._runs.get(key, {}).items() if known.contender is not None
            )

    def replace(self, runs: Iterable[Mapping[str, Any]], mark: int, namespace: str | None = None) -> None:
        """Start over from a list of all runs (of a namespace) that was asked for at `mark`; what was told since then stays."""
        listed = [(*_place(run), Contender.of(read_run(run))) for run in runs]
        with self._lock:
            for key, known in list(self._runs.items()):
                if namespace not in (None, key.namespace):
                    continue
                later = {name: one for name, one in known.items() if one.serial > mark}
                if later:
                    self._runs[key] = later
                else:
                    del self._runs[key]
            for key, name, version, contender in listed:
                self._note(key, name, version, contender)

    def contenders(self) -> dict[Key, list[Contender]]:
        """All runs by service, as last told."""
        with self._lock:
            return {
                key: [one.contender for one in found.values() if one.contender is not None]
                for key, found in self._runs.items()
            }

    def _note(self, key: Key, name: str, version: int, contender: Contender | None) -> None:
        known = self._runs[key].get(name)
        if known is None or known.version <= version:
            self._serial += 1
            self._runs[key][name] = _Indexed(version, contender, self._serial)


def _place(run: Mapping[str, Any]) -> tuple[Key, str, int]:
    """The service that a run is about, its name and its resource version."""
    metadata = run["metadata"]
    return (
        Key(metadata["namespace"], run["spec"]["service"]),
        metadata["name"],
        int(metadata.get("resourceVersion") or 0),
    )


class Observer:
    """See the module."""

    def __init__(self, kube: Kube, engines: Engines, index: RunIndex, store: Store | None = None) -> None:
        self._kube = kube
        self.monitors = MonitorObjects(kube)
        self.workers = WorkerObjects(kube)
        self._engines = engines
        self._index = index
        self.store = store or Store()
        self.shadows = Shadows(kube, self.store)

    def resource(self, key: Key) -> Json | None:
        """The InferenceService as it is now."""
        return self._kube.get(kinds.SERVICE, key.namespace, key.name)

    def runs(self, key: Key) -> tuple[TuningRun | InvalidRun, ...]:
        """All TuningRuns of a service."""
        found = (self._kube.get(kinds.RUN, key.namespace, name) for name in self._index.names(key))
        # A name may have been given to a run of another service meanwhile.
        return tuple(read_run(run) for run in found if run is not None and run["spec"]["service"] == key.name)

    def everything(
        self,
        service: InferenceService,
        previous: ServiceStatus,
        refusals: Mapping[str, tuple[int, str]],
    ) -> tuple[Observed, bool]:
        """→ what there is, and whether all of it was read fresh. `refusals` by pod UID: what engines have refused before."""
        key = Key(service.namespace, service.name)
        mark, schedule = self.store.begin(key), nightly.possible(service.name)
        runs = self.runs(key)
        objects = self.store.all(key)
        fresh = objects is None
        if objects is None:
            scheduled = service.spec.tuning.nightly is not None or self.store.has(key, schedule)
            objects = self._read_all(key, schedule if scheduled else (), new=previous == ServiceStatus())
            objects |= self.shadows.read(key, runs)
            self.store.fill(key, mark, objects.values())
        # The watch picks by one label only, so that an edit of the other one shows: such a pod is nobody's any more.
        mine = names.selector(service.name).items()
        listed = [
            item
            for (kind, _), item in objects.items()
            if kind == kinds.POD.name and mine <= (item["metadata"].get("labels") or {}).items()
        ]
        shadow = _shadow(key.name, objects)
        everybody = [*listed, *shadow.pods]
        reachable = {pod["metadata"]["name"]: pod for pod in everybody if pods.admin_reachable(pod)}
        by_name = {
            pod["metadata"]["name"]: refusals[pod["metadata"]["uid"]]
            for pod in everybody
            if pod["metadata"]["uid"] in refusals
        }
        working = tuple(
            pod for (kind, _), pod in objects.items() if kind == kinds.POD.name and workers.is_worker(pod)
        )
        complaints = self._complaints([*everybody, *working])
        alive = tuple(run for run in runs if isinstance(run, TuningRun))
        found_workers, alive = self._worker(service, alive, working, complaints)
        observed = Observed(
            service=service,
            previous=previous,
            children={
                name: objects[name]
                for name in (*children.possible(service.name), *schedule)
                if name in objects
            },
            pods=tuple(listed),
            runs=alive,
            workers=found_workers,
            worker_pods=working,
            invalid_runs=tuple(run for run in runs if isinstance(run, InvalidRun)),
            read_backs=self._engines.read_backs(reachable),
            refusals=by_name,
            loading=self._engines.loading(
                {pod["metadata"]["name"]: pod for pod in everybody if pods.loads(pod)}
                if from_hub(service.spec)
                else {}
            ),
            complaints=complaints,
            shadow=shadow,
            monitors=self.monitors.read(service, fresh=fresh),
        )
        return observed, fresh

    def _worker(
        self,
        service: InferenceService,
        runs: tuple[TuningRun, ...],
        found: tuple[Json, ...],
        complaints: Mapping[str, str],
    ) -> tuple[dict[str, workers.Worker], tuple[TuningRun, ...]]:
        """→ the acting run's worker, and the runs, no older than that."""
        run = plan_runs.acting(runs, time.time(), service)
        if run is None or not workers.wanted(run):
            return {}, runs
        worker = self.workers.read(run, found, complaints)
        if worker.job is not None and workers.finished(worker.job):
            # It wrote its last word before it ended, and perhaps after the run was read.
            again = self._kube.get(kinds.RUN, service.namespace, run.name)
            parsed = None if again is None else read_run(again)
            if isinstance(parsed, TuningRun) and parsed.uid == run.uid:
                runs = tuple(parsed if one is run else one for one in runs)
        return {run.name: worker}, runs

    def again(self, observed: Observed, stale: Collection[ObjectKey]) -> Observed:
        """The same with these children read fresh."""
        key = Key(observed.service.namespace, observed.service.name)
        live, shadow = dict(observed.children), dict(observed.shadow.objects)
        own = (*children.possible(key.name), *nightly.possible(key.name))
        for kind, name in stale:
            mark = self.store.mark()
            found = self._kube.get(kinds.BY_NAME[kind], key.namespace, name)
            self.store.read(key, mark, (kind, name), found)
            place = live if (kind, name) in own else shadow
            place.pop((kind, name), None)
            if found is not None:
                place[(kind, name)] = found
        return replace(observed, children=live, shadow=replace(observed.shadow, objects=shadow))

    def _read_all(self, key: Key, further: Collection[ObjectKey], *, new: bool) -> dict[ObjectKey, Json]:
        found: dict[ObjectKey, Json] = {}
        for kind, name in (*children.possible(key.name), *further):
            item = self._kube.get(kinds.BY_NAME[kind], key.namespace, name)
            if item is not None:
                found[(kind, name)] = item
        # No look has been at a new service yet: if it has pods, they are another's of that name, long there.
        # Of workers as well as of engines.
        for pod in self._kube.list(kinds.POD, key.namespace, {names.LABEL_SERVICE: key.name}, cached=new):
            found[(kinds.POD.name, pod["metadata"]["name"])] = pod
        return found

    def _complaints(self, listed: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """What kubelets say of pods whose containers do not get to start: a missing Secret is in no pod's status."""
        found: dict[str, str] = {}
        for pod in listed:
            if not pods.held_up(pod, time.time()):
                continue
            metadata = pod["metadata"]
            about = {"involvedObject.uid": metadata["uid"], "type": "Warning"}
            said = pods.complaint(self._kube.list(kinds.EVENT, metadata["namespace"], fields=about))
            if said is not None:
                found[metadata["name"]] = said
        return found


def _shadow(service: str, objects: Mapping[ObjectKey, Json]) -> Standing:
    """What of a service's objects is of its runs' shadows, or holds a name of theirs."""
    own, mine = children.possible(service), names.shadow_labels(service).items()
    named = {
        key: item
        for key, item in objects.items()
        if key[0] in KINDS and key[1].endswith(names.shadow("")) and key not in own
    }
    listed = (item for (kind, _), item in objects.items() if kind == kinds.POD.name)
    return Standing(
        named, tuple(pod for pod in listed if mine <= (pod["metadata"].get("labels") or {}).items())
    )


def previous_status(resource: Mapping[str, Any]) -> ServiceStatus:
    """The status that the resource carries; an unreadable one (a newer or older operator's) counts as none."""
    try:
        return ServiceStatus.from_json(resource.get("status") or {})
    except InvalidResource:
        return ServiceStatus()
