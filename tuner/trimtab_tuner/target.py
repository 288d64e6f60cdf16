"""Client of the runtime contract: read the live config, put a candidate in force as a lease, end it, promote it.

Called by the evaluator and by `run`. Speaks to a bare engine's admin port and to an operator's control port alike; with
several replicas a change counts only when the read-back of every one of them says so. Errors are sorted by what a caller
can do about them. Never retries a change that was refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.errors import ConfigError
from trimtab_tuner.errors import ServerError

VERIFY_S = 15.0


class TargetUnreachable(ServerError):
    """Nobody answered, or not in time; trying again may help."""


class TargetUnauthorised(ServerError):
    """The token is missing, expired or lacks the scope."""


class TargetRefused(ServerError):
    """The config is not allowed there (400) or came too late (409); nothing was changed."""


class TargetNotApplied(ServerError):
    """The change was taken but the read-back of at least one replica does not show it."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A live config with its generation and who gave it (Spec | Recommendation)."""

    generation: int
    source: str
    config: LiveConfig


@dataclass(frozen=True, slots=True)
class Readback:
    """What is in force. `replicas` maps name → generation in force (one entry for a bare engine)."""

    incumbent: Versioned
    in_force: Versioned
    ceilings: Ceilings
    replicas: Mapping[str, int]
    boot_error: str | None = None

    def shows(self, generation: int) -> bool:
        """Every replica runs this generation."""
        return self.in_force.generation == generation and all(g == generation for g in self.replicas.values())


@dataclass(frozen=True, slots=True)
class Promotion:
    """`in_force` False: the operator keeps the recommendation but its mode does not apply it."""

    generation: int
    in_force: bool


class ServiceTarget(Protocol):
    """One service whose live config a run may change: by a control port (`Target`), or by a TuningRun's status in a cluster."""

    async def read(self) -> Readback:
        """The read-back now."""

    async def put_candidate(
        self, config: LiveConfig, *, lease_s: float, generation: int | None = None
    ) -> int:
        """Put a candidate in force for `lease_s` seconds, or renew it when `generation` is its number → generation.

        Raises TargetRefused when it is not allowed, TargetNotApplied when a replica does not show it in time.
        """

    async def end_candidate(self) -> None:
        """Back to the incumbent at once, seen in every replica. Idempotent."""

    async def promote(self, config: LiveConfig) -> Promotion:
        """Make `config` the incumbent."""


class Target:
    """One service. `client` carries no base URL; `token` is sent as a bearer token when given."""

    def __init__(self, client: httpx.AsyncClient, control_url: str, token: str | None = None) -> None:
        self._client = client
        self.url = control_url.rstrip("/").removesuffix("/admin")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def read(self) -> Readback:
        """The read-back now."""
        return readback(await self._call("GET", "/admin/live-config"))

    async def put_candidate(
        self, config: LiveConfig, *, lease_s: float, generation: int | None = None
    ) -> int:
        """Put a candidate in force for `lease_s` seconds, or renew it when `generation` is its number → generation.

        Raises TargetNotApplied when a replica does not show it in time.
        """
        body = {
            "generation": generation,
            "source": "Recommendation",
            "config": config.to_json(),
            "lease_s": lease_s,
        }
        answer = await self._call("PUT", "/admin/live-config", body)
        number = answer.get("generation")
        if not isinstance(number, int):
            raise ServerError(f"{self.url}: the answer to a live config has no generation: {answer!r:.200}")
        if generation is None:
            await self._verify(number)
        return number

    async def end_candidate(self) -> None:
        """Back to the incumbent at once, seen in every replica. Idempotent."""
        await self._call("DELETE", "/admin/live-config/candidate", missing_ok=True)
        await self._verify((await self.read()).incumbent.generation)

    async def promote(self, config: LiveConfig) -> Promotion:
        """Make `config` the incumbent: as a recommendation where an operator keeps those, else directly."""
        body = {"source": "Recommendation", "config": config.to_json()}
        answer = await self._call("PUT", "/admin/recommendation", body, missing_ok=True)
        if not answer:
            answer = await self._call("PUT", "/admin/live-config", {"generation": None, **body})
        number = answer.get("generation")
        if not isinstance(number, int):
            raise ServerError(
                f"{self.url}: the answer to a recommendation has no generation: {answer!r:.200}"
            )
        await self._verify(number)
        return Promotion(number, bool(answer.get("promoted", True)))

    async def status(self) -> Mapping[str, Any]:
        """The operator's view of the service; empty for a bare engine."""
        return await self._call("GET", "/status", missing_ok=True)

    async def metrics_targets(self) -> tuple[str, ...]:
        """URLs of every replica's `/metrics`; a bare engine has its own on the control port."""
        answer = await self._call("GET", "/metrics/targets", missing_ok=True)
        listed = answer.get("targets") if isinstance(answer, Mapping) else None
        if not listed:
            return (f"{self.url}/metrics",)
        return tuple(str(item["url"] if isinstance(item, Mapping) else item) for item in listed)

    async def _verify(self, generation: int) -> None:
        give_up = time.monotonic() + VERIFY_S
        while True:
            found = await self.read()
            if found.shows(generation):
                return
            if time.monotonic() > give_up:
                states = ", ".join(f"{name}: {g}" for name, g in found.replicas.items())
                raise TargetNotApplied(
                    f"{self.url}: generation {generation} is not in force after {VERIFY_S:g} s ({states})"
                )
            await asyncio.sleep(0.1)

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, missing_ok: bool = False
    ) -> dict[str, Any]:
        where = f"{method} {self.url}{path}"
        try:
            answer = await self._client.request(
                method, self.url + path, json=body, headers=self._headers, timeout=10.0
            )
        except httpx.HTTPError as error:
            raise TargetUnreachable(f"{where}: {type(error).__name__}: {error}") from None
        if answer.status_code in (404, 405) and missing_ok:
            return {}
        try:
            document = answer.json() if answer.content else {}
        except ValueError:
            document = None
        if answer.status_code in (401, 403):
            raise TargetUnauthorised(
                f"{where}: HTTP {answer.status_code}: {_message(document)}; see --token-file"
            )
        if answer.status_code in (400, 409, 422):
            raise TargetRefused(f"{where}: HTTP {answer.status_code}: {_message(document)}")
        if answer.status_code == 404:
            raise TargetUnreachable(
                f"{where}: not found; is this an operator's control port or an engine's admin port?"
            )
        if answer.status_code >= 300:
            raise TargetUnreachable(f"{where}: HTTP {answer.status_code}: {_message(document)}")
        if isinstance(document, list):
            return {"targets": document}
        if not isinstance(document, dict):
            raise ServerError(
                f"{where}: no JSON object came back; is this an admin port or an operator's control port?"
            )
        return document


def readback(document: Mapping[str, Any], path: str = "live-config") -> Readback:
    """Parse a read-back; raises ServerError naming what is missing or wrong."""
    try:
        raw = document["ceilings"]
        ceilings = Ceilings(int(raw["max_num_batched_tokens"]), int(raw["max_num_seqs"]))
        in_force = _versioned(document["in_force"], ceilings, f"{path}.in_force")
        replicas = {
            # A replica that has not been read yet shows nothing, so no change counts as applied there.
            str(item.get("name", index)): int(item["readback"]["in_force"]["generation"])
            if item["readback"]
            else -1
            for index, item in enumerate(document.get("replicas", ()))
        }
        return Readback(
            incumbent=_versioned(document["incumbent"], ceilings, f"{path}.incumbent"),
            in_force=in_force,
            ceilings=ceilings,
            replicas=replicas or {"engine": in_force.generation},
            boot_error=document.get("boot_error"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"{path}: this is no read-back: {type(error).__name__} {error}") from None
    except ConfigError as error:
        raise ServerError(f"{path}: {error}") from None


def _versioned(raw: Mapping[str, Any], ceilings: Ceilings, path: str) -> Versioned:
    config = LiveConfig.from_json(raw["config"], ceilings, f"{path}.config")
    return Versioned(int(raw["generation"]), str(raw["source"]), config)


def _message(document: object) -> str:
    if isinstance(document, Mapping):
        error = document.get("error", document.get("detail", document))
        if isinstance(error, Mapping):
            if error.get("path") is not None and error.get("allowed") is not None:
                return f"{error['path']}: {error.get('value')!r} is not allowed; {error['allowed']}"
            return str(error.get("message", dict(error)))
        return str(error)
    return "no reason given"
