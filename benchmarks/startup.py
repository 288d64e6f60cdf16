"""Time from `trimtab-engine serve` to `/ready`, and the memory of both processes, on the demo model.

Run by `make bench NAME=startup`. The first start converts the GGUF (once per machine) and is reported apart as
`convert_s`; the repeats start from the converted folder, as every later start does. Memory: PSS of the HTTP process and the
engine process together, after one answered request; RSS, which counts shared pages twice, stands beside it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from engine_process import DEMO_MODEL
from harness import arguments, emit, provenance, spread, write_table


def main() -> None:
    """Measure and print."""
    parser = arguments("startup", __doc__)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    before = provenance(["torch", "transformers", "tokenizers", "fastapi"])
    with tempfile.TemporaryDirectory() as empty:
        convert_s, _ = start_once(options.model, "--cache-dir", empty)
    start_once(options.model)  # fills the usual cache, where it is empty
    runs = [start_once(options.model) for _ in range(options.repeats)]
    ready = [run[0] for run in runs]
    memory = [run[1] for run in runs]
    figures: dict[str, object] = {
        "ready_s": round(max(ready), 2),
        "rss_gb": round(max(m["rss_gb"] for m in memory), 3),
        "pss_gb": round(max(m["pss_gb"] for m in memory), 3),
        "convert_s": round(convert_s, 2),
        "ready_spread_s": spread(ready),
        "memory": memory[-1],
        "targets": {"ready_s": 15, "rss_gb": 2.5},
    }
    if options.write:
        write_table("startup", table(figures, before))
    emit("startup", figures, repeats=options.repeats, seeds=[], model=options.model, provenance=before)


def start_once(model: str, *flags: str) -> tuple[float, dict[str, float]]:
    """One cold process start → (seconds until /ready, memory after one request)."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "ports.json"
        begun = time.monotonic()
        server = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "trimtab-engine"),
                *("serve", model, "--port", "0", "--admin-port", "0", "--port-file", str(port_file)),
                *flags,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            base = wait_for(server, port_file, begun)
            ready_s = time.monotonic() - begun
            body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
            name = httpx.get(f"{base}/v1/models", timeout=30).json()["data"][0]["id"]
            httpx.post(f"{base}/v1/completions", json={**body, "model": name}, timeout=60).raise_for_status()
            return ready_s, memory(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)


def wait_for(server: subprocess.Popen[bytes], port_file: Path, begun: float) -> str:
    """Poll until /ready answers 200; the base URL."""
    while time.monotonic() - begun < 300:
        if server.poll() is not None:
            raise SystemExit(f"startup: the engine ended with exit code {server.returncode}")
        try:
            base = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
            if httpx.get(f"{base}/ready", timeout=5).status_code == 200:
                return base
        except (OSError, ValueError, httpx.HTTPError):
            pass
        time.sleep(0.02)
    raise SystemExit("startup: not ready after 300 s")


def memory(pid: int) -> dict[str, float]:
    """RSS and PSS (GB) of the server and all its descendants."""
    total = {"rss_gb": 0.0, "pss_gb": 0.0, "processes": 0.0}
    for each in [pid, *descendants(pid)]:
        fields = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]
        values = {line.split(":")[0]: int(line.split()[1]) for line in fields}
        total["rss_gb"] += values["Rss"] * 1024 / 1e9
        total["pss_gb"] += values["Pss"] * 1024 / 1e9
        total["processes"] += 1
    return {key: round(value, 3) for key, value in total.items()}


def descendants(pid: int) -> list[int]:
    """Children of all threads of `pid`, and theirs."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def table(figures: dict[str, object], machine: dict[str, object]) -> str:
    """The page for docs/benchmarks."""
    return f"""# Start-up on the demo model

Caveats: one shared machine, load {machine["load_before"]} before the run; the slowest of the repeats is shown; page cache warm.
RSS counts pages that the two processes share twice.

| figure | value | target |
|---|---|---|
| process start to `/ready`, s | {figures["ready_s"]} | ≤ 15 |
| RSS of both processes, GB | {figures["rss_gb"]} | ≤ 2.5 |
| PSS of both processes, GB | {figures["pss_gb"]} | – |
| first start on a machine (converts the GGUF), s | {figures["convert_s"]} | – |

Spread of the start times: {figures["ready_spread_s"]}.

Measured by `{machine["command"]}` at commit {machine["commit"]} on {machine["cpu"]}, {machine["cores"]} cores,
Python {machine["python"]}, {machine["packages"]}.
"""


if __name__ == "__main__":
    main()
