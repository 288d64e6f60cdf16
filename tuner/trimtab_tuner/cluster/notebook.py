"""The worker's part of a TuningRun's status: candidate, trials, result. One writer, the whole of it each time.

Filled by `run_target` (candidate) and `work_view` (trials), sent by server-side apply under a manager of its own, so that what is
no longer said disappears. Texts are cut to what the resource holds. A worker that replaces another goes on with its trials.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.cluster.kube import RUN, Kube, NotFound, Refused, Unavailable
from trimtab_tuner.cluster.objects import FIELDS, Run, run_of
from trimtab_tuner.errors import ServerError

Json = dict[str, Any]
MAX_TRIAL_MESSAGE, MAX_RESULT_MESSAGE, MAX_DIAGNOSIS = 1024, 32_768, 64
REPLACED = "its worker was replaced"
_COUNT_LIMIT = 2**31 - 1


class RunEnded(ServerError):
    """There is nothing left to do for this run; not a failure of the worker's."""


class RunGone(RunEnded):
    """The TuningRun was deleted, or another one has its name."""


class RunOver(RunEnded):
    """The operator counts the run as ended: its time limit, or somebody wrote a result."""


@dataclass(slots=True)
class TrialRow:
    """One candidate tried. `state`: Running, Complete, Pruned (a guardrail ended it) or Failed (it says nothing)."""

    number: int
    config: Mapping[str, Any]  # by field name of spec.engine
    state: str = "Running"
    requests: int | None = None
    violated: int | None = None
    message: str = ""

    def to_json(self) -> Json:
        """As in status.trials."""
        row: Json = {"number": self.number, "state": self.state, "config": dict(self.config)}
        for name in ("requests", "violated"):
            if (count := getattr(self, name)) is not None:
                row[name] = min(int(count), _COUNT_LIMIT)
        if self.message:
            row["message"] = cut(self.message, MAX_TRIAL_MESSAGE)
        return row


@dataclass(slots=True)
class Notebook:
    """See the module. Change the fields, then `write`."""

    kube: Kube
    namespace: str
    name: str
    uid: str
    candidate: Json | None = None
    trials: list[TrialRow] = field(default_factory=list)
    result: Json | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @classmethod
    def resume(cls, kube: Kube, namespace: str, run: Run) -> Notebook:
        """With the trials of the workers before this one; what they left running has failed."""
        trials = []
        for raw in run.raw_trials:
            row = _row(raw)
            if row is None or not 0 <= row.number < run.max_trials:
                continue  # no worker wrote that; the next number after it would not be taken
            if row.state == "Running":
                # One that was measured before its confirmation began has its numbers.
                row.state = "Failed" if row.requests is None else "Complete"
                row.message = REPLACED
            trials.append(row)
        return cls(kube, namespace, run.name, run.uid, trials=sorted(trials, key=lambda row: row.number))

    def next_number(self) -> int:
        """Of a new trial."""
        return max((row.number for row in self.trials), default=-1) + 1

    def row_of(self, config: Mapping[str, Any]) -> TrialRow | None:
        """The newest trial of that config."""
        return next((row for row in reversed(self.trials) if row.config == config), None)

    async def write(self) -> Run:
        """Send everything once → the run as it then is. Raises RunGone, RunOver, or KubeError."""
        async with self._lock:
            status: Json = {"trials": [row.to_json() for row in self.trials]}
            if self.candidate is not None:
                status["candidate"] = dict(self.candidate)
            if self.result is not None:
                status["result"] = dict(self.result)
            try:
                return run_of(await self.kube.apply_status(RUN, self.namespace, self.name, self.uid, status))
            except NotFound:
                raise RunGone(f"TuningRun {self.name} was deleted") from None
            except Refused as refusal:
                if refusal.status == 409:  # never a conflict of fields: we apply by force
                    raise RunGone(f"TuningRun {self.name} is another one now: {refusal}") from None
                raise

    async def write_patiently(self, patience_s: float, pause_s: float = 1.0) -> Run:
        """As `write`, again and again while the API server is away."""
        give_up = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                return await self.write()
            except Unavailable:
                if asyncio.get_running_loop().time() >= give_up:
                    raise
                await asyncio.sleep(pause_s)


def by_field(config: LiveConfig) -> Json:
    """The knobs of a live config by field name of spec.engine, all of them: nothing is left to what others take for granted."""
    return {wire: getattr(config, name) for wire, name in FIELDS.items()}


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, with a mark where something is missing."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _row(raw: Mapping[str, Any]) -> TrialRow | None:
    number, config = raw.get("number"), raw.get("config")
    if not isinstance(number, int) or not isinstance(config, Mapping):
        return None
    counts = {name: value for name in ("requests", "violated") if isinstance(value := raw.get(name), int)}
    return TrialRow(
        number,
        dict(config),
        str(raw.get("state")),
        counts.get("requests"),
        counts.get("violated"),
        str(raw.get("message") or ""),
    )
