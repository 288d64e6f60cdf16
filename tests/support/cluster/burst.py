"""How long a service takes for many requests at once: `python -m support.cluster.burst URL COUNT TOKENS` prints seconds.

A process of its own, for the tests of Shadow runs, whose worker is one too: as threads of a test, beside its control plane and nodes, the
clients would be what takes long.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx


def took_s(url: str, *, count: int, tokens: int) -> float:
    """Seconds until all of so many completions were answered. url: of the Service, without /v1."""
    command = [sys.executable, "-m", "support.cluster.burst", url, str(count), str(tokens)]
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": tests}, stdout=subprocess.PIPE, timeout=300, check=True
    )
    return float(done.stdout)


async def _burst(url: str, count: int, tokens: int) -> float:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=120, trust_env=False) as client:
        began = time.monotonic()
        answers = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", json=body) for _ in range(count))
        )
        took = time.monotonic() - began
    assert {answer.status_code for answer in answers} == {200}
    return took


if __name__ == "__main__":
    print(asyncio.run(_burst(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
