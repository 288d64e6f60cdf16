"""Messages between the HTTP process and the engine process: msgspec structs, msgpack, length-prefixed.

Both processes import this; it imports neither side. Times are seconds of CLOCK_MONOTONIC, which the two share.
Frames: 4-byte big-endian length, then one encoded `ToEngine` or `FromEngine` value. End of file = the peer is dead.
"""

from __future__ import annotations

import msgspec

from trimtab_engine.core.request import SamplingParams


class Init(msgspec.Struct, tag=True, frozen=True):
    """First message: the static configuration (`EngineConfig.to_json()`) and the live config to start with."""

    engine: dict[str, object]
    live: dict[str, object]  # LiveConfig.to_json()
    generation: int
    source: str  # Spec | Recommendation
    boot_error: str | None = None  # why live.json was not taken at start, for the read-back


class Add(msgspec.Struct, tag=True, frozen=True):
    """A new request. `id` is internal and unique, never the client's."""

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0
    slo_class: str = "default"
    ttft_s: float | None = None  # its own targets; None: those of its class
    itl_s: float | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    group: str | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends requests wherever they stand. Idempotent; unknown ids are ignored."""

    ids: list[str]


class Reconfigure(msgspec.Struct, tag=True, frozen=True):
    """A whole live config, to be applied between steps; answered by `Applied` with the same `sequence`.

    `lease_s` None: a new incumbent. Else a candidate that ends by itself when it is not renewed.
    """

    sequence: int
    generation: int
    source: str
    config: dict[str, object]
    lease_s: float | None = None


class EndLease(msgspec.Struct, tag=True, frozen=True):
    """Ends the candidate now, if there is one; answered by `Applied` with the same `sequence`."""

    sequence: int


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Finish what is there, then send `Stopped` and exit 0. New `Add`s are still honoured until then."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Exit now; running requests end as aborts."""


ToEngine = Init | Add | Abort | Reconfigure | EndLease | Drain | Stop


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Progress of start-up, for `/ready` and the log: stage is import | download | convert | load | warm."""

    stage: str
    fraction: float
    total_bytes: int | None = None  # of a download
    waiting_for: str | None = None  # what holds a download up


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded and warm; requests may come."""

    num_blocks: int  # without the null block
    block_size: int
    max_model_len: int
    vocab_size: int
    device: str
    dtype: str
    load_s: float
    kv_bytes: int
    model_path: str  # where it lies on this machine: a reference that needs no hub
    # What else decides how requests are scheduled, for whoever wants to simulate this engine.
    enable_prefix_caching: bool
    prefill_first: bool
    shed_late: bool
    fair_tenants: bool
    num_swap_blocks: int
    swap_block_s: float


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One request's news of one step. `token_id` None: it ended without a token."""

    id: str
    token_id: int | None
    finish_reason: str | None = None  # stop | length | abort | error
    stop_token: int | None = None
    error: str | None = None
    num_cached: int | None = None  # with the first token: prefix hit of the first admission
    first_scheduled_s: float | None = None  # with the first token
    logprob: float | None = None
    rank: int | None = None
    top: list[tuple[int, float]] | None = None
    prompt_logprobs: list[tuple[float, int, list[tuple[int, float]]] | None] | None = (
        None  # with the first token
    )
    num_preemptions: int = 0
    retry_after_s: int | None = None  # with finish_reason error: it was shed; come back then


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of one step and of the scheduler right after it; deltas count since the previous StepOutput."""

    step_id: int
    generation: int
    budget: int
    num_tokens: int
    num_decodes: int
    num_prefills: int
    schedule_s: float
    step_s: float  # schedule → commit
    started_s: float
    num_running: int
    num_waiting: int  # includes preempted ones
    num_waiting_capacity: int  # of those: held back by memory or max_num_seqs
    oldest_waiting_arrival_s: float | None
    kv_used_fraction: float  # 1 - free/total; cached but unreferenced blocks count as free
    prefix_queries: int  # tokens, delta
    prefix_hits: int  # tokens, delta
    preemptions_recompute: int  # delta
    preemptions_swap: int  # delta
    recomputed_tokens: int  # delta
    decode_context: int  # sum of context over decode rows
    prefill_attention: float  # sum over prefill rows of chunk * (context + chunk/2)
    lost_s: float  # of step_s: the engine thread was ready to run and had no CPU


class StepOutput(msgspec.Struct, tag=True, frozen=True):
    """One per step; also sent with no tokens when the engine goes idle, so that gauges fall to zero."""

    tokens: list[Token]
    stats: StepStats


class StepModel(msgspec.Struct, tag=True, frozen=True):
    """News of the step-time model: `StepTimeModel.to_json()` (None before the first) and `FitScore.to_json()`."""

    model: dict[str, object] | None
    score: dict[str, object]


class Applied(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Reconfigure` and `EndLease`, or (sequence None) news that a lease ended. `readback` is `LiveState.to_json()`."""

    sequence: int | None
    readback: dict[str, object]
    error: str | None = None
    error_path: str | None = None
    conflict: bool = False


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """All work is done after `Drain`; the process exits next."""


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot go on (model load failed, device error); the process exits next."""

    kind: str  # model_load | config | device | internal
    reason: str


FromEngine = Loading | Ready | StepOutput | StepModel | Applied | Stopped | Fatal
