"""What the operator says to one pod's admin port: how far is it, read the live config back, push a document, end a candidate.

Blocking, called from worker threads. The runtime contract is the same for every runtime; knows nothing of what values mean.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from trimtab_operator import names
from trimtab_operator.cluster.deadlines import Deadlines
from trimtab_operator.cluster.tokens import Scope, Signer
from trimtab_operator.plan.live_push import Call, EndCandidate, is_read_back
from trimtab_operator.plan.loading import describe
from trimtab_operator.plan.manifests import ADMIN_PORT

Json = dict[str, Any]
TIMEOUT_S = 3.0  # for each piece of an answer
ANSWER_S, ANSWER_BYTES = 6.0, 256 * 1024  # for all of it, its headers too
PARALLEL = 16


class EngineUnreachable(Exception):
    """No answer from the admin port, or none that can be understood."""


class EngineRefused(Exception):
    """The engine said no; nothing was changed. `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Engines:
    """All calls to all pods, over one connection pool and a bounded number of threads."""

    def __init__(self, signer: Signer, transport: httpx.BaseTransport | None = None) -> None:
        self._signer = signer
        # Pods come and go: a kept connection to a pod's address may meet another pod.
        limits = httpx.Limits(max_connections=PARALLEL * 2, max_keepalive_connections=0)
        self._client = httpx.Client(timeout=TIMEOUT_S, limits=limits, transport=transport, trust_env=False)
        self._deadlines = Deadlines()
        self._threads = ThreadPoolExecutor(PARALLEL, thread_name_prefix="engines")

    def read_backs(self, pods: Mapping[str, Mapping[str, Any]]) -> dict[str, Json]:
        """By pod name, of those that answer."""
        answers = self._threads.map(self._try_read_back, pods.values())
        return {name: answer for name, answer in zip(pods, answers, strict=True) if answer is not None}

    def read_tokens(self, pods: Iterable[Mapping[str, Any]], life_s: float) -> dict[str, str]:
        """By pod UID: what lets somebody else read the admin ports of these pods, for so long."""
        uids = [pod["metadata"]["uid"] for pod in pods]
        return {uid: self._signer.token(uid, "read", life_s) for uid in uids}

    def loading(self, pods: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """By pod name, of those that download their model: how far they are."""
        answers = self._threads.map(lambda pod: self._try_get(pod, "/admin/drain"), pods.values())
        described = {
            name: describe(answer) for name, answer in zip(pods, answers, strict=True) if answer is not None
        }
        return {name: text for name, text in described.items() if text is not None}

    def say(
        self, pods: Mapping[str, Mapping[str, Any]], calls: Mapping[str, tuple[Call, ...]]
    ) -> dict[str, Json | EngineUnreachable | EngineRefused]:
        """Each pod's calls in order, pods in parallel → its read-back afterwards, or what went wrong first."""
        answers = self._threads.map(lambda name: self._say(pods[name], calls[name]), calls)
        return dict(zip(calls, answers, strict=True))

    def hold(self, pods: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float]) -> frozenset[str]:
        """Tell leaving pods to serve on, or no longer (0) → names of those that do as told. Older engines know no such thing."""

        def told(name: str) -> bool:
            with contextlib.suppress(EngineUnreachable, EngineRefused):
                self._call(pods[name], "PUT", "/admin/drain", "write", {"hold_s": seconds[name]})
                return True
            return False

        return frozenset(
            name for name, done in zip(seconds, self._threads.map(told, seconds), strict=True) if done
        )

    def _try_read_back(self, pod: Mapping[str, Any]) -> Json | None:
        try:
            return self._read_back(pod)
        except (EngineUnreachable, EngineRefused):
            return None

    def _read_back(self, pod: Mapping[str, Any]) -> Json:
        answer = self._call(pod, "GET", "/admin/live-config", "read")
        if not is_read_back(answer):
            raise EngineUnreachable(f"{pod['metadata']['name']}: the answer is no account of a live config")
        return answer

    def _try_get(self, pod: Mapping[str, Any], path: str) -> Json | None:
        try:
            return self._call(pod, "GET", path, "read")
        except (EngineUnreachable, EngineRefused):
            return None

    def _say(
        self, pod: Mapping[str, Any], calls: tuple[Call, ...]
    ) -> Json | EngineUnreachable | EngineRefused:
        try:
            for call in calls:
                if isinstance(call, EndCandidate):
                    self._call(pod, "DELETE", "/admin/live-config/candidate", "write")
                else:
                    body = dict(call.document)
                    if call.lease_s is not None:
                        body["lease_s"] = call.lease_s
                    self._call(pod, "PUT", "/admin/live-config", "write", body)
            return self._read_back(pod)
        except (EngineUnreachable, EngineRefused) as error:
            return error

    def _call(
        self, pod: Mapping[str, Any], method: str, path: str, scope: Scope, body: Json | None = None
    ) -> Json:
        url = f"http://{_host(pod)}:{_admin_port(pod)}{path}"
        token = self._signer.token(pod["metadata"]["uid"], scope)
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        try:
            with (
                self._deadlines.within(ANSWER_S) as trace,
                self._client.stream(
                    method, url, json=body, headers=headers, extensions={"trace": trace}
                ) as answer,
            ):
                received = _received(answer)
            content = json.loads(received) if received else {}
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise EngineUnreachable(f"{url}: {error or type(error).__name__}") from error
        if not isinstance(content, dict):
            raise EngineUnreachable(f"{url}: the answer is not a JSON object")
        if answer.status_code == 401 or answer.status_code >= 500:
            # 401 passes: a kubelet takes up to a minute to show the pod a new public key.
            raise EngineUnreachable(f"{url}: HTTP {answer.status_code}")
        if answer.status_code >= 400:
            said = content.get("error")
            message = said.get("message") if isinstance(said, dict) else None
            raise EngineRefused(answer.status_code, str(message or f"HTTP {answer.status_code}"))
        return content

    def close(self) -> None:
        """End threads and connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        self._deadlines.close()


def _received(answer: httpx.Response) -> bytes:
    """The body as it came. The image is the service owner's choice: one that never ends its answer must not fill the memory."""
    found = b""
    for chunk in answer.iter_raw():
        found += chunk
        if len(found) > ANSWER_BYTES:
            raise ValueError(f"no end after {len(found)} bytes")
    return found


def _host(pod: Mapping[str, Any]) -> str:
    address = str(pod["status"]["podIP"])
    return f"[{address}]" if ":" in address else address


def _admin_port(pod: Mapping[str, Any]) -> int:
    for container in (pod.get("spec") or {}).get("containers") or ():
        if container.get("name") == names.ENGINE_CONTAINER:
            for port in container.get("ports") or ():
                if port.get("name") == "admin":
                    return int(port["containerPort"])
    return ADMIN_PORT
