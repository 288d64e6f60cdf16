"""Windows of snapshots with a latency histogram in them, for tests of what is read from such windows."""

from __future__ import annotations

from collections.abc import Sequence

from support.study import make_snapshot
from trimtab_tuner.metrics.names import TRIMTAB
from trimtab_tuner.metrics.snapshot import Window

BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.25, 1.0)


def histogram_window(gaps_s: Sequence[float], *, samples: int = 25, span_s: float = 60.0) -> Window:
    """One target; in each step between two samples the same gaps between tokens (and waits for first ones) were observed."""
    snapshots = []
    for index in range(samples):
        lines = []
        for name in (TRIMTAB.itl, TRIMTAB.ttft):
            for bound in BOUNDS:
                count = index * sum(gap <= bound for gap in gaps_s)
                lines.append(f'{name}_bucket{{le="{bound}"}} {count}')
            lines.append(f'{name}_bucket{{le="+Inf"}} {index * len(gaps_s)}')
            lines.append(f"{name}_sum {index * sum(gaps_s)}")
            lines.append(f"{name}_count {index * len(gaps_s)}")
        snapshots.append(make_snapshot(1000.0 + index * span_s / (samples - 1), "\n".join(lines) + "\n"))
    return Window(snapshots)
