"""Starts and ends the programs of a cluster: each with a log, tied to its parent's life, ended by its own handle only."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_KILL_AFTER_S = 10.0


class Child:
    """One started program."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> Child:
        """Start it in a session of its own (a Ctrl-C at the terminal is its starter's business). It dies with its starter."""
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def check(self) -> None:
        """Raise RuntimeError with the end of its log when it has ended."""
        if not self.running:
            raise RuntimeError(
                f"{self.name} ended with status {self._process.returncode}:\n{self.log_tail()}"
            )

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """SIGTERM, a wait, SIGKILL. Ended ones stay ended."""
        if not self.running:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
