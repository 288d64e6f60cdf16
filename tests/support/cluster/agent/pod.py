"""The life of one pod on this node, from being bound to being deleted.

`pods` makes one per pod, feeds it newer objects and awaits `run`. Order: devices, network, volumes, init containers (sidecars among
them go on running), main containers; on deletion main containers end first, then sidecars in reverse.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.cluster.agent import network, process
from support.cluster.agent.api import STRATEGIC_PATCH, Api, ApiError, Json
from support.cluster.agent.container import Container, Surroundings, stop_all
from support.cluster.agent.devices import Devices, NotEnoughDevices
from support.cluster.agent.ending import finish
from support.cluster.agent.env import ConfigError, Reader, environment, expand, quantity
from support.cluster.agent.events import Events
from support.cluster.agent.images import PATH, Image, find
from support.cluster.agent.network import Addresses, PodNetwork
from support.cluster.agent.node import GPU_RESOURCE, now
from support.cluster.agent.process import ContainerProcess, Mount
from support.cluster.agent.security import user
from support.cluster.agent.status import Policy, phase, pod_conditions
from support.cluster.agent.volumes import Volumes

_RETRY_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """What all pods of one node share."""

    name: str
    address: str
    api: Api
    images: Mapping[str, Image]
    content: Sequence[str]  # folders that every image holds
    devices: Devices
    addresses: Addresses
    folder: Path  # pods' file systems, on a tmpfs
    logs: Path
    backoff_s: float
    volume_sync_s: float


class Pod:
    """One pod. `run` once; `update` and `gone` from the watch."""

    def __init__(self, node: Node, pod: Json) -> None:
        self._node = node
        self._pod = pod
        self._spec: Json = pod["spec"]
        self.uid: str = pod["metadata"]["uid"]
        self._folder = node.folder / self.uid
        self._events = Events(node.api, node.name, pod)
        self._dirty = asyncio.Event()
        self._leaving = asyncio.Event()
        self._deadline = float("inf")
        self._is_gone = False
        self._network: PodNetwork | None = None
        self._volumes: Volumes | None = None
        self._gpus: list[int] = []
        self._initialized = False
        self._refused: Json | None = None  # phase Failed for a reason of the pod, not of a container
        self._started_at = pod.get("status", {}).get("startTime") or now()
        before = {
            c["name"]: c["restartCount"] + 1
            for key in ("containerStatuses", "initContainerStatuses")
            for c in pod.get("status", {}).get(key, [])
            if "running" in c["state"]
        }
        around = Surroundings(
            ip="",
            logs=node.logs / f"{pod['metadata']['namespace']}_{pod['metadata']['name']}_{self.uid}",
            start=self._start_container,
            changed=self._dirty.set,
            events=self._events,
            backoff_s=node.backoff_s,
            grace_s=float(self._spec.get("terminationGracePeriodSeconds", 30)),
        )
        self._around = around
        self._restarts = before
        self._init: list[Container] = []
        self._main: list[Container] = []
        self._make_containers(around)
        self.update(pod)

    def _make_containers(self, around: Surroundings) -> None:
        policy: Policy = self._spec.get("restartPolicy", "Always")
        init_policy: Policy = "Never" if policy == "Never" else "OnFailure"
        self._init = [
            Container(
                c, "Always" if _is_sidecar(c) else init_policy, around, self._restarts.get(c["name"], 0)
            )
            for c in self._spec.get("initContainers", [])
        ]
        self._main = [
            Container(c, policy, around, self._restarts.get(c["name"], 0)) for c in self._spec["containers"]
        ]

    @property
    def name(self) -> str:
        """namespace/name."""
        return f"{self._pod['metadata']['namespace']}/{self._pod['metadata']['name']}"

    def container(self, name: str) -> Container | None:
        """For logs."""
        return next((c for c in (*self._init, *self._main) if c.state.name == name), None)

    def update(self, pod: Json) -> None:
        """A newer object from the API server; it may say that the pod is being deleted, or sooner than it did."""
        self._pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
            self._deadline = min(self._deadline, time.monotonic() + grace_s)
            self._leaving.set()
        self._dirty.set()

    def gone(self) -> None:
        """The object is no longer there: end at once, and report nothing."""
        self._is_gone = True
        self._deadline = 0.0
        self._leaving.set()

    async def run(self) -> None:
        """From start to the last report. Cancelling it kills everything at once."""
        reporting = asyncio.create_task(self._report())
        try:
            try:
                self._gpus = self._node.devices.take(self.uid, self._wanted_gpus())
            except NotEnoughDevices as error:
                self._refuse("UnexpectedAdmissionError", f"Allocate failed due to {error}")
                await self._leaving.wait()
            else:
                await self._live()
        finally:
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting
            await self._clean_up()
        if not self._is_gone:
            await self._finish()

    async def _live(self) -> None:
        """Until all containers have ended for good and the pod is deleted."""
        living = asyncio.create_task(self._start_and_wait())
        leaving = asyncio.create_task(self._leaving.wait())
        refreshing = asyncio.create_task(self._refresh_volumes())
        try:
            await asyncio.wait((living, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not self._leaving.is_set():
                living.result()  # a failure of the agent's own must not look like a finished pod
                self._release()
                await self._leaving.wait()
            sidecars = [c for c in self._init if _is_sidecar(c.spec)]
            others = [c for c in self._init if not _is_sidecar(c.spec)]
            await stop_all([*others, *self._main], lambda: self._deadline)
            for sidecar in reversed(sidecars):
                await sidecar.stop(lambda: self._deadline)
            await living
        finally:
            for task in (living, leaving, refreshing):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _release(self) -> None:
        """A pod that has ended holds no GPU, though its object is still there."""
        self._node.devices.give_back(self.uid)

    async def _start_and_wait(self) -> None:
        if not await self._prepare():
            return
        running: list[asyncio.Task[None]] = []
        try:
            for container in self._init:
                if self._leaving.is_set():
                    return
                task = asyncio.create_task(container.run())
                running.append(task)
                if _is_sidecar(container.spec):
                    await self._either(container.started.wait())
                else:
                    await task
                    if not container.state.succeeded:
                        return  # restartPolicy Never, or the pod is leaving
            self._initialized = True
            self._dirty.set()
            main = [asyncio.create_task(c.run()) for c in self._main]
            running += main
            await asyncio.gather(*main)
            for sidecar in [c for c in reversed(self._init) if _is_sidecar(c.spec)]:
                await sidecar.stop(lambda: time.monotonic() + self._around.grace_s)
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _either(self, wanted: Coroutine[None, None, object]) -> None:
        """Wait for `wanted`, or until the pod is to leave."""
        tasks = [asyncio.create_task(wanted), asyncio.create_task(self._leaving.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def _prepare(self) -> bool:
        """Network and volumes; False when the pod leaves before they are there."""
        self._network = await network.create(self._node.addresses.take())
        self._volumes = Volumes(
            self._node.api,
            self._pod,
            self._folder / "volumes",
            self._network.ip,
            self._node.address,
        )
        around = Surroundings(
            **{**{f: getattr(self._around, f) for f in Surroundings.__slots__}, "ip": self._network.ip}
        )
        self._make_containers(around)
        self._dirty.set()
        while not self._leaving.is_set():
            try:
                await self._volumes.prepare()
                return True
            except (ConfigError, ApiError) as error:
                self._events.record("FailedMount", f"MountVolume.SetUp failed: {error}", warning=True)
                await self._either(asyncio.sleep(_RETRY_S))
        return False

    async def _refresh_volumes(self) -> None:
        while True:
            await asyncio.sleep(self._node.volume_sync_s)
            if self._volumes is not None and self._initialized:
                try:
                    await self._volumes.refresh(self._pod)
                except (ConfigError, ApiError) as error:
                    _log.info("volumes of %s: %s", self.name, error)

    async def _start_container(self, container: Json, log_path: Path) -> ContainerProcess:
        """Raises ImageNotFound, ConfigError."""
        assert self._network is not None, "containers start after the network"
        assert self._volumes is not None, "containers start after the volumes"
        image = find(container["image"], self._node.images)
        namespace = self._pod["metadata"]["namespace"]
        variables = {
            "PATH": PATH,
            "HOME": "/root" if image.user == 0 else "/tmp",
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "NVIDIA_VISIBLE_DEVICES": ",".join(map(str, self._gpus)) or "void",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self._gpus)),
            **await environment(
                container, self._pod, self._network.ip, self._node.address, Reader(self._node.api, namespace)
            ),
        }
        command = container.get("command") or list(image.entrypoint)
        argv = [expand(word, variables) for word in (*command, *container.get("args", []))]
        if not argv:
            raise ConfigError(f'no command specified for image "{container["image"]}"')
        mounts = [
            Mount(
                str(
                    self._volumes.path(m["name"])
                    / expand(m.get("subPathExpr", m.get("subPath", "")), variables)
                ),
                m["mountPath"],
                bool(m.get("readOnly", False)),
            )
            for m in container.get("volumeMounts", [])
        ]
        return await ContainerProcess.start(
            self._folder / "containers" / container["name"],
            log_path,
            argv,
            variables,
            mounts,
            user(container, self._spec, image),
            self._network,
            self._pod["spec"].get("hostname", self._pod["metadata"]["name"]),
            container.get("workingDir", "/"),
            self._node.content,
        )

    def _wanted_gpus(self) -> int:
        return sum(
            int(quantity(c.get("resources", {}).get("limits", {}).get(GPU_RESOURCE, "0")))
            for c in self._spec["containers"]
        )

    def _refuse(self, reason: str, message: str) -> None:
        self._refused = {"reason": reason, "message": message}
        self._events.record(reason, message, warning=True)
        self._dirty.set()

    # -- reporting --

    def _status(self) -> Json:
        one_shot = [c.state for c in self._init if not _is_sidecar(c.spec)]
        main = [c.state for c in self._main]
        policy: Policy = self._spec.get("restartPolicy", "Always")
        current = phase(policy, one_shot, main, self._initialized)
        status: Json = {}
        if self._refused is not None:
            current = "Failed"
            status |= self._refused
        status |= {
            "phase": current,
            "startTime": self._started_at,
            "hostIP": self._node.address,
            "hostIPs": [{"ip": self._node.address}],
            "conditions": pod_conditions(
                self._spec,
                self._pod.get("status", {}).get("conditions", []),
                sandbox=self._network is not None,
                initialized=self._initialized,
                main=main,
                current_phase=current,
                # A kubelet's first report bears the time of the start, however late it is written.
                moment=now() if self._pod.get("status", {}).get("startTime") else self._started_at,
            ),
        }
        if self._network is not None:
            status |= {"podIP": self._network.ip, "podIPs": [{"ip": self._network.ip}]}
        if self._refused is None:
            status["containerStatuses"] = [state.to_json() for state in main]
            if self._init:
                status["initContainerStatuses"] = [c.state.to_json() for c in self._init]
        return status

    async def _report(self) -> None:
        """Write the status whenever it has changed."""
        written: Json | None = None
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            status = self._status()
            if status == written and self._shows(status):
                continue
            try:
                await self._write(status)
                written = status
            except ApiError as error:
                if error.status == 404:
                    return
                _log.warning("status of %s: %s", self.name, error)
                await asyncio.sleep(_RETRY_S)
                self._dirty.set()

    def _shows(self, status: Json) -> bool:
        """Whether the object has these conditions: a node controller may have set Ready to False within the second that we
        wrote True, and what we want then equals what we wrote."""
        shown = {c["type"]: c["status"] for c in self._pod.get("status", {}).get("conditions", [])}
        return all(shown.get(c["type"]) == c["status"] for c in status["conditions"])

    async def _write(self, status: Json) -> None:
        metadata = self._pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        body = {"metadata": {"uid": self.uid}, "status": status}
        answer = await self._node.api.patch(f"{path}/status", body, STRATEGIC_PATCH)
        self._pod["status"] = answer["status"]

    async def _finish(self) -> None:
        """Tell that all containers have ended, then that the pod is gone from this node."""
        await finish(self._node.api, self._pod, self._terminal_status())

    def _terminal_status(self) -> Json:
        status = self._status()
        if status["phase"] not in ("Succeeded", "Failed"):
            failed = any(c.state.terminated is not None and not c.state.succeeded for c in self._main)
            status["phase"] = "Failed" if failed or not self._initialized else "Succeeded"
        return status

    async def _clean_up(self) -> None:
        if self._network is not None:
            process.kill_everything_in(self._network)
            await network.destroy(self._network)
            self._node.addresses.give_back(self._network.ip)
        self._node.devices.give_back(self.uid)
        if self._volumes is not None:
            self._volumes.remove()
        await asyncio.to_thread(process.remove_tree, self._folder)


def _is_sidecar(container: Json) -> bool:
    return container.get("restartPolicy") == "Always"
