"""Everything at once on a small pool: chunks, preemptions, siblings, stops, aborts, leases. Nothing is lost, all replays."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from support.engine_server import EngineServer, start_engine, wait_until
from trimtab_engine.core.live import LiveConfig
from trimtab_engine.messages import Abort
from trimtab_engine.step_record import replay

NUM_REQUESTS = 60


async def _one(client: httpx.AsyncClient, url: str, number: int, ends: Counter[str]) -> None:
    draw = random.Random(number)
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": f"{number % 7} " + "x " * draw.choice([1, 5, 60, 300]),
        "max_tokens": draw.choice([1, 20, 100]),
        "n": draw.choice([1, 1, 3]),
        "temperature": draw.choice([0, 1]),
        "priority": draw.choice([0, 1, -1]),
        "stream": True,
    }
    if draw.random() < 0.3:
        body["stop"] = ["a", "e"]
    leave_after = draw.choice([None, None, 2])
    finished = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = 0
        async for line in answer.aiter_lines():
            assert '"error"' not in line, line
            finished += '"finish_reason":"' in line
            lines += line.startswith("data: {")
            if leave_after is not None and lines > leave_after and finished < body["n"]:
                ends["left"] += 1
                return
            if line == "data: [DONE]":
                assert finished == body["n"]
                ends["done"] += 1
                return
    raise AssertionError("the stream ended without [DONE]")


async def _retune(client: httpx.AsyncClient, url: str, done: asyncio.Event) -> None:
    draw = random.Random(1)
    while not done.is_set():
        config = {
            **LiveConfig().to_json(),
            "max_num_batched_tokens": draw.choice([32, 64, 512]),
            "max_num_seqs": draw.choice([4, 16, 32]),
            "scheduling_policy": draw.choice(["fcfs", "priority", "sla-aware"]),
        }
        lease = {"lease_s": 0.1} if draw.random() < 0.5 else {}
        answer = await client.put(f"{url}/admin/live-config", json={"config": config, **lease})
        assert answer.status_code in (200, 202), answer.text
        await asyncio.sleep(0.05)


async def _load(server: EngineServer) -> Counter[str]:
    ends: Counter[str] = Counter()
    done = asyncio.Event()
    async with httpx.AsyncClient(timeout=120.0, limits=httpx.Limits(max_connections=None)) as client:
        retuning = asyncio.create_task(_retune(client, server.admin_url, done))
        await asyncio.gather(*(_one(client, server.url, i, ends) for i in range(NUM_REQUESTS)))
        done.set()
        await retuning
    return ends


def test_a_mixed_load_loses_nothing_and_replays(tiny_model: Path, tmp_path: Path) -> None:
    record = tmp_path / "steps.jsonl"
    flags = ("--kv-cache-memory", "600Ki", "--swap-memory", "400Ki", "--record-steps", str(record))
    with start_engine(tiny_model, *flags) as server:
        ends = asyncio.run(_load(server))
        assert ends["done"] + ends["left"] == NUM_REQUESTS
        assert ends["done"]
        assert ends["left"]

        def metrics() -> str:
            return httpx.get(f"{server.url}/metrics").text

        for gauge in (
            "num_requests_open",
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_ratio",
        ):
            wait_until(lambda gauge=gauge: f"trimtab_{gauge} 0.0" in metrics(), message=metrics)
        assert server.stop() == 0
        assert "do not balance" not in server.log  # the check of the block books at rest
        assert "Traceback" not in server.log
    entries = list(replay(record))
    assert len({entry.generation for entry in entries}) > 2
    aborts = [d for entry in entries for d in entry.messages if isinstance(d.message, Abort)]
    assert aborts
