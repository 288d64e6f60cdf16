"""Which leaving pods serve on until the next one is ready, so that a drain of a service's only pod fails no request. Pure.

A pod that is evicted or deleted gets its successor only then: no surge covers the time that this one needs to start. kube-proxy goes
on sending requests to a leaving pod while nobody else is ready, so the engine only has to take them. It does as long as the
operator holds it, by a lease; whoever dies, it lapses. Never when the next one waits for this one's place. Used by `plan.cluster`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trimtab_operator.plan import pods

LEASE_S = 15.0  # what an engine is given at a time
RENEW_EVERY_S = 5.0


def to_hold(
    listed: Iterable[Mapping[str, Any]], wanted: int, farewell_s: float, now: float
) -> dict[str, float]:
    """Names of leaving pods → seconds for which they shall serve on from now.

    wanted: replicas. farewell_s: what a pod needs of its grace period after a hold, to leave and to finish what it took.
    """
    all_of_them = [pod for pod in listed if not pods.over(pod)]
    standing = [pod for pod in all_of_them if not pods.leaving(pod)]
    if wanted < 1 or any(map(pods.is_ready, standing)) or not any(map(pods.scheduled, standing)):
        return {}
    held: dict[str, float] = {}
    for pod in filter(pods.serves_to_its_end, all_of_them):
        left_s = pods.unix(pod["metadata"]["deletionTimestamp"]) - farewell_s - now
        if left_s > 0:
            held[pod["metadata"]["name"]] = round(min(LEASE_S, left_s), 3)
    return held
