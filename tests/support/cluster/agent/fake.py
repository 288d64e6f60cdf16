"""A node whose pods are not started: this one process answers the runtime contract for all of them. For load tests.

    python -m support.cluster.agent.fake --name fake-a --index 1 --pki DIR --pods 2000

Every pod gets an address of its own; all of 10.245/16 is local here, so one listening socket a port serves all pods, and the
address that a client called says which one is meant. Pods are Ready at once; probes, volumes and hooks are not carried out, but the live
config file is read at start, as an engine does, and deletion takes a moment, not the grace. One fake node a cluster: it holds the ports.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import time
from pathlib import Path
from typing import Any

from support.cluster.agent import node
from support.cluster.agent.api import STRATEGIC_PATCH, Api, ApiError, Json
from support.cluster.agent.ending import finish
from support.cluster.agent.env import ConfigError as MissingConfig
from support.cluster.agent.env import Reader
from support.cluster.agent.fake_engine import FakeEngine
from support.cluster.agent.main import KUBELET_PORT
from support.cluster.agent.status import ContainerState, pod_conditions
from support.cluster.namespace import NODE_IP
from trimtab_engine.errors import ConfigError

SERVING_PORT, ADMIN_PORT = 8000, 8001
BLOCKS_PER_NODE = 16  # /24 blocks of 10.245/16
CONCURRENT = 16  # requests to the API server at a time

_log = logging.getLogger(__name__)


class FakePods:
    """All pods of one fake node, by uid; engines by address."""

    def __init__(self, api: Api, name: str, index: int) -> None:
        self._api = api
        self._name = name
        first = (index - 1) * BLOCKS_PER_NODE
        self._free = [
            f"10.245.{block}.{last}"
            for block in range(first, first + BLOCKS_PER_NODE)
            for last in range(2, 255)
        ]
        self._free.reverse()
        self._addresses: dict[str, str] = {}
        self._engines: dict[str, FakeEngine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(CONCURRENT)

    async def run(self) -> None:
        """Follow the API server."""
        selector = f"spec.nodeName={self._name}"
        async for kind, item in self._api.list_and_watch("/api/v1/pods", fieldSelector=selector):
            if kind == "SYNCED":
                present = {pod["metadata"]["uid"] for pod in item["items"]}
                for uid in set(self._addresses) - present:
                    self._forget(uid)
                for pod in item["items"]:
                    self._observe(pod)
            elif kind == "DELETED":
                self._forget(item["metadata"]["uid"])
            else:
                self._observe(item)

    def engine(self, address: str) -> FakeEngine | None:
        """The engine behind an address."""
        return self._engines.get(address)

    def _observe(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        leaving = "deletionTimestamp" in pod["metadata"]
        if uid in self._tasks or (uid in self._addresses and not leaving):
            return
        task = asyncio.create_task(self._end(pod) if leaving else self._start(pod))
        self._tasks[uid] = task
        task.add_done_callback(lambda ended: self._done(uid, ended))

    def _done(self, uid: str, task: asyncio.Task[None]) -> None:
        del self._tasks[uid]
        if not task.cancelled() and task.exception() is not None:
            _log.error("fake pod %s", uid, exc_info=task.exception())

    def _forget(self, uid: str) -> None:
        address = self._addresses.pop(uid, None)
        if address is not None:
            self._engines.pop(address, None)
            self._free.insert(0, address)

    async def _start(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        async with self._slots:
            container = pod["spec"]["containers"][0]
            state = ContainerState(container["name"], container["image"], process=f"fake://{uid}")
            address = self._addresses[uid] = self._free.pop()
            try:
                self._engines[address] = FakeEngine(container.get("args", []), await self._live_json(pod))
            except (ConfigError, MissingConfig) as error:
                state.waiting = {"reason": "CrashLoopBackOff", "message": str(error)}
                state.last = {"exitCode": 2, "reason": "Error", "message": str(error)}
                state.restarts = 1
            else:
                state.waiting, state.running = None, {"startedAt": node.now()}
                state.ready = state.started = True
            await self._report(pod, address, state)
        if "deletionTimestamp" in (await self._newest(pod))["metadata"]:
            await self._end(pod)  # its deletion came while it was being started

    async def _newest(self, pod: Json) -> Json:
        try:
            return await self._api.get(_path(pod))
        except ApiError:
            return pod

    async def _live_json(self, pod: Json) -> bytes | None:
        """`live.json` in a ConfigMap of the pod's."""
        reader = Reader(self._api, pod["metadata"]["namespace"])
        for volume in pod["spec"].get("volumes", []):
            if "configMap" in volume:
                data = await reader.data("configmaps", volume["configMap"]["name"]) or {}
                if "live.json" in data:
                    return data["live.json"]
        return None

    async def _report(self, pod: Json, address: str, state: ContainerState) -> None:
        moment = node.now()
        status: Json = {
            "phase": "Running",
            "startTime": moment,
            "hostIP": NODE_IP,
            "hostIPs": [{"ip": NODE_IP}],
            "podIP": address,
            "podIPs": [{"ip": address}],
            "containerStatuses": [state.to_json()],
            "conditions": pod_conditions(
                pod["spec"],
                pod.get("status", {}).get("conditions", []),
                sandbox=True,
                initialized=True,
                main=[state],
                current_phase="Running",
                moment=moment,
            ),
        }
        while True:
            try:
                body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
                await self._api.patch(f"{_path(pod)}/status", body, STRATEGIC_PATCH)
                return
            except ApiError as error:
                if error.status in (404, 409, 422):
                    return
                _log.warning("status of %s: %s", pod["metadata"]["name"], error)
                await asyncio.sleep(1.0)

    async def _end(self, pod: Json) -> None:
        async with self._slots:
            engine = self._engines.get(self._addresses.get(pod["metadata"]["uid"], ""))
            if engine is not None:
                engine.leaving = True
            await finish(self._api, pod, {"phase": "Succeeded"})


def _path(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


async def answer(pods: FakePods, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """HTTP/1.1 on one connection, until the client is done."""
    address = writer.get_extra_info("sockname")[0]
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ", 2)
            headers = {
                key.lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:])
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            engine = pods.engine(address)
            if engine is None:
                break  # no such pod: as a closed port
            status, content = engine.answer(method, path, body, time.monotonic())
            writer.write(_encode(status, content))
            await writer.drain()
            if headers.get("connection", "").lower() == "close":
                break
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _encode(status: int, content: Any) -> bytes:
    kind = "text/plain; version=0.0.4" if isinstance(content, str) else "application/json"
    data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--index", type=int, required=True, help="1 … 16: which addresses it has")
    parser.add_argument("--server", default="https://127.0.0.1:6443")
    parser.add_argument("--pki", type=Path, required=True)
    parser.add_argument("--version", default="v1.37.2")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--pods", type=int, default=2000)
    options, _ = parser.parse_known_args()  # folders of a real node are of no use here
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(run(options))


async def run(options: argparse.Namespace) -> None:
    """Be a node until a signal comes."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    api = Api(options.server, options.pki)
    pods = FakePods(api, options.name, options.index)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(pods, reader, writer)

    servers = [
        await asyncio.start_server(handle, "0.0.0.0", port, backlog=1024)
        for port in (SERVING_PORT, ADMIN_PORT)
    ]
    shape = node.NodeShape(
        name=options.name,
        address=NODE_IP,
        kubelet_port=KUBELET_PORT + 1000 + options.index,
        gpus=options.gpus,
        cpu="100000",
        memory="100Ti",
        pods=options.pods,
        version=options.version,
    )
    await node.register(api, shape)
    tasks = [asyncio.create_task(node.keep_alive(api, shape)), asyncio.create_task(pods.run())]
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for server in servers:
        server.close()
    await api.close()


if __name__ == "__main__":
    main()
