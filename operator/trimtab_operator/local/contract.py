"""The runtime contract of a whole local service: what the control port's routes do.

Called by `control`, acts on `service` and its `live_sync`. Says no where the person who owns the YAML file has said so: mode,
bounds, annotation. Every refusal is a ControlError with path, value and what is allowed, and changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from trimtab_operator.errors import InvalidResource
from trimtab_operator.local import rules
from trimtab_operator.local.control import ControlError
from trimtab_operator.local.engines import EngineUnreachable
from trimtab_operator.local.live import MAX_LEASE_S, GenerationConflict
from trimtab_operator.local.live_sync import CandidateRefused
from trimtab_operator.names import ANNOTATION_TUNING
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan import quiet_times

if TYPE_CHECKING:
    from trimtab_operator.local.service import LocalService

Json = dict[str, Any]
_SOURCES = ("Spec", "Recommendation")


class RuntimeContract:
    """See the module; implements `control.Controlled`."""

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self._live = service.live

    def status(self) -> Json:
        """Body of `/status`."""
        return self._service.status()

    def metrics_targets(self) -> list[str]:
        """URLs of the replicas' `/metrics`; leaving ones too, while they answer."""
        return [
            f"{r.addresses.url}/metrics" for r in self._service.replicas.values() if r.addresses is not None
        ]

    async def read_back(self) -> Json:
        """Body of `GET /admin/live-config`."""
        await self._live.converge()
        read_back = self._live.read_back()
        if read_back["ceilings"] is None:  # nobody to ask yet
            ceilings = self._service.resource.spec.engine.ceilings
            read_back["ceilings"] = asdict(ceilings)
        return read_back

    async def put_live(self, document: Json) -> tuple[int, Json]:
        """A candidate (with `lease_s`) or, from a tuner and without a lease, a recommendation."""
        generation, source, lease_s = _parse(document)
        if lease_s is None:
            if source == "Recommendation":
                return await self.recommend({"config": document.get("config")})
            raise ControlError(
                409,
                f"the service's own values are edited in {self._service.watch.path}; give lease_s for a candidate, or source Recommendation",
                "source",
                source,
                "Recommendation, or a lease_s",
            )
        self._tuning_allowed("Canary", "Apply")
        lease_s = min(lease_s, self._quiet_in_s())
        try:
            config = rules.candidate_config(self._service.resource, document.get("config"))
            old = self._live.read_back()["in_force"]
            before = self._live.live.candidate
            candidate = await self._live.try_candidate(generation, source, config, lease_s, self._canaries())
        except InvalidResource as error:
            raise _refused(error) from error
        except GenerationConflict as error:
            conflict = ControlError(
                409, str(error), "generation", generation, "null, or above highest_generation"
            )
            conflict.body["readback"] = self._live.read_back()
            raise conflict from error
        except CandidateRefused as error:
            failure = ControlError(503 if error.answer is None else 409, str(error))
            failure.body["readback"] = self._live.read_back()
            raise failure from error
        number = candidate.document.generation
        if before is None or before.document is not candidate.document:
            self._service.events.normal(
                "Candidate", f"generation {number} is on trial for {lease_s:g} s at a time"
            )
            self._service.picture_changed()
        read_back = self._live.read_back()
        body = {"old": old, "new": read_back["in_force"], "generation": number, "readback": read_back}
        return (200 if read_back["pending"] is None else 202), body

    async def end_candidate(self) -> tuple[int, Json]:
        """Back to the incumbent."""
        if await self._live.end_candidate():
            self._service.events.normal("CandidateEnded", "ended by request")
            self._service.picture_changed()
        read_back = self._live.read_back()
        return (200 if read_back["pending"] is None else 202), read_back

    async def recommend(self, document: Json) -> tuple[int, Json]:
        """Keep a recommendation; with mode Apply it becomes the incumbent."""
        self._tuning_allowed("Recommend", "Apply")
        config = document.get("config")
        if not isinstance(config, dict):
            raise ControlError(
                400, "config: a JSON object is needed", "config", config, "a live config, whole or in part"
            )
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        run = document.get("run")
        try:
            found = plan_live.recommend(
                self._service.resource.spec, config, run if isinstance(run, str) else None, now
            )
        except InvalidResource as error:
            raise _refused(error) from error
        old = self._live.read_back()["in_force"]
        quiet = self._service.quiet()
        waits = "" if quiet is None else f"; it waits: {quiet}"
        self._service.events.normal(
            "RecommendationReady",
            (", ".join(f"{k}: {v}" for k, v in found.values.items()) or "spec's own values") + waits,
        )
        if quiet is not None:
            self._service.hold_recommendation(found)
        else:
            self._service.hold_recommendation(None)  # a newer one is here
            self._service.keep_recommendation(found)
            self._service.decide_live()
        await self._live.converge()
        self._service.picture_changed()
        read_back = self._live.read_back()
        incumbent = read_back["incumbent"]
        body = {
            "old": old,
            "new": read_back["in_force"],
            "generation": incumbent["generation"],
            "promoted": quiet is None and incumbent["source"] == "Recommendation",
            "waits": quiet and str(quiet),
            "recommendation": found.to_json(),
            "readback": read_back,
        }
        return (200 if read_back["pending"] is None else 202), body

    async def withdraw_recommendation(self) -> tuple[int, Json]:
        """Back to the spec's values."""
        if self._service.recommendation is not None or self._service.waiting is not None:
            self._service.hold_recommendation(None)
            self._service.keep_recommendation(None)
            self._service.events.normal("RecommendationWithdrawn", "by request")
            self._service.decide_live()
            await self._live.converge()
            self._service.picture_changed()
        return 200, self._live.read_back()

    async def workload(self, since: str | None, limit: int) -> Json:
        """Merged records of all replicas, by arrival; the cursor holds one place per process."""
        cursors = _parse_cursor(since)
        replicas = [
            r for r in self._service.replicas.values() if r.addresses is not None and r.pid is not None
        ]
        share = max(1, limit // max(1, len(replicas)))
        records: list[Json] = []
        dropped = 0
        for replica in replicas:
            assert replica.addresses is not None
            key = f"{replica.name}/{replica.pid}"
            try:
                found = await self._service.engines.workload(
                    replica.addresses.admin_url, cursors.get(key, "0"), share
                )
            except EngineUnreachable:
                continue
            records += found["records"]
            cursors[key] = str(found["next"])
            dropped += int(found["dropped"])
        live = {f"{r.name}/{r.pid}" for r in replicas}
        following = ",".join(f"{key}:{place}" for key, place in sorted(cursors.items()) if key in live)
        records.sort(key=lambda record: record.get("arrival_s", 0.0))
        return {"records": records, "next": following, "dropped": dropped}

    def _tuning_allowed(self, *modes: str) -> None:
        why = rules.why_not(self._service.resource, *modes)
        annotation = self._service.resource.metadata.annotations.get(ANNOTATION_TUNING)
        if why is not None and annotation not in (None, "active"):
            raise ControlError(
                409, why, f"metadata.annotations[{ANNOTATION_TUNING}]", annotation, "active, or no annotation"
            )
        if why is not None:
            raise ControlError(
                409, why, "spec.tuning.mode", self._service.resource.spec.tuning.mode, " or ".join(modes)
            )

    def _quiet_in_s(self) -> float:
        """Seconds to the next quiet time, where no candidate may be; raises ControlError in one."""
        limits, now = self._service.resource.spec.tuning.limits, time.time()
        quiet = quiet_times.in_force(limits, now)
        if quiet is not None:
            raise ControlError(
                409,
                f"no candidate is tried now: {quiet}",
                "spec.tuning.limits.notDuring",
                [entry.schedule for entry in limits.not_during],
                "a candidate outside of these times",
            )
        begin = quiet_times.next_begin_s(limits, now)
        return float("inf") if begin is None else begin - now

    def _canaries(self) -> frozenset[str] | None:
        """Who tries a candidate: with mode Canary only as many as `limits.canaryPods`, the oldest first."""
        tuning = self._service.resource.spec.tuning
        if tuning.mode != "Canary":
            return None
        candidate = self._live.live.candidate
        if (
            candidate is not None
            and candidate.targets is not None
            and candidate.targets & set(self._service.replicas)
        ):
            return candidate.targets
        oldest = sorted(self._live.reachable(), key=lambda replica: replica.created_s)
        return frozenset(replica.name for replica in oldest[: tuning.limits.canary_pods])


def _parse(document: Json) -> tuple[int | None, str, float | None]:
    """(generation, source, lease) of a pushed document; raises ControlError with path, value and allowed range."""
    known = ("config", "generation", "lease_s", "source")
    for key in document:
        if key not in known:
            raise _bad(key, document[key], f"known fields are {', '.join(known)}")
    generation = document.get("generation")
    if generation is not None and (
        isinstance(generation, bool) or not isinstance(generation, int) or generation < 0
    ):
        raise _bad("generation", generation, "null, or an integer of at least 0")
    source = document.get("source", "Recommendation" if document.get("lease_s") is not None else "Spec")
    if source not in _SOURCES:
        raise _bad("source", source, f"one of {', '.join(_SOURCES)}")
    lease_s = document.get("lease_s")
    if lease_s is not None and (
        isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not 0 < lease_s <= MAX_LEASE_S
    ):
        raise _bad("lease_s", lease_s, f"null, or a number above 0 and up to {MAX_LEASE_S:g}")
    return generation, str(source), None if lease_s is None else float(lease_s)


def _parse_cursor(since: str | None) -> dict[str, str]:
    cursors: dict[str, str] = {}
    for part in (since or "").split(","):
        key, _, place = part.rpartition(":")
        if key and place.isascii() and place.isdigit():
            cursors[key] = place
        elif part not in ("", "0"):
            raise _bad("query.since", since, "0, or the `next` of an earlier answer")
    return cursors


def _bad(path: str, value: object, allowed: str) -> ControlError:
    return ControlError(400, f"{path}: {value!r} is not allowed; {allowed}", path, value, allowed)


def _refused(error: InvalidResource) -> ControlError:
    first = error.errors[0]
    return ControlError(400, "; ".join(map(str, error.errors)), first.path, first.value, first.allowed)
