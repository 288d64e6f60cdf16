"""What benchmarks on the test cluster share: the step into its namespace, a bare client, an audit log, what processes cost.

Used by `operator_scale` and `live_change`. The bare client is the floor that an operator is compared with: keep-alive connections,
JSON bytes, no models, no retries.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cluster import binaries, host_tools, namespace
from support.cluster.binaries import Unavailable
from support.cluster.control_plane import API_PORT

Json = dict[str, Any]
_KEPT_S = 30.0  # the API server closes idle connections after 90 s
_TICK_HZ = os.sysconf("SC_CLK_TCK")


def step_inside() -> None:
    """Start this program again inside a cluster's namespace; returns at once when it is there."""
    if namespace.is_inside():
        return
    try:
        programs = binaries.find_all()
        host_tools.search_path()
        problem = namespace.probe()
        if problem is not None:
            raise Unavailable(problem)
    except Unavailable as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    command = namespace.command_inside([sys.executable, "-P", *sys.argv])
    os.execve(command[0], command, {**os.environ, **programs})


class BareClient:
    """Raw JSON over one kept connection a thread, with the admin's certificate."""

    def __init__(self, pki: Path) -> None:
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._local = threading.local()

    def call(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        """One request → its answer; AssertionError unless it is 2xx."""
        connection = getattr(self._local, "connection", None)
        if connection is None or time.monotonic() - self._local.used_s > _KEPT_S:
            connection = self._local.connection = self.connection()
        self._local.used_s = time.monotonic()
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": kind})
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, f"{method} {path}: {answer.status} {content[:500]!r}"
        found: Json = json.loads(content)
        return found

    def connection(self) -> http.client.HTTPSConnection:
        """A further connection, for a watch."""
        return http.client.HTTPSConnection("127.0.0.1", API_PORT, context=self._context)

    def each(self, work: Callable[[int], None], count: int, threads: int = 8) -> None:
        """work(0) … work(count - 1) from `threads` threads."""
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, range(count)):
                pass


class Watcher:
    """Follows one kind from an empty list on and counts the objects that meet `condition`; `each` hears of every change."""

    def __init__(
        self, client: BareClient, path: str, condition: Callable[[Json], bool], selector: str = ""
    ) -> None:
        self._condition = condition
        self._changed = threading.Condition()
        self._met: set[str] = set()
        self._error: str | None = None
        listed = client.call("GET", f"{path}?limit=1{selector}")
        self._connection = client.connection()
        version = listed["metadata"]["resourceVersion"]
        self._connection.request(
            "GET", f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=7200{selector}"
        )
        self._answer = self._connection.getresponse()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, count: int, timeout_s: float, progress: Callable[[int], None]) -> float:
        """Until `count` objects meet the condition → monotonic seconds of that moment."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while len(self._met) < count:
                assert self._error is None, self._error
                assert time.monotonic() < end, f"{len(self._met)} of {count} after {timeout_s:.0f} s"
                self._changed.wait(0.5)
                progress(len(self._met))
            return time.monotonic()

    def _run(self) -> None:
        try:
            for line in self._answer:
                event = json.loads(line)
                item = event["object"]
                with self._changed:
                    if event["type"] == "ERROR":
                        self._error = f"the watch ended: {item}"
                    elif event["type"] != "DELETED" and self._condition(item):
                        self._met.add(item["metadata"]["uid"])
                    elif "metadata" in item:
                        self._met.discard(item["metadata"].get("uid"))
                    self._changed.notify_all()
        except (OSError, ValueError, http.client.HTTPException) as error:
            with self._changed:
                self._error = f"the watch broke: {error!r}"


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the audit log."""

    verb: str
    resource: str  # with its subresource, as in `inferenceservices/status`
    status: int

    @property
    def writes(self) -> bool:
        """Whether it could change something."""
        return self.verb not in ("get", "list", "watch")


class Audit:
    """The API server's own record of what one user asked of it."""

    def __init__(self, folder: Path, user: str) -> None:
        """folder: for policy and log, there before the API server starts."""
        self._log = folder / "audit.log"
        self._read = 0
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived", "ResponseStarted"],
            "rules": [{"level": "Metadata", "users": [user]}, {"level": "None"}],
        }
        (folder / "audit-policy.json").write_text(json.dumps(policy))
        self.flags = (
            f"--audit-policy-file={folder / 'audit-policy.json'}",
            f"--audit-log-path={self._log}",
            "--audit-log-mode=blocking",
        )

    def take(self) -> list[Request]:
        """What was asked since the last call; the Lease's renewals are left out."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._read)
            lines = file.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        self._read += sum(map(len, lines))
        return list(_requests(map(json.loads, lines)))


def _requests(lines: Iterable[Json]) -> Iterator[Request]:
    for line in lines:
        about = line.get("objectRef") or {}
        resource = str(about.get("resource", line["requestURI"]))
        if about.get("subresource"):
            resource += f"/{about['subresource']}"
        if resource != "leases":
            yield Request(line["verb"], resource, line["responseStatus"]["code"])


def tally(requests: Sequence[Request]) -> dict[str, int]:
    """How often each was asked, most often first; failed ones with their status."""
    names = Counter(f"{r.verb} {r.resource}" + ("" if r.status < 300 else f" → {r.status}") for r in requests)
    return dict(names.most_common())


def cpu_s(pid: int) -> float:
    """Processor time of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK_HZ


def rss_mb(pid: int, *, peak: bool = False) -> float:
    """Resident memory now, or the most there ever was."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) / 1024
