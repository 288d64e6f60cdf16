"""Becomes a container's process: namespaces, root file system, user, then exec. Standard library only; started with `-I -S`.

    python -I -S enter.py SPEC.json

The root is an overlay over the host's, so that volumes can lie at their real paths and nothing that the container writes reaches
the host. `containers.py` writes the spec (its fields: `Spec` there). Failure before the exec: exit status 128 and a
line on stderr, as a container runtime's StartError.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 32, 4096, 16384
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_SIGKILL = 9
_LAST_CAPABILITY = 40
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_VIRTUAL = ("/proc", "/sys", "/dev", "/run")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Entry point; never returns."""
    path = sys.argv[1]
    with open(path) as file:
        spec = json.load(file)
    os.unlink(path)  # it holds the environment, and so perhaps secrets
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    os.set_inheritable(spec["told_fd"], False)
    try:
        enter(spec)
        os.execvpe(spec["argv"][0], spec["argv"], spec["environment"])
    except OSError as error:
        text = f"cannot start {spec['argv'][0]}: {error}"
        print(text, file=sys.stderr, flush=True)
        os.write(spec["told_fd"], text.encode())
        os._exit(128)


def enter(spec: dict[str, Any]) -> None:
    """Everything but the exec."""
    with open(spec["network_namespace"]) as namespace:
        _check(_libc.setns(namespace.fileno(), _CLONE_NEWNET), "setns")
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS), "unshare")
    socket.sethostname(spec["hostname"][:63])
    root = spec["root"]
    options = f"lowerdir=/,upperdir={spec['upper']},workdir={spec['work']}"
    if not spec["privileged_host"]:
        options += ",userxattr"
    _mount("overlay", root, "overlay", 0, options)
    _mount_host_parts(root)
    for source, target, read_only in spec["binds"]:
        _bind(source, _within(root, target), read_only)
    for target in spec["keep_visible"]:  # programs that a volume would cover
        _bind(target, _within(root, target), read_only=True)
    if spec["read_only_root"]:
        _mount("", root, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY, "")
    os.chroot(root)
    os.chdir(spec["working_directory"])
    if spec["privileged_host"]:
        _become(spec)
    if spec["no_new_privileges"]:
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)  # again: a change of user clears it


def _mount_host_parts(root: str) -> None:
    """An overlay shows only the lowest file system of the host: bring its other mounts, /proc, /sys and a minimal /dev."""
    for folder in ("/proc", "/sys"):
        _mount(folder, root + folder, "", _MS_BIND | _MS_REC, "")
    with open("/proc/self/mounts") as mounts:
        points = [line.split()[1].replace("\\040", " ") for line in mounts]
    for point in points:
        ours = root == point or root.startswith(point.rstrip("/") + "/") or point.startswith(root)
        if (
            not ours
            and not point.startswith(_VIRTUAL)
            and os.path.isdir(point)
            and os.path.isdir(root + point)
        ):
            _mount(point, root + point, "", _MS_BIND, "")
    _mount("tmpfs", root + "/dev", "tmpfs", _MS_NOSUID, "mode=755")
    for name in _DEVICES + tuple(name for name in os.listdir("/dev") if name.startswith("nvidia")):
        if os.path.exists(f"/dev/{name}"):
            _bind(f"/dev/{name}", f"{root}/dev/{name}", read_only=False)
    os.mkdir(root + "/dev/shm", 0o1777)
    os.chmod(root + "/dev/shm", 0o1777)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", root + "/dev/fd")


def _within(root: str, path: str) -> str:
    """`path` as the container sees it, as a path of the host: links (/var/run, say) lead to places below `root`."""
    parts, done = path.split("/"), root
    for _ in range(255):
        if not parts:
            return done
        part = parts.pop(0)
        if part in ("", "."):
            continue
        step = os.path.join(done, part)
        if os.path.islink(step):
            link = os.readlink(step)
            done = root if link.startswith("/") else done
            parts = link.split("/") + parts
        else:
            done = os.path.dirname(done) if part == ".." and done != root else step
    raise OSError(f"too many links in {path}")


def _bind(source: str, target: str, read_only: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            with open(target, "w"):
                pass
    _mount(source, target, "", _MS_BIND | _MS_REC, "")
    if read_only:
        _mount("", target, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY, "")


def _become(spec: dict[str, Any]) -> None:
    if spec["drop_capabilities"]:
        for capability in range(_LAST_CAPABILITY + 1):
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups(spec["groups"])
    os.setgid(spec["gid"])
    os.setuid(spec["uid"])


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    result = _libc.mount(
        source.encode() or None, target.encode(), kind.encode() or None, flags, options.encode() or None
    )
    _check(result, f"mount {source or 'again'} at {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
