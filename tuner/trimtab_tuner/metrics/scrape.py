"""Scrapes `/metrics` of every target itself: the source of metrics when no Prometheus is given.

Called by the evaluator through `MetricsSource`. A target that does not answer, answers with an error or with text that
does not parse becomes a failure of that round with its cause; it is never read as zero.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx

from trimtab_tuner import bounded
from trimtab_tuner.errors import ServerError
from trimtab_tuner.metrics.exposition import ExpositionError, Series, parse
from trimtab_tuner.metrics.names import Names
from trimtab_tuner.metrics.snapshot import Snapshot, TargetSample

#: Of one exposition: 800 series take 0.1 MB.
MAX_BYTES = 16 * 2**20


class Scraper:
    """A `MetricsSource` over plain HTTP. `targets` are full URLs of text expositions, or a function that names them.

    The function is asked before each scrape: an operator replaces replicas, and a new one has another address.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        targets: Sequence[str] | Callable[[], Awaitable[Sequence[str]]],
        names: Names,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 5.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._targets = targets if callable(targets) else tuple(targets)
        self._names = names
        self._timeout_s = timeout_s
        self._now = now
        self.interval_s = interval_s

    async def snapshot(self, not_before_s: float | None = None) -> Snapshot:
        """One scrape of all targets at once; it is always newer than any moment that has passed."""
        taken = self._now()
        try:
            targets = await self._targets() if callable(self._targets) else self._targets
        except ServerError as error:
            return Snapshot(taken_s=taken, samples=(), failures=(("targets", str(error)),))
        results = await asyncio.gather(*(self._one(target) for target in targets))
        return Snapshot(
            taken_s=taken,
            samples=tuple(r for r in results if isinstance(r, TargetSample)),
            failures=tuple(r for r in results if not isinstance(r, TargetSample)),
        )

    async def _one(self, target: str) -> TargetSample | tuple[str, str]:
        taken = self._now()
        try:
            status, body = await bounded.get(
                self._client,
                target,
                max_bytes=MAX_BYTES,
                max_s=2 * self._timeout_s,
                timeout_s=self._timeout_s,
            )
            if status != 200:
                return target, f"HTTP {status}"
            series = parse(body.decode(errors="replace"))
        except (httpx.HTTPError, TimeoutError) as error:
            return target, f"{type(error).__name__}: {error}"
        except (ServerError, ExpositionError) as error:
            return target, str(error)
        return TargetSample(target, taken, process_start(series, self._names), series)


def process_start(series: Series, names: Names) -> float | None:
    """Start time of the exporting process, Unix seconds; None when the exposition has none."""
    return next(iter(series.get(names.process_start, {}).values()), None)
