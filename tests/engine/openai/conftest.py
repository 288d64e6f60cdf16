"""The real `openai` client against real servers on the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from support.engine_server import EngineServer, start_engine
from trimtab_engine.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def client(served_engine: EngineServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served_engine.url}/v1", api_key="none", max_retries=0, timeout=60.0
    ) as made:
        yield made


@pytest.fixture(scope="session")
def http(served_engine: EngineServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served_engine.url, timeout=60.0) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(tiny_model / "tokenizer.json")


@pytest.fixture(scope="session")
def guarded_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A server with keys, trusted headers, two classes and a short queue; tests leave it as they found it."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("anna: sk-anna\nben: sk-ben\n")
    flags = [
        *("--api-keys", str(keys)),
        *("--trusted-class-header", "X-Class", "--trusted-tenant-header", "X-Tenant"),
        *("--max-num-seqs", "2", "--max-queued-requests", "2", "--served-model-name", "guarded"),
    ]
    with start_engine(tiny_model, *flags) as server:
        config = server.live_config()["in_force"]["config"]
        config["slo"]["classes"].append({"name": "batch", "ttft_s": 60.0, "itl_s": 60.0, "objective": 90.0})
        answer = httpx.put(f"{server.admin_url}/admin/live-config", json={"source": "Spec", "config": config})
        assert answer.status_code == 200, answer.text
        yield server
