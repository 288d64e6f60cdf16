"""The scheduler's side of `policy_sla`: asks its pure rules with the scheduler's own numbers, and keeps what they need.

Owned by `core.scheduler`. Holds the step-time model in force. Knows requests and the step being built; moves no KV.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from trimtab_engine.core import policy_sla as sla
from trimtab_engine.core.lifecycle import Lifecycle
from trimtab_engine.core.live import LiveConfig
from trimtab_engine.core.request import FinishReason, Request, RequestState
from trimtab_engine.core.step import TokenEvent
from trimtab_engine.core.step_builder import StepBuilder
from trimtab_engine.core.step_time import StepFeatures, StepTimeModel


class Deadlines:
    """Deadlines of requests, the time limit of a step, and who has most to spare."""

    def __init__(self, state: Lifecycle, live: LiveConfig, shed_late: bool) -> None:
        self.model: StepTimeModel | None = None
        self.shed_late = shed_late
        self._state = state
        self._live = live
        self._usual_chunk: int | None = None  # None: to be computed

    def use_step_time(self, model: StepTimeModel) -> None:
        """Predict by this model from now on."""
        self.model = model
        self._usual_chunk = None

    def reconfigure(self, live: LiveConfig) -> None:
        """Targets of requests added from now on, and the budget."""
        self._live = live
        self._usual_chunk = None

    def fix(self, request: Request, look_up: bool) -> None:
        """Fix a new request's targets and latest start. They do not change again, whatever is learnt or reconfigured.

        `look_up`: count what is cached; admission needs the same hashes, so it is all but free.
        """
        ttft_s, itl_s = sla.targets(self._live.slo, request.slo_class, request.ttft_s, request.itl_s)
        request.ttft_target_s, request.itl_target_s = ttft_s, itl_s
        if look_up:
            cache = self._state.cache
            request.num_expected_hits = len(cache.lookup(request)) * cache.block_size
        prefill_s = 0.0
        if self.model is not None:
            hits = request.num_expected_hits
            prefill_s = self.model.prefill_s(
                request.num_prompt_tokens - hits, hits, self._chunk_of_one(self.model)
            )
        request.latest_start_s = sla.latest_start_s(request.arrival_s, ttft_s, prefill_s)

    def move_standings(self, now: float) -> list[TokenEvent]:
        """Who could not start in time is late from now on, or shed (the events); who waited too long is overdue."""
        events: list[TokenEvent] = []
        for request in self._state.standings.due(now):
            if (
                self.shed_late
                and request.state is RequestState.WAITING
                and request.standing is sla.Standing.SAVABLE
                and sla.was_savable(request)
            ):
                events.append(self._shed(request, now))
            else:
                self._state.move(request)
        return events

    def limit(self, builder: StepBuilder, now: float) -> None:
        """The decodes are in: from now on prompts are bounded by time."""
        rows = builder.rows = builder.decode_rows()
        if self.model is not None:
            deadlines_s = [
                (now if r.last_token_s is None else r.last_token_s) + r.itl_target_s for r in builder.decodes
            ]
            cap_s = sla.step_cap_s(self._live.slo)
            builder.limit_s = sla.step_limit_s(self.model, rows, deadlines_s, now, cap_s)

    def goes_before(self, head: Request, running: Request, builder: StepBuilder) -> bool:
        """Whether a waiting prompt gets its tokens of this step before one that is under way."""
        if head.rank < running.rank:
            return True
        assert builder.rows is not None, "`limit` comes first"
        need = max(1, len(head.token_ids) - max(head.num_expected_hits, head.num_swapped))
        return sla.is_quick(self.model, builder.rows, builder.prompt_tokens, need, builder.limit_s)

    def chunk(self, need: int, context: int, most: int, builder: StepBuilder) -> int:
        """Tokens of a prompt for this step. Whoever is cut short takes all the time that is left: nobody need be asked after."""
        assert builder.rows is not None, "`limit` comes first"
        chunk = sla.prompt_chunk(
            self.model,
            builder.rows,
            prompt_tokens=builder.prompt_tokens,
            context=context,
            need=need,
            most=most,
            limit_s=builder.limit_s,
        )
        if 0 < chunk < most:
            builder.cut_short = True
        return chunk

    def recompute_s(self, num_tokens: int) -> float | None:
        """Time to compute that many tokens of a sequence again, alone; None when no step has been measured."""
        if self.model is None:
            return None
        return self.model.prefill_s(num_tokens, 0, self._chunk_of_one(self.model))

    def by_laxity(self, running: Iterable[Request]) -> list[Request]:
        """Running requests, the one with most to spare last; ties: least important, most recently admitted last."""
        token_s = attention_s = 0.0
        if self.model is not None:
            token_s, attention_s = self.model.prompt_rates(self._chunk_of_one(self.model))
        return sorted(running, key=lambda r: (sla.laxity_s(r, token_s, attention_s), r.priority, r.admission))

    def _chunk_of_one(self, model: StepTimeModel) -> int:
        """Tokens a step of a prompt that runs alone under the config in force."""
        if self._usual_chunk is None:
            most = self._live.max_num_batched_tokens
            chunk = model.largest_chunk(StepFeatures(0, 0, 0, 0.0), 0, most, sla.step_cap_s(self._live.slo))
            self._usual_chunk = max(min(most, sla.FLOOR_TOKENS), chunk)
        return self._usual_chunk

    def _shed(self, request: Request, now: float) -> TokenEvent:
        waited_s = now - request.arrival_s
        request.error = f"shed after {waited_s:.2f} s: its first token can no longer come within {request.ttft_target_s:g} s"
        # What waits now is gone, served or late, once it has waited as long as this one did.
        request.retry_after_s = max(1, math.ceil(waited_s))
        self._state.counters.shed += 1
        self._state.end(request, FinishReason.ERROR)
        return TokenEvent(request, None, finished=True)
