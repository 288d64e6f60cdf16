"""The sequential test: its algebra, and its error rates and power on simulated queues with known truth."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_tuner.decide import compare, evidence, paired_differences
from trimtab_tuner.metrics.reading import Block

DIFFERENCES = st.lists(st.integers(-20, 20).map(float), max_size=14)


def test_evidence_has_mean_one_over_all_signs() -> None:
    # The guarantee itself, computed exactly: under "the arms are the same" every sign pattern is equally likely.
    sizes = [1.0, 4.0, 0.0, 2.0, 9.0, 1.0, 1.0, 3.0]
    total = sum(
        evidence([size * (1 if pattern >> i & 1 else -1) for i, size in enumerate(sizes)])
        for pattern in range(2 ** len(sizes))
    )
    assert total / 2 ** len(sizes) == pytest.approx(1.0)


@given(DIFFERENCES)
def test_evidence_does_not_depend_on_order_and_never_overflows(differences: list[float]) -> None:
    assert evidence(differences) == pytest.approx(evidence(differences[::-1]))
    assert 0 <= evidence([d * 1e6 for d in differences]) < math.inf


@given(DIFFERENCES)
def test_no_pair_counts_more_than_a_coin_toss(differences: list[float]) -> None:
    assert evidence(differences) <= 2 ** sum(d > 0 for d in differences) + 1e-9


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_swapping_the_arms_swaps_the_verdict(pairs: list[tuple[int, int]]) -> None:
    a, b = [Block(x, 10) for x, _ in pairs], [Block(y, 10) for _, y in pairs]
    one, other = compare(a, b, min_requests=1), compare(b, a, min_requests=1)
    swapped = {"better": "worse", "worse": "better", "inconclusive": "inconclusive"}
    assert other.verdict == swapped[one.verdict]
    assert other.difference == pytest.approx(-one.difference)
    assert one.low <= one.high


def test_five_clear_blocks_decide_and_four_do_not() -> None:
    bad, good = Block(5, 6), Block(0, 6)
    assert compare([bad] * 5, [good] * 5, min_requests=20).verdict == "better"
    four = compare([bad] * 4, [good] * 4, min_requests=20)
    assert four.verdict == "inconclusive"
    assert "can be chance" in four.reason


def test_too_few_requests_decide_nothing_however_clear() -> None:
    found = compare([Block(5, 5)] * 8, [Block(0, 5)] * 8, min_requests=41)
    assert found.verdict == "inconclusive"
    assert "40 requests in the smaller arm, 41 are needed" in found.reason


def test_one_huge_stall_proves_nothing() -> None:
    # A pooled test over gaps or requests would call this significant at once.
    bad = [Block(40, 50), *[Block(0, 5)] * 9]
    assert compare(bad, [Block(0, 50), *[Block(0, 5)] * 9], min_requests=50).verdict == "inconclusive"


def test_live_traffic_is_compared_by_share_and_empty_slices_say_nothing() -> None:
    differences = paired_differences(
        [Block(10, 100), Block(3, 10), Block(1, 0)],
        [Block(1, 10), Block(0, 10), Block(0, 9)],
        same_requests=False,
    )
    assert differences == pytest.approx((0.0, 3.0))


def simulate(
    rng: random.Random, *, budget_stall_s: float, blocks: int = 12, block_s: float = 5.0, noise: bool = True
) -> tuple[Block, ...]:
    """One minute of a small single-server queue: 60 arrivals in bursts, 8 % long prompts that stall everything.

    Whoever is in service during a stall violates. `noise` slows the machine for seconds at a time, across blocks, as a busy
    neighbour does. Arrivals are the same for every call with the same `rng` state of the caller's trace seed.
    """
    violated = [0] * blocks
    judged = [0] * blocks
    horizon = blocks * block_s
    slow: list[tuple[float, float]] = []
    at = rng.expovariate(1 / 15)
    while noise and at < horizon:
        slow.append((at, at + rng.expovariate(1 / 2.5)))
        at = slow[-1][1] + rng.expovariate(1 / 15)
    trace = random.Random(1)  # common random numbers: the same requests in every run
    now, free_at = 0.0, 0.0
    for _ in range(60):
        now += trace.gammavariate(0.25, 4.0)  # CV 2
        is_long = trace.random() < 0.08
        speed = 3.0 if any(a <= now <= b for a, b in slow) else 1.0
        service = (budget_stall_s if is_long else 0.25) * speed * rng.uniform(0.8, 1.25)
        begun = max(now, free_at)
        free_at = begun + service
        index = min(blocks - 1, int(now / block_s))
        judged[index] += 1
        if begun - now > 1.0 or (is_long and service > 1.0):
            violated[index] += 1
    return tuple(Block(v, n) for v, n in zip(violated, judged, strict=True))


def rate(verdicts: Sequence[str], verdict: str) -> float:
    return sum(v == verdict for v in verdicts) / len(verdicts)


def test_equal_arms_are_called_better_at_most_one_time_in_twenty() -> None:
    rng = random.Random(20)
    verdicts = [
        compare(simulate(rng, budget_stall_s=4.0), simulate(rng, budget_stall_s=4.0), min_requests=40).verdict
        for _ in range(1000)
    ]
    # 1,000 runs at a true 5 % would exceed 6.8 % one time in a hundred.
    assert rate(verdicts, "better") <= 0.05
    assert rate(verdicts, "worse") <= 0.05


def test_equal_arms_survive_a_look_after_every_block() -> None:
    # Optional stopping: the first crossing at any block counts as a decision.
    rng = random.Random(21)
    crossed = 0
    for _ in range(1000):
        a, b = simulate(rng, budget_stall_s=4.0), simulate(rng, budget_stall_s=4.0)
        differences = paired_differences(a, b)
        crossed += any(evidence(differences[:k]) >= 20 for k in range(1, len(differences) + 1))
    assert crossed / 1000 <= 0.05


def test_equal_arms_are_safe_through_a_whole_study() -> None:
    # The best of three exploratory runs is confirmed once, on fresh requests, against the first run of the incumbent.
    rng = random.Random(22)
    accepted = 0
    for _ in range(600):
        incumbent = simulate(rng, budget_stall_s=4.0)
        best = min(sum(b.violated for b in simulate(rng, budget_stall_s=4.0)) for _ in range(3))
        if best < sum(b.violated for b in incumbent):
            fresh = simulate(rng, budget_stall_s=4.0)
            accepted += compare(incumbent, fresh, min_requests=40).verdict == "better"
    assert accepted / 600 <= 0.05


def test_a_candidate_without_stalls_is_found_better_from_one_minute() -> None:
    rng = random.Random(23)
    verdicts = [
        compare(simulate(rng, budget_stall_s=6.0), simulate(rng, budget_stall_s=0.4), min_requests=40).verdict
        for _ in range(200)
    ]
    assert rate(verdicts, "better") >= 0.8
    assert rate(verdicts, "worse") == 0.0


def test_a_candidate_that_stalls_is_found_worse() -> None:
    rng = random.Random(24)
    verdicts = [
        compare(simulate(rng, budget_stall_s=0.4), simulate(rng, budget_stall_s=6.0), min_requests=40).verdict
        for _ in range(200)
    ]
    assert rate(verdicts, "worse") >= 0.8


def test_the_same_data_and_seed_give_the_same_interval() -> None:
    a = simulate(random.Random(1), budget_stall_s=6.0)
    b = simulate(random.Random(2), budget_stall_s=0.4)
    assert compare(a, b, min_requests=1, seed=3) == compare(a, b, min_requests=1, seed=3)
