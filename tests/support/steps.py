"""Builds steps by hand for tests of the runner that need no scheduler: requests with blocks, rows with chunks."""

from __future__ import annotations

from trimtab_engine.core.request import Request, SamplingParams
from trimtab_engine.core.step import Step

GREEDY = SamplingParams(temperature=0.0)


def make_request(
    name: str, token_ids: list[int], block_ids: list[int], sampling: SamplingParams = GREEDY
) -> Request:
    """A request whose tokens are all prompt so far, holding the given blocks."""
    return Request(name, list(token_ids), len(token_ids), sampling, 0.0, block_ids=list(block_ids))


def make_step(*rows: tuple[Request, int, int]) -> Step:
    """A step of rows (request, context, chunk); rows that reach the end of their tokens are sampled."""
    step = Step(0, 0, sum(chunk for _, _, chunk in rows), 0.0)
    for index, (request, context, chunk) in enumerate(rows):
        step.requests.append(request)
        step.context.append(context)
        step.chunk.append(chunk)
        if context + chunk == request.num_tokens:
            step.samples.append(index)
    step.num_tokens = step.budget
    step.num_decodes = sum(1 for request, context, _ in rows if context + 1 == request.num_tokens)
    return step
