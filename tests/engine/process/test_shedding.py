"""Shedding over real sockets: what can no longer be in time gets 503 with Retry-After, streamed or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.engine_server import EngineServer, start_engine, wait_until
from support.tiny_models import tiny_chat_model

# Well within the five seconds for which the place is held at rest, and far more than a step takes beside other tests: a first token that
# the step-time model expects too late even alone is not shed.
TARGET_S = 0.5
HOLD_TOKENS = 7900
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    model = tiny_chat_model(tmp_path_factory.mktemp("long") / "tiny", max_position_embeddings=8192)
    flags = ("--scheduling-policy", "sla-aware", "--shed-late", "--max-num-seqs", "1")
    with start_engine(model, *flags) as started:
        yield started


def body(path: str, **fields: Any) -> dict[str, Any]:
    words: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    )
    return {"model": "tiny", "max_tokens": 2, **words, **fields}


@pytest.fixture
def busy(server: EngineServer) -> Iterator[None]:
    """One request that holds the only place until the test is over."""
    gone = threading.Event()
    started = threading.Event()

    def hold() -> None:
        asked = {
            "model": "tiny",
            "prompt": "long",
            "max_tokens": HOLD_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=120) as answer:
            for _ in answer.iter_lines():
                started.set()
                if gone.is_set():
                    return

    thread = threading.Thread(target=hold)
    thread.start()
    assert started.wait(60)
    yield
    gone.set()
    thread.join(60)


def shed_count(server: EngineServer) -> float:
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith('trimtab_rejections_total{reason="shed"}'):
            return float(line.split()[-1])
    return 0.0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
def test_a_request_that_waited_too_long_gets_503_and_when_to_come_back(
    server: EngineServer, busy: None, path: str, stream: bool
) -> None:
    before = shed_count(server)
    answer = httpx.post(server.url + path, json=body(path, stream=stream, slo_ttft_s=TARGET_S), timeout=60)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["code"] == "shed"
    assert f"its first token can no longer come within {TARGET_S} s" in error["message"]
    wait_until(lambda: shed_count(server) == before + 1, message=lambda: f"{shed_count(server)}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
def test_a_request_with_time_is_served_as_ever(server: EngineServer, path: str, stream: bool) -> None:
    answer = httpx.post(server.url + path, json=body(path, stream=stream, slo_ttft_s=600.0), timeout=60)
    assert answer.status_code == 200
    if stream:
        assert answer.text.startswith("data: {")
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("field", ["slo_ttft_s", "slo_itl_s"])
def test_targets_out_of_range_are_refused_with_the_range(server: EngineServer, field: str) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body("/v1/completions", **{field: 0}), timeout=60
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (
        field,
        f"{field}: 0.0 is not allowed; a number of at least 0.001 and at most 3600",
    )
