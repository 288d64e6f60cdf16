"""Two replays side by side: uniform against bursty, before against after. Pure; every figure comes from raw samples.

Where both sent the same requests at the same times, the bootstrap draws the *same* time blocks for both (common random numbers):
what both shared cancels out. This is for showing; the tuner decides by its own test on violated requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .quantiles import Blocks, Floats, Interval, interval, quantile
from .result import ReplayResult, RequestResult
from .slo import Slo
from .stats import MIN_SAMPLES, default_block_s, gaps_s, judge, max_gap_s, ttft_s

Unit = Literal["s", "share"]
Measure = Callable[[RequestResult], Floats]
Owners = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of two replays. `change` is after / before for times and after − before for shares, with its interval.

    None = not shown (too few samples, or infinite on both sides); +inf = among failures.
    """

    name: str
    unit: Unit
    before: float | None
    after: float | None
    change: float | None
    interval: Interval | None
    n_before: int
    n_after: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows. `paired`: both arms sent the same requests at the same times; `same_requests`: same ones, perhaps other times."""

    before: str
    after: str
    paired: bool
    same_requests: bool
    rows: tuple[Row, ...]


def compare(
    labels: tuple[str, str],
    before: ReplayResult,
    after: ReplayResult,
    *,
    slo: Slo | None = None,
    seed: int = 0,
) -> Comparison:
    """Rows for TTFT, ITL, longest gap and the shares of requests that missed their targets (by `slo`, or `before`'s)."""
    slo = before.slo if slo is None else slo
    aligned = [r.index for r in before.requests] == [r.index for r in after.requests]
    same = before.meta.get("lengths_hash") == after.meta.get("lengths_hash")
    paired = aligned and before.meta.get("trace_hash") == after.meta.get("trace_hash")
    arms = [_Arm(before, slo, seed), _Arm(after, slo, seed if paired else seed + 1)]
    rows: list[Row] = []
    measures: tuple[tuple[str, Measure, tuple[float, ...]], ...] = (
        ("TTFT", _one(ttft_s), (0.5, 0.9, 0.99)),
        ("ITL", gaps_s, (0.5, 0.9, 0.99)),
        ("longest gap of a request", _one(max_gap_s), (0.5, 0.9)),
    )
    for name, measure, quantiles in measures:
        samples = [arm.samples(measure) for arm in arms]
        rows += [_quantile_row(f"{name} p{q * 100:g}", q, arms, samples) for q in quantiles]
    rows.append(_share_row("requests over the TTFT target", arms, lambda met: not met[0]))
    rows.append(_share_row("requests over the ITL target", arms, lambda met: not met[1]))
    rows.append(_share_row("goodput (both targets met)", arms, lambda met: met[0] and met[1]))
    return Comparison(labels[0], labels[1], paired, same, tuple(rows))


class _Arm:
    """One side: its requests, blocks and verdicts."""

    def __init__(self, result: ReplayResult, slo: Slo, seed: int) -> None:
        self.requests = result.requests
        span_s = max((r.intended_s for r in result.requests), default=0.0)
        self.blocks = Blocks.draw([r.intended_s for r in result.requests], default_block_s(span_s), seed)
        self.outcomes = [judge(request, slo) for request in result.requests]

    def samples(self, measure: Measure) -> tuple[Floats, Owners]:
        """Values and the request each belongs to."""
        found = [measure(request) for request in self.requests]
        owner = np.repeat(np.arange(len(found)), [len(each) for each in found])
        return (np.concatenate(found) if found else np.zeros(0)), owner.astype(np.int64)


def _one(measure: Callable[[RequestResult], float | None]) -> Measure:
    def samples(request: RequestResult) -> Floats:
        value = measure(request)
        return np.zeros(0) if value is None else np.array([value])

    return samples


def _quantile_row(name: str, q: float, arms: list[_Arm], samples: list[tuple[Floats, Owners]]) -> Row:
    values: list[float | None] = []
    replicates: list[Floats] = []
    for arm, (found, owner) in zip(arms, samples, strict=True):
        if found.size < MIN_SAMPLES[q]:
            values.append(None)
            continue
        values.append(quantile(found, q))
        if arm.blocks is not None:
            replicates.append(arm.blocks.quantile_replicates(found, owner, [q])[:, 0])
    before, after = values
    change = None
    if (
        before is not None
        and after is not None
        and before > 0
        and not (math.isinf(before) and math.isinf(after))
    ):
        change = after / before
    around = None
    if change is not None and len(replicates) == 2:
        with np.errstate(invalid="ignore", divide="ignore"):
            around = interval(replicates[1] / replicates[0])
    return Row(name, "s", before, after, change, around, int(samples[0][0].size), int(samples[1][0].size))


def _share_row(name: str, arms: list[_Arm], hit: Callable[[tuple[bool, bool]], bool]) -> Row:
    shares: list[float | None] = []
    counts: list[int] = []
    replicates: list[Floats] = []
    for arm in arms:
        offered = [(n, outcome) for n, outcome in enumerate(arm.outcomes) if outcome is not None]
        hits = np.array([hit((outcome.ttft_met, outcome.itl_met)) for _, outcome in offered], dtype=np.bool_)
        counts.append(len(offered))
        shares.append(float(hits.mean()) if len(offered) else None)
        if arm.blocks is not None and len(offered) == len(arm.outcomes):
            replicates.append(arm.blocks.share_replicates(hits))
    before, after = shares
    change = None if before is None or after is None else after - before
    around = interval(replicates[1] - replicates[0]) if change is not None and len(replicates) == 2 else None
    return Row(name, "share", before, after, change, around, counts[0], counts[1])
