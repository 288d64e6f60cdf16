"""Percentile rules: pooled samples, failures at infinity, refusals, and attainment over what was offered."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.replay_results import replay_result, request_result
from trimtab_tuner.quantiles import Blocks, interval, quantile, wilson
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import judge, outcomes, summarise, tpot_s

FINITE = st.lists(st.floats(0.0, 1e3), min_size=1, max_size=200)


@given(FINITE, st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_numpys_linear_ones(samples: list[float], q: float) -> None:
    assert quantile(np.array(samples), q) == pytest.approx(
        float(np.quantile(samples, q)), rel=1e-12, abs=1e-12
    )


def test_a_quantile_that_reaches_into_failures_is_infinite_and_one_below_is_exact() -> None:
    samples = np.array([1.0, 2.0, 3.0, math.inf])
    assert quantile(samples, 0.5) == 2.5
    assert quantile(samples, 2 / 3) == pytest.approx(3.0)
    assert quantile(samples, 0.9) == math.inf
    assert quantile(np.array([math.inf, math.inf]), 0.5) == math.inf


@given(st.lists(st.integers(1, 5), min_size=6, max_size=12), st.integers(0, 1000))
def test_a_bootstrap_replicate_is_the_quantile_of_the_blocks_drawn(sizes: list[int], seed: int) -> None:
    times = [float(block) + 0.01 * n for block, size in enumerate(sizes) for n in range(size)]
    samples = np.random.default_rng(seed).exponential(size=len(times))
    blocks = Blocks.draw(times, 1.0, seed, replicates=3)
    assert blocks is not None
    got = blocks.quantile_replicates(samples, np.arange(len(times)), [0.5, 0.9])
    for row, weights in enumerate(blocks.weights):
        drawn = np.repeat(samples, weights[blocks.of_request])
        assert got[row].tolist() == pytest.approx(np.quantile(drawn, [0.5, 0.9]).tolist())


def test_intervals_are_wider_when_a_whole_block_is_slow_than_when_slowness_is_spread() -> None:
    def spread_of(slow: set[int]) -> float:
        requests = [request_result(n, n / 10.0, ttft_s=2.0 if n in slow else 0.1) for n in range(400)]
        found = summarise(replay_result(requests), block_s=2.0).ttft_attainment.interval
        assert found is not None
        return found.high - found.low

    assert spread_of(set(range(100, 180))) > 1.5 * spread_of(set(range(0, 400, 5)))


def test_few_blocks_give_no_interval_and_wilson_stays_sensible_at_the_ends() -> None:
    assert Blocks.draw([0.0, 1.0, 2.0, 3.0], 1.0, 0) is None
    assert interval(np.array([math.nan])) is None
    assert wilson(60, 60).high == pytest.approx(1.0)
    assert 0.95 < wilson(60, 60).low < 1.0
    assert wilson(0, 60).low == pytest.approx(0.0)


def test_p99_of_ttft_is_refused_below_300_requests_and_says_so() -> None:
    few = summarise(replay_result([request_result(n, float(n)) for n in range(299)])).ttft
    assert (few.p99, few.note) == (None, "p99 needs 300 requests: not shown")
    assert few.p90 == pytest.approx(0.1)
    enough = summarise(replay_result([request_result(n, float(n)) for n in range(300)])).ttft
    assert enough.p99 == pytest.approx(0.1)
    assert enough.note is None


def test_latency_counts_from_the_intended_send_however_late_the_send_was() -> None:
    late = request_result(0, 10.0, ttft_s=0.5, sent_s=10.4)
    summary = summarise(replay_result([late]))
    assert summary.ttft.max == pytest.approx(0.5)
    assert summary.send_error.max == pytest.approx(0.4)


def test_failures_worsen_every_tail_and_count_as_offered() -> None:
    good = [request_result(n, float(n)) for n in range(96)]
    bad = [
        request_result(96, 96.0, ttft_s=None, status="rejected", asked_output_tokens=3, http_status=503),
        request_result(97, 97.0, gaps_s=(0.02,), status="truncated", asked_output_tokens=9),
        request_result(98, 98.0, ttft_s=None, status="failed", asked_output_tokens=1, gaps_s=()),
        request_result(99, 99.0, ttft_s=None, status="timeout", asked_output_tokens=5),
    ]
    summary = summarise(replay_result([*good, *bad]))
    assert summary.failures == {"rejected": 1, "truncated": 1, "failed": 1, "timeout": 1}
    assert summary.ttft.max == summary.itl.max == summary.e2e.max == math.inf
    assert summary.attainment.met == 96
    assert summary.attainment.offered == 100
    assert summary.itl.n == 96 * 2 + 1 + 3  # a request of one token has no gap that could have failed
    assert summary.stalled_requests == 0  # failed is not stalled


def test_one_long_gap_among_many_shows_in_the_longest_gap_though_the_pool_hides_it() -> None:
    requests = [request_result(n, float(n), gaps_s=[0.02] * 199 + [0.9]) for n in range(5)]
    summary = summarise(replay_result(requests))
    assert summary.itl.p99 == pytest.approx(0.02)
    assert summary.max_gap.p50 == pytest.approx(0.9)
    assert summary.stalled_requests == 5
    assert summary.itl_attainment.fraction == 0.0
    assert summary.ttft_attainment.fraction == 1.0
    assert summary.goodput_rps == 0.0


def test_tpot_is_the_mean_after_the_first_token_and_undefined_for_one() -> None:
    assert tpot_s(request_result(0, gaps_s=(0.1, 0.3))) == pytest.approx(0.2)
    assert tpot_s(request_result(0, gaps_s=())) is None
    # two tokens in one delivery: three deliveries, four tokens
    assert tpot_s(request_result(0, gaps_s=(0.1, 0.3), output_tokens=5)) == pytest.approx(0.1)


def test_cut_off_requests_count_only_when_they_were_already_late() -> None:
    slo = Slo(1.0, 0.1)
    waiting = request_result(0, 10.0, ttft_s=None, status="cancelled", finish_s=10.5)
    late = request_result(1, 10.0, ttft_s=None, status="cancelled", finish_s=11.5)
    stalled = request_result(2, 10.0, gaps_s=(0.02,), status="cancelled", finish_s=10.5)
    streaming = request_result(3, 10.0, gaps_s=(0.02,), status="cancelled", finish_s=10.13)
    assert judge(waiting, slo) is None
    assert judge(streaming, slo) is None
    assert [
        (o.ttft_met, o.itl_met) for o in outcomes(replay_result([waiting, late, stalled, streaming], slo))
    ] == [
        (False, True),
        (True, False),
    ]
    summary = summarise(replay_result([waiting, late, stalled, streaming], slo))
    assert (summary.n_cancelled, summary.attainment.offered, summary.e2e.n) == (4, 2, 0)


def test_each_class_is_judged_by_its_own_targets_and_reported_apart() -> None:
    slo = Slo(1.0, 0.1, {"batch": Slo(60.0, 5.0)})
    requests = [
        request_result(n, float(n), ttft_s=3.0, slo_class="batch" if n % 2 else "default") for n in range(10)
    ]
    summary = summarise(replay_result(requests, slo))
    assert summary.attainment.met == 5
    assert summary.by_class["batch"].attainment.fraction == 1.0
    assert summary.by_class["default"].attainment.fraction == 0.0


def test_a_summary_is_strict_json_with_infinity_as_text() -> None:
    requests = [request_result(n, float(n)) for n in range(20)] + [
        request_result(20, 20.0, ttft_s=None, status="failed")
    ]
    document = json.loads(json.dumps(summarise(replay_result(requests)).to_json(), allow_nan=False))
    assert document["ttft"]["max"] == "inf"
    assert document["attainment"] | {"interval": None} == {
        "met": 20,
        "offered": 21,
        "fraction": 0.952381,
        "interval": None,
    }
    assert document["slo"] == {"ttft_s": 1.0, "itl_s": 0.1}


def test_nothing_measured_is_said_and_not_invented() -> None:
    summary = summarise(replay_result([]))
    assert (summary.ttft.n, summary.ttft.p50, summary.ttft.note) == (0, None, "no requests")
    assert summary.attainment.fraction is None
