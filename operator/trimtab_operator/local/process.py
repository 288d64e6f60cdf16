"""One engine process: start, addresses, end. The local counterpart of a pod's container.

Owned by `replica`. Knows nothing of specs, live config or the proxy: a command line and a folder go in, two ports and an
exit status come out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05
_LAUNCHER = Path(__file__).with_name("launcher.py")
_TAIL_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where an engine listens; the host is always the loopback."""

    port: int
    admin_port: int

    @property
    def url(self) -> str:
        """Serving address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """Admin address."""
        return f"http://127.0.0.1:{self.admin_port}"


def engine_command() -> list[str]:
    """The command that starts an engine: the console script of this Python's environment, else its module."""
    script = Path(sys.executable).parent / "trimtab-engine"
    if script.is_file():
        return [str(script)]
    return [sys.executable, "-P", "-m", "trimtab_engine.cli"]


def port_file(folder: Path) -> Path:
    """Where an engine that works in `folder` tells its ports."""
    return folder / "ports.json"


class EngineProcess:
    """A started engine. It has its own session (a Ctrl-C at the terminal reaches the operator alone), writes its output
    to `folder/engine.log`, and dies with the operator.
    """

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._port_file = port_file(folder)
        self.log_file = folder / "engine.log"

    @classmethod
    async def start(
        cls, command: Sequence[str], folder: Path, environment: dict[str, str] | None = None
    ) -> EngineProcess:
        """Start `command`, which writes its ports to `port_file(folder)`; raises OSError when it cannot be started.

        Must be called on the main thread: the kernel ties the child to the thread that started it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        port_file(folder).unlink(missing_ok=True)
        launch = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid())]
        with (folder / "engine.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *launch,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        return cls(process, folder)

    @property
    def pid(self) -> int:
        """Process id of the engine's HTTP process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not been seen to end."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for the end → exit status, negative for a signal."""
        return await self._process.wait()

    async def addresses(self) -> Addresses:
        """Wait until both ports are bound. Cancel it when the process ends first."""
        while True:
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                listed = json.loads(self._port_file.read_text())
                return Addresses(int(listed["port"]), int(listed["admin_port"]))
            await asyncio.sleep(_POLL_S)

    def terminate(self) -> None:
        """Ask for an orderly end: the engine drains."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now, with whatever else is in its session's process group."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of its output, for a person who asks why it failed."""
        try:
            with self.log_file.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-lines:])


def describe_exit(status: int) -> str:
    """An exit status in words: `exit status 2`, `signal SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
