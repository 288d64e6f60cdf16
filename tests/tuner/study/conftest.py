"""One engine for this folder, set up so that one knob matters much: a single sequence at a time while requests come in bursts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engine_server import EngineServer, start_engine


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path) -> Iterator[EngineServer]:
    """One at a time; the TTFT target is one and a half lone requests of this machine, at this moment.

    So the queue of a burst breaks it on a fast machine as on a slow one (up to six times faster or busier than it was when
    measured), and requests that need not queue keep it. ITL has room.
    """
    with start_engine(tiny_model, "--max-num-seqs", "1", "--slo-ttft", "60", "--slo-itl", "60") as server:
        target_s = 1.5 * min(_lone_request_s(server) for _ in range(3))
        config = server.live_config()["incumbent"]["config"]
        config["slo"]["classes"][0]["ttft_s"] = max(0.01, target_s)
        url = f"{server.admin_url}/admin/live-config"
        httpx.put(url, json={"source": "Spec", "config": config}, timeout=30.0).raise_for_status()
        yield server


def _lone_request_s(server: EngineServer) -> float:
    body = {"model": server.model_name, "prompt": [7] * 20, "max_tokens": 100, "ignore_eos": True}
    begun = time.monotonic()
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0).raise_for_status()
    return time.monotonic() - begun


@pytest.fixture
def engine(shared_engine: EngineServer) -> Iterator[EngineServer]:
    """The engine with its start values as incumbent and no candidate, before and after."""
    yield shared_engine
    reset(shared_engine)


def reset(server: EngineServer) -> None:
    url = f"{server.admin_url}/admin/live-config"
    httpx.delete(f"{url}/candidate", timeout=30.0).raise_for_status()
    incumbent = server.live_config()["incumbent"]
    config: dict[str, Any] = {**incumbent["config"], "max_num_seqs": 1, "max_num_batched_tokens": 2048}
    if config != incumbent["config"]:
        httpx.put(url, json={"source": "Spec", "config": config}, timeout=30.0).raise_for_status()


@pytest.fixture(scope="session")
def bursts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven bursts of eight requests, 100 tokens each: one at a time, the last of a burst waits for seven others.

    Five pairs of blocks decide; on a busy machine two bursts may fall into one block.
    """
    path = tmp_path_factory.mktemp("trace") / "bursts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"arrival_s": burst * 1.1 + k * 0.005, "prompt_tokens": 20, "output_tokens": 100})
            + "\n"
            for burst in range(7)
            for k in range(8)
        )
    )
    return path


@pytest.fixture(scope="session")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty requests as good as at once: quickly measured, and on any machine most of them wait too long."""
    path = tmp_path_factory.mktemp("trace") / "crowd.jsonl"
    row = {"prompt_tokens": 20, "output_tokens": 40}
    path.write_text("".join(json.dumps({"arrival_s": k * 0.001, **row}) + "\n" for k in range(30)))
    return path
