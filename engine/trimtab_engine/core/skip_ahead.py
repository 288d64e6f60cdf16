"""Steady decoding, many steps at once: what the simulator calls instead of schedule and commit when nothing can happen.

While nobody waits, no prompt is under way and nobody ends, every step is the same: one token for each running decode. A run
of such steps changes the scheduler exactly as the single steps would, block ids included, but costs a walk over the blocks
that fill up instead of over every row of every step. Used by `core.scheduler` (`Scheduler.skip_decodes`). Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from trimtab_engine.core.lifecycle import Lifecycle
from trimtab_engine.core.request import Request


def steady_steps(state: Lifecycle, budget: int, max_model_len: int) -> int:
    """How many of the next steps are certain to be one token for each running decode, with nobody ending; memory apart.

    0 unless every live request decodes. The step in which the first of them reaches its `max_tokens` or the model length is
    not counted. Only for requests that nothing but a length ends: `ignore_eos`, no stop tokens.
    """
    decodes = state.running.decodes
    if state.fair is not None:
        return 0  # tenants are charged token by token
    if not decodes or len(decodes) > budget or len(state.requests) != len(decodes):
        return 0
    steps = max_model_len
    for request in decodes:
        sampling, length = request.sampling, len(request.token_ids)
        if request.num_in_flight or not sampling.ignore_eos or sampling.stop_token_ids:
            return 0
        left = max_model_len - length
        if sampling.max_tokens is not None:
            left = min(left, sampling.max_tokens - (length - request.num_prompt_tokens))
        if left <= steps:
            steps = left - 1
    return max(0, steps)


def run_decodes(state: Lifecycle, token_of: Callable[[Request], int], ends_s: list[float]) -> int:
    """Carry out steady steps that are committed at `ends_s`; returns how many.

    Stops before the first one that finds too few free blocks: preemption is the scheduler's to decide. Every new token of a
    request is `token_of(request)`. The caller has asked `steady_steps`.
    """
    size, pool, decodes = state.block_size, state.pool, state.running.decodes
    by_offset: list[list[Request]] = [[] for _ in range(size)]
    for request in decodes:
        by_offset[request.num_computed % size].append(request)
    num_steps = _steps_with_memory(by_offset, size, len(ends_s), pool.num_free)
    if num_steps <= 0:
        return 0
    start = [(request, request.num_computed) for request in decodes]
    for request in decodes:
        request.token_ids.extend([token_of(request)] * num_steps)
    publishing = state.cache.enabled
    for step in range(num_steps):
        for request in by_offset[-step % size]:  # their blocks are full: this step writes into a new one
            if request.num_computed + step >= len(request.block_ids) * size:
                request.block_ids += pool.allocate(1)
        if publishing:
            for request in by_offset[(-step - 1) % size]:  # this step fills their last block
                before = request.num_computed
                request.num_computed = before + step + 1
                state.publish(request)
                request.num_computed = before
    for request, computed in start:
        request.num_computed = computed + num_steps
        request.last_token_s = ends_s[num_steps - 1]
        state.charge_output(request, num_steps)
    return num_steps


def _steps_with_memory(by_offset: list[list[Request]], size: int, num_steps: int, num_free: int) -> int:
    """How many steps the free blocks last for."""
    for step in range(num_steps):
        num_free -= sum(
            request.num_computed + step >= len(request.block_ids) * size
            for request in by_offset[-step % size]
        )
        if num_free < 0:
            return step
    return num_steps
