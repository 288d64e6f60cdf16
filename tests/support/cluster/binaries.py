"""Finds the control plane's programs, or builds them from their Go modules; other tools of the tests in the same way.

Order: the folder named by KUBEBUILDER_ASSETS; our cache, keyed by go.mod, go.sum and the Go version; else a build with
progress on stderr. Without Go: `Unavailable` with the reason, which tests show as a skip and CI treats as a failure. (An
existing cluster, which needs none of this, is `cluster.existing`'s business.) `python -m support.cluster build` builds them ahead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ToolModule:
    """A Go module below `tests/cluster/tools` that names versions only, and the programs that are built with it."""

    name: str
    packages: Mapping[str, str]  # program → Go package, in the order of building
    cache: str  # folder in the cache, before its key
    assets: str | None = None  # environment variable that may name a folder with all programs
    linker_flags: Callable[[], str] = lambda: "-s -w"

    @property
    def folder(self) -> Path:
        """Where its go.mod lies."""
        return TOOLS / self.name


TOOLS = Path(__file__).resolve().parents[2] / "cluster" / "tools"
TOOL_MODULE = TOOLS / "devkube"
PROGRAMS = ("etcd", "kube-scheduler", "kubectl", "kube-proxy", "kube-controller-manager", "kube-apiserver")
KUBERNETES = ToolModule(
    "devkube",
    {p: "go.etcd.io/etcd/server/v3" if p == "etcd" else f"k8s.io/kubernetes/cmd/{p}" for p in PROGRAMS},
    cache="cluster",
    assets="KUBEBUILDER_ASSETS",
    linker_flags=lambda: _version_flags(),
)
HELM = ToolModule(
    "helm",
    {"helm": "helm.sh/helm/v4/cmd/helm"},
    cache="helm",
    assets="TRIMTAB_HELM_ASSETS",
    linker_flags=lambda: _helm_flags(),
)
#: The Lua interpreter that Argo CD embeds.
GLUA = ToolModule(
    "glua", {"glua": "github.com/yuin/gopher-lua/cmd/glua"}, cache="glua", assets="TRIMTAB_GLUA_ASSETS"
)
#: All that `python -m support.cluster build` makes sure of.
MODULES = (KUBERNETES, HELM, GLUA)
_SIGN_OF_LIFE_S = 30.0  # between lines of progress, for a log that somebody watches


class Unavailable(Exception):
    """The test cluster cannot run on this machine; the message says what is missing and what to do."""


def cache_folder() -> Path:
    """Where everything that outlives a run is kept."""
    return Path(os.environ.get("TRIMTAB_CACHE", Path.home() / ".cache" / "trimtab"))


def find_or_build(module: ToolModule = KUBERNETES) -> Path:
    """The folder that holds the module's programs; raises Unavailable. Building takes minutes, once."""
    named = os.environ.get(module.assets) if module.assets else None
    if named:
        missing = [program for program in module.packages if not os.access(Path(named, program), os.X_OK)]
        if missing:
            raise Unavailable(f"{module.assets}={named} lacks {', '.join(missing)}")
        return Path(named)
    go = _go()
    if go is None:
        instead = f", or set {module.assets} to a folder with {', '.join(module.packages)}"
        raise Unavailable(
            f"no Go on this machine: install it (https://go.dev/dl){instead if module.assets else ''}"
        )
    folder = cache_folder() / f"{module.cache}-{_key(go, module)}" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once build it once
        missing = [program for program in module.packages if not (folder / program).exists()]
        for number, program in enumerate(missing, start=1):
            _build(go, program, folder, module, f"{number} of {len(missing)}")
    return folder


def find_all() -> dict[str, str]:
    """All of it, as the environment by which a child process finds it without Go; raises Unavailable."""
    return {module.assets: str(find_or_build(module)) for module in MODULES if module.assets is not None}


def _go() -> str | None:
    return shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")


def kubernetes_version() -> str:
    """The version that go.mod names, as in `v1.37.2`."""
    return _required(KUBERNETES, "k8s.io/kubernetes")


def _required(module: ToolModule, path: str) -> str:
    """The version of `path` that the module's go.mod requires."""
    for line in (module.folder / "go.mod").read_text().splitlines():
        words = line.removeprefix("require ").split()
        if len(words) == 2 and words[0] == path:
            return words[1]
    raise AssertionError(f"{module.folder}/go.mod names no {path}")


def _key(go: str, module: ToolModule) -> str:
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        digest.update((module.folder / name).read_bytes())
    digest.update(subprocess.check_output([go, "env", "GOVERSION"], cwd="/"))
    return digest.hexdigest()[:16]


def _build(go: str, program: str, folder: Path, module: ToolModule, position: str) -> None:
    print(f"test cluster: building {program} ({position}; minutes, once) …", file=sys.stderr, flush=True)
    begun = time.monotonic()
    partial = folder / f".{program}.partial"
    log_path = folder.parent / f"build-{program}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [
                *(go, "build", "-mod=readonly", "-pgo=off", "-trimpath", "-tags", "grpcnotrace"),
                *("-ldflags", module.linker_flags(), "-o", str(partial), module.packages[program]),
            ],
            cwd=module.folder,
            env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"},
            stdout=log,
            stderr=log,
        )
        status = _wait(process, program, begun)
    if status != 0:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
        raise Unavailable(f"building {program} failed; {log_path} ends with:\n{tail}")
    partial.rename(folder / program)
    print(f"test cluster: built {program} in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _wait(process: subprocess.Popen[bytes], program: str, begun: float) -> int:
    """Until it ends, with signs of life; a build that is given up is ended too."""
    try:
        while True:
            try:
                return process.wait(_SIGN_OF_LIFE_S)
            except subprocess.TimeoutExpired:
                passed_s = time.monotonic() - begun
                print(f"test cluster: building {program}, {passed_s:.0f} s", file=sys.stderr, flush=True)
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _helm_flags() -> str:
    """The version as upstream's own builds set it."""
    return f"-s -w -X helm.sh/helm/v4/internal/version.version={_required(HELM, 'helm.sh/helm/v4')}"


def _version_flags() -> str:
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
