"""What a thousand services cost: time until all are Ready, requests and memory of the operator, and silence at rest.

Run by `make bench NAME=operator_scale`; inside a test cluster of its own with nodes of the fake runtime (no model runs, everything
else is real). In order: the floor (a bare client creates as many plain Deployments, Services and ConfigMaps, until all pods are
bound), the services, a rest of at least one whole resync, and edits of a live field. Requests are counted by the API server's audit log.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cluster_tools import (
    Audit,
    BareClient,
    Request,
    Watcher,
    cpu_s,
    rss_mb,
    step_inside,
    tally,
)
from harness import arguments, emit, provenance, write_table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from support.cluster import rights
from support.cluster.cluster import Cluster, NodeOptions, is_ready, start
from support.cluster_operator import OperatorProcess, operator
from trimtab_operator import crds, names

Json = dict[str, Any]
TARGETS = {"floor_ratio": 4.0, "rss_mb": 300, "idle_writes": 0}
THREADS = 8
LIMIT_S = 3600.0  # of each phase; a benchmark measures, it does not judge the machine
HOME = "default"  # the operator's namespace
SERVICES = f"/apis/{names.GROUP}/{names.VERSION}"
PROGRAMS = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler", "kube-proxy")
FAKE_NODE = "fake-a"


def main() -> None:
    """Measure and print."""
    parser = arguments("operator_scale", __doc__)
    parser.add_argument("--services", type=int, default=1000)
    # Longer than all need to be Ready: what a resync reads belongs to the rest. The operator's own default is 300.
    parser.add_argument("--resync", type=int, default=180, help="of the operator, in seconds (%(default)s)")
    parser.add_argument("--edits", type=int, default=2, help="rounds in which each service is edited once")
    parser.add_argument("--workers", type=int, help="of the operator (its own default)")
    parser.add_argument("--profile", type=Path, help="where to leave the operator's log and audit log")
    options = parser.parse_args()
    step_inside()
    before = provenance(["kopf", "kubernetes", "urllib3"])
    with tempfile.TemporaryDirectory(prefix="trimtab-scale-") as name:
        figures = Scale(options, Path(name)).measure()
    if options.write:
        write_table("operator_scale", table(figures, before))
    emit("operator_scale", figures, targets=TARGETS, seeds=[], provenance=before)


@dataclass
class Phase:
    """What one stretch of time cost."""

    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)


class Scale:
    """One run."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._count = int(options.services)
        self._audit = Audit(folder, rights.user(HOME))
        self._progress = Progress(
            TextColumn("{task.description:>28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self._pids: dict[str, int] = {}

    def measure(self) -> dict[str, object]:
        """All phases → the figures."""
        nodes = [NodeOptions("node-a", gpus=0), NodeOptions(FAKE_NODE, fake=True)]
        with start(self._folder / "cluster", nodes, self._audit.flags) as cluster, self._progress:
            cluster.kubectl("cordon", "node-a")  # kube-proxy runs for it; pods go to the fake one
            cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
            cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
            client = BareClient(cluster.control_plane.pki)
            self._pids = {program: cluster.control_plane.child(program).pid for program in PROGRAMS}
            self._pids["fake node"] = cluster.agent(FAKE_NODE).pid
            floor = self._floor(cluster, client)
            more = ["--workers", str(self._options.workers)] if self._options.workers else []
            with operator(
                cluster.kubeconfig, self._folder, "scale", "--all-namespaces", "--operator-namespace", HOME,
                "--resync", str(self._options.resync), *more,
            ) as running:  # fmt: skip
                try:
                    return self._operator(cluster, client, running, floor)
                finally:
                    self._keep(running)

    def _keep(self, running: OperatorProcess) -> None:
        if self._options.profile is not None:
            self._options.profile.mkdir(parents=True, exist_ok=True)
            for file in (running.log, self._folder / "audit.log"):
                (self._options.profile / file.name).write_bytes(file.read_bytes())

    def _phase(self, work: Callable[[], float]) -> Phase:
        """`work` returns the monotonic second at which it was done."""
        self._audit.take()
        before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        begun = time.monotonic()
        ended = work()
        spent = {name: round(cpu_s(pid) - before[name], 1) for name, pid in self._pids.items()}
        return Phase(ended - begun, spent, self._audit.take())

    def _bar(self, words: str, total: int) -> Callable[[int], None]:
        task = self._progress.add_task(words, total=total)
        if not self._progress.console.is_terminal:  # a log gets no bar before the end
            self._progress.console.print(f"{time.strftime('%H:%M:%S')} {words} …")

        def show(done: int) -> None:
            self._progress.update(task, completed=done)

        return show

    def _floor(self, cluster: Cluster, client: BareClient) -> Phase:
        cluster.kubectl("create", "namespace", "floor")
        bar = self._bar("floor: pods bound", self._count)

        def work() -> float:
            watcher = Watcher(
                client, "/api/v1/namespaces/floor/pods", lambda pod: bool(pod["spec"].get("nodeName"))
            )
            client.each(lambda i: _create_plain(client, i), self._count, THREADS)
            return watcher.wait(self._count, LIMIT_S, bar)

        phase = self._phase(work)
        cleaning = self._bar("floor: deleted", self._count)
        cluster.kubectl("delete", "namespace", "floor", "--wait=false")
        left = self._count
        while left:
            found = client.call("GET", "/api/v1/namespaces/floor/pods?limit=1")
            left = len(found["items"]) + int(found["metadata"].get("remainingItemCount", 0))
            cleaning(self._count - left)
            time.sleep(1.0)
        cluster.kubectl("wait", "--for=delete", "namespace/floor", "--timeout=600s", timeout_s=610)
        return phase

    def _operator(
        self, cluster: Cluster, client: BareClient, running: OperatorProcess, floor: Phase
    ) -> dict[str, object]:
        assert running.process is not None
        pid = self._pids["operator"] = running.process.pid
        rss = {"start": rss_mb(pid)}
        cluster.kubectl("create", "namespace", "scale")
        bar = self._bar("services Ready", self._count)

        def converge() -> float:
            watcher = Watcher(client, f"{SERVICES}/inferenceservices", _is_ready_now)
            client.each(lambda i: _create_service(client, i), self._count, THREADS)
            return watcher.wait(self._count, LIMIT_S, bar)

        converged = self._phase(converge)
        after = self._settle()
        rss["converged"] = rss_mb(pid)
        rest, looks = self._rest(running)
        rss["rested"] = rss_mb(pid)
        edits: list[Phase] = []
        for number in range(self._options.edits):
            edits.append(self._edit(client, number))
            self._settle()
            rss[f"edited {number + 1} times"] = rss_mb(pid)
        text = httpx.get(f"{running.health_url}/metrics").text
        series = sum(not line.startswith("#") for line in text.splitlines())
        self._delete(client)
        self._settle()
        rss["deleted"] = rss_mb(pid)
        left = int(running.metric("trimtab_operator_services"))
        requests = [*converged.requests, *after]
        idle = [request for request in rest.requests if request.writes]
        return {
            "services": self._count,
            "converge_s": round(converged.seconds, 1),
            "floor_s": round(floor.seconds, 1),
            "floor_ratio": round(converged.seconds / floor.seconds, 2),
            "requests_per_service": round(len(requests) / self._count, 1),
            "writes_per_service": round(sum(r.writes for r in requests) / self._count, 1),
            "rss_mb": round(rss_mb(pid, peak=True)),
            "idle_writes": len(idle),
            "idle_writes_by_kind": tally(idle),
            "idle_s": round(rest.seconds),
            "idle_looks": looks,
            "idle_reads_per_look": round((len(rest.requests) - len(idle)) / max(1, looks), 1),
            "rss_then_mb": {name: round(value) for name, value in rss.items()},
            "edit_s": [round(edit.seconds, 1) for edit in edits],
            "requests_per_edit": [round(len(edit.requests) / self._count, 1) for edit in edits],
            "metric_series": series,
            "services_after_deletion": left,
            "requests_by_kind": tally(requests),
            "converge_cpu_s": converged.cpu_s,
            "floor_cpu_s": floor.cpu_s,
            "rest_cpu_s": rest.cpu_s,
        }

    def _settle(self) -> list[Request]:
        """Until nothing has been written for ten seconds → what was asked meanwhile."""
        bar = self._bar("settled", 1)
        asked: list[Request] = []
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 10.0:
            time.sleep(1.0)
            new = self._audit.take()
            asked += new
            if any(request.writes for request in new):
                quiet_since = time.monotonic()
        bar(1)
        return asked

    def _rest(self, running: OperatorProcess) -> tuple[Phase, int]:
        """As long as every service needs to be looked at once more by a resync → (what that cost, looks)."""
        line = "trimtab_operator_reconcile_total"
        begun = running.metric(line)
        bar = self._bar("at rest: services looked at", self._count)

        def work() -> float:
            while (looked := int(running.metric(line) - begun)) < self._count:
                bar(looked)
                time.sleep(1.0)
            bar(looked)
            return time.monotonic()

        return self._phase(work), int(running.metric(line) - begun)

    def _edit(self, client: BareClient, number: int) -> Phase:
        value = 1024 + number
        bar = self._bar(f"edit {number + 1} in force", self._count)

        def in_force(service: Json) -> bool:
            engine = service.get("status", {}).get("engine", {})
            return bool(engine.get("applied", {}).get("maxNumBatchedTokens") == value)

        def edit(i: int) -> None:
            body = {"spec": {"engine": {"maxNumBatchedTokens": value}}}
            client.call("PATCH", _path(i), body, "application/merge-patch+json")

        def work() -> float:
            watcher = Watcher(client, f"{SERVICES}/inferenceservices", in_force)
            client.each(edit, self._count, THREADS)
            return watcher.wait(self._count, LIMIT_S, bar)

        return self._phase(work)

    def _delete(self, client: BareClient) -> None:
        bar = self._bar("services deleted, pods gone", self._count)
        client.call("DELETE", f"{SERVICES}/namespaces/scale/inferenceservices")
        left = self._count
        while left:
            found = client.call("GET", "/api/v1/namespaces/scale/pods?limit=1")
            left = len(found["items"]) + int(found["metadata"].get("remainingItemCount", 0))
            bar(self._count - left)
            time.sleep(1.0)


def _create_plain(client: BareClient, i: int) -> None:
    name = f"plain-{i}"
    labels = {"app": name}
    container = {"name": "engine", "image": "trimtab/engine:0", "args": ["serve", "file:///models/any"]}
    client.call("POST", "/api/v1/namespaces/floor/configmaps", {
        "metadata": {"name": name}, "data": {"live.json": "{}"}})  # fmt: skip
    client.call("POST", "/api/v1/namespaces/floor/services", {
        "metadata": {"name": name}, "spec": {"selector": labels, "ports": [{"port": 8000}]}})  # fmt: skip
    client.call("POST", "/apis/apps/v1/namespaces/floor/deployments", {
        "metadata": {"name": name}, "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": {
            "metadata": {"labels": labels}, "spec": {"containers": [container]}}}})  # fmt: skip


def _path(i: int) -> str:
    return f"{SERVICES}/namespaces/scale/inferenceservices/llm-{i}"


def _create_service(client: BareClient, i: int) -> None:
    client.call("POST", f"{SERVICES}/namespaces/scale/inferenceservices", {
        "apiVersion": names.API_VERSION, "kind": names.SERVICE_KIND, "metadata": {"name": f"llm-{i}"},
        "spec": {"model": {"uri": "file:///models/any"}, "engine": {"maxNumBatchedTokens": 512}}})  # fmt: skip


def _is_ready_now(service: Json) -> bool:
    current = service.get("status", {}).get("observedGeneration") == service["metadata"]["generation"]
    return current and is_ready(service)


def table(figures: dict[str, object], machine: dict[str, object]) -> str:
    """The page for docs/benchmarks."""
    rows = {
        "services": "–", "converge_s": "–", "floor_s": "–", "floor_ratio": f"≤ {TARGETS['floor_ratio']:g}",
        "requests_per_service": "–", "writes_per_service": "–", "rss_mb": f"≤ {TARGETS['rss_mb']}",
        "idle_writes": "0", "idle_s": "–", "idle_looks": "–", "idle_reads_per_look": "–", "edit_s": "–",
        "requests_per_edit": "–", "metric_series": "–",
    }  # fmt: skip
    main_rows = "\n".join(f"| {name} | {figures[name]} | {target} |" for name, target in rows.items())
    asked, spent, floor, rss = (
        figures[name] for name in ("requests_by_kind", "converge_cpu_s", "floor_cpu_s", "rss_then_mb")
    )
    assert isinstance(asked, dict)
    assert isinstance(spent, dict)
    assert isinstance(floor, dict)
    assert isinstance(rss, dict)
    kinds = "\n".join(f"| {name} | {count} |" for name, count in asked.items())
    cpu = "\n".join(f"| {name} | {floor.get(name, '–')} | {value} |" for name, value in spent.items())
    memory = ", ".join(f"{name} {value}" for name, value in rss.items())
    packages = machine["packages"]
    return f"""# A thousand services

Caveats: one shared machine, load {machine["load_before"]} before the run, on which control plane, fake nodes, client and operator share
{machine["cores"]} cores; one run, no spread. Pods are of the fake runtime: no model is loaded, so times are of the control plane and the
operator alone. The floor creates three objects for a service and ends when its pods are bound; a service has five, and ends Ready.

| figure | value | target |
|---|---|---|
{main_rows}

`floor_ratio` is converge_s over floor_s. `rss_mb` is the operator's highest ever; at each stage, MB: {memory}. Requests are the
operator's by the API server's audit log, its Lease left out, from the first service created until nothing was written for ten
seconds. At rest each service was looked at by one resync, fresh. An edit changes one live field of every service; it ends when every
status shows it in force.

| request, until all were Ready and settled | count |
|---|---|
{kinds}

| processor time, s | floor | services |
|---|---|---|
{cpu}

Measured by `{machine["command"]}` at commit {machine["commit"]} on {machine["cpu"]}, {machine["cores"]} cores,
Python {machine["python"]}, {packages}.
"""


if __name__ == "__main__":
    main()
