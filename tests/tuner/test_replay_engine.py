"""The replayer against the real engine with a tiny model: exact lengths both ways, prefix hits, and the server's own counters."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from support.engine_server import EngineServer, start_engine
from trimtab_tuner.cli import main
from trimtab_tuner.errors import ServerError
from trimtab_tuner.replay import ReplayOptions, replay
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import outcomes, summarise
from trimtab_tuner.trace import Trace, TraceRequest, load

SLO = Slo(60.0, 30.0)


def trace_of(*requests: TraceRequest, block: int | None = None) -> Trace:
    return Trace(requests, "made here", "records", block)


def put_live(server: EngineServer, config: dict[str, object]) -> None:
    answer = httpx.put(f"{server.admin_url}/admin/live-config", json={"config": config}, timeout=30.0)
    assert answer.status_code == 200, answer.text


def counter(server: EngineServer, name: str, **labels: str) -> float:
    total = 0.0
    for line in httpx.get(f"{server.url}/metrics", timeout=30.0).text.splitlines():
        found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? ([0-9.e+]+)", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return total


def test_the_engine_gives_as_many_tokens_as_the_trace_asks_each_with_its_time(
    served_engine: EngineServer,
) -> None:
    lengths = [(1, 1), (40, 7), (300, 3), (5, 60), (129, 16)]
    trace = trace_of(*(TraceRequest(0.02 * n, prompt, output) for n, (prompt, output) in enumerate(lengths)))
    result = replay(trace, served_engine.url, slo=SLO)
    assert [(r.status, r.prompt_tokens, r.output_tokens) for r in result.requests] == [
        ("ok", p, o) for p, o in lengths
    ]
    # Usage in every chunk: one delivery a token unless two went out together, never more, and in order.
    for request in result.requests:
        assert 1 <= len(request.token_times_s) <= request.asked_output_tokens
        assert all(a <= b for a, b in pairwise(request.token_times_s))
        assert request.first_token_s == request.token_times_s[0]
    assert result.meta["continuous_usage"] is True
    assert result.meta["token_ids_from"] == "the server's /tokenize of a sample text"
    summary = summarise(result)
    assert summary.attainment.fraction == 1.0
    assert summary.length_mismatches == 0


def test_the_command_judges_by_the_servers_targets_unless_told_otherwise(
    tiny_model: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2, "slo_class": "default"}\n')
    out = tmp_path / "r.json"
    classes = [
        {"name": "batch", "ttft_s": 60.0, "itl_s": 5.0, "objective": 90.0},
        {"name": "default", "ttft_s": 9.0, "itl_s": 3.0, "objective": 99.0},
    ]
    slo = {"default_class": "default", "classes": classes}
    # An engine of its own: the shared one could not be left as it was found, since generations only rise.
    with start_engine(tiny_model) as server:
        words = ["replay", "--url", server.url, "--trace", str(trace), "--out", str(out)]
        put_live(server, {**server.live_config()["incumbent"]["config"], "slo": slo})
        assert main(words) == 0
        assert ReplayResult.load(out).slo == Slo(9.0, 3.0, {"batch": Slo(60.0, 5.0)})
        assert main([*words, "--slo-itl", "7s", "--slo-class", "batch=1s,1s"]) == 0
        assert ReplayResult.load(out).slo == Slo(9.0, 7.0, {"batch": Slo(1.0, 1.0)})


def test_shared_prefixes_hit_the_engines_cache_and_fresh_contents_do_not(served_engine: EngineServer) -> None:
    shared = trace_of(
        TraceRequest(0.0, 200, 1, prefix_block_ids=tuple(range(12))),
        TraceRequest(2.0, 200, 1, prefix_block_ids=tuple(range(12))),
        block=16,
    )
    first, second = replay(shared, served_engine.url, slo=SLO).requests
    assert (first.cached_tokens or 0) == 0
    assert second.cached_tokens == 192
    own = trace_of(TraceRequest(0.0, 200, 1), TraceRequest(0.5, 200, 1))
    for _ in range(2):
        assert [r.cached_tokens or 0 for r in replay(own, served_engine.url, slo=SLO).requests] == [0, 0]


def test_the_server_counts_the_same_requests_and_tokens_as_the_replay(served_engine: EngineServer) -> None:
    trace = trace_of(*(TraceRequest(0.03 * n, 10 + n, 2 + n) for n in range(8)))
    tokens = counter(served_engine, "trimtab_generation_tokens_total")
    judged = counter(served_engine, "trimtab_slo_requests_total", slo="ttft")
    result = replay(trace, served_engine.url, slo=SLO, options=ReplayOptions(warmup_requests=1))
    probe, warm = 2, trace.requests[0].output_tokens
    asked = sum(r.output_tokens for r in trace.requests)
    assert counter(served_engine, "trimtab_generation_tokens_total") - tokens == asked + probe + warm
    assert (
        counter(served_engine, "trimtab_slo_requests_total", slo="ttft") - judged == len(outcomes(result)) + 2
    )
    assert result.meta["live_config"]["generation"] == str(
        served_engine.live_config()["in_force"]["generation"]
    )
    assert {r.generation for r in result.requests} == {served_engine.live_config()["in_force"]["generation"]}


def test_an_unknown_slo_class_and_token_ids_outside_the_vocabulary_are_told_apart(
    served_engine: EngineServer,
) -> None:
    unknown = trace_of(TraceRequest(0.0, 5, 2, "no-such-class"), TraceRequest(0.01, 5, 2))
    refused, fine = replay(unknown, served_engine.url, slo=SLO).requests
    assert (refused.status, refused.http_status, fine.status) == ("failed", 400, "ok")
    assert "slo_class" in (refused.error or "")
    with pytest.raises(ServerError, match="got 400"):
        replay(
            unknown,
            served_engine.url,
            slo=SLO,
            options=ReplayOptions(token_id_range=(10_000_000, 10_000_100)),
        )


def test_what_the_engine_recorded_is_a_trace_of_what_was_sent(
    served_engine: EngineServer, tmp_path: Path
) -> None:
    workload = f"{served_engine.admin_url}/admin/workload"
    cursor = httpx.get(workload, timeout=30.0).json()["next"]
    lengths = [(48, 3), (33, 2), (48, 5)]
    blocks = ("a", "b", "c")
    sent = trace_of(
        *(TraceRequest(0.2 * n, p, o, prefix_block_ids=blocks) for n, (p, o) in enumerate(lengths)), block=16
    )
    replay(sent, served_engine.url, slo=SLO)
    path = tmp_path / "workload.json"
    path.write_text(httpx.get(workload, params={"since": cursor}, timeout=30.0).text)
    recorded = load(path)
    # The replayer's own test request comes first.
    found = recorded.requests[1:]
    assert [(r.prompt_tokens, r.output_tokens) for r in found] == lengths
    assert recorded.prefix_block_tokens == 16
    first, second, third = (r.prefix_block_ids or () for r in found)
    assert first[:2] == second[:2] == third[:2]
    assert recorded.span_s > 0.0
