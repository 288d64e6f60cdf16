"""A client that leaves, wherever its request stands, frees the engine; so does a stop string."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import httpx
import pytest

from support.engine_server import EngineServer, wait_until

LONG = 1900  # tokens; far more than any of these tests waits for


def metric(server: EngineServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf"^{re.escape(name)} ([0-9.e+-]+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def running(server: EngineServer) -> float:
    return metric(server, "trimtab_num_requests_running")


def waiting(server: EngineServer) -> float:
    return metric(server, "trimtab_num_requests_waiting")


def idle(server: EngineServer) -> bool:
    return running(server) == 0 and waiting(server) == 0


def records(server: EngineServer, since: int) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = httpx.get(f"{server.admin_url}/admin/workload?since={since}").json()[
        "records"
    ]
    return made


def cursor(server: EngineServer) -> int:
    made: int = httpx.get(f"{server.admin_url}/admin/workload?since=0").json()["next"]
    return made


def post(server: EngineServer, path: str, headers: str = "", **body: Any) -> socket.socket:
    """Send a request on a socket of its own, which the test closes when it likes."""
    address = httpx.URL(server.url)
    made = socket.create_connection((address.host, address.port or 80))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    made.sendall(head.encode() + data)
    return made


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "streamed chat": ("/v1/chat/completions", {**CHAT, "stream": True}, 1),
    "buffered chat": ("/v1/chat/completions", CHAT, 1),
    "streamed choices": ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2, "stream": True}, 4),
    "buffered choices": ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2}, 4),
}


@pytest.mark.parametrize(("path", "body", "count"), REQUESTS.values(), ids=REQUESTS)
def test_a_client_that_leaves_frees_the_engine(
    served_engine: EngineServer, path: str, body: dict[str, Any], count: int
) -> None:
    before = cursor(served_engine)
    with post(served_engine, path, max_tokens=LONG, **body):
        wait_until(lambda: running(served_engine) == count)
    wait_until(lambda: idle(served_engine))
    made = records(served_engine, before)
    assert [record["outcome"] for record in made] == ["client_abort"] * count
    assert all(record["output_tokens"] < LONG for record in made)


def test_a_client_that_leaves_after_some_chunks_frees_the_engine(served_engine: EngineServer) -> None:
    before = cursor(served_engine)
    body = {"prompt": "hi", "max_tokens": LONG, "stream": True}
    with (
        httpx.Client(base_url=served_engine.url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        chunks = answer.iter_lines()
        for _ in range(6):
            next(chunks)
    wait_until(lambda: idle(served_engine))
    (record,) = records(served_engine, before)
    assert record["outcome"] == "client_abort"
    assert 0 < record["output_tokens"] < LONG


def test_a_client_that_leaves_the_queue_is_forgotten_and_others_go_on(guarded_engine: EngineServer) -> None:
    key = "Authorization: Bearer sk-anna\r\n"
    before = cursor(guarded_engine)
    body: dict[str, Any] = {"prompt": "hi", "max_tokens": LONG, "stream": True}
    with (
        post(guarded_engine, "/v1/completions", key, **body),
        post(guarded_engine, "/v1/completions", key, **body),
    ):
        wait_until(lambda: running(guarded_engine) == 2)
        with post(guarded_engine, "/v1/completions", key, **body):
            wait_until(lambda: waiting(guarded_engine) == 1)
        wait_until(lambda: waiting(guarded_engine) == 0)
        assert running(guarded_engine) == 2
        (record,) = records(guarded_engine, before)
        assert (record["outcome"], record["output_tokens"]) == ("client_abort", 0)
    wait_until(lambda: idle(guarded_engine))


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
def test_a_stop_string_frees_the_engine(served_engine: EngineServer, stream: bool) -> None:
    before = cursor(served_engine)
    body = {"prompt": "hi", "max_tokens": LONG, "seed": 1, "stop": ["e", "a", " "], "stream": stream}
    answer = httpx.post(f"{served_engine.url}/v1/completions", json=body, timeout=60.0)
    assert '"finish_reason":"stop"' in answer.text
    wait_until(lambda: idle(served_engine))
    (record,) = records(served_engine, before)
    assert record["outcome"] == "stop"
    assert 0 < record["output_tokens"] < LONG / 2
