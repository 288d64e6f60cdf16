"""The files of one local service: what a cluster keeps in ConfigMap and status, and the replicas' folders.

    lock                 held while an operator runs this service
    live/live.json       the live config that a (re)started replica comes up with
    state.json           generation numbers that were given away, the standing recommendation
    replicas/NAME/       engine.log, ports.json; of replicas that are gone the newest few

Used by `main` and `reconcile`. Every file is replaced whole, so a reader never meets half of one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

_KEPT = 5  # folders of replicas that are gone


class StateDirInUse(Exception):
    """Another operator runs this service from this folder."""


class StateDir:
    """See the module. The lock is held until the object is closed or the process ends."""

    def __init__(self, folder: Path) -> None:
        """Create the folder and take its lock; raises StateDirInUse, or OSError when it cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.live_file = folder / "live" / "live.json"
        self._state_file = folder / "state.json"
        self._lock: IO[str] = (folder / "lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise StateDirInUse(
                f"{folder}: in use by another operator (pid {holder}); stop it or give --state-dir"
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        self.live_file.parent.mkdir(exist_ok=True)

    def close(self) -> None:
        """Give the lock back."""
        self._lock.close()

    def replica_folder(self, name: str) -> Path:
        """Folder of one replica."""
        return self.folder / "replicas" / name

    def delete_old_replicas(self, present: Collection[str]) -> None:
        """Delete folders of replicas that are gone, but for the newest: their logs may still be asked for."""
        gone = [folder for folder in self.folder.glob("replicas/*") if folder.name not in present]
        gone.sort(key=lambda folder: folder.stat().st_mtime)
        for folder in gone[:-_KEPT]:
            shutil.rmtree(folder, ignore_errors=True)

    def load_state(self) -> dict[str, Any]:
        """What `save_state` wrote last; empty at first, and when it was damaged from outside."""
        return _load(self._state_file)

    def save_state(self, state: dict[str, Any]) -> None:
        """Replace the state."""
        replace_file(self._state_file, json.dumps(state, indent=1))

    def load_live(self) -> dict[str, Any]:
        """The live document; empty when there is none yet."""
        return _load(self.live_file)

    def save_live(self, document: dict[str, Any]) -> None:
        """Replace the live document."""
        replace_file(self.live_file, json.dumps(document, indent=1))


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, also when we are killed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):  # not JSON, or not even UTF-8
        return {}
    return content if isinstance(content, dict) else {}
