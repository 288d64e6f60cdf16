"""Live configuration over real processes: pushes, the mounted file, leases under load and at rest, a stalled engine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.broken_json import BROKEN_JSON
from support.engine_server import EngineServer, start_engine, wait_until
from support.streams import StreamedCompletion
from trimtab_engine.core.live import LiveConfig


def config(budget: int = 512, seqs: int = 4, **other: object) -> dict[str, object]:
    return {**LiveConfig().to_json(), "max_num_batched_tokens": budget, "max_num_seqs": seqs, **other}


def write(path: Path, document: object) -> None:
    """As a ConfigMap does it: the new content appears at once, under another inode."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(document))
    temporary.replace(path)


@pytest.fixture(scope="module")
def live_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "live.json"
    write(path, {"generation": 7, "source": "Recommendation", "config": config(640)})
    return path


@pytest.fixture(scope="module")
def server(tiny_model: Path, live_file: Path) -> Iterator[EngineServer]:
    with start_engine(
        tiny_model, "--live-config", str(live_file), "--stall-timeout", "0.5", "--max-queued-requests", "1"
    ) as started:
        yield started


def put(server: EngineServer, **document: Any) -> httpx.Response:
    return httpx.put(f"{server.admin_url}/admin/live-config", json=document, timeout=60.0)


def push(server: EngineServer, **document: Any) -> dict[str, Any]:
    """Push what must be taken; the answer."""
    answer = put(server, **document)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def in_force(server: EngineServer) -> int:
    generation: int = server.live_config()["in_force"]["generation"]
    return generation


def test_the_server_boots_from_a_valid_file(server: EngineServer) -> None:
    readback = server.live_config()
    assert readback["incumbent"]["generation"] == 7
    assert readback["incumbent"]["source"] == "Recommendation"
    assert readback["in_force"]["config"]["max_num_batched_tokens"] == 640
    assert readback["boot_error"] is None
    assert readback["ceilings"] == {"max_num_batched_tokens": 8192, "max_num_seqs": 256}


def test_a_push_is_in_force_when_it_is_answered(server: EngineServer) -> None:
    before = server.live_config()
    body = push(server, config=config(768), source="Spec")
    assert body["generation"] == before["highest_generation"] + 1  # the engine numbers what brings no number
    assert body["old"] == before["in_force"]
    assert body["new"]["config"]["max_num_batched_tokens"] == 768
    assert body["readback"] == server.live_config()
    metrics = httpx.get(f"{server.url}/metrics").text
    assert f"trimtab_live_config_generation {float(body['generation'])}" in metrics
    assert f'generation="{body["generation"]}",max_num_batched_tokens="768"' in metrics


@pytest.mark.parametrize(
    ("document", "path", "allowed"),
    [
        ({"config": config(8193)}, "config.max_num_batched_tokens", "an integer from 1 to 8192"),
        ({"config": config(seqs=257)}, "config.max_num_seqs", "an integer from 1 to 256"),
        ({"config": config(2, 4)}, "config.max_num_batched_tokens", "at least max_num_seqs (4)"),
        ({"config": config(scheduling_policy="lifo")}, "config.scheduling_policy", "one of fcfs, priority"),
        ({"config": {**config(), "typo": 1}}, "config.typo", "known fields are"),
        ({"config": config(), "lease_s": 121}, "lease_s", "above 0 and up to 120"),
        ({"config": config(), "generation": "8"}, "generation", "an integer"),
        ({"config": config(), "source": "Me"}, "source", "one of Spec, Recommendation"),
        ({"config": config(), "until": 3}, "until", "known fields are"),
        ({"source": "Spec"}, "config", "a JSON object"),
    ],
)
def test_a_wrong_document_is_answered_with_path_and_range(
    server: EngineServer, document: dict[str, Any], path: str, allowed: str
) -> None:
    before = server.live_config()
    answer = put(server, **document)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["path"] == path
    assert allowed in error["allowed"]
    assert allowed in error["message"]
    assert server.live_config() == before


@pytest.mark.parametrize("body", ["{", "[]", '{"config": NaN}'])
def test_a_body_that_is_no_json_object_is_a_400(server: EngineServer, body: str) -> None:
    answer = httpx.put(f"{server.admin_url}/admin/live-config", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["path"] in ("body", "document")


@pytest.mark.parametrize("broken", BROKEN_JSON, ids=range(len(BROKEN_JSON)))
def test_what_only_looks_like_json_is_a_400_too(server: EngineServer, broken: str) -> None:
    before = server.live_config()
    answer = httpx.put(f"{server.admin_url}/admin/live-config", content=broken, timeout=10.0)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["path"] == "body"
    assert server.live_config() == before


def test_an_old_generation_is_a_409_and_changes_nothing(server: EngineServer) -> None:
    before = server.live_config()
    answer = put(server, config=config(64), generation=before["highest_generation"] - 1)
    assert answer.status_code == 409
    assert answer.json()["readback"] == before == server.live_config()
    same = before["incumbent"]
    assert put(server, **same).status_code == 200  # a repetition is no conflict
    assert put(server, **{**same, "config": config(64)}).status_code == 409


def test_a_lease_ends_by_itself_while_idle(server: EngineServer) -> None:
    incumbent = server.live_config()["incumbent"]
    body = push(server, config=config(96), lease_s=60)
    candidate = body["readback"]["candidate"]
    assert candidate["generation"] == body["generation"] == body["readback"]["in_force"]["generation"]
    assert abs(candidate["until"] - 60 - time.time()) < 30.0
    assert body["readback"]["incumbent"] == incumbent
    assert put(server, generation=body["generation"], config=config(96), lease_s=0.3).is_success
    wait_until(lambda: server.live_config()["candidate"] is None)
    readback = server.live_config()
    assert readback["in_force"] == readback["incumbent"] == incumbent
    assert put(server, generation=body["generation"], config=config(96), lease_s=5).status_code == 409


def test_a_lease_ends_by_itself_under_load(server: EngineServer) -> None:
    incumbent = in_force(server)
    stream = StreamedCompletion(server.url, max_tokens=1900)
    stream.wait_flowing()
    push(server, config=config(96, 2), lease_s=0.2)
    wait_until(lambda: in_force(server) == incumbent)
    assert stream.is_alive(), "the lease was meant to end under load"
    assert stream.result().num_tokens == 1900


def test_a_renewed_lease_goes_on(server: EngineServer) -> None:
    incumbent = in_force(server)
    first = push(server, config=config(96), lease_s=60)
    again = push(server, generation=first["generation"], config=config(96), lease_s=90)
    assert again["readback"]["candidate"]["until"] > first["readback"]["candidate"]["until"] + 20
    assert in_force(server) == first["generation"]
    ended = httpx.delete(f"{server.admin_url}/admin/live-config/candidate")
    assert ended.status_code == 200
    assert ended.json()["candidate"] is None
    assert in_force(server) == incumbent
    assert httpx.delete(f"{server.admin_url}/admin/live-config/candidate").status_code == 200


def test_changes_under_load_never_change_what_is_said(server: EngineServer) -> None:
    want = StreamedCompletion(server.url, max_tokens=300).result()
    stream = StreamedCompletion(server.url, max_tokens=300)
    for budget in (64, 1024, 16, 512):
        push(server, config=config(budget, 4, scheduling_policy="priority" if budget == 16 else "fcfs"))
    assert stream.result().text == want.text
    assert stream.finish_reason == "length"


def test_the_file_is_followed(server: EngineServer, live_file: Path) -> None:
    generation = server.live_config()["highest_generation"] + 1
    write(live_file, {"generation": generation, "source": "Spec", "config": config(320)})
    wait_until(lambda: in_force(server) == generation)
    assert server.live_config()["incumbent"]["config"]["max_num_batched_tokens"] == 320
    live_file.write_text("{ broken")
    wait_until(lambda: server.live_config()["file_error"] is not None)
    assert "live.json" in server.live_config()["file_error"]
    assert in_force(server) == generation
    write(live_file, {"generation": generation - 1, "source": "Spec", "config": config(333)})
    wait_until(lambda: f"generation {generation - 1} is not taken" in str(server.live_config()["file_error"]))
    assert in_force(server) == generation
    write(live_file, {"generation": generation + 1, "source": "Spec", "config": config(334)})
    wait_until(lambda: in_force(server) == generation + 1)
    assert server.live_config()["file_error"] is None


def test_a_full_queue_is_refused_with_retry_after(server: EngineServer) -> None:
    push(server, config=config(512, 1))
    running, waiting = (StreamedCompletion(server.url, max_tokens=1200) for _ in range(2))
    wait_until(lambda: "trimtab_num_requests_open 2.0" in httpx.get(f"{server.url}/metrics").text)
    refused = StreamedCompletion(server.url, max_tokens=1).result()
    assert refused.status == 503
    assert refused.headers is not None
    assert refused.headers["retry-after"] == "1"
    assert refused.error is not None
    assert refused.error["code"] == "queue_full"
    assert "--max-queued-requests is 1" in refused.error["message"]
    assert (running.result().num_tokens, waiting.result().num_tokens) == (1200, 1200)
    push(server, config=config())


def test_a_stalled_engine_is_unhealthy_and_a_push_stays_pending(server: EngineServer) -> None:
    before = in_force(server)
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        answer = put(server, config=config(448))
        assert answer.status_code == 202
        generation = answer.json()["generation"]
        pending = answer.json()["readback"]["pending"]
        assert pending["generation"] == generation
        assert pending["config"]["max_num_batched_tokens"] == 448
        assert in_force(server) == before
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert "stalled" in health.json()["reason"]
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: in_force(server) == generation)
    assert server.live_config()["pending"] is None
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_requests_in_a_stalled_engine_make_it_unhealthy(server: EngineServer) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        stream = StreamedCompletion(server.url, max_tokens=5)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert stream.result().num_tokens == 5
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_invalid_file_at_boot_falls_back_to_the_flags(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    write(path, {"generation": 9, "source": "Spec", "config": config(1024)})
    flags = ["--ceiling-max-num-batched-tokens", "512", "--max-num-batched-tokens", "384"]
    # Read back at once, not when loaded: whoever debugs a start must not have to wait for it.
    with start_engine(tiny_model, "--live-config", str(path), *flags, wait_ready=False) as server:
        readback = server.live_config()
    assert readback["in_force"]["config"]["max_num_batched_tokens"] == 384
    assert readback["in_force"]["generation"] == 0
    assert "config.max_num_batched_tokens: 1024 is not allowed" in readback["boot_error"]
    assert "live.json" in readback["boot_error"]
