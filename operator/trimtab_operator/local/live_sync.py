"""Keeps every replica's live config at what the service wants: the local counterpart of ConfigMap, push and read-back.

Owned by `service`, which says what the spec and the recommendation come to; also does the live half of the control port.
Level-based: what is wanted is compared with what an engine reads back, and the difference is pushed, however it came
about. `live.json` is written before any push, so a replica that starts meanwhile comes up right.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from trimtab_operator.local.engines import EngineRefused, Engines, EngineUnreachable
from trimtab_operator.local.events import EventLog
from trimtab_operator.local.live import MAX_LEASE_S, Candidate, Document, ServiceLive
from trimtab_operator.local.replica import Phase, Replica
from trimtab_operator.local.state_dir import StateDir

Json = dict[str, Any]
_RENEWAL_SLACK_S = 0.5  # a lease this much shorter than wanted is pushed again


class CandidateRefused(Exception):
    """No replica, or not every one, took the candidate; it was ended everywhere. `answer` is the engine's, if any."""

    def __init__(self, message: str, answer: Json | None = None) -> None:
        super().__init__(message)
        self.answer = answer


class LiveSync:
    """See the module. `replicas` lists those there are now."""

    def __init__(
        self, state: StateDir, engines: Engines, events: EventLog, replicas: Callable[[], Iterable[Replica]]
    ) -> None:
        self._state = state
        self._engines = engines
        self._events = events
        self._replicas = replicas
        self._lock = asyncio.Lock()  # one change of what is wanted at a time, with its pushes
        self.read_backs: dict[str, Json] = {}  # by replica, the latest
        self.current_template = ""  # of the spec now; replicas of older ones are on their way out
        self.rejections: dict[str, str] = {}  # by replica: why it does not take what is wanted
        document = state.load_live()
        incumbent = None
        if {"generation", "source", "config"} <= set(document):
            incumbent = Document(int(document["generation"]), str(document["source"]), document["config"])
        self.live = ServiceLive(incumbent, int(state.load_state().get("highest_generation", 0)))

    def reachable(self) -> list[Replica]:
        """Replicas whose admin port answers, or should."""
        return [r for r in self._replicas() if r.reachable]

    # What is wanted

    def want(self, config: Json, source: str) -> bool:
        """Set the incumbent and write it down; the next `converge` pushes it. True when it is new."""
        changed = self.live.want(config, source)
        if changed or not self._state.live_file.exists():
            self._save()
        return changed

    async def try_candidate(
        self,
        generation: int | None,
        source: str,
        config: Json,
        lease_s: float,
        targets: frozenset[str] | None,
    ) -> Candidate:
        """Begin or renew a candidate on all targets. Raises GenerationConflict (live) or CandidateRefused."""
        async with self._lock:
            candidate = self.live.offer(generation, source, config, lease_s, time.time(), targets)
            self._save()
            replicas = [r for r in self.reachable() if targets is None or r.name in targets]
            if not replicas:
                self.live.end_candidate()
                raise CandidateRefused("no replica is ready to take a candidate; retry")
            try:
                await asyncio.gather(*(self._converge(replica) for replica in replicas))
            except (EngineRefused, EngineUnreachable) as error:
                self.live.end_candidate()
                await self._converge_all()
                raise CandidateRefused(str(error), getattr(error, "body", None)) from error
            return candidate

    async def end_candidate(self) -> bool:
        """Back to the incumbent everywhere; True when there was a candidate."""
        async with self._lock:
            had_one = self.live.end_candidate()
            await self._converge_all()
            return had_one

    def _save(self) -> None:
        state = self._state.load_state()
        if state.get("highest_generation") != self.live.highest:
            self._state.save_state({**state, "highest_generation": self.live.highest})
        if self.live.incumbent is not None and self._state.load_live() != self.live.incumbent.to_json():
            self._state.save_live(self.live.incumbent.to_json())

    # What is

    async def converge(self) -> None:
        """Compare and push once, on all reachable replicas."""
        async with self._lock:
            self.live.expire(time.time())
            await self._converge_all()

    async def _converge_all(self) -> None:
        replicas = self.reachable()
        names = {replica.name for replica in replicas}
        for gone in set(self.read_backs) - names:
            del self.read_backs[gone]
            self.rejections.pop(gone, None)
        results = await asyncio.gather(
            *(self._converge(replica) for replica in replicas), return_exceptions=True
        )
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, EngineRefused):
                if replica.template_hash != self.current_template:
                    continue  # sized for the spec before the edit, and on its way out
                self._reject(replica, str(result))
            elif isinstance(result, EngineUnreachable):
                continue  # its probes judge that
            elif isinstance(result, BaseException):
                raise result
            else:
                self.rejections.pop(replica.name, None)

    async def _converge(self, replica: Replica) -> None:
        assert replica.addresses is not None
        admin_url = replica.addresses.admin_url
        read_back = await self._engines.read_back(admin_url)
        self.read_backs[replica.name] = read_back
        wanted = self.live.desired(replica.name)
        if wanted is None:
            return
        candidate = self.live.candidate
        on_trial = candidate is not None and candidate.document is wanted
        in_force = read_back["in_force"]
        if in_force["generation"] == wanted.generation:
            if in_force["config"] != wanted.config:
                await self._renumber(
                    replica, f"generation {wanted.generation} is known there with other content"
                )
                return
            until = (read_back.get("candidate") or {}).get("until", 0.0)
            if not on_trial or candidate is None or until >= candidate.until_s - _RENEWAL_SLACK_S:
                return
        if on_trial and candidate is not None:
            left_s = min(MAX_LEASE_S, candidate.until_s - time.time())
            if left_s <= 0:
                return
            answer = await self._engines.push(admin_url, {**wanted.to_json(), "lease_s": round(left_s, 3)})
        elif read_back.get("candidate") and read_back["incumbent"]["generation"] == wanted.generation:
            await self._engines.end_candidate(admin_url)
            answer = {}
        elif (
            read_back["highest_generation"] >= wanted.generation
            and read_back["incumbent"]["generation"] != wanted.generation
        ):
            await self._renumber(replica, f"it has seen generation {read_back['highest_generation']}")
            return
        else:
            answer = await self._engines.push(admin_url, wanted.to_json())
        self.read_backs[replica.name] = answer.get("readback") or await self._engines.read_back(admin_url)

    async def _renumber(self, replica: Replica, why: str) -> None:
        """Somebody else wrote to an engine. The operator is its only writer: go above that, everywhere."""
        highest = int(self.read_backs[replica.name]["highest_generation"])
        self.live.highest = max(self.live.highest, highest)
        self.live.renumber()
        self._save()
        assert self.live.incumbent is not None
        self._events.warning(
            "ConfigDrift",
            f"{replica.name}: {why}; the live config goes out again as generation {self.live.highest}",
        )

    def _reject(self, replica: Replica, why: str) -> None:
        if self.rejections.get(replica.name) != why:
            self.rejections[replica.name] = why
            self._events.warning("ConfigRejected", f"{replica.name}: {why}")

    def generation_in_force(self, replica: str) -> int | None:
        """By the latest read-back."""
        read_back = self.read_backs.get(replica)
        return int(read_back["in_force"]["generation"]) if read_back else None

    def applied(self) -> tuple[int, int]:
        """(replicas that have their own desired config in force, replicas there are)."""
        replicas = [r for r in self._replicas() if r.phase not in (Phase.DRAINING, Phase.ENDED)]
        right = 0
        for replica in replicas:
            wanted = self.live.desired(replica.name)
            right += wanted is not None and self.generation_in_force(replica.name) == wanted.generation
        return right, len(replicas)

    def read_back(self) -> Json:
        """The service's own read-back: an engine's fields, and each replica's below."""
        self.live.expire(time.time())
        replicas = [
            {
                "name": replica.name,
                "url": replica.addresses.url,
                "admin_url": replica.addresses.admin_url,
                "readback": self.read_backs.get(replica.name),
            }
            for replica in self.reachable()
            if replica.addresses is not None
        ]
        known = [entry["readback"] for entry in replicas if isinstance(entry["readback"], dict)]
        incumbent = self.live.incumbent.to_json() if self.live.incumbent is not None else None
        candidate = None
        if self.live.candidate is not None:
            candidate = {**self.live.candidate.document.to_json(), "until": self.live.candidate.until_s}
        wanted = self.live.candidate.document.to_json() if self.live.candidate is not None else incumbent
        behind = [
            name
            for name in (str(entry["name"]) for entry in replicas)
            if (desired := self.live.desired(name)) is not None
            and self.generation_in_force(name) != desired.generation
        ]
        right, total = self.applied()
        in_force = wanted
        if behind and (late := self.read_backs.get(behind[0])) is not None:
            in_force = late["in_force"]  # not everywhere yet: what still acts somewhere
        return {
            "incumbent": incumbent,
            "candidate": candidate,
            "in_force": in_force,
            "pending": wanted if behind else None,
            "ceilings": known[0]["ceilings"] if known else None,
            "boot_error": next((e["boot_error"] for e in known if e.get("boot_error")), None),
            "highest_generation": self.live.highest,
            "process_start": max((e["process_start"] for e in known), default=None),
            "replicas": replicas,
            "applied": f"{right}/{total}",
        }
