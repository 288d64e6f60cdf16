"""What one engine step runs (`Step`), what came back (`StepResult`), and what became of it (`StepEvents`).

`Scheduler.schedule` makes steps, a runner (real or simulated) executes them, `Scheduler.commit` takes the result.
Parallel lists, not an object per row: at 256 rows that is 0.06 ms instead of 0.31 ms.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab_engine.core.request import Request


@dataclass(slots=True)
class Step:
    """Rows of one forward pass; index i of each list is row i. Decode rows come first.

    Row i computes token_ids[context[i] : context[i] + chunk[i]] of requests[i]; its KV goes into
    `requests[i].block_ids` (already allocated for all of them). Only rows in `samples` yield a token.
    """

    step_id: int
    generation: int  # of the live config in force
    budget: int  # max_num_batched_tokens in force
    scheduled_at_s: float
    requests: list[Request] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)  # row indices whose chunk reaches num_tokens
    num_decodes: int = 0
    num_tokens: int = 0  # sum of chunk; at most budget (prefill-first may exceed it with one prompt alone)
    preempted: list[Request] = field(
        default_factory=list
    )  # in this step, to be rolled back in the runner's state
    admitted: list[Request] = field(default_factory=list)  # first or renewed admissions of this step
    # KV blocks to copy before the forward pass, first all out (pool block → CPU place), then all in (place → pool block).
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.requests)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw logits (before penalties, bias and temperature)."""

    logprob: float  # of the chosen token
    rank: int  # 1 is the best
    top: list[tuple[int, float]]  # k best (token id, logprob), best first


@dataclass(slots=True)
class StepResult:
    """Outcome of a step; entry j belongs to row `step.samples[j]`."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # empty: none asked for
    failed: dict[int, str] = field(
        default_factory=dict
    )  # row → reason (NaN logits); fails that request alone
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)  # row → of its chunk


@dataclass(slots=True)
class TokenEvent:
    """One request's news from one committed step."""

    request: Request
    token_id: int | None  # None: ended without a token (error, refused for memory)
    logprobs: TokenLogprobs | None = None
    finished: bool = False  # request.finish_reason says why
