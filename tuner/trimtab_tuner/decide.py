"""Is a candidate better than the incumbent? A sequential test over violated requests in paired time blocks. Pure.

Called by `run` and, while a candidate is still being measured, by `guardrails`. Knows nothing of metrics or of engines:
it sees two lists of blocks, paired in time: the same slice of the same trace under both configs, or neighbouring slices
of live traffic in random order.

Why blocks: gaps of one step are one number, and requests of one stall share its cause; tests that take them as
independent call an A/A run "better" far more often than they say. Why signs: if both arms are the same, which of a
pair had more violations is a coin toss, whatever the traffic. So for the difference d of each pair and any rate r,
exp(r·d) / cosh(r·d) has mean 1 (de la Peña 1999, symmetric variables), the running product is a martingale, and by
Ville's inequality it ever exceeds 1/alpha with probability at most alpha. Hence one may look after every block and stop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trimtab_tuner.metrics.reading import Block

Verdict = Literal["better", "worse", "inconclusive"]

# Rates of the mixture, per violated request: from "sums matter" to "signs matter". Any fixed choice keeps the guarantee.
RATES = (0.25, 0.5, 1.0, 2.0)
# The same per share of a mean block's tokens.
PACE_RATES = (4.0, 16.0, 64.0, 256.0)
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the blocks say, with everything needed to check it. Fractions are violated verdicts per judged request."""

    verdict: Verdict
    reason: str
    n_incumbent: int
    n_candidate: int
    violated_incumbent: int
    violated_candidate: int
    blocks: int  # paired
    informative: int  # of those: the arms differ
    difference: float  # incumbent fraction − candidate fraction; above 0: the candidate violates less
    low: float  # 95 % block-bootstrap interval of the difference
    high: float
    evidence_better: float  # e-value: accepted at 1/alpha
    evidence_worse: float
    alpha: float
    seed: int

    def to_json(self) -> dict[str, object]:
        """Plain form for the audit trail."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def paired_differences(
    incumbent: Sequence[Block], candidate: Sequence[Block], *, same_requests: bool = True
) -> tuple[float, ...]:
    """Violated verdicts saved by the candidate in each pair of blocks.

    With the same requests in both (a replay) counts are compared as they are; else as shares, times the smaller number of
    requests, and a pair with an empty side says nothing. Swapping the arms only changes the sign, which is all the test
    relies on.
    """
    if same_requests:
        return tuple(float(a.violated - b.violated) for a, b in zip(incumbent, candidate, strict=False))
    return tuple(
        (a.violated / a.n - b.violated / b.n) * min(a.n, b.n)
        for a, b in zip(incumbent, candidate, strict=False)
        if a.n and b.n
    )


def evidence(differences: Sequence[float], rates: Sequence[float] = RATES) -> float:
    """E-value against "the arms are the same": mean 1 then, and above 1/alpha ever with probability ≤ alpha.

    Large when the differences are mostly positive. Order does not matter.
    """
    logs = [sum(_log_bet(rate * d) for d in differences) for rate in rates]
    top = max(logs)
    if top > 600:
        return math.inf
    return sum(math.exp(value) for value in logs) / len(rates)


def _log_bet(x: float) -> float:
    """log(exp(x) / cosh(x)), stable for large |x|."""
    return x - abs(x) - math.log1p(math.exp(-2 * abs(x))) + math.log(2)


def compare(
    incumbent: Sequence[Block],
    candidate: Sequence[Block],
    *,
    min_requests: int,
    alpha: float = 0.05,
    same_requests: bool = True,
    seed: int = 0,
) -> Comparison:
    """The decision. "better" and "worse" need `min_requests` judged in each arm and an e-value of 1/alpha."""
    pairs = min(len(incumbent), len(candidate))
    a, b = incumbent[:pairs], candidate[:pairs]
    n_a, n_b = sum(x.n for x in a), sum(x.n for x in b)
    v_a, v_b = sum(x.violated for x in a), sum(x.violated for x in b)
    differences = paired_differences(a, b, same_requests=same_requests)
    better, worse = evidence(differences), evidence([-d for d in differences])
    low, high = _interval(a, b, seed)
    difference = v_a / max(n_a, 1) - v_b / max(n_b, 1)
    verdict: Verdict = "inconclusive"
    missed = f"{v_b} targets missed in {n_b} requests against {v_a} in {n_a}"  # a request may miss two
    if min(n_a, n_b) < min_requests:
        reason = f"{min(n_a, n_b)} requests in the smaller arm, {min_requests} are needed"
    elif better >= 1 / alpha and difference > 0:
        verdict, reason = "better", f"{missed}, e-value {better:.3g}"
    elif worse >= 1 / alpha and difference < 0:
        verdict, reason = "worse", f"{missed}, e-value {worse:.3g}"
    else:
        reason = f"{missed} can be chance: e-value {max(better, worse):.3g} of {1 / alpha:.3g} needed"
    return Comparison(
        verdict=verdict,
        reason=reason,
        n_incumbent=n_a,
        n_candidate=n_b,
        violated_incumbent=v_a,
        violated_candidate=v_b,
        blocks=pairs,
        informative=sum(d != 0 for d in differences),
        difference=difference,
        low=low,
        high=high,
        evidence_better=better,
        evidence_worse=worse,
        alpha=alpha,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class Throughput:
    """Generated tokens a second of both arms over the blocks that both have. `loss` is 1 − candidate / incumbent, of 1.

    "lost": more than `limit` is lost, and that it is less than the incumbent's is beyond chance. "unknown": an arm has no tokens or no
    time. Both are reasons to keep the incumbent.
    """

    verdict: Literal["kept", "lost", "unknown"]
    reason: str
    limit: float
    incumbent_per_s: float | None
    candidate_per_s: float | None
    loss: float | None
    low: float | None  # 95 % block-bootstrap interval of the loss
    high: float | None
    evidence: float  # e-value for a loss
    blocks: int

    def to_json(self) -> dict[str, object]:
        """Plain form for the audit trail."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def throughput(
    incumbent: Sequence[Block],
    candidate: Sequence[Block],
    *,
    limit: float,
    alpha: float = 0.05,
    seed: int = 0,
) -> Throughput:
    """Whether the candidate costs more than `limit` of the incumbent's tokens a second.

    A pair of blocks is a pair of rates, and if both arms are the same, which is the slower one is a coin toss: the same martingale as
    in `evidence`, over what each would have generated in the other's time. So noise alone ends at "lost" with probability alpha at
    most. It errs like this: a loss that is there but smaller than `limit` may be called "lost" when the estimate is above it, and one
    that cannot be told from noise is "kept". Told apart from nothing, not from `limit`: where latency improved beyond chance already,
    a loss that is certain, and by its best estimate too large, is the owner's business; one that nobody can see is not.
    """
    table = np.array(
        [(x.tokens, x.seconds, y.tokens, y.seconds) for x, y in zip(incumbent, candidate, strict=False)],
        dtype=np.float64,
    ).reshape(-1, 4)
    sums = table.sum(axis=0)
    if not (sums[0] > 0 and sums[1] > 0 and sums[3] > 0):
        reason = "its tokens a second are not known"
        return Throughput("unknown", reason, limit, None, None, None, None, None, 0.0, len(table))
    rates = float(sums[0] / sums[1]), float(sums[2] / sums[3])
    loss = 1 - rates[1] / rates[0]
    ahead, behind = table[:, 0] * table[:, 3], table[:, 2] * table[:, 1]  # each at the other's time
    scale = float((ahead + behind).sum()) / 2 / len(table)
    slower = evidence(((ahead - behind) / scale).tolist(), PACE_RATES) if scale > 0 else 0.0
    low, high = _loss_interval(table, seed)
    lost = loss > limit and slower >= 1 / alpha
    reason = (
        f"its {rates[1]:.1f} tokens a second are {abs(loss):.1%} {'below' if loss >= 0 else 'above'} the incumbent's "
        f"{rates[0]:.1f} (loss, 95 % interval: {low:.1%} to {high:.1%}, e-value {slower:.3g}); {limit:.1%} may be lost"
    )
    return Throughput("lost" if lost else "kept", reason, limit, *rates, loss, low, high, slower, len(table))


def _loss_interval(table: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """Percentile interval of the loss, resampling pairs of blocks: (n, 4) tokens and seconds of both arms."""
    picks = np.random.default_rng(seed).integers(0, len(table), size=(RESAMPLES, len(table)))
    sums = table[picks].sum(axis=1)
    sums = sums[(sums[:, 0] > 0) & (sums[:, 1] > 0) & (sums[:, 3] > 0)]
    losses = 1 - (sums[:, 2] * sums[:, 1]) / (sums[:, 3] * sums[:, 0])
    low, high = np.quantile(losses, (0.025, 0.975))
    return float(low), float(high)


def _interval(a: Sequence[Block], b: Sequence[Block], seed: int) -> tuple[float, float]:
    """Percentile interval of the difference in violated fractions, resampling pairs of blocks."""
    if not a:
        return -math.inf, math.inf
    table = np.array(
        [(x.violated, x.n, y.violated, y.n) for x, y in zip(a, b, strict=True)], dtype=np.float64
    )
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(table), size=(RESAMPLES, len(table)))
    sums = table[picks].sum(axis=1)  # (RESAMPLES, 4)
    values = sums[:, 0] / np.maximum(sums[:, 1], 1) - sums[:, 2] / np.maximum(sums[:, 3], 1)
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
