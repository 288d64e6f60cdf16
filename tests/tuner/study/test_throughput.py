"""What a candidate costs in tokens a second: the blocks, the decision and its error rates, and what a run makes of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engine_server import EngineServer
from support.study_runs import OFFLINE, Simulated, cliff, tune
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.audit import Audit
from trimtab_tuner.decide import throughput
from trimtab_tuner.metrics.reading import Block
from trimtab_tuner.pace import Pace, by_arrival
from trimtab_tuner.result import RequestResult
from trimtab_tuner.run import RunResult

SPAN_S, BLOCKS = 60.0, 12


def request(arrival_s: float, finish_s: float | None, tokens: int = 10) -> RequestResult:
    times = [] if finish_s is None else [finish_s]
    return RequestResult(0, arrival_s, 1, tokens, token_times_s=times, finish_s=finish_s, output_tokens=tokens,
                         status="ok")  # fmt: skip


def served(
    rate: float, service_s: float, *, seed: int = 0, jitter: float = 0.05, delay_s: float = 0.0
) -> list[RequestResult]:
    """A queue with one server: `rate` requests a second for a minute, each `service_s` of work, answered `delay_s` later."""
    arrivals, work = random.Random(1), random.Random(seed)
    at = done = 0.0
    found = []
    while (at := at + arrivals.expovariate(rate)) < SPAN_S:
        done = max(at, done) + service_s * work.uniform(1 - jitter, 1 + jitter)
        found.append(request(at, done + delay_s))
    return found


def blocks(requests: list[RequestResult]) -> list[Block]:
    return [Block(0, 1, *pace) for pace in by_arrival(requests, 0.0, SPAN_S, BLOCKS)]


# Blocks


def test_a_block_takes_from_when_all_before_it_was_done_to_when_it_is_done() -> None:
    requests = [request(1, 4), request(11, 12), request(12, 13, tokens=5), request(21, 22)]
    assert by_arrival(requests, 0.0, 30.0, 3) == (Pace(10, 4), Pace(15, 9), Pace(10, 9))
    # The first block's request outlives the second's: that one took no time beyond it.
    assert by_arrival([request(1, 25), request(11, 12), request(21, 30)], 0.0, 30.0, 3) == (
        Pace(10, 25),
        Pace(10, 0),
        Pace(10, 5),
    )


def test_all_blocks_together_take_until_the_last_answer() -> None:
    requests = served(3.0, 0.4)
    found = by_arrival(requests, 0.0, SPAN_S, BLOCKS)
    assert sum(pace.seconds for pace in found) == pytest.approx(max(r.finish_s or 0 for r in requests))
    assert sum(pace.tokens for pace in found) == 10 * len(requests)


def test_requests_that_never_ended_and_stretches_without_any_are_no_trouble() -> None:
    assert by_arrival([], 0.0, 30.0, 2) == (Pace(0, 0), Pace(0, 0))
    assert by_arrival([request(29, None, tokens=0)], 0.0, 30.0, 2) == (Pace(0, 0), Pace(0, 0))


# The decision


def test_a_server_that_cannot_keep_up_loses_what_its_work_takes_longer() -> None:
    usual, slower = blocks(served(4.0, 0.3)), blocks(served(4.0, 0.33, seed=1))
    found = throughput(usual, slower, limit=0.03)
    assert found.verdict == "lost"
    assert found.loss == pytest.approx(1 - 0.3 / 0.33, abs=0.02)
    assert found.low is not None
    assert found.high is not None
    assert found.loss is not None
    assert 0 < found.low < found.loss < found.high
    assert found.incumbent_per_s is not None
    assert f"{found.incumbent_per_s:.1f}" in found.reason
    assert f"{found.candidate_per_s:.1f}" in found.reason
    assert "3.0% may be lost" in found.reason
    assert throughput(usual, slower, limit=0.2).verdict == "kept"


def test_a_server_with_time_to_spare_loses_nothing_by_answering_later() -> None:
    usual = blocks(served(1.5, 0.3))
    for other in (served(1.5, 0.36, seed=1), served(1.5, 0.3, delay_s=2.0)):
        found = throughput(usual, blocks(other), limit=0.03)
        assert found.verdict == "kept", found.reason


def test_fewer_tokens_in_the_same_time_are_a_loss() -> None:
    usual, cut = [Block(0, 1, 100, 5)] * 8, [Block(0, 1, 80, 5)] * 8
    found = throughput(usual, cut, limit=0.03)
    assert found.verdict == "lost"
    assert found.loss == pytest.approx(0.2)


def test_noise_alone_is_called_a_loss_in_at_most_one_comparison_of_twenty() -> None:
    def lost(make: Callable[[int], list[Block]], seed: int) -> bool:
        return throughput(make(2 * seed), make(2 * seed + 1), limit=0.0).verdict == "lost"

    def busy(seed: int) -> list[Block]:
        return blocks(served(4.0, 0.3, seed=seed, jitter=0.3))

    def slices(seed: int) -> list[Block]:
        rng = random.Random(seed)
        return [Block(0, 1, 600 * rng.uniform(0.7, 1.3), 60.0) for _ in range(8)]

    assert sum(lost(busy, seed) for seed in range(200)) <= 10
    assert sum(lost(slices, seed) for seed in range(200)) <= 10


def test_a_loss_that_noise_could_be_is_kept_even_where_none_may_be_lost() -> None:
    rng = random.Random(3)
    pairs = [(100 * rng.uniform(0.8, 1.2), 97 * rng.uniform(0.8, 1.2)) for _ in range(8)]
    usual, other = ([Block(0, 1, pair[arm], 10) for pair in pairs] for arm in (0, 1))
    assert throughput(usual, other, limit=0.0).verdict == "kept"


@pytest.mark.parametrize(
    ("usual", "other"),
    [([], []), ([Block(1, 5)] * 8, [Block(1, 5)] * 8), ([Block(0, 1, 100, 5)], [Block(0, 1)])],
)
def test_without_numbers_the_loss_is_unknown(usual: list[Block], other: list[Block]) -> None:
    assert throughput(usual, other, limit=0.03).verdict == "unknown"


AMOUNTS = st.one_of(st.just(0.0), st.floats(0.001, 1000))
PACES = st.tuples(AMOUNTS, AMOUNTS)


@given(st.lists(st.tuples(PACES, PACES), max_size=12))
def test_never_do_both_arms_lose_to_each_other(
    pairs: list[tuple[tuple[float, float], tuple[float, float]]],
) -> None:
    a, b = ([Block(0, 1, *pair[arm]) for pair in pairs] for arm in (0, 1))
    one, other = throughput(a, b, limit=0.0), throughput(b, a, limit=0.0)
    assert not one.verdict == other.verdict == "lost"


# A run


def tuned(
    engine: EngineServer,
    seconds: Callable[[LiveConfig], float] | None,
    limit: float | None,
    engines: Callable[[LiveConfig], int] = lambda _: 1,
    **options: Any,
) -> tuple[RunResult, Audit]:
    """A run on an engine whose configs take so many seconds a block."""

    def prepare(evaluator: Simulated) -> None:
        evaluator.seconds, evaluator.engines = seconds, engines

    audit = Audit()
    limits = dataclasses.replace(OFFLINE, max_throughput_loss=limit)
    result, _ = tune(engine.admin_url, cliff, limits=limits, prepare=prepare, audit=audit, **options)
    return result, audit


def small_is_slow(config: LiveConfig) -> float:
    return 1.0 if config.max_num_batched_tokens > 512 else 1.25


def test_a_confirmed_candidate_that_costs_too_much_keeps_the_incumbent(engine: EngineServer) -> None:
    before = engine.live_config()["incumbent"]
    result, audit = tuned(engine, small_is_slow, 0.03, same_requests=False, pairs=10, apply=True)
    assert result.outcome == "Kept"
    assert "targets missed in" in result.reason, "it was better for all that"
    assert "below the incumbent's" in result.reason
    assert engine.live_config()["incumbent"] == before
    said = next(line for line in audit.lines if line["event"] == "throughput")
    assert said["verdict"] == "lost"
    verdict = result.to_json()["verdict"]
    assert isinstance(verdict, dict)
    assert verdict["throughput"]["loss"] == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("limit", [0.3, None])
@pytest.mark.parametrize("same_requests", [True, False])
def test_what_the_owner_allows_to_be_lost_is_promoted(
    engine: EngineServer, same_requests: bool, limit: float | None
) -> None:
    result, _ = tuned(engine, small_is_slow, limit, same_requests=same_requests, pairs=10)
    assert result.outcome == "Recommended", result.reason


def test_tokens_are_counted_by_engine_where_fewer_try_a_candidate(engine: EngineServer) -> None:
    result, _ = tuned(
        engine,
        lambda _: 1.0,
        0.03,
        same_requests=False,
        pairs=10,
        engines=lambda config: 1 if config.max_num_batched_tokens <= 512 else 4,
    )
    assert result.outcome == "Recommended", result.reason


def test_a_trial_that_costs_too_much_already_leaves_the_place_to_another(engine: EngineServer) -> None:
    slow: list[LiveConfig] = []

    def first_good_one_is_slow(config: LiveConfig) -> float:
        if config.max_num_batched_tokens <= 512 and not slow:
            slow.append(config)
        return 1.25 if config in slow else 1.0

    result, _ = tuned(engine, first_good_one_is_slow, 0.03, max_trials=10)
    assert result.outcome == "Recommended", result.reason
    assert result.after not in slow
    trial = next(t for t in result.trials if t.config in slow)
    assert trial.decision == "no better"
    assert "tokens a second" in trial.reason
    assert trial.score is not None
    assert not trial.score.feasible, "so that the study looks elsewhere"


def test_unknown_throughput_keeps_the_incumbent_where_it_is_limited(engine: EngineServer) -> None:
    result, _ = tuned(engine, None, 0.03)
    assert result.outcome == "Kept"
    assert "its tokens a second are not known" in result.reason
