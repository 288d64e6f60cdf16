"""The table of everything on `/metrics`: name, type, labels, meaning, formula, source and vLLM's name for it.

`exporter` renders exactly these families; `docs/metrics.md` is `markdown()` of this table, and a golden test holds the
three together. Symbols: a arrival, s first scheduled, t₁ first and tₙ last token handed to the socket, f end; x̄ target.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_engine.server.metrics import buckets


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. `name` is the exposed one: counters carry `_total`."""

    name: str
    kind: str  # counter | gauge | histogram
    labels: tuple[str, ...]
    meaning: str
    formula: str
    source: str  # http (the HTTP process itself) | engine (reported by the engine process after each step)
    vllm: str | None = None
    bounds: tuple[float, ...] | None = None


def _counter(
    name: str, labels: tuple[str, ...], meaning: str, formula: str, source: str, vllm: str | None = None
) -> Family:
    return Family(name, "counter", labels, meaning, formula, source, vllm)


def _gauge(
    name: str, labels: tuple[str, ...], meaning: str, formula: str, source: str, vllm: str | None = None
) -> Family:
    return Family(name, "gauge", labels, meaning, formula, source, vllm)


def _histogram(
    name: str,
    labels: tuple[str, ...],
    meaning: str,
    formula: str,
    source: str,
    bounds: tuple[float, ...],
    vllm: str | None = None,
) -> Family:
    return Family(name, "histogram", labels, meaning, formula, source, vllm, bounds)


CATALOG: tuple[Family, ...] = (
    _counter(
        "trimtab_slo_requests_total",
        ("slo_class", "slo", "outcome", "generation"),
        "Requests whose target was met or violated; exact, booked the moment a deadline passes on the live config in force then",
        "ttft: t₁ − a > x̄; itl: any tᵢ₊₁ − tᵢ > x̄; rejected, errored, timed out, server-aborted: violated",
        "http",
    ),
    _counter(
        "trimtab_requests_total",
        ("slo_class", "finished_reason"),
        "Requests that ended: stop, length, client_abort, server_abort, error, timeout, rejected",
        "sum over reasons = requests offered − requests open",
        "http",
        "vllm:request_success_total",
    ),
    _counter(
        "trimtab_client_aborts_total",
        ("slo_class",),
        "Requests whose client went away first",
        "client_abort only",
        "http",
    ),
    _counter(
        "trimtab_rejections_total",
        ("reason",),
        "Requests refused by the service itself",
        "queue_full, draining, …",
        "http",
    ),
    _counter(
        "trimtab_priority_ignored_total",
        (),
        "Requests with a priority under a policy that ignores it",
        "policy fcfs",
        "http",
    ),
    _counter(
        "trimtab_prompt_tokens_total",
        (),
        "Prompt tokens of requests that got a first token",
        "once per request, at t₁",
        "http",
        "vllm:prompt_tokens_total",
    ),
    _counter(
        "trimtab_prompt_tokens_cached_total",
        (),
        "Of those: served from the prefix cache at the first admission",
        "once per request, at t₁",
        "http",
        "vllm:prompt_tokens_cached_total",
    ),
    _counter(
        "trimtab_generation_tokens_total",
        (),
        "Tokens delivered",
        "Σ n",
        "http",
        "vllm:generation_tokens_total",
    ),
    _histogram(
        "trimtab_time_to_first_token_seconds",
        ("slo_class",),
        "Shape of server TTFT; 8 % a bucket",
        "t₁ − a; count = requests with at least one token",
        "http",
        buckets.TTFT_S,
        "vllm:time_to_first_token_seconds",
    ),
    _histogram(
        "trimtab_inter_token_latency_seconds",
        ("slo_class",),
        "Shape of ITL; 8 % a bucket; tokens delivered together follow the first by 0 s",
        "tᵢ₊₁ − tᵢ; count = generation tokens − TTFT count",
        "http",
        buckets.ITL_S,
        "vllm:inter_token_latency_seconds",
    ),
    _histogram(
        "trimtab_e2e_request_latency_seconds",
        (),
        "Whole request",
        "f − a",
        "http",
        buckets.REQUEST_S,
        "vllm:e2e_request_latency_seconds",
    ),
    _histogram(
        "trimtab_request_queue_time_seconds",
        (),
        "Wait before the first schedule",
        "s − a",
        "http",
        buckets.REQUEST_S,
        "vllm:request_queue_time_seconds",
    ),
    _histogram(
        "trimtab_request_prefill_time_seconds",
        (),
        "First schedule to first token; gaps between chunks and preemptions stay inside",
        "t₁ − s",
        "http",
        buckets.REQUEST_S,
        "vllm:request_prefill_time_seconds",
    ),
    _histogram(
        "trimtab_request_decode_time_seconds",
        (),
        "First to last token",
        "tₙ − t₁",
        "http",
        buckets.REQUEST_S,
        "vllm:request_decode_time_seconds",
    ),
    _histogram(
        "trimtab_request_prompt_tokens",
        (),
        "Prompt lengths of ended requests",
        "tokens",
        "http",
        buckets.REQUEST_TOKENS,
        "vllm:request_prompt_tokens",
    ),
    _histogram(
        "trimtab_request_generation_tokens",
        (),
        "Output lengths of ended requests",
        "tokens",
        "http",
        buckets.REQUEST_TOKENS,
        "vllm:request_generation_tokens",
    ),
    _gauge(
        "trimtab_oldest_waiting_seconds",
        (),
        "Starvation guard: age of the oldest open request without a first token, computed at scrape",
        "max(now − a) over requests with no t₁",
        "http",
    ),
    _gauge(
        "trimtab_longest_token_gap_seconds",
        (),
        "Starvation guard: the longest gap that is still open, computed at scrape",
        "max(now − tₗₐₛₜ) over open requests with a t₁",
        "http",
    ),
    _gauge(
        "trimtab_num_requests_open",
        (),
        "Requests between arrival and end, as the HTTP process sees them",
        "count",
        "http",
    ),
    _gauge("trimtab_num_requests_running", (), "Requests that hold a slot in the engine", "count", "engine"),
    _gauge(
        "trimtab_num_requests_waiting",
        (),
        "Requests in the engine's queue, preempted ones included",
        "count",
        "engine",
    ),
    _gauge(
        "trimtab_num_requests_waiting_by_reason",
        ("reason",),
        "Of those: capacity (KV memory or max_num_seqs holds them back) or deferred (budget, siblings)",
        "count",
        "engine",
        "vllm:num_requests_waiting_by_reason",
    ),
    _gauge(
        "trimtab_kv_cache_usage_ratio",
        (),
        "Share of KV blocks in use; cached but unreferenced blocks count as free",
        "1 − free / total",
        "engine",
    ),
    _counter(
        "trimtab_prefix_cache_queries_total",
        (),
        "Prompt tokens looked up at first admissions",
        "tokens",
        "engine",
        "vllm:prefix_cache_queries_total",
    ),
    _counter(
        "trimtab_prefix_cache_hits_total",
        (),
        "Of those: found",
        "tokens",
        "engine",
        "vllm:prefix_cache_hits_total",
    ),
    _counter(
        "trimtab_preemptions_total",
        ("kind",),
        "Preemptions by kind",
        "events",
        "engine",
        "vllm:num_preemptions_total",
    ),
    _counter(
        "trimtab_recomputed_tokens_total", (), "Tokens computed again after a preemption", "tokens", "engine"
    ),
    _histogram("trimtab_step_tokens", (), "Tokens scheduled in a step", "Σ chunk", "engine", buckets.TOKENS),
    _histogram(
        "trimtab_step_duration_seconds",
        ("kind",),
        "Step time; kind decode: decode rows alone, mixed: with prompt tokens",
        "schedule → commit",
        "engine",
        buckets.STEP_S,
    ),
    _histogram(
        "trimtab_schedule_duration_seconds",
        (),
        "Time in schedule()",
        "per step",
        "engine",
        buckets.SCHEDULE_S,
    ),
    _histogram(
        "trimtab_budget_used_ratio",
        (),
        "Budget use of a step",
        "Σ chunk / max_num_batched_tokens",
        "engine",
        buckets.BUDGET_RATIO,
    ),
    _counter(
        "trimtab_prefill_step_seconds_total",
        (),
        "Step time of steps with prompt tokens",
        "Σ step time",
        "engine",
    ),
    _counter(
        "trimtab_prefill_tokens_total",
        (),
        "Prompt tokens computed, recomputed ones included",
        "tokens",
        "engine",
    ),
    _gauge(
        "trimtab_engine_last_step_timestamp_seconds",
        (),
        "Unix time of the last finished step",
        "unix time",
        "engine",
    ),
    _gauge(
        "trimtab_step_model_coefficient_seconds",
        ("term",),
        "Step-time model, fitted online: seconds per unit of the term (token, sequence, token of context, token²)",
        "t = f(tokens) + a·sequences + a·Σ decode context + a·Σ chunk·(context + chunk/2); "
        "f: base, and a slope from each knot",
        "engine",
    ),
    _gauge(
        "trimtab_step_model_error_ratio",
        ("quantile",),
        "Held-out error of the step-time model over the latest 512 steps, each predicted before it was learnt from",
        "|measured / predicted − 1|",
        "engine",
    ),
    _counter(
        "trimtab_step_model_steps_total",
        ("outcome",),
        "Steps that the model learnt from, and steps excluded because the kernel took the CPU away during them",
        "events",
        "engine",
    ),
    _gauge(
        "trimtab_step_model_excluded_ratio",
        (),
        "Of all steps, the share excluded from fit and score",
        "excluded / (learnt + excluded)",
        "engine",
    ),
    _gauge(
        "trimtab_live_config_info",
        ("generation", "source", "scheduling_policy", "max_num_batched_tokens", "max_num_seqs"),
        "The live config in force, as labels",
        "1",
        "http",
    ),
    _gauge("trimtab_live_config_generation", (), "Generation of the live config in force", "number", "http"),
    _counter(
        "trimtab_live_config_changes_total",
        (),
        "Changes of the config in force, leases and their ends included",
        "events",
        "http",
    ),
    _gauge(
        "trimtab_slo_target_seconds",
        ("slo_class", "slo"),
        "Target in force for requests that arrive now",
        "x̄",
        "http",
    ),
    _gauge(
        "trimtab_process_start_time_seconds",
        (),
        "Start of the HTTP process: counters began at 0 then",
        "unix time",
        "http",
    ),
    _gauge(
        "vllm:num_requests_running",
        ("model_name",),
        "Same as trimtab_num_requests_running, for a gateway's picker",
        "count",
        "engine",
    ),
    _gauge(
        "vllm:num_requests_waiting",
        ("model_name",),
        "Same as trimtab_num_requests_waiting",
        "count",
        "engine",
    ),
    _gauge(
        "vllm:kv_cache_usage_perc", ("model_name",), "Same as trimtab_kv_cache_usage_ratio", "0 … 1", "engine"
    ),
    _gauge(
        "vllm:cache_config_info",
        ("model_name", "block_size", "num_gpu_blocks"),
        "KV pool, as labels",
        "1",
        "engine",
    ),
)

BY_NAME = {family.name: family for family in CATALOG}


def markdown() -> str:
    """`docs/metrics.md`, whole."""
    lines = [
        "# Metrics",
        "",
        "Everything on `GET /metrics` of an engine (serving port and admin port). This page is generated from",
        "`engine/trimtab_engine/server/metrics/catalog.py`; a test holds the page, the catalogue and the exposition together.",
        "",
        "Read SLO attainment from `trimtab_slo_requests_total`: the counts are exact. The unit is the request; a violation is",
        "counted the moment its deadline passes, whether or not the token ever comes. Histograms show shape: a p99 read from",
        "the two latency families is right within one bucket (8 %). What histograms learn too late stands in the two gauges",
        "`trimtab_oldest_waiting_seconds` and `trimtab_longest_token_gap_seconds`: alert on them.",
        "",
        "```promql",
        "# share of requests that violated their ITL target under each live config",
        'sum by (generation) (trimtab_slo_requests_total{slo="itl",outcome="violated"})',
        '  / sum by (generation) (trimtab_slo_requests_total{slo="itl"})',
        "# p99 of TTFT, for a picture",
        "histogram_quantile(0.99, sum by (le) (rate(trimtab_time_to_first_token_seconds_bucket[5m])))",
        "```",
        "",
        "Symbols: *a* arrival (body read), *s* first scheduled, *t₁* first and *tₙ* last token handed to the socket (for an",
        "answer that is not streamed: to its buffer), *f* end, *x̄* target in force at arrival. Generations: the one in force",
        "and the one before it are kept; a new one's series start at 0. Tokens that one chunk carries together count as one gap",
        "and zeros. Unit suffixes are base units. Series that describe creation times are off.",
        "",
        "| name | type | labels | meaning | formula | source | vLLM's name |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in CATALOG:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
        vllm = f"`{family.vllm}`" if family.vllm else "–"
        lines.append(
            f"| `{family.name}` | {family.kind} | {labels} | {family.meaning} | {family.formula} | {family.source} | {vllm} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
