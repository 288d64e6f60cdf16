"""Estimates step time from what the engine exported: how long a step of a given budget takes. Pure.

Called by `run` for the feasible region and for the first points of the study. Uses sums and counts only (exact): steps
that carry prompts take t = t_decode + s · prompt tokens, with t_decode the mean decode-only step and s fitted so that the
sum over the window is right. Chunk overhead and quadratic attention are inside s, for the prompts that were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_tuner.metrics.reading import Reading


@dataclass(frozen=True, slots=True)
class StepTime:
    """t(budget) = decode_s + per_token_s · budget, with the sizes of the sample behind it."""

    decode_s: float
    per_token_s: float
    decode_steps: int
    mixed_steps: int

    def at(self, budget: int) -> float:
        """Seconds of a step whose budget is full of prompt tokens."""
        return self.decode_s + self.per_token_s * budget


def estimate(reading: Reading, *, min_steps: int = 20) -> StepTime | None:
    """The estimate, or None when the window holds too few steps of either kind to tell."""
    decode_steps, decode_s = reading.steps.get("decode", (0.0, 0.0))
    mixed_steps, mixed_s = reading.steps.get("mixed", (0.0, 0.0))
    tokens = reading.prompt_tokens_computed
    if decode_steps < min_steps or mixed_steps < 3 or tokens < 1:
        return None
    decode_mean = decode_s / decode_steps
    prefill_s = mixed_s - mixed_steps * decode_mean
    if prefill_s <= 0:
        return None
    return StepTime(decode_mean, prefill_s / tokens, int(decode_steps), int(mixed_steps))


def first_points(step_time: StepTime, *, limit_s: float, grid: Sequence[int]) -> tuple[int, ...]:
    """Budgets worth measuring first, best guess first: the largest that keeps `limit_s`, then the one half as large.

    The landscape is a plateau with a cliff: just below the cliff is best for time to first token, and half of it is what
    to fall back on when the estimate was too high.
    """
    below = [b for b in grid if step_time.at(b) <= limit_s]
    if not below:
        return ()
    half = [b for b in below if b <= below[-1] / 2]
    return (below[-1],) if not half else (below[-1], half[-1])
