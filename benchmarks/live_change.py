"""From `kubectl apply` of a live field to its being in force in every pod. Run by `make bench NAME=live_change`.

On a test cluster of its own: real control plane, operator and engines (tiny model), one service of four replicas, streams to every
pod all the while. The clock starts before kubectl does and stops when the last of the four engines says on its admin port that the
new value is in force. Each engine is asked every 50 ms, so a figure is up to that much too large.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cluster_tools import step_inside
from harness import arguments, emit, provenance, write_table
from rich.console import Console
from rich.progress import Progress

from support.cluster.cluster import Cluster, start
from support.cluster.kubectl import Kubectl
from support.cluster.story import engines, restarts, service, wait_ready
from support.cluster.traffic import Traffic
from support.cluster_operator import operator
from support.tiny_models import tiny_chat_model
from trimtab_operator import crds
from trimtab_operator.cluster.tokens import TOKEN_LIFE_S, Signer

Json = dict[str, Any]
TARGET_P99_S = 2.0
REPLICAS = 4
POLL_S = 0.05
LIMIT_S = 120.0  # of one change; a benchmark measures, it does not judge the machine
RESAMPLES = 10_000
SEED = 1


def main() -> None:
    """Measure and print."""
    parser = arguments("live_change", __doc__)
    parser.add_argument("--changes", type=int, default=300)
    options = parser.parse_args()
    step_inside()
    before = provenance(["kopf", "kubernetes", "torch"])
    with tempfile.TemporaryDirectory(prefix="trimtab-live-", dir="/dev/shm") as name:
        folder = Path(name)
        folder.chmod(0o755)  # pods run as another user
        model = tiny_chat_model(folder / "tiny")
        for file in model.iterdir():
            file.chmod(0o644)
        with start(folder / "cluster") as cluster:
            figures = measure(cluster, folder, model, options.changes)
    if options.write:
        write_table("live_change", table(figures, before))
    emit("live_change", figures, seeds=[SEED], provenance=before)


@dataclass(frozen=True, slots=True)
class Change:
    """One edit, in seconds after kubectl was started."""

    kubectl_s: float  # kubectl has ended
    in_force_s: float  # the last engine has it in force


def measure(cluster: Cluster, folder: Path, model: Path, count: int) -> dict[str, object]:
    """The figures of `count` changes."""
    cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
    cluster.kubectl("create", "namespace", "live")
    kubectl = cluster.kubectl.within("live")
    with operator(
        cluster.kubeconfig, folder, "live", "--all-namespaces", "--operator-namespace", "default"
    ) as running:
        kubectl("apply", "-f", str(written(folder, service(model, replicas=REPLICAS))))
        wait_ready(kubectl, timeout_s=300)
        pods = engines(kubectl)
        signer = Signer.load(running.folder / "admin-key.pem")
        with contextlib.ExitStack() as stack:
            flows = [stack.enter_context(Traffic(f"http://{pod['status']['podIP']}:8000")) for pod in pods]
            readers = [stack.enter_context(Reader(pod, signer)) for pod in pods]
            progress = stack.enter_context(Progress(console=Console(stderr=True)))
            task = progress.add_task("changes in force in all pods", total=count)
            rng = random.Random(SEED)
            changes = []
            for number in range(count):
                time.sleep(rng.uniform(0.2, 0.8))  # out of step with everything periodic
                changes.append(change(kubectl, folder, model, 256 + number, readers))
                progress.advance(task)
        after = engines(kubectl)
    assert {p["metadata"]["uid"] for p in after} == {p["metadata"]["uid"] for p in pods}
    failed = [reason for flow in flows for reason in flow.failed]
    in_force = np.array([c.in_force_s for c in changes])
    low, high = interval(in_force)
    return {
        "p99_s": round(p99(in_force), 3),
        "p99_interval_s": [round(low, 3), round(high, 3)],
        "changes": count,
        "p50_s": round(float(np.median(in_force)), 3),
        "max_s": round(float(in_force.max()), 3),
        "kubectl_p50_s": round(float(np.median([c.kubectl_s for c in changes])), 3),
        "replicas": REPLICAS,
        "streams_ended": sum(flow.count for flow in flows),
        "streams_failed": len(failed),
        "longest_token_gap_s": round(max(flow.longest_gap_s for flow in flows), 2),
        "restarts": sum(restarts(pod) for pod in after),
        "targets": {"p99_s": TARGET_P99_S},
    }


def written(folder: Path, manifest: Json) -> Path:
    """The manifest as a file."""
    path = folder / "service.json"
    path.write_text(json.dumps(manifest))
    return path


def change(kubectl: Kubectl, folder: Path, model: Path, tokens: int, readers: list[Reader]) -> Change:
    """Edit the file, apply it, wait until every engine has it in force."""
    manifest = service(model, replicas=REPLICAS)
    manifest["spec"]["engine"]["maxNumBatchedTokens"] = tokens
    path = written(folder, manifest)
    begun = time.monotonic()

    def apply() -> float:
        kubectl("apply", "-f", str(path))
        return time.monotonic()

    with ThreadPoolExecutor(len(readers) + 1) as pool:
        applied = pool.submit(apply)
        seen = list(pool.map(lambda reader: reader.wait(tokens, begun + LIMIT_S), readers))
        return Change(applied.result() - begun, max(seen) - begun)


class Reader:
    """Asks one engine what is in force."""

    def __init__(self, pod: Json, signer: Signer) -> None:
        self._signer = signer
        self._audience = pod["metadata"]["uid"]
        self._client = httpx.Client(base_url=f"http://{pod['status']['podIP']}:8001", timeout=10)
        self._token, self._token_s = "", float("-inf")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def wait(self, tokens: int, deadline_s: float) -> float:
        """Until that budget is in force → monotonic seconds."""
        while self._budget() != tokens:
            assert time.monotonic() < deadline_s, f"{tokens} not in force after {LIMIT_S:.0f} s"
            time.sleep(POLL_S)
        return time.monotonic()

    def _budget(self) -> int:
        now = time.monotonic()
        if now - self._token_s > TOKEN_LIFE_S / 2:
            self._token, self._token_s = self._signer.token(self._audience, "read"), now
        answer = self._client.get("/admin/live-config", headers={"Authorization": f"Bearer {self._token}"})
        answer.raise_for_status()
        return int(answer.json()["in_force"]["config"]["max_num_batched_tokens"])


def p99(values: np.ndarray[Any, Any]) -> float:
    """The smallest value that at least 99 % do not exceed."""
    return float(np.quantile(values, 0.99, method="inverted_cdf"))


def interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """95 % bootstrap interval of the p99. It cannot lie above the largest value seen."""
    rng = np.random.default_rng(SEED)
    drawn = rng.choice(values, size=(RESAMPLES, len(values)))
    estimates = np.quantile(drawn, 0.99, axis=1, method="inverted_cdf")
    return float(np.quantile(estimates, 0.025)), float(np.quantile(estimates, 0.975))


def table(figures: dict[str, object], machine: dict[str, object]) -> str:
    """The page for docs/benchmarks."""
    rows = "\n".join(
        f"| {name} | {figures[name]} | {target} |"
        for name, target in {
            "p99_s": f"≤ {TARGET_P99_S:g}", "p99_interval_s": "–", "p50_s": "–", "max_s": "–", "kubectl_p50_s": "–",
            "changes": "≥ 100", "streams_ended": "–", "streams_failed": "0", "longest_token_gap_s": "–", "restarts": "0",
        }.items()
    )  # fmt: skip
    return f"""# From kubectl apply to in force in every pod

Caveats: one shared machine, load {machine["load_before"]} before the run; control plane, operator, {figures["replicas"]} engines on a tiny model, their
clients and kubectl share {machine["cores"]} cores. The p99 of {figures["changes"]} changes rests on its few slowest; the interval is a 95 % bootstrap and cannot
lie above the largest value. Engines are asked every {POLL_S * 1000:.0f} ms, so each figure is up to that much too large.

| figure | value | target |
|---|---|---|
{rows}

Seconds from the start of `kubectl apply -f` to the moment when the last of {figures["replicas"]} engines says that the value is in force. One client streams
24 tokens at a time to every pod meanwhile.

Measured by `{machine["command"]}` at commit {machine["commit"]} on {machine["cpu"]}, {machine["cores"]} cores,
Python {machine["python"]}, {machine["packages"]}.
"""


if __name__ == "__main__":
    main()
