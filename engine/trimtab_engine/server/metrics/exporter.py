"""Renders the catalogue for Prometheus: takes step statistics from the engine, request totals from the ledger.

Built once per app by `server.main`; `on_step` is called for each StepOutput, `render` for each scrape. Gauges are read at
scrape, so they fall to zero with the traffic. Knows nothing of routes or of how messages arrive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trimtab_engine.messages import StepModel, StepStats
from trimtab_engine.server.metrics import buckets
from trimtab_engine.server.metrics.catalog import BY_NAME, CATALOG
from trimtab_engine.server.metrics.histogram import Histogram
from trimtab_engine.server.metrics.ledger import Ledger

_STEP_MODEL_FAMILIES = (
    "trimtab_step_model_coefficient_seconds",
    "trimtab_step_model_error_ratio",
    "trimtab_step_model_steps_total",
    "trimtab_step_model_excluded_ratio",
)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Samples = list[tuple[tuple[str, ...], float | Histogram]]  # (label values, value)


@dataclass(slots=True)
class _StepTotals:
    """Sums over the engine's steps since this process began."""

    tokens: Histogram = field(default_factory=lambda: Histogram(buckets.TOKENS))
    decode_s: Histogram = field(default_factory=lambda: Histogram(buckets.STEP_S))
    mixed_s: Histogram = field(default_factory=lambda: Histogram(buckets.STEP_S))
    schedule_s: Histogram = field(default_factory=lambda: Histogram(buckets.SCHEDULE_S))
    budget_ratio: Histogram = field(default_factory=lambda: Histogram(buckets.BUDGET_RATIO))
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0


class EngineMetrics:
    """Registry of one app. Single-threaded: event loop only."""

    def __init__(self, ledger: Ledger, model_name: str, process_start_unix_s: float | None = None) -> None:
        self._ledger = ledger
        self._model = model_name
        self._start = time.time() if process_start_unix_s is None else process_start_unix_s
        self._totals = _StepTotals()
        self._last: StepStats | None = None
        self._step_model: StepModel | None = None
        self._last_step_unix_s = 0.0
        self._num_blocks: int | None = None
        self._block_size: int | None = None
        self._live: tuple[int, str, str, int, int] | None = None
        self._live_changes = 0

    def on_ready(self, num_blocks: int, block_size: int) -> None:
        """The engine has its KV pool."""
        self._num_blocks, self._block_size = num_blocks, block_size

    def on_live_config(
        self, *, generation: int, source: str, policy: str, budget: int, max_num_seqs: int
    ) -> None:
        """Another live config is in force (or the first)."""
        live = (generation, source, policy, budget, max_num_seqs)
        if self._live is not None and live != self._live:
            self._live_changes += 1
        self._live = live

    def on_step(self, stats: StepStats) -> None:
        """Take over one step's numbers. A step of no tokens only says that the engine went idle."""
        totals = self._totals
        self._last = stats
        totals.prefix_queries += stats.prefix_queries
        totals.prefix_hits += stats.prefix_hits
        totals.preemptions_recompute += stats.preemptions_recompute
        totals.preemptions_swap += stats.preemptions_swap
        totals.recomputed_tokens += stats.recomputed_tokens
        if stats.num_tokens == 0:
            return
        self._last_step_unix_s = time.time()
        totals.tokens.observe(stats.num_tokens)
        totals.schedule_s.observe(stats.schedule_s)
        totals.budget_ratio.observe(stats.num_tokens / stats.budget)
        totals.prefill_tokens += stats.num_tokens - stats.num_decodes
        (totals.mixed_s if stats.num_prefills else totals.decode_s).observe(stats.step_s)

    def on_step_model(self, news: StepModel) -> None:
        """Take over the engine's latest step-time model and how it is doing."""
        self._step_model = news

    async def render(self) -> bytes:
        """The exposition, text format 0.0.4. Yields to the event loop between families: scrapes delay no token."""
        parts: list[bytes] = []
        for metric in self.families():
            parts.append(generate_latest(_OneFamily(metric)))
            await asyncio.sleep(0)
        return b"".join(parts)

    def families(self) -> Iterator[Metric]:
        """All families of the catalogue, in its order."""
        samples = self._samples()
        for family in CATALOG:
            yield _family(family.name, samples[family.name])

    def _samples(self) -> dict[str, Samples]:
        ledger, totals, last = self._ledger, self._totals, self._last
        running = float(last.num_running) if last else 0.0
        waiting = float(last.num_waiting) if last else 0.0
        capacity = float(last.num_waiting_capacity) if last else 0.0
        kv_used = last.kv_used_fraction if last else 0.0
        model = self._model
        classes = ledger.classes
        info: Samples = [(tuple(str(part) for part in self._live), 1.0)] if self._live else []
        pool: Samples = []
        if self._num_blocks is not None:
            pool = [((model, str(self._block_size), str(self._num_blocks)), 1.0)]
        return {
            "trimtab_slo_requests_total": [
                ((c, slo, outcome, str(generation)), float(count))
                for (c, slo, outcome, generation), count in ledger.outcomes.items()
            ],
            "trimtab_requests_total": [(key, float(count)) for key, count in ledger.finished_total.items()],
            "trimtab_client_aborts_total": [
                ((name,), float(ledger.finished_total[name, "client_abort"])) for name in classes
            ],
            "trimtab_rejections_total": [
                ((reason,), float(n)) for reason, n in ledger.rejections_total.items()
            ],
            "trimtab_priority_ignored_total": _one(ledger.ignored_priority_total),
            "trimtab_prompt_tokens_total": _one(ledger.prompt_tokens_total),
            "trimtab_prompt_tokens_cached_total": _one(ledger.prompt_tokens_cached_total),
            "trimtab_generation_tokens_total": _one(ledger.generation_tokens_total),
            "trimtab_time_to_first_token_seconds": [((name,), shape.ttft) for name, shape in classes.items()],
            "trimtab_inter_token_latency_seconds": [((name,), shape.itl) for name, shape in classes.items()],
            "trimtab_e2e_request_latency_seconds": [((), ledger.e2e)],
            "trimtab_request_queue_time_seconds": [((), ledger.queue)],
            "trimtab_request_prefill_time_seconds": [((), ledger.prefill)],
            "trimtab_request_decode_time_seconds": [((), ledger.decode)],
            "trimtab_request_prompt_tokens": [((), ledger.prompt_lengths)],
            "trimtab_request_generation_tokens": [((), ledger.output_lengths)],
            "trimtab_oldest_waiting_seconds": _one(ledger.oldest_waiting_s()),
            "trimtab_longest_token_gap_seconds": _one(ledger.longest_token_gap_s()),
            "trimtab_num_requests_open": _one(ledger.num_open),
            "trimtab_num_requests_running": _one(running),
            "trimtab_num_requests_waiting": _one(waiting),
            "trimtab_num_requests_waiting_by_reason": [
                (("capacity",), capacity),
                (("deferred",), waiting - capacity),
            ],
            "trimtab_kv_cache_usage_ratio": _one(kv_used),
            "trimtab_prefix_cache_queries_total": _one(totals.prefix_queries),
            "trimtab_prefix_cache_hits_total": _one(totals.prefix_hits),
            "trimtab_preemptions_total": [
                (("recompute",), float(totals.preemptions_recompute)),
                (("swap",), float(totals.preemptions_swap)),
            ],
            "trimtab_recomputed_tokens_total": _one(totals.recomputed_tokens),
            "trimtab_step_tokens": [((), totals.tokens)],
            "trimtab_step_duration_seconds": [(("decode",), totals.decode_s), (("mixed",), totals.mixed_s)],
            "trimtab_schedule_duration_seconds": [((), totals.schedule_s)],
            "trimtab_budget_used_ratio": [((), totals.budget_ratio)],
            "trimtab_prefill_step_seconds_total": _one(totals.mixed_s.total),
            "trimtab_prefill_tokens_total": _one(totals.prefill_tokens),
            "trimtab_engine_last_step_timestamp_seconds": _one(self._last_step_unix_s),
            **_step_model(self._step_model),
            "trimtab_live_config_info": info,
            "trimtab_live_config_generation": _one(self._live[0] if self._live else ledger.generation),
            "trimtab_live_config_changes_total": _one(self._live_changes),
            "trimtab_slo_target_seconds": [
                ((c.name, slo), target)
                for c in ledger.slo.classes
                for slo, target in (("ttft", c.ttft_s), ("itl", c.itl_s))
            ],
            "trimtab_process_start_time_seconds": _one(self._start),
            "vllm:num_requests_running": [((model,), running)],
            "vllm:num_requests_waiting": [((model,), waiting)],
            "vllm:kv_cache_usage_perc": [((model,), kv_used)],
            "vllm:cache_config_info": pool,
        }


class _OneFamily(Collector):
    """A registry of a single family, so that rendering can pause between families."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _step_model(news: StepModel | None) -> dict[str, Samples]:
    if news is None:
        return {name: [] for name in _STEP_MODEL_FAMILIES}
    model, score = news.model or {}, news.score
    coefficients = model.get("coefficients", {})
    assert isinstance(coefficients, dict), "StepTimeModel.to_json is our own"
    errors = (("0.5", score["error_median"]), ("0.95", score["error_p95"]))
    families: tuple[Samples, ...] = (
        [((term,), float(value)) for term, value in coefficients.items()],
        [((quantile,), value) for quantile, value in errors if isinstance(value, float)],
        [
            (("learnt",), float(str(score["num_steps"]))),
            (("excluded",), float(str(score["num_excluded"]))),
        ],
        _one(float(str(score["excluded_share"]))),
    )
    return dict(zip(_STEP_MODEL_FAMILIES, families, strict=True))


def _one(value: float) -> Samples:
    return [((), float(value))]


def _family(name: str, samples: Samples) -> Metric:
    family = BY_NAME[name]
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.meaning, labels=family.labels)
        for labels, value in samples:
            assert isinstance(value, Histogram)
            histogram.add_metric(labels, value.cumulative(), value.total)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(
        name.removesuffix("_total") if family.kind == "counter" else name,
        family.meaning,
        labels=family.labels,
    )
    for labels, value in samples:
        assert not isinstance(value, Histogram)
        metric.add_metric(labels, value)
    return metric
