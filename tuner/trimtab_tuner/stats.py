"""Latency statistics of a replay: pooled quantiles with n, attainment and goodput over offered load, stalled requests.

`summarise` is what commands, report and study call. Definitions:

- TTFT = first token − *intended* send; E2E = last token − intended send; one sample a request.
- ITL = gap between two deliveries of one request, pooled; and, because pooling lets long outputs hide stalls, the longest gap
  of each request. TPOT = (E2E − TTFT) / (output tokens − 1), never compared with an ITL target.
- A request that failed, was rejected, truncated or timed out is +inf in TTFT, E2E and longest gap, and adds one gap of +inf (the
  token that never came). Requests cut off by stopping the measurement are left out, unless they had already missed a target.
- A TTFT target is missed when the first token is later, an ITL target when *any* gap is longer. Attainment = met / offered.
- Quantiles pool raw samples (numpy linear); a p99 over requests is refused below 300 requests, a p90 below 30.
- Intervals: 90 %, bootstrap over requests in time blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .burstiness import describe
from .quantiles import LEVEL, Blocks, Floats, Interval, interval, quantile, wilson
from .result import ReplayResult, RequestResult
from .slo import Slo

QUANTILES = (0.5, 0.9, 0.99)
MIN_SAMPLES = {0.5: 1, 0.9: 30, 0.99: 300}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Quantiles in seconds. None = not shown, with the reason in `note`; +inf = among failures. `n` counts samples."""

    n: int
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None
    intervals: dict[str, Interval] = field(default_factory=dict)
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """`met` of `offered` requests. The interval is the wider of Wilson (independent requests) and block bootstrap."""

    met: int
    offered: int
    interval: Interval | None

    @property
    def fraction(self) -> float | None:
        """met / offered; None when nothing was offered."""
        return self.met / self.offered if self.offered else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one offered request fared against its own targets; for tests over violated requests in time blocks."""

    index: int
    intended_s: float
    ttft_met: bool
    itl_met: bool

    @property
    def met(self) -> bool:
        """Both targets."""
        return self.ttft_met and self.itl_met


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that is said of one replay (or one class of it)."""

    slo: Slo
    n_due: int
    n_ok: int
    n_failed: int
    n_cancelled: int
    failures: dict[str, int]
    duration_s: float
    ttft: Distribution
    itl: Distribution
    max_gap: Distribution
    tpot: Distribution
    e2e: Distribution
    ttft_attainment: Share
    itl_attainment: Share
    attainment: Share
    stalled_requests: int
    goodput_rps: float
    output_tokens_per_s: float
    good_output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    deliveries: int  # chunks with at least one new token
    length_mismatches: int
    send_error: Distribution
    burstiness_sent: dict[str, float | None] | None
    block_s: float
    by_class: dict[str, Summary] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON; +inf becomes the text "inf"."""
        data = _plain(self)
        assert isinstance(data, dict), "a dataclass becomes an object"
        return data | {"interval_level": LEVEL, "quantile_method": "numpy linear over pooled samples"}


def summarise(
    result: ReplayResult, *, slo: Slo | None = None, block_s: float | None = None, seed: int = 0
) -> Summary:
    """Statistics of a replay. `slo` judges by other targets than the result's own; `block_s` sets the bootstrap's blocks."""
    slo = result.slo if slo is None else slo
    span_s = max((r.intended_s for r in result.requests), default=0.0)
    block_s = default_block_s(span_s) if block_s is None else block_s
    whole = _summary(result.requests, slo, block_s, seed)
    classes = sorted({request.slo_class for request in result.requests})
    if len(classes) < 2:
        return whole
    by_class = {
        name: _summary([r for r in result.requests if r.slo_class == name], slo, block_s, seed)
        for name in classes
    }
    return replace(whole, by_class=by_class)


def default_block_s(span_s: float) -> float:
    """Twenty blocks over the arrivals, of at least one second."""
    return max(1.0, span_s / 20.0)


def outcomes(result: ReplayResult, slo: Slo | None = None) -> list[Outcome]:
    """Offered requests against their targets, in trace order. Cut-off requests appear only if already late."""
    slo = result.slo if slo is None else slo
    return [outcome for request in result.requests if (outcome := judge(request, slo)) is not None]


def judge(request: RequestResult, slo: Slo) -> Outcome | None:
    """Against its class's targets; None for a cut-off request that had not missed any yet."""
    target = slo.of(request.slo_class)
    ttft = ttft_s(request)
    ttft_met = ttft is not None and ttft <= target.ttft_s
    longest = max_gap_s(request)
    itl_met = longest is None or longest <= target.itl_s
    if request.status == "cancelled":
        assert request.finish_s is not None, "a cut-off request knows when"
        waited = request.finish_s - (
            request.token_times_s[-1] if request.token_times_s else request.intended_s
        )
        late_first = waited > target.ttft_s if ttft is None else not ttft_met
        late_next = bool(request.token_times_s) and (not itl_met or waited > target.itl_s)
        if not (late_first or late_next):
            return None
        return Outcome(request.index, request.intended_s, not late_first, not late_next)
    return Outcome(request.index, request.intended_s, ttft_met, itl_met)


def ttft_s(request: RequestResult) -> float | None:
    """First token − intended send; +inf for a failure, None for a cut-off request without a token."""
    if request.failed:
        return math.inf
    return None if request.first_token_s is None else request.first_token_s - request.intended_s


def e2e_s(request: RequestResult) -> float | None:
    """Last token − intended send; +inf for a failure, None for a cut-off request."""
    if request.failed:
        return math.inf
    if request.status == "cancelled" or not request.token_times_s:
        return None
    return request.token_times_s[-1] - request.intended_s


def gaps_s(request: RequestResult) -> Floats:
    """Gaps between deliveries; a failure of a request with more than one token to come adds one +inf."""
    gaps: Floats = np.diff(np.asarray(request.token_times_s, dtype=np.float64))
    if request.failed and request.asked_output_tokens > 1:
        return np.append(gaps, math.inf)
    return gaps


def max_gap_s(request: RequestResult) -> float | None:
    """Longest gap; +inf for a failure, None when there is no gap."""
    if request.failed:
        return math.inf
    gaps = gaps_s(request)
    return float(gaps.max()) if gaps.size else None


def tpot_s(request: RequestResult) -> float | None:
    """Mean time per output token after the first; None for fewer than two tokens, +inf for a failure."""
    if request.failed:
        return math.inf
    if (
        request.status != "ok"
        or request.output_tokens is None
        or request.output_tokens < 2
        or not request.token_times_s
    ):
        return None
    return (request.token_times_s[-1] - request.token_times_s[0]) / (request.output_tokens - 1)


def distribution(
    samples: Sequence[float] | Floats,
    request_of_sample: Sequence[int] | None,
    blocks: Blocks | None,
    unit: str,
    min_samples: dict[float, int] | None = None,
) -> Distribution:
    """Quantiles of one kind of sample. `unit` names what is counted in the note ("requests", "gaps")."""
    values = np.asarray(samples, dtype=np.float64)
    limits = MIN_SAMPLES if min_samples is None else min_samples
    if not values.size:
        return Distribution(0, None, None, None, None, note=f"no {unit}")
    shown = {q: quantile(values, q) for q in QUANTILES if values.size >= limits[q]}
    refused = [q for q in QUANTILES if q not in shown]
    note = "; ".join(f"p{q * 100:g} needs {limits[q]} {unit}: not shown" for q in refused) or None
    found: dict[str, Interval] = {}
    if blocks is not None and request_of_sample is not None and shown:
        of_sample = np.asarray(request_of_sample, dtype=np.int64)
        replicates = blocks.quantile_replicates(values, of_sample, list(shown))
        for column, q in enumerate(shown):
            around = interval(replicates[:, column])
            if around is not None:
                found[f"p{q * 100:g}"] = around
    return Distribution(
        int(values.size), shown.get(0.5), shown.get(0.9), shown.get(0.99), float(values.max()), found, note
    )


def _summary(requests: Sequence[RequestResult], slo: Slo, block_s: float, seed: int) -> Summary:
    judged = [judge(request, slo) for request in requests]
    offered = [outcome for outcome in judged if outcome is not None]
    blocks = Blocks.draw([request.intended_s for request in requests], block_s, seed)
    offered_blocks = Blocks.draw([outcome.intended_s for outcome in offered], block_s, seed)
    finished = [request for request in requests if request.status == "ok"]
    good = {outcome.index for outcome in offered if outcome.met}
    ends = [request.finish_s for request in requests if request.finish_s is not None]
    start_s = min((request.intended_s for request in requests), default=0.0)
    duration_s = max(max(ends, default=0.0) - start_s, 1e-9)
    tokens = sum(request.output_tokens or len(request.token_times_s) for request in requests)
    good_tokens = sum(request.output_tokens or 0 for request in finished if request.index in good)
    errors = [r.sent_s - r.intended_s for r in requests if r.sent_s is not None]
    sent = sorted(request.sent_s for request in requests if request.sent_s is not None)
    failures: dict[str, int] = {}
    for request in requests:
        if request.failed:
            failures[request.status] = failures.get(request.status, 0) + 1

    def per_request(measure: Any) -> Distribution:
        taken = [(value, number) for number, r in enumerate(requests) if (value := measure(r)) is not None]
        return distribution(
            [value for value, _ in taken], [number for _, number in taken], blocks, "requests"
        )

    pooled = [(gap, number) for number, request in enumerate(requests) for gap in gaps_s(request).tolist()]
    stalled = sum(
        1
        for r in requests
        if not r.failed and (longest := max_gap_s(r)) is not None and longest > slo.of(r.slo_class).itl_s
    )
    return Summary(
        slo=slo,
        n_due=len(requests),
        n_ok=len(finished),
        n_failed=sum(failures.values()),
        n_cancelled=sum(request.status == "cancelled" for request in requests),
        failures=failures,
        duration_s=duration_s,
        ttft=per_request(ttft_s),
        itl=distribution([gap for gap, _ in pooled], [number for _, number in pooled], blocks, "gaps"),
        max_gap=per_request(max_gap_s),
        tpot=per_request(tpot_s),
        e2e=per_request(e2e_s),
        ttft_attainment=_share([outcome.ttft_met for outcome in offered], offered_blocks),
        itl_attainment=_share([outcome.itl_met for outcome in offered], offered_blocks),
        attainment=_share([outcome.met for outcome in offered], offered_blocks),
        stalled_requests=stalled,
        goodput_rps=len(good) / duration_s,
        output_tokens_per_s=tokens / duration_s,
        good_output_tokens_per_s=good_tokens / duration_s,
        prompt_tokens=sum(request.prompt_tokens or 0 for request in requests),
        cached_tokens=sum(request.cached_tokens or 0 for request in requests),
        output_tokens=tokens,
        deliveries=sum(len(request.token_times_s) for request in requests),
        length_mismatches=sum(
            (r.prompt_tokens not in (None, r.asked_prompt_tokens)) or r.output_tokens != r.asked_output_tokens
            for r in finished
        ),
        # Sends are the client's own samples: how punctual it was, with no minimum to show.
        send_error=distribution(errors, None, None, "sends", {0.5: 1, 0.9: 1, 0.99: 1}),
        burstiness_sent=describe(sent) if sent else None,
        block_s=block_s,
    )


def _share(met: Sequence[bool], blocks: Blocks | None) -> Share:
    hits = np.asarray(met, dtype=np.bool_)
    if not hits.size:
        return Share(0, 0, None)
    around = wilson(int(hits.sum()), int(hits.size))
    if blocks is not None:
        drawn = interval(blocks.share_replicates(hits))
        if drawn is not None:
            around = Interval(min(around.low, drawn.low), max(around.high, drawn.high))
    return Share(int(hits.sum()), int(hits.size), around)


def _plain(value: object) -> object:
    if isinstance(value, Slo):
        return value.to_json()
    if isinstance(value, float):
        return "inf" if math.isinf(value) else round(value, 6)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Share):
        return {
            "met": value.met,
            "offered": value.offered,
            "fraction": _plain(value.fraction),
            "interval": _plain(value.interval),
        }
    names = getattr(type(value), "__slots__", None)
    if names is not None and hasattr(type(value), "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in names}
    return value
