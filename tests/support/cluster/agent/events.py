"""Events of pods, as `kubectl describe` and `kubectl get events` show them. Best effort: a lost one is only logged."""

from __future__ import annotations

import asyncio
import logging
import time

from support.cluster.agent.api import Api, ApiError, Json
from support.cluster.agent.node import now

_REPEAT_S = 10.0  # an equal event is written at most so often

_log = logging.getLogger(__name__)


class Events:
    """Writes events about one pod in the background."""

    def __init__(self, api: Api, node: str, pod: Json) -> None:
        self._api = api
        self._node = node
        self._pod = pod["metadata"]
        self._last: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def record(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Write it, unless the same was written just now."""
        moment_s = time.monotonic()
        if moment_s - self._last.get((reason, message), -_REPEAT_S) < _REPEAT_S:
            return
        self._last[reason, message] = moment_s
        moment = now()
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{self._pod['name']}.", "namespace": self._pod["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                **{key: self._pod[key] for key in ("name", "namespace", "uid")},
            },
            "reason": reason,
            "message": message[:1024],
            "type": "Warning" if warning else "Normal",
            "source": {"component": "kubelet", "host": self._node},
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        task = asyncio.create_task(self._write(event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, event: Json) -> None:
        try:
            await self._api.post(f"/api/v1/namespaces/{self._pod['namespace']}/events", event)
        except ApiError as error:
            _log.info("event not written: %s", error)
