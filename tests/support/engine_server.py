"""Runs `trimtab-engine serve` as a child process for tests: real processes, real sockets, ephemeral ports.

`start_engine` is a context manager; `tests/conftest.py` has the session-scoped `served_engine` built on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_S = 90.0  # generous: many test runs may share two cores
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineServer:
    """A running server. `pid` is the HTTP process; `engine_pid` its engine process, once ready."""

    url: str  # of the serving port, without /v1
    admin_url: str
    pid: int
    process: subprocess.Popen[bytes]
    log_path: Path
    model_name: str

    @property
    def engine_pid(self) -> int:
        """The engine process, whether loaded or not."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        assert len(children) == 1, f"the server has children {children}"
        return int(children[0])

    @property
    def log(self) -> str:
        """Everything both processes have written so far."""
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Wait for `/ready`; fails with the log when the server ends or takes too long."""

        def ready() -> bool:
            assert self.process.poll() is None, (
                f"the server ended with {self.process.returncode}:\n{self.log}"
            )
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/ready", timeout=5.0).status_code == 200
            return False

        wait_until(ready, START_S, lambda: f"not ready:\n{self.log}")

    def live_config(self) -> dict[str, Any]:
        """The read-back."""
        answer = httpx.get(f"{self.admin_url}/admin/live-config", timeout=10.0)
        assert answer.status_code == 200, answer.text
        readback: dict[str, Any] = answer.json()
        return readback

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def wait_until(
    condition: Any,
    timeout_s: float = 20.0,
    message: Any = lambda: "condition not reached",
    step_s: float = 0.02,
) -> None:
    """Poll until `condition()` holds; AssertionError with `message()` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, message()
        time.sleep(step_s)


@contextlib.contextmanager
def start_engine(model: Path | str, *flags: str, wait_ready: bool = True) -> Iterator[EngineServer]:
    """Serve `model` on free ports until the block ends; the KV pool is small unless `flags` say otherwise."""
    with tempfile.TemporaryDirectory(prefix="trimtab-test-") as folder:
        port_file, log_path = Path(folder, "ports.json"), Path(folder, "server.log")
        defaults = [] if "--kv-cache-memory" in flags else ["--kv-cache-memory", "8Mi"]
        command = [
            *(sys.executable, "-P", "-m", "trimtab_engine.cli", "serve", str(model)),
            *("--port", "0", "--admin-port", "0", "--port-file", str(port_file), "--num-threads", "1"),
            *defaults,
            *flags,
        ]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            wait_until(
                lambda: port_file.exists() or process.poll() is not None,
                START_S,
                lambda: f"no ports:\n{log_path.read_text()}",
            )
            assert port_file.exists(), f"the server ended with {process.returncode}:\n{log_path.read_text()}"
            ports = json.loads(port_file.read_text())
            name = flags[flags.index("--served-model-name") + 1] if "--served-model-name" in flags else None
            server = EngineServer(
                url=f"http://127.0.0.1:{ports['port']}",
                admin_url=f"http://127.0.0.1:{ports['admin_port']}",
                pid=process.pid,
                process=process,
                log_path=log_path,
                model_name=name or Path(model).name.removesuffix(".gguf"),
            )
            if wait_ready:
                server.wait_ready()
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    process.kill()  # its engine process follows by the parent-death signal
                    process.wait()
