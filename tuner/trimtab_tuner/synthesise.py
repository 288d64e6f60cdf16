"""Makes small traces with the two traits that hurt tail latency: bursts, and a few long prompts among short chats.

The shipped segment `examples/traces/mixed_bursty.jsonl` comes from `synthesise(Shape())`. Called by `trimtab-tuner trace synth`
and tests. Real traces are better where there are any; this one fits into a demo.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .burstiness import interarrival_cv
from .errors import InputError
from .trace import Trace, TraceRequest
from .units import parse_duration_s

__all__ = ["Shape", "parse_duration_s", "synthesise"]

_TRIES = 10_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What a segment looks like. Lengths in tokens; short prompts and outputs are log-normal around their medians, clipped."""

    requests: int = 60
    span_s: float = 60.0
    cv: float = 3.2
    long_share: float = 0.05
    long_prompt_tokens: int = 1500
    short_prompt_tokens: int = 64
    output_tokens: int = 24
    seed: int = 7

    def __post_init__(self) -> None:
        checks = (
            ("--requests", self.requests, self.requests >= 10, "a whole number ≥ 10"),
            ("--duration", self.span_s, self.span_s > 0, "seconds above 0"),
            ("--cv", self.cv, 0 < self.cv <= 8, "a CV above 0, at most 8"),
            ("--long-share", self.long_share, 0 <= self.long_share <= 0.5, "a share from 0 to 0.5"),
            ("--long-tokens", self.long_prompt_tokens, self.long_prompt_tokens >= 1, "a whole number ≥ 1"),
        )
        for path, value, good, allowed in checks:
            if not good:
                raise InputError(path, value, allowed)


def synthesise(shape: Shape) -> Trace:
    """A seeded trace. Its *sample* CV is within 5 % of the one asked: short draws scatter widely, so they are redrawn.

    So are draws with a silence longer than a quarter of the span: a segment that is over early measures an idle server.
    """
    rng = np.random.default_rng(shape.seed)
    count = shape.requests
    for _ in range(_TRIES):
        gaps = rng.standard_gamma(1.0 / shape.cv**2, count - 1)
        if gaps.sum() <= 0:
            continue
        at = np.concatenate([[0.0], np.cumsum(gaps)]) * (shape.span_s / gaps.sum())
        cv = interarrival_cv(at.tolist())
        if cv is not None and abs(cv / shape.cv - 1) <= 0.05 and np.diff(at).max() <= shape.span_s / 4:
            break
    else:
        raise InputError(
            "--cv", shape.cv, f"a smaller CV or more requests: {count} requests can hardly arrive like that"
        )
    prompts = _lengths(rng, shape.short_prompt_tokens, 0.7, count)
    outputs = _lengths(rng, shape.output_tokens, 0.35, count)
    # Long prompts stand apart (one in each stretch), and never first or last: each has company to disturb.
    num_long = round(shape.long_share * count)
    if num_long:
        edges = np.linspace(1, count - 1, num_long + 1).astype(int)
        for start, stop in pairwise(edges):
            prompts[rng.integers(start, stop)] = shape.long_prompt_tokens
    requests = tuple(
        TraceRequest(round(float(t), 6), int(p), int(o)) for t, p, o in zip(at, prompts, outputs, strict=True)
    )
    return Trace(requests, f"synthesised, seed {shape.seed}", "records")


def _lengths(
    rng: np.random.Generator, median: int, sigma: float, count: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    drawn = median * np.exp(sigma * rng.standard_normal(count))
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]] = np.clip(
        np.rint(drawn), max(1, median // 4), median * 6
    ).astype(np.int64)
    return lengths
