"""One engine for this folder, set up so that one knob matters much: a single sequence at a time while requests come in bursts.

All times are counted in lone requests of this machine at this moment, so that what decides are places in a queue.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engine_server import EngineServer, start_engine

TARGET_LONE = 1.5
BURSTS, OF, TOKENS = 9, 8, 100


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path) -> Iterator[EngineServer]:
    """One at a time; the TTFT target is TARGET_LONE lone requests.

    So the queue of a burst breaks it, also on a machine that got four times as fast since, and requests that need not queue keep
    it. ITL has room.
    """
    with start_engine(tiny_model, "--max-num-seqs", "1", "--slo-ttft", "60", "--slo-itl", "60") as server:
        _set_target(server)
        yield server


def _set_target(server: EngineServer) -> None:
    target_s = TARGET_LONE * min(_lone_request_s(server) for _ in range(3))
    config = server.live_config()["incumbent"]["config"]
    config["slo"]["classes"][0]["ttft_s"] = max(0.01, target_s)
    url = f"{server.admin_url}/admin/live-config"
    httpx.put(url, json={"source": "Spec", "config": config}, timeout=60.0).raise_for_status()


def _lone_request_s(server: EngineServer) -> float:
    body = {"model": server.model_name, "prompt": [7] * 20, "max_tokens": TOKENS, "ignore_eos": True}
    begun = time.monotonic()
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0).raise_for_status()
    return time.monotonic() - begun


@pytest.fixture(scope="session")
def start_config(shared_engine: EngineServer) -> dict[str, Any]:
    """The engine's live config before any test."""
    found: dict[str, Any] = shared_engine.live_config()["incumbent"]["config"]
    return found


@pytest.fixture
def engine(shared_engine: EngineServer, start_config: dict[str, Any]) -> Iterator[EngineServer]:
    """The engine with its start values as incumbent and no candidate, before and after."""
    yield shared_engine
    url = f"{shared_engine.admin_url}/admin/live-config"
    httpx.delete(f"{url}/candidate", timeout=60.0).raise_for_status()
    if shared_engine.live_config()["incumbent"]["config"] != start_config:
        httpx.put(url, json={"source": "Spec", "config": start_config}, timeout=60.0).raise_for_status()


@pytest.fixture
def engine_of_now(engine: EngineServer) -> EngineServer:
    """The same with the target of this moment, for what real requests decide: tests may have run for minutes."""
    _set_target(engine)
    return engine


@pytest.fixture(scope="session")
def lone_s(shared_engine: EngineServer) -> float:
    """How long a request of TOKENS tokens took by itself when the engine's target was set."""
    classes = shared_engine.live_config()["incumbent"]["config"]["slo"]["classes"]
    target_s: float = classes[0]["ttft_s"]
    return target_s / TARGET_LONE


def write_trace(path: Path, rows: list[dict[str, float]]) -> Path:
    """A trace of prompts of 20 tokens."""
    path.write_text("".join(json.dumps({"prompt_tokens": 20, **row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def bursts(tmp_path_factory: pytest.TempPathFactory, lone_s: float) -> Path:
    """One at a time, the last of a burst waits for seven others; all at once they have time to spare until the next burst.

    Five pairs of blocks decide; a burst that a stall spoils, or two that fall into one block, are to be outvoted.
    """
    between_s = max(1.1, 7.5 * lone_s)
    rows = [
        {"arrival_s": burst * between_s + k * 0.005, "output_tokens": TOKENS}
        for burst in range(BURSTS)
        for k in range(OF)
    ]
    return write_trace(tmp_path_factory.mktemp("trace") / "bursts.jsonl", rows)


@pytest.fixture(scope="session")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty requests as good as at once: quickly measured, and on any machine most of them wait too long."""
    rows = [{"arrival_s": k * 0.001, "output_tokens": 40} for k in range(30)]
    return write_trace(tmp_path_factory.mktemp("trace") / "crowd.jsonl", rows)


@pytest.fixture(scope="session")
def straggler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The crowd, and one who comes much later: whatever is tried is in force for as long, and is not missed by who looks for it."""
    rows = [{"arrival_s": k * 0.001, "output_tokens": 40} for k in range(30)]
    rows.append({"arrival_s": 6.0, "output_tokens": 1})
    return write_trace(tmp_path_factory.mktemp("trace") / "straggler.jsonl", rows)


@pytest.fixture(scope="session")
def convoys(tmp_path_factory: pytest.TempPathFactory, lone_s: float) -> Path:
    """Four times a long request and four behind it. One at a time those wait for far longer than the target, and the long ones, which come
    when all is done, not at all: nobody is near it."""
    rows = [
        {"arrival_s": convoy * 9.5 * lone_s + k * 0.02, "output_tokens": 2 if k else 8 * TOKENS}
        for convoy in range(4)
        for k in range(5)
    ]
    return write_trace(tmp_path_factory.mktemp("trace") / "convoys.jsonl", rows)
