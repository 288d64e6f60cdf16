"""Cutting, scaling and retiming: what must stay the same stays the same."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_tuner.arrivals import parse_mode, retime
from trimtab_tuner.burstiness import describe, index_of_dispersion, interarrival_cv, window_counts
from trimtab_tuner.errors import InputError
from trimtab_tuner.synthesise import Shape, synthesise
from trimtab_tuner.trace import Trace, TraceRequest, load


def trace_of(arrivals: list[float], block: int | None = None) -> Trace:
    requests = [
        TraceRequest(at, 10 + n % 7, 1 + n % 5, prefix_block_ids=(n % 3,) if block else None)
        for n, at in enumerate(arrivals)
    ]
    return Trace(tuple(requests), "made here", "records", block)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    gaps = draw(st.lists(st.floats(0.0, 50.0), min_size=1, max_size=60))
    at = [0.0]
    for gap in gaps:
        at.append(at[-1] + gap)
    if at[-1] < 1e-3:
        at[-1] = 1.0
    return trace_of(at)


MODES = st.sampled_from(["uniform", "poisson", "gamma:0.5", "gamma:2", "gamma(4)"])


@given(traces(), MODES, st.integers(0, 2**32))
def test_every_mode_keeps_requests_order_and_mean_rate(trace: Trace, mode: str, seed: int) -> None:
    timed = retime(trace, mode, seed)
    assert timed.lengths_hash == trace.lengths_hash
    assert [(r.prompt_tokens, r.output_tokens) for r in timed.requests] == [
        (r.prompt_tokens, r.output_tokens) for r in trace.requests
    ]
    assert timed.rate_rps == pytest.approx(trace.rate_rps, rel=1e-9)
    assert retime(trace, mode, seed).requests == timed.requests


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gamma_has_the_asked_variation_and_other_seeds_other_arrivals(cv: float) -> None:
    trace = trace_of([float(n) for n in range(20_000)])
    timed = retime(trace, f"gamma:{cv}", seed=1)
    assert interarrival_cv([r.arrival_s for r in timed.requests]) == pytest.approx(cv, rel=0.08)
    assert retime(trace, f"gamma:{cv}", seed=2).hash != timed.hash


def test_poisson_counts_vary_as_much_as_their_mean_and_uniform_ones_not_at_all() -> None:
    trace = trace_of([0.1 * n for n in range(30_000)])
    poisson = [r.arrival_s for r in retime(trace, "poisson", 3).requests]
    uniform = [r.arrival_s for r in retime(trace, "uniform").requests]
    assert interarrival_cv(poisson) == pytest.approx(1.0, abs=0.05)
    assert index_of_dispersion(poisson, 10.0) == pytest.approx(1.0, abs=0.25)
    assert interarrival_cv(uniform) == pytest.approx(0.0, abs=1e-6)
    assert (index_of_dispersion(uniform, 10.0) or 0.0) < 0.01


def test_windows_count_whole_windows_only() -> None:
    assert window_counts([0.0, 0.5, 1.0, 2.2, 2.9, 3.1], 1.0).tolist() == [2, 1, 2]
    assert interarrival_cv([0.0, 1.0]) is None
    assert interarrival_cv([5.0, 5.0, 5.0]) is None
    assert index_of_dispersion([0.0, 1.0, 2.0], 10.0) is None


@pytest.mark.parametrize(
    "text", ["bursty", "gamma", "gamma:", "gamma:0", "gamma:-1", "gamma:nan", "gamma:1e999", "Uniform"]
)
def test_an_unknown_mode_says_which_there_are(text: str) -> None:
    with pytest.raises(InputError, match="recorded, uniform, poisson, gamma:CV"):
        parse_mode(text)


def test_arrivals_at_one_instant_have_no_rate_to_keep() -> None:
    with pytest.raises(InputError, match="one instant"):
        retime(trace_of([0.0, 0.0, 0.0]), "uniform")
    assert retime(trace_of([0.0]), "uniform").requests == trace_of([0.0]).requests


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50), st.randoms())
def test_burstiness_does_not_depend_on_the_order_in_which_times_are_given(
    times: list[float], random: Random
) -> None:
    # Two sends that are due at one instant may go out in either order.
    shuffled = list(times)
    random.shuffle(shuffled)
    assert describe(shuffled) == describe(sorted(times))


def test_slices_start_at_zero_and_remember_what_was_done() -> None:
    trace = trace_of([0.0, 1.0, 2.0, 5.0, 9.0])
    window = trace.slice_time(1.0, 5.0)
    assert [r.arrival_s for r in window.requests] == [0.0, 1.0]
    assert [r.arrival_s for r in trace.slice_count(3, 10).requests] == [0.0, 4.0]
    assert window.scale_rate(2.0).changes == ("slice 1:5 s", "rate ×2")
    for start, end in ((5.0, 1.0), (-1.0, 2.0), (6.0, 8.0)):
        with pytest.raises(InputError):
            trace.slice_time(start, end)


@given(traces(), st.floats(0.01, 100.0))
def test_scaling_the_rate_keeps_the_shape_of_bursts(trace: Trace, factor: float) -> None:
    before = interarrival_cv([r.arrival_s for r in trace.requests])
    after = interarrival_cv([r.arrival_s for r in trace.scale_rate(factor).requests])
    assert after == (None if before is None else pytest.approx(before, rel=1e-6, abs=1e-9))
    assert trace.scale_to_span(60.0).span_s == pytest.approx(60.0)


def test_scaled_lengths_never_reach_zero_and_prefix_blocks_shrink_alike() -> None:
    trace = trace_of([0.0, 1.0], block=512).scale_lengths(8)
    assert trace.prefix_block_tokens == 64
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(1, 1), (1, 1)]
    with pytest.raises(InputError, match="scale-lengths"):
        trace.scale_lengths(0.0)


def test_long_requests_can_be_left_out_and_that_is_remembered() -> None:
    trace = trace_of([0.0, 1.0, 2.0])
    kept = trace.drop_longer(13)
    assert [r.prompt_tokens for r in kept.requests] == [10, 11]
    assert kept.changes == ("dropped 1 of 3 longer than 13 tokens",)
    with pytest.raises(InputError):
        trace.drop_longer(3)


def test_the_synthetic_segment_is_bursty_mixed_and_the_same_for_the_same_seed() -> None:
    trace = synthesise(Shape())
    assert len(trace) == 60
    assert (interarrival_cv([r.arrival_s for r in trace.requests]) or 0.0) >= 3.0
    assert sum(r.prompt_tokens == 1500 for r in trace.requests) == 3
    assert trace.span_s == pytest.approx(60.0)
    assert synthesise(Shape()).hash == trace.hash != synthesise(Shape(seed=8)).hash
    with pytest.raises(InputError, match="--cv"):
        synthesise(Shape(requests=10, cv=8.0))


def test_the_shipped_segment_is_what_its_maker_makes() -> None:
    shipped = load(Path(__file__).parents[2] / "examples/traces/mixed_bursty.jsonl")
    assert shipped.hash == synthesise(Shape()).hash
