"""Runs a command in network, mount and process namespaces of its own, so that nothing of it can be left behind.

    python -m support.cluster.namespace -- COMMAND…

Three processes: this one waits and passes signals on; its child is process 1 of the new process namespace, collects orphans and
dies with its parent; the command is the child's child. When process 1 ends, however it ends, the kernel ends everything else in
the namespace, and mounts, addresses and iptables rules go with it. Inside, 127.0.0.1 is another loopback than outside, and no other
network is reachable. Knows nothing of Kubernetes but the addresses.

Not root: a user namespace gives the rights that are needed inside; pods then all run as the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

INSIDE = "TRIMTAB_CLUSTER_NAMESPACE"  # environment variable: set inside
OUTER_PID = "TRIMTAB_CLUSTER_OUTER_PID"  # set inside: process 1, as numbered outside
NODE_IP = "10.244.0.1"
SERVICE_CIDR = "10.96.0.0/16"
FAKE_POD_CIDR = "10.245.0.0/16"  # every address of it answers on the loopback device

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_libc = ctypes.CDLL(None, use_errno=True)


def is_inside() -> bool:
    """Whether this process runs in such a namespace."""
    return os.environ.get(INSIDE) == "1"


def probe() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    child = os.fork()
    if child == 0:
        try:
            _unshare()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if status == 0 else f"namespaces are not allowed here: {os.strerror(status)}"


def command_inside(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` inside."""
    return [sys.executable, "-P", "-m", "support.cluster.namespace", "--", *command]


def run_inside(command: Sequence[str]) -> int:
    """Run `command` in new namespaces → its exit status (128 + n for signal n). Call it in a single-threaded process."""
    _unshare()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.environ[OUTER_PID] = os.read(told, 32).decode()
        os.close(told)
        os._exit(_process_one(command))
    os.close(told)
    os.write(tell, str(child).encode())
    os.close(tell)
    return _wait_for(child, reap_others=False)


def _unshare() -> None:
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET
    user, group = os.geteuid(), os.getegid()
    if user != 0:
        flags |= _CLONE_NEWUSER
    if _libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _process_one(command: Sequence[str]) -> int:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ[INSIDE] = "1"
    prepare()
    process = subprocess.Popen(command, start_new_session=True)
    return _wait_for(process.pid, reap_others=True)


def _wait_for(pid: int, *, reap_others: bool) -> int:
    """Wait for `pid`, passing signals on to it. Its session is its own, so a Ctrl-C reaches it only once, from here."""

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    while True:
        ended, status = os.waitpid(-1 if reap_others else pid, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def prepare() -> None:
    """Private mounts, an own /proc, and the cluster's addresses."""
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "proc", "proc", "/proc")
    _run("mount", "-t", "tmpfs", "none", "/run")  # `ip netns` keeps its names below it
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", f"{NODE_IP}/32", "dev", "lo")
    # Not by lo: a Service without endpoints would then be silent, since the kernel drops the refusal that iptables sends.
    _run("ip", "link", "add", "service0", "type", "veth", "peer", "name", "service1")
    for end in ("service0", "service1"):
        _run("ip", "link", "set", end, "up")
    _run("ip", "route", "add", SERVICE_CIDR, "dev", "service0", "src", NODE_IP)
    _run("ip", "route", "add", "local", FAKE_POD_CIDR, "dev", "lo")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"test cluster: {' '.join(command)}: {done.stderr.strip()}")


def main() -> int:
    """Entry point."""
    command = sys.argv[1:]
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        print("usage: python -m support.cluster.namespace -- COMMAND…", file=sys.stderr)
        return 2
    return run_inside(command)


if __name__ == "__main__":
    sys.exit(main())
