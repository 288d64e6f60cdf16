"""One service, from whatever state to what its spec wants: observe everything, plan, act, write the status once.

Level-based: called again for any reason, it comes to the same end, and at rest it writes nothing. Called by `worker` in worker
threads, never twice at a time for one service. Raises KubeError when the API server cannot be used; the worker tries again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trimtab_operator import names, support
from trimtab_operator.api import InferenceService, InvalidRun, TuningRun
from trimtab_operator.api.service import Metadata, ServiceSpec
from trimtab_operator.api.status import ServiceStatus
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.engines import EngineRefused, Engines, EngineUnreachable
from trimtab_operator.cluster.events import Recorder
from trimtab_operator.cluster.kube import Conflict, Denied, Kube, NamespaceGoing, NotFound, Refused
from trimtab_operator.cluster.metrics import OperatorMetrics
from trimtab_operator.cluster.observe import Key, Observer, previous_status
from trimtab_operator.cluster.run_makers import RunMakers
from trimtab_operator.cluster.slo import SloWatch
from trimtab_operator.cluster.slots import Slots
from trimtab_operator.errors import Finding, InvalidResource
from trimtab_operator.plan import cluster, live_push, pods, run_events, runs, workers
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan.events import Happening, transitions
from trimtab_operator.plan.refused import findings as refused_findings
from trimtab_operator.plan.status import invalid_status
from trimtab_operator.plan.worker_job import TOKEN_LIFE_S

logger = logging.getLogger(__name__)

Json = dict[str, Any]
NAME_RETRY_S = 30.0  # somebody else's object is not watched
GONE_RETRY_S = 1.0  # a former object is on its way out
ENGINE_RETRY_S = 1.0  # a ready pod whose admin port did not answer
_MADE_ANEW = frozenset({"PodDisruptionBudget", "NetworkPolicy", "RoleBinding"})
_RUN_FIELDS = ("observedGeneration", "phase", "startTime", "conditions", "summary", "applied", "pruned")


class Reconciler:
    """See the module. `settings` is asked each time: the admin key may come later."""

    def __init__(
        self,
        kube: Kube,
        engines: Engines,
        observer: Observer,
        settings: cluster.Settings,
        recorder: Recorder,
        metrics: OperatorMetrics,
        slo: SloWatch | None = None,
        now: Callable[[], float] = time.time,
        *,
        fleet: Callable[[], plan_live.Switch] = plan_live.Switch,
        slots: Slots | None = None,
    ) -> None:
        self._fleet = fleet
        self._slots = slots
        self._kube = kube
        self._engines = engines
        self._makers = RunMakers(kube)
        self._observer = observer
        self._store = observer.store
        self._settings = settings
        self._recorder = recorder
        self._metrics = metrics
        self._slo = slo
        self._now = now
        self._refusals: dict[Key, dict[str, tuple[int, str]]] = {}  # by pod UID: generation, why
        self._held: dict[Key, frozenset[str]] = {}  # UIDs of leaving pods that serve on; forgotten ones lapse

    def reconcile(self, key: Key) -> float | None:
        """→ seconds until the next look that is needed even if nothing happens, None for none."""
        resource = self._observer.resource(key)
        if resource is None or resource["metadata"].get("deletionTimestamp"):
            self._forget(key)
            return None
        previous = previous_status(resource)
        try:
            service = InferenceService.parse(resource)
        except InvalidResource as error:
            bare = InferenceService(
                Metadata(key.name, key.namespace, resource["metadata"]["generation"]), ServiceSpec()
            )
            self._stop(bare, resource, previous, tuple(error.errors), names.INVALID_SPEC)
            return None
        unsupported = support.findings(service, "cluster")
        if unsupported:
            self._stop(service, resource, previous, unsupported, names.UNSUPPORTED)
            return None
        return self._carry_out(key, service, resource, previous)

    def _carry_out(
        self, key: Key, service: InferenceService, resource: Json, previous: ServiceStatus
    ) -> float | None:
        refusals = self._refusals.setdefault(key, {})
        try:
            observed, decision = self._decide(service, previous, refusals)
        except Denied as error:
            return self._denied(service, resource, previous, error)
        if decision.changes.taken:
            self._stop(service, resource, previous, decision.changes.taken, names.NAME_TAKEN)
            return NAME_RETRY_S
        try:
            self._change_children(key, observed, decision)
            observed = self._make_runs(key, observed, decision)
        except NamespaceGoing:
            return None  # all of it is being deleted, and nothing may be made there any more
        except Refused as error:
            what = str(error).partition(":")[0]
            told = refused_findings(what, error.causes, error.message, decision.changes.apply)
            self._stop(service, resource, previous, told, names.INVALID_SPEC)
            return None
        except Denied as error:
            return self._denied(service, resource, previous, error)
        problem = self._observer.monitors.write(service, decision.monitors)
        if problem is not None:
            observed = replace(observed, monitors=replace(observed.monitors, problem=problem))
        said = self._observer.shadows.carry_out(key, service, decision.acting_run, decision.shadow)
        observed = replace(observed, shadow_problem=said)
        observed = self._see_to_workers(observed, decision)
        self._hold(key, observed, decision)
        observed, retry = self._talk(key, observed, decision)
        if retry:
            self._store.distrust(key)  # a pod that does not answer may be gone
        now = self._now()
        conclusion = cluster.conclude(observed, decision, now, pods.rfc3339(now))
        happened = transitions(previous, conclusion.status)
        if decision.superseded is not None:
            happened.append(Happening("Normal", names.RECOMMENDATION_SUPERSEDED, decision.superseded))
        for pod in decision.renumbered:
            happened.append(
                Happening("Warning", "ConfigDrift", f"{pod} had seen other numbers; a new one goes out")
            )
        self._write(service, resource, conclusion.status, happened)
        listed: tuple[TuningRun | InvalidRun, ...] = (*observed.runs, *observed.invalid_runs)
        for run in listed:
            if (status := conclusion.run_statuses.get(run.name)) is not None:
                self._write_run(service.namespace, run, status)
        everybody = (*observed.pods, *observed.shadow.pods)
        soon = [conclusion.look_again_s - now] if conclusion.look_again_s is not None else []
        waiting = (decision.changes, decision.shadow.changes, decision.nightly)
        soon += [GONE_RETRY_S] if any(changes.waiting for changes in waiting) else []
        taken = decision.shadow.changes.taken or decision.nightly.taken
        refused = (observed.nightly_problem, observed.drift)
        denied = any(found is not None and found.reason == names.API_DENIED for found in refused)
        soon += [NAME_RETRY_S] if taken or denied or observed.shadow_problem else []
        soon += [ENGINE_RETRY_S] if retry else []
        soon += [pods.CREATING_PATIENCE_S] if any(map(pods.creating, everybody)) else []
        return max(0.0, min(soon)) if soon else None

    def _denied(
        self, service: InferenceService, resource: Json, previous: ServiceStatus, error: Denied
    ) -> float:
        """Say what may not be read or written; of a namespace in which nothing may be, this raises Denied itself."""
        findings = (Finding(error.reason or "Forbidden", None, error.message),)
        self._stop(service, resource, previous, findings, names.API_DENIED)
        return NAME_RETRY_S

    def _decide(
        self,
        service: InferenceService,
        previous: ServiceStatus,
        refusals: Mapping[str, tuple[int, str]],
    ) -> tuple[cluster.Observed, cluster.Decision]:
        """Nothing is changed by what a watch once said: the children concerned are read again, and all is decided again."""
        observed, fresh = self._observer.everything(service, previous, refusals)
        key = Key(service.namespace, service.name)
        observed = replace(observed, fleet=self._fleet())
        if self._slo is not None:
            observed = replace(observed, slo=self._slo.about(key, service.spec.slo))
        read: set[tuple[str, str]] = set()
        while True:
            now = self._now()
            observed = replace(observed, waits=self._turn(key, observed, now))
            decision = cluster.decide(observed, self._settings, now, pods.rfc3339(now))
            stale = decision.concerns(service.name) - read
            if fresh or not stale:
                return observed, decision
            observed = self._observer.again(observed, stale)
            read |= stale

    # Acting

    def _change_children(self, key: Key, observed: cluster.Observed, decision: cluster.Decision) -> None:
        for manifest, path in zip(decision.changes.apply, decision.changes.drifted, strict=True):
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            self._store.wrote(key, self._apply(manifest, observed.child(kind, name)))
            logger.info(
                "applied",
                extra={
                    "service": str(key),
                    "child": f"{kind}/{name}",
                    "path": path,
                },
            )
        for live in decision.changes.delete:
            self._delete(live)

    def _delete(self, live: Mapping[str, Any]) -> None:
        metadata = live["metadata"]
        try:
            self._kube.delete(
                kinds.BY_NAME[live["kind"]], metadata["namespace"], metadata["name"], metadata["uid"]
            )
        except Conflict:
            return  # another object under that name by now; the next look judges it

    def _make_runs(
        self, key: Key, observed: cluster.Observed, decision: cluster.Decision
    ) -> cluster.Observed:
        """The schedule, a drift's run, and room for both; with what went wrong noted."""

        def apply(manifest: Json) -> None:
            live = observed.child(manifest["kind"], manifest["metadata"]["name"])
            self._store.wrote(key, self._apply(manifest, live))

        problem = self._makers.schedule(observed.service, decision.nightly, apply, self._delete)
        drift = self._makers.drift_run(decision.drift)
        self._makers.forget_runs(decision.superfluous)
        return replace(observed, nightly_problem=problem, drift=drift)

    def _apply(self, manifest: Json, live: Mapping[str, Any] | None) -> Json:
        """Apply one child. A field that somebody added can forbid ours beside it (a budget has one of two limits): where nothing
        hangs on the object itself, it is made anew."""
        try:
            return self._kube.apply(manifest)
        except Refused:
            if live is None or manifest["kind"] not in _MADE_ANEW:
                raise
            metadata = live["metadata"]
            self._kube.delete(
                kinds.BY_NAME[live["kind"]], metadata["namespace"], metadata["name"], metadata["uid"]
            )
            return self._kube.apply(manifest)

    def _talk(
        self, key: Key, observed: cluster.Observed, decision: cluster.Decision
    ) -> tuple[cluster.Observed, bool]:
        """Say to engines what they lack → what they then say themselves, and whether some must be asked again soon."""
        listed = {pod["metadata"]["name"]: pod for pod in (*observed.pods, *observed.shadow.pods)}
        silent = {
            name
            for name, pod in listed.items()
            if pods.admin_reachable(pod) and name not in observed.read_backs
        }
        if not decision.calls:
            return observed, bool(silent)
        read_backs, refusals = dict(observed.read_backs), dict(observed.refusals)
        for name, answer in self._engines.say(listed, decision.calls).items():
            self._metrics.pushed(answer)
            if isinstance(answer, EngineUnreachable):
                silent.add(name)
            elif isinstance(answer, EngineRefused):
                if answer.status == 409:
                    silent.add(name)  # it has seen another number meanwhile: read and number again
                    continue
                call = decision.calls[name][0]
                number = int(call.document["generation"]) if isinstance(call, live_push.Push) else 0
                refusals[name] = (number, str(answer))
                self._refusals[key][listed[name]["metadata"]["uid"]] = refusals[name]
            else:
                read_backs[name] = answer
        alive = {pod["metadata"]["uid"] for pod in listed.values()}
        for uid in set(self._refusals[key]) - alive:
            del self._refusals[key][uid]
        return replace(observed, read_backs=read_backs, refusals=refusals), bool(silent)

    def _hold(self, key: Key, observed: cluster.Observed, decision: cluster.Decision) -> None:
        """Let leaving pods serve on, and those go that are not needed any more."""
        uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in observed.pods}
        held = self._held.get(key, frozenset())
        enough = {name: 0.0 for name, uid in uids.items() if uid in held and name not in decision.holds}
        if not decision.holds and not enough:
            return
        listed = {pod["metadata"]["name"]: pod for pod in observed.pods}
        done = self._engines.hold(listed, {**decision.holds, **enough})
        for name in done:
            if (uids[name] in held) != (name in decision.holds):
                logger.info("serves on" if name in decision.holds else "may go",
                            extra={"service": str(key), "pod": name})  # fmt: skip
        self._held[key] = frozenset(uids[name] for name in decision.holds if name in done)

    def _see_to_workers(self, observed: cluster.Observed, decision: cluster.Decision) -> cluster.Observed:
        """Make the worker that is wanted, end those that are not → with what came of it."""
        objects = self._observer.workers
        for run in observed.runs:
            if run.name in decision.end_workers:
                objects.end(run)
        wanting = decision.new_worker
        if wanting is None:
            return observed
        ready = [pod for pod in observed.pods if pods.admin_reachable(pod)]
        tokens = self._engines.read_tokens(ready, TOKEN_LIFE_S)
        shadow = decision.shadow.engines
        front = observed.child("Service", names.service(observed.service.name)) or {}
        address = front.get("spec", {}).get("clusterIP")
        made = objects.make(observed.service, wanting, self._settings.tuner, tokens, shadow, address)
        if isinstance(made, workers.Obstacle):
            return replace(observed, worker_problem=made)
        logger.info("made a worker", extra={"run": f"{wanting.metadata.namespace}/{wanting.name}"})
        return replace(observed, workers={wanting.name: workers.Worker(made)})

    def _turn(self, key: Key, observed: cluster.Observed, now: float) -> str | None:
        """Why the run that may act has to wait for those of other services; None when it need not."""
        if self._slots is None:
            return None
        run = cluster.wants_to_act(observed, now)
        if run is None:
            self._slots.release([key])
            return None
        return self._slots.ask(key, run, now)

    def _forget(self, key: Key) -> None:
        self._refusals.pop(key, None)
        self._held.pop(key, None)
        self._store.forget(key)
        self._observer.monitors.forget(key)
        if self._slots is not None:
            self._slots.release([key])
        self._metrics.forget(key)
        if self._slo is not None:
            self._slo.forget(key)
        self._tell_runs(key, names.SERVICE_NOT_FOUND)

    def _tell_runs(self, key: Key, unserved: str) -> None:
        """Say in all runs of a service why nothing is done for it. Workers of a service that is gone have nothing to work on."""
        now, found = pods.rfc3339(self._now()), self._observer.runs(key)
        self._observer.shadows.remove(key, found)
        self._end_workers(key, [run for run in found if isinstance(run, TuningRun)], unserved)
        for run in found:
            if isinstance(run, InvalidRun):
                status = runs.invalid_run_status(run, now)
            else:
                status = runs.run_status(run, acts=False, refusal=None, unserved=unserved, now=now)
            self._write_run(key.namespace, run, status)

    def _end_workers(self, key: Key, alive: list[TuningRun], unserved: str) -> None:
        """Of a service that nothing is done for: of its runs that are over, and of all when it is gone."""
        if not any(runs.begun(run) for run in alive):
            return
        listed = self._observer.workers.pods(key.namespace, key.name)
        served = unserved != names.SERVICE_NOT_FOUND
        end = workers.leftovers(alive, listed, self._now(), served=served).end
        for run in alive:
            if run.name in end:
                self._observer.workers.end(run)

    # Writing

    def _stop(
        self,
        service: InferenceService,
        resource: Json,
        previous: ServiceStatus,
        findings: tuple[Finding, ...],
        reason: str,
    ) -> None:
        """Say why nothing is done; what runs is left running, and has its place by its own status."""
        if self._slots is not None:
            self._slots.release([Key(service.namespace, service.name)])
        status = invalid_status(service, findings, reason, previous, pods.rfc3339(self._now()))
        self._write(service, resource, status, transitions(previous, status))
        why = f'InferenceService "{service.name}" has reason {reason}: {"; ".join(map(str, findings))}'
        self._tell_runs(Key(service.namespace, service.name), why)

    def _write(
        self, service: InferenceService, resource: Json, status: ServiceStatus, happened: list[Happening]
    ) -> None:
        key = Key(service.namespace, service.name)
        self._metrics.status(key, status)
        for happening in happened:  # first: from then on the status says that they were told
            self._recorder.record(resource, happening)
        wanted = status.to_json()
        if wanted != (resource.get("status") or {}):
            try:
                answer = self._kube.apply_status(kinds.SERVICE, service.namespace, service.name, wanted)
            except NotFound:
                return  # deleted meanwhile
            if _same_but_status(answer, resource):
                self._store.wrote_status(key, answer["metadata"]["resourceVersion"])

    def _write_run(self, namespace: str, run: TuningRun | InvalidRun, status: Json) -> None:
        known = run.raw.get("status") or {}
        if {name: known[name] for name in _RUN_FIELDS if name in known} == status:
            return
        told = {"apiVersion": names.API_VERSION, "kind": names.RUN_KIND,
                "metadata": {"name": run.name, "namespace": namespace, "uid": run.metadata.uid}}  # fmt: skip
        for happening in run_events.transitions(run, status):  # first, as a service's
            self._recorder.record(told, happening)
        with contextlib.suppress(NotFound):  # deleted meanwhile
            self._kube.apply_status(kinds.RUN, namespace, run.name, status)


def _same_but_status(one: Json, other: Json) -> bool:
    """Whether nobody changed anything else meanwhile; an edit must not pass for our own write."""
    unlike = ("resourceVersion", "managedFields")
    return one.get("spec") == other.get("spec") and all(
        one["metadata"].get(name) == other["metadata"].get(name)
        for name in {*one["metadata"], *other["metadata"]}
        if name not in unlike
    )
