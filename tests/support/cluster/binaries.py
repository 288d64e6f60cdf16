"""Finds the control plane's programs, or builds them from their Go modules.

Order: the folder named by KUBEBUILDER_ASSETS; our cache, keyed by go.mod, go.sum and the Go version; else a build with
progress on stderr. Without Go: `Unavailable` with the reason, which tests show as a skip and CI treats as a failure. (An
existing cluster, which needs none of this, is `cluster.existing`'s business.)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

TOOL_MODULE = Path(__file__).resolve().parents[2] / "cluster" / "tools" / "devkube"
PROGRAMS = ("etcd", "kube-scheduler", "kubectl", "kube-proxy", "kube-controller-manager", "kube-apiserver")


class Unavailable(Exception):
    """The test cluster cannot run on this machine; the message says what is missing and what to do."""


def cache_folder() -> Path:
    """Where everything that outlives a run is kept."""
    return Path(os.environ.get("TRIMTAB_CACHE", Path.home() / ".cache" / "trimtab"))


def find_or_build() -> Path:
    """The folder that holds all PROGRAMS; raises Unavailable. Building takes about a quarter of an hour, once."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        missing = [program for program in PROGRAMS if not os.access(Path(assets, program), os.X_OK)]
        if missing:
            raise Unavailable(f"KUBEBUILDER_ASSETS={assets} lacks {', '.join(missing)}")
        return Path(assets)
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise Unavailable(
            "no Go on this machine: install it (https://go.dev/dl), or set KUBEBUILDER_ASSETS to a folder with "
            + ", ".join(PROGRAMS)
        )
    folder = cache_folder() / f"cluster-{_key(go)}" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once build it once
        missing = [program for program in PROGRAMS if not (folder / program).exists()]
        for number, program in enumerate(missing, start=1):
            _build(go, program, folder, f"{number} of {len(missing)}")
    return folder


def kubernetes_version() -> str:
    """The version that go.mod names, as in `v1.37.2`."""
    for line in (TOOL_MODULE / "go.mod").read_text().splitlines():
        words = line.removeprefix("require ").split()
        if len(words) == 2 and words[0] == "k8s.io/kubernetes":
            return words[1]
    raise AssertionError(f"{TOOL_MODULE}/go.mod names no k8s.io/kubernetes")


def _key(go: str) -> str:
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        digest.update((TOOL_MODULE / name).read_bytes())
    digest.update(subprocess.check_output([go, "env", "GOVERSION"], cwd="/"))
    return digest.hexdigest()[:16]


def _build(go: str, program: str, folder: Path, position: str) -> None:
    package = "go.etcd.io/etcd/server/v3" if program == "etcd" else f"k8s.io/kubernetes/cmd/{program}"
    print(f"test cluster: building {program} ({position}; minutes, once) …", file=sys.stderr, flush=True)
    begun = time.monotonic()
    partial = folder / f".{program}.partial"
    log_path = folder.parent / f"build-{program}.log"
    with log_path.open("wb") as log:
        done = subprocess.run(
            [
                *(go, "build", "-mod=readonly", "-pgo=off", "-trimpath", "-tags", "grpcnotrace"),
                *("-ldflags", _linker_flags(), "-o", str(partial), package),
            ],
            cwd=TOOL_MODULE,
            env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"},
            stdout=log,
            stderr=log,
            check=False,
        )
    if done.returncode != 0:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
        raise Unavailable(f"building {program} failed; {log_path} ends with:\n{tail}")
    partial.rename(folder / program)
    print(f"test cluster: built {program} in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _linker_flags() -> str:
    """Unset, /version shows a template that some clients refuse to parse."""
    version = kubernetes_version()
    major, minor = version.removeprefix("v").split(".")[:2]
    values = {
        "gitVersion": version,
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "none",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    settings = [f"-X {package}.{key}={value}" for package in packages for key, value in values.items()]
    return " ".join(["-s", "-w", *settings])
