"""Token ids for requests that have none: equal where the trace says that prompts are equal, different everywhere else.

Used by `fleet.py`. A prompt's leading blocks become runs of one id per `prefix_block_ids` entry; the rest of the prompt and
every output carry an id of the request's own. So the engine's prefix cache hits exactly what a replay of the same trace
could hit (`prompts.py` does the same with a server's vocabulary), and nothing is ever drawn.
"""

from __future__ import annotations

from trimtab_engine.core.request import Request
from trimtab_engine.core.step import Step, StepResult
from trimtab_tuner.trace import Trace, TraceRequest

_OWN = (
    1 << 30
)  # ids of requests start here, those of shared blocks at 0; both stay within the 32 bits that are hashed


class SyntheticTokens:
    """Prompts of a trace's requests, and the pure executor that answers each of them with its own id."""

    def __init__(self, trace: Trace) -> None:
        self._block_tokens = trace.prefix_block_tokens
        self._numbers: dict[int | str, int] = {}

    def prompt(self, index: int, request: TraceRequest) -> list[int]:
        """`prompt_tokens` ids for the request at `index` of the trace."""
        length = request.prompt_tokens
        ids: list[int] = []
        if request.prefix_block_ids is not None and self._block_tokens is not None:
            for block in request.prefix_block_ids:
                if len(ids) >= length:
                    break
                ids += [self._numbers.setdefault(block, len(self._numbers))] * self._block_tokens
        if len(ids) < length:
            ids += [_OWN + index] * (length - len(ids))
        return ids[:length]

    def run(self, step: Step) -> StepResult:
        """What a runner would return: one token for each sampled row."""
        requests = step.requests
        return StepResult([output_token(requests[row]) for row in step.samples])


def output_token(request: Request) -> int:
    """The id that this request says, over and over; its seed is its index in the trace."""
    seed = request.sampling.seed
    assert seed is not None, "simulated requests are numbered by their seed"
    return _OWN + seed
