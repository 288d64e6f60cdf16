"""Programs of the host that a cluster needs beside Kubernetes' own: `ip`, `setpriv`, and iptables for kube-proxy.

iptables is often absent where no container engine is. On Debian and Ubuntu its packages are then unpacked into our cache, with no
change to the system. Called before the namespace is entered, since no network is reachable from within.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from support.cluster.binaries import Unavailable, cache_folder

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PACKAGES = (
    *("iptables", "libip4tc2", "libip6tc2", "libxtables12"),
    *("libnftnl11", "libmnl0", "libnfnetlink0", "libnetfilter-conntrack3"),
)
_COMMANDS = tuple(
    f"{family}{verb}" for family in ("iptables", "ip6tables") for verb in ("", "-save", "-restore")
)


def search_path() -> str:
    """A PATH on which all needed programs are found; raises Unavailable."""
    path = os.pathsep.join([os.environ.get("PATH", ""), SYSTEM_PATH])
    for program, package in (("ip", "iproute2"), ("setpriv", "util-linux"), ("mount", "mount")):
        if shutil.which(program, path=path) is None:
            raise Unavailable(f"no program '{program}' on this machine: install the package {package}")
    if all(shutil.which(command, path=path) for command in _COMMANDS):
        return path
    return os.pathsep.join([path, str(_unpacked_iptables())])


def _unpacked_iptables() -> Path:
    folder = cache_folder() / "cluster-iptables"
    if not (folder / ".complete").exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise Unavailable(
                "no iptables on this machine (kube-proxy needs it): install the package iptables"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as downloads:
            done = subprocess.run(
                ["apt-get", "download", "-qq", *_PACKAGES],
                cwd=downloads,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise Unavailable(
                    f"no iptables on this machine, and apt-get download failed: {done.stderr.strip()}"
                )
            for package in sorted(Path(downloads).glob("*.deb")):
                subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
        _write_wrappers(folder)
        (folder / ".complete").touch()
    return folder / "bin"


def _write_wrappers(folder: Path) -> None:
    """Scripts that run the unpacked programs with the unpacked libraries, and nothing else with them."""
    (folder / "bin").mkdir()
    libraries = next(path.parent for path in folder.rglob("libxtables.so.*"))
    program = next(path for path in folder.rglob("xtables-nft-multi"))
    for command in _COMMANDS:
        script = folder / "bin" / command
        script.write_text(
            "#!/bin/sh\n"
            f"XTABLES_LIBDIR='{libraries}/xtables' LD_LIBRARY_PATH='{libraries}' exec '{program}' {command} \"$@\"\n"
        )
        script.chmod(0o755)
