"""Admission by memory, preemption, and running out of memory."""

import pytest

from support.core_builders import (
    Engine,
    HistoryRunner,
    assert_as_if_alone,
    make_live,
    make_request,
    make_scheduler,
    outputs_of,
)
from trimtab_engine.core.request import FinishReason, RequestState
from trimtab_engine.core.step import StepResult


def test_two_prompts_that_fit_alone_but_not_together_run_one_after_the_other() -> None:
    # The first chunk of the second would fit; the whole of it does not. Admitted, the two would preempt each other.
    engine = Engine(make_scheduler(num_blocks=10, block_size=4, live=make_live(budget=8)))
    first, second = make_request(prompt=28, max_tokens=2), make_request(prompt=28, max_tokens=2)
    engine.add(first, second)
    engine.step()
    assert (first.state, second.state) == (RequestState.RUNNING, RequestState.WAITING)
    engine.finish()
    assert engine.scheduler.stats.preemptions_recompute == 0
    assert_as_if_alone(first, second)


def test_blocks_promised_to_a_half_done_prompt_are_not_given_to_a_newcomer() -> None:
    # Free blocks alone would let the second in (7 of 10 free); 5 of them are promised to the first.
    engine = Engine(make_scheduler(num_blocks=10, block_size=4, live=make_live(budget=12, long_prefill=8)))
    first, second = make_request(prompt=28, max_tokens=2), make_request(prompt=20, max_tokens=2)
    engine.add(first, second)
    assert engine.step().requests == [first]
    assert engine.scheduler.stats.waiting_capacity == 1
    engine.finish()
    assert engine.scheduler.stats.preemptions_recompute == 0


def test_admissions_of_one_step_count_each_others_promises() -> None:
    engine = Engine(make_scheduler(num_blocks=10, block_size=4, live=make_live(budget=32, long_prefill=4)))
    engine.add(make_request(prompt=24, max_tokens=1), make_request(prompt=24, max_tokens=1))
    assert len(engine.step().requests) == 1
    engine.finish()


def test_a_failed_admission_changes_nothing() -> None:
    engine = Engine(make_scheduler(num_blocks=8, block_size=4))
    shared = list(range(1, 9))
    first = make_request([*shared, 50, 51], max_tokens=20)
    engine.add(first)
    engine.step()
    second = make_request([*shared, *range(60, 82)], max_tokens=1)
    engine.add(second)
    before = engine.scheduler.stats
    engine.step()
    after = engine.scheduler.stats
    assert (second.state, second.num_cached, second.first_scheduled_s) == (RequestState.WAITING, None, None)
    assert (second.block_ids, second.num_computed) == ([], 0)
    assert (after.prefix_queries, after.prefix_hits) == (before.prefix_queries, before.prefix_hits)
    engine.finish()
    assert second.num_cached == 8
    assert_as_if_alone(first, second)


def test_the_watermark_holds_while_something_runs_and_never_when_the_engine_is_idle() -> None:
    engine = Engine(
        make_scheduler(num_blocks=200, block_size=4, max_model_len=800, live=make_live(budget=800))
    )
    running, large = make_request(prompt=4, max_tokens=9), make_request(prompt=199 * 4, max_tokens=4)
    engine.add(running)
    engine.step()
    just_fits = make_request(prompt=197 * 4 - 8, max_tokens=4)
    engine.add(just_fits)
    engine.step()
    assert just_fits.state is RequestState.RUNNING  # 195 + 2 of watermark of the 198 free
    engine.finish()
    engine.add(make_request(prompt=4, max_tokens=9))
    engine.step()
    blocked = make_request(prompt=198 * 4, max_tokens=4)
    engine.add(blocked)
    engine.step()
    assert blocked.state is RequestState.WAITING  # 198 are free, 2 stay free
    engine.finish()
    engine.add(large)
    engine.step()
    assert large.state is RequestState.RUNNING
    engine.finish()


def test_a_preempted_request_is_not_readmitted_in_the_step_that_preempted_it() -> None:
    engine = Engine(make_scheduler(num_blocks=6, block_size=4))
    requests = [make_request(prompt=8, max_tokens=12) for _ in range(2)]
    engine.add(*requests)
    engine.finish()
    preempting = [s for s in engine.steps if s.preempted]
    assert preempting
    assert all(not s.admitted for s in preempting)
    assert_as_if_alone(*requests)


def test_the_most_recently_admitted_request_gives_way_and_returns_to_the_front_of_the_queue() -> None:
    engine = Engine(make_scheduler(num_blocks=9, block_size=4, live=make_live(seqs=3)))
    requests = [make_request(prompt=8, max_tokens=11) for _ in range(3)]
    late = make_request(prompt=8, max_tokens=2)
    engine.add(*requests)
    engine.step()
    engine.add(late)
    engine.until_preempted()
    assert engine.steps[-1].preempted[0] is requests[2]
    assert requests[2].state is RequestState.PREEMPTED
    engine.finish()
    first_step_of = {r.id: i for i, s in reversed([*enumerate(engine.steps)]) for r in s.admitted}
    readmitted = max(i for i, s in enumerate(engine.steps) if requests[2] in s.admitted)
    assert readmitted <= first_step_of[late.id]
    assert_as_if_alone(*requests, late)


def test_a_preempted_request_keeps_its_outputs_and_its_prompt_length() -> None:
    engine = Engine(make_scheduler(num_blocks=6, block_size=4, prefix_caching=False))
    requests = [make_request(prompt=8, max_tokens=12) for _ in range(2)]
    engine.add(*requests)
    engine.until_preempted()
    victim = engine.steps[-1].preempted[0]
    said = outputs_of(victim)
    assert victim.num_prompt_tokens == 8
    assert said
    engine.until(lambda: victim.state is RequestState.RUNNING)
    step = engine.steps[-1]
    row = step.requests.index(victim)
    # Prompt and outputs are computed again in one go, and the row samples the next output, not the first.
    assert (step.context[row], step.chunk[row]) == (0, 8 + len(said))
    assert outputs_of(victim)[: len(said)] == said
    assert len(outputs_of(victim)) == len(said) + 1
    engine.finish()
    assert engine.scheduler.stats.recomputed_tokens == 8 + len(said) - 1
    assert_as_if_alone(*requests)


def test_a_recomputed_sequence_longer_than_the_budget_is_chunked_without_new_tokens_in_between() -> None:
    engine = Engine(
        make_scheduler(num_blocks=6, block_size=4, live=make_live(budget=5), prefix_caching=False)
    )
    requests = [make_request(prompt=8, max_tokens=12) for _ in range(2)]
    engine.add(*requests)
    engine.finish()
    assert engine.scheduler.stats.preemptions_recompute > 0
    assert_as_if_alone(*requests)
    assert [len(outputs_of(r)) for r in requests] == [12, 12]


def test_a_request_that_is_its_own_victim_waits_and_the_others_go_on() -> None:
    # Under priority the running list is not sorted: more important ones may stand behind the one that gives way.
    engine = Engine(make_scheduler(num_blocks=9, block_size=4, live=make_live(policy="priority")))
    before, low, behind = make_request(5, 12), make_request(8, 12, priority=9), make_request(5, 12)
    engine.add(before)
    engine.step()
    engine.add(low)
    engine.step()
    engine.add(behind)
    assert engine.until_preempted().preempted == [low]
    assert engine.steps[-1].requests == [before, behind]
    engine.finish()
    assert_as_if_alone(before, low, behind)


def test_a_victim_already_scheduled_in_this_step_is_taken_out_of_it() -> None:
    # `low` stands before `high` among the decodes, so its row exists when `high` needs its block.
    engine = Engine(
        make_scheduler(num_blocks=6, block_size=4, live=make_live(budget=40, seqs=4, policy="priority"))
    )
    low, high = make_request(9, 9, priority=9), make_request(8, 12, priority=0)
    other = make_request(3, 2, priority=1)
    engine.add(low)
    engine.step()
    engine.add(high)
    engine.step()
    assert low.state is RequestState.RUNNING
    engine.until_preempted()
    step = engine.steps[-1]
    assert step.preempted == [low]
    assert low not in step.requests
    assert low.num_in_flight == 0
    assert step.num_tokens == len(step.requests) == len(step.chunk) == len(step.context)
    engine.add(other)
    engine.finish()
    assert_as_if_alone(low, high, other)


def test_a_victim_earlier_in_the_list_costs_nobody_else_a_step() -> None:
    engine = Engine(
        make_scheduler(num_blocks=9, block_size=4, live=make_live(budget=40, seqs=4, policy="priority"))
    )
    low = make_request(10, 9, priority=9)
    others = [make_request(8, 9, priority=p) for p in (0, 1)]
    engine.add(low)
    engine.step()
    engine.add(*others)
    engine.step()
    engine.until_preempted()
    assert engine.steps[-1].preempted == [low]
    assert engine.steps[-1].requests == others
    engine.finish()
    assert_as_if_alone(low, *others)


def test_the_budget_of_a_victims_row_is_spent_again_in_the_same_step() -> None:
    live = make_live(budget=4, seqs=4, policy="priority")
    engine = Engine(make_scheduler(num_blocks=16, block_size=4, live=live))
    low, high = make_request(6, 30, priority=9), make_request(8, 30, priority=0)
    document = make_request(prompt=40, max_tokens=2, priority=1)
    engine.add(low)
    engine.until(lambda: low.num_output_tokens > 0)
    engine.add(high)
    engine.until(lambda: high.num_output_tokens > 0)
    engine.add(document)
    step = engine.until_preempted()
    assert step.preempted == [low]
    assert low.num_in_flight == 0
    assert (step.requests, step.num_tokens) == ([high, document], 4)
    engine.finish()
    assert_as_if_alone(low, high, document)


def test_a_half_prefilled_victim_starts_over_and_says_the_same() -> None:
    engine = Engine(
        make_scheduler(num_blocks=12, block_size=4, live=make_live(budget=8, seqs=4), prefix_caching=False)
    )
    chats = [make_request(prompt=4, max_tokens=20) for _ in range(2)]
    engine.add(*chats)
    engine.step()
    document = make_request(prompt=32, max_tokens=2)
    engine.add(document)
    engine.until_preempted()
    assert engine.steps[-1].preempted == [document]
    assert document.num_output_tokens == 0
    assert document.num_computed == 0
    engine.finish()
    assert_as_if_alone(*chats, document)


def test_preempting_the_owner_of_a_shared_prefix_leaves_the_sharers_blocks_alone() -> None:
    engine = Engine(make_scheduler(num_blocks=8, block_size=4, live=make_live(policy="priority", seqs=3)))
    shared = list(range(1, 9))
    owner = make_request([*shared, 50], 12, priority=9)
    engine.add(owner)
    engine.step()
    sharers = [make_request([*shared, 60 + i], 12, priority=i) for i in range(2)]
    engine.add(*sharers)
    engine.step()
    assert [r.num_cached for r in sharers] == [8, 8]
    engine.until(lambda: owner.state is not RequestState.RUNNING)
    assert owner.state is RequestState.PREEMPTED
    engine.finish()
    assert_as_if_alone(owner, *sharers)


def test_the_last_request_out_of_memory_fails_alone_and_the_engine_goes_on() -> None:
    engine = Engine(make_scheduler(num_blocks=4, block_size=4, max_model_len=64))
    endless = make_request(prompt=8, max_tokens=None)
    engine.add(endless)
    for _ in range(30):
        engine.step()
    assert endless.finish_reason is FinishReason.ERROR
    assert endless.error is not None
    assert "17 tokens do not fit into the pool of 16" in endless.error
    assert engine.events[-1].token_id is None
    assert engine.events[-1].finished
    assert engine.scheduler.stats.preemptions_recompute == 0
    assert endless.num_output_tokens == 9  # all that fits: 16 cells, and a last token without KV
    after = make_request(prompt=8, max_tokens=4)
    engine.add(after)
    engine.finish()
    assert_as_if_alone(after)


def test_an_idle_engine_with_waiters_always_admits() -> None:
    engine = Engine(make_scheduler(num_blocks=5, block_size=4, live=make_live(budget=4, seqs=4)))
    requests = [make_request(prompt=14 + i % 3, max_tokens=3) for i in range(5)]
    engine.add(*requests)
    engine.finish()
    assert all(engine.steps), "an empty step while requests wait"
    assert_as_if_alone(*requests)


def test_under_memory_pressure_nobody_is_passed_over_at_the_head_of_the_queue() -> None:
    engine = Engine(make_scheduler(num_blocks=10, block_size=4, live=make_live(budget=32)))
    engine.add(make_request(prompt=16, max_tokens=8))
    engine.step()
    large, small = make_request(prompt=30, max_tokens=2), make_request(prompt=2, max_tokens=2)
    engine.add(large, small)
    engine.step()
    assert small.state is RequestState.WAITING  # it would fit, and so would the next small one, for ever
    engine.finish()
    assert large.first_scheduled_s is not None
    assert small.first_scheduled_s is not None
    assert large.first_scheduled_s <= small.first_scheduled_s


def test_the_remembered_need_of_a_blocked_request_does_not_delay_it_once_memory_is_free() -> None:
    engine = Engine(make_scheduler(num_blocks=10, block_size=4))
    running, blocked = make_request(prompt=20, max_tokens=4), make_request(prompt=30, max_tokens=1)
    engine.add(running, blocked)
    engine.until(lambda: running.state is RequestState.FINISHED)
    assert all(blocked not in step.requests for step in engine.steps)
    engine.step()
    assert blocked.state is RequestState.FINISHED


def test_a_blocked_request_is_admitted_once_somebody_else_has_computed_its_prefix() -> None:
    engine = Engine(make_scheduler(num_blocks=12, block_size=4, live=make_live(budget=8, long_prefill=4)))
    shared = list(range(1, 25))
    owner = make_request([*shared, 90], 40 - 24, id="owner")
    engine.add(owner)
    engine.step()
    follower = make_request([*shared, 91], 2, id="follower")
    engine.add(follower)
    for _ in range(30):
        engine.step()
        if follower.state is not RequestState.WAITING:
            break
    # It was looked up when one block was published: 6 more do not fit beside the owner's, 1 more does.
    assert owner.state is RequestState.RUNNING
    assert follower.num_cached == 24
    engine.finish()
    assert_as_if_alone(owner, follower)


def test_idle_gauges_fall_to_zero() -> None:
    engine = Engine(make_scheduler(num_blocks=12, block_size=4))
    engine.add(*(make_request(prompt=9, max_tokens=3) for _ in range(3)))
    engine.step()
    assert engine.scheduler.stats.kv_used_fraction == pytest.approx(9 / 12)
    engine.finish()
    stats = engine.scheduler.stats
    assert (stats.num_running, stats.num_waiting, stats.waiting_capacity) == (0, 0, 0)
    assert (stats.kv_used_fraction, stats.oldest_waiting_arrival_s) == (0.0, None)


def test_the_oldest_waiting_arrival_counts_preempted_and_held_back_requests() -> None:
    scheduler = make_scheduler(live=make_live(seqs=1))
    scheduler.add(make_request(arrival_s=9.0))
    scheduler.add(make_request(arrival_s=5.0))
    assert scheduler.stats.oldest_waiting_arrival_s == 5.0
    scheduler.schedule(10.0)
    assert scheduler.stats.oldest_waiting_arrival_s == 5.0
    scheduler.add(make_request(prompt=9, arrival_s=3.0, group="g"))
    scheduler.add(make_request(prompt=9, arrival_s=1.0, group="g", id="held"))
    assert scheduler.stats.oldest_waiting_arrival_s == 1.0
    scheduler.abort("held")
    assert scheduler.stats.oldest_waiting_arrival_s == 3.0


def test_a_row_with_nan_logits_fails_that_request_alone() -> None:
    bad = make_request(prompt=9, max_tokens=6)
    good = make_request(prompt=9, max_tokens=6)
    engine = Engine(make_scheduler(), HistoryRunner(4, fail=lambda r: r is bad and r.num_output_tokens == 3))
    engine.add(bad, good)
    engine.finish()
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "NaN logits")
    assert bad.num_output_tokens == 3
    assert_as_if_alone(good)


def test_a_failing_prompt_chunk_publishes_none_of_its_blocks() -> None:
    bad = make_request(list(range(1, 13)), 2)
    engine = Engine(
        make_scheduler(live=make_live(budget=6)),
        HistoryRunner(4, fail=lambda r: r is bad and r.num_computed > 0),
    )
    engine.add(bad)
    engine.finish()
    assert bad.finish_reason is FinishReason.ERROR
    again = make_request(list(range(1, 13)), 2)
    engine.add(again)
    engine.finish()
    assert again.num_cached == 4  # one full block of the first, good chunk
    assert_as_if_alone(again)


def test_a_result_of_the_wrong_length_is_refused_before_anything_changes() -> None:
    scheduler, request = make_scheduler(), make_request(prompt=4, max_tokens=2)
    scheduler.add(request)
    step = scheduler.schedule(1.0)
    with pytest.raises(ValueError, match="0 tokens came back for 1 sampled rows"):
        scheduler.commit(step, StepResult([]), 1.0)
    assert [e.token_id for e in scheduler.commit(step, StepResult([7]), 1.0)] == [7]
    scheduler.check_integrity()
