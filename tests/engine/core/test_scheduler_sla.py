"""The scheduler under `sla-aware`, in virtual time: steps take what the step-time model says."""

from __future__ import annotations

from itertools import pairwise

import pytest

from support.core_builders import (
    Engine,
    assert_as_if_alone,
    make_live,
    make_request,
    make_scheduler,
    make_step_time,
)
from trimtab_engine.core import scheduler
from trimtab_engine.core.admission import Need, whole_sequence_need
from trimtab_engine.core.blocks import BlockPool
from trimtab_engine.core.live import SloClass
from trimtab_engine.core.policy_sla import FLOOR_TOKENS, HEADROOM, PATIENCE, Standing
from trimtab_engine.core.prefix import PrefixCache
from trimtab_engine.core.request import FinishReason, Request, RequestState
from trimtab_engine.core.step_time import StepTimeModel, features_of

MODEL = make_step_time(0.01, 0.001)  # 10 ms, and 1 ms a token
CHAT = SloClass("chat", ttft_s=1.0, itl_s=0.1)
BATCH = SloClass("batch", ttft_s=20.0, itl_s=1.0)


def make_engine(
    *,
    budget: int = 2048,
    seqs: int = 8,
    num_blocks: int = 4000,
    model: StepTimeModel | None = MODEL,
    classes: tuple[SloClass, ...] = (CHAT, BATCH),
    shed_late: bool = False,
    policy: str = "sla-aware",
) -> Engine:
    made = make_scheduler(
        num_blocks=num_blocks,
        max_model_len=12_000,
        live=make_live(budget, seqs, policy, classes=classes),
        shed_late=shed_late,
    )
    return Engine(made, step_time=model)


def first_tokens(engine: Engine, *requests: Request, limit: int = 3000) -> dict[str, float]:
    """When each request got its first token."""
    found: dict[str, float] = {}
    for _ in range(limit):
        engine.step()
        for request in requests:
            if request.num_output_tokens and request.id not in found:
                found[request.id] = engine.now
        if len(found) == len(requests):
            return found
    raise AssertionError(f"only {len(found)} of {len(requests)} got a token")


def admitted(engine: Engine) -> list[Request]:
    return [request for step in engine.steps for request in step.admitted]


def test_waiting_requests_are_admitted_by_latest_start() -> None:
    engine = make_engine(seqs=1)
    running = make_request(10, 2)
    engine.add(running)
    engine.step()
    relaxed = make_request(10, 1, slo_class="batch")
    short, long = make_request(10, 1), make_request(400, 1)  # 0.4 s of prompt: must start earlier
    engine.add(relaxed, short, long)
    engine.finish()
    assert admitted(engine) == [running, long, short, relaxed]


def test_a_request_of_its_own_targets_goes_by_those() -> None:
    engine = make_engine(seqs=1)
    engine.add(make_request(10, 2))
    engine.step()
    usual, pressed = make_request(10, 1), make_request(10, 1, ttft_s=0.2)
    engine.add(usual, pressed)
    engine.finish()
    assert admitted(engine)[1:] == [pressed, usual]


def test_a_cached_prefix_leaves_a_request_more_time() -> None:
    engine = make_engine()
    text = list(range(1, 401))
    engine.add(make_request(text, 1))
    engine.finish()
    fresh, cached = (
        make_request(401, 1, arrival_s=engine.now),
        make_request([*text, 7], 1, arrival_s=engine.now),
    )
    engine.add(fresh, cached)
    assert cached.latest_start_s - fresh.latest_start_s == pytest.approx(0.4, rel=0.1)


def test_a_late_request_is_passed_by_those_that_can_still_be_saved_and_moves_once() -> None:
    engine = make_engine(seqs=1)
    engine.add(make_request(10, 120))  # about a second and a half
    engine.step()
    late = make_request(10, 1, arrival_s=engine.now)
    engine.add(late)
    engine.until(lambda: engine.now > 1.2)
    assert late.standing is Standing.LATE
    fresh = make_request(10, 1, arrival_s=engine.now)
    engine.add(fresh)
    engine.finish()
    assert admitted(engine)[1:] == [fresh, late]


def test_a_late_request_that_waited_long_enough_goes_first() -> None:
    engine = make_engine(seqs=1, classes=(SloClass("chat", 0.2, 0.1),))
    engine.add(make_request(10, 100))
    engine.step()
    late = make_request(10, 1, arrival_s=engine.now)
    engine.add(late)
    engine.until(lambda: engine.now > late.arrival_s + PATIENCE * 0.2, limit=400)
    # A flow of savable ones, one after the other, that would pass it for ever.
    engine.add(*(make_request(10, 2, arrival_s=engine.now) for _ in range(5)))
    engine.until(lambda: late.finish_reason is not None)
    assert late.standing is Standing.OVERDUE
    assert admitted(engine)[1:] == [late]


def test_when_all_are_late_they_are_served_in_order_of_arrival() -> None:
    engine = make_engine(seqs=1, classes=(SloClass("chat", 0.5, 0.1), SloClass("batch", 0.9, 0.1)))
    engine.add(make_request(10, 100))
    engine.step()
    waiting = [
        make_request(10 + 7 * (i % 4), 1, arrival_s=i * 0.001, slo_class=("chat", "batch")[i % 2])
        for i in range(8)
    ]
    engine.add(*reversed(waiting))
    engine.until(lambda: engine.now > 1.0)
    assert all(r.standing is Standing.LATE for r in waiting)
    engine.finish()
    assert admitted(engine)[1:] == waiting


def test_the_key_of_a_waiting_request_does_not_move_when_model_and_targets_do() -> None:
    engine = make_engine(seqs=1)
    engine.add(make_request(10, 5))
    engine.step()
    waiting = make_request(300, 1)
    engine.add(waiting)
    before = (waiting.latest_start_s, waiting.rank)
    engine.scheduler.use_step_time(make_step_time(1.0, 0.1))
    engine.scheduler.reconfigure(make_live(64, 1, "sla-aware", classes=(SloClass("chat", 9.0, 9.0),)), 2)
    engine.step()
    assert (waiting.latest_start_s, waiting.rank) == before


def test_a_step_with_decodes_takes_no_longer_than_their_slack_however_long_the_prompt() -> None:
    engine = make_engine()
    talking = make_request(10, 60)
    engine.add(talking)
    engine.step()
    engine.add(make_request(3000, 1, slo_class="batch"))
    for _ in range(40):
        engine.step()
    times = [MODEL.predict(features_of(step)) for step in engine.steps[1:]]
    assert max(times) <= HEADROOM * CHAT.itl_s + 1e-9
    assert max(times) >= 0.8 * HEADROOM * CHAT.itl_s  # and it is used
    assert engine.steps[1].budget == 2048


def test_the_rest_of_a_step_that_is_too_small_for_one_prompt_goes_to_the_next_under_way() -> None:
    engine = make_engine()  # 81 tokens a step
    nearly_done = make_request(86, 1, slo_class="batch")
    engine.add(nearly_done)
    engine.step()
    long = make_request(281, 1)
    engine.add(long)
    engine.step()
    assert (nearly_done.num_computed, long.num_computed) == (81, 81)
    urgent = make_request(70, 1, ttft_s=0.3, arrival_s=engine.now)
    engine.add(urgent)
    step = engine.step()
    got = dict(zip([r.id for r in step.requests], step.chunk, strict=True))
    assert got == {urgent.id: 70, nearly_done.id: 5}  # 11 tokens were left: a sliver for the long one


def test_whoever_waits_is_not_looked_up_once_a_prompt_has_taken_all_the_time_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looking up a prompt of 30,000 tokens takes longer than planning the rest of the step."""
    looked_up: list[Request] = []

    def spy(request: Request, pool: BlockPool, cache: PrefixCache) -> Need:
        looked_up.append(request)
        return whole_sequence_need(request, pool, cache)

    monkeypatch.setattr(scheduler, "whole_sequence_need", spy)
    engine = make_engine()
    long, waiting = make_request(600, 1), make_request(900, 1, slo_class="batch")
    engine.add(long, waiting)
    for _ in range(5):
        step = engine.step()
        assert step.requests == [long]
    assert looked_up == [long]
    engine.finish()


def test_a_step_without_decodes_is_capped_by_the_smallest_target_all_the_same() -> None:
    engine = make_engine()
    engine.add(make_request(5000, 1, slo_class="batch"))
    engine.finish()
    assert max(MODEL.predict(features_of(step)) for step in engine.steps) <= HEADROOM * CHAT.itl_s + 1e-9


def test_the_budget_and_the_long_prefill_threshold_still_bind() -> None:
    engine = make_engine(budget=40)
    engine.add(make_request(500, 1))
    engine.step()
    assert engine.steps[0].num_tokens == 40
    engine.scheduler.reconfigure(make_live(64, 8, "sla-aware", long_prefill=24, classes=(CHAT,)), 2)
    assert engine.step().num_tokens == 24


def test_prompts_go_on_when_decodes_alone_overrun_their_targets() -> None:
    slow = make_step_time(0.3, 0.001)
    engine = make_engine(model=slow)
    engine.add(make_request(10, 50))
    engine.step()
    long = make_request(300, 1)
    engine.add(long)
    engine.step()
    assert long.num_computed >= FLOOR_TOKENS
    first_tokens(engine, long, limit=10)  # 0.075 s a step for prompts


def test_a_short_prompt_does_not_wait_for_a_long_one_under_way() -> None:
    """A savable long one, a late one, either way: within two capped steps beyond what it takes alone."""
    for length in (700, 9000):
        engine = make_engine()
        long = make_request(length, 1)
        engine.add(long)
        for _ in range(3):
            engine.step()
        short = make_request(30, 1, arrival_s=engine.now)
        engine.add(short)
        alone_s = MODEL.prefill_s(30, 0, 30)
        got = first_tokens(engine, short)[short.id] - short.arrival_s
        assert long.num_output_tokens == 0
        assert got <= alone_s + 2 * HEADROOM * CHAT.itl_s


def test_a_late_prompt_under_way_gives_way_to_the_savable_but_does_not_starve() -> None:
    classes = (SloClass("chat", 0.5, 0.05),)
    engine = make_engine(classes=classes)
    late = make_request(400, 1)  # half a second at 45 ms steps of 36 tokens: late from the start
    engine.add(late)
    engine.step()
    for _ in range(60):  # as many prompts as the engine can take
        engine.add(make_request(36, 1, arrival_s=engine.now))
        engine.step()
        if late.num_output_tokens:
            break
    assert late.num_output_tokens == 1
    assert engine.now >= late.arrival_s + 0.5  # it did give way
    assert engine.now <= late.arrival_s + 10 * 0.5


def test_nobody_waits_ten_times_its_target_under_overload() -> None:
    """Interactive prompts alone are more than the engine can take; batch ones are overdue in time all the same."""
    classes = (SloClass("chat", 0.3, 0.1), SloClass("batch", 1.0, 1.0))
    engine = make_engine(classes=classes, seqs=4)
    added: list[Request] = []
    for number in range(60):
        slo_class = "batch" if number % 6 == 0 else "chat"
        request = make_request(60, 3, arrival_s=engine.now, slo_class=slo_class)
        added.append(request)
        engine.add(request)
        engine.step()
    waits = first_tokens(engine, *(r for r in added if not r.num_output_tokens))
    for request in added:
        if request.id in waits:
            assert waits[request.id] - request.arrival_s <= 10 * request.ttft_target_s


def test_more_of_both_classes_meet_their_targets_than_under_fcfs() -> None:
    def met(policy: str) -> dict[str, float]:
        engine = make_engine(policy=policy, seqs=6)
        added: list[Request] = []
        for number in range(120):
            batch = number % 8 == 0
            added.append(
                make_request(
                    1200 if batch else 40, 3, arrival_s=number * 0.2, slo_class="batch" if batch else "chat"
                )
            )
        times: dict[str, float] = {}
        pending = list(added)
        while len(times) < len(added):
            while pending and pending[0].arrival_s <= engine.now:
                engine.add(pending.pop(0))
            if not engine.scheduler.has_work:
                engine.now = pending[0].arrival_s
                continue
            engine.step()
            for request in added:
                if request.num_output_tokens and request.id not in times:
                    times[request.id] = engine.now - request.arrival_s
        return {
            name: sum(times[r.id] <= r.ttft_target_s for r in added if r.slo_class == name)
            / sum(r.slo_class == name for r in added)
            for name in ("chat", "batch")
        }

    aware, fcfs = met("sla-aware"), met("fcfs")
    print(aware, fcfs)
    assert aware["chat"] >= 0.9
    assert aware["batch"] >= 0.9
    assert fcfs["chat"] <= 0.75


def test_the_victim_is_the_one_with_most_to_spare_not_the_latest_admitted() -> None:
    engine = make_engine(num_blocks=14, seqs=3, classes=(CHAT, BATCH))
    relaxed = make_request(12, 40, slo_class="batch")
    pressed = make_request(12, 40)
    engine.add(relaxed, pressed)
    step = engine.until_preempted()
    assert step.preempted == [relaxed]
    engine.finish()
    assert_as_if_alone(relaxed, pressed, max_model_len=12_000)


def test_of_equal_targets_the_cheaper_to_recompute_gives_way() -> None:
    model = make_step_time(0.01, 0.01)
    engine = make_engine(num_blocks=16, seqs=3, classes=(BATCH,), model=model)
    short, long = make_request(4, 40), make_request(24, 40)
    engine.add(short, long)
    assert engine.until_preempted().preempted == [short]


def test_a_preempted_request_that_has_spoken_is_resumed_before_newcomers() -> None:
    engine = make_engine(num_blocks=14, seqs=3)
    relaxed, pressed = make_request(12, 40, slo_class="batch"), make_request(12, 40)
    engine.add(relaxed, pressed)
    engine.until_preempted()
    newcomer = make_request(4, 1, arrival_s=engine.now)
    engine.add(newcomer)
    assert engine.scheduler._state.queue.peek() is relaxed
    engine.finish()
    again = admitted(engine)[2:]
    assert again[0] is relaxed


def test_shedding_ends_what_can_no_longer_be_in_time_and_says_when_to_come_back() -> None:
    engine = make_engine(seqs=1, shed_late=True)
    busy = make_request(10, 150)
    engine.add(busy)
    engine.step()
    waiting = make_request(10, 1, arrival_s=engine.now)
    engine.add(waiting)
    engine.until(lambda: waiting.finish_reason is not None)
    assert waiting.finish_reason is FinishReason.ERROR
    assert waiting.retry_after_s == 1
    assert waiting.error is not None
    assert waiting.error.startswith("shed after ")
    assert engine.now == pytest.approx(waiting.latest_start_s, abs=0.03)
    assert engine.scheduler.stats.shed == 1
    assert [e.request for e in engine.events if e.finished] == [waiting]
    engine.finish()


def test_shedding_is_off_by_default() -> None:
    engine = make_engine(seqs=1)
    engine.add(make_request(10, 150))
    engine.step()
    waiting = make_request(10, 1, arrival_s=engine.now)
    engine.add(waiting)
    engine.finish()
    assert waiting.finish_reason is FinishReason.LENGTH


def test_what_could_never_have_been_in_time_or_has_begun_is_not_shed() -> None:
    engine = make_engine(seqs=2, shed_late=True)
    hopeless = make_request(3000, 1)  # three seconds of prompt
    engine.add(hopeless)
    begun = make_request(120, 1, arrival_s=engine.now)
    engine.add(begun)
    engine.step()
    assert begun.state is RequestState.RUNNING
    begun.ttft_target_s = 0.0  # as if a stall had passed its deadline
    engine.finish()
    assert (hopeless.finish_reason, begun.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)


def test_work_already_spent_on_a_preempted_prompt_is_not_shed() -> None:
    engine = make_engine(seqs=1, shed_late=True)
    engine.add(make_request(10, 150))
    engine.step()
    preempted = make_request(10, 1, arrival_s=engine.now)
    engine.add(preempted)
    preempted.state, preempted.num_preemptions = (
        RequestState.PREEMPTED,
        1,
    )  # as if half of it had been computed
    engine.until(lambda: engine.now > 1.2)
    assert preempted.standing is Standing.LATE
    engine.finish()
    assert preempted.finish_reason is FinishReason.LENGTH


def test_under_fcfs_nothing_is_late_shed_or_cut_by_time() -> None:
    engine = make_engine(seqs=1, shed_late=True, policy="fcfs")
    first, second = make_request(2500, 150), make_request(10, 1)
    engine.add(first, second)
    engine.finish()
    assert engine.steps[0].num_tokens == 2048
    assert second.standing is Standing.SAVABLE
    assert admitted(engine) == [first, second]


def test_switching_to_it_finds_who_is_late_already() -> None:
    engine = make_engine(seqs=1, policy="fcfs")
    engine.add(make_request(10, 150))
    engine.step()
    late = make_request(10, 1, arrival_s=engine.now)
    engine.add(late)
    engine.until(lambda: engine.now > 1.2)
    fresh = make_request(10, 1, arrival_s=engine.now)
    engine.add(fresh)
    engine.scheduler.reconfigure(make_live(2048, 1, "sla-aware", classes=(CHAT, BATCH)), 2)
    engine.step()
    assert (late.standing, fresh.standing) == (Standing.LATE, Standing.SAVABLE)
    engine.finish()
    assert admitted(engine)[1:] == [fresh, late]


def test_an_unmeasured_engine_begins_with_small_steps_and_doubles_as_it_learns() -> None:
    engine = make_engine(model=None)
    engine.add(make_request(5000, 1))
    assert engine.step().num_tokens == 64
    tokens = []
    for _ in range(6):
        largest = max(step.num_tokens for step in engine.steps)
        engine.scheduler.use_step_time(
            StepTimeModel(make_step_time(1e-6, 1e-6).coefficients, largest_tokens=largest)
        )
        tokens.append(engine.step().num_tokens)
    assert tokens == [128, 256, 512, 1024, 2048, 968]
    assert all(after <= 2 * before for before, after in pairwise(tokens))


def test_the_victim_is_found_by_the_next_deadline_not_by_the_order_of_prompts() -> None:
    engine = make_engine(num_blocks=14, seqs=3)
    fast_talker = make_request(12, 40, ttft_s=20.0, itl_s=0.05)  # its prompt could wait, its tokens cannot
    slow_talker = make_request(12, 40, ttft_s=1.0, itl_s=5.0)
    engine.add(fast_talker, slow_talker)
    assert engine.until_preempted().preempted == [slow_talker]


def test_a_prompt_under_way_does_not_become_late() -> None:
    engine = make_engine()
    long = make_request(600, 1)
    engine.add(long)
    engine.until(lambda: long.num_output_tokens == 1)
    assert engine.now > long.latest_start_s
    assert long.standing is Standing.SAVABLE


def test_switching_policies_back_and_forth_moves_a_late_request_only_once() -> None:
    engine = make_engine(seqs=1)
    engine.add(make_request(10, 150))
    engine.step()
    waiting = make_request(10, 1, arrival_s=engine.now)
    engine.add(waiting)
    for generation, policy in enumerate(("fcfs", "sla-aware", "fcfs", "sla-aware"), start=2):
        engine.scheduler.reconfigure(make_live(2048, 1, policy, classes=(CHAT, BATCH)), generation)
    engine.scheduler._state.standings.watch(
        waiting
    )  # as a readmission that was taken back leaves it: watched twice
    engine.until(lambda: engine.now > 1.2)
    assert waiting.standing is Standing.LATE


def test_a_late_prompt_under_way_that_becomes_overdue_goes_before_the_others_under_way() -> None:
    classes = (SloClass("chat", 0.3, 0.1), SloClass("slow", 9.0, 0.1))
    engine = make_engine(classes=classes, policy="fcfs")
    engine.scheduler.reconfigure(make_live(64, 8, "fcfs", long_prefill=20, classes=classes), 2)
    savable, late = make_request(3000, 1, slo_class="slow"), make_request(600, 1, slo_class="chat")
    engine.add(savable, late)
    engine.step()  # twenty tokens of each
    late.standing = Standing.LATE
    engine.scheduler.reconfigure(make_live(64, 8, "sla-aware", classes=classes), 3)
    assert engine.scheduler._state.running.prefills == [savable, late]
    engine.until(lambda: engine.now > PATIENCE * 0.3)
    engine.step()
    assert late.standing is Standing.OVERDUE
    assert engine.scheduler._state.running.prefills[0] is late


def test_a_new_model_changes_what_is_expected_of_new_requests() -> None:
    engine = make_engine()
    deadlines = engine.scheduler._deadlines
    engine.add(make_request(10, 1))
    slow = make_step_time(0.01, 0.004)
    assert deadlines._chunk_of_one(MODEL) == 81
    engine.scheduler.use_step_time(slow)
    assert deadlines._chunk_of_one(slow) == 21
    engine.finish()
