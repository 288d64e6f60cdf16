"""Bursts of requests to a service, some of which come last and are in a hurry: how long it took, and how long those waited.

Used by the tests of Shadow runs, as a process (`python -m support.cluster.burst`, its options and what it prints are JSON): their workers are
processes too, and as threads of a test, beside its control plane and nodes, it would be the clients that take long.

A burst has as many requests as take `BURST_S`, and the target of those in a hurry is `TARGET_S`, whatever the machine: under fcfs they wait
for all others, so engines may become five times as fast; under sla-aware for one, which is far below the target unless they become ten
times as slow, and the target is far above what a machine that others use makes anybody wait now and then.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

INTERACTIVE = "interactive"
BURST_S, TARGET_S = 2.5, 0.5
FEWEST, MOST = 12, 300


@dataclass(frozen=True)
class Shape:
    """One burst: so many requests that nobody waits for, then some that somebody does, and the tokens of each.

    Those of the first kind have long answers, so that it is the engine that takes the time, and not who asks.
    """

    patient: int = 48
    tokens: int = 32
    hurried: int = 3
    hurried_tokens: int = 4


@dataclass(frozen=True)
class Sent:
    """Seconds of each burst, from its first request to its last answer; seconds to first tokens of those in a hurry."""

    took_s: list[float]
    waited_s: list[float]


def send(url: str, shape: Shape, count: int) -> Sent:
    """`count` bursts, one after the other. url: of the Service, without /v1. Raises CalledProcessError when a request failed."""
    command = [sys.executable, "-m", "support.cluster.burst", url, json.dumps(asdict(shape)), str(count)]
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": tests}, stdout=subprocess.PIPE, timeout=600, check=True
    )
    return Sent(**json.loads(done.stdout))


def sized(url: str, shape: Shape) -> Shape:
    """With as many patient requests as take `BURST_S` now."""
    took_s = statistics.median(send(url, replace(shape, hurried=0), count=3).took_s)
    count = round(shape.patient * BURST_S / took_s)
    return replace(shape, patient=min(MOST, max(FEWEST, count)))


async def _send(url: str, shape: Shape, count: int) -> Sent:
    took_s, waited_s = list[float](), list[float]()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=120, trust_env=False) as client:
        for _ in range(count):
            began, under_way = time.monotonic(), asyncio.Event()
            patient = [
                asyncio.create_task(_first_token_s(client, url, shape.tokens, None, under_way))
                for _ in range(shape.patient)
            ]
            # All of them are queued when the first one has its token.
            await under_way.wait()
            waited_s += await asyncio.gather(
                *(
                    _first_token_s(client, url, shape.hurried_tokens, INTERACTIVE)
                    for _ in range(shape.hurried)
                )
            )
            await asyncio.gather(*patient)
            took_s.append(time.monotonic() - began)
    return Sent(took_s, waited_s)


async def _first_token_s(
    client: httpx.AsyncClient,
    url: str,
    tokens: int,
    slo_class: str | None,
    seen: asyncio.Event | None = None,
) -> float:
    """One streamed completion, to its end → seconds to its first token."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    body |= {} if slo_class is None else {"slo_class": slo_class}
    began, found = time.monotonic(), None
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and found is None:
                found = time.monotonic() - began
                if seen is not None:
                    seen.set()
    assert found is not None
    return found


if __name__ == "__main__":
    print(
        json.dumps(
            asdict(asyncio.run(_send(sys.argv[1], Shape(**json.loads(sys.argv[2])), int(sys.argv[3]))))
        )
    )
