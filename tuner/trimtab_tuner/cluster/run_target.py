"""A service in a cluster as a `ServiceTarget`: candidates go through the run's status, the operator puts them in force.

Called by the evaluators through `lease.Lease`. What counts is what the operator says it read back from engines
(status.applied). The worker reaches no engine itself, so its death leaves nothing behind: the operator's leases end, and so do
the engines'. While the API server is away everything waits, but for a renewal: that one may not be late.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from trimtab_engine.core.live import LiveConfig
from trimtab_engine.errors import ConfigError
from trimtab_tuner.cluster.kube import CONFIG_MAP, RUN, SERVICE, Kube, NotFound, Unavailable
from trimtab_tuner.cluster.notebook import Notebook, RunGone, RunOver, by_field
from trimtab_tuner.cluster.objects import Run, Service, halt, rfc3339, run_of, service_of
from trimtab_tuner.errors import ServerError
from trimtab_tuner.guardrails import TRYING_MODES
from trimtab_tuner.target import (
    Promotion,
    Readback,
    TargetNotApplied,
    TargetRefused,
    TargetUnreachable,
    Versioned,
)

POLL_S = 0.3
AWAY_S = 600.0  # how long the API server may be away before a run gives up
APPLY_S = 120.0  # how long the operator may take to put a candidate in force, or to take it back
FRESH_S = 3.0  # how old an answer about permission may be
REFUSED = "CandidateRefused"
Answer = TypeVar("Answer")


class ServiceGone(ServerError):
    """The service that the run tunes is not there (any more)."""


class RunTarget:
    """See the module."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        service: Service,
        notebook: Notebook,
        modes: tuple[str, ...] = TRYING_MODES,
    ) -> None:
        """`modes`: those of the service in which a candidate may be in force."""
        self._kube = kube
        self._modes = modes
        self._namespace = namespace
        self._service = service
        self._notebook = notebook
        self._generation: int | None = None  # of the candidate that was last in force, until it is gone
        self._asked_s = float("-inf")
        self._forbidden: str | None = None
        self.waited_s = 0.0  # while the operator said that a candidate has to wait
        self.halted = False  # what forbids a candidate is a halt, which ends
        self.trial: int | None = None  # number of the trial that the next candidate belongs to
        self.start: LiveConfig | None = None  # the incumbent that the run rests on

    # What is in force

    async def read(self) -> Readback:
        """The incumbent, from the service's live ConfigMap."""
        return await self._patiently(self._read)

    async def _read(self) -> Readback:
        name = f"{self._service.name}-live"
        where = f"ConfigMap {name}: live.json"
        try:
            raw = await self._kube.get(CONFIG_MAP, self._namespace, name)
            document = json.loads(raw["data"]["live.json"])
            config = LiveConfig.from_json(document["config"], self._service.ceilings, f"{where}: config")
            incumbent = Versioned(int(document["generation"]), str(document["source"]), config)
        except NotFound:
            raise ServiceGone(f"ConfigMap {name} is not there: the service has no live config") from None
        except ConfigError as error:
            raise ServerError(str(error)) from None
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{where}: {type(error).__name__} {error}") from None
        if self.start is None:
            self.start = config
        return Readback(incumbent, incumbent, self._service.ceilings, {})

    async def run(self) -> Run:
        """The run as it is now. Raises RunGone and RunOver."""
        try:
            found = run_of(await self._kube.get(RUN, self._namespace, self._notebook.name))
        except NotFound:
            raise RunGone(f"TuningRun {self._notebook.name} was deleted") from None
        return self._alive(found)

    def _alive(self, found: Run) -> Run:
        if found.uid != self._notebook.uid or found.deleting:
            raise RunGone(f"TuningRun {found.name} was deleted")
        if found.over and self._notebook.result is None:
            ready = found.condition("Ready")
            raise RunOver(f"the run is {found.phase}: {ready.message or ready.reason}")
        return found

    async def service(self) -> Service:
        """The service as it is now. Raises ServiceGone."""
        try:
            raw = await self._kube.get(SERVICE, self._namespace, self._service.name)
        except NotFound:
            raise ServiceGone(f"InferenceService {self._service.name} was deleted") from None
        return service_of(raw)

    async def forbidden(self, max_age_s: float = FRESH_S) -> str | None:
        """Why no candidate may be in force now, or None. Asked often; while the API server is away its last answer stands."""
        if time.monotonic() - self._asked_s > max_age_s:
            self._asked_s = time.monotonic()
            try:
                service, now = await self.service(), (await self._read()).incumbent.config
                halted = halt(service, await self.run())
            except Unavailable:
                return self._forbidden
            self.halted = halted is not None
            self._forbidden = halted or self._why_not(service, now)
        return self._forbidden

    def _why_not(self, service: Service, now: LiveConfig) -> str | None:
        if service.mode not in self._modes:
            return f"spec.tuning.mode is {service.mode}; trying candidates needs {' or '.join(self._modes)}"
        if now != self.start:
            return "the incumbent was changed meanwhile, so what was measured says nothing about it"
        return None

    # Candidates

    async def put_candidate(
        self, config: LiveConfig, *, lease_s: float, generation: int | None = None
    ) -> int:
        """See `ServiceTarget`. Waits as long as the operator says that the candidate has to wait (for its turn, say)."""
        if generation is not None:
            return await self._renew(config, lease_s, generation)
        await self._settled()
        found = await self._offer(config, lease_s)
        give_up = time.monotonic() + APPLY_S
        offered_s = time.monotonic()
        while True:
            applied = found.applied
            if applied is not None and applied.generation != self._generation and applied.everywhere:
                self._generation = applied.generation
                return applied.generation
            stalled = found.condition("Stalled")
            if stalled.status == "True":
                await self._withdraw()
                raise TargetRefused(
                    f"the operator refuses the candidate: {stalled.message or stalled.reason}"
                )
            asked_s = time.monotonic()
            if waits := self._waits(found):
                give_up = asked_s + APPLY_S
            if time.monotonic() >= give_up:
                await self._withdraw()
                state = "nothing" if applied is None else f"{applied.pods} of {applied.of} pods"
                raise TargetNotApplied(f"the candidate is not in force after {APPLY_S:g} s: status.applied has {state}")  # fmt: skip
            await asyncio.sleep(POLL_S)
            if time.monotonic() - offered_s > lease_s / 3:
                offered_s = time.monotonic()
                found = await self._offer(config, lease_s)
            else:
                found = await self._patiently(self.run)
            self.waited_s += time.monotonic() - asked_s if waits else 0.0

    async def end_candidate(self) -> None:
        """Back to the incumbent, as the operator says. Idempotent."""
        await self._withdraw()
        give_up = time.monotonic() + APPLY_S
        while (await self._patiently(self.run)).applied is not None:
            if time.monotonic() >= give_up:
                raise TargetNotApplied(f"the candidate is still in force {APPLY_S:g} s after it was ended")
            await asyncio.sleep(POLL_S)
        self._generation = None

    async def promote(self, config: LiveConfig) -> Promotion:
        """Never done here: the operator promotes what the run's result says, and that is written when the run is over."""
        raise TargetRefused("a worker promotes by the result of its run")

    async def _renew(self, config: LiveConfig, lease_s: float, generation: int) -> int:
        self._notebook.candidate = self._candidate(config, lease_s)
        try:
            found = self._alive(await self._notebook.write())
        except Unavailable as error:
            raise TargetUnreachable(str(error)) from None
        if found.applied is None or found.applied.generation != generation:
            ready = found.condition("Ready")
            raise TargetRefused(
                f"the candidate is no longer in force ({ready.reason}: {ready.message or 'no word'})"
            )
        return generation

    async def _offer(self, config: LiveConfig, lease_s: float) -> Run:
        async def once() -> Run:
            self._notebook.candidate = self._candidate(config, lease_s)  # its time counts from now
            return self._alive(await self._notebook.write())

        return await self._patiently(once)

    def _candidate(self, config: LiveConfig, lease_s: float) -> dict[str, Any]:
        candidate: dict[str, Any] = {"config": by_field(config), "until": rfc3339(time.time() + lease_s)}
        return candidate if self.trial is None else {"trial": self.trial, **candidate}

    async def _withdraw(self) -> None:
        self._asked_s = float("-inf")  # who wants to know why it ended gets no answer from before
        if self._notebook.candidate is not None:
            self._notebook.candidate = None
            await self._notebook.write_patiently(AWAY_S)

    async def _settled(self) -> None:
        """Until no refusal of an earlier candidate stands: the next one would be taken for refused."""
        give_up = time.monotonic() + APPLY_S
        while (found := await self._patiently(self.run)).condition("Stalled").status == "True":
            if self._notebook.candidate is not None:
                await self._withdraw()
            stalled = found.condition("Stalled")
            if stalled.reason != REFUSED or time.monotonic() >= give_up:
                raise TargetRefused(f"{stalled.reason}: {stalled.message}")
            await asyncio.sleep(POLL_S)

    @staticmethod
    def _waits(found: Run) -> bool:
        """Whether the operator says that the candidate has to wait. Its phase alone is no reason."""
        ready = found.condition("Ready")
        return ready.status == "False" and ready.reason not in ("", "Pending", "Running")

    async def _patiently(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """`ask`, again and again while the API server is away."""
        give_up = time.monotonic() + AWAY_S
        while True:
            try:
                return await ask()
            except Unavailable:
                if time.monotonic() >= give_up:
                    raise
                await asyncio.sleep(1.0)
