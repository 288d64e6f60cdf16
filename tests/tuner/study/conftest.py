"""One engine for this folder, set up so that one knob matters much: a single sequence at a time while requests come in bursts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engine_server import EngineServer, start_engine


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path) -> Iterator[EngineServer]:
    # ITL has room: it must not break on a busy test machine.
    with start_engine(tiny_model, "--max-num-seqs", "1", "--slo-ttft", "0.3", "--slo-itl", "30") as server:
        yield server


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
    """Eight bursts of five requests, 100 tokens each: one at a time, the last of a burst waits for four others."""
    path = tmp_path_factory.mktemp("trace") / "bursts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"arrival_s": burst * 0.7 + k * 0.005, "prompt_tokens": 20, "output_tokens": 100})
            + "\n"
            for burst in range(8)
            for k in range(5)
        )
    )
    return path


@pytest.fixture(scope="session")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty requests at once: quickly measured, and most of them wait too long."""
    path = tmp_path_factory.mktemp("trace") / "crowd.jsonl"
    row = {"prompt_tokens": 20, "output_tokens": 40}
    path.write_text("".join(json.dumps({"arrival_s": k * 0.02, **row}) + "\n" for k in range(30)))
    return path
