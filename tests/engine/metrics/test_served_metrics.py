"""The exposition of a real two-process server under real requests: identities, exact counts, starvation at once."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.engine_server import EngineServer, start_engine, wait_until
from support.streams import StreamedCompletion


class Scrape:
    """One scrape, summed over the labels that a test does not name."""

    def __init__(self, server: EngineServer) -> None:
        text = httpx.get(f"{server.url}/metrics", timeout=60.0).text
        self._samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def total(self, name: str, **labels: str) -> float:
        found = [s for s in self._samples if s.name == name]
        assert found, f"{name} is not exposed"
        return sum(s.value for s in found if labels.items() <= s.labels.items())


def leave_after_the_first_token(server: EngineServer) -> None:
    body = {"model": "tiny", "prompt": "Go on", "max_tokens": 450, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(timeout=60.0) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as answer,
    ):
        next(answer.iter_lines())


@pytest.fixture(scope="module")
def lenient(tiny_model: Path) -> Iterator[EngineServer]:
    """Targets that nothing can miss."""
    with start_engine(tiny_model, "--slo-ttft", "3600", "--slo-itl", "3600") as server:
        yield server


def complete(server: EngineServer, **body: Any) -> dict[str, Any]:
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"model": "tiny", "temperature": 0, **body}, timeout=60.0
    )
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def test_identities_hold_over_mixed_requests(lenient: EngineServer) -> None:
    usages = [
        complete(lenient, prompt="The sea is", max_tokens=7, ignore_eos=True),
        complete(lenient, prompt=["One", "Two, three"], max_tokens=1, ignore_eos=True),
    ]
    siblings = complete(
        lenient, prompt="Roll a die", max_tokens=5, n=3, temperature=1, seed=4, ignore_eos=True
    )
    stream = StreamedCompletion(lenient.url, max_tokens=12, ignore_eos=True)
    stream.join()
    assert stream.finish_reason == "length"
    refused = httpx.post(
        f"{lenient.url}/v1/completions", json={"model": "tiny", "prompt": "", "max_tokens": 4}, timeout=30.0
    )
    assert refused.status_code == 400
    leave_after_the_first_token(lenient)
    wait_until(lambda: Scrape(lenient).total("trimtab_num_requests_open") == 0)
    wait_until(lambda: Scrape(lenient).total("trimtab_num_requests_running") == 0)

    scrape = Scrape(lenient)
    finished = {
        reason: scrape.total("trimtab_requests_total", finished_reason=reason)
        for reason in ("stop", "length", "client_abort", "error", "rejected")
    }
    assert finished["length"] == 1 + 2 + 3 + 1, "a client's 400 is no request of the service"
    assert finished["error"] == finished["rejected"] == finished["stop"] == 0
    first_tokens = scrape.total("trimtab_time_to_first_token_seconds_count")
    tokens = scrape.total("trimtab_generation_tokens_total")
    assert scrape.total("trimtab_inter_token_latency_seconds_count") == tokens - first_tokens
    assert scrape.total("trimtab_e2e_request_latency_seconds_count") == sum(finished.values())
    met = scrape.total("trimtab_slo_requests_total", slo="ttft", outcome="met")
    assert met == first_tokens
    assert scrape.total("trimtab_slo_requests_total", outcome="violated") == 0
    assert finished["client_abort"] == 1
    delivered = (
        sum(u["completion_tokens"] for u in usages) + siblings["completion_tokens"] + (stream.num_tokens or 0)
    )
    assert tokens >= delivered
    # Prompts count once per choice that got a first token; usage counts a prompt once for its choices.
    assert scrape.total("trimtab_request_prompt_tokens_count") == sum(finished.values())
    for name in ("trimtab_num_requests_waiting", "trimtab_kv_cache_usage_ratio", "vllm:num_requests_running"):
        assert scrape.total(name) == 0, name


def test_prompt_and_cached_tokens_equal_the_sum_of_usages(tiny_model: Path) -> None:
    with start_engine(tiny_model) as server:
        prompt = [7 + i % 90 for i in range(40)]
        usages = [complete(server, prompt=prompt, max_tokens=3, ignore_eos=True) for _ in range(3)]
        scrape = Scrape(server)
    assert scrape.total("trimtab_prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages) == 120
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert scrape.total("trimtab_prompt_tokens_cached_total") == cached == 2 * 32
    assert scrape.total("trimtab_generation_tokens_total") == sum(u["completion_tokens"] for u in usages)
    assert scrape.total("trimtab_prefix_cache_hits_total") == cached


def test_request_held_back_unscheduled_shows_at_once(tiny_model: Path) -> None:
    flags = ("--max-num-seqs", "1", "--slo-ttft", "0.2", "--slo-itl", "3600")
    with start_engine(tiny_model, *flags) as server:
        running = StreamedCompletion(server.url, max_tokens=1900, ignore_eos=True)
        running.wait_flowing()
        # Before it comes: on a busy machine its target may have passed when the engine stands still.
        before = Scrape(server).total("trimtab_slo_requests_total", slo="ttft", outcome="violated")
        held = StreamedCompletion(server.url, max_tokens=1, prompt="And what about me", ignore_eos=True)
        waiting = "trimtab_num_requests_waiting_by_reason"
        wait_until(lambda: Scrape(server).total(waiting, reason="capacity") == 1, step_s=0.001)
        # The engine stands still, so that nothing can be scheduled however quick it is: the books are kept without it.
        os.kill(server.engine_pid, signal.SIGSTOP)

        def seen() -> bool:
            scrape = Scrape(server)
            return (
                scrape.total("trimtab_slo_requests_total", slo="ttft", outcome="violated") > before
                and scrape.total("trimtab_oldest_waiting_seconds") >= 0.2
            )

        wait_until(seen)
        assert not held.flowing.is_set(), "it was counted while nothing had come yet"
        os.kill(server.engine_pid, signal.SIGCONT)
        running.join()
        held.join()
        assert (running.finish_reason, held.finish_reason) == ("length", "length")
