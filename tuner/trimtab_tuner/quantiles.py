"""Quantiles of pooled raw samples in which failures are +inf, and block-bootstrap intervals. Pure numpy; knows no request.

Method: numpy's linear interpolation, h = (n - 1) q. Where it would interpolate towards +inf the answer is +inf: the
quantile then lies among failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
REPLICATES = 500
LEVEL = 0.90
MIN_BLOCKS = 5


def quantile(samples: Floats, q: float) -> float:
    """The q-quantile of samples (≥ 1, none NaN)."""
    ordered = np.sort(samples)
    weights = np.ones(ordered.size, dtype=np.int64)
    return _weighted_quantile(ordered, np.cumsum(weights), q)


def _weighted_quantile(ordered: Floats, cumulative: NDArray[np.int64], q: float) -> float:
    """Quantile of samples in which `ordered[i]` appears cumulative[i] - cumulative[i - 1] times."""
    total = int(cumulative[-1])
    position = (total - 1) * q
    lower = int(position)
    fraction = position - lower
    low = float(ordered[np.searchsorted(cumulative, lower, side="right")])
    if fraction == 0.0:
        return low
    high = float(ordered[np.searchsorted(cumulative, lower + 1, side="right")])
    if np.isinf(high):
        return high
    return low + fraction * (high - low)


@dataclass(frozen=True, slots=True)
class Interval:
    """A percentile-bootstrap interval at `LEVEL`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Blocks:
    """Time blocks of requests, resampled as a whole: requests close in time share queues and steps, so they are not independent.

    `weights` (replicates, blocks): how often each block is drawn in each replicate.
    """

    of_request: NDArray[np.int64]
    weights: NDArray[np.int64]

    @staticmethod
    def draw(
        times_s: Sequence[float], block_s: float, seed: int, replicates: int = REPLICATES
    ) -> Blocks | None:
        """Blocks over request times; None when fewer than `MIN_BLOCKS` hold any request."""
        if not times_s:
            return None
        at = np.asarray(times_s, dtype=np.float64)
        _, block = np.unique(np.floor((at - at.min()) / block_s), return_inverse=True)
        count = int(block.max()) + 1
        if count < MIN_BLOCKS:
            return None
        rng = np.random.default_rng(seed)
        weights = rng.multinomial(count, np.full(count, 1.0 / count), size=replicates)
        return Blocks(block.astype(np.int64), weights.astype(np.int64))

    def quantile_replicates(
        self, samples: Floats, request_of_sample: NDArray[np.int64], qs: Sequence[float]
    ) -> Floats:
        """(replicates, len(qs)) quantiles; `request_of_sample` says which request each sample belongs to. NaN = no sample drawn."""
        order = np.argsort(samples, kind="stable")
        ordered = samples[order]
        block = self.of_request[request_of_sample[order]]
        found = np.full((len(self.weights), len(qs)), np.nan)
        for row, weights in enumerate(self.weights):
            cumulative = np.cumsum(weights[block])
            if cumulative[-1] > 0:
                found[row] = [_weighted_quantile(ordered, cumulative, q) for q in qs]
        return found

    def share_replicates(self, hits: NDArray[np.bool_]) -> Floats:
        """(replicates,) share of requests with `hits`."""
        count = self.weights.shape[1]
        sizes = np.bincount(self.of_request, minlength=count)
        good = np.bincount(self.of_request, weights=hits.astype(np.float64), minlength=count)
        share: Floats = (self.weights @ good) / (self.weights @ sizes)
        return share


def interval(replicates: Floats) -> Interval | None:
    """Percentile interval of bootstrap replicates (+inf allowed); None when none is a number."""
    valid = replicates[~np.isnan(replicates)]
    if not valid.size:
        return None
    tail = (1.0 - LEVEL) / 2.0
    return Interval(quantile(valid, tail), quantile(valid, 1.0 - tail))


def wilson(hits: int, total: int) -> Interval:
    """Wilson score interval of a share at `LEVEL`, for independent requests; sensible at 0 and 100 %."""
    z = 1.6448536269514722  # normal quantile at 0.95: two-sided 90 %
    share = hits / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * float(np.sqrt(share * (1 - share) / total + z * z / (4 * total * total)))
    return Interval(max(0.0, centre - half), min(1.0, centre + half))
