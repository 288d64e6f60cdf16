"""Turns a simulation into what the tuner reads from a running service: one Reading, and verdicts in time blocks. Pure.

Called by `evaluator.py`. Requests are judged as the engine judges them (`server/metrics/ledger.py`): one verdict a request and
target, ITL violated by any gap, what was shed violates both. Where an engine exports histograms, numbers here are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_engine.core.live import Slo, SloClass
from trimtab_tuner.metrics.reading import SLOS, Block, Reading, SloCount
from trimtab_tuner.pace import by_arrival
from trimtab_tuner.result import RequestResult

from .simulate import Simulation

Floats = NDArray[np.float64]
# An engine answers 400 at the door to what can never fit, and judges it by no target.
_REFUSED = 400


@dataclass(frozen=True, slots=True)
class Verdict:
    """One request against its targets. `gaps_s` may be empty."""

    index: int
    slo_class: str
    arrival_s: float
    ttft_violated: bool
    itl_violated: bool
    ttft_s: float | None
    gaps_s: Floats


def verdicts(simulation: Simulation, slo: Slo, first: int = 0) -> list[Verdict]:
    """Of every request from number `first` on, in trace order."""
    return [
        _judge(request, slo)
        for request in simulation.result.requests[first:]
        if request.http_status != _REFUSED
    ]


def _judge(request: RequestResult, slo: Slo) -> Verdict:
    target = class_of(request.slo_class, slo)
    gaps: Floats = np.diff(np.asarray(request.token_times_s, dtype=np.float64))
    first_s = None if request.first_token_s is None else request.first_token_s - request.intended_s
    late_first = first_s is None or first_s > target.ttft_s
    return Verdict(
        request.index,
        target.name,
        request.intended_s,
        request.failed or late_first,
        request.failed or bool(gaps.size and gaps.max() > target.itl_s),
        first_s,
        gaps,
    )


def class_of(name: str, slo: Slo) -> SloClass:
    """Whose targets a request has; one of a class that the service does not know (any more) is in the default class."""
    found = slo.by_name(name) or slo.by_name(slo.default_class)
    assert found is not None, "an Slo's default class is one of its classes"
    return found


def blocks(
    judged: Sequence[Verdict],
    from_s: float,
    until_s: float,
    count: int,
    requests: Sequence[RequestResult] = (),
) -> tuple[Block, ...]:
    """Verdicts by the block of time in which the request arrived: two configs' blocks hold the same requests. `requests` are those
    that were judged; without them nothing is said of tokens."""
    violated, n = [0] * count, [0] * count
    width = max(until_s - from_s, 1e-9) / count
    for each in judged:
        block = min(count - 1, max(0, int((each.arrival_s - from_s) / width)))
        violated[block] += each.ttft_violated + each.itl_violated
        n[block] += 1
    pace = by_arrival(requests, from_s, until_s, count)
    return tuple(Block(bad, all_, *paced) for bad, all_, paced in zip(violated, n, pace, strict=True))


def reading(simulation: Simulation, judged: Sequence[Verdict], from_s: float = 0.0) -> Reading:
    """Everything that a window of a running service would tell. Times are seconds since the trace's first arrival."""
    requests = [simulation.result.requests[each.index] for each in judged]
    end_s = max([from_s, *(r.finish_s for r in requests if r.finish_s is not None)])
    wall_s = max(end_s - from_s, 1e-9)
    tallies = simulation.tallies
    steps = sum(t.decode_steps + t.mixed_steps for t in tallies)
    faults = sum(request.failed for request in requests)
    waits = [simulation.scheduling_delays_s[each.index] for each in judged]
    first = [each.ttft_s for each in judged if each.ttft_s is not None]
    in_vain = [r.finish_s - r.intended_s for r in requests if r.finish_s is not None and not r.token_times_s]
    prefills = [
        each.ttft_s - wait
        for each, wait in zip(judged, waits, strict=True)
        if each.ttft_s is not None and wait is not None
    ]
    decodes = [r.token_times_s[-1] - r.token_times_s[0] for r in requests if r.token_times_s]
    gaps = np.concatenate([each.gaps_s for each in judged]) if judged else np.array([])
    return Reading(
        generation=0,
        start_s=from_s,
        end_s=end_s,
        counts=_counts(judged),
        finished=float(len(requests) - faults),
        faults=float(faults),
        preemptions=float(sum(simulation.num_preemptions[each.index] for each in judged)),
        generation_tokens=float(sum(len(request.token_times_s) for request in requests)),
        prompt_tokens_computed=float(
            sum(r.asked_prompt_tokens - (r.cached_tokens or 0) for r in requests if r.token_times_s)
        ),
        steps={
            "decode": (float(sum(t.decode_steps for t in tallies)), sum(t.decode_s for t in tallies)),
            "mixed": (float(sum(t.mixed_steps for t in tallies)), sum(t.mixed_s for t in tallies)),
        },
        step_tokens=float(sum(t.tokens for t in tallies)),
        share_over_half_budget=sum(t.over_half_budget for t in tallies) / steps if steps else None,
        queue_mean_s=_mean([wait for wait in waits if wait is not None]),
        prefill_mean_s=_mean(prefills),
        decode_mean_s=_mean(decodes),
        ttft_p50_s=_quantile(first, 0.50),
        ttft_p99_s=_quantile(first, 0.99),
        itl_p50_s=_quantile(gaps, 0.50),
        itl_p99_s=_quantile(gaps, 0.99),
        itl_mean_s=_mean(gaps),
        # Of several replicas the fullest speaks, as it does where gauges are scraped.
        kv_p95=max((t.kv_p95(wall_s) for t in tallies), default=None),
        running_mean=max((t.running / wall_s for t in tallies), default=None),
        waiting_capacity_mean=max((t.waiting_capacity / wall_s for t in tallies), default=None),
        waiting_capacity_share=max((t.held_back_s / wall_s for t in tallies), default=None),
        waiting_deferred_mean=max((t.waiting_deferred / wall_s for t in tallies), default=None),
        oldest_waiting_s=max([*first, *in_vain], default=None),
        longest_gap_s=float(gaps.max()) if gaps.size else None,
        targets=max(1, len(tallies)),
    )


def _counts(judged: Sequence[Verdict]) -> dict[tuple[str, str], SloCount]:
    found: dict[tuple[str, str], list[int]] = {}
    for each in judged:
        for name, violated in zip(SLOS, (each.ttft_violated, each.itl_violated), strict=True):
            found.setdefault((each.slo_class, name), [0, 0])[violated] += 1
    return {key: SloCount(met, violated) for key, (met, violated) in found.items()}


def _mean(values: Sequence[float] | Floats) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _quantile(values: Sequence[float] | Floats, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None
