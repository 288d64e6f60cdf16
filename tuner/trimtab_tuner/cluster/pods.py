"""Which engine pods stand behind a Service now: names, UIDs and addresses, from its EndpointSlices.

Called by the evaluators' metrics and by whoever reads admin ports (`records`). Ready endpoints only: a pod that leaves takes no
new requests, and its numbers would end in the middle of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trimtab_tuner.cluster.kube import ENDPOINT_SLICE, Kube

ADMIN_PORT = 8001  # the operator gives every engine this one
SERVICE_LABEL = "kubernetes.io/service-name"


@dataclass(frozen=True, slots=True)
class Pod:
    """One engine. `uid` is the audience of its read token."""

    name: str
    uid: str
    serving_url: str
    admin_url: str

    @property
    def metrics_url(self) -> str:
        """Its exposition."""
        return f"{self.serving_url}/metrics"


async def find(kube: Kube, namespace: str, service: str) -> tuple[Pod, ...]:
    """The ready pods behind the Kubernetes Service, by name. Raises KubeError."""
    slices = await kube.list(ENDPOINT_SLICE, namespace, {SERVICE_LABEL: service})
    found = {pod.name: pod for each in slices for pod in of_slice(each)}
    return tuple(found[name] for name in sorted(found))


def of_slice(endpoint_slice: dict[str, Any]) -> list[Pod]:
    """The ready pods of one EndpointSlice."""
    ports = {port.get("name"): port.get("port") for port in endpoint_slice.get("ports") or ()}
    serving = ports.get("http")
    if serving is None:
        return []
    found = []
    for endpoint in endpoint_slice.get("endpoints") or ():
        reference = endpoint.get("targetRef") or {}
        # Absent means ready, by the API's own rule.
        ready = (endpoint.get("conditions") or {}).get("ready", True) is not False
        if not ready or reference.get("kind") != "Pod" or not endpoint.get("addresses"):
            continue
        address = str(endpoint["addresses"][0])
        host = f"[{address}]" if ":" in address else address
        found.append(
            Pod(
                str(reference["name"]),
                str(reference["uid"]),
                f"http://{host}:{serving}",
                f"http://{host}:{ADMIN_PORT}",
            )
        )
    return found
