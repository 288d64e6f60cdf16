"""The Kubernetes API as JSON in, JSON out: the official client's connection and credentials, none of its models.

Typed calls cost four times the CPU of raw ones. Blocking, so it is called from worker threads only and says so when it is not;
requests in flight are bounded. What goes wrong is classified once, here: callers see one small tree of errors.

KubeError
├── NotFound     404
├── Conflict     409: somebody else wrote meanwhile, or the name is taken
├── Gone         410: a resource version that is too old
├── Denied       401, 403: credentials or RBAC
│   └── NamespaceGoing   the namespace is being deleted
├── Refused      400, 422: the object is not allowed; asking again gives the same answer
├── Unavailable  no answer, 429 or 5xx, after all retries
└── NotLeading   this process may not write (see `leadership`)
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import urllib3
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

from trimtab_operator import names
from trimtab_operator.cluster.kinds import BY_NAME, Kind
from trimtab_operator.errors import OperatorError

logger = logging.getLogger(__name__)

Json = dict[str, Any]
MAX_IN_FLIGHT = 16
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 30.0
#: Pauses before the second, third, … try; a server's Retry-After makes a pause longer, never shorter.
RETRY_PAUSES_S = (0.1, 0.4, 1.0, 2.5)
MAX_RETRY_AFTER_S = 10.0
PAGE = 500
_READS = ("GET",)
#: An apply refuses fields that the kind does not have, whatever validation is asked for; that costs a second parse of every body.
_APPLY = {"force": "true", "fieldValidation": "Ignore"}
_RETRIED = frozenset({429, 500, 502, 503, 504})
# Server-side apply answers 500 to values that do not fit a field's type (a quantity "lots"): asking again changes nothing.
_MALFORMED = ("unable to convert", "failed to convert", "failed to create typed")


class KubeError(OperatorError):
    """The API server said no, or nothing. `status` is the HTTP status, None without an answer."""

    def __init__(self, what: str, status: int | None, reason: str, message: str) -> None:
        super().__init__(f"{what}: {message or reason}")
        self.status = status
        self.reason = reason
        self.message = message


class NotFound(KubeError):
    """404."""


class Conflict(KubeError):
    """409."""


class Gone(KubeError):
    """410."""


class Denied(KubeError):
    """401 or 403."""


class NamespaceGoing(Denied):
    """403 because the namespace is being deleted: nothing can be made in it."""


class Refused(KubeError):
    """400 or 422; `causes` are (path, message) as far as the server names them."""

    causes: tuple[tuple[str, str], ...] = ()


class Unavailable(KubeError):
    """No answer, 429 or 5xx."""


class NotLeading(KubeError):
    """This process does not hold the Lease, so it does not write."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How the process reaches its API server; `configuration` is the official client's."""

    configuration: kubernetes_client.Configuration
    namespace: str | None  # the pod's own, in a cluster
    in_cluster: bool


def load_credentials(kubeconfig: str | None = None, context: str | None = None) -> Credentials:
    """In a pod its ServiceAccount, else (or when one is named) a kubeconfig. Raises OperatorError naming what was tried."""
    configuration = kubernetes_client.Configuration()
    try:
        if kubeconfig is None and context is None:
            try:
                kubernetes_config.load_incluster_config(client_configuration=configuration)
            except kubernetes_config.ConfigException:
                pass  # not in a pod
            else:
                with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
                    return Credentials(configuration, file.read().strip(), True)
        kubernetes_config.load_kube_config(
            config_file=kubeconfig, context=context, client_configuration=configuration
        )
    except (kubernetes_config.ConfigException, OSError) as error:
        raise OperatorError(f"no way to reach a cluster: {error}") from error
    return Credentials(configuration, None, False)


class Kube:
    """All requests of one process. `guard` is called before every write and may raise NotLeading."""

    def __init__(
        self,
        configuration: kubernetes_client.Configuration,
        guard: Callable[[], None] = lambda: None,
        observe: Callable[[str, str, int], None] = lambda verb, kind, status: None,
        pauses_s: tuple[float, ...] = RETRY_PAUSES_S,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        configuration.connection_pool_maxsize = MAX_IN_FLIGHT
        configuration.retries = False  # ours know what may be repeated
        self._api = kubernetes_client.ApiClient(configuration)
        self._host = configuration.host.rstrip("/")
        self._guard = guard
        self._observe = observe
        self._pauses_s = pauses_s
        self._timeout = urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, read_timeout_s), read=read_timeout_s)
        self._in_flight = threading.BoundedSemaphore(MAX_IN_FLIGHT)
        self.last_answer_s = time.monotonic()  # of any answer, also a refusal: the server is there
        self.last_failure_s = float("-inf")  # of no answer, or one that says that the server cannot

    # Reads

    def get(self, kind: Kind, namespace: str | None, name: str) -> Json | None:
        """The object, or None when there is none."""
        try:
            return self._call("GET", kind, kind.path(namespace, quote(name)))
        except NotFound:
            return None

    def list(
        self,
        kind: Kind,
        namespace: str | None,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
        *,
        cached: bool = False,
    ) -> list[Json]:
        """All objects of a namespace (None: of all), in pages; only those with all of `labels` and `fields`. With `cached` as the
        API server last heard, at once: for the newest state it waits until its cache has caught up, up to 0.1 s in a quiet cluster."""
        found: list[Json] = []
        query: dict[str, str] = {"resourceVersion": "0"} if cached else {"limit": str(PAGE)}
        if labels:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        if fields:
            query["fieldSelector"] = ",".join(f"{key}={value}" for key, value in sorted(fields.items()))
        while True:
            page = self._call("GET", kind, kind.path(namespace), query)
            # Items of a list carry neither kind nor apiVersion.
            found += [{"apiVersion": kind.api_version, "kind": kind.name, **item} for item in page["items"]]
            more = page["metadata"].get("continue")
            if not more:
                return found
            query["continue"] = more

    def watch_refusal(self, kind: Kind, namespace: str | None, labels: Mapping[str, str]) -> Denied | None:
        """What the server says when it refuses to list or to watch; None when it does not. `labels` had better pick nothing."""
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        try:
            for query in ({"limit": "1"}, {"watch": "true", "timeoutSeconds": "1"}):
                self._call("GET", kind, kind.path(namespace), {**query, "labelSelector": selector})
        except Denied as error:
            return error
        return None

    def once(self) -> Kube:
        """The same client, asking everything once: for what may fail and shall hold nobody up."""
        made = copy.copy(self)
        made._pauses_s = ()
        return made

    def served_kinds(self, group: str, version: str) -> frozenset[str]:
        """Names of the kinds of an API group that the server has now. Every account may ask, unless somebody took that away."""
        what = Kind("APIResourceList", group, version, "")
        try:
            found = self._call("GET", what, f"/apis/{group}/{version}")
        except NotFound:
            return frozenset()
        return frozenset(str(resource["kind"]) for resource in found["resources"])

    # Writes

    def apply(self, manifest: Json, *, dry_run: bool = False, manager: str = names.FIELD_MANAGER) -> Json:
        """Server-side apply of what `manifest` says, taking fields over from other managers."""
        kind, metadata = BY_NAME[manifest["kind"]], manifest["metadata"]
        query = {**_APPLY, "fieldManager": manager}
        if dry_run:
            query["dryRun"] = "All"
        path = kind.path(metadata.get("namespace"), quote(metadata["name"]))
        return self._call("PATCH", kind, path, query, manifest, "application/apply-patch+yaml", repeat={409})

    def apply_status(
        self, kind: Kind, namespace: str, name: str, status: Json, *, manager: str = names.FIELD_MANAGER
    ) -> Json:
        """Server-side apply of the status subresource: fields that we once wrote and no longer say are removed."""
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name},
            "status": status,
        }
        query = {**_APPLY, "fieldManager": manager}
        path = kind.path(namespace, quote(name), "status")
        return self._call("PATCH", kind, path, query, body, "application/apply-patch+yaml", repeat={409})

    def create(self, manifest: Json, *, dry_run: bool = False) -> Json:
        """Make a new object; Conflict when the name is taken."""
        kind, metadata = BY_NAME[manifest["kind"]], manifest["metadata"]
        query = {"fieldManager": names.FIELD_MANAGER}
        if dry_run:
            query["dryRun"] = "All"
        return self._call("POST", kind, kind.path(metadata.get("namespace")), query, manifest)

    def replace(self, manifest: Json) -> Json:
        """Overwrite an object at the resource version that it carries; Conflict when somebody was faster."""
        kind, metadata = BY_NAME[manifest["kind"]], manifest["metadata"]
        path = kind.path(metadata.get("namespace"), quote(metadata["name"]))
        return self._call("PUT", kind, path, {"fieldManager": names.FIELD_MANAGER}, manifest)

    def merge(self, kind: Kind, namespace: str, name: str, patch: Json) -> Json:
        """JSON merge patch."""
        path, query = kind.path(namespace, quote(name)), {"fieldManager": names.FIELD_MANAGER}
        return self._call("PATCH", kind, path, query, patch, "application/merge-patch+json")

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete exactly the object that was seen; nothing to do when it is gone."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            self._call("DELETE", kind, kind.path(namespace, quote(name)), {}, body)
        except NotFound:
            return

    # Transport

    def _call(
        self,
        method: str,
        kind: Kind,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        repeat: frozenset[int] | set[int] = frozenset(),
    ) -> Json:
        """One request with retries → the JSON answer. `repeat`: further statuses after which the same may be asked again."""
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("the Kubernetes API must not be called in an event loop: it blocks")
        url = self._host + path + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else msgspec.json.encode(body)
        what = f"{method} {path}"
        for tried in range(len(self._pauses_s) + 1):
            if method not in _READS:
                self._guard()
            status, reason, message, answer, retry_after_s = self._once(method, kind, url, data, content_type)
            if status is not None and status < 300:
                return answer
            if status == 500 and any(words in message for words in _MALFORMED):
                status = 422
            again = status is None or status in _RETRIED or status in repeat
            if not again or tried == len(self._pauses_s):
                raise _classified(what, status, reason, message, answer)
            pause_s = self._pauses_s[tried] * random.uniform(0.75, 1.25)
            time.sleep(max(pause_s, min(retry_after_s, MAX_RETRY_AFTER_S)))
        raise AssertionError("unreachable: the last try raises")

    def _once(
        self, method: str, kind: Kind, url: str, data: bytes | None, content_type: str
    ) -> tuple[int | None, str, str, Json, float]:
        headers = {"Accept": "application/json", "User-Agent": "trimtab-operator"}
        if data is not None:
            headers["Content-Type"] = content_type
        # Asked for each time: a ServiceAccount's token is renewed on disk.
        self._api.update_params_for_auth(headers, [], ["BearerToken"], "", method, None)
        try:
            with self._in_flight:
                answer = self._api.rest_client.pool_manager.request(
                    method,
                    url,
                    body=data,
                    headers=headers,
                    timeout=self._timeout,
                    retries=False,
                )
        except urllib3.exceptions.HTTPError as error:
            self._observe(method, kind.name, 0)
            self.last_failure_s = time.monotonic()
            return None, "Unreachable", str(error), {}, 0.0
        self.last_answer_s = time.monotonic()
        self._observe(method, kind.name, answer.status)
        if answer.status >= 500:
            self.last_failure_s = self.last_answer_s
        try:
            content = msgspec.json.decode(answer.data) if answer.data else {}
        except msgspec.DecodeError:
            content = {"message": answer.data[:200].decode(errors="replace")}
        after = answer.headers.get("Retry-After", "")
        retry_after_s = float(after) if after.isdigit() else 0.0
        return answer.status, content.get("reason", ""), content.get("message", ""), content, retry_after_s


def _classified(what: str, status: int | None, reason: str, message: str, answer: Json) -> KubeError:
    kinds: dict[int, type[KubeError]] = {401: Denied, 403: Denied, 404: NotFound, 409: Conflict, 410: Gone}
    if status in (400, 422):
        refused = Refused(what, status, reason, message)
        causes = (answer.get("details") or {}).get("causes") or []
        refused.causes = tuple((c.get("field", ""), c.get("message", "")) for c in causes)
        return refused
    if status == 403:
        causes = (answer.get("details") or {}).get("causes") or []
        if any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
            return NamespaceGoing(what, status, reason, message)
    if status is None or status in _RETRIED or status >= 500:
        return Unavailable(what, status, reason, message)
    return kinds.get(status, KubeError)(what, status, reason, message)
