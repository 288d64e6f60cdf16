"""Windows of snapshots: increases over resets and births, histograms against Prometheus' own rules."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from support.study import make_snapshot
from trimtab_tuner.metrics.snapshot import Snapshot, Window


def window(*bodies: str) -> Window:
    return Window([make_snapshot(float(i), body) for i, body in enumerate(bodies)])


def test_a_counter_counts_from_its_first_sample() -> None:
    assert window("a_total 5", "a_total 7", "a_total 12").increase("a_total") == 7


def test_a_series_born_inside_the_window_counts_from_zero() -> None:
    # A generation's series start at 0 when the generation comes into force.
    assert window('a_total{g="1"} 5', 'a_total{g="1"} 5\na_total{g="2"} 3').increase("a_total", g="2") == 3


def test_a_series_that_was_dropped_and_came_back_counts_from_zero() -> None:
    assert window('a_total{g="1"} 5', "b 1", 'a_total{g="1"} 2').increase("a_total", g="1") == 2


def test_a_metric_never_seen_is_none_and_one_without_matches_is_zero() -> None:
    w = window("a_total 1", "a_total 1")
    assert w.increase("b_total") is None
    assert w.increase("a_total", g="9") == 0


def test_a_restarted_process_is_seen_by_its_start_time_even_when_counters_grew() -> None:
    w = Window(
        [
            make_snapshot(0.0, "a_total 5", process_start_s=100.0),
            make_snapshot(1.0, "a_total 9", process_start_s=200.0),
        ]
    )
    assert w.restarts() == ("engine",)
    assert w.increase("a_total") == 9


def test_targets_are_summed_apart() -> None:
    w = Window(
        [
            make_snapshot(0.0, {"x": "a_total 5", "y": "a_total 100"}),
            make_snapshot(1.0, {"x": "a_total 6", "y": "a_total 2"}),
        ]
    )
    assert w.increase("a_total") == 1 + 2  # y fell: it began again at zero


@given(st.lists(st.integers(0, 20), min_size=2, max_size=30), st.sets(st.integers(1, 28)))
def test_the_increase_is_what_was_counted_whatever_the_restarts(gains: list[int], restarts: set[int]) -> None:
    # A restart is always between two scrapes; what was counted after the last scrape before it is lost for everybody.
    snapshots: list[Snapshot] = []
    value, start, want = 0, 1000.0, 0
    for index, gain in enumerate(gains):
        if index in restarts:
            value, start = 0, start + 10
        value += gain
        want += gain if index > 0 else 0
        snapshots.append(make_snapshot(float(index), f"a_total {value}", process_start_s=start))
    assert Window(snapshots).increase("a_total") == want


@given(st.lists(st.floats(0.001, 20.0), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], q: float) -> None:
    registry = CollectorRegistry()
    bounds = tuple(0.001 * 1.5**k for k in range(25))
    histogram = Histogram("h", "x", buckets=bounds, registry=registry)
    before = generate_latest(registry).decode()
    for value in values:
        histogram.observe(value)
    found = window(before, generate_latest(registry).decode()).histogram("h")
    assert found is not None
    assert found.count == len(values)
    assert found.mean() == pytest.approx(sum(values) / len(values))
    got = found.quantile(q)
    assert got is not None
    exact = sorted(values)[min(len(values) - 1, math.ceil(q * len(values) - 1e-9) - 1)]
    upper = next((b for b in bounds if b >= exact), bounds[-1])
    lower = max((b for b in bounds if b < upper), default=0.0)
    assert lower - 1e-9 <= got <= upper + 1e-9


def test_a_histogram_without_observations_has_no_quantile() -> None:
    body = 'h_bucket{le="1"} 4\nh_bucket{le="+Inf"} 4\nh_sum 2\nh_count 4'
    found = window(body, body).histogram("h")
    assert found is not None
    assert found.quantile(0.5) is None
    assert found.mean() is None


def test_the_share_above_a_bound_is_exact() -> None:
    zero = 'h_bucket{le="0.5"} 0\nh_bucket{le="1"} 0\nh_bucket{le="+Inf"} 0\nh_sum 0'
    some = 'h_bucket{le="0.5"} 3\nh_bucket{le="1"} 8\nh_bucket{le="+Inf"} 10\nh_sum 9'
    found = window(zero, some).histogram("h")
    assert found is not None
    assert found.share_above(0.5) == pytest.approx(0.7)
    assert found.share_above(1.0) == pytest.approx(0.2)
    assert found.quantile(0.99) == 1.0  # beyond the last finite bound there is only that bound
