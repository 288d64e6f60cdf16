"""Starts, watches and ends the process of one container.

Used by `container`. What is specific to this machine is here: the overlay root, users, the log file, signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from support.cluster.agent.network import PodNetwork

_ENTER = Path(__file__).with_name("enter.py")
_MESSAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class User:
    """Who a container runs as, and what that user may not do."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    no_new_privileges: bool
    drop_capabilities: bool
    read_only_root: bool


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host inside the container."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Spec:
    """What `enter.py` reads."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    working_directory: str
    hostname: str
    network_namespace: str
    told_fd: int  # closed by the exec, after a message when that fails
    root: str
    upper: str
    work: str
    binds: Sequence[tuple[str, str, bool]]
    keep_visible: Sequence[str]
    privileged_host: bool
    read_only_root: bool
    uid: int
    gid: int
    groups: Sequence[int]
    no_new_privileges: bool
    drop_capabilities: bool


class ContainerProcess:
    """One run of a container."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        folder: Path,
        user: User,
        environment: Mapping[str, str],
        failure: str,
    ) -> None:
        self._process = process
        self._folder = folder
        self._user = user
        self._environment = environment
        self.start_failure = failure  # why its program could not be started; empty when it was

    @classmethod
    async def start(
        cls,
        folder: Path,
        log_path: Path,
        argv: Sequence[str],
        environment: Mapping[str, str],
        mounts: Sequence[Mount],
        user: User,
        network: PodNetwork,
        hostname: str,
        working_directory: str,
        content: Sequence[str],
    ) -> ContainerProcess:
        """folder: of this container alone, emptied first; its root file system and termination message live there.

        content: folders of the host that every image holds, to be seen whatever is mounted over them.
        """
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("upper", "work", "root"):
            (folder / name).mkdir(parents=True)
        _open_ways(folder / "upper", content)
        _write_hosts(folder / "upper", hostname, network.ip)
        message = folder / "message"
        message.touch()
        message.chmod(0o666)
        binds = [(m.source, m.target, m.read_only) for m in sorted(mounts, key=lambda mount: mount.target)]
        covered = (*(mount.target.rstrip("/") + "/" for mount in mounts), "/dev/", "/run/")
        keep = [path for path in content if f"{path}/".startswith(covered)]
        told, tell = os.pipe()
        spec = Spec(
            argv=argv,
            environment=environment,
            working_directory=working_directory,
            hostname=hostname,
            network_namespace=str(network.path),
            told_fd=tell,
            root=str(folder / "root"),
            upper=str(folder / "upper"),
            work=str(folder / "work"),
            binds=[*binds, (str(message), "/dev/termination-log", False)],
            keep_visible=keep,
            privileged_host=_is_real_root(),
            **asdict(user),
        )
        spec_path = folder / "spec.json"
        spec_path.touch(mode=0o600)
        spec_path.write_text(json.dumps(asdict(spec)))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_ENTER), str(spec_path)),
                pass_fds=(tell,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": os.environ["PATH"]},
            )
        os.close(tell)
        try:
            failure = await asyncio.to_thread(os.read, told, _MESSAGE_BYTES)
        finally:
            os.close(told)
        return cls(process, folder, user, environment, failure.decode(errors="replace"))

    @property
    def pid(self) -> int:
        """Process id of the container's first process."""
        return self._process.pid

    async def wait(self) -> tuple[int, int | None]:
        """→ (exit code as Kubernetes counts, 128 + n for a signal; the signal)."""
        status = await self._process.wait()
        return (status, None) if status >= 0 else (128 - status, -status)

    def terminate(self) -> None:
        """SIGTERM to the first process, as a container runtime does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to it and its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def run(self, argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Run a command inside the container, as its user → (exit status, output); TimeoutError ends it."""
        pid = str(self.pid)
        enter = [
            "nsenter",
            "--target",
            pid,
            "--mount",
            "--net",
            "--uts",
            f"--root=/proc/{pid}/root",
            "--wd=/",
        ]
        if _is_real_root():
            enter += [f"--setgid={self._user.gid}", f"--setuid={self._user.uid}"]
        environment = [f"{key}={value}" for key, value in self._environment.items()]
        process = await asyncio.create_subprocess_exec(
            *("setpriv", "--pdeathsig", "KILL", *enter, "env", "-i", *environment, *argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return process.returncode or 0, output.decode(errors="replace")

    def message(self, log_path: Path, *, fall_back_to_log: bool) -> str:
        """The termination message; the end of the log when there is none and the policy says so."""
        text = (self._folder / "message").read_text(errors="replace")[-_MESSAGE_BYTES:]
        if text or not fall_back_to_log:
            return text
        tail = log_path.read_bytes()[-_MESSAGE_BYTES // 2 :].decode(errors="replace")
        return "\n".join(tail.splitlines()[-80:])


def kill_everything_in(network: PodNetwork) -> None:
    """SIGKILL to every process of a pod's network namespace: what its containers left behind."""
    try:
        wanted = network.path.stat().st_ino
    except FileNotFoundError:
        return
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/net").st_ino == wanted:
                    os.kill(int(entry), signal.SIGKILL)


def _is_real_root() -> bool:
    """False in a user namespace that maps one user only: there is no other user to become."""
    return Path("/proc/self/uid_map").read_text().split()[2] != "1"


def _open_ways(upper: Path, content: Sequence[str]) -> None:
    """Let every user of the container reach the images' content, though it may lie in someone's home."""
    for path in content:
        for folder in reversed([Path(path), *Path(path).parents]):
            mode = folder.stat().st_mode & 0o7777
            if not mode & 0o001:
                copy = upper / folder.relative_to("/")
                copy.mkdir(parents=True, exist_ok=True)
                copy.chmod(mode | 0o055)


def _write_hosts(upper: Path, hostname: str, ip: str) -> None:
    """Without these, programs look their own name up in a DNS that is not there, for seconds."""
    (upper / "etc").mkdir(exist_ok=True)
    (upper / "etc" / "hosts").write_text(
        f"127.0.0.1 localhost\n{ip} {hostname}\n10.96.0.1 kubernetes.default.svc\n"
    )
    (upper / "etc" / "hostname").write_text(f"{hostname}\n")
    (upper / "etc" / "resolv.conf").write_text("")


def remove_tree(folder: Path) -> None:
    """Delete a pod's files; overlayfs leaves folders in `work` that only their owner may enter."""
    shutil.rmtree(folder, ignore_errors=True)
