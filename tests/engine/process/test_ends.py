"""How a server ends: draining, at once, or because one of its two processes died."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx

from support.engine_server import start_engine, wait_until
from support.streams import StreamedCompletion
from trimtab_engine.core.live import LiveConfig
from trimtab_engine.server.lifecycle import LINGER_S
from trimtab_engine.step_record import read, replay


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_drain_finishes_what_runs_and_refuses_what_comes(tiny_model: Path, tmp_path: Path) -> None:
    record = tmp_path / "steps.jsonl"
    # A pool of 99 blocks: both streams need more, so the record holds preemptions too.
    flags = ["--record-steps", str(record), "--kv-cache-memory", "800Ki"]
    with start_engine(tiny_model, *flags) as server:
        engine = server.engine_pid
        streams = [StreamedCompletion(server.url, max_tokens=1300, prompt=f"Story {i}") for i in range(2)]
        for stream in streams:
            stream.wait_flowing()
        live = {**LiveConfig().to_json(), "max_num_batched_tokens": 64, "max_num_seqs": 8}
        pushed = httpx.put(f"{server.admin_url}/admin/live-config", json={"config": live, "lease_s": 0.3})
        assert pushed.status_code == 200, pushed.text

        # What a preStop hook does: endpoints take time to spread, so new requests are still served, on no lasting line.
        assert httpx.post(f"{server.admin_url}/admin/drain").json() == {"ready": False, "phase": "leaving"}
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        served = StreamedCompletion(server.url, max_tokens=1).result()
        assert served.num_tokens == 1
        assert served.headers is not None
        assert (served.headers["connection"], served.headers["x-trimtab-phase"]) == ("close", "leaving")

        os.kill(server.pid, signal.SIGTERM)
        os.kill(engine, signal.SIGTERM)  # as a supervisor does that signals the whole group
        wait_until(lambda: httpx.get(f"{server.url}/ready").json()["phase"] == "refusing")
        refused = StreamedCompletion(server.url, max_tokens=1).result()
        assert refused.status == 503
        assert refused.headers is not None
        assert (refused.headers["retry-after"], refused.headers["x-trimtab-phase"]) == ("1", "refusing")
        assert refused.error is not None
        assert refused.error["code"] == "draining"
        assert any(stream.is_alive() for stream in streams), "the drain was meant to meet open streams"
        for stream in streams:
            stream.result()
            assert stream.transport_error is None
            assert (stream.num_tokens, stream.finish_reason, stream.done) == (1300, "length", True)
        assert server.process.wait(30.0) == 0
        assert gone(engine)

    header, _ = read(record)
    assert header.num_blocks == 99  # and the null block
    entries = list(replay(record))  # raises when a step comes out differently
    assert sum(len(e.token_ids) for e in entries) == 2601
    assert {e.generation for e in entries} == {0, 1}
    reach: dict[str, int] = {}
    restarts = 0
    for request_id, context, chunk in (row for entry in entries for row in entry.rows):
        restarts += context < reach.get(request_id, 0)
        reach[request_id] = context + chunk
    assert restarts > 0, "no request was preempted"


def test_a_held_engine_serves_on_after_the_signal_until_the_hold_ends(tiny_model: Path) -> None:
    def hold(body: object) -> httpx.Response:
        return httpx.put(f"{server.admin_url}/admin/drain", json=body)

    with start_engine(tiny_model) as server:
        wrongs: list[object] = [
            {},
            {"hold_s": -1},
            {"hold_s": 61},
            {"hold_s": True},
            {"hold_s": 5, "x": 1},
            [],
        ]
        for wrong in wrongs:
            answer = hold(wrong)
            assert answer.status_code == 400
            assert "seconds from 0 to 60" in answer.json()["error"]["message"]
        assert hold({"hold_s": 60}).status_code == 200
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready").json()["phase"] == "leaving")
        answer = httpx.get(f"{server.url}/ready")
        assert (answer.status_code, answer.json()) == (200, {"ready": True, "phase": "leaving", "held": True})
        served = StreamedCompletion(server.url, max_tokens=1).result()
        assert served.num_tokens == 1
        assert served.headers is not None
        assert served.headers["connection"] == "close"
        assert hold({"hold_s": 0}).json() == {"ready": False, "phase": "leaving"}
        assert server.process.wait(30.0) == 0


def test_who_is_still_sent_here_when_all_is_done_meets_a_503_and_no_closed_door(tiny_model: Path) -> None:
    with start_engine(tiny_model, "--leaving-time", "1.5", "--log-format", "json") as server:
        os.kill(server.pid, signal.SIGTERM)
        assert server.process.wait(30.0) == 0
        ended = datetime.now(UTC)
        lines = [json.loads(line) for line in server.log.splitlines()]
    [refusing] = [line for line in lines if line["message"] == "draining"]
    assert refusing["open"] == 0
    assert ended - datetime.fromisoformat(refusing["time"]) >= timedelta(seconds=LINGER_S)


def test_a_hold_does_not_outlive_the_engine_process(tiny_model: Path) -> None:
    with start_engine(tiny_model) as server:
        assert httpx.put(f"{server.admin_url}/admin/drain", json={"hold_s": 60}).status_code == 200
        engine = server.engine_pid
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready").json()["phase"] == "leaving")
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(30.0) == 1


def test_the_drain_limit_ends_what_is_left_with_an_error(tiny_model: Path) -> None:
    with start_engine(tiny_model, "--drain-timeout", "0.2", "--log-format", "json") as server:
        stream = StreamedCompletion(server.url, max_tokens=1900)
        stream.wait_flowing()
        os.kill(server.pid, signal.SIGTERM)
        stream.result()
        assert stream.error is not None
        assert "drain limit of 0.2 s" in stream.error["message"]
        assert stream.done
        assert server.process.wait(30.0) == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
    said = [line["message"] for line in lines if line["message"] != "loading"]  # as many lines as stages
    assert said == ["listening", "ready", "draining", "drain limit passed", "request"]
    request = lines[-1]
    assert (request["path"], request["status"]) == ("/v1/completions", 200)
    assert stream.headers is not None
    assert request["request_id"] == stream.headers["x-request-id"]


def test_a_drain_of_an_engine_that_hangs_ends_with_the_reason(tiny_model: Path) -> None:
    # What a liveness probe does to it: without a reason and a status the restart would look like somebody's wish.
    with start_engine(tiny_model, "--stall-timeout", "0.5", "--drain-timeout", "0.2") as server:
        stream = StreamedCompletion(server.url, max_tokens=1900)
        stream.wait_flowing()
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        os.kill(server.pid, signal.SIGTERM)
        assert server.process.wait(30.0) == 1
        assert stream.result().error is not None
        assert gone(engine)
        assert "trimtab-engine: engine stalled: it has work" in server.log.splitlines()[-1]


def test_a_second_signal_stops_at_once(tiny_model: Path) -> None:
    with start_engine(tiny_model, "--leaving-time", "3600") as server:
        engine = server.engine_pid
        os.kill(server.pid, signal.SIGINT)
        wait_until(lambda: httpx.get(f"{server.url}/ready").json()["phase"] == "leaving")
        streams = [StreamedCompletion(server.url, max_tokens=1900) for _ in range(2)]  # leaving still serves
        for stream in streams:
            stream.wait_flowing()
        os.kill(server.pid, signal.SIGINT)
        assert server.process.wait(30.0) == 128 + signal.SIGINT
        wait_until(lambda: gone(engine))
        for stream in streams:
            stream.result()
            assert stream.error is not None or stream.transport_error is not None


def test_a_signal_while_loading_ends_at_once(tiny_model: Path) -> None:
    with start_engine(tiny_model, wait_ready=False) as server:
        early = httpx.get(f"{server.url}/v1/models")
        assert early.status_code == 503
        assert early.headers["retry-after"] == "2"
        assert early.json()["error"]["code"] == "loading"
        ready = httpx.get(f"{server.url}/ready")
        assert ready.status_code == 503
        assert ready.json()["phase"] == "loading"
        assert httpx.get(f"{server.url}/health").status_code == 200
        engine = server.engine_pid
        assert server.stop() == 0
        assert gone(engine)


def test_the_engine_never_outlives_the_server(tiny_model: Path) -> None:
    with start_engine(tiny_model, wait_ready=False) as server:
        engine = server.engine_pid
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: gone(engine))


def test_the_engines_death_ends_streams_and_the_server_with_the_reason(tiny_model: Path) -> None:
    with start_engine(tiny_model) as server:
        streams = [StreamedCompletion(server.url, max_tokens=1900) for _ in range(2)]
        for stream in streams:
            stream.wait_flowing()
        os.kill(server.engine_pid, signal.SIGKILL)
        for stream in streams:
            stream.result()
            assert stream.error is not None
            assert stream.error["code"] == "engine_dead"
            assert "SIGKILL" in stream.error["message"]
            assert stream.done
        assert server.process.wait(30.0) == 1
        assert server.log.rstrip().splitlines()[-1] == (
            "trimtab-engine: the engine process was ended by signal SIGKILL"
        )
