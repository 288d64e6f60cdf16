"""What a simulation is read as: exact counts by class and target, blocks of the same requests, sums of steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.simulations import run, server, step_time, trace_of
from trimtab_engine.core.live import Slo, SloClass
from trimtab_engine.core.request import Request
from trimtab_engine.core.step import Step, TokenEvent
from trimtab_tuner.diagnosis import diagnose
from trimtab_tuner.metrics.reading import Reading
from trimtab_tuner.simulate import measured
from trimtab_tuner.simulate.simulate import Simulation
from trimtab_tuner.trace import Trace, TraceRequest

SLO = Slo("default", (SloClass("default", 2.5, 1.5), SloClass("fast", 0.5, 0.5)))


def classed(*requests: tuple[float, int, int, str]) -> Trace:
    return Trace(tuple(TraceRequest(*each) for each in requests), "made here", "records")


def read(simulation: Simulation, slo: Slo = SLO, first: int = 0) -> Reading:
    from_s = simulation.result.requests[first].intended_s
    return measured.reading(simulation, measured.verdicts(simulation, slo, first), from_s)


def test_requests_are_judged_by_the_targets_of_their_class_each_target_once() -> None:
    # Steps of 1 s: each first token after 1 s, each gap 1 s.
    trace = classed((0.0, 8, 3, "default"), (10.0, 8, 3, "fast"), (20.0, 8, 1, "fast"), (30.0, 8, 3, "gone"))
    reading = read(run(trace, tally_from_s=0.0))
    assert {key: (c.met, c.violated) for key, c in reading.counts.items()} == {
        ("default", "ttft"): (2, 0),  # a class that is gone is the default's
        ("default", "itl"): (2, 0),
        ("fast", "ttft"): (0, 2),
        ("fast", "itl"): (1, 1),  # one token has no gap: nothing in it is late
    }
    assert (reading.n, reading.violated) == (4, 3)


def test_a_shed_request_violates_both_targets_and_is_a_fault_and_one_that_can_never_fit_is_neither() -> None:
    slo = Slo("default", (SloClass("default", 5.0, 5.0),))
    late = trace_of((0.0, 10, 200), (0.1, 10, 2))
    reading = read(run(late, on=server(seqs=1, policy="sla-aware", shed_late=True), tally_from_s=0.0), slo)
    assert reading.slo("ttft").violated == reading.slo("itl").violated == 1
    assert (reading.finished, reading.faults) == (1.0, 1.0)
    assert reading.oldest_waiting_s is not None
    too_long = read(
        run(trace_of((0.0, 8, 2), (1.0, 900, 2)), on=server(num_blocks=10), tally_from_s=0.0), slo
    )
    assert (too_long.n, too_long.faults) == (1, 0.0)


def test_blocks_hold_the_same_requests_whatever_the_config() -> None:
    trace = trace_of(*((n * 0.9, 40, 6) for n in range(30)))
    tight = Slo("default", (SloClass("default", 1.2, 1.2),))
    found = []
    for budget in (16, 64):
        judged = measured.verdicts(run(trace, on=server(budget)), tight, 6)
        found.append(measured.blocks(judged, 6 * 0.9, trace.requests[-1].arrival_s, 4))
    assert [b.n for b in found[0]] == [b.n for b in found[1]] == [6, 6, 6, 6]
    assert found[0] != found[1]
    assert sum(b.violated for b in found[0]) == sum(v.ttft_violated + v.itl_violated for v in
        measured.verdicts(run(trace, on=server(16)), tight, 6))  # fmt: skip


def test_steps_add_up_alike_skipped_over_or_one_by_one() -> None:
    trace = trace_of(*((n * 7.0, 40, 30) for n in range(6)))
    fast, slow = (
        run(trace, step_time(0.5, tokens=0.01), tally_from_s=0.0, skip_ahead=s) for s in (True, False)
    )
    assert fast.num_skipped > 0 == slow.num_skipped
    a, b = read(fast), read(slow)
    for name in ("decode", "mixed"):
        assert a.steps[name][0] == b.steps[name][0] > 0
        assert a.steps[name][1] == pytest.approx(b.steps[name][1])
    assert a.step_tokens == b.step_tokens == sum(r.asked_prompt_tokens + r.asked_output_tokens - 1 for r in
        fast.result.requests)  # fmt: skip
    assert a.running_mean == pytest.approx(b.running_mean)
    assert a.share_over_half_budget == pytest.approx(b.share_over_half_budget)
    assert sum(seconds for _, seconds in a.steps.values()) == pytest.approx(fast.busy_s)
    assert a.prompt_tokens_computed == 6 * 40


def test_blocks_hold_tokens_and_the_time_that_they_took_until_the_last_answer() -> None:
    simulation = run(trace_of(*((n * 5.0, 40, 30) for n in range(8))))
    judged = measured.verdicts(simulation, SLO, 2)
    requests = simulation.result.requests[2:]
    found = measured.blocks(judged, 10.0, 35.0, 4, requests)
    assert sum(block.tokens for block in found) == 6 * 30
    assert sum(block.seconds for block in found) == pytest.approx(
        max(r.finish_s or 0 for r in requests) - 10.0
    )


def test_what_came_before_the_judged_requests_is_left_out_of_steps_too() -> None:
    trace = trace_of((0.0, 40, 30), (100.0, 40, 30))
    whole, part = run(trace, tally_from_s=0.0), run(trace, tally_from_s=100.0)
    assert read(part, first=1).steps["decode"][0] * 2 == read(whole).steps["decode"][0]
    assert read(part, first=1).generation_tokens == 30.0


def test_waiting_for_capacity_and_a_full_pool_show_as_they_do_in_scrapes() -> None:
    full = run(trace_of(*((0.0, 30, 60) for _ in range(4))), on=server(num_blocks=12), tally_from_s=0.0)
    reading = read(full, Slo("default", (SloClass("default", 1.0, 1.0),)))
    assert reading.kv_p95 is not None
    assert reading.kv_p95 >= 0.95
    assert reading.preemptions == full.stats[0].preemptions_recompute > 0
    assert reading.waiting_capacity_mean is not None
    assert reading.waiting_capacity_mean > 0
    assert diagnose(reading, server(num_blocks=12).live).state == "memory-bound"
    queue = run(trace_of(*((0.0, 30, 20) for _ in range(6))), on=server(seqs=1), tally_from_s=0.0)
    waited = read(queue)
    assert waited.waiting_capacity_share is not None
    assert waited.waiting_capacity_share > 0.7
    assert waited.queue_mean_s is not None
    assert waited.queue_mean_s > 20


def test_requests_go_where_they_went_when_they_are_placed() -> None:
    trace = trace_of((0.0, 32, 2), (5.0, 32, 2), (10.0, 32, 2), prefixes=[(1, 2)] * 3)
    placed = run(trace, replicas=2, placement=(0, 1, 1), tally_from_s=0.0)
    assert [request.cached_tokens for request in placed.result.requests] == [0, 0, 16]
    assert placed.result.meta["routing"] == "as recorded"
    assert len(placed.tallies) == 2


def test_counting_steps_does_not_change_a_simulation_and_watching_its_progress_can_end_it() -> None:
    trace = trace_of(*((n * 0.7, 40, 9) for n in range(9)))
    assert run(trace, tally_from_s=0.0).result == run(trace).result
    seen: list[float] = []
    run(trace, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0

    def stop(done: float) -> None:
        if done > 0.5:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        run(trace, on_progress=stop)


class Watch:
    """Lengths of requests as they end, and the requests."""

    def __init__(self) -> None:
        self.ended: list[tuple[Request, int]] = []

    def on_step(self, replica: int, step: Step, begin_s: float, end_s: float) -> None:
        """Nothing."""

    def on_events(self, replica: int, events: Sequence[TokenEvent], now: float) -> None:
        """Keep those that ended."""
        self.ended += [(event.request, len(event.request.token_ids)) for event in events if event.finished]


def test_finished_requests_leave_no_tokens_behind_but_whoever_watches_sees_them() -> None:
    watch = Watch()
    run(trace_of((0.0, 30, 4)), observer=watch)
    ((request, length),) = watch.ended
    assert (length, request.token_ids, request.block_hashes) == (34, [], [])
