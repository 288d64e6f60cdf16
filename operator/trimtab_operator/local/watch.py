"""Notices edits of the service's file by polling: works on every file system and with every editor's way of saving.

Polled by `reconcile`. Knows nothing of YAML.
"""

from __future__ import annotations

import os
from pathlib import Path

_Stamp = tuple[int, int, int]  # time, size, inode


class FileWatch:
    """One file. `poll` returns its content when that is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: _Stamp | None = None
        self._settling: _Stamp | None = None
        self._content: bytes | None = None

    def read(self) -> bytes:
        """The content now, taken as seen; raises OSError."""
        self._seen = self._stamp()
        self._content = self.path.read_bytes()
        return self._content

    def poll(self) -> bytes | None:
        """The content, if it differs from what was last returned; else None. Raises OSError while the file is gone.

        A change is returned by the poll after the one that saw it, if nothing was written between: an editor that
        truncates and then writes is not caught half-way.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        if stamp != self._settling:
            self._settling = stamp
            return None
        self._seen = stamp
        content = self.path.read_bytes()
        if content == self._content:
            return None
        self._content = content
        return content

    def _stamp(self) -> _Stamp:
        status = os.stat(self.path)
        return (status.st_mtime_ns, status.st_size, status.st_ino)
