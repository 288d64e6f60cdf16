"""A step while it is being put together: rows in parallel lists, the budget left, and taking a row back.

Used by `core.scheduler` within one call of `schedule`. Knows rows; nothing of memory, queues or policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trimtab_engine.core.request import Request
from trimtab_engine.core.step import Step
from trimtab_engine.core.step_time import StepFeatures

# Why nobody more was admitted in a step.
Blocked = Literal["budget", "max_num_seqs", "memory", "preempted"]


@dataclass(slots=True)
class BlockedHead:
    """The waiting request at which pass C stopped, and the memory it lacks (0 of 0 for another reason)."""

    request: Request
    needed: int  # free blocks
    available: int  # free blocks that are not spoken for
    expires_step_id: int  # from here on `needed` is looked up again


class StepBuilder:
    """Decodes and prompts are collected apart, as the finished step shows decode rows first whatever the pass order."""

    __slots__ = (
        "admitted",
        "budget",
        "cut_short",
        "decode_context",
        "decodes",
        "limit_s",
        "preempted",
        "prefill_chunk",
        "prefill_context",
        "prefills",
        "rows",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left; below 0 only when one unchunked prompt runs alone
        self.decodes: list[Request] = []
        self.decode_context: list[int] = []
        self.prefills: list[Request] = []
        self.prefill_context: list[int] = []
        self.prefill_chunk: list[int] = []
        self.preempted: list[Request] = []
        self.admitted: list[Request] = []
        # Under a policy with deadlines, once the decodes are in: what the step holds, how long it may take, and whether a
        # prompt has taken all of it.
        self.rows: StepFeatures | None = None
        self.limit_s = math.inf
        self.cut_short = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts so far."""
        return sum(self.prefill_chunk)

    def decode_rows(self) -> StepFeatures:
        """What a step of the decodes alone would be."""
        count = len(self.decodes)
        return StepFeatures(count, count, sum(self.decode_context), 0.0)

    @property
    def is_empty(self) -> bool:
        """Whether no row was added."""
        return not self.decodes and not self.prefills

    def add_prefill(self, request: Request, context: int, chunk: int) -> None:
        """A row of `chunk` prompt tokens after `context` computed ones."""
        self.prefills.append(request)
        self.prefill_context.append(context)
        self.prefill_chunk.append(chunk)
        request.num_in_flight += chunk
        self.budget -= chunk
        if self.rows is not None:
            tokens, sequences, decode_context, attention = self.rows
            attention += chunk * (context + chunk / 2)
            self.rows = StepFeatures(tokens + chunk, sequences + 1, decode_context, attention)

    def withdraw(self, request: Request) -> None:
        """Undo the request's row of this step, if it has one: its tokens go back to the budget."""
        if request in self.decodes:
            row = self.decodes.index(request)
            del self.decodes[row], self.decode_context[row]
            request.num_in_flight -= 1
            self.budget += 1
        elif request in self.prefills:
            row = self.prefills.index(request)
            chunk = self.prefill_chunk[row]
            del self.prefills[row], self.prefill_context[row], self.prefill_chunk[row]
            request.num_in_flight -= chunk
            self.budget += chunk

    def build(self, step_id: int, generation: int, budget: int, now: float) -> Step:
        """The finished step."""
        num_decodes = len(self.decodes)
        samples = list(range(num_decodes))
        row = num_decodes
        for request, context, chunk in zip(
            self.prefills, self.prefill_context, self.prefill_chunk, strict=True
        ):
            if context + chunk == len(request.token_ids):
                samples.append(row)
            row += 1
        return Step(
            step_id=step_id,
            generation=generation,
            budget=budget,
            scheduled_at_s=now,
            requests=self.decodes + self.prefills,
            context=self.decode_context + self.prefill_context,
            chunk=[1] * num_decodes + self.prefill_chunk,
            samples=samples,
            num_decodes=num_decodes,
            num_tokens=num_decodes + sum(self.prefill_chunk),
            preempted=self.preempted,
            admitted=self.admitted,
        )
