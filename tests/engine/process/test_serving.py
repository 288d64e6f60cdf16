"""The server as its operator sees it: phases, health, facts."""

from __future__ import annotations

from pathlib import Path

import httpx

from support.engine_server import EngineServer
from trimtab_engine.core.step_time import StepFeatures, StepTimeModel


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
    # What a simulation of this engine needs to know.
    told = ("enable_prefix_caching", "prefill_first", "shed_late", "fair_tenants", "num_swap_blocks")
    assert [info[name] for name in told] == [True, False, False, False, 0]


def test_the_step_time_model_of_what_was_served_can_be_read(served_engine: EngineServer) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
    assert httpx.post(f"{served_engine.url}/v1/completions", json=body, timeout=60).status_code == 200
    answer = httpx.get(f"{served_engine.admin_url}/admin/step-model").json()
    score = answer["score"]
    assert score["num_steps"] + score["num_excluded"] > 0
    if score["num_steps"] >= 16:  # fewer only where the kernel took the CPU in nearly every step
        model = StepTimeModel.from_json(answer["model"])
        assert 0 < model.predict(StepFeatures(1, 1, 10, 0.0)) < 10


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
