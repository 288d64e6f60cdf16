"""Registers one node and keeps its lease and status fresh: what the control plane knows of a machine."""

from __future__ import annotations

import asyncio
import datetime
import logging
from dataclasses import dataclass

from support.cluster.agent.api import STRATEGIC_PATCH, Api, ApiError, Json

LEASE_PERIOD_S = 2.0  # the control plane calls a node dead after 8 s
LEASE_DURATION_S = 40
GPU_RESOURCE = "nvidia.com/gpu"

_log = logging.getLogger(__name__)


def now() -> str:
    """This moment as Kubernetes writes it, in whole seconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What one node offers."""

    name: str
    address: str
    kubelet_port: int
    gpus: int
    cpu: str
    memory: str
    pods: int
    version: str  # of Kubernetes, as in v1.37.2


async def register(api: Api, shape: NodeShape) -> None:
    """Create the Node (an existing one is taken over) and report its status."""
    labels = {
        "kubernetes.io/hostname": shape.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
    }
    try:
        await api.post(
            "/api/v1/nodes",
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": shape.name, "labels": labels}},
        )
    except ApiError as error:
        if error.status != 409:
            raise
    await report(api, shape)


async def report(api: Api, shape: NodeShape) -> None:
    """Write capacity, addresses and conditions."""
    resources = {
        "cpu": shape.cpu,
        "memory": shape.memory,
        "pods": str(shape.pods),
        "ephemeral-storage": "100Gi",
        GPU_RESOURCE: str(shape.gpus),
    }
    moment = now()
    conditions = [
        _condition("Ready", "True", "KubeletReady", "the node agent runs", moment),
        *(
            _condition(kind, "False", f"KubeletHasNo{kind}", "", moment)
            for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
        ),
        _condition("NetworkUnavailable", "False", "RouteCreated", "", moment),
    ]
    info = {
        **dict.fromkeys(("bootID", "machineID", "systemUUID"), shape.name),
        **dict.fromkeys(("kernelVersion", "osImage"), "test"),
        "architecture": "amd64",
        "operatingSystem": "linux",
        "containerRuntimeVersion": "process://1",
        "kubeletVersion": shape.version,
        "kubeProxyVersion": "",
    }
    status: Json = {
        "capacity": resources,
        "allocatable": resources,
        "addresses": [
            {"type": "InternalIP", "address": shape.address},
            {"type": "Hostname", "address": shape.name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": shape.kubelet_port}},
        "nodeInfo": info,
        "conditions": conditions,
    }
    await api.patch(f"/api/v1/nodes/{shape.name}/status", {"status": status}, STRATEGIC_PATCH)


def _condition(kind: str, status: str, reason: str, message: str, moment: str) -> Json:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": moment,
        "lastTransitionTime": moment,
    }


async def keep_alive(api: Api, shape: NodeShape) -> None:
    """Renew the lease for ever; when the control plane had given the node up, report it Ready again."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{shape.name}"
    while True:
        try:
            await _renew(api, shape.name, path)
            node = await api.get(f"/api/v1/nodes/{shape.name}")
            ready = [c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready"]
            if ready != ["True"]:
                await report(api, shape)
        except ApiError as error:
            _log.warning("lease of %s: %s", shape.name, error)
            if error.status == 404:
                await register(api, shape)
        await asyncio.sleep(LEASE_PERIOD_S)


async def _renew(api: Api, name: str, path: str) -> None:
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": name, "leaseDurationSeconds": LEASE_DURATION_S, "renewTime": moment}
    try:
        await api.patch(path, {"spec": spec})
    except ApiError as error:
        if error.status != 404:
            raise
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": "kube-node-lease"},
            "spec": spec,
        }
        await api.post(path.rsplit("/", 1)[0], lease)
