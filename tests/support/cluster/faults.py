"""Breaks things on a test cluster and mends them: processes of an engine, the way to its admin port, the API server.

Used by `tests/cluster/test_faults_*.py`. Everything stays inside the cluster's own namespaces: processes are found by the network
namespace of their pod, packets are dropped by a rule of the cluster's own iptables. Silent nodes: `Cluster.silence_node`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cluster.cluster import Cluster
from support.cluster_operator import OperatorProcess
from trimtab_operator.cluster.tokens import Signer
from trimtab_operator.plan.manifests import ADMIN_PORT

Json = dict[str, Any]
_WORKER = "trimtab_engine.worker"
_FIND_S = 60.0
_READ_BACK = """
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.stdin.read()})
print(urllib.request.urlopen(asked, timeout=10).read().decode())
"""


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """The two processes of one engine: the one that takes requests, and its child that computes."""

    http: int
    worker: int


def engine_processes(pod: Json) -> EngineProcesses:
    """Of a running pod; waits until both are there."""
    deadline_s = time.monotonic() + _FIND_S
    while True:
        found = {pid: _command_line(pid) for pid in _pids(pod)}
        workers = [pid for pid, words in found.items() if _WORKER in words]
        servers = [pid for pid, words in found.items() if "serve" in words and _WORKER not in words]
        if len(workers) == 1 and len(servers) == 1:
            return EngineProcesses(servers[0], workers[0])
        assert time.monotonic() < deadline_s, f"no engine in {pod['metadata']['name']}: {found}"
        time.sleep(0.1)


def tuning_worker(pod: Json) -> int:
    """The process of a running worker of a tuning run; waits until it is there."""
    deadline_s = time.monotonic() + _FIND_S
    while True:
        found = [pid for pid in _pids(pod) if "work" in _command_line(pid)]
        if found:
            return found[0]
        assert time.monotonic() < deadline_s, f"no worker in {pod['metadata']['name']}"
        time.sleep(0.1)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to one process of an engine."""
    os.kill(pid, number)


@contextlib.contextmanager
def admin_port_cut(pod: Json) -> Iterator[None]:
    """Nothing that the operator sends to the pod's admin port arrives, and nothing comes back; the rest of the pod is reached."""
    rule = ["OUTPUT", "-d", pod["status"]["podIP"], "-p", "tcp", "--dport", str(ADMIN_PORT), "-j", "DROP"]
    _iptables("-I", *rule)
    try:
        yield
    finally:
        _iptables("-D", *rule)


def read_back_inside(operator: OperatorProcess, pod: Json) -> Json:
    """The engine's own account of its live config, asked from within the pod: needs neither a way to it nor an API server."""
    ip = pod["status"]["podIP"]
    token = Signer.load(operator.folder / "admin-key.pem").token(pod["metadata"]["uid"], "read")
    url = f"http://{ip}:{ADMIN_PORT}/admin/live-config"
    command = ["ip", "netns", "exec", _network(pod), sys.executable, "-I", "-S", "-c", _READ_BACK, url]
    done = subprocess.run(command, input=token, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found: Json = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def api_server_away(cluster: Cluster) -> Iterator[None]:
    """etcd and kube-apiserver are not there until the block ends; then they have all that they had. See `ControlPlane.away`."""
    with cluster.control_plane.away("etcd", "kube-apiserver"):
        yield


def _iptables(*words: str) -> None:
    subprocess.run(["iptables", "--wait", *words], check=True, capture_output=True)


def _network(pod: Json) -> str:
    """The pod's network namespace, as the node agent names it."""
    third, fourth = pod["status"]["podIP"].split(".")[2:]
    return f"p{third}-{fourth}"


def _pids(pod: Json) -> list[int]:
    wanted = Path("/run/netns", _network(pod)).stat().st_ino
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if os.stat(f"/proc/{entry}/ns/net").st_ino == wanted:
                    found.append(int(entry))
    return found


def _command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return []
