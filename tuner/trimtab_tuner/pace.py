"""How many tokens came in which time, in blocks of requests that both sides of a comparison have. Pure.

Called by whoever knows single requests: the replay's `workload` and `simulate.measured`. In an open loop the same requests bring the
same tokens sooner or later, so throughput is in the time that they take: a block's is the time from when all before it was done to when
it was done too. All blocks together take until the last answer, and a server that only answers later, without falling behind
further and further, loses in one block and not in the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trimtab_tuner.result import RequestResult


class Pace(NamedTuple):
    """Tokens generated for one block of requests, and the seconds that they took beyond the blocks before."""

    tokens: float
    seconds: float


def by_arrival(
    requests: Iterable[RequestResult], from_s: float, until_s: float, count: int
) -> tuple[Pace, ...]:
    """`count` blocks of equal width by intended arrival; what comes before the first or after the last belongs to that one.
    What a failed request delivered counts, and so does the time until it failed."""
    tokens, ends = [0.0] * count, [from_s] * count
    width = max(until_s - from_s, 1e-9) / count
    for request in requests:
        block = min(count - 1, max(0, int((request.intended_s - from_s) / width)))
        tokens[block] += request.output_tokens or len(request.token_times_s)
        times = [*request.token_times_s[-1:], *([] if request.finish_s is None else [request.finish_s])]
        ends[block] = max(ends[block], *times) if times else ends[block]
    found, done_s = [], from_s
    for block in range(count):
        end_s = max(done_s, ends[block])
        found.append(Pace(tokens[block], end_s - done_s))
        done_s = end_s
    return tuple(found)
