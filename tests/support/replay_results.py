"""Builders of replay results for tests of statistics, tables and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab_tuner.result import ReplayResult, RequestResult, Status
from trimtab_tuner.slo import Slo


def request_result(
    index: int,
    intended_s: float = 0.0,
    ttft_s: float | None = 0.1,
    gaps_s: Sequence[float] = (0.02, 0.02),
    status: Status = "ok",
    **other: Any,
) -> RequestResult:
    """A request that got its first token `ttft_s` after the intended send and further ones after `gaps_s`."""
    times = [] if ttft_s is None else [intended_s + ttft_s]
    for gap in gaps_s if times else ():
        times.append(times[-1] + gap)
    fields: dict[str, Any] = {
        "asked_prompt_tokens": 8,
        "asked_output_tokens": len(gaps_s) + 1,
        "sent_s": intended_s,
        "first_token_s": times[0] if times else None,
        "token_times_s": times,
        "finish_s": times[-1] if times else intended_s,
        "prompt_tokens": 8,
        "output_tokens": len(times),
        "http_status": 200,
    }
    return RequestResult(index=index, intended_s=intended_s, status=status, **(fields | other))


def replay_result(requests: Sequence[RequestResult], slo: Slo | None = None, **meta: Any) -> ReplayResult:
    """A result with enough provenance for a report."""
    known = {
        "url": "http://127.0.0.1:1",
        "trace": "made here",
        "trace_hash": "0" * 16,
        "lengths_hash": "1" * 16,
        "trace_changes": [],
        "mode": "recorded",
        "seed": 0,
        "n": len(requests),
        "span_s": max((r.intended_s for r in requests), default=0.0),
        "started": "2026-01-01T00:00:00+00:00",
        "elapsed_s": 1.0,
        "interrupted": False,
        "model": "tiny",
        "live_config": None,
        "live_config_after": None,
        "burstiness_intended": {
            "cv": 1.0,
            "dispersion_1s": 1.0,
            "dispersion_10s": None,
            "dispersion_60s": None,
        },
        "versions": {"trimtab": "0", "python": "3"},
    }
    return ReplayResult(known | meta, slo or Slo(1.0, 0.1), tuple(requests))
