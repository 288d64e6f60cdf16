"""Run inside a sealed engine image by its own Python: starts `trimtab-engine serve MODEL`, asks it for a completion, ends it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx

START_S = 200.0


def main() -> None:
    """Print `answered`, or fail with the engine's output on the way."""
    ports = Path("/tmp/ports.json")
    words = [
        "--port",
        "0",
        "--admin-port",
        "0",
        "--port-file",
        str(ports),
        "--kv-cache-memory",
        "8Mi",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(["trimtab-engine", "serve", sys.argv[1], "--num-threads", "1", *words])
    deadline_s = time.monotonic() + START_S
    answer = None
    while answer is None or answer.status_code != 200:
        assert process.poll() is None, f"the engine ended with {process.returncode}"
        assert time.monotonic() < deadline_s, "the engine does not get ready"
        time.sleep(0.2)
        if ports.exists():
            url = f"http://127.0.0.1:{json.loads(ports.read_text())['port']}"
            try:
                answer = httpx.get(f"{url}/ready", timeout=5)
            except httpx.TransportError:
                answer = None
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == 4
    process.terminate()
    assert process.wait(60) == 0
    print("answered")


if __name__ == "__main__":
    main()
