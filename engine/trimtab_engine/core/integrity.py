"""The scheduler's invariants, asserted as a whole. Called by `Scheduler.check_integrity`: in tests and when idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trimtab_engine.core.admission import num_blocks_for
from trimtab_engine.core.in_flight import StepsInFlight
from trimtab_engine.core.lifecycle import Lifecycle
from trimtab_engine.core.request import Request, RequestState


def check_integrity(state: Lifecycle) -> None:
    """Raise AssertionError naming the first invariant that does not hold."""
    requests, running, queue, groups = state.requests, state.running, state.queue, state.groups
    block_size = state.block_size
    state.pool.check(Counter(block for request in running for block in request.block_ids))
    state.swap.check([place for request in requests.values() for place in request.swap_ids])
    held_back = list(groups.held_back())
    assert len(held_back) == groups.num_held_back, "siblings held back are miscounted"
    placed = Counter(r.id for place in (running, queue, held_back) for r in place)
    assert placed == Counter(list(requests)), "a live request stands in no place or in two"
    for request in running:
        _check_running(request, block_size)
    for request in running.decodes:
        assert request.num_computed >= request.num_prompt_tokens, f"{request.id} decodes before its prompt"
        assert len(request.token_ids) - request.num_computed == 1, f"{request.id} decodes more than one token"
    ranks = [request.rank for request in running.prefills]
    assert ranks == sorted(ranks), "running prompts are out of order"
    for request in (*queue, *held_back):
        _check_not_running(request, block_size)
    _check_in_flight(state.in_flight, requests.values())


def _check_running(request: Request, block_size: int) -> None:
    assert request.state is RequestState.RUNNING, f"{request.id} runs but is {request.state}"
    reached = request.num_computed + request.num_in_flight
    assert reached <= len(request.token_ids), f"{request.id} is computed beyond its tokens"
    assert num_blocks_for(reached, block_size) <= len(request.block_ids), f"{request.id} lacks blocks"
    assert len(set(request.block_ids)) == len(request.block_ids), f"{request.id} holds a block twice"
    assert request.num_published <= request.num_computed // block_size, f"{request.id} published too early"


def _check_not_running(request: Request, block_size: int) -> None:
    assert request.state in (RequestState.WAITING, RequestState.PREEMPTED, RequestState.SWAPPED), (
        f"{request.id} waits but is {request.state}"
    )
    kv = (request.num_computed, request.num_in_flight, request.num_published, len(request.block_ids))
    assert kv == (0, 0, 0, 0), f"{request.id} waits but holds KV"
    swapped = request.state is RequestState.SWAPPED
    assert swapped == (request.num_swapped > 0), (
        f"{request.id} is {request.state} with {request.num_swapped} swapped"
    )
    assert len(request.swap_ids) == num_blocks_for(request.num_swapped, block_size), (
        f"{request.id} lacks swapped blocks"
    )


def _check_in_flight(in_flight: StepsInFlight, requests: Iterable[Request]) -> None:
    tokens: Counter[str] = Counter()
    for step, stale in in_flight:
        for row, request in enumerate(step.requests):
            if row not in stale:
                tokens[request.id] += step.chunk[row]
    for request in requests:
        assert request.num_in_flight == tokens.pop(request.id, 0), f"{request.id} miscounts tokens in flight"
    assert not tokens, f"steps in flight hold rows of ended requests: {sorted(tokens)}"
