"""The few requests that a worker makes of the Kubernetes API: JSON in, JSON out, by the official client's connection.

Called by everything in `cluster`; knows nothing of what objects mean. A worker may read its service, its run and the service's
live ConfigMap, list EndpointSlices, and apply its run's status; so there is nothing else here. Blocking calls run in threads.

ServerError
└── KubeError
    ├── NotFound     404
    ├── Denied       401, 403: credentials or RBAC
    ├── Refused      400, 409, 422: the object is not allowed, or not the one that was meant
    └── Unavailable  no answer, 429 or 5xx, after all tries
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

from trimtab_tuner.errors import InputError, ServerError

Json = dict[str, Any]
FIELD_MANAGER = "trimtab-worker"
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 3.0, 8.0
PAUSES_S = (0.2, 0.6, 1.5)  # before the second, third, … try
_CONTENT_TYPES = {"PATCH": "application/apply-patch+yaml", "POST": "application/json"}
_RETRIED = frozenset({409, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a kind lives."""

    name: str
    api_version: str
    plural: str

    def path(self, namespace: str, name: str | None = None, subresource: str | None = None) -> str:
        """Path below the server's address."""
        root = "/api" if "/" not in self.api_version else "/apis"
        parts = [root, self.api_version, "namespaces", quote(namespace), self.plural]
        parts += [quote(name)] if name is not None else []
        parts += [subresource] if subresource is not None else []
        return "/".join(parts)


SERVICE = Kind("InferenceService", "serving.trimtab.dev/v1alpha1", "inferenceservices")
RUN = Kind("TuningRun", "serving.trimtab.dev/v1alpha1", "tuningruns")
CONFIG_MAP = Kind("ConfigMap", "v1", "configmaps")
ENDPOINT_SLICE = Kind("EndpointSlice", "discovery.k8s.io/v1", "endpointslices")


class KubeError(ServerError):
    """The API server said no, or nothing. `status` is the HTTP status, None without an answer."""

    def __init__(self, what: str, status: int | None, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.status = status


class NotFound(KubeError):
    """404."""


class Denied(KubeError):
    """401 or 403."""


class Refused(KubeError):
    """400, 409 or 422."""


class Unavailable(KubeError):
    """No answer, 429 or 5xx."""


def connect(kubeconfig: str | None = None) -> Kube:
    """With the pod's ServiceAccount, or by a kubeconfig when one is named. Raises InputError saying what was tried."""
    configuration = kubernetes_client.Configuration()
    try:
        if kubeconfig is None:
            kubernetes_config.load_incluster_config(client_configuration=configuration)
        else:
            kubernetes_config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    except (kubernetes_config.ConfigException, OSError) as error:
        raise InputError("--kubeconfig", kubeconfig, f"a way to reach a cluster ({error})") from error
    return Kube(configuration)


class Kube:
    """All requests of one worker."""

    def __init__(
        self, configuration: kubernetes_client.Configuration, pauses_s: tuple[float, ...] = PAUSES_S
    ) -> None:
        configuration.retries = False  # ours know what may be repeated
        self._api = kubernetes_client.ApiClient(configuration)
        self._host = configuration.host.rstrip("/")
        self._pauses_s = pauses_s
        self._timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)

    async def get(self, kind: Kind, namespace: str, name: str) -> Json:
        """The object as it is now. Raises NotFound."""
        return await asyncio.to_thread(self._call, "GET", kind.path(namespace, name))

    async def list(self, kind: Kind, namespace: str, labels: Mapping[str, str]) -> list[Json]:
        """The objects with all of `labels`."""
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        page = await asyncio.to_thread(
            self._call, "GET", kind.path(namespace), query={"labelSelector": selector}
        )
        return list(page["items"])

    async def apply_status(self, kind: Kind, namespace: str, name: str, uid: str, status: Json) -> Json:
        """Server-side apply of the status of the very object with `uid`: what we once wrote and no longer say is removed."""
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name, "uid": uid},
            "status": status,
        }
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        path = kind.path(namespace, name, "status")
        return await asyncio.to_thread(self._call, "PATCH", path, query=query, body=body)

    def create(self, kind: Kind, namespace: str, manifest: Json) -> bool:
        """Make a new object → whether it was not there yet. Blocking; `commands.start` does nothing beside it."""
        query = {"fieldManager": FIELD_MANAGER}
        try:
            self._call("POST", kind.path(namespace), query=query, body=manifest)
        except Refused as error:
            if error.status == 409:
                return False
            raise
        return True

    def _call(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Json | None = None
    ) -> Json:
        retried = _RETRIED - {409} if method == "POST" else _RETRIED  # there it says that the name is taken
        url = self._host + path + (f"?{urlencode(query)}" if query else "")
        what = f"{method} {path}"
        for tried in range(len(self._pauses_s) + 1):
            status, message, answer = self._once(method, url, body)
            if status is not None and status < 300:
                return answer
            if (status is not None and status not in retried) or tried == len(self._pauses_s):
                raise _classified(what, status, message)
            time.sleep(self._pauses_s[tried] * random.uniform(0.75, 1.25))
        raise AssertionError("unreachable: the last try raises")

    def _once(self, method: str, url: str, body: Json | None) -> tuple[int | None, str, Json]:
        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER}
        if body is not None:
            headers["Content-Type"] = _CONTENT_TYPES[method]
        # Asked for each time: a ServiceAccount's token is renewed on disk.
        self._api.update_params_for_auth(headers, [], ["BearerToken"], "", method, None)
        try:
            answer = self._api.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=self._timeout,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            return None, str(error), {}
        try:
            content = json.loads(answer.data) if answer.data else {}
        except ValueError:
            content = {"message": answer.data[:200].decode(errors="replace")}
        if not isinstance(content, dict):
            content = {"message": f"no JSON object came back: {content!r:.200}"}
        message = str(content.get("message") or content.get("reason") or f"HTTP {answer.status}")
        return answer.status, message, content


def _classified(what: str, status: int | None, message: str) -> KubeError:
    kinds: dict[int | None, type[KubeError]] = {
        401: Denied,
        403: Denied,
        404: NotFound,
        400: Refused,
        409: Refused,
        422: Refused,
    }
    return kinds.get(status, Unavailable)(what, status, message)
