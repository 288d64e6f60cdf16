"""The three passes, chunking and continuous batching, seen through whole steps."""

from support.core_builders import Engine, assert_as_if_alone, make_live, make_request, make_scheduler
from trimtab_engine.core.request import FinishReason, RequestState


def test_a_request_runs_from_prompt_to_its_last_token() -> None:
    engine, request = Engine(make_scheduler()), make_request(prompt=10, max_tokens=3)
    engine.add(request)
    engine.finish()
    assert [e.token_id for e in engine.events] == request.token_ids[10:]
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


def test_many_requests_share_a_small_pool_and_all_say_what_they_say_alone() -> None:
    engine = Engine(make_scheduler(num_blocks=12, live=make_live(budget=16, seqs=6)))
    requests = [make_request(prompt=3 + 5 * i % 17, max_tokens=9) for i in range(12)]
    engine.add(*requests)
    engine.finish()
    assert engine.scheduler.stats.preemptions_recompute > 0
    assert all(r.finish_reason is FinishReason.LENGTH for r in requests)
    assert_as_if_alone(*requests)
