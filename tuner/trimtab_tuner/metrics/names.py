"""The one table of metric names: what each runtime calls the numbers that the tuner reads.

Called by `reading`. None: the runtime does not export it, and what needs it is Unknown there. A name is the one seen in
the exposition (counters with `_total`, histograms without a suffix).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Metric names of one runtime. Durations in seconds."""

    process_start: str
    ttft: str
    itl: str
    e2e: str
    queue_time: str
    prefill_time: str
    decode_time: str
    running: str
    waiting: str
    waiting_by_reason: str
    kv_usage: str
    prompt_tokens: str
    prompt_tokens_cached: str
    generation_tokens: str
    preemptions: str
    finished: str  # label finished_reason
    slo_requests: str | None = None  # labels slo_class, slo, outcome, generation
    generation: str | None = None  # gauge: number of the live config in force
    rejections: str | None = None
    client_aborts: str | None = None
    recomputed_tokens: str | None = None
    oldest_waiting: str | None = None
    longest_gap: str | None = None
    step_tokens: str | None = None
    step_duration: str | None = None  # label kind = decode | mixed
    schedule_duration: str | None = None
    budget_used: str | None = None  # histogram of used / budget
    last_step: str | None = None

    def all(self) -> tuple[str, ...]:
        """Every name this runtime has, for queries that ask for nothing else."""
        values = (getattr(self, field) for field in self.__dataclass_fields__)
        return tuple(value for value in values if value is not None)


TRIMTAB = Names(
    process_start="trimtab_process_start_time_seconds",
    ttft="trimtab_time_to_first_token_seconds",
    itl="trimtab_inter_token_latency_seconds",
    e2e="trimtab_e2e_request_latency_seconds",
    queue_time="trimtab_request_queue_time_seconds",
    prefill_time="trimtab_request_prefill_time_seconds",
    decode_time="trimtab_request_decode_time_seconds",
    running="trimtab_num_requests_running",
    waiting="trimtab_num_requests_waiting",
    waiting_by_reason="trimtab_num_requests_waiting_by_reason",
    kv_usage="trimtab_kv_cache_usage_ratio",
    prompt_tokens="trimtab_prompt_tokens_total",
    prompt_tokens_cached="trimtab_prompt_tokens_cached_total",
    generation_tokens="trimtab_generation_tokens_total",
    preemptions="trimtab_preemptions_total",
    finished="trimtab_requests_total",
    slo_requests="trimtab_slo_requests_total",
    generation="trimtab_live_config_generation",
    rejections="trimtab_rejections_total",
    client_aborts="trimtab_client_aborts_total",
    recomputed_tokens="trimtab_recomputed_tokens_total",
    oldest_waiting="trimtab_oldest_waiting_seconds",
    longest_gap="trimtab_longest_token_gap_seconds",
    step_tokens="trimtab_step_tokens",
    step_duration="trimtab_step_duration_seconds",
    schedule_duration="trimtab_schedule_duration_seconds",
    budget_used="trimtab_budget_used_ratio",
    last_step="trimtab_engine_last_step_timestamp_seconds",
)

# vLLM counts no request against an SLO and labels nothing by generation: there the tuner can show and diagnose, not decide.
VLLM = Names(
    process_start="process_start_time_seconds",
    ttft="vllm:time_to_first_token_seconds",
    itl="vllm:inter_token_latency_seconds",
    e2e="vllm:e2e_request_latency_seconds",
    queue_time="vllm:request_queue_time_seconds",
    prefill_time="vllm:request_prefill_time_seconds",
    decode_time="vllm:request_decode_time_seconds",
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    waiting_by_reason="vllm:num_requests_waiting_by_reason",
    kv_usage="vllm:kv_cache_usage_perc",
    prompt_tokens="vllm:prompt_tokens_total",
    prompt_tokens_cached="vllm:prompt_tokens_cached_total",
    generation_tokens="vllm:generation_tokens_total",
    preemptions="vllm:num_preemptions_total",
    finished="vllm:request_success_total",
)

RUNTIMES: dict[str, Names] = {"trimtab": TRIMTAB, "vllm": VLLM}
