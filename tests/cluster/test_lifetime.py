"""A cluster leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster.cluster import existing
from support.cluster.kubectl import Kubectl
from support.cluster.manifests import SLEEP, pod
from support.engine_server import wait_until


def processes_of(namespace_link: str) -> list[str]:
    """Command lines of all processes in a process namespace."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace_link:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_cluster_that_is_ended_leaves_no_process_no_mount_and_no_address(
    number: signal.Signals, tmp_path: Path
) -> None:
    if existing() is not None:
        pytest.skip("it starts a cluster of its own, and an existing one was asked for")
    log = tmp_path / "log"
    with log.open("wb") as file:
        outer = subprocess.Popen(
            [sys.executable, "-P", "-m", "support.cluster", "up", "--no-operator"],
            stdout=file,
            stderr=file,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            start_new_session=True,
        )
    try:
        wait_until(lambda: "nsenter --target" in log.read_text() or outer.poll() is not None, 120.0)
        said = log.read_text()
        assert outer.poll() is None, said
        inner = re.search(r"--target (\d+)", said)
        config = re.search(r"KUBECONFIG=(\S+) PATH=([^:]+)", said)
        assert inner is not None
        assert config is not None
        kubectl = Kubectl(Path(config.group(2)) / "kubectl", Path(config.group(1)))
        kubectl.apply(pod("left", SLEEP))
        kubectl("wait", "--for=condition=Ready", "pod/left", "--timeout=120s")
        link = os.readlink(f"/proc/{inner.group(1)}/ns/pid")
        assert any("kube-apiserver" in line for line in processes_of(link))
        assert any(SLEEP in line for line in processes_of(link))
    finally:
        outer.send_signal(number)
        outer.wait(60)
    wait_until(lambda: processes_of(link) == [], 20.0, lambda: str(processes_of(link)))
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert len([line for line in links.splitlines() if line.startswith("service0")]) <= 1, (
        "no more than this cluster's own"
    )
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("trimtab-cluster-*")) == []
