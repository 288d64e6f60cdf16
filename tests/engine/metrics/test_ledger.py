"""The ledger's counts against brute force over raw samples, and its rules one by one, on an injected clock."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.clock import Clock
from trimtab_engine.core.live import Slo, SloClass
from trimtab_engine.messages import Token
from trimtab_engine.server.metrics.ledger import Ledger, RequestRecord
from trimtab_engine.server.workload import WorkloadLog

SLO = Slo("default", (SloClass("default", ttft_s=1.0, itl_s=0.1), SloClass("batch", ttft_s=10.0, itl_s=1.0)))


@dataclass
class Bench:
    """A ledger on a clock, and shorthand for a request's life."""

    clock: Clock = field(default_factory=Clock)
    workload: WorkloadLog = field(default_factory=WorkloadLog)

    def __post_init__(self) -> None:
        self.ledger = Ledger(SLO, generation=1, now=self.clock, workload=self.workload)

    def arrive(self, name: str = "a", slo_class: str = "default", prompt: int = 20) -> RequestRecord:
        return self.ledger.arrived(
            request_id=name, slo_class=slo_class, prompt_token_ids=range(prompt), arrival_s=self.clock.now_s
        )

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def count(self, slo: str, outcome: str, generation: int = 1, slo_class: str = "default") -> int:
        return self.ledger.outcomes[slo_class, slo, outcome, generation]


def test_request_within_targets_meets_both() -> None:
    bench = Bench()
    record = bench.arrive()
    bench.wait(0.9)
    bench.ledger.token_delivered(record, 1)
    bench.wait(0.09)
    bench.ledger.token_delivered(record, 1)
    bench.ledger.finished(record, "stop")
    assert bench.count("ttft", "met") == 1
    assert bench.count("itl", "met") == 1


def test_a_request_with_targets_of_its_own_is_judged_by_them_and_counted_under_its_class() -> None:
    bench = Bench()
    record = bench.ledger.arrived(
        request_id="a",
        slo_class="default",
        prompt_token_ids=range(20),
        arrival_s=bench.clock.now_s,
        ttft_s=0.2,
        itl_s=0.5,
    )
    bench.wait(0.21)
    bench.ledger.tick()
    assert bench.count("ttft", "violated") == 1  # the class allows a second
    bench.ledger.token_delivered(record, 1)
    bench.wait(0.45)
    bench.ledger.token_delivered(record, 1)
    bench.ledger.finished(record, "stop")
    assert bench.count("itl", "met") == 1  # the class allows 0.1 s


def test_request_held_back_unscheduled_shows_in_gauge_and_counter_at_once() -> None:
    bench = Bench()
    bench.arrive()
    bench.wait(0.99)
    bench.ledger.tick()
    assert bench.count("ttft", "violated") == 0
    assert bench.ledger.oldest_waiting_s() == pytest.approx(0.99)
    bench.wait(0.02)
    bench.ledger.tick()
    assert bench.count("ttft", "violated") == 1, "no token ever came, and still it counts"


def test_open_gap_shows_in_gauge_and_counter_before_the_token_comes() -> None:
    bench = Bench()
    record = bench.arrive()
    bench.ledger.token_delivered(record, 1)
    bench.wait(0.11)
    bench.ledger.tick()
    assert bench.count("itl", "violated") == 1
    assert bench.ledger.longest_token_gap_s() == pytest.approx(0.11)
    bench.ledger.token_delivered(record, 1)
    bench.wait(0.5)
    bench.ledger.token_delivered(record, 1)
    bench.ledger.finished(record, "length")
    assert bench.count("itl", "violated") == 1, "the unit is the request, not the gap"
    assert bench.count("itl", "met") == 0


def test_violation_is_booked_on_the_generation_in_force_when_the_deadline_passed() -> None:
    bench = Bench()
    record = bench.arrive()
    bench.wait(1.5)  # the deadline passed at 1.0, under generation 1, though nobody looked yet
    bench.ledger.set_generation(2, SLO)
    bench.ledger.token_delivered(record, 1)
    assert bench.count("ttft", "violated", generation=1) == 1
    assert bench.count("ttft", "violated", generation=2) == 0
    bench.wait(0.2)
    bench.ledger.token_delivered(record, 1)
    assert bench.count("itl", "violated", generation=2) == 1


def test_two_generations_are_kept_and_a_new_one_starts_at_zero() -> None:
    bench = Bench()
    record = bench.arrive()
    bench.ledger.token_delivered(record, 1)
    for generation in (2, 1, 3):  # a candidate, the incumbent again, another candidate
        bench.ledger.set_generation(generation, SLO)
    kept = {key[3] for key in bench.ledger.outcomes}
    assert kept == {1, 3}
    assert bench.count("ttft", "met", generation=1) == 1, "the incumbent's total goes on"
    assert bench.count("ttft", "met", generation=3) == 0


def test_open_requests_keep_the_targets_that_they_came_with() -> None:
    bench = Bench()
    record = bench.arrive()
    bench.ledger.set_generation(2, Slo("default", (SloClass("default", ttft_s=0.1, itl_s=0.01),)))
    bench.wait(0.5)
    bench.ledger.token_delivered(record, 1)
    assert bench.count("ttft", "met", generation=2) == 1


@pytest.mark.parametrize("reason", ["error", "timeout", "server_abort"])
def test_failed_requests_violate_what_was_open(reason: str) -> None:
    bench = Bench()
    record = bench.arrive()
    bench.ledger.token_delivered(record, 1)
    bench.ledger.finished(record, reason)
    assert bench.count("ttft", "met") == 1, "the first token was in time"
    assert bench.count("itl", "violated") == 1


def test_rejected_request_violates_both() -> None:
    bench = Bench()
    bench.ledger.rejected(bench.arrive(), "queue_full")
    assert bench.count("ttft", "violated") == bench.count("itl", "violated") == 1
    assert bench.ledger.rejections_total["queue_full"] == 1
    assert bench.workload.read()["records"][0]["outcome"] == "rejected_queue_full"  # type: ignore[index]


def test_client_abort_is_counted_apart() -> None:
    bench = Bench()
    bench.ledger.finished(bench.arrive(), "client_abort")
    assert sum(bench.ledger.outcomes.values()) == 0
    assert bench.ledger.finished_total["default", "client_abort"] == 1


def test_finishing_twice_counts_once() -> None:
    bench = Bench()
    record = bench.arrive()
    bench.ledger.token_delivered(record, 1)
    bench.ledger.finished(record, "stop")
    bench.ledger.finished(record, "client_abort")
    bench.ledger.token_delivered(record, 1)
    assert dict(bench.ledger.finished_total) == {("default", "stop"): 1}
    assert bench.ledger.generation_tokens_total == 1


def test_gauges_are_zero_when_nothing_is_open() -> None:
    bench = Bench()
    record = bench.arrive()
    bench.ledger.token_delivered(record, 1)
    bench.ledger.finished(record, "stop")
    bench.wait(50.0)
    assert bench.ledger.oldest_waiting_s() == bench.ledger.longest_token_gap_s() == 0.0


def test_scheduling_facts_come_with_the_first_token() -> None:
    bench = Bench()
    record = bench.arrive(prompt=40)
    token = Token("a", 7, num_cached=32, first_scheduled_s=100.25, num_preemptions=1)
    bench.wait(0.5)
    bench.ledger.engine_token(record, token)
    bench.ledger.token_delivered(record, 1)
    bench.ledger.finished(record, "stop")
    assert bench.ledger.prompt_tokens_cached_total == 32
    assert bench.ledger.queue.total == pytest.approx(0.25)
    assert bench.ledger.prefill.total == pytest.approx(0.25)


@dataclass(frozen=True)
class Life:
    start: float
    gaps: tuple[float, ...]  # before each delivery
    sizes: tuple[int, ...]
    end: str


LIVES = st.lists(
    st.builds(
        Life,
        start=st.floats(0.0, 3.0),
        gaps=st.lists(st.floats(0.001, 1.6), max_size=6).map(tuple),
        sizes=st.lists(st.integers(1, 3), min_size=6, max_size=6).map(tuple),
        end=st.sampled_from(["stop", "length", "client_abort", "server_abort", "error"]),
    ),
    min_size=1,
    max_size=8,
)


@given(lives=LIVES, ticks=st.integers(1, 40))
def test_counters_equal_brute_force_over_raw_samples(lives: list[Life], ticks: int) -> None:
    clock = Clock(0.0)
    ledger = Ledger(SLO, generation=1, now=clock)
    events: list[tuple[float, int, str, int, int]] = []
    for index, life in enumerate(lives):
        events.append((life.start, 0, "arrive", index, 0))
        at = life.start
        for gap, size in zip(life.gaps, life.sizes, strict=False):
            at += gap
            events.append((at, 1, "token", index, size))
        events.append((at, 2, "end", index, 0))
    horizon = max(event[0] for event in events)
    events += [(horizon * i / ticks, 3, "tick", 0, 0) for i in range(ticks)]
    records: dict[int, RequestRecord] = {}
    for at, _, kind, index, size in sorted(events):
        clock.now_s = at
        if kind == "arrive":
            records[index] = ledger.arrived(
                request_id=str(index), slo_class="default", prompt_token_ids=[1, 2, 3], arrival_s=at
            )
        elif kind == "token":
            ledger.token_delivered(records[index], size)
        elif kind == "end":
            ledger.finished(records[index], lives[index].end)
        else:
            ledger.tick()

    # Brute force, from the samples as delivered (absolute times, as the ledger saw them).
    want = {("ttft", "met"): 0, ("ttft", "violated"): 0, ("itl", "met"): 0, ("itl", "violated"): 0}
    tokens = first_tokens = 0
    for life in lives:
        times = [life.start]
        for gap in life.gaps:
            times.append(times[-1] + gap)
        failed, aborted = life.end in ("server_abort", "error"), life.end == "client_abort"
        late_first = len(times) > 1 and times[1] > life.start + 1.0
        if len(times) > 1:
            want["ttft", "violated" if late_first else "met"] += 1
        elif failed:
            want["ttft", "violated"] += 1
        elif not aborted:
            want["ttft", "met"] += 1
        late_gap = any(b > a + 0.1 for a, b in pairwise(times[1:]))
        if late_gap or failed:
            want["itl", "violated"] += 1
        elif not aborted:
            want["itl", "met"] += 1
        tokens += sum(life.sizes[: len(life.gaps)])
        first_tokens += len(times) > 1
    got = {(slo, outcome): ledger.outcomes["default", slo, outcome, 1] for slo, outcome in want}
    assert got == want
    # The identities of docs/metrics.md.
    shape = ledger.classes["default"]
    assert shape.ttft.count == first_tokens
    assert shape.itl.count == ledger.generation_tokens_total - shape.ttft.count
    assert ledger.generation_tokens_total == tokens
    assert ledger.prompt_tokens_total == 3 * first_tokens
    assert sum(ledger.finished_total.values()) == len(lives)
    assert ledger.num_open == 0


def test_workload_ring_keeps_the_newest_and_says_what_it_dropped() -> None:
    log = WorkloadLog(block_size=4, capacity=3)
    for index in range(5):
        log.append(
            arrival_unix_s=float(index),
            prompt_tokens=index,
            cached_tokens=0,
            output_tokens=1,
            slo_class="default",
            tenant=None,
            outcome="stop",
            prefix_block_ids=(),
        )
    read = log.read(since=0, limit=2)
    records = read["records"]
    assert isinstance(records, list)
    assert [record["prompt_tokens"] for record in records] == [2, 3]
    assert (read["next"], read["dropped"]) == (4, 2)
    assert log.read(since=4)["next"] == 5
    assert log.read(since=99)["records"] == []


def test_prefix_ids_are_equal_for_equal_prefixes_only_and_hide_the_tokens() -> None:
    log = WorkloadLog(block_size=4)
    first, second = (
        log.prefix_block_ids([1, 2, 3, 4, 5, 6, 7, 8, 9]),
        log.prefix_block_ids([1, 2, 3, 4, 0, 6, 7, 8]),
    )
    assert len(first) == 2
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert log.prefix_block_ids([5, 6, 7, 8])[0] != first[1], "an id stands for all that comes before it too"
    assert WorkloadLog(block_size=4).prefix_block_ids([1, 2, 3, 4])[0] != first[0], (
        "each process has its own key"
    )
