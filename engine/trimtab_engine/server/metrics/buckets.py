"""Histogram bounds. Constants: a change would void every recorded window that spans it.

Used by `catalog` and `histogram`. The error of a p99 read from buckets is at most one bucket wide, so the latency
families grow by 8 % a bound (stock bounds of other engines are off by 15 % in the median, 80 % at worst).
"""

from __future__ import annotations

import math


def geometric(low: float, high: float, factor: float) -> tuple[float, ...]:
    """Bounds low, low·factor, … up to the first that reaches high; rounded to four significant digits."""
    count = math.ceil(math.log(high / low) / math.log(factor)) + 1
    return tuple(float(f"{low * factor**i:.4g}") for i in range(count))


TTFT_S = geometric(0.010, 100.0, 1.08)  # 121 bounds
ITL_S = geometric(0.001, 10.0, 1.08)  # 121 bounds
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SCHEDULE_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
REQUEST_TOKENS = (1.0, 10.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 50000.0, 100000.0)
BUDGET_RATIO = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
