"""Simulated serving: timelines that can be computed by hand, and what must hold for every trace."""

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import clocks
from support.simulations import SLO, run, server, step_time, token_times, trace_of
from trimtab_engine.core.step import Step
from trimtab_engine.core.step_time import StepFeatures
from trimtab_tuner.commands.trace import describe
from trimtab_tuner.errors import InputError
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.simulate.cost import Scatter, ScatteredCost
from trimtab_tuner.simulate.fleet import Delays
from trimtab_tuner.simulate.simulate import Simulation, live_slo
from trimtab_tuner.simulate.stop_rule import StopRule
from trimtab_tuner.simulate.tokens import SyntheticTokens
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import summarise
from trimtab_tuner.trace import Trace, TraceRequest


def test_a_request_alone_takes_its_chunks_and_then_a_step_a_token() -> None:
    # 100 tokens at a budget of 64 are two steps; the second brings the first token.
    simulation = run(trace_of((0.5, 100, 3)))
    assert token_times(simulation) == [[2.5, 3.5, 4.5]]
    request = simulation.result.requests[0]
    assert (request.status, request.first_token_s, request.finish_s) == ("ok", 2.5, 4.5)
    assert (request.prompt_tokens, request.output_tokens, request.cached_tokens) == (100, 3, 0)
    assert simulation.scheduling_delays_s == [0.0]
    assert simulation.busy_s == 4.0


def test_a_request_that_comes_during_a_step_joins_the_next_one() -> None:
    simulation = run(trace_of((0.0, 10, 4), (1.5, 10, 1)))
    assert token_times(simulation) == [[1.0, 2.0, 3.0, 4.0], [3.0]]
    assert simulation.scheduling_delays_s == [0.0, 0.5]


def test_a_request_that_comes_at_the_moment_a_step_begins_is_part_of_it() -> None:
    simulation = run(trace_of((0.0, 10, 4), (2.0, 10, 1)))
    assert token_times(simulation) == [[1.0, 2.0, 3.0, 4.0], [3.0]]
    assert simulation.scheduling_delays_s == [0.0, 0.0]


def test_every_term_of_the_step_time_counts() -> None:
    cost = step_time(1.0, tokens=0.5, sequences=0.25, decode_context=0.125, prefill_attention=0.0625)
    # First step: 3 tokens, 1 row, chunk 3 on nothing: 3 * 1.5 = 4.5 pairs. Second: 1 token that sees 3.
    first = 1.0 + 0.5 * 2 + 0.25 + 0.0625 * 4.5
    assert token_times(run(trace_of((0.0, 3, 2)), cost)) == [[first, first + 1.0 + 0.25 + 0.125 * 3]]


def test_prefill_first_stalls_a_stream_for_a_whole_prompt_and_chunks_do_not() -> None:
    cost = step_time(1.0, tokens=1.0)
    trace = trace_of((0.0, 2, 4), (1.5, 41, 1))
    chunked = token_times(run(trace, cost, server(budget=11, seqs=4)))[0]
    stalled = token_times(run(trace, cost, server(budget=11, seqs=4, prefill_first=True)))[0]
    gaps = [max(b - a for a, b in pairwise(times)) for times in (chunked, stalled)]
    assert gaps == [11.0, 42.0]


def test_delays_of_the_way_in_and_out_are_added_to_every_request_and_token() -> None:
    plain = run(trace_of((0.0, 10, 3)))
    delayed = run(trace_of((0.0, 10, 3)), on=server(delays=Delays(0.25, 0.125)))
    assert token_times(delayed) == [[at + 0.375 for at in times] for times in token_times(plain)]
    assert delayed.result.requests[0].finish_s == 3.375
    assert delayed.scheduling_delays_s == [0.25]


def test_a_request_that_can_never_run_fails_and_the_others_go_on() -> None:
    simulation = run(trace_of((0.0, 1000, 4), (0.1, 10, 1)), on=server(num_blocks=10))
    bad, good = simulation.result.requests
    assert (bad.status, bad.http_status, bad.token_times_s) == ("failed", 400, [])
    assert "more than the KV pool holds" in str(bad.error)
    assert good.status == "ok"
    assert summarise(simulation.result).n_failed == 1


def test_preempted_requests_still_say_all_their_tokens() -> None:
    simulation = run(trace_of(*((0.0, 30, 60) for _ in range(4))), on=server(num_blocks=12))
    assert simulation.stats[0].preemptions_recompute > 0
    assert [len(times) for times in token_times(simulation)] == [60] * 4
    assert all(request.status == "ok" for request in simulation.result.requests)


def test_swapped_requests_pay_for_their_copies_and_not_for_recomputation() -> None:
    trace = trace_of(*((0.0, 30, 60) for _ in range(4)))
    cost = step_time(1.0, tokens=0.1)  # recomputing is dear
    recomputed, free, paid = (
        run(trace, cost, server(num_blocks=12, num_swap_blocks=blocks, swap_block_s=seconds))
        for blocks, seconds in ((0, 0.0), (100, 0.0), (100, 0.01))
    )
    assert recomputed.stats[0].preemptions_swap == 0
    assert recomputed.stats[0].recomputed_tokens > 0
    assert free.stats[0].preemptions_swap == paid.stats[0].preemptions_swap > 0
    assert free.stats[0].recomputed_tokens == 0
    assert free.busy_s < paid.busy_s < recomputed.busy_s
    assert 0 < paid.num_swapped_in <= paid.num_swapped_out
    copies = paid.num_swapped_in + paid.num_swapped_out
    assert paid.busy_s == pytest.approx(free.busy_s + 0.01 * copies)  # both ways
    assert [len(times) for times in token_times(paid)] == [60] * 4


def test_tenants_of_the_trace_share_a_fair_server() -> None:
    rows = [TraceRequest(0.0, 20, 8, tenant="flood") for _ in range(30)]
    rows += [TraceRequest(0.5, 20, 8, tenant="modest") for _ in range(5)]
    trace = Trace(tuple(rows), "made here", "records")
    last = {}
    for fair in (False, True):
        done = run(trace, on=server(seqs=2, fair_tenants=fair)).result.requests
        last[fair] = max(request.finish_s or 0.0 for request in done[30:])
    assert last[True] < last[False] / 2


traces = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=12
).map(lambda rows: trace_of(*sorted((at / 4, prompt, output) for at, prompt, output in rows)))
servers = st.builds(
    server,
    budget=st.integers(8, 100),
    seqs=st.integers(1, 8),
    policy=st.sampled_from(["fcfs", "priority", "sla-aware"]),
    num_blocks=st.integers(9, 40),
    prefill_first=st.booleans(),
    num_swap_blocks=st.sampled_from([0, 0, 3, 50]),
    swap_block_s=st.sampled_from([0.0, 0.01]),
)
costs = st.builds(
    step_time,
    base=st.sampled_from([0.0, 0.1, 0.25]),
    tokens=st.sampled_from([0.0, 0.01]),
    tokens_from_16=st.sampled_from([0.0, 0.003]),
    decode_context=st.sampled_from([0.0, 0.0005]),
    prefill_attention=st.sampled_from([0.0, 0.0001]),
)


def outcome(simulation: Simulation) -> object:
    """All that a simulation says, but for how it was computed."""
    return (
        simulation.result.requests,
        simulation.result.meta,
        simulation.scheduling_delays_s,
        simulation.stats,
        simulation.num_steps,
    )


@given(trace=traces, on=servers, cost=costs, replicas=st.integers(1, 3))
def test_skipping_ahead_changes_nothing_that_comes_out(
    trace: Trace, on: Any, cost: Any, replicas: int
) -> None:
    skipped, stepped = (run(trace, cost, on, replicas=replicas, skip_ahead=skip) for skip in (True, False))
    assert stepped.num_skipped == 0
    assert outcome(skipped) == outcome(stepped)


@given(trace=traces, on=servers, cost=costs, routing=st.sampled_from(["round-robin", "least-loaded"]))
def test_every_request_ends_once_with_all_its_tokens_in_order(
    trace: Trace, on: Any, cost: Any, routing: str
) -> None:
    simulation = run(trace, cost, on, replicas=2, routing=routing)
    results = simulation.result.requests
    assert [result.index for result in results] == list(range(len(trace)))
    for request, result in zip(trace.requests, results, strict=True):
        assert result.status == "ok"
        assert len(result.token_times_s) == result.output_tokens == request.output_tokens
        assert result.token_times_s == sorted(result.token_times_s)
        assert result.token_times_s[0] >= request.arrival_s
        assert result.finish_s == result.token_times_s[-1]
    assert all(delay is not None and delay >= 0 for delay in simulation.scheduling_delays_s)
    assert all(stats.kv_used_fraction == 0 for stats in simulation.stats)


def test_skipping_ahead_skips_most_steps_of_long_outputs() -> None:
    simulation = run(trace_of((0.0, 10, 500), (3.0, 10, 400)), on=server(seqs=4))
    assert simulation.num_steps == 500
    assert simulation.num_skipped > 480


@pytest.mark.parametrize("mode", ["uniform", "poisson", "gamma:3"])
def test_the_same_seed_gives_the_same_result_and_another_seed_other_arrivals(mode: str) -> None:
    trace = trace_of(*((n * 0.5, 20 + n, 5) for n in range(30)))
    first, again, other = (run(trace, mode=mode, seed=seed) for seed in (1, 1, 2))
    assert outcome(first) == outcome(again)
    if mode != "uniform":
        assert token_times(first) != token_times(other)


def test_another_process_with_another_hash_seed_gives_the_same_result() -> None:
    code = (
        "from support.simulations import *;"
        "s = run(trace_of(*((n * 0.3, 20 + n % 7, 9) for n in range(40)), prefixes=[(n % 3, n % 5) for n in range(40)]),"
        " mode='poisson', replicas=2); print(token_times(s), s.stats)"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "tests"},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_no_clock_is_read_while_simulating(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(*((n * 0.2, 40, 30) for n in range(20)), prefixes=[(n % 2,) for n in range(20)])
    reference = run(trace, mode="gamma:2")  # imports and caches are filled before the clocks break
    with clocks.broken(monkeypatch):
        simulation = run(trace, mode="gamma:2")
        steps = [(StepFeatures(1, 1, 0, 0.0), seconds) for seconds in (0.9, 1.1)]
        scattered = run(trace, ScatteredCost(step_time(), Scatter(step_time(), steps), 1))
    assert outcome(simulation) == outcome(reference)
    assert scattered.num_steps > 0


def test_no_simulator_module_imports_a_clock() -> None:
    code = (
        "import ast, pathlib, trimtab_tuner.simulate as s;"
        "bad = [(p.name, n.lineno) for p in pathlib.Path(s.__path__[0]).glob('*.py') for n in ast.walk(ast.parse(p.read_text()))"
        " if isinstance(n, (ast.Import, ast.ImportFrom))"
        " and {'time', 'datetime'} & {getattr(n, 'module', None), *(a.name for a in n.names)}];"
        "print(bad)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_global_random_state_is_neither_used_nor_changed() -> None:
    trace = trace_of(*((n * 0.2, 40, 10) for n in range(10)))
    random.seed(1)
    state = random.getstate()
    first = run(trace, mode="poisson")
    assert random.getstate() == state
    random.seed(2)
    assert outcome(run(trace, mode="poisson")) == outcome(first)


# ---- fleets ------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns_whatever_the_load() -> None:
    # The first replica is still busy with the long answer when the third request comes to it.
    simulation = run(
        trace_of((0.0, 10, 50), (0.5, 10, 1), (5.5, 10, 1)),
        replicas=2,
        routing="round-robin",
        on=server(seqs=1),
    )
    assert token_times(simulation)[2] == [51.0]


def test_least_loaded_takes_the_replica_with_fewest_unfinished_requests() -> None:
    simulation = run(
        trace_of((0.0, 10, 50), (0.5, 10, 1), (5.5, 10, 1)),
        replicas=2,
        routing="least-loaded",
        on=server(seqs=1),
    )
    assert token_times(simulation)[2] == [6.5]


def test_least_loaded_sees_what_ended_at_the_very_moment_of_an_arrival() -> None:
    # At 2.0 replica 0 commits its last token and request 2 arrives: replica 0 is free again and has the lower number.
    simulation = run(trace_of((0.0, 10, 2), (0.0, 10, 3), (2.0, 10, 1)), replicas=2, on=server(seqs=1))
    assert token_times(simulation)[2] == [3.0]


def test_replicas_share_no_prefixes() -> None:
    trace = trace_of((0.0, 64, 1), (10.0, 64, 1), prefixes=[(1, 2, 3)] * 2)
    one, two = (run(trace, replicas=n, routing="round-robin") for n in (1, 2))
    assert [r.cached_tokens for r in one.result.requests] == [0, 48]
    assert [r.cached_tokens for r in two.result.requests] == [0, 0]


@pytest.mark.parametrize(("name", "value"), [("replicas", 0), ("routing", "random"), ("mode", "sometimes")])
def test_wrong_arguments_name_the_flag(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        run(trace_of((0.0, 1, 1)), **{name: value})


# ---- prefixes ----------------------------------------------------------------------------------------------------


def test_prefix_reuse_is_what_the_trace_allows() -> None:
    block, size = 32, 16
    prefixes = [(0, 1, 2), (0, 1, 3), (4,), (0, 1, 2, 5), (4, 6), (0, 7)]
    lengths = [96, 100, 40, 130, 64, 70]
    trace = trace_of(
        *((n * 100.0, length, 2) for n, length in enumerate(lengths)), prefixes=prefixes, block=block
    )
    simulation = run(trace)
    cached = [request.cached_tokens for request in simulation.result.requests]
    # By hand: shared leading blocks, never the whole prompt (one token is always computed).
    assert cached == [0, 64, 0, 96, 32, 32]
    reusable = sum(64 if n == 1 else each or 0 for n, each in enumerate(cached)) / sum(lengths)
    table = describe(trace)
    shares = [cell for cell in table.columns[1].cells if "prompt tokens, with an unbounded" in str(cell)]
    assert len(shares) == 1
    assert abs(float(str(shares[0]).split("%")[0]) / 100 - reusable) < 0.001 + size * len(lengths) / sum(
        lengths
    )
    assert simulation.stats[0].prefix_hits == sum(each or 0 for each in cached)


def test_without_prefix_ids_nothing_is_ever_shared() -> None:
    simulation = run(trace_of(*((float(n), 64, 2) for n in range(5))))
    assert [request.cached_tokens for request in simulation.result.requests] == [0] * 5


def test_a_cache_that_is_too_small_reuses_less() -> None:
    prefixes = [(n % 4 + 1, 10 * (n % 4 + 1)) for n in range(16)]
    trace = trace_of(*((n * 50.0, 40, 2) for n in range(16)), prefixes=prefixes)
    large, small = (run(trace, on=server(num_blocks=n)).stats[0].prefix_hits for n in (100, 6))
    assert large == 12 * 32
    assert small < large


# ---- ending early, scattering, results ---------------------------------------------------------------------------


def rule(trace: Trace, gap_s: float, delay_s: float) -> StopRule:
    gaps = sum(request.output_tokens - 1 for request in trace.requests)
    return StopRule(gap_s, gaps // 100, delay_s, (len(trace) - 1) // 2)


@given(
    trace=traces,
    on=servers,
    cost=costs,
    gap_s=st.sampled_from([0.1, 0.3]),
    delay_s=st.sampled_from([0.5, 2.0]),
)
def test_a_run_is_stopped_early_only_when_its_end_would_break_the_rule(
    trace: Trace, on: Any, cost: Any, gap_s: float, delay_s: float
) -> None:
    whole = run(trace, cost, on)
    late_gaps = sum(b - a > gap_s for times in token_times(whole) for a, b in pairwise(times))
    late_starts = sum(delay is not None and delay > delay_s for delay in whole.scheduling_delays_s)
    limits = rule(trace, gap_s, delay_s)
    broken = late_gaps > limits.late_gaps_allowed or late_starts > limits.late_starts_allowed
    for skip in (True, False):
        watched = rule(trace, gap_s, delay_s)
        stopped = run(trace, cost, on, stop_rule=watched, skip_ahead=skip)
        assert stopped.stopped == broken
        if not broken:
            assert (watched.late_gaps, watched.late_starts) == (late_gaps, late_starts)


def unbroken(gap_s: float, delay_s: float) -> StopRule:
    """A rule that only counts."""
    return StopRule(gap_s, 10**9, delay_s, 10**9)


@pytest.mark.parametrize("gap_s", [0.5, 1.155])
def test_late_gaps_of_skipped_steps_are_counted_one_for_each_stream(gap_s: float) -> None:
    # Steps grow with the context: at 0.5 every gap is late, at 1.155 those of the second half or so.
    cost, trace = step_time(1.0, decode_context=0.001), trace_of(*((0.0, 20, 60) for _ in range(3)))
    rules = [unbroken(gap_s, 1.0) for _ in range(2)]
    simulations = [
        run(trace, cost, stop_rule=rule, skip_ahead=skip)
        for rule, skip in zip(rules, (True, False), strict=True)
    ]
    assert simulations[0].num_skipped > 50
    counted = sum(b - a > gap_s for times in token_times(simulations[0]) for a, b in pairwise(times))
    assert 30 < counted <= 3 * 59
    assert [rule.late_gaps for rule in rules] == [counted, counted]


def test_a_readmission_after_a_preemption_is_no_late_start() -> None:
    rule = unbroken(1.0, 0.5)
    trace = trace_of(*((0.0, 30, 60) for _ in range(4)))
    simulation = run(trace, stop_rule=rule, on=server(num_blocks=12, budget=120))
    assert simulation.stats[0].preemptions_recompute > 0
    assert rule.late_starts == sum(
        delay is not None and delay > 0.5 for delay in simulation.scheduling_delays_s
    )


def test_a_queue_that_has_waited_too_long_stops_a_run_before_it_is_served() -> None:
    # One place, taken for 500 s: by 3 s, more than half of the others have waited for over a second.
    trace = trace_of((0.0, 10, 500), *((0.1 * n, 10, 1) for n in range(1, 40)))
    simulation = run(trace, stop_rule=StopRule(10.0, 0, 1.0, 10), on=server(seqs=1))
    assert simulation.stopped
    assert simulation.result.meta["elapsed_s"] < 3.0


def test_what_a_stop_cuts_off_is_cancelled_not_failed() -> None:
    trace = trace_of(*((0.0, 64, 5) for _ in range(20)))
    simulation = run(trace, stop_rule=StopRule(0.5, 0, 1.0, 0), on=server(seqs=2))
    assert simulation.stopped
    assert simulation.result.meta["interrupted"]
    assert {request.status for request in simulation.result.requests} <= {"ok", "cancelled"}
    assert "cancelled" in {request.status for request in simulation.result.requests}


def test_scattered_steps_scatter_by_the_ratios_of_their_kind() -> None:
    decode, prompt = StepFeatures(1, 1, 9, 0.0), StepFeatures(10, 1, 0, 50.0)
    steps = [(decode, seconds) for seconds in (0.5, 2.0)] * 20 + [(prompt, 8.0)] * 40
    simulation = run(
        trace_of((0.0, 10, 200)), ScatteredCost(step_time(), Scatter(step_time(), steps), seed=3)
    )
    first, *others = token_times(simulation)[0]
    assert first == 8.0
    assert {b - a for a, b in pairwise([first, *others])} == {0.5, 2.0}
    assert simulation.num_skipped == 0


def test_a_kind_of_step_that_was_hardly_measured_scatters_as_all_do() -> None:
    decode, prompt = StepFeatures(1, 1, 9, 0.0), StepFeatures(10, 1, 0, 50.0)
    scatter = Scatter(step_time(), [(decode, 2.0)] * Scatter.ENOUGH + [(prompt, 8.0)])
    assert scatter.of(decode) == [2.0] * Scatter.ENOUGH
    assert scatter.of(prompt) == scatter.ratios
    with pytest.raises(InputError, match="at least one measured step"):
        Scatter(step_time(), [])


def test_a_simulation_is_saved_read_and_summarised_like_a_replay(tmp_path: Path) -> None:
    simulation = run(trace_of(*((n * 0.5, 20, 5) for n in range(10))))
    path = tmp_path / "r.json.gz"
    summary = summarise(simulation.result)
    simulation.result.save(path, summary.to_json())
    loaded = ReplayResult.load(path)
    assert loaded.requests == simulation.result.requests
    assert loaded.slo == SLO
    assert summarise(loaded) == summary


def test_targets_of_classes_reach_the_scheduler() -> None:
    slo = live_slo(Slo(1.0, 0.1, {"batch": Slo(60.0, 5.0)}))
    assert [(c.name, c.ttft_s, c.itl_s) for c in slo.classes] == [("default", 1.0, 0.1), ("batch", 60.0, 5.0)]
    assert live_slo(Slo(1.0, 0.1, {"default": Slo(2.0, 0.2)})).classes[0].ttft_s == 2.0


class Watching:
    """Keeps the classes that the scheduler saw, and the longest step."""

    def __init__(self) -> None:
        self.classes: set[str] = set()
        self.longest_s = 0.0

    def on_step(self, replica: int, step: Step, begin_s: float, end_s: float) -> None:
        self.classes |= {request.slo_class for request in step.requests}
        self.longest_s = max(self.longest_s, end_s - begin_s)

    def on_events(self, replica: int, events: object, now: float) -> None:
        """Not of interest here."""


def test_a_class_of_the_trace_arrives_at_the_scheduler() -> None:
    trace = Trace((TraceRequest(0.0, 4, 2, slo_class="batch"),), "made here", "records")
    seen = Watching()
    assert run(trace, observer=seen).result.requests[0].slo_class == "batch"
    assert seen.classes == {"batch"}


def test_the_sla_aware_policy_knows_how_long_simulated_steps_take() -> None:
    # A 400-token step would take 0.41 s; the target for gaps is 0.1 s.
    cost = step_time(0.01, tokens=0.001)
    trace = trace_of((0.0, 2, 30), (0.05, 400, 1))
    longest = {}
    for policy in ("fcfs", "sla-aware"):
        seen = Watching()
        run(trace, cost, server(budget=512, policy=policy), observer=seen)
        longest[policy] = seen.longest_s
    assert longest["fcfs"] > 0.4
    assert longest["sla-aware"] <= 0.1
    mistaken = Watching()  # believes that steps cost nothing
    run(trace, cost, server(budget=512, policy="sla-aware", step_time=step_time(0.0)), observer=mistaken)
    assert mistaken.longest_s > 0.4


def test_prompts_are_as_long_as_the_trace_says_whatever_their_blocks() -> None:
    trace = trace_of((0.0, 40, 1), (0.0, 64, 1), (0.0, 100, 1), prefixes=[(1, 2), (1, 2), (1, 2)], block=32)
    tokens = SyntheticTokens(trace)
    prompts = [tokens.prompt(n, each) for n, each in enumerate(trace.requests)]
    assert [len(prompt) for prompt in prompts] == [40, 64, 100]
    assert prompts[0] == prompts[1][:40]
    assert prompts[1] == prompts[2][:64]
    assert len(set(prompts[2])) == 3


def test_a_request_that_was_overdue_and_then_starts_late_counts_once() -> None:
    rule = StopRule(gap_s=1.0, late_gaps_allowed=0, delay_s=0.5, late_starts_allowed=1)
    rule.arrived([0.0, 2.0], now=2.0)
    assert not rule.broken, "one is overdue, and one may be"
    rule.started(0.0, now=2.0)
    assert not rule.broken, "it is the same one"
    rule.started(2.0, now=9.0)
    assert rule.broken
