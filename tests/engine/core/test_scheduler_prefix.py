"""Prefix hits, their counters, and siblings of one request, through whole steps."""

import pytest

from support.core_builders import Engine, assert_as_if_alone, make_live, make_request, make_scheduler
from trimtab_engine.core.request import FinishReason, RequestState

SHARED = list(range(1, 17))


def test_a_second_request_computes_only_what_the_first_did_not() -> None:
    engine = Engine(make_scheduler())
    first, second = make_request([*SHARED, 70], 3), make_request([*SHARED, 80, 81], 3)
    engine.add(first)
    engine.finish()
    engine.add(second)
    step = engine.step()
    assert (step.context, step.chunk) == ([16], [2])
    assert second.num_cached == 16
    engine.finish()
    assert_as_if_alone(first, second)


@pytest.mark.parametrize(("length", "want"), [(15, 12), (16, 12), (17, 16)])
def test_a_fully_cached_prompt_still_computes_its_last_token(length: int, want: int) -> None:
    engine = Engine(make_scheduler())
    prompt = [*SHARED, 70, 71][:length]
    engine.add(make_request(prompt, 6))
    engine.finish()
    again = make_request(prompt, 6)
    engine.add(again)
    assert engine.step().chunk == [length - want]
    assert again.num_cached == want
    engine.finish()
    assert_as_if_alone(again)


def test_identical_prompts_in_one_step_share_nothing_that_is_not_yet_computed() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=64)))
    twins = [make_request(SHARED, 5) for _ in range(3)]
    engine.add(*twins)
    step = engine.step()
    assert step.context == [0, 0, 0]
    assert set(twins[0].block_ids).isdisjoint(twins[1].block_ids)
    engine.finish()
    assert_as_if_alone(*twins)


def test_outputs_are_published_too_so_that_the_next_turn_of_a_chat_hits() -> None:
    engine = Engine(make_scheduler())
    first = make_request(SHARED, 9)
    engine.add(first)
    engine.finish()
    turn = make_request([*first.token_ids, 60, 61], 2)
    engine.add(turn)
    engine.finish()
    assert turn.num_cached == 24
    assert_as_if_alone(turn)


def test_a_request_does_not_evict_its_own_hits() -> None:
    # The 4 hits are free and least recently used: taking new blocks before holding them would hand them out.
    engine = Engine(make_scheduler(num_blocks=8, block_size=4))
    engine.add(make_request([*SHARED, 70], 2))
    engine.finish()
    filler = make_request(prompt=12, max_tokens=1)
    engine.add(filler)
    engine.finish()
    again = make_request([*SHARED, *range(80, 92)], 4)
    engine.add(again)
    engine.finish()
    assert again.num_cached == 16
    assert_as_if_alone(again)


def test_hits_that_nobody_holds_count_as_memory_that_admission_takes() -> None:
    engine = Engine(make_scheduler(num_blocks=8, block_size=4))
    engine.add(make_request([*SHARED, 70], 2))
    engine.finish()
    running = make_request(prompt=14, max_tokens=9)
    engine.add(running)
    engine.step()
    again = make_request([*SHARED, 70, 71], 2)  # 5 blocks, 4 of them hits; 4 are free in all
    engine.add(again)
    engine.step()
    assert again.state is RequestState.WAITING
    engine.finish()
    assert_as_if_alone(running, again)


def test_hits_count_once_at_the_first_admission_and_readmissions_apart() -> None:
    engine = Engine(make_scheduler(num_blocks=6, block_size=4))
    requests = [make_request(prompt=8, max_tokens=12) for _ in range(2)]
    engine.add(*requests)
    engine.finish()
    stats = engine.scheduler.stats
    assert stats.preemptions_recompute > 0
    assert (stats.prefix_queries, stats.prefix_hits) == (16, 0)
    assert stats.readmission_queries > 0
    assert [r.num_cached for r in requests] == [0, 0]


def test_a_hit_on_readmission_is_recounted_and_makes_recomputation_cheap() -> None:
    # The length of the hit is known only after the look-up; chunk and context must follow it.
    engine = Engine(make_scheduler(num_blocks=7, block_size=4, live=make_live(policy="priority")))
    low, high = make_request(9, 12, priority=9), make_request(8, 12, priority=0)
    engine.add(low, high)
    engine.finish()
    assert engine.scheduler.stats.readmission_hits > 0
    resumed = [s for s in engine.steps if low in s.admitted][-1]
    row = resumed.requests.index(low)
    assert resumed.context[row] > 0
    assert_as_if_alone(low, high)


def test_prompt_logprobs_compute_every_position_although_the_prefix_is_cached() -> None:
    engine = Engine(make_scheduler())
    engine.add(make_request(SHARED, 2))
    engine.finish()
    asking = make_request(SHARED, 2, prompt_logprobs=1)
    engine.add(asking)
    assert engine.step().chunk == [16]
    assert engine.scheduler.stats.prefix_queries == 16
    engine.finish()
    assert_as_if_alone(asking)


def test_salted_requests_do_not_share() -> None:
    engine = Engine(make_scheduler())
    a, b = make_request(SHARED, 2, salt="tenant-a"), make_request(SHARED, 2, salt="tenant-b")
    engine.add(a)
    engine.finish()
    engine.add(b)
    engine.finish()
    assert b.num_cached == 0


def test_a_step_that_is_rolled_back_publishes_nothing() -> None:
    scheduler = make_scheduler()
    engine = Engine(scheduler)
    scheduler.add(make_request(SHARED, 2, id="first"))
    scheduler.rollback(scheduler.schedule(1.0))
    scheduler.abort("first")
    second = make_request(SHARED, 2)
    engine.add(second)
    engine.finish()
    assert second.num_cached == 0


def test_siblings_wait_until_the_first_has_published_the_prompt_and_then_share_it() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=100)))
    siblings = [make_request([*SHARED, 70], 4, group="g", seed=i) for i in range(4)]
    engine.add(*siblings)
    assert engine.scheduler.stats.waiting_deferred == 3
    assert engine.step().requests == siblings[:1]  # the budget would have reached for all four
    assert engine.scheduler.stats.waiting_deferred == 0
    step = engine.step()
    assert step.requests == siblings
    assert step.chunk == [1, 1, 1, 1]
    assert [r.num_cached for r in siblings] == [0, 16, 16, 16]
    engine.finish()
    assert_as_if_alone(*siblings)


def test_siblings_of_a_prompt_shorter_than_a_block_do_not_wait() -> None:
    engine = Engine(make_scheduler())
    engine.add(*(make_request([5, 6, 7, 8], 2, group="g") for _ in range(3)))
    assert len(engine.step().requests) == 3
    engine.finish()


def test_siblings_do_not_wait_when_prefixes_are_not_cached() -> None:
    engine = Engine(make_scheduler(prefix_caching=False))
    engine.add(*(make_request(SHARED, 2, group="g") for _ in range(3)))
    assert len(engine.step().requests) == 3
    engine.finish()


def test_eight_siblings_with_four_places_all_finish() -> None:
    engine = Engine(make_scheduler(live=make_live(seqs=4)))
    siblings = [make_request([*SHARED, 70], 5, group="g", seed=i) for i in range(8)]
    engine.add(*siblings)
    engine.finish()
    assert all(len(s.requests) <= 4 for s in engine.steps)
    assert_as_if_alone(*siblings)


def test_when_the_first_sibling_is_aborted_the_next_one_leads() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8)))
    siblings = [make_request([*SHARED, 70], 3, group="g", seed=i) for i in range(3)]
    engine.add(*siblings)
    engine.step()
    engine.scheduler.abort(siblings[0].id)
    assert engine.step().requests == [siblings[1]]
    engine.finish()
    assert [r.finish_reason for r in siblings] == [FinishReason.ABORT, *[FinishReason.LENGTH] * 2]
    assert siblings[2].num_cached == 16
    assert_as_if_alone(*siblings[1:])


def test_aborting_a_sibling_that_is_held_back_leaves_the_others() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8)))
    siblings = [make_request([*SHARED, 70], 3, group="g", seed=i) for i in range(3)]
    engine.add(*siblings)
    engine.scheduler.abort(siblings[1].id)
    assert engine.scheduler.stats.num_waiting == 2
    engine.finish()
    assert_as_if_alone(siblings[0], siblings[2])


def test_a_preempted_first_sibling_still_leads() -> None:
    engine = Engine(make_scheduler(num_blocks=8, block_size=4, live=make_live(budget=6, seqs=4)))
    chat = make_request(prompt=4, max_tokens=24)
    engine.add(chat)
    engine.step()
    siblings = [make_request([*SHARED, *range(60, 68)], 2, group="g", seed=i) for i in range(2)]
    engine.add(*siblings)
    engine.finish()
    assert any(siblings[0] in s.preempted for s in engine.steps)
    assert siblings[1].num_cached == 20
    assert_as_if_alone(chat, *siblings)


def test_a_group_name_can_be_used_again_once_its_members_have_ended() -> None:
    engine = Engine(make_scheduler())
    for _ in range(2):
        group = [make_request([*SHARED, 70], 2, group="g", seed=i) for i in range(2)]
        engine.add(*group)
        engine.finish()
        assert_as_if_alone(*group)
