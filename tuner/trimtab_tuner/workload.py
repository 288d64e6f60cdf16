"""The workload of a study: one segment of a trace, replayed the same way for every config.

Called by the evaluator. Same requests, lengths, order and arrival times each time (common random numbers); prompt contents are
fresh each time, so that no prefix cache turns the second run into another experiment.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trimtab_engine.core.live import Slo as LiveSlo
from trimtab_tuner.arrivals import parse_mode, retime
from trimtab_tuner.pace import Pace, by_arrival
from trimtab_tuner.progress import Counters
from trimtab_tuner.replay import ReplayOptions, replay_async
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import summarise
from trimtab_tuner.trace import Trace


class ReplayWorkload:
    """A `Workload` that sends a trace. Raw results are written to `out_dir` (one file a run), when given."""

    same_requests = True

    def __init__(
        self,
        trace: Trace,
        url: str,
        *,
        slo: LiveSlo,
        mode: str = "recorded",
        seed: int = 0,
        options: ReplayOptions | None = None,
        out_dir: Path | None = None,
    ) -> None:
        self._trace = trace
        self._url = url
        self._slo = client_slo(slo)
        self._mode = parse_mode(mode)
        self._seed = seed
        self._options = options or ReplayOptions()
        self._out_dir = out_dir
        self._runs = 0
        timed = retime(trace, self._mode, seed)
        self.trace_hash = timed.hash
        self.num_requests = len(timed)
        self.span_s = max(1.0, timed.span_s)
        self.began_s: float | None = None
        self._last: ReplayResult | None = None

    async def run(self, on_progress: Callable[[float], None]) -> Mapping[str, float | None]:
        """One replay, in a thread with its own event loop: reading metrics must not delay a send."""
        self.began_s = self._last = None
        stop = threading.Event()
        task = asyncio.create_task(asyncio.to_thread(self._replay, on_progress, stop))
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({task})
            raise
        if self._out_dir is not None:
            result.save(self._out_dir / f"replay-{self._runs:02d}.json.gz", summarise(result).to_json())
        self._runs += 1
        self._last = result
        return client_view(result)

    def pace(self, count: int) -> Sequence[Pace]:
        """Tokens and time of the last replay, by the sender's clock."""
        return () if self._last is None else by_arrival(self._last.requests, 0.0, self.span_s, count)

    def _replay(self, on_progress: Callable[[float], None], stop: threading.Event) -> ReplayResult:
        return asyncio.run(
            replay_async(
                self._trace,
                self._url,
                slo=self._slo,
                mode=self._mode,
                seed=self._seed,
                options=self._options,
                observer=_Observer(self, on_progress),
                stop=stop,
            )
        )


class _Observer:
    """Passes on how much of a replay is done, and when its clock began."""

    def __init__(self, workload: ReplayWorkload, on_progress: Callable[[float], None]) -> None:
        self._workload = workload
        self._on_progress = on_progress

    def update(self, counters: Counters) -> None:
        """Called in the replay's thread; assigning a float is safe there."""
        if self._workload.began_s is None:
            self._workload.began_s = time.time() - counters.elapsed_s
        self._on_progress((counters.finished + counters.failed) / max(1, counters.total))


def client_slo(slo: LiveSlo) -> Slo:
    """The engine's targets as the client-side statistics want them."""
    base = slo.by_name(slo.default_class) or slo.classes[0]
    return Slo(
        base.ttft_s, base.itl_s, {c.name: Slo(c.ttft_s, c.itl_s) for c in slo.classes if c.name != base.name}
    )


def client_view(result: ReplayResult) -> dict[str, float | None]:
    """What the sender saw, for display beside the server's counts. None: too few samples, or a failure among them."""
    summary = summarise(result)
    shown = {
        "n": float(summary.n_due),
        "failed": float(summary.n_failed),
        "ttft_p50_s": summary.ttft.p50,
        "ttft_p90_s": summary.ttft.p90,
        "ttft_p99_s": summary.ttft.p99,
        "itl_p50_s": summary.itl.p50,
        "itl_p99_s": summary.itl.p99,
        "attainment": summary.attainment.fraction,
        "stalled_requests": float(summary.stalled_requests),
        "output_tokens": float(summary.output_tokens),
        "output_tokens_per_s": summary.output_tokens_per_s,
        "duration_s": summary.duration_s,
    }
    return {
        name: value if value is not None and math.isfinite(value) else None for name, value in shown.items()
    }
