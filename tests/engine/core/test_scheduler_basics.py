"""The three passes, chunking, caps and lengths, seen through whole steps."""

import pytest

from support.core_builders import (
    Engine,
    assert_as_if_alone,
    make_live,
    make_request,
    make_scheduler,
    outputs_of,
)
from trimtab_engine.core.request import FinishReason, RequestState
from trimtab_engine.errors import RequestError, RequestTooLarge


def test_a_request_runs_from_prompt_to_its_last_token() -> None:
    engine, request = Engine(make_scheduler()), make_request(prompt=10, max_tokens=3)
    engine.add(request)
    engine.finish()
    assert [e.token_id for e in engine.events] == outputs_of(request)
    assert [e.finished for e in engine.events] == [False, False, True]
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, FinishReason.LENGTH)
    assert [s.num_tokens for s in engine.steps] == [10, 1, 1]
    assert_as_if_alone(request)


def test_a_long_prompt_is_chunked_and_decodes_keep_their_token_in_every_step() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8)))
    chat, document = make_request(prompt=4, max_tokens=12), make_request(prompt=40, max_tokens=2)
    engine.add(chat)
    engine.step()
    engine.add(document)
    engine.finish()
    while_prefilling = [s for s in engine.steps if document in s.requests and s.chunk[-1] > 1]
    assert len(while_prefilling) >= 5
    assert all(s.requests[0] is chat and s.chunk[0] == 1 for s in while_prefilling)
    assert all(s.num_tokens <= 8 for s in engine.steps)
    assert_as_if_alone(chat, document)


def test_a_half_done_prompt_admitted_earlier_never_takes_a_decodes_token() -> None:
    # One pass in order of admission would give the whole budget to the document.
    engine = Engine(make_scheduler(live=make_live(budget=4, long_prefill=2)))
    document, chat = make_request(prompt=60, max_tokens=1), make_request(prompt=2, max_tokens=20)
    engine.add(document, chat)
    engine.step()
    engine.scheduler.reconfigure(make_live(budget=4), 2)
    engine.step()
    assert engine.steps[-1].requests[0] is chat
    assert engine.steps[-1].chunk == [1, 3]


def test_a_chunk_in_the_middle_of_a_prompt_yields_no_token() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8)))
    engine.add(make_request(prompt=20, max_tokens=1))
    assert engine.step().samples == []
    assert engine.step().samples == []
    assert engine.events == []
    assert engine.step().samples == [0]
    assert len(engine.events) == 1


def test_a_request_that_gets_no_tokens_does_not_block_those_behind_it() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=12, long_prefill=4)))
    requests = [make_request(prompt=30, max_tokens=1) for _ in range(3)]
    engine.add(*requests)
    step = engine.step()
    assert step.requests == requests
    assert step.chunk == [4, 4, 4]


def test_budget_1_serves_everybody_one_token_at_a_time() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=1, seqs=3)))
    requests = [make_request(prompt=5, max_tokens=4) for _ in range(3)]
    engine.add(*requests)
    engine.finish()
    assert all(s.num_tokens == 1 for s in engine.steps)
    assert_as_if_alone(*requests)


def test_with_a_budget_below_the_decodes_they_take_turns() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8, seqs=4)))
    requests = [make_request(prompt=2, max_tokens=40) for _ in range(4)]
    engine.add(*requests)
    engine.step()
    engine.scheduler.reconfigure(make_live(budget=1, seqs=1), 2)
    for _ in range(16):
        engine.step()
    assert [len(outputs_of(r)) for r in requests] == [5, 5, 5, 5]


def test_under_priority_a_budget_below_the_decodes_serves_the_most_important_first() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8, seqs=3, policy="priority")))
    low, high = make_request(prompt=2, max_tokens=9, priority=5), make_request(2, 9, priority=1)
    engine.add(low)
    engine.step()
    engine.add(high)
    engine.step()
    engine.scheduler.reconfigure(make_live(budget=1, seqs=1, policy="priority"), 2)
    for _ in range(4):
        assert engine.step().requests == [high]


@pytest.mark.parametrize("prompt", [7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("budget", [7, 8, 9])
def test_prompts_around_multiples_of_block_and_budget_are_exact(prompt: int, budget: int) -> None:
    engine = Engine(make_scheduler(block_size=8, live=make_live(budget=budget)), block_size=8)
    request = make_request(prompt=prompt, max_tokens=10)
    engine.add(request)
    engine.finish()
    full, rest = divmod(prompt, budget)
    want = [budget] * full + ([rest] if rest else []) + [1] * 9
    assert [s.num_tokens for s in engine.steps] == want
    assert_as_if_alone(request)


def test_a_prompt_of_one_token_and_one_output_takes_one_step() -> None:
    engine, request = Engine(make_scheduler()), make_request(prompt=1, max_tokens=1)
    engine.add(request)
    engine.finish()
    assert len(engine.steps) == 1
    assert_as_if_alone(request)


def test_max_num_seqs_counts_half_done_prompts() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8, seqs=2, long_prefill=2)))
    engine.add(*(make_request(prompt=10, max_tokens=2) for _ in range(4)))
    assert engine.step().num_tokens == 4
    assert engine.scheduler.stats.num_running == 2
    assert engine.scheduler.stats.waiting_capacity == 2
    engine.finish()


def test_the_long_prefill_threshold_leaves_room_for_short_prompts() -> None:
    for threshold, want in ((0, [16]), (6, [6, 3])):
        engine = Engine(make_scheduler(live=make_live(budget=16, long_prefill=threshold)))
        engine.add(make_request(prompt=100, max_tokens=1), make_request(prompt=3, max_tokens=1))
        assert engine.step().chunk == want


def test_a_prompt_that_leaves_room_for_no_output_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=16, num_blocks=64)
    with pytest.raises(RequestTooLarge, match=r"16 prompt tokens \+ 1 output token .* max_model_len, 16"):
        scheduler.add(make_request(prompt=16, max_tokens=None))
    assert not scheduler.has_work


def test_prompt_and_max_tokens_may_fill_the_model_length_exactly_and_not_more() -> None:
    engine = Engine(make_scheduler(max_model_len=16))
    request = make_request(prompt=10, max_tokens=6)
    engine.add(request)
    with pytest.raises(RequestTooLarge, match="max_model_len"):
        engine.add(make_request(prompt=10, max_tokens=7))
    engine.finish()
    assert request.num_tokens == 16
    assert_as_if_alone(request, max_model_len=16)


def test_without_max_tokens_a_request_ends_at_the_model_length() -> None:
    engine = Engine(make_scheduler(max_model_len=16))
    request = make_request(prompt=15, max_tokens=None)
    engine.add(request)
    engine.finish()
    assert (request.finish_reason, request.num_output_tokens) == (FinishReason.LENGTH, 1)
    assert all(c + n <= 15 for s in engine.steps for c, n in zip(s.context, s.chunk, strict=True))


def test_min_tokens_beyond_the_model_length_does_not_keep_a_request_forever() -> None:
    engine = Engine(make_scheduler(max_model_len=16))
    request = make_request(prompt=10, max_tokens=None, min_tokens=500)
    engine.add(request)
    engine.finish()
    assert request.finish_reason is FinishReason.LENGTH


def test_a_request_larger_than_the_pool_is_refused_at_once_with_both_numbers() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=256)
    with pytest.raises(RequestTooLarge, match=r"17 prompt tokens \+ 1 .* pool holds, 16 tokens") as caught:
        scheduler.add(make_request(prompt=17, max_tokens=None))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestTooLarge, match=r"8 prompt tokens \+ 10 .* pool holds, 16 tokens") as caught:
        scheduler.add(make_request(prompt=8, max_tokens=10))
    assert caught.value.param == "max_tokens"
    assert not scheduler.has_work


def test_a_pool_of_exactly_one_sequence_serves_it() -> None:
    engine = Engine(make_scheduler(num_blocks=4, block_size=4))
    request = make_request(prompt=8, max_tokens=9)  # the last token needs no KV: 16 cells
    engine.add(request)
    engine.finish()
    assert_as_if_alone(request)


def test_empty_prompts_zero_outputs_and_ids_in_use_are_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="prompt has 0 tokens"):
        scheduler.add(make_request(prompt=[]))
    with pytest.raises(RequestError, match="max_tokens is 0"):
        scheduler.add(make_request(max_tokens=0))
    scheduler.add(make_request(id="twin"))
    with pytest.raises(RequestError, match="'twin' is in use"):
        scheduler.add(make_request(id="twin"))
    assert scheduler.stats.num_waiting == 1


def test_a_request_without_a_seed_gets_one_at_add_from_the_schedulers_own_generator() -> None:
    def seeds(seed: int) -> list[int | None]:
        scheduler = make_scheduler(seed=seed)
        requests = [make_request(seed=None) for _ in range(3)]
        for request in requests:
            scheduler.add(request)
        return [r.sampling.seed for r in requests]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 3
    given = make_request(seed=77)
    make_scheduler().add(given)
    assert given.sampling.seed == 77


def test_eos_and_stop_tokens_end_requests_in_the_step_that_sampled_them() -> None:
    engine = Engine(make_scheduler())
    probe = make_request(prompt=[5, 6, 7], max_tokens=30)
    engine.add(probe)
    engine.finish()
    third = outputs_of(probe)[2]
    stopped = make_request(prompt=[5, 6, 7], max_tokens=30, stop_token_ids=(third,))
    engine.add(stopped)
    engine.finish()
    assert (stopped.finish_reason, stopped.stop_token) == (FinishReason.STOP, third)
    assert outputs_of(stopped) == outputs_of(probe)[: outputs_of(probe).index(third) + 1]


def test_a_clock_that_goes_back_moves_nothing_back() -> None:
    engine, request = Engine(make_scheduler()), make_request(prompt=4, max_tokens=5)
    engine.now = 100.0
    engine.add(request)
    engine.step()
    engine.now = 3.0
    assert engine.step().scheduled_at_s == 101.0
    engine.finish()
    assert request.first_scheduled_s == 101.0


def test_prefill_first_runs_prompts_whole_and_before_decodes() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8), prefill_first=True))
    chat, document = make_request(prompt=4, max_tokens=6), make_request(prompt=30, max_tokens=2)
    engine.add(chat)
    engine.step()
    engine.add(document)
    step = engine.step()
    assert (step.requests, step.chunk) == ([document], [30])  # above the budget, alone: the chat stalls
    engine.finish()
    assert_as_if_alone(chat, document)


def test_prefill_first_gives_decodes_what_prompts_leave() -> None:
    engine = Engine(make_scheduler(live=make_live(budget=8), prefill_first=True))
    chats = [make_request(prompt=2, max_tokens=30) for _ in range(3)]
    engine.add(*chats)
    engine.step()
    prompt = make_request(prompt=6, max_tokens=3)
    engine.add(prompt)
    step = engine.step()
    assert step.num_decodes == 2
    assert (step.requests[-1], step.chunk[-1], step.num_tokens) == (prompt, 6, 8)
    engine.add(make_request(prompt=9, max_tokens=2), make_request(prompt=3, max_tokens=2))
    assert engine.step().num_tokens == 9
    engine.finish()


def test_prefill_first_leaves_the_blocks_that_the_decodes_of_the_same_step_need() -> None:
    # Both decodes need a block in the second step, when two are free and the newcomer would take them first.
    live = make_live(policy="priority")
    engine = Engine(make_scheduler(num_blocks=6, block_size=4, live=live, prefill_first=True))
    running = [make_request(prompt=8, max_tokens=5, priority=9) for _ in range(2)]
    engine.add(*running)
    engine.step()
    urgent = make_request(prompt=8, max_tokens=2, priority=0)
    engine.add(urgent)
    step = engine.step()
    assert (step.requests, step.preempted) == (running, [])
    engine.finish()
    assert_as_if_alone(*running, urgent)


def test_same_input_gives_the_same_steps() -> None:
    def trace() -> list[tuple[list[str], list[int]]]:
        engine = Engine(make_scheduler(num_blocks=14, live=make_live(budget=16, seqs=5), seed=3))
        engine.add(*(make_request([i] * (3 + i), 7, id=f"d{i}", seed=None) for i in range(1, 9)))
        engine.finish()
        return [([r.id for r in s.requests], s.chunk) for s in engine.steps]

    assert trace() == trace()
