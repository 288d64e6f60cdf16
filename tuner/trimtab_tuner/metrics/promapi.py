"""Reads a real Prometheus through its HTTP API: instant queries, one vector of every series the tuner knows.

Called by the evaluator through `MetricsSource`. Counters are read as totals at a moment and subtracted here, with resets
seen by process start time: `increase()` and `rate()` extrapolate to the window's edges, which turns 3 violated requests
into 3.2. The moment of a sample is that of Prometheus' scrape (`timestamp()`), not that of the query.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from trimtab_tuner.errors import ServerError
from trimtab_tuner.metrics.exposition import Labels
from trimtab_tuner.metrics.names import Names
from trimtab_tuner.metrics.snapshot import Snapshot, TargetSample

# Labels that Prometheus adds when it scrapes; they tell targets apart and are no part of the metric.
_TARGET_LABELS = ("job", "instance")


class PrometheusError(ServerError):
    """Prometheus did not answer a query; the message carries its reason and the query."""


class Prometheus:
    """A `MetricsSource` over the Prometheus HTTP API.

    `selector` is a list of label matchers without braces (`namespace="chat",pod=~"chat-.*"`), empty for everything, or a function
    that is asked for it before each query: pods come and go.
    `interval_s` is Prometheus' scrape interval for these targets.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        names: Names,
        *,
        selector: str | Callable[[], Awaitable[str]] = "",
        interval_s: float = 15.0,
        timeout_s: float = 10.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._url = url.rstrip("/")
        self._names = names
        self._select = selector if callable(selector) else None
        self._selector = "" if callable(selector) else _bare(selector)
        self._timeout_s = timeout_s
        self._now = now
        self.interval_s = interval_s

    async def snapshot(self, not_before_s: float | None = None) -> Snapshot:
        """The newest stored sample of every target; waits up to four scrape intervals for `not_before_s`."""
        give_up = self._now() + 4 * self.interval_s
        while True:
            snapshot = await self._query_all()
            late = [
                s.target for s in snapshot.samples if not_before_s is not None and s.taken_s < not_before_s
            ]
            if not late and (snapshot.samples or not_before_s is None):
                return snapshot
            if self._now() >= give_up:
                cause = "Prometheus holds no sample that is new enough"
                kept = tuple(s for s in snapshot.samples if s.target not in late)
                failures = snapshot.failures + tuple((target, cause) for target in late)
                return Snapshot(snapshot.taken_s, kept, failures)
            await asyncio.sleep(min(1.0, self.interval_s / 4))

    async def _query_all(self) -> Snapshot:
        asked = self._now()
        try:
            if self._select is not None:
                self._selector = _bare(await self._select())
            vector = await self.instant(self._everything())
            stamps = await self.instant(f"timestamp({self._names.process_start}{{{self._selector}}})")
        except ServerError as error:
            return Snapshot(asked, (), ((self._url, str(error)),))
        taken = {_target(labels): value for labels, value in stamps}
        series: dict[str, dict[str, dict[Labels, float]]] = {}
        for labels, value in vector:
            rest = tuple(sorted((k, v) for k, v in labels.items() if k not in ("__name__", *_TARGET_LABELS)))
            series.setdefault(_target(labels), {}).setdefault(labels["__name__"], {})[rest] = value
        samples: list[TargetSample] = []
        failures: list[tuple[str, str]] = []
        for target, found in sorted(series.items()):
            if target not in taken:
                failures.append((target, f"has no {self._names.process_start}, so its samples have no age"))
                continue
            start = next(iter(found.get(self._names.process_start, {}).values()), None)
            samples.append(TargetSample(target, taken[target], start, found))
        if not samples and not failures:
            failures.append((self._url, f"no series match {{{self._selector}}}"))
        return Snapshot(asked, tuple(samples), tuple(failures))

    def _everything(self) -> str:
        names = "|".join(sorted(self._names.all()))
        matchers = [f'__name__=~"({names})(_bucket|_sum|_count)?"']
        if self._selector:
            matchers.append(self._selector)
        return "{" + ",".join(matchers) + "}"

    async def instant(self, query: str, at_s: float | None = None) -> list[tuple[Mapping[str, str], float]]:
        """One instant query → (labels, value) pairs. Raises PrometheusError."""
        form = {"query": query} if at_s is None else {"query": query, "time": repr(at_s)}
        return [(item["metric"], float(item["value"][1])) for item in await self._ask(form)]

    async def scrape_interval_s(self, look_back: str = "10m") -> float | None:
        """How far apart the stored samples are; None while there are too few. Raises PrometheusError."""
        if self._select is not None:
            self._selector = _bare(await self._select())
        query = f"{self._names.process_start}{{{self._selector}}}[{look_back}]"
        gaps = [
            float(later[0]) - float(earlier[0])
            for item in await self._ask({"query": query})
            for earlier, later in itertools.pairwise(item["values"])
        ]
        return round(statistics.median(gaps), 3) if gaps else None

    async def _ask(self, form: Mapping[str, str]) -> list[dict[str, Any]]:
        query = form["query"]
        try:
            answer = await self._client.post(f"{self._url}/api/v1/query", data=form, timeout=self._timeout_s)
            body = answer.json()
        except httpx.HTTPError as error:
            raise PrometheusError(f"{self._url}: {type(error).__name__}: {error}") from None
        except ValueError:
            raise PrometheusError(
                f"{self._url}: HTTP {answer.status_code}, no JSON; is it a Prometheus?"
            ) from None
        if not isinstance(body, dict) or body.get("status") not in ("success", "error"):
            raise PrometheusError(
                f"{self._url}: HTTP {answer.status_code}, no answer to a query; is it a Prometheus?"
            )
        if body["status"] == "error":
            raise PrometheusError(f"{self._url}: {body.get('error')} (query {query[:200]})")
        found: list[dict[str, Any]] = body["data"]["result"]
        return found


def _bare(selector: str) -> str:
    return selector.strip().strip("{}").strip().strip(",")


def _target(labels: Mapping[str, str]) -> str:
    return "/".join(labels.get(label, "") for label in _TARGET_LABELS)
