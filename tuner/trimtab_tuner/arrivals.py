"""Arrival modes: the same requests in the same order, at recorded, even, Poisson or Gamma-distributed times.

Called by replay, study and simulator. All modes keep the source's span, hence its mean rate: drawn gaps are rescaled
so that the last arrival falls where the source's last one does. This takes the rate noise of a short draw out of comparisons
(a burst of 60 requests would otherwise differ by tens of percent in load), leaves the CV as drawn, and is
strictly no longer a renewal process.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .errors import InputError
from .trace import Trace

ModeName = Literal["recorded", "uniform", "poisson", "gamma"]
ALLOWED = "one of: recorded, uniform, poisson, gamma:CV with CV above 0 (gamma:3 has gaps with a coefficient of variation of 3)"
_GAMMA = re.compile(r"gamma[:(]([0-9.eE+-]+)\)?")


@dataclass(frozen=True, slots=True)
class Mode:
    """An arrival mode; `cv` is set for gamma only."""

    name: ModeName
    cv: float | None = None

    def __str__(self) -> str:
        return self.name if self.cv is None else f"gamma:{self.cv:g}"


def parse_mode(text: str, path: str = "--mode") -> Mode:
    """`recorded`, `uniform`, `poisson`, `gamma:3` or `gamma(3)`. Raises InputError."""
    match text:
        case "recorded" | "uniform" | "poisson":
            return Mode(text)
    match = _GAMMA.fullmatch(text)
    try:
        cv = float(match[1]) if match else math.nan
    except ValueError:
        cv = math.nan
    if not (math.isfinite(cv) and cv > 0):
        raise InputError(path, text, ALLOWED)
    return Mode("gamma", cv)


def retime(trace: Trace, mode: Mode | str, seed: int = 0) -> Trace:
    """The trace under an arrival mode. The same (trace, mode, seed) gives the same arrivals on every machine.

    Gamma gaps have shape 1/CV² (mean fixed by the span); the sample CV of a short trace scatters around the one asked.
    """
    mode = parse_mode(mode) if isinstance(mode, str) else mode
    count = len(trace) - 1
    if mode.name == "recorded" or count < 1:
        return trace
    if trace.span_s <= 0:
        raise InputError(
            "--mode", str(mode), "a trace whose arrivals are not all at one instant (its rate is unknown)"
        )
    rng = np.random.default_rng(seed)
    if mode.name == "uniform":
        gaps = np.ones(count)
    elif mode.name == "poisson":
        gaps = rng.standard_exponential(count)
    else:
        assert mode.cv is not None, "parse_mode sets it"
        gaps = rng.standard_gamma(1.0 / mode.cv**2, count)
    # Gamma draws of a tiny shape underflow to 0; should all of them, the arrivals would have no scale.
    if not gaps.sum() > 0:
        raise InputError("--mode", str(mode), "a smaller CV or a longer trace: all drawn gaps were 0")
    arrivals = np.concatenate([[0.0], np.cumsum(gaps)]) * (trace.span_s / gaps.sum())
    arrivals[-1] = trace.span_s
    note = "arrivals uniform" if mode.name == "uniform" else f"arrivals {mode}, seed {seed}"
    return trace.with_arrivals(np.maximum.accumulate(arrivals).tolist(), note)
