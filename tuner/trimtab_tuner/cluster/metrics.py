"""Where a worker's numbers come from: Prometheus, or scraping the engine pods that stand behind a Service now.

Called by the evaluators. Either way the pods of the moment are asked for by EndpointSlices, so that a pod without numbers is a
failure and never silently absent; so are fewer pods than there have to be. While the API server is away the pods that were last seen stand.
"""

from __future__ import annotations

import dataclasses
import time

import httpx

from trimtab_tuner.cluster import pods
from trimtab_tuner.cluster.kube import Kube, Unavailable
from trimtab_tuner.cluster.pods import Pod
from trimtab_tuner.errors import ServerError
from trimtab_tuner.metrics.names import TRIMTAB, Names
from trimtab_tuner.metrics.promapi import Prometheus
from trimtab_tuner.metrics.scrape import Scraper
from trimtab_tuner.metrics.snapshot import Snapshot, TargetSample
from trimtab_tuner.metrics.source import MetricsSource

FRESH_S = 2.0
USUAL_INTERVAL_S = 15.0  # Prometheus', while it holds too few samples to tell
_SUFFIXES = ("", "_bucket", "_sum", "_count")


class PodFinder:
    """The ready pods behind a Service, asked for again when the last answer is older than FRESH_S."""

    def __init__(self, kube: Kube, namespace: str, service: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._service = service
        self._asked_s = float("-inf")
        self._found: tuple[Pod, ...] = ()

    async def __call__(self) -> tuple[Pod, ...]:
        """The pods now. Raises KubeError when they were never seen."""
        if time.monotonic() - self._asked_s > FRESH_S:
            try:
                self._found = await pods.find(self._kube, self._namespace, self._service)
            except Unavailable:
                if not self._found:
                    raise
            self._asked_s = time.monotonic()
        return self._found


class Engines:
    """A `MetricsSource` over the pods of a Service. Keeps the metrics that the tuner knows alone: windows are held in memory."""

    def __init__(
        self,
        source: MetricsSource,
        find: PodFinder,
        *,
        by_label: bool,
        names: Names = TRIMTAB,
        wanted: int | None = None,
    ) -> None:
        """`by_label`: a sample's pod is told by its label `pod` (Prometheus'), not by its address. `wanted`: with fewer pods than that
        a snapshot has failed; None: with none at all."""
        self._wanted = wanted
        self._source = source
        self._find = find
        self._by_label = by_label
        self._known = frozenset(name + suffix for name in names.all() for suffix in _SUFFIXES)
        self.interval_s = source.interval_s

    async def snapshot(self, not_before_s: float | None = None) -> Snapshot:
        """See `MetricsSource`. A pod without a sample is a failure, and so are too few pods."""
        snapshot = await self._source.snapshot(not_before_s)
        failures = list(snapshot.failures)
        try:
            found = await self._find()
        except ServerError as error:
            found, failures = (), [*failures, ("pods", str(error))]
        if (why := too_few(len(found), self._wanted)) is not None and not failures:
            failures.append(("pods", why))
        seen = {self._pod(sample) for sample in snapshot.samples}
        failed = {target for target, _ in failures}
        for pod in found:
            if not seen & {pod.name, pod.metrics_url} and not failed & {pod.name, pod.metrics_url}:
                failures.append((pod.name, "the source of metrics has no sample of this pod"))
        samples = tuple(self._slim(sample) for sample in snapshot.samples)
        return Snapshot(snapshot.taken_s, samples, tuple(failures))

    def _pod(self, sample: TargetSample) -> str:
        if not self._by_label:
            return sample.target
        first = next(iter(next(iter(sample.series.values()), {})), ())
        return dict(first).get("pod", "")

    def _slim(self, sample: TargetSample) -> TargetSample:
        kept = {name: series for name, series in sample.series.items() if name in self._known}
        return dataclasses.replace(sample, series=kept)


def too_few(ready: int, wanted: int | None) -> str | None:
    """What to say of fewer ready pods than are wanted (None: at least one); None when there are enough."""
    if wanted is None:
        return None if ready else "no ready pod stands behind the service"
    return None if ready >= wanted else f"{ready} of {wanted} engines are ready"


def scraping(
    client: httpx.AsyncClient, find: PodFinder, interval_s: float, wanted: int | None = None
) -> Engines:
    """By scraping each pod."""

    async def targets() -> tuple[str, ...]:
        return tuple(pod.metrics_url for pod in await find())

    scraper = Scraper(client, targets, TRIMTAB, interval_s=interval_s)
    return Engines(scraper, find, by_label=False, wanted=wanted)


async def prometheus(client: httpx.AsyncClient, url: str, find: PodFinder, namespace: str) -> Engines:
    """By a Prometheus whose series have the labels `namespace` and `pod`. Raises PrometheusError when it does not answer."""

    async def selector() -> str:
        names = "|".join(pod.name for pod in await find())
        return f'namespace="{namespace}",pod=~"{names}"'

    asked = Prometheus(client, url, TRIMTAB, selector=selector)
    interval_s = await asked.scrape_interval_s() or USUAL_INTERVAL_S
    return Engines(
        Prometheus(client, url, TRIMTAB, selector=selector, interval_s=interval_s), find, by_label=True
    )
