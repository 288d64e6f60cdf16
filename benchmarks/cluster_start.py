"""Time from cached binaries to a test cluster whose nodes are Ready. Run by `make bench NAME=cluster_start`.

Every repeat is a fresh cluster in fresh namespaces. The clock starts before the namespaces are made, and `ready_s` is the slowest
repeat's time until both nodes are Ready and kube-proxy routes. Building the binaries (once for a version) is not in it;
`--cold-build` measures it too, with an empty build cache in a folder of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT, arguments, emit, provenance, spread, write_table

TARGET_READY_S = 30.0
TARGET_BUILD_S = 25 * 60.0
#: Runs inside the cluster's namespace; prints when the cluster was ready (Unix time), what it takes, how long it took to stop.
SCRIPT = """
import json, sys, time
from pathlib import Path
from support.cluster import cluster
with cluster.start(Path(sys.argv[1])) as running:
    ready = time.time()
    pids = [running.control_plane.child(name).pid for name in sys.argv[2].split(",")] + [running.agent("node-a").pid]
    rss = [int(open(f"/proc/{pid}/status").read().split("VmRSS:")[1].split()[0]) / 1024 for pid in pids]
    print(json.dumps({"ready": ready, "rss_mb": rss}), flush=True)
    stopping = time.time()
print(json.dumps({"stopped_s": time.time() - stopping}), flush=True)
"""
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy")


def main() -> None:
    """Measure and print."""
    parser = arguments("cluster_start", __doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cold-build", action="store_true", help="build everything once more, from nothing (minutes)"
    )
    options = parser.parse_args()

    before = provenance(["kubernetes", "httpx"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    build_s = cold_build(environment) if options.cold_build else None
    find_binaries(environment)
    runs = [start_once(environment) for _ in range(options.repeats)]
    ready = [run.ready_s for run in runs]
    memory = dict(zip((*PROGRAMS, "node agent"), runs[-1].rss_mb, strict=True))
    figures: dict[str, object] = {
        "ready_s": round(max(ready), 2),
        "ready_spread_s": spread(ready),
        "stop_spread_s": spread([run.stopped_s for run in runs]),
        "rss_mb": {name: round(value) for name, value in memory.items()},
        "cold_build_s": None if build_s is None else round(build_s),
        "targets": {"ready_s": TARGET_READY_S, "cold_build_s": TARGET_BUILD_S},
    }
    if options.write:
        write_table("cluster_start", table(figures, before))
    emit("cluster_start", figures, repeats=options.repeats, seeds=[], provenance=before)


def find_binaries(environment: dict[str, str]) -> None:
    """Build now what is not cached, so that no repeat pays for it."""
    code = "from support.cluster import binaries, host_tools; binaries.find_all(); host_tools.search_path()"
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=True)


@dataclass(frozen=True, slots=True)
class Run:
    """One cluster, up and down."""

    ready_s: float
    stopped_s: float
    rss_mb: list[float]  # of PROGRAMS, then of one node agent


def start_once(environment: dict[str, str]) -> Run:
    """Start a cluster, measure, stop it."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "support.cluster.namespace", "--"),
                *(sys.executable, "-P", "-c", SCRIPT, str(Path(folder, "cluster")), ",".join(PROGRAMS)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        up, down = (json.loads(line) for line in done.stdout.splitlines())
        return Run(up["ready"] - begun, down["stopped_s"], up["rss_mb"])


def cold_build(environment: dict[str, str]) -> float:
    """Seconds for all binaries with empty caches of ours and of the Go compiler; modules are taken from Go's module cache."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        code = "from support.cluster import binaries; binaries.find_all()"
        cold = {"TRIMTAB_CACHE": str(Path(folder, "trimtab")), "GOCACHE": str(Path(folder, "go"))}
        subprocess.run([sys.executable, "-P", "-c", code], env={**environment, **cold}, check=True)
        return time.monotonic() - begun


def table(figures: dict[str, object], machine: dict[str, object]) -> str:
    """The page for docs/benchmarks."""
    rss = figures["rss_mb"]
    assert isinstance(rss, dict), "made above"
    memory = "\n".join(f"| RSS of {name}, MB | {value} | – |" for name, value in rss.items())
    build = "not measured in this run" if figures["cold_build_s"] is None else figures["cold_build_s"]
    return f"""# Start of the test cluster

Caveats: one shared machine, load {machine["load_before"]} before the run; binaries in the page cache; the slowest of the repeats is shown.

| figure | value | target |
|---|---|---|
| cached binaries to two Ready nodes and routing, s | {figures["ready_s"]} | ≤ {TARGET_READY_S:.0f} |
| cold build of all binaries (modules downloaded), s | {build} | ≤ {TARGET_BUILD_S:.0f} |
{memory}

Spread of the start times: {figures["ready_spread_s"]}. Of the stop times: {figures["stop_spread_s"]}.

Measured by `{machine["command"]}` at commit {machine["commit"]} on {machine["cpu"]}, {machine["cores"]} cores,
Python {machine["python"]}.
"""


if __name__ == "__main__":
    main()
