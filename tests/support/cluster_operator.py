"""Runs `trimtab-operator run` against a test cluster, as a process that a test may end, kill and start again."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.cluster import rights

Json = dict[str, Any]
START_S = 90.0


@dataclass
class OperatorProcess:
    """One operator; `options` are further words of its command line, `program` its first. Both may change between two lives."""

    kubeconfig: Path
    folder: Path
    name: str
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = (str(Path(sys.executable).parent / "trimtab-operator"),)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    health_url: str = field(default="", init=False)

    @property
    def log(self) -> Path:
        """What it said, of all its lives."""
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start it and wait until it watches."""
        ready = self.folder / f"{self.name}.json"
        ready.unlink(missing_ok=True)
        command = [
            *self.program, "run", "--kubeconfig", str(self.kubeconfig),
            "--health-host", "127.0.0.1", "--health-port", "0", "--ready-file", str(ready), "--identity", self.name,
            "--admin-key-file", str(self.folder / "admin-key.pem"), *self.options,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while not ready.exists():
            assert self.process.poll() is None, f"{self.name} ended:\n{self.tail()}"
            assert time.monotonic() < end, f"{self.name} does not watch:\n{self.tail()}"
            time.sleep(0.05)
        self.health_url = json.loads(ready.read_text())["health_url"]

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-4000:]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it → exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def healthy(self) -> bool:
        """What its liveness probe says."""
        return httpx.get(f"{self.health_url}/healthz", timeout=60.0).status_code == 200

    def metric(self, line_start: str) -> float:
        """Sum of the samples whose line starts so."""
        text = httpx.get(f"{self.health_url}/metrics", timeout=60.0).text
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(line_start)
        )

    def writes(self) -> float:
        """Requests to the API server that could change something, but for its own Lease."""
        text = httpx.get(f"{self.health_url}/metrics", timeout=60.0).text
        lines = [li for li in text.splitlines() if li.startswith("trimtab_operator_api_requests_total")]
        return sum(
            float(li.rpartition(" ")[2])
            for li in lines
            if 'verb="GET"' not in li and 'kind="Lease"' not in li
        )


def write_admin_key(folder: Path) -> None:
    """A key that outlives the operator's processes, as the mounted Secret does."""
    from trimtab_operator.cluster.tokens import Signer

    (folder / "admin-key.pem").write_bytes(Signer.new().private_pem)


@contextlib.contextmanager
def operator(kubeconfig: Path, folder: Path, name: str, *options: str) -> Iterator[OperatorProcess]:
    """A running operator with the rights of its account (never those of `kubeconfig`, which grants them), ended afterwards."""
    home = _values(options, "--operator-namespace") or ["default"]
    served = None if "--all-namespaces" in options else _values(options, "--namespace")
    own = rights.kubeconfig(kubeconfig, folder, home[-1], served)
    if not (folder / "admin-key.pem").exists():
        write_admin_key(folder)
    made = OperatorProcess(own, folder, name, options)
    try:
        made.start()
        yield made
        # Tests end it by `stop`, which waits; a kubelet would start it again, and hide that it found something amiss.
        assert made.process is None or made.process.returncode is not None or made.process.poll() is None, (
            f"{name} ended by itself:\n{made.tail()}"
        )
    finally:
        if made.process is not None and made.process.poll() is None:
            made.stop()


def _values(options: tuple[str, ...], flag: str) -> list[str]:
    """The words that follow `flag`."""
    return [value for word, value in itertools.pairwise(options) if word == flag]
