"""A local service: observes its file and its replicas, plans with the cluster's own planner, and acts on processes.

Run by `main`, asked by `control` and `view`. One level-based loop: whatever happened, everything is observed, `plan.rollout`
says what to do, and it is done. A second loop keeps the live config in force (`live_sync`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx

from trimtab_operator import names
from trimtab_operator.api import InferenceService, Recommendation
from trimtab_operator.api.status import LiveValues, ServiceStatus
from trimtab_operator.errors import InvalidResource, OperatorError
from trimtab_operator.local import rules, spec_file, status
from trimtab_operator.local.backends import Backends
from trimtab_operator.local.engines import Engines
from trimtab_operator.local.events import EventLog
from trimtab_operator.local.live_sync import LiveSync
from trimtab_operator.local.process import engine_command, port_file
from trimtab_operator.local.replica import Phase, Replica
from trimtab_operator.local.state_dir import StateDir
from trimtab_operator.local.watch import FileWatch
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan import quiet_times, rollout
from trimtab_operator.plan import status as plan_status
from trimtab_operator.plan.engine_flags import Placement, engine_arguments
from trimtab_operator.plan.template import engine_environment, template_hash

Json = dict[str, Any]
_TICK_S = 0.25
_LIVE_S = 1.0
_SOURCES = ("Spec", "Recommendation")


class LocalService:
    """See the module. `changed` is set whenever a picture of it would look different."""

    def __init__(
        self,
        loaded: InferenceService,
        watch: FileWatch,
        state: StateDir,
        backends: Backends,
        client: httpx.AsyncClient,
        url: str,
        control_url: str,
    ) -> None:
        self.resource = loaded
        self.file_error: str | None = None
        self.url, self.control_url = url, control_url
        self.events = EventLog()
        self.changed = asyncio.Event()
        self.backends = backends
        self.replicas: dict[str, Replica] = {}
        self.watch = watch
        self._state = state
        self._client = client
        self.engines = Engines(client)
        self.live = LiveSync(state, self.engines, self.events, lambda: self.replicas.values())
        self.recommendation = self._load_recommendation("recommendation")
        self.waiting = self._load_recommendation("waiting_recommendation")  # for the end of a quiet time
        self.found = ServiceStatus()  # what a cluster's resource would carry
        self._serial = 0
        self._wake = asyncio.Event()
        self._live_wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def drain_timeout_s(self) -> float:
        """How long a leaving engine may finish its requests."""
        return self.resource.spec.rollout.drain_timeout_s

    # Loops

    async def run(self) -> None:
        """Observe, plan, act, until cancelled."""
        self.events.normal(
            "Starting", f"service {self.resource.name} on {self.url} (control {self.control_url})"
        )
        self.decide_live()
        live = asyncio.create_task(self._run_live())
        try:
            while not live.done():
                await self._follow_file()
                self._reconcile()
                await _either(self._wake, _TICK_S)
            await live
        finally:
            live.cancel()
            await asyncio.gather(live, return_exceptions=True)

    async def _run_live(self) -> None:
        while True:
            before = self.live.applied()
            self.live.current_template = template_hash(self.resource.spec)
            self.keep_quiet()
            await self.live.converge()
            if self.live.applied() != before:
                self._wake.set()
                self.picture_changed()
            await _either(self._live_wake, _LIVE_S)

    async def stop(self) -> None:
        """End all replicas in order; nothing is started any more."""
        self._stopping = True
        await asyncio.gather(*(replica.end(0.0) for replica in self.replicas.values()))
        self.events.normal("Stopped", f"service {self.resource.name}: no engine is left")

    def kill(self) -> None:
        """End all replicas now."""
        self._stopping = True
        for replica in self.replicas.values():
            replica.kill()
        for task in self._tasks:
            task.cancel()

    # The file

    async def _follow_file(self) -> None:
        what = str(self.watch.path)
        try:
            content = self.watch.poll()
            if content is None:
                return
            # Judging takes CPU time that the proxy's streams should not wait for.
            loaded = await asyncio.to_thread(lambda: spec_file.load(content.decode(), what, self.resource))
        except OSError as error:
            self._edit_refused(f"{what}: cannot be read: {error.strerror}")
        except UnicodeDecodeError as error:
            self._edit_refused(f"{what}: is not UTF-8 at byte {error.start}")
        except OperatorError as error:
            self._edit_refused(str(error))
        else:
            self._take_edit(loaded)

    def _edit_refused(self, message: str) -> None:
        if message != self.file_error:
            self.file_error = message
            self.events.warning("InvalidSpec", f"{message}\nthe config before this edit stays in force")
            self.picture_changed()

    def _take_edit(self, loaded: InferenceService) -> None:
        old, self.file_error = self.resource, None
        edited = loaded.raw.get("spec") != old.raw.get("spec")
        # As the API server counts: every change of spec is a generation.
        generation = old.metadata.generation + edited
        self.resource = loaded = replace(loaded, metadata=replace(loaded.metadata, generation=generation))
        if edited:
            hashes = template_hash(old.spec), template_hash(loaded.spec)
            effect = "engines are replaced one after another" if hashes[0] != hashes[1] else "no restart"
            self.events.normal("Updated", f"{self.watch.path.name} was edited: {effect}")
        why = rules.why_not(loaded, "Canary", "Apply")
        if self.live.live.candidate is not None and why is not None:
            self.live.live.end_candidate()
            self.events.normal("CandidateEnded", why)
        self.decide_live()
        self.picture_changed()

    # Live config: what is wanted

    def decide_live(self) -> None:
        """Spec, overlaid by a recommendation that still stands, becomes the incumbent."""
        spec, annotations = self.resource.spec, self.resource.metadata.annotations
        chosen = plan_live.effective(spec, self.recommendation, annotations)
        if chosen.superseded:
            self.keep_recommendation(None)
            self.events.normal(names.RECOMMENDATION_SUPERSEDED, chosen.why)
        had_candidate = self.live.live.candidate
        if self.live.want(chosen.config, chosen.source):
            assert self.live.live.incumbent is not None
            self.events.normal(
                "LiveConfig",
                f"generation {self.live.live.highest} from {chosen.source} is the incumbent ({chosen.why})",
            )
            if had_candidate is not None:
                self.events.normal(
                    "CandidateEnded", f"generation {had_candidate.document.generation}: a new incumbent wins"
                )
        self._live_wake.set()

    def quiet(self) -> quiet_times.Quiet | None:
        """The quiet time of now, or None."""
        return quiet_times.in_force(self.resource.spec.tuning.limits, time.time())

    def keep_quiet(self) -> None:
        """End a candidate in a quiet time; take a recommendation that waited for the end of one."""
        quiet = self.quiet()
        if quiet is not None:
            if self.live.live.end_candidate():
                self.events.normal("CandidateEnded", str(quiet))
                self.picture_changed()
        elif (
            self.waiting is not None
            and plan_live.switch(self.resource.metadata.annotations).state == "active"
        ):
            found = self.waiting
            self.hold_recommendation(None)
            if rules.why_not(self.resource, "Recommend", "Apply") is None:
                self.keep_recommendation(found)
                self.decide_live()
                self.picture_changed()

    def hold_recommendation(self, recommendation: Recommendation | None) -> None:
        """Remember it for the end of the quiet time, over restarts; None forgets it."""
        self.waiting = recommendation
        state = self._state.load_state()
        self._state.save_state(
            {**state, "waiting_recommendation": recommendation and recommendation.to_json()}
        )

    def _load_recommendation(self, key: str) -> Recommendation | None:
        raw = self._state.load_state().get(key)
        if raw is None:
            return None
        try:
            return Recommendation.from_json(raw)
        except InvalidResource as error:
            self.events.warning("StateIgnored", f"{self._state.folder}: {error}")
            return None

    def keep_recommendation(self, recommendation: Recommendation | None) -> None:
        self.recommendation = recommendation
        state = self._state.load_state()
        self._state.save_state({**state, "recommendation": recommendation and recommendation.to_json()})

    # Replicas: observe, plan, act

    def _reconcile(self) -> None:
        if self._stopping:
            return
        spec = self.resource.spec
        incumbent = self.live.live.incumbent
        assert incumbent is not None, "decide_live comes first"
        self.backends.expected = spec.wanted_replicas > 0
        wanted = rollout.Desired.of(spec, template_hash(spec), incumbent.generation)
        observed = [self._observe(replica) for replica in self.replicas.values()]
        for action in rollout.plan(wanted, observed, time.monotonic()):
            match action:
                case rollout.Start():
                    self._start(action)
                case rollout.Restart():
                    self._background(self.replicas[action.name].restart())
                case rollout.Drain() | rollout.Stop():
                    self._end(action)
                case rollout.PushLive():
                    self._live_wake.set()
                case rollout.SetStatus():
                    self._take_status(action.status)
                case rollout.Wait():
                    pass  # the loop ticks faster than any deadline

    def _observe(self, replica: Replica) -> rollout.Replica:
        failure = replica.failure if replica.phase is Phase.FAILED else None
        read_back = self.live.read_backs.get(replica.name)
        rejected = replica.name in self.live.rejections and self.live.live.incumbent is not None
        return rollout.Replica(
            name=replica.name,
            template_hash=replica.template_hash,
            phase=_PHASES[replica.phase],
            ready=replica.phase is Phase.READY,
            created_s=replica.created_s,
            started_s=replica.started_s,
            was_ready=replica.was_ready,
            restarts=replica.recent_restarts,
            failed_s=failure.at_s if failure else None,
            failure=replica.failure.reason if replica.failure else None,
            message=replica.loading or (replica.failure.message if replica.failure else ""),
            downloading=replica.loading is not None,
            unschedulable_since_s=replica.no_memory_since_s,
            incumbent_generation=int(read_back["incumbent"]["generation"]) if read_back else None,
            generation_rejected=self.live.live.incumbent.generation
            if rejected and self.live.live.incumbent
            else None,
        )

    def _start(self, action: rollout.Start) -> None:
        spec = self.resource.spec
        name = f"{self.resource.name}-{self._serial}"
        self._serial += 1
        folder = self._state.replica_folder(name)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier operator: its log would mislead
        self._state.delete_old_replicas(self.replicas)
        placement = Placement(
            live_config=str(self._state.live_file),
            port_file=str(port_file(folder)),
            api_keys=spec_file.api_keys_file(self.resource),
        )
        command = [*engine_command(), *engine_arguments(spec, placement, include_live=True), *self._threads()]
        replica = Replica(
            name,
            action.template_hash,
            command,
            folder,
            self._client,
            self._on_replica,
            engine_environment(spec),
        )
        self.replicas[name] = replica
        self.events.normal("Started", f"{name} ({action.why})")
        replica.start()

    def _threads(self) -> list[str]:
        """Engines share this machine's cores: two that each take all of them are many times slower than apart."""
        spec = self.resource.spec
        if any(argument.split("=")[0] == "--num-threads" for argument in spec.engine.extra_args):
            return []
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return ["--num-threads", str(max(1, (cores - 1) // max(1, spec.wanted_replicas)))]

    def _end(self, action: rollout.Drain | rollout.Stop) -> None:
        replica = self.replicas[action.name]
        drain_s = self.drain_timeout_s if isinstance(action, rollout.Drain) else 0.0
        self.events.normal("Draining", f"{replica.name} finishes its requests and ends ({action.why})")
        replica.leave()
        self._background(self._end_replica(replica, drain_s))

    async def _end_replica(self, replica: Replica, drain_s: float) -> None:
        await replica.end(drain_s)
        self.replicas.pop(replica.name, None)
        self.events.normal("Ended", replica.name)
        self._wake.set()

    def _on_replica(self, replica: Replica) -> None:
        # At once, not at the next tick: a replica that left must not be sent another request.
        self.backends.set(
            r.backend for r in self.replicas.values() if r.phase is Phase.READY and r.backend is not None
        )
        if replica.phase is Phase.READY:
            self.events.normal("ReplicaReady", f"{replica.name} (pid {replica.pid})")
            self._live_wake.set()
        elif replica.loading is not None:
            self.events.normal("Downloading", f"{replica.name} {replica.loading}")
        elif replica.phase is Phase.STARTING and replica.restarts:
            self.events.normal("Restarted", f"{replica.name} for the {_ordinal(replica.restarts)} time")
        elif replica.phase is Phase.NOT_READY:
            self.events.warning("ReplicaNotReady", f"{replica.name} does not answer its readiness probe")
        elif replica.phase is Phase.FAILED and replica.failure is not None:
            tail = f"\n{_indented(replica.failure.log_tail)}" if replica.failure.log_tail else ""
            self.events.warning(replica.failure.reason, f"{replica.name} {replica.failure.message}{tail}")
        self._wake.set()
        self.picture_changed()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Status

    def _take_status(self, found: rollout.RolloutStatus) -> None:
        incumbent = self.live.live.incumbent
        facts = plan_status.Facts(
            url=self.url,
            desired=plan_live.live_values(incumbent.to_json()) if incumbent is not None else None,
            applied=self._applied_everywhere(),
            recommendation=self.recommendation,
            tuning_running=self.live.live.candidate is not None,
            quiet=self.quiet(),
        )
        before, self.found = (
            self.found,
            plan_status.service_status(self.resource, found, facts, self.found, _now()),
        )
        was, ready = before.condition(names.READY), self.found.condition(names.READY)
        assert ready is not None, "service_status always gives it"
        if was is None or (was.status, was.reason) != (ready.status, ready.reason):
            (self.events.warning if found.stalled else self.events.normal)(ready.reason, ready.message)
        if before != self.found:
            self.picture_changed()

    def _applied_everywhere(self) -> LiveValues | None:
        """The live config in force, if all replicas that can be asked agree."""
        in_force = [read_back["in_force"] for read_back in self.live.read_backs.values()]
        if not in_force or any(document["generation"] != in_force[0]["generation"] for document in in_force):
            return None
        return plan_live.live_values(in_force[0])

    def picture_changed(self) -> None:
        self.changed.set()

    def status(self) -> Json:
        """Body of `/status`."""
        return status.render(self)


_PHASES: dict[Phase, rollout.Phase] = {
    Phase.STARTING: "Starting",
    Phase.READY: "Running",
    Phase.NOT_READY: "Running",
    Phase.FAILED: "Failed",
    Phase.DRAINING: "Draining",
    Phase.ENDED: "Draining",
}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


async def _either(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    event.clear()
