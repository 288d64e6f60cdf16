"""The rules of the `sla-aware` policy: who can still be saved, how much prompt a step may hold, who has most to spare.

Pure functions over small views and numbers, called by `core.policy` and `core.scheduler`, callable by a simulator and by
another engine's scheduler. Knows no queues, blocks or clocks; times are the caller's monotonic seconds.

Each request has a deadline for its first token (arrival + TTFT target) and one for each next token (last token + ITL
target). What orders waiting requests is fixed when a request is added and moves one way only:

    SAVABLE   by latest start = deadline - time to compute the prompt
    LATE      once the latest start has passed: behind all that can be saved, by arrival
    OVERDUE   once it has waited PATIENCE times its target: before everybody, by arrival; so nobody starves

When all are late, the order is that of arrival: first come, first served.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from trimtab_engine.core.live import Slo
from trimtab_engine.core.step_time import StepFeatures, StepTimeModel

PATIENCE = 4.0
# Of a target, what a step may use: the rest is for what the model misses and for the way to the client.
HEADROOM = 0.9
# A prompt may always lengthen a step of decodes by this share: overload slows prompts down, it does not stop them.
PROGRESS_SHARE = 0.25
# The first prompt of a step gets at least this many tokens, and no further prompt gets fewer unless that completes it.
FLOOR_TOKENS = 16
# Prompt tokens a step while no step has been measured; later, twice the largest step that ran.
UNMEASURED_TOKENS = 64
# A waiting prompt that fits whole into this share of the time left goes before prompts that are under way.
QUICK_SHARE = 0.5


class Standing(IntEnum):
    """Of a request without a first token."""

    OVERDUE = 0
    SAVABLE = 1
    LATE = 2


class DeadlineView(Protocol):
    """What the rules see of a request."""

    @property
    def arrival_s(self) -> float:
        """When it arrived."""

    @property
    def ttft_target_s(self) -> float:
        """From arrival to its first token."""

    @property
    def itl_target_s(self) -> float:
        """From token to token."""

    @property
    def latest_start_s(self) -> float:
        """As computed by `latest_start_s` when it was added."""

    @property
    def standing(self) -> Standing:
        """Where it stands."""

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs so far."""

    @property
    def last_token_s(self) -> float | None:
        """When its latest token was made; None before the first."""


def targets(
    slo: Slo, slo_class: str, own_ttft_s: float | None, own_itl_s: float | None
) -> tuple[float, float]:
    """(TTFT, ITL) of a request: its own where it brings them, else its class's, else the default class's."""
    found = slo.by_name(slo_class) or slo.by_name(slo.default_class)
    ttft_s, itl_s = (math.inf, math.inf) if found is None else (found.ttft_s, found.itl_s)
    return ttft_s if own_ttft_s is None else own_ttft_s, itl_s if own_itl_s is None else own_itl_s


def step_cap_s(slo: Slo) -> float:
    """The longest step that is worth it with nothing decoding: the smallest ITL target of any class, less the headroom.

    So that one huge prompt never makes a huge step, which a request arriving in its middle would have to wait for.
    """
    return HEADROOM * min((c.itl_s for c in slo.classes), default=math.inf)


def latest_start_s(arrival_s: float, ttft_s: float, prefill_s: float) -> float:
    """The last moment at which a prompt that takes `prefill_s` can start and have its first token in time."""
    return arrival_s + ttft_s - prefill_s


def next_move_s(view: DeadlineView) -> float:
    """When the request's standing changes if it has no first token by then; infinity when it never does again."""
    if view.last_token_s is not None or view.standing is Standing.OVERDUE:
        return math.inf
    if view.standing is Standing.SAVABLE:
        return view.latest_start_s
    return view.arrival_s + PATIENCE * view.ttft_target_s


def next_standing(standing: Standing) -> Standing:
    """SAVABLE → LATE → OVERDUE; never back."""
    return Standing.LATE if standing is Standing.SAVABLE else Standing.OVERDUE


def was_savable(view: DeadlineView) -> bool:
    """Whether the deadline could have been met by starting at once: only such a request is worth shedding when it no
    longer can; trying again later would help it."""
    return view.latest_start_s >= view.arrival_s


def next_deadline_s(view: DeadlineView) -> float:
    """Of the next token, or of the first."""
    if view.last_token_s is None:
        return view.arrival_s + view.ttft_target_s
    return view.last_token_s + view.itl_target_s


def laxity_s(view: DeadlineView, token_s: float, attention_s: float) -> float:
    """What a running request has to spare if it lost its KV now: next deadline - time to compute it all again (- now).

    `now` is left out: it is the same for all. The largest is the victim, so short sequences and relaxed targets go first.
    `token_s` and `attention_s` are `StepTimeModel.prompt_rates`, 0 without a model.
    """
    tokens = view.num_tokens
    return next_deadline_s(view) - tokens * (token_s + attention_s * tokens / 2)


def step_limit_s(
    model: StepTimeModel, rows: StepFeatures, deadlines_s: Sequence[float], now: float, cap_s: float
) -> float:
    """How long a step with these decode `rows` may get by prompts: within the smallest slack of a decode, and the cap.

    A decode that is lost whatever happens (its slack is shorter than the step of decodes alone) limits nobody. Prompts may
    always lengthen the step by PROGRESS_SHARE: overload slows them down and does not stop them.
    """
    alone_s = model.interval(rows)[1]
    slack_s = HEADROOM * (min(deadlines_s, default=math.inf) - now)
    if slack_s < alone_s:
        kept = [slack for deadline in deadlines_s if (slack := HEADROOM * (deadline - now)) >= alone_s]
        slack_s = min(kept, default=math.inf)
    return max(min(slack_s, cap_s), alone_s * (1 + PROGRESS_SHARE))


def prompt_chunk(
    model: StepTimeModel | None,
    rows: StepFeatures,
    *,
    prompt_tokens: int,
    context: int,
    need: int,
    most: int,
    limit_s: float,
) -> int:
    """Tokens of one prompt for this step, at most `most`, so that the step takes at most `limit_s`; 0: none.

    `rows`: what the step holds already, `prompt_tokens` of it for prompts; the first prompt gets at least the floor.
    """
    floor = min(most, FLOOR_TOKENS)
    if model is None:
        room = UNMEASURED_TOKENS - prompt_tokens
        chunk = min(most, room)
    else:
        room = int(min(max(UNMEASURED_TOKENS, 2 * model.largest_tokens), 1e9)) - rows.tokens
        chunk = model.largest_chunk(rows, context, min(most, room), limit_s)
    if prompt_tokens == 0:
        return max(chunk, floor)
    return chunk if chunk >= min(need, FLOOR_TOKENS) else 0


def is_quick(
    model: StepTimeModel | None, rows: StepFeatures, prompt_tokens: int, need: int, limit_s: float
) -> bool:
    """Whether a prompt of `need` uncached tokens fits whole into QUICK_SHARE of the time that the step has left."""
    if model is None:
        return need <= QUICK_SHARE * (UNMEASURED_TOKENS - prompt_tokens)
    spent_s = model.interval(rows)[1]
    most_s = spent_s + QUICK_SHARE * (limit_s - spent_s)
    with_it = StepFeatures(
        rows.tokens + need,
        rows.sequences + 1,
        rows.decode_context,
        rows.prefill_attention + need * need / 2,
    )
    return model.interval(with_it)[1] <= most_s
