"""Runs a command as a pod does: another user, a read-only root, empty writable folders, no environment, no way to more rights.

In a mount namespace of its own, which ends with the command. Needs root. The user's home folder is hidden but for what is shown.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

USER = 65532


def why_not() -> str | None:
    """Why this machine cannot do it; None when it can."""
    if os.geteuid() != 0:
        return "needs root, for a mount namespace and another user"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()


def run(
    command: Sequence[str],
    *,
    shown: Sequence[Path],
    writable: Sequence[Path],
    variables: Mapping[str, str],
    home: Path,
    timeout_s: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """`shown`: folders below `home` (which is hidden else) to read; `writable`: existing folders that come empty, as an emptyDir."""
    lines = ["mount --make-rprivate /", "mount -t tmpfs tmpfs /mnt"]
    for number, path in enumerate(shown):
        lines += [f"mkdir /mnt/{number}", f"mount --bind {shlex.quote(str(path))} /mnt/{number}"]
    lines.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(home))}")
    for number, path in enumerate(shown):
        lines += [
            f"mkdir -p {shlex.quote(str(path))}",
            f"mount --bind /mnt/{number} {shlex.quote(str(path))}",
        ]
        lines.append(f"mount -o remount,bind,ro {shlex.quote(str(path))}")
    for path in writable:
        lines.append(f"mount -t tmpfs -o uid={USER},gid={USER},mode=770 tmpfs {shlex.quote(str(path))}")
    lines += [
        f"mount -o remount,ro {shlex.quote(str(home))}",
        "umount -R /mnt",
        "mount -o remount,bind,ro /",
        f"exec setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs --bounding-set -all --inh-caps -all "
        + shlex.join(["env", "-i", *(f"{key}={value}" for key, value in variables.items()), *command]),
    ]
    return subprocess.run(
        [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "/bin/sh",
            "-ec",
            "\n".join(lines),
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd="/",
    )
