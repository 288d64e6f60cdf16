"""Runs the pods that are bound to this node: watches, starts, hands on, forgets."""

from __future__ import annotations

import asyncio
import logging

from support.cluster.agent.api import Api, Json
from support.cluster.agent.ending import finish
from support.cluster.agent.pod import Node, Pod

_log = logging.getLogger(__name__)


class Pods:
    """All pods of one node. `run` for ever; `close` kills them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._pods: dict[str, Pod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: set[asyncio.Task[None]] = set()

    def find(self, namespace: str, name: str) -> Pod | None:
        """The pod of that name, for logs."""
        return next((pod for pod in self._pods.values() if pod.name == f"{namespace}/{name}"), None)

    async def run(self, api: Api) -> None:
        """Follow the API server."""
        selector = f"spec.nodeName={self._node.name}"
        async for kind, item in api.list_and_watch("/api/v1/pods", fieldSelector=selector):
            if kind == "SYNCED":
                items = item["items"]
                present = {pod["metadata"]["uid"] for pod in items}
                for uid in set(self._pods) - present:
                    self._pods[uid].gone()
                for pod in items:
                    self._observe(pod)
            elif kind == "DELETED":
                known = self._pods.get(item["metadata"]["uid"])
                if known is not None:
                    known.gone()
            else:
                self._observe(item)

    async def close(self) -> None:
        """Kill all pods and wait until nothing is left of them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _observe(self, item: Json) -> None:
        uid = item["metadata"]["uid"]
        if uid in self._pods:
            self._pods[uid].update(item)
        elif item.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            # Ended under an earlier agent: nothing runs, so a deletion only needs to be confirmed.
            if "deletionTimestamp" in item["metadata"]:
                task = asyncio.create_task(finish(self._node.api, item, {"phase": item["status"]["phase"]}))
                self._ends.add(task)
                task.add_done_callback(self._ends.discard)
        else:
            pod = self._pods[uid] = Pod(self._node, item)
            task = self._tasks[uid] = asyncio.create_task(pod.run())
            task.add_done_callback(lambda ended: self._forget(uid, ended))

    def _forget(self, uid: str, task: asyncio.Task[None]) -> None:
        pod = self._pods.pop(uid)
        del self._tasks[uid]
        if not task.cancelled() and task.exception() is not None:
            _log.error("pod %s: the agent failed", pod.name, exc_info=task.exception())
