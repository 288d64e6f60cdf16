"""Requests as the scheduler sees them: token ids, sampling parameters, progress and state.

Built by the engine process from `messages.Add` (and by the simulator); changed by `core.scheduler` alone.
Knows nothing of text, HTTP, devices or clocks: all times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from trimtab_engine.core.policy_sla import Standing


class RequestState(StrEnum):
    """Life of a request. Legal transitions:

    WAITING → RUNNING → (PREEMPTED or SWAPPED → RUNNING)* → FINISHED; every state → FINISHED by abort or error; SWAPPED →
    PREEMPTED when the copy is lost. PREEMPTED computes all again, SWAPPED has `num_swapped` tokens of KV in CPU memory.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended. STOP and LENGTH are OpenAI's; the others never reach a client as a success."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens; validated at the HTTP door, trusted here.

    Stop *strings* are not here: text exists only in the HTTP process, which aborts the request when one is found.
    `seed` None means: drawn once per request at admission, so that preemption never changes what is said.
    """

    max_tokens: int | None = None  # None: until max_model_len
    min_tokens: int = 0  # EOS and stop tokens are masked until then
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over output tokens, OpenAI's definition
    frequency_penalty: float = 0.0  # over output tokens, OpenAI's definition
    repetition_penalty: float = 1.0  # over prompt and output tokens, the CTRL paper's definition
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: off; k: the chosen token's and the k best, of the raw logits
    prompt_logprobs: int | None = None  # same for prompt tokens; such requests skip reading the prefix cache

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. `token_ids` is prompt + outputs; the last sampled token has no KV yet.

    Half-open ranges over `token_ids`:
      [0, num_computed)                          KV is valid and may be attended to
      [num_computed, num_computed+num_in_flight) scheduled in a step that is not committed yet
      [.., len(token_ids))                       still to compute; `need` of the scheduler
    """

    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0  # lower is earlier, as in vLLM
    slo_class: str = "default"
    ttft_s: float | None = None  # its own targets; None: those of its class
    itl_s: float | None = None
    tenant: str | None = None  # for fairness
    cache_salt: str | None = None  # requests share prefixes only within one salt
    group: str | None = (
        None  # siblings of one n>1 request; they wait until the first has published its prefix
    )
    sequence: int = 0  # admission order of `add`, the last tie-breaker; set by the scheduler
    admission: int = 0  # stamp of the latest admission, later is larger; set by the scheduler
    rank: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # order under the policy in force; set by the scheduler

    # Deadlines, set by the scheduler when the request is added; see `core.policy_sla`.
    ttft_target_s: float = math.inf
    itl_target_s: float = math.inf
    latest_start_s: float = math.inf
    standing: Standing = Standing.SAVABLE
    num_expected_hits: int = 0  # tokens that were cached when it was added
    last_token_s: float | None = None  # when its latest token was committed
    retry_after_s: int | None = None  # it was shed: nothing is wrong with it

    state: RequestState = RequestState.WAITING
    num_computed: int = 0
    num_in_flight: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks of token_ids, computed lazily
    swap_ids: list[int] = field(default_factory=list)  # places in CPU memory that hold its KV
    num_swapped: int = 0  # tokens there
    num_published: int = 0  # leading blocks that stand in the prefix index
    num_cached: int | None = None  # prefix hit tokens of the first admission; None before it
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop_token_ids entry that ended it, None for EOS or length
    error: str | None = None  # set with FinishReason.ERROR

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Outputs so far."""
        return len(self.token_ids) - self.num_prompt_tokens
