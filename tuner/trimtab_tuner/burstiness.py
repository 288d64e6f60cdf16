"""How bursty arrivals are: CV of gaps and index of dispersion of counts. Pure functions over arrival times in seconds, in any order.

CV alone hides slow waves (Azure conversation: CV 1.1, yet 16 at one minute), so both are always reported together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOWS_S = (1.0, 10.0, 60.0)


def interarrival_cv(arrivals_s: Sequence[float]) -> float | None:
    """Standard deviation over mean of the gaps (population form); None below 3 arrivals or when all coincide.

    0 = evenly spaced, 1 = Poisson, above 1 = bursts. For Gamma gaps the shape is 1 / CV².
    """
    gaps = np.diff(np.sort(np.asarray(arrivals_s, dtype=np.float64)))
    if gaps.size < 2 or gaps.mean() <= 0:
        return None
    return float(gaps.std() / gaps.mean())


def index_of_dispersion(arrivals_s: Sequence[float], window_s: float) -> float | None:
    """Variance over mean of the counts in consecutive whole windows; None when fewer than 3 fit. Poisson: 1 at any window."""
    counts = window_counts(arrivals_s, window_s)
    if counts.size < 3 or counts.mean() == 0:
        return None
    return float(counts.var() / counts.mean())


def window_counts(arrivals_s: Sequence[float], window_s: float) -> NDArray[np.int64]:
    """Arrivals in each whole window from the first arrival on; the incomplete last window is dropped."""
    at = np.sort(np.asarray(arrivals_s, dtype=np.float64))
    at = at - at[0]
    whole = int(at[-1] // window_s)
    # 1 ns of slack, so that a gap of exactly one window does not fall left or right by rounding
    index = np.floor(at / window_s + 1e-9).astype(np.int64)
    return np.bincount(index[index < whole], minlength=whole)[:whole]


def describe(arrivals_s: Sequence[float]) -> dict[str, float | None]:
    """CV and dispersion at 1, 10 and 60 s, as stored in results."""
    found = {"cv": interarrival_cv(arrivals_s)}
    for window_s in WINDOWS_S:
        found[f"dispersion_{window_s:g}s"] = index_of_dispersion(arrivals_s, window_s)
    return found
