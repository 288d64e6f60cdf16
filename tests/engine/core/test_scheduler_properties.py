"""Invariants under random use: tiny pools, any policy, double scheduling, failures; searched by hypothesis.

Every run checks after every call that blocks are conserved, references right and every key true (`check_integrity`), and in
every step that budget and places are kept; at its end that everyone finished with exactly the tokens of an undisturbed run.
"""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from support.core_builders import (
    EOS,
    HistoryRunner,
    assert_as_if_alone,
    make_live,
    make_request,
    make_scheduler,
    make_step_time,
    undisturbed,
)
from trimtab_engine.core.live import LiveConfig, SloClass
from trimtab_engine.core.request import FinishReason, Request
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.core.step import Step, StepResult, TokenEvent
from trimtab_engine.core.step_time import StepTimeModel
from trimtab_engine.errors import RequestTooLarge

MAX_MODEL_LEN = 48
SHARED = list(range(1, 30))  # prompts are cut from one text, so that prefixes are shared often

lives = st.builds(
    make_live,
    budget=st.integers(1, 24),
    seqs=st.integers(1, 6),
    policy=st.sampled_from(["fcfs", "priority", "sla-aware"]),
    long_prefill=st.sampled_from([0, 0, 3, 7]),
    aging_s=st.sampled_from([0.0, 2.0]),
    classes=st.sampled_from(
        [(SloClass("default", 1.0, 0.1),), (SloClass("default", 6.0, 2.0), SloClass("b", 30.0, 9.0))]
    ),
)
requests = st.builds(
    lambda head, tail, max_tokens, priority, group, salt, stop, floor, logprobs, slo_class: make_request(
        [*SHARED[:head], *tail],
        max_tokens,
        priority=priority,
        slo_class=slo_class,
        group=group,
        tenant=slo_class,
        salt=salt,
        ignore_eos=stop is None,
        stop_token_ids=() if stop is None else (stop,),
        min_tokens=floor,
        prompt_logprobs=logprobs,
    ),
    head=st.integers(0, 24),
    tail=st.lists(st.integers(40, 45), min_size=1, max_size=6),
    max_tokens=st.one_of(st.integers(1, 14), st.none()),
    priority=st.integers(-1, 2),
    group=st.sampled_from([None, None, "g", "h"]),
    salt=st.sampled_from([None, None, "s"]),
    stop=st.sampled_from([None, None, 3, 7]),
    floor=st.sampled_from([0, 0, 5]),
    logprobs=st.sampled_from([None, None, None, 2]),
    slo_class=st.sampled_from(["default", "b"]),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("abort"), st.integers(0, 40)),
        st.tuples(st.just("live"), lives),
        st.tuples(
            st.just("step_time"),
            st.builds(
                make_step_time,
                st.sampled_from([0.001, 0.3]),
                st.sampled_from([0.001, 0.2]),
                st.sampled_from([0.0, 0.01]),
            ),
        ),
        st.tuples(st.just("schedule"), st.none()),
        st.tuples(st.just("commit"), st.none()),
        st.tuples(st.just("rollback"), st.none()),
        st.tuples(st.just("poison"), st.integers(0, 40)),
    ),
    min_size=8,
    max_size=70,
)


class Use:
    """One random use of a scheduler, with its own books."""

    def __init__(
        self,
        num_blocks: int,
        live: LiveConfig,
        prefix_caching: bool,
        prefill_first: bool,
        fair_tenants: bool = False,
        num_swap_blocks: int = 0,
        swap_block_s: float = 0.0,
    ) -> None:
        self.scheduler: Scheduler = make_scheduler(
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            live=live,
            prefix_caching=prefix_caching,
            prefill_first=prefill_first,
            fair_tenants=fair_tenants,
            num_swap_blocks=num_swap_blocks,
            swap_block_s=swap_block_s,
        )
        self.prefill_first = prefill_first
        self.num_blocks = num_blocks
        self.poisoned: set[str] = set()
        self.runner = HistoryRunner(4, fail=lambda request: request.id in self.poisoned)
        self.in_flight: deque[tuple[Step, StepResult]] = deque()
        self.added: list[Request] = []
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, int] = {}
        self.now = 0.0
        self.generation = 1
        self.num_running_allowed = live.max_num_seqs

    def add(self, request: Request) -> None:
        request.arrival_s = self.now
        try:
            self.scheduler.add(request)
        except RequestTooLarge:
            assert request not in self.added
            return
        self.added.append(request)
        self.said[request.id] = []

    def abort(self, number: int) -> None:
        if self.added:
            request = self.added[number % len(self.added)]
            alive = request.finish_reason is None
            assert (self.scheduler.abort(request.id) is request) == alive

    def poison(self, number: int) -> None:
        if self.added:
            self.poisoned.add(self.added[number % len(self.added)].id)

    def reconfigure(self, live: LiveConfig) -> None:
        self.generation += 1
        self.scheduler.reconfigure(live, self.generation)

    def schedule(self) -> Step | None:
        self.now += 1.0
        before = self.scheduler.stats.num_running
        step = self.scheduler.schedule(self.now)
        live = self.scheduler.live
        assert step.generation == self.generation
        assert step.num_tokens == sum(step.chunk)
        if not (self.prefill_first and len(step.requests) == 1):
            assert step.num_tokens <= live.max_num_batched_tokens
        assert self.scheduler.stats.num_running <= max(live.max_num_seqs, before)
        assert not (step.preempted and step.admitted) or (before == 1 and len(step.preempted) == 1)
        assert len({id(request) for request in step.requests}) == len(step.requests)
        assert all(chunk >= 1 for chunk in step.chunk)
        assert all(chunk == 1 for chunk in step.chunk[: step.num_decodes])
        for row, (request, context, chunk) in enumerate(
            zip(step.requests, step.context, step.chunk, strict=True)
        ):
            assert context + chunk <= MAX_MODEL_LEN - 1
            assert (row in step.samples) == (context + chunk == request.num_tokens)
        if not step:
            return None
        self.in_flight.append((step, self.runner.run(step)))
        return step

    def commit(self) -> None:
        if self.in_flight:
            step, result = self.in_flight.popleft()
            self.book(self.scheduler.commit(step, result, self.now))

    def rollback(self) -> None:
        if self.in_flight:
            step, _ = self.in_flight.pop()
            self.scheduler.rollback(step)

    def book(self, events: list[TokenEvent]) -> None:
        for event in events:
            request = event.request
            assert request.id not in self.ended, "news of a request that has ended"
            if event.token_id is not None:
                self.said[request.id].append(event.token_id)
            if event.finished:
                self.ended[request.id] = self.ended.get(request.id, 0) + 1

    def check(self) -> None:
        self.book(self.scheduler.drain_events())
        self.scheduler.check_integrity()

    def run_to_the_end(self) -> None:
        while self.in_flight:
            self.commit()
            self.check()
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            ended = len(self.ended)
            step = self.schedule()
            self.commit()
            self.check()  # books, and so drains, requests that failed without a step
            assert step is not None or not self.scheduler.has_work or len(self.ended) > ended, "stalled"
        assert not self.scheduler.has_work, f"somebody never finished: {self.scheduler.stats}"
        stats = self.scheduler.stats
        assert (stats.num_running, stats.num_waiting, stats.kv_used_fraction) == (0, 0, 0.0)

    def check_outputs(self) -> None:
        for request in self.added:
            want = undisturbed(
                request.token_ids[: request.num_prompt_tokens], request.sampling, MAX_MODEL_LEN
            )
            said = self.said[request.id]
            assert said == request.token_ids[request.num_prompt_tokens :], "events and tokens differ"
            assert said == want[: len(said)], "a token differs from the undisturbed run"
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert said == want
                assert (request.finish_reason is FinishReason.STOP) == (
                    len(said) >= request.sampling.min_tokens
                    and (
                        said[-1] in request.sampling.stop_token_ids
                        or (said[-1] == EOS and not request.sampling.ignore_eos)
                    )
                )
            elif request.finish_reason is FinishReason.ERROR:
                assert request.id in self.poisoned or request.num_tokens - 1 == 4 * self.num_blocks
            else:
                assert request.finish_reason is FinishReason.ABORT
            assert self.ended.get(request.id, 0) == (request.finish_reason is not FinishReason.ABORT)


def use_it(use: Use, script: list[tuple[str, object]], depth: int) -> None:
    for name, value in script:
        if name == "add":
            assert isinstance(value, Request)
            use.add(value)
        elif name == "live":
            assert isinstance(value, LiveConfig)
            use.reconfigure(value)
        elif name == "step_time":
            assert isinstance(value, StepTimeModel)
            use.scheduler.use_step_time(value)
        elif name in ("abort", "poison"):
            assert isinstance(value, int)
            (use.abort if name == "abort" else use.poison)(value)
        elif name == "schedule":
            if len(use.in_flight) >= depth:
                use.commit()
            use.schedule()
        elif name == "commit":
            use.commit()
        else:
            use.rollback()
        use.check()
    use.run_to_the_end()
    use.check_outputs()


@given(
    script=operations,
    live=lives,
    num_blocks=st.integers(2, 16),
    prefix_caching=st.booleans(),
    prefill_first=st.booleans(),
    fair_tenants=st.booleans(),
    num_swap_blocks=st.sampled_from([0, 3, 20]),
    swap_block_s=st.sampled_from([0.0, 0.01]),
    depth=st.integers(1, 3),
)
@settings(max_examples=250)
def test_any_use_conserves_blocks_keeps_limits_and_gives_everyone_their_own_tokens(
    script: list[tuple[str, object]],
    live: LiveConfig,
    num_blocks: int,
    prefix_caching: bool,
    prefill_first: bool,
    fair_tenants: bool,
    num_swap_blocks: int,
    swap_block_s: float,
    depth: int,
) -> None:
    use_it(
        Use(num_blocks, live, prefix_caching, prefill_first, fair_tenants, num_swap_blocks, swap_block_s),
        script,
        depth,
    )


@given(
    batch=st.lists(requests, min_size=2, max_size=10),
    changes=st.lists(lives, min_size=1, max_size=6),
    num_blocks=st.integers(12, 20),
    num_swap_blocks=st.sampled_from([0, 5, 40]),
)
@settings(max_examples=80)
def test_changing_everything_in_every_step_changes_no_output(
    batch: list[Request], changes: list[LiveConfig], num_blocks: int, num_swap_blocks: int
) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, live=changes[0], num_swap_blocks=num_swap_blocks
    )
    runner = HistoryRunner(4)
    for request in batch:
        scheduler.add(request)
    for number in range(2000):
        if not scheduler.has_work:
            break
        scheduler.reconfigure(changes[number % len(changes)], number + 2)
        step = scheduler.schedule(float(number))
        scheduler.commit(step, runner.run(step), float(number))
        scheduler.check_integrity()
    assert not scheduler.has_work
    assert_as_if_alone(*batch, max_model_len=MAX_MODEL_LEN)


@given(script=operations, live=lives, num_blocks=st.integers(3, 12))
@settings(max_examples=40)
def test_the_same_use_gives_the_same_steps(
    script: list[tuple[str, object]], live: LiveConfig, num_blocks: int
) -> None:
    def trace() -> list[tuple[list[int], list[int], list[int], list[int]]]:
        use = Use(num_blocks, live, True, False)
        steps: list[tuple[list[int], list[int], list[int], list[int]]] = []
        number: dict[str, int] = {}
        for name, value in script:
            if name == "add" and isinstance(value, Request):
                copy = make_request(
                    value.token_ids[: value.num_prompt_tokens],
                    value.sampling.max_tokens,
                    priority=value.priority,
                    group=value.group,
                    salt=value.cache_salt,
                )
                number[copy.id] = len(number)
                use.add(copy)
            elif name == "live" and isinstance(value, LiveConfig):
                use.reconfigure(value)
            elif name == "abort" and isinstance(value, int):
                use.abort(value)
            else:
                step = use.schedule()
                if step is not None:
                    rows = [number[request.id] for request in step.requests]
                    blocks = [block for request in step.requests for block in request.block_ids]
                    steps.append((rows, step.context, step.chunk, blocks))
                use.commit()
        return steps

    assert trace() == trace()
