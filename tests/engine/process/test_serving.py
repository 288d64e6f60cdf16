"""The server as its operator sees it: phases, health, facts."""

from __future__ import annotations

from pathlib import Path

import httpx

from support.engine_server import EngineServer


def test_a_ready_server_says_so_everywhere(served_engine: EngineServer) -> None:
    with httpx.Client(base_url=served_engine.url) as client:
        assert client.get("/ready").json() == {"ready": True, "phase": "ready"}
        assert client.get("/health").status_code == 200
        assert client.get("/ping").status_code == 200
        assert client.get("/version").json()["version"]


def test_info_tells_what_was_loaded(served_engine: EngineServer) -> None:
    info = httpx.get(f"{served_engine.admin_url}/admin/info").json()
    assert info["model_name"] == "tiny"
    assert info["vocab_size"] == 512
    assert info["max_model_len"] <= 2048
    assert info["engine_pid"] == served_engine.engine_pid


def test_metrics_stand_on_both_ports(served_engine: EngineServer) -> None:
    for base in (served_engine.url, served_engine.admin_url):
        answer = httpx.get(f"{base}/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "trimtab_live_config_generation 0.0" in answer.text


def test_the_http_process_has_no_torch(served_engine: EngineServer) -> None:
    assert "torch" not in Path(f"/proc/{served_engine.pid}/maps").read_text()
    assert "torch" in Path(f"/proc/{served_engine.engine_pid}/maps").read_text()


def test_a_request_id_is_echoed_or_made(served_engine: EngineServer) -> None:
    mine = httpx.get(f"{served_engine.url}/version", headers={"X-Request-Id": "my-id"})
    assert mine.headers["x-request-id"] == "my-id"
    made = httpx.get(f"{served_engine.url}/version", headers={"X-Request-Id": "with space"})
    assert len(made.headers["x-request-id"]) == 32
