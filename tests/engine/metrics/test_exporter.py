"""The exposition against the catalogue, the page, the ledger and raw samples."""

import asyncio
import math
import random
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from trimtab_engine.core.live import Slo, SloClass
from trimtab_engine.core.step_fit import FitScore
from trimtab_engine.core.step_time import TERMS, StepTimeModel
from trimtab_engine.messages import StepModel, StepStats
from trimtab_engine.server.metrics import buckets
from trimtab_engine.server.metrics.catalog import CATALOG, markdown
from trimtab_engine.server.metrics.exporter import EngineMetrics
from trimtab_engine.server.metrics.histogram import Histogram
from trimtab_engine.server.metrics.ledger import Ledger

ROOT = Path(__file__).resolve().parents[3]
TWO_CLASSES = Slo("chat", (SloClass("chat", 1.0, 0.1), SloClass("batch", 10.0, 1.0)))

STEP_MODEL = StepModel(
    StepTimeModel(tuple(float(i) for i in range(len(TERMS)))).to_json(),
    FitScore(num_steps=30, num_excluded=10, error_median=0.02, error_p95=0.08).to_json(),
)


def step(**changes: float) -> StepStats:
    values: dict[str, object] = {
        "step_id": 1,
        "generation": 1,
        "budget": 512,
        "num_tokens": 100,
        "num_decodes": 4,
        "num_prefills": 1,
        "schedule_s": 0.0001,
        "step_s": 0.05,
        "started_s": 0.0,
        "num_running": 5,
        "num_waiting": 3,
        "num_waiting_capacity": 2,
        "oldest_waiting_arrival_s": None,
        "kv_used_fraction": 0.25,
        "prefix_queries": 96,
        "prefix_hits": 32,
        "preemptions_recompute": 1,
        "preemptions_swap": 0,
        "recomputed_tokens": 7,
        "decode_context": 10,
        "prefill_attention": 1.0,
        "lost_s": 0.0,
        **changes,
    }
    return StepStats(**values)  # type: ignore[arg-type]


def exposed(metrics: EngineMetrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name → labels → value, read by prometheus_client's own parser."""
    text = asyncio.run(metrics.render()).decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def busy_metrics() -> tuple[Ledger, EngineMetrics]:
    ledger = Ledger(TWO_CLASSES, generation=1)
    metrics = EngineMetrics(ledger, "tiny")
    metrics.on_ready(num_blocks=100, block_size=16)
    metrics.on_live_config(generation=1, source="Spec", policy="fcfs", budget=512, max_num_seqs=8)
    for index, name in enumerate(("chat", "batch", "chat")):
        record = ledger.arrived(
            request_id=str(index), slo_class=name, prompt_token_ids=[1] * 9, arrival_s=0.0
        )
        ledger.token_delivered(record, 3)
        ledger.finished(record, "stop")
    refused = ledger.arrived(request_id="r", slo_class="chat", prompt_token_ids=[1], arrival_s=0.0)
    ledger.rejected(refused, "queue_full")
    ledger.set_generation(2, TWO_CLASSES)
    metrics.on_live_config(
        generation=2, source="Recommendation", policy="priority", budget=256, max_num_seqs=8
    )
    metrics.on_step(step())
    metrics.on_step_model(STEP_MODEL)
    return ledger, metrics


def test_page_is_the_catalogue() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == markdown(), "regenerate: python -m trimtab_engine.server.metrics.catalog > docs/metrics.md"


def test_exposition_is_the_catalogue_in_names_types_and_labels() -> None:
    _, metrics = busy_metrics()
    got = {}
    for family in metrics.families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = set().union(*(set(sample.labels) for sample in family.samples)) - {"le"}
        got[name] = (family.type, labels)
    assert got == {family.name: (family.kind, set(family.labels)) for family in CATALOG}


def test_the_step_time_model_is_exposed_with_its_held_out_errors_and_the_share_of_steps_left_out() -> None:
    samples = exposed(busy_metrics()[1])
    coefficients = samples["trimtab_step_model_coefficient_seconds"]
    assert coefficients == {(("term", term),): float(i) for i, term in enumerate(TERMS)}
    assert samples["trimtab_step_model_error_ratio"] == {
        (("quantile", "0.5"),): 0.02,
        (("quantile", "0.95"),): 0.08,
    }
    assert samples["trimtab_step_model_steps_total"] == {
        (("outcome", "learnt"),): 30,
        (("outcome", "excluded"),): 10,
    }
    assert samples["trimtab_step_model_excluded_ratio"] == {(): 0.25}


def test_a_pod_with_two_classes_and_two_generations_stays_under_800_series() -> None:
    _, metrics = busy_metrics()
    series = sum(len(samples) for samples in exposed(metrics).values())
    assert series <= 800


def test_no_creation_time_series() -> None:
    _, metrics = busy_metrics()
    assert [name for name in exposed(metrics) if name.endswith("_created")] == []


def test_exposed_counters_equal_the_ledger() -> None:
    ledger, metrics = busy_metrics()
    samples = exposed(metrics)
    outcomes = samples["trimtab_slo_requests_total"]
    want = {
        tuple(sorted({"slo_class": c, "slo": s, "outcome": o, "generation": str(g)}.items())): float(n)
        for (c, s, o, g), n in ledger.outcomes.items()
    }
    assert outcomes == want
    assert samples["trimtab_requests_total"][("finished_reason", "rejected"), ("slo_class", "chat")] == 1
    assert samples["trimtab_generation_tokens_total"][()] == 9
    assert samples["trimtab_live_config_changes_total"][()] == 1


def test_step_numbers_reach_ours_and_vllms_names() -> None:
    _, metrics = busy_metrics()
    samples = exposed(metrics)
    assert samples["trimtab_num_requests_waiting_by_reason"][(("reason", "capacity"),)] == 2
    assert samples["trimtab_preemptions_total"][(("kind", "recompute"),)] == 1
    assert samples["vllm:num_requests_running"][(("model_name", "tiny"),)] == 5
    assert samples["vllm:num_requests_waiting"][(("model_name", "tiny"),)] == 3
    assert samples["vllm:kv_cache_usage_perc"][(("model_name", "tiny"),)] == 0.25
    assert samples["trimtab_step_duration_seconds_count"][(("kind", "mixed"),)] == 1


def test_idle_engine_shows_zero_running_waiting_and_usage() -> None:
    _, metrics = busy_metrics()
    metrics.on_step(
        step(num_tokens=0, num_running=0, num_waiting=0, num_waiting_capacity=0, kv_used_fraction=0.0)
    )
    samples = exposed(metrics)
    for name in (
        "trimtab_num_requests_running",
        "trimtab_num_requests_waiting",
        "trimtab_kv_cache_usage_ratio",
    ):
        assert samples[name][()] == 0.0
    assert samples["trimtab_step_tokens_count"][()] == 1, "an idle report is not a step"


def test_p99_from_buckets_is_within_one_bucket_of_the_samples() -> None:
    random.seed(7)
    for bounds, median in ((buckets.TTFT_S, 0.4), (buckets.ITL_S, 0.03)):
        errors = []
        for _ in range(20):
            values = [random.lognormvariate(math.log(median), 0.6) for _ in range(10_000)]
            histogram = Histogram(bounds)
            for value in values:
                histogram.observe(value)
            exact = float(np.quantile(values, 0.99))
            errors.append(abs(quantile(histogram, 0.99) / exact - 1.0))
        assert max(errors) <= 0.08
        assert float(np.median(errors)) <= 0.02


def quantile(histogram: Histogram, q: float) -> float:
    """Prometheus' histogram_quantile: linear inside the bucket that holds rank q·n."""
    rank = q * histogram.count
    below = 0
    for index, count in enumerate(histogram.counts):
        if below + count >= rank and count:
            low = histogram.bounds[index - 1] if index else 0.0
            return low + (histogram.bounds[index] - low) * (rank - below) / count
        below += count
    raise AssertionError("no observations")
